"""Control groups, version 2: the kernel's own count of processes and memory, where a subtree was delegated to us.

A group per run beneath our own: pids.max, memory.max and no swap. Enabling a controller for sub-groups requires that
the group itself holds no process, so this process moves into a leaf of its own; that is done only in a subtree that
was given away on purpose (systemd's `Delegate=yes`, or the root of a container's cgroup namespace).
"""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from perilune.swarm.sandbox.contract import Limits

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS = {"pids", "memory"}
SPARE_PROCESSES = 16  # above the limit that is reported, so that reaching it is seen rather than suffered
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Delegation:
    """Where groups can be made, or why nowhere."""

    folder: Path | None
    reason: str


def find_delegation(mount: Path = MOUNT, membership: Path = Path("/proc/self/cgroup")) -> Delegation:
    def nowhere(reason: str) -> Delegation:
        return Delegation(folder=None, reason=reason)

    if not (mount / "cgroup.controllers").exists():
        return nowhere("no cgroup v2 hierarchy at /sys/fs/cgroup; the supervisor counts instead")
    lines = [line for line in membership.read_text().splitlines() if line.startswith("0::")]
    if not lines:
        return nowhere("this process is in no cgroup v2; the supervisor counts instead")
    own = lines[0].removeprefix("0::")
    folder = mount / own.lstrip("/")
    if missing := CONTROLLERS - set((folder / "cgroup.controllers").read_text().split()):
        return nowhere(
            f"controllers {', '.join(sorted(missing))} are not available here; the supervisor counts instead"
        )
    if not os.access(folder, os.W_OK) or not (own == "/" or _given_away(folder)):
        return nowhere("not delegated; start with: systemd-run --user --scope -p Delegate=yes perilune ...")
    return Delegation(folder=folder, reason=f"groups beneath {own}")


def _given_away(folder: Path) -> bool:
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            return os.getxattr(folder, name) == b"1"
    return False


@functools.cache
def prepared_folder() -> Path | None:
    """The delegated folder with the controllers enabled for its sub-groups; None where that is not to be had."""
    folder = find_delegation().folder
    return folder if folder and enable_controllers(folder) else None


def enable_controllers(folder: Path) -> bool:
    try:
        if CONTROLLERS.issubset((folder / "cgroup.subtree_control").read_text().split()):
            return True
        leaf = folder / "perilune"
        leaf.mkdir(exist_ok=True)
        for number in (folder / "cgroup.procs").read_text().split():
            (leaf / "cgroup.procs").write_text(number)
        (folder / "cgroup.subtree_control").write_text("+pids +memory")
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Group:
    folder: Path

    def exceeded(self) -> str | None:
        """The limit at which the kernel refused or killed, if it did."""
        if _event(self.folder / "memory.events", "oom_kill"):
            return "memory"
        return "processes" if _event(self.folder / "pids.events", "max") else None

    def remove(self) -> None:
        """Once every process in it is gone."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def make_group(parent: Path, limits: Limits, processes: Iterable[int]) -> Group:
    folder = parent / f"sandbox-{os.getpid()}-{next(_numbers)}"
    folder.mkdir()
    (folder / "pids.max").write_text(str(limits.processes + SPARE_PROCESSES))
    (folder / "memory.max").write_text(str(limits.memory_bytes))
    for name, value in {"memory.swap.max": "0", "memory.oom.group": "1"}.items():
        with contextlib.suppress(OSError):  # absent without swap accounting
            (folder / name).write_text(value)
    for number in processes:
        (folder / "cgroup.procs").write_text(str(number))
    return Group(folder=folder)


def _event(file: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
