"""A run as its caller sees it: words in, bytes and an exit code out, and a refusal where there is no sandbox."""

import asyncio
import os
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest

from perilune.swarm.sandbox import Limits, Mount, SandboxUnavailable, bubblewrap, open_sandbox, python_argv
from perilune.swarm.sandbox.process import Output

LIMITS = Limits(wall_seconds=60)
pytestmark = [pytest.mark.needs_tool("bwrap"), pytest.mark.usefixtures("working_sandbox")]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def run(workspace: Path, *argv: str, mounts: tuple[Mount, ...] = (), **options):
    return asyncio.run(open_sandbox(workspace, mounts=mounts).run(argv, **{"limits": LIMITS, **options}))


def test_output_input_and_exit_code_pass_through(workspace: Path) -> None:
    done = run(workspace, "sh", "-c", "cat; echo error >&2; exit 3", stdin=b"x" * 300_000)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"x" * 300_000, b"error\n")
    assert (done.truncated, done.stopped) == (False, None)


def test_a_program_that_reads_no_input_does_not_wait_for_it(workspace: Path) -> None:
    assert run(workspace, "true", stdin=b"x" * 1_000_000).exit_code == 0
    assert run(workspace, "cat").stdout == b""


def test_a_signal_is_the_shells_exit_code(workspace: Path) -> None:
    assert run(workspace, "sh", "-c", "kill -SEGV $$").exit_code == 128 + 11


def test_signals_that_python_ignores_are_not_ignored_inside(workspace: Path) -> None:
    assert run(workspace, "bash", "-c", "yes | head -n 1; echo ${PIPESTATUS[0]}").stdout == b"y\n141\n"


def test_a_missing_program_says_so(workspace: Path) -> None:
    done = run(workspace, "no-such-program", "--help")
    assert done.exit_code == 127 and b"'no-such-program': No such file" in done.stderr
    (workspace / "script").write_text("not a program")
    assert run(workspace, "/workspace/script").exit_code == 126
    done = run(workspace, "true", cwd="/nowhere")
    assert done.exit_code == 126 and b"cwd '/nowhere'" in done.stderr


def test_words_and_environment_arrive_unchanged(workspace: Path) -> None:
    words = ["", " ", "$HOME", "';", "\n", "ü", "-", "--", "\\"]
    program = "import os, sys; print(repr(sys.argv[1:])); print(os.environ['NAME'], os.environ['PATH'], os.getcwd())"
    done = run(workspace, *python_argv(), "-c", program, *words, env={"NAME": "välue", "PATH": "/bin"}, cwd="/tmp")
    assert done.stdout.decode() == f"{words!r}\nvälue /bin /tmp\n"


def test_the_python_inside_has_the_packages_of_this_environment(workspace: Path) -> None:
    packages = Path(sysconfig.get_path("purelib"))
    program = (
        "import os, sys, sysconfig; folder = sysconfig.get_path('purelib'); print(sys.version_info[:3]); "
        "print(sorted(os.listdir(folder)) if os.path.isdir(folder) else [])"
    )
    done = run(workspace, *python_argv(), "-c", program)
    expected = sorted(os.listdir(packages)) if packages.is_dir() else []
    assert done.stdout.decode() == f"{tuple(sys.version_info[:3])}\n{expected}\n", done.stderr


def test_output_beyond_the_limit_is_dropped_and_the_program_goes_on(workspace: Path) -> None:
    limits = Limits(output_bytes=1000)
    done = run(workspace, "sh", "-c", "head -c 9000 /dev/zero; echo end > done; exit 5", limits=limits)
    assert (done.exit_code, done.stdout, done.truncated, done.stopped) == (5, bytes(1000), True, None)
    assert (workspace / "done").exists()


def test_background_processes_do_not_outlive_the_program(workspace: Path) -> None:
    done = run(workspace, "sh", "-c", "(sleep 3600 &) ; echo over")
    assert (done.exit_code, done.stdout) == (0, b"over\n")


def test_mounts_are_read_only_unless_writable(workspace: Path, tmp_path: Path) -> None:
    for name in ("shown", "shared"):
        (tmp_path / name).mkdir(mode=0o700)
        (tmp_path / name / "f").write_text(name)
        (tmp_path / name / "f").chmod(0o600)
    mounts = (
        Mount(source=tmp_path / "shown", target="/mnt/shown"),
        Mount(source=tmp_path / "shared", target="/mnt/shared", writable=True),
        Mount(source=tmp_path / "shown" / "f", target="/data/one.txt"),
    )
    text = "cat /mnt/shown/f /data/one.txt; echo x > /mnt/shown/f; echo y > /data/one.txt; echo z > /mnt/shared/f"
    done = run(workspace, "sh", "-c", text, mounts=mounts)
    assert done.stdout == b"shownshown"
    assert (tmp_path / "shown" / "f").read_text() == "shown"
    assert (tmp_path / "shared" / "f").read_text() == "z\n"


