"""Reading, writing, listing and searching the files of a workspace, for tools that run outside the sandbox.

Every name goes through `open_beneath`. A write is atomic: a reader sees the old bytes or the new ones, and a crash
leaves the old. Nothing here follows a link or blocks on a pipe. These functions wait for the disk; call them in a
thread where that matters. `root` is the workspace's path or an open descriptor of it.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from perilune.swarm.sandbox.paths import (
    DEEPEST,
    PathRefused,
    Root,
    give_to_owner,
    make_folders,
    open_beneath,
    opened,
    opened_root,
    split_name,
)

HEAD = 8192  # bytes by which a binary file is told from text
UNFINISHED = ".unfinished-"  # what a crash may leave behind begins with this


@dataclass(frozen=True, kw_only=True)
class FileContent:
    data: bytes
    size: int  # of the whole file
    offset: int

    @property
    def truncated(self) -> bool:
        return self.offset + len(self.data) < self.size


@dataclass(frozen=True, kw_only=True)
class Entry:
    path: str
    kind: Literal["file", "folder", "link", "other"]
    size: int


@dataclass(frozen=True, kw_only=True)
class Match:
    path: str
    line: int
    text: str


def read_file(root: Root, path: str, limit: int = 1 << 20, *, offset: int = 0) -> FileContent:
    """At most `limit` bytes from `offset` on."""
    if limit < 0 or offset < 0:
        raise ValueError(f"limit is {limit!r} and offset {offset!r}; expected numbers of bytes, 0 or more")
    with opened(root, path, os.O_RDONLY) as descriptor:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(f"path is {path!r}, which is a folder; expected a file")
        data = bytearray()
        while len(data) < limit and (part := os.pread(descriptor, min(limit - len(data), 1 << 20), offset + len(data))):
            data += part
        return FileContent(data=bytes(data), size=max(status.st_size, offset + len(data)), offset=offset)


def write_file(root: Root, path: str, data: bytes) -> int:
    """Replace or create a file, with the folders above it. Returns the number of bytes."""
    parts = split_name(path)
    if not parts:
        raise PathRefused(f"path is {path!r}, the workspace itself; expected the name of a file")
    with opened_root(root) as root_fd:
        folder = make_folders(root_fd, parts[:-1])
        try:
            mode = _mode_of_replaced(folder, parts[-1], path)
            unfinished = f"{UNFINISHED}{secrets.token_hex(8)}"
            descriptor = os.open(
                unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
            )
            try:
                _write_all(descriptor, data)
                give_to_owner(descriptor, root_fd)
                os.fchmod(descriptor, mode)
                # A rename replaces a name and never what a link points to, even one put there this instant.
                os.rename(unfinished, parts[-1], src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(unfinished, dir_fd=folder)
                raise
            finally:
                os.close(descriptor)
        finally:
            os.close(folder)
    return len(data)


def _mode_of_replaced(folder: int, name: str, path: str) -> int:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return 0o644
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(f"path is {path!r}, which is a folder; expected a file")
    if not stat.S_ISREG(status.st_mode):
        raise PathRefused(f"path is {path!r}, which is a link or no plain file; remove it first")
    if status.st_nlink > 1:
        raise PathRefused(f"path is {path!r}, a file with a second name (hard link); remove it first")
    return stat.S_IMODE(status.st_mode) & 0o777


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def list_files(root: Root, path: str = ".", *, limit: int = 1000, recursive: bool = True) -> list[Entry]:
    """What lies beneath a folder in the order of names, folders before what is in them; at most `limit` entries."""
    found = []
    with opened(root, path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        prefix = "/".join(split_name(path))
        for entry in _entries(folder, prefix, depth=DEEPEST if recursive else 0):
            if len(found) == limit:
                break
            found.append(entry)
    return found


def _entries(folder: int, prefix: str, *, depth: int) -> Iterator[Entry]:
    with os.scandir(folder) as listing:
        names = sorted(entry.name for entry in listing)
    for name in names:
        with suppress(OSError):  # it may be gone by now
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            path = f"{prefix}/{name}" if prefix else name
            kind = _kind(status.st_mode)
            yield Entry(path=path, kind=kind, size=status.st_size if kind == "file" else 0)
            if kind == "folder" and depth:
                with suppress(PathRefused):  # a name that no tool could open
                    deeper = open_beneath(folder, name, os.O_RDONLY | os.O_DIRECTORY)
                    try:
                        yield from _entries(deeper, path, depth=depth - 1)
                    finally:
                        os.close(deeper)


def _kind(mode: int) -> Literal["file", "folder", "link", "other"]:
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "folder"
    return "link" if stat.S_ISLNK(mode) else "other"


def search_files(
    root: Root,
    text: str,
    path: str = ".",
    *,
    names: str = "*",
    ignore_case: bool = False,
    limit: int = 100,
    largest_file: int = 4 << 20,
    line_limit: int = 500,
    most_bytes: int = 256 << 20,
    most_files: int = 100_000,
) -> list[Match]:
    """Lines that contain `text`, in files whose last name matches the pattern `names`; binary files are passed over.

    ValueError beyond `most_bytes` or `most_files`: a file with a hole costs no disk space but the time to read it, and
    nobody can stop a thread that reads.

    Literal text only: a regular expression from a model can take for ever, and Python would not let go of it. Programs
    in the sandbox (grep) have limits and do that better.
    """
    if not text:
        raise ValueError("text is ''; expected at least one character to search for")
    sought = text.casefold() if ignore_case else text
    found: list[Match] = []
    looked_at = read = 0
    with opened(root, path, os.O_RDONLY | os.O_DIRECTORY) as folder:
        prefix = "/".join(split_name(path))
        for entry in _entries(folder, "", depth=DEEPEST):
            looked_at += 1
            if read > most_bytes or looked_at > most_files:
                raise ValueError(
                    f"path is {path!r}, with more to search than {most_bytes} bytes or {most_files} files; "
                    "give a narrower folder or pattern of names"
                )
            if entry.kind != "file" or entry.size > largest_file or not fnmatchcase(entry.path.split("/")[-1], names):
                continue
            with suppress(OSError, PathRefused):
                if b"\0" in read_file(folder, entry.path, HEAD).data:
                    continue
                data = read_file(folder, entry.path, largest_file).data
                read += len(data)
                for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
                    if sought in (line.casefold() if ignore_case else line):
                        shown = f"{prefix}/{entry.path}" if prefix else entry.path
                        found.append(Match(path=shown, line=number, text=line[:line_limit]))
                        if len(found) == limit:
                            return found
    return found
