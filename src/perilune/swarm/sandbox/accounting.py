"""What the processes of a sandbox use, read from /proc, and what a workspace holds.

A sandbox is the tree beneath one process: everything inside descends from it, because orphans go to the first process
of their PID namespace, which is part of the tree. One pass over /proc serves all sandboxes.
"""

import os
import stat
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from perilune.swarm.sandbox.paths import PathRefused, open_raw, opened_root

PAGE = os.sysconf("SC_PAGE_SIZE")
SCRATCH = ("tmp", "dev/shm")
LARGE_SPACE = 16 << 30  # of addresses: what maps less has page tables of some 32 MiB at most
MANY_DESCRIPTORS = 256  # of a sandbox together; fewer hold at most some 50 MiB in their buffers
BUFFER_BYTES = 212_992  # of a socket or pipe: the kernel's default, which the system-call filter keeps programs at
TICKS = os.sysconf("SC_CLK_TCK")
INODE_BYTES = 1024  # what the kernel keeps for a file, about; an empty file is not free
MOST_ENTRIES = 1_000_000
DEEPEST = 3500  # characters of a path; beyond 4096 it can be made but no longer be opened
UNCOUNTABLE = 1 << 62  # what cannot be measured is more than any limit


@dataclass(frozen=True, kw_only=True)
class Process:
    parent: int
    cpu_seconds: float  # with that of its children it has waited for
    resident_bytes: int
    mapped_bytes: int = 0  # addresses, used or not