@pytest.mark.parametrize(
    "target",
    ["/usr/x", "relative", "/mnt/../etc", "/", "/workspace", "/workspace/x", "/proc", "/mnt/", "/opt/x", "/tmp/x"],
)
def test_a_mount_over_the_system_or_the_workspace_is_refused(workspace: Path, target: str) -> None:
    with pytest.raises(ValueError, match="a mount's target is"):
        open_sandbox(workspace, mounts=[Mount(source=workspace, target=target)])


@pytest.mark.parametrize(
    "words,message",
    [
        ({"argv": []}, "argv is"), ({"argv": "ls"}, "argv is"), ({"argv": ["a\0"]}, "NUL"), ({"cwd": "work"}, "cwd is"),
        ({"env": {"A=B": "c"}}, "env holds"), ({"argv": ["echo", "\ud800"]}, "argv holds"),
        ({"cwd": "/\ud800"}, "cwd holds"), ({"env": {"A": "\udfff"}}, "env holds"),
    ],
)  # fmt: skip
def test_what_cannot_be_executed_is_refused_by_name(workspace: Path, words: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(open_sandbox(workspace).run(**{"argv": ["true"], "limits": LIMITS, **words}))


@pytest.mark.parametrize(
    "field", ["wall_seconds", "memory_bytes", "processes", "disk_bytes", "output_bytes", "cpu_seconds"]
)
def test_a_limit_is_positive(field: str) -> None:
    for value in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"{field} is"):
            Limits(**{field: value})


def test_the_network_is_there_only_when_granted(workspace: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)"
        assert run(workspace, *python_argv(), "-c", program).exit_code == 1
        assert run(workspace, *python_argv(), "-c", program, network=True).exit_code == 0


def test_a_full_workspace_can_be_emptied(workspace: Path) -> None:
    limits = Limits(disk_bytes=4 << 20)

    async def fill_then_empty():
        sandbox = open_sandbox(workspace)
        return [
            await sandbox.run(["sh", "-c", text], limits=limits)
            for text in ("head -c 4500000 /dev/zero > a", "cat a > b", "rm a b", "echo small > c")
        ]

    done = asyncio.run(fill_then_empty())
    assert [one.stopped for one in done] == ["disk", "disk", None, None]


def test_what_a_workspace_held_before_counts_for_nothing(workspace: Path) -> None:
    (workspace / "large").write_bytes(os.urandom(3 << 20))
    assert run(workspace, "sh", "-c", "head -c 100000 /dev/zero > a", limits=Limits(disk_bytes=1 << 20)).stopped is None


def test_a_writable_mount_is_filled_no_further_than_the_workspace(workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    mounts = (Mount(source=tmp_path / "notes", target="/mnt/notes", writable=True),)
    fill = "for i in 1 2 3 4; do head -c 1000000 /dev/zero > /mnt/notes/$i; done; sleep 60"
    assert run(workspace, "sh", "-c", fill, mounts=mounts, limits=Limits(disk_bytes=2 << 20)).stopped == "disk"


def test_a_workspace_swapped_for_another_is_refused(workspace: Path, tmp_path: Path) -> None:
    sandbox = open_sandbox(workspace)
    workspace.rename(tmp_path / "moved")
    (tmp_path / "other").mkdir()
    workspace.symlink_to(tmp_path / "other")
    with pytest.raises(SandboxUnavailable, match="'/workspace' is not the file or folder"):
        asyncio.run(sandbox.run(["touch", "escaped"], limits=LIMITS))
    assert not list((tmp_path / "other").iterdir())


def test_the_event_loop_goes_on_while_sandboxes_start(workspace: Path) -> None:
    async def count_beats() -> tuple[int, list[bytes]]:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0)
                beats += 1

        heart = asyncio.create_task(beat())
        sandbox = open_sandbox(workspace)
        done = await asyncio.gather(*(sandbox.run(["echo", str(number)], limits=LIMITS) for number in range(10)))
        heart.cancel()
        return beats, [one.stdout for one in done]

    beats, outputs = asyncio.run(count_beats())
    assert outputs == [f"{number}\n".encode() for number in range(10)]
    assert beats > 100  # a start that held the loop would leave a handful


