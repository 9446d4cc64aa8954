"""What is counted against a limit, and when a limit counts as passed."""

import contextlib
import itertools
import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.sandbox import accounting, supervisor
from perilune.swarm.sandbox.accounting import (
    UNCOUNTABLE,
    Process,
    find_trees,
    folder_bytes,
    kernel_bytes,
    private_bytes,
    read_processes,
    scratch_bytes,
    unlinked_bytes,
)
from perilune.swarm.sandbox.contract import Limits
from perilune.swarm.sandbox.supervisor import OWN_PROCESSES, Watch, look_at_disk, look_at_processes

LIMITS = Limits(memory_bytes=1000, processes=10, cpu_seconds=5)


def watch(tmp_path: Path, reports: list[str], **changes) -> Watch:
    options = {
        "root": 1,
        "limits": LIMITS,
        "folders": (tmp_path,),
        "most_disk_bytes": 1 << 20,
        "exceeded": reports.append,
    }
    return Watch(**{**options, **changes})


@given(st.dictionaries(st.integers(2, 40), st.integers(1, 40)))
def test_a_tree_is_everything_whose_line_of_parents_meets_the_root(parents: dict[int, int]) -> None:
    processes = {n: Process(parent=p, cpu_seconds=0, resident_bytes=0) for n, p in parents.items() if p < n}

    def descends(number: int, root: int) -> bool:
        while number in processes and number != root:
            number = processes[number].parent
        return number == root

    for root, tree in find_trees(range(1, 41), processes).items():
        expected = {number for number in processes if descends(number, root)} if root in processes else set()
        assert set(tree) == expected
        assert len(tree) == len(set(tree))
        assert tree[:1] in ([], [root])


def test_a_process_is_found_with_its_memory(tmp_path: Path) -> None:
    program = "import sys; kept = bytearray(30 << 20); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout and child.stdout.readline()
        processes = read_processes()
        assert processes[child.pid].parent == os.getpid()
        assert child.pid in find_trees([os.getpid()], processes)[os.getpid()]
        assert 30 << 20 <= private_bytes([child.pid]) <= processes[child.pid].resident_bytes + (1 << 20)
        child.communicate()


def test_the_scratch_folders_of_the_host_are_nobodys(tmp_path: Path) -> None:
    """The first process of a tree is outside, where /tmp is everybody's."""
    assert scratch_bytes([os.getpid()]) == 0
    assert scratch_bytes([]) == 0


def test_a_folder_counts_blocks_once_and_follows_nothing(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    empty = folder_bytes(tmp_path)
    (tmp_path / "deep" / "er" / "f").write_bytes(os.urandom(1 << 20))
    once = folder_bytes(tmp_path)
    assert 1 << 20 <= once - empty <= (1 << 20) + 16384
    os.link(tmp_path / "deep" / "er" / "f", tmp_path / "again")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "system").symlink_to("/usr")
    assert folder_bytes(tmp_path) - once <= 16384
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    assert folder_bytes(tmp_path) - once <= 32768
    assert folder_bytes(tmp_path / "missing") == 0


def test_many_empty_files_are_not_free(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / str(number)).touch()
    assert folder_bytes(tmp_path) >= 200 * accounting.INODE_BYTES


