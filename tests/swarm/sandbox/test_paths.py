"""No name leads out of its folder: a corpus of traversals against both ways of opening, and a folder that changes."""

import errno
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.sandbox import paths
from perilune.swarm.sandbox.files import list_files, read_file, search_files, write_file
from perilune.swarm.sandbox.paths import PathRefused, open_beneath, split_name

CANARY = b"canary outside"
REFUSALS = (PathRefused, OSError)
HEADS = ("", "/", "//", "///", "/.", "/./", "/proc/self/root", "/proc/self/cwd/..", "/proc/1/root", "/dev/fd/../..")
LINKS = (
    "to_canary", "to_outside", "to_root", "to_parent", "to_grandparent", "to_proc", "to_fd", "to_cwd", "to_self",
    "to_inner", "inner/up", "inner/deep/up", "chain1", "chain2", "dangling",
)  # fmt: skip
DOTS = ("．．", "‥", "․․", "..\u200b/..", "。。", "%2e%2e", "..%2f..", "..%c0%af..", "..\\..", "‥/‥", ".\u2024")
ODD = (
    "", "~", "~/canary.txt", "~root", "$HOME", "pipe", "socket", "a" * 5000, "a/" * 3000, "file.txt/..", "file.txt/.",
    "../" * 50 + "etc/passwd", "C:\\Windows\\system.ini", "\\\\host\\share", "con", "....//....//etc", "\0", "..\0",
    "inner\0/../../outside/canary.txt", "\n../outside", "..\r", "\x7f..", "\ud800",
)  # fmt: skip