def read_processes() -> dict[int, Process]:
    """Every process that can be seen, by its number."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                # The name, in brackets, may hold anything; what follows the last bracket is numbers.
                fields = file.read().rpartition(b")")[2].split()
                found[int(name)] = Process(
                    parent=int(fields[1]),
                    cpu_seconds=sum(map(int, fields[11:15])) / TICKS,
                    resident_bytes=int(fields[21]) * PAGE,
                    mapped_bytes=int(fields[20]),
                )
    return found


def find_trees(roots: Iterable[int], processes: dict[int, Process]) -> dict[int, list[int]]:
    """For each root, itself and everything beneath it."""
    children: dict[int, list[int]] = {}
    for number, process in processes.items():
        children.setdefault(process.parent, []).append(number)
    trees = {}
    for root in roots:
        tree = [root] if root in processes else []
        for number in tree:  # grows while it is read
            tree += children.get(number, ())
        trees[root] = tree
    return trees


def private_bytes(tree: Sequence[int]) -> int:
    """Memory of these processes, each shared page divided among those that share it; slow, exact."""
    total = 0
    for number in tree:
        with suppress(OSError, ValueError), open(f"/proc/{number}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith((b"Pss_Anon:", b"Pss_Shmem:")):
                    total += int(line.split()[1]) * 1024
    return total


def kernel_bytes(tree: Sequence[int], processes: Mapping[int, Process]) -> int:
    """Memory that the kernel keeps for these processes and counts as nobody's: page tables, and what waits in sockets
    and pipes. Of the latter an upper bound; both only where they can be much."""
    tables = sum(_page_tables(number) for number in tree if processes[number].mapped_bytes > LARGE_SPACE)
    return tables + _buffers(tree)


def _page_tables(number: int) -> int:
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{number}/status", "rb") as file:
        return int(file.read().partition(b"VmPTE:")[2].split()[0]) * 1024
    return 0


def _buffers(tree: Sequence[int]) -> int:
    open_now = {}
    for number in tree:
        with suppress(OSError):
            open_now[number] = os.listdir(f"/proc/{number}/fd")
    if sum(map(len, open_now.values())) <= MANY_DESCRIPTORS:
        return 0
    buffers: set[str] = set()
    for number, names in open_now.items():
        for name in names:
            with suppress(OSError):
                target = os.readlink(f"/proc/{number}/fd/{name}")
                if target.startswith(("socket:[", "pipe:[")):
                    buffers.add(target)
    return len(buffers) * BUFFER_BYTES + _waiting_in_streams(tree, buffers)


def _waiting_in_streams(tree: Sequence[int], buffers: Container[str]) -> int:
    """Bytes sent or received over TCP and not read yet: these sockets grow their buffers by themselves."""
    for number in reversed(tree):  # one of those inside: all of them share a network
        total = 0
        try:
            for name in ("tcp", "tcp6"):
                with open(f"/proc/{number}/net/{name}") as file:
                    for fields in map(str.split, islice(file, 1, None)):
                        if f"socket:[{fields[9]}]" in buffers:
                            total += sum(int(part, 16) for part in fields[4].split(":"))
        except (OSError, ValueError, IndexError):
            continue
        return total
    return 0


def scratch_bytes(tree: Sequence[int]) -> int:
    """Memory behind the sandbox's /tmp and /dev/shm, with that of the files' names."""
    # The last ones belong to the program, whose /proc entries are readable. The first is outside, with the host's /tmp.
    for number in reversed(tree[1:]):
        with suppress(OSError):
            total = 0
            for folder in SCRATCH:
                status = os.statvfs(f"/proc/{number}/root/{folder}")
                total += (status.f_blocks - status.f_bfree) * status.f_frsize
                total += (status.f_files - status.f_ffree) * INODE_BYTES
            return total
    return 0


def unlinked_bytes(tree: Sequence[int]) -> int:
    """Disk space of files that have no name left but are open or mapped by one of these processes.

    What is in memory alone is not on disk: files of the scratch folders, and memory that processes share.
    """
    sizes: dict[tuple[int, int], int] = {}
    in_memory = _scratch_devices(tree)
    for number in tree:
        for kind in ("fd", "map_files"):
            with suppress(OSError):
                if kind == "map_files" and not _maps_unlinked(number):
                    continue  # the rule; a look at every mapping would cost more than all the rest
                for name in os.listdir(f"/proc/{number}/{kind}"):
                    with suppress(OSError):
                        path = f"/proc/{number}/{kind}/{name}"
                        status = os.stat(path)
                        if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_dev in in_memory:
                            continue
                        if not os.readlink(path).startswith("/dev/zero"):
                            sizes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


def _scratch_devices(tree: Sequence[int]) -> set[int]:
    for number in reversed(tree[1:]):
        with suppress(OSError):
            return {os.stat(f"/proc/{number}/root/{folder}").st_dev for folder in SCRATCH}
    return set()


def _maps_unlinked(number: int) -> bool:
    with open(f"/proc/{number}/maps", "rb") as file:
        return b" (deleted)" in file.read()


def folder_bytes(folder: str | os.PathLike[str]) -> int:
    """Disk space beneath a folder; links are not followed, a file with several names counts once."""
    total = entries = 0
    several_names: set[tuple[int, int]] = set()
    for path, status in _walk(folder):
        entries += 1
        if entries > MOST_ENTRIES or len(path) > DEEPEST or status is None:
            return UNCOUNTABLE
        if status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode):
            if (status.st_dev, status.st_ino) in several_names:
                continue
            several_names.add((status.st_dev, status.st_ino))
        total += status.st_blocks * 512 + INODE_BYTES
    return total


def _walk(folder: str | os.PathLike[str]) -> Iterator[tuple[str, os.stat_result | None]]:
    """Everything beneath, by descriptors, so that a folder swapped for a link leads nowhere; None: a closed folder."""
    waiting = ["."]
    with suppress(OSError), opened_root(os.fspath(folder)) as root:
        while waiting:
            inside = waiting.pop()
            with suppress(OSError, PathRefused):
                try:
                    place = open_raw(root, inside, os.O_RDONLY | os.O_DIRECTORY)
                except PermissionError:
                    yield inside, None
                    continue
                try:
                    with os.scandir(place) as listing:
                        for entry in listing:
                            with suppress(OSError):
                                status = entry.stat(follow_symlinks=False)
                                path = f"{inside}/{entry.name}"
                                if stat.S_ISDIR(status.st_mode):
                                    waiting.append(path)
                                yield path, status
                finally:
                    os.close(place)