def test_what_cannot_be_counted_is_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):  # longer than a path may be
        os.mkdir("d" * 250, dir_fd=place)
        deeper = os.open("d" * 250, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = deeper
    os.close(place)
    try:
        assert folder_bytes(tmp_path) == UNCOUNTABLE
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / ("d" * 250))], check=True)
    assert folder_bytes(tmp_path) < UNCOUNTABLE

    def closed(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(accounting, "open_raw", closed)
    assert folder_bytes(tmp_path) == UNCOUNTABLE


def test_files_without_a_name_are_counted_while_open(tmp_path: Path) -> None:
    before = unlinked_bytes([os.getpid()])
    with open(tmp_path / "f", "wb") as file:
        file.write(os.urandom(1 << 20))
        file.flush()
        (tmp_path / "f").unlink()
        assert unlinked_bytes([os.getpid()]) - before >= 1 << 20
    assert unlinked_bytes([os.getpid()]) <= before


def test_what_the_kernel_keeps_for_a_process_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def now() -> int:
        return kernel_bytes([os.getpid()], read_processes())

    monkeypatch.setattr(accounting, "MANY_DESCRIPTORS", 1 << 20)
    few = now()
    monkeypatch.setattr(accounting, "MANY_DESCRIPTORS", 0)
    with contextlib.ExitStack() as kept:
        before = now()
        for end in itertools.chain(*(socket.socketpair() for _ in range(20))):
            kept.enter_context(end)
        assert now() - before == 40 * accounting.BUFFER_BYTES
        server = kept.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = kept.enter_context(socket.create_connection(server.getsockname()))
        kept.enter_context(server.accept()[0])
        silent = now()
        sender.sendall(bytes(100_000))
        assert now() - silent >= 100_000
    monkeypatch.setattr(accounting, "LARGE_SPACE", 0)
    assert now() - before >= 100_000  # this process has page tables of that size
    monkeypatch.undo()
    assert now() == few  # few descriptors and no large space: not worth a look


def test_memory_that_processes_share_is_not_on_disk() -> None:
    before = unlinked_bytes([os.getpid()])
    with mmap.mmap(-1, 4 << 20) as shared:
        shared.write(b"x" * (4 << 20))
        assert unlinked_bytes([os.getpid()]) - before < 4 << 20


@pytest.mark.parametrize(
    "own,memory,exact,cpu,expected",
    [
        (10, 100, 100, 1.0, []),
        (11, 100, 100, 1.0, ["processes"]),
        (1, 2000, 1001, 1.0, ["memory"]),
        (1, 2000, 999, 1.0, []),  # shared pages, counted once for each
        (1, 900, 5000, 1.0, []),  # the exact sum is not asked for
        (1, 100, 100, 5.1, ["cpu time"]),
    ],
)
def test_a_limit_is_reported_when_it_is_passed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: int,
    memory: int,
    exact: int,
    cpu: float,
    expected: list[str],
) -> None:
    many = own + OWN_PROCESSES
    found = {1: Process(parent=0, cpu_seconds=cpu, resident_bytes=memory)}
    found |= {number: Process(parent=1, cpu_seconds=0, resident_bytes=0) for number in range(2, many + 1)}
    monkeypatch.setattr(supervisor, "read_processes", lambda: found)
    monkeypatch.setattr(supervisor, "private_bytes", lambda tree: exact)
    monkeypatch.setattr(supervisor, "scratch_bytes", lambda tree: 0)
    monkeypatch.setattr(supervisor, "kernel_bytes", lambda tree, processes: 0)
    reports: list[str] = []
    look_at_processes([watch(tmp_path, reports)])
    assert reports == expected


def test_the_supervisor_looks_more_often_when_a_limit_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "scratch_bytes", lambda tree: 0)
    monkeypatch.setattr(supervisor, "kernel_bytes", lambda tree, processes: 0)
    for memory, expected in ((100, supervisor.CALM), (600, supervisor.QUICK)):
        found = {1: Process(parent=0, cpu_seconds=0, resident_bytes=memory)}
        monkeypatch.setattr(supervisor, "read_processes", lambda found=found: found)
        assert look_at_processes([watch(tmp_path, [], since=time.monotonic() - 100)]) == expected
    assert look_at_processes([watch(tmp_path, [])]) == supervisor.QUICK


def test_all_that_can_be_written_to_counts_together(tmp_path: Path) -> None:
    reports: list[str] = []
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(os.urandom(600_000))
    watched = watch(tmp_path, reports, root=os.getpid(), folders=(tmp_path / "a",))
    look_at_disk([watched])
    assert reports == []
    watched.folders += (tmp_path / "b",)
    look_at_disk([watched])
    assert reports == ["disk"]


def test_a_grown_workspace_is_reported_once(tmp_path: Path) -> None:
    reports: list[str] = []
    watched = watch(tmp_path, reports, root=os.getpid())
    look_at_disk([watched])
    assert reports == []
    (tmp_path / "f").write_bytes(os.urandom(2 << 20))
    look_at_disk([watched])
    look_at_disk([watched])
    assert reports == ["disk"]


def test_patrols_end_when_there_is_nothing_to_watch_and_begin_again(tmp_path: Path) -> None:
    looks: list[int] = []
    patrol = supervisor.Patrol("test", lambda watches: looks.append(len(watches)) or 0.001)
    for _ in range(2):
        one = watch(tmp_path, [])
        before = len(looks)
        patrol.add(one)
        until = time.monotonic() + 20
        while len(looks) < before + 3 and time.monotonic() < until:
            time.sleep(0.005)
        patrol.remove(one)
        assert len(looks) >= before + 3
