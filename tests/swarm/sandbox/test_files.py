"""Files of a workspace: bounded reads, atomic writes, ordered listings, literal search."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from perilune.swarm.sandbox import files
from perilune.swarm.sandbox.files import list_files, read_file, search_files, write_file


def test_a_read_is_bounded_and_says_how_much_there_is(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    content = read_file(tmp_path, "f", 4)
    assert (content.data, content.size, content.truncated) == (b"0123", 10, True)
    content = read_file(tmp_path, "f", 4, offset=6)
    assert (content.data, content.truncated) == (b"6789", False)
    assert read_file(tmp_path, "f", 4, offset=50).data == b""
    with pytest.raises(ValueError, match="limit is -1"):
        read_file(tmp_path, "f", -1)
    with pytest.raises(IsADirectoryError, match="'.'"):
        read_file(tmp_path, ".")


def test_a_write_makes_folders_keeps_the_mode_and_leaves_nothing_else(tmp_path: Path) -> None:
    assert write_file(tmp_path, "a/b/c.txt", b"one") == 3
    os.chmod(tmp_path / "a/b/c.txt", 0o755)
    write_file(tmp_path, "a/b/c.txt", b"two")
    assert (tmp_path / "a/b/c.txt").read_bytes() == b"two"
    assert (tmp_path / "a/b/c.txt").stat().st_mode & 0o777 == 0o755
    assert os.listdir(tmp_path / "a/b") == ["c.txt"]
    with pytest.raises(IsADirectoryError):
        write_file(tmp_path, "a/b", b"")
    with pytest.raises(ValueError, match="the workspace itself"):
        write_file(tmp_path, ".", b"")


def test_a_write_that_fails_leaves_the_old_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path, "f", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write_all", full)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path, "f", b"new")
    assert os.listdir(tmp_path) == ["f"] and (tmp_path / "f").read_bytes() == b"old"


def test_a_reader_sees_whole_versions_only(tmp_path: Path) -> None:
    versions = [bytes([65 + number]) * 100_000 for number in range(8)]
    write_file(tmp_path, "f", versions[0])
    stop = threading.Event()

    def rewrite() -> None:
        for version in versions * 10:
            write_file(tmp_path, "f", version)
        stop.set()

    thread = threading.Thread(target=rewrite)
    thread.start()
    while not stop.is_set():
        assert read_file(tmp_path, "f").data in versions
    thread.join()


if os.geteuid() == 0:  # nobody else can write into another user's folder

    def test_what_root_writes_belongs_to_the_owner_of_the_folder(tmp_path: Path) -> None:
        os.chown(tmp_path, 1234, 1234)
        write_file(tmp_path, "new/file.txt", b"x")
        assert {(tmp_path / name).stat().st_uid for name in ("new", "new/file.txt")} == {1234}


def test_a_listing_is_ordered_and_bounded(tmp_path: Path) -> None:
    for name in ("b/2", "b/1", "a", "c"):
        write_file(tmp_path, name, name.encode())
    assert [entry.path for entry in list_files(tmp_path)] == ["a", "b", "b/1", "b/2", "c"]
    assert [entry.path for entry in list_files(tmp_path, limit=2)] == ["a", "b"]
    assert [entry.path for entry in list_files(tmp_path, recursive=False)] == ["a", "b", "c"]
    assert [(entry.path, entry.size) for entry in list_files(tmp_path, "b")] == [("b/1", 3), ("b/2", 3)]


def test_a_listing_ends_in_folders_without_end(tmp_path: Path) -> None:
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(300):
        os.mkdir("d", dir_fd=place)
        deeper = os.open("d", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = deeper
    os.close(place)
    try:
        assert len(list_files(tmp_path)) == files.DEEPEST + 1
    finally:  # Python's own way of removing a tree ends at its limit of recursion
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


def test_a_search_gives_lines_and_passes_over_binaries(tmp_path: Path) -> None:
    write_file(tmp_path, "d/one.md", b"first\nNeedle here\nneedle there\n")
    write_file(tmp_path, "two.txt", b"needle (a+)+$\n" + b"x" * 3000 + b"needle\n")
    write_file(tmp_path, "binary", b"\0needle")
    found = search_files(tmp_path, "needle")
    assert [(match.path, match.line) for match in found] == [("d/one.md", 3), ("two.txt", 1), ("two.txt", 2)]
    assert len(found[-1].text) == 500
    assert len(search_files(tmp_path, "needle", ignore_case=True)) == 4
    assert [match.path for match in search_files(tmp_path, "needle", names="*.md")] == ["d/one.md"]
    assert [match.path for match in search_files(tmp_path, "needle", "d")] == ["d/one.md"]
    assert [match.line for match in search_files(tmp_path, "(a+)+$")] == [1]  # text, not a pattern
    assert len(search_files(tmp_path, "needle", limit=1)) == 1
    assert search_files(tmp_path, "needle", largest_file=10) == []
    with pytest.raises(ValueError, match="text is ''"):
        search_files(tmp_path, "")


def test_a_search_ends_although_files_without_disk_space_go_on(tmp_path: Path) -> None:
    for number in range(5):
        with open(tmp_path / f"hole{number}.txt", "wb") as file:
            file.write(b"text " * 2000)
            file.truncate(1 << 20)
    for limit in ({"most_bytes": 3 << 20}, {"most_files": 3}):
        with pytest.raises(ValueError, match="more to search than"):
            search_files(tmp_path, "nowhere", **limit)
    assert search_files(tmp_path, "nowhere", most_bytes=5 << 20, most_files=5) == []
    assert len(search_files(tmp_path, "text", most_files=3, limit=2)) == 2