@pytest.fixture(params=["openat2", "walk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of resolving a name; without the kernel's call the walk must be as strict."""
    if request.param == "walk":

        def absent(*_: object) -> int:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

        monkeypatch.setattr(paths, "_ask_kernel", absent)
    return request.param


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A workspace with every kind of trap in it, beside a canary."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary.txt").write_bytes(CANARY)
    root = tmp_path / "workspace"
    (root / "inner" / "deep").mkdir(parents=True)
    (root / "inner" / "plain.txt").write_bytes(b"plain")
    (root / "file.txt").write_bytes(b"file")
    for name, target in {
        "to_canary": outside / "canary.txt",
        "to_outside": outside,
        "to_root": "/",
        "to_parent": "..",
        "to_grandparent": "../..",
        "to_proc": "/proc/self/root",
        "to_fd": "/proc/self/fd",
        "to_cwd": "/proc/self/cwd",
        "to_self": "to_self",
        "to_inner": "inner",
        "inner/up": "../../outside",
        "inner/deep/up": "../../../outside/canary.txt",
        "chain1": "chain2",
        "chain2": "to_outside",
        "dangling": outside / "not_yet.txt",
    }.items():
        (root / name).symlink_to(target)
    os.link(outside / "canary.txt", root / "hard")
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(root)
        server.bind("socket")
        os.chdir("/")
    return root


def traversals(root: Path) -> Iterator[str]:
    """Names that would reach the canary, or anything else outside, if one step were followed carelessly."""
    outside = root.parent / "outside"
    canary = str(outside / "canary.txt")
    prefixes = (
        "",
        "./",
        "inner/",
        "inner/deep/",
        "missing/",
        "file.txt/",
        ".//",
        "inner//",
        "to_inner/",
        "inner/./deep/",
    )
    dots = ("..", "../", "..//", ".././", "./../", "inner/../..", "inner/deep/../../..")
    for prefix, dot, times in itertools.product(prefixes, dots, (1, 2)):
        yield f"{prefix}{'/'.join([dot.rstrip('/')] * times)}/outside/canary.txt"
    for depth in range(1, 20):
        yield "/".join([".."] * depth) + canary
        yield "inner/" + "/".join([".."] * depth) + "/outside/canary.txt"
    yield from (head + canary for head in HEADS)
    for link in LINKS:
        yield from (link, f"{link}/", f"{link}/.", f"./{link}", f"{link}/canary.txt", f"{link}/outside/canary.txt")
        yield f"{link}{canary}"
    for dot in DOTS:
        yield from (f"{dot}/outside/canary.txt", f"inner/{dot}/{dot}/outside/canary.txt")
    for slash in ("／", "∕", "⁄", "\\", "%2f"):
        yield slash.join(["..", "outside", "canary.txt"])
        yield slash.join(["inner", "..", "..", "outside", "canary.txt"])
    yield from (f"{canary}\0.txt", f"file://{canary}", *ODD)


def test_the_corpus_is_large(root: Path) -> None:
    assert len(set(traversals(root))) >= 200


def test_no_name_of_the_corpus_reads_or_changes_anything_outside(root: Path, way: str) -> None:
    outside = root.parent / "outside"
    harmless = {b"file", b"plain"}
    for name in traversals(root):
        with suppress(*REFUSALS):
            assert read_file(root, name).data in harmless, name
        for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
            folder = os.open(root, os.O_RDONLY)
            try:
                descriptor = open_beneath(folder, name, flags)
                assert os.path.realpath(f"/proc/self/fd/{descriptor}").startswith(f"{root}/"), name
                os.close(descriptor)
            except REFUSALS:
                pass
            finally:
                os.close(folder)
        with suppress(*REFUSALS):
            write_file(root, name, b"overwritten")
        (root / "file.txt").write_bytes(b"file")
        assert sorted(path.name for path in outside.iterdir()) == ["canary.txt"], name
        assert (outside / "canary.txt").read_bytes() == CANARY, name
    assert sorted(path.name for path in root.parent.iterdir()) == ["outside", "workspace"]


@pytest.mark.parametrize(
    "name",
    ["", "/etc/passwd", "..", "inner/../../x", "inner/..", "to_canary", "to_inner/plain.txt", "inner/up/x", "a\0b",
     "a\nb", "．．/x", "a／b", "pipe", "chain1/canary.txt", "\u202etxt.exe", "d/" * 100, "n" * 4001],
)  # fmt: skip
def test_an_escape_is_refused_and_named(root: Path, way: str, name: str) -> None:
    with pytest.raises(PathRefused, match="path is "):
        read_file(root, name)


def test_plain_names_are_opened(root: Path, way: str) -> None:
    for name in ("inner/plain.txt", "./inner//plain.txt", "inner/./plain.txt"):
        assert read_file(root, name).data == b"plain"
    for name in (
        "naïve café.md",
        "日本語/メモ.txt",
        "weird 'quotes' \"and\" $dollars",
        "..almost",
        "a..b/...c",
        ".hidden",
    ):
        write_file(root, name, name.encode())
        assert read_file(root, name).data == name.encode()


def test_a_missing_file_is_missing_not_refused(root: Path, way: str) -> None:
    with pytest.raises(FileNotFoundError):
        read_file(root, "inner/none.txt")
    with pytest.raises(NotADirectoryError):
        read_file(root, "file.txt/none.txt")


def test_a_file_with_a_second_name_is_read_but_never_written(root: Path, way: str) -> None:
    assert read_file(root, "hard").data == CANARY
    folder = os.open(root, os.O_RDONLY)
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
        with pytest.raises(PathRefused, match="second name"):
            open_beneath(folder, "hard", flags)
    os.close(folder)
    with pytest.raises(PathRefused, match="second name"):
        write_file(root, "hard", b"changed")
    assert (root.parent / "outside" / "canary.txt").read_bytes() == CANARY


def test_descriptors_are_not_inherited_nor_left_open(root: Path, way: str) -> None:
    folder = os.open(root, os.O_RDONLY)
    descriptor = open_beneath(folder, "file.txt", os.O_RDONLY)
    assert not os.get_inheritable(descriptor)
    assert _open_beneath(root) == {str(root), str(root / "file.txt")}
    os.close(descriptor)
    for name in traversals(root):
        with suppress(*REFUSALS):
            os.close(open_beneath(folder, name, os.O_RDONLY))
    os.close(folder)
    assert _open_beneath(root.parent) == set()


def _open_beneath(folder: Path) -> set[str]:
    """What this process holds open there; what others of its threads hold is not counted."""
    names = {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    return {name for name in names if name == str(folder) or name.startswith(f"{folder}/")}


def test_links_put_in_place_while_names_are_opened_lead_nowhere(root: Path, way: str) -> None:
    """Another thread keeps exchanging a folder, and a file, for links to the outside; nothing may pass them."""
    outside = root.parent / "outside"
    (root / "swap").mkdir()
    (root / "swap" / "canary.txt").write_bytes(b"inside")
    (root / "other").symlink_to(outside)
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            os.rename(root / "swap", root / "third")
            os.rename(root / "other", root / "swap")
            (root / "target").unlink(missing_ok=True)
            os.rename(root / "swap", root / "other")
            os.rename(root / "third", root / "swap")
            with suppress(FileExistsError):
                (root / "target").symlink_to(outside / "canary.txt")

    thread = threading.Thread(target=exchange)
    thread.start()
    opened = refused = 0
    until = time.monotonic() + 20
    folder = os.open(root, os.O_RDONLY)
    try:
        while (opened < 50 or refused < 20) and time.monotonic() < until:
            try:
                descriptor = open_beneath(folder, "swap/canary.txt", os.O_RDWR)
                assert os.read(descriptor, 100) == b"inside"
                os.close(descriptor)
                opened += 1
            except REFUSALS:
                refused += 1
            with suppress(*REFUSALS):
                write_file(folder, "target", b"new")
    finally:
        stop.set()
        thread.join()
        os.close(folder)
    assert opened and refused
    assert (outside / "canary.txt").read_bytes() == CANARY


def test_listing_and_searching_do_not_follow_links(root: Path, way: str) -> None:
    found = {entry.path: entry.kind for entry in list_files(root)}
    assert found["to_outside"] == "link" and found["pipe"] == "other" and found["inner/deep"] == "folder"
    assert not any("canary.txt" in name for name in found)
    assert [match.path for match in search_files(root, "canary outside")] == ["hard"]
    with pytest.raises(REFUSALS):
        list_files(root, "to_outside")
    with pytest.raises(REFUSALS):
        search_files(root, "canary", "inner/up")


@given(st.text(max_size=40))
def test_components_never_lead_upwards(name: str) -> None:
    try:
        parts = split_name(name)
    except PathRefused:
        return
    assert not name.startswith("/")
    assert all(part not in ("", ".", "..") and "/" not in part and "\0" not in part for part in parts)
    assert "/".join(parts) == "/".join(part for part in name.split("/") if part not in ("", "."))