def test_a_loop_that_ends_takes_its_sandboxes_along(workspace: Path) -> None:
    async def leave() -> None:
        asyncio.get_running_loop().create_task(open_sandbox(workspace).run(["sleep", "3600"], limits=LIMITS))
        await asyncio.sleep(0.3)

    before = _children()  # of other tests in this process
    asyncio.run(leave())
    until = time.monotonic() + 20
    while (left := [each for each in _children() if each not in before]) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []


def _children() -> list[str]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                fields = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found.append(name)
    return found


def test_descriptors_do_not_accumulate(workspace: Path) -> None:
    """A descriptor lost in one kind of run would be lost once a round; another thread may open one of its own."""
    rounds = 4

    async def several() -> tuple[int, int]:
        sandbox = open_sandbox(workspace)
        await sandbox.run(["true"], limits=LIMITS)
        before = open_descriptors()
        for _ in range(rounds):
            for text in ("true", "exit 1", "sleep 100", "nothing-there"):
                await sandbox.run(["sh", "-c", text], stdin=b"x", limits=Limits(wall_seconds=0.2))
        for _ in range(200):  # the loop closes a dead child's pipes when it gets to them
            if open_descriptors() <= before:
                break
            await asyncio.sleep(0.05)
        return before, open_descriptors()

    before, after = asyncio.run(several())
    assert after < before + rounds


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Refusals ------------------------------------------------------------------------------------------------------------


def test_without_bubblewrap_nothing_runs(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "find_bubblewrap", lambda: None)
    with pytest.raises(SandboxUnavailable, match="install the package bubblewrap"):
        open_sandbox(workspace)


@pytest.mark.parametrize(
    "script,message",
    [
        ("echo 'bwrap: No permissions to create new namespace' >&2; exit 1", "unprivileged_userns_clone"),
        ("echo 'bwrap: Unknown option --size' >&2; exit 1", "0.8 or newer"),
        ("exit 0", "it said nothing"),
        ("kill -9 $$", "it said nothing"),
        ("while [ $# -gt 0 ] && [ \"$1\" != -- ]; do shift; done; shift; echo would run \"$@\"", "it said nothing"),
    ],
)  # fmt: skip
def test_a_bubblewrap_that_fails_is_a_refusal_never_the_host(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(bubblewrap, "find_bubblewrap", lambda: str(fake))
    with pytest.raises(SandboxUnavailable, match=message):
        run(workspace, "sh", "-c", f"touch {workspace}/ran")
    assert not list(workspace.iterdir())


def test_an_unstartable_program_is_a_refusal(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "find_bubblewrap", lambda: str(tmp_path / "gone"))
    with pytest.raises(SandboxUnavailable, match="could not be started"):
        run(workspace, "true")


def test_a_layer_that_cannot_be_put_in_force_is_a_refusal(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "build_filter", lambda **_: b"\xff" * 16)  # no valid program
    with pytest.raises(SandboxUnavailable, match="could not be closed"):
        run(workspace, "touch", "ran")
    assert not list(workspace.iterdir())


@pytest.mark.parametrize("name", ["with space", "new\nline", "ünï", "--bind", "\udcff\udcfe", "$(x)`y`'\"", "a,b"])
def test_a_workspace_may_have_any_name(tmp_path: Path, name: str) -> None:
    workspace = tmp_path / name
    workspace.mkdir()
    assert run(workspace, "sh", "-c", "pwd; echo new > a").stdout == b"/workspace\n"
    assert (workspace / "a").read_text() == "new\n"


def test_a_workspace_may_be_named_from_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    sandbox = open_sandbox(Path("here"))
    monkeypatch.chdir("/")  # and means the same folder afterwards
    assert asyncio.run(sandbox.run(["touch", "made"], limits=LIMITS)).exit_code == 0
    assert (tmp_path / "here" / "made").exists()


def test_a_workspace_must_be_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="workspace is"):
        open_sandbox(tmp_path / "none")
    with pytest.raises(ValueError, match="backend is 'chroot'"):
        open_sandbox(tmp_path, backend="chroot")  # pyrefly: ignore[bad-argument-type]


def test_kept_output_is_the_first_bytes() -> None:
    output = Output(limit=10)
    for part in (b"abc", b"defgh", b"ijklmnop"):
        output.add(part)
    assert (bytes(output.kept), output.total, output.truncated, output.endless) == (b"abcdefghij", 16, True, False)
    output.add(bytes(1000))
    assert output.endless
