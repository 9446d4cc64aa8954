"""Two threads that watch all sandboxes of this process: one their processes, one the disk space of their workspaces.

The kernel bounds one process (rlimits) and, where a cgroup was delegated, all of them; this bounds all everywhere.
A sandbox that passes a limit is reported once, with the name of the limit; whoever watches it does the killing.
Disk has a thread of its own, so that a workspace with many files does not delay the look at everybody's memory.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from perilune.swarm.sandbox.accounting import (
    find_trees,
    folder_bytes,
    kernel_bytes,
    private_bytes,
    read_processes,
    scratch_bytes,
    unlinked_bytes,
)
from perilune.swarm.sandbox.contract import Limits

QUICK, CALM = 0.05, 0.2  # seconds between looks: while something is near a limit or new, and otherwise
NEAR = 0.25  # of a limit
DISK_PAUSE = 0.25
LARGEST_SHARE = 0.1  # of one processor that a thread may take
OWN_PROCESSES = 2  # bubblewrap outside and as the first process inside


@dataclass(kw_only=True, eq=False)
class Watch:
    """One running sandbox: the process at its root, its limits, and whom to tell, from another thread."""

    root: int
    limits: Limits
    folders: tuple[Path, ...]
    """Those it may write to."""
    most_disk_bytes: int
    exceeded: Callable[[str], None]
    since: float = field(default_factory=time.monotonic)
    reported: bool = False

    def report(self, limit: str) -> None:
        if not self.reported:
            self.reported = True
            self.exceeded(limit)


class Patrol:
    """A thread that looks at every watch, pauses, and ends when there is none. `look` returns the pause in seconds."""

    def __init__(self, name: str, look: Callable[[list[Watch]], float]) -> None:
        self._name = name
        self._look = look
        self._change = threading.Condition()
        self._watches: set[Watch] = set()
        self._thread: threading.Thread | None = None

    def add(self, watch: Watch) -> None:
        with self._change:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._change.notify()

    def remove(self, watch: Watch) -> None:
        with self._change:
            self._watches.discard(watch)
            self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                if not self._watches and not self._change.wait_for(lambda: self._watches, timeout=5):
                    self._thread = None
                    return
                watches = [watch for watch in self._watches if not watch.reported]
            began = time.monotonic()
            pause = self._look(watches) if watches else CALM
            time.sleep(max(pause, (time.monotonic() - began) / LARGEST_SHARE))


def look_at_processes(watches: list[Watch]) -> float:
    """Count processes, memory and processor time of each sandbox."""
    processes = read_processes()
    trees = find_trees([watch.root for watch in watches], processes)
    pause = CALM
    for watch in watches:
        tree, limits = trees[watch.root], watch.limits
        if len(tree) - OWN_PROCESSES > limits.processes:
            watch.report("processes")
            continue
        if limits.cpu_seconds and sum(processes[number].cpu_seconds for number in tree) > limits.cpu_seconds:
            watch.report("cpu time")
            continue
        beside = scratch_bytes(tree) + kernel_bytes(tree, processes)
        used = sum(processes[number].resident_bytes for number in tree) + beside
        # Resident pages count what is shared once for each; only when that is too much is the exact sum worth its time.
        if used > limits.memory_bytes and private_bytes(tree) + beside > limits.memory_bytes:
            watch.report("memory")
            continue
        new = time.monotonic() - watch.since < 4 * QUICK
        if new or used > NEAR * limits.memory_bytes or len(tree) - OWN_PROCESSES > NEAR * limits.processes:
            pause = QUICK
    return pause


def look_at_disk(watches: list[Watch]) -> float:
    """Measure what each sandbox may write to, with the files that its processes keep open without a name."""
    trees = find_trees([watch.root for watch in watches], read_processes())
    sizes: dict[Path, int] = {}
    for watch in watches:
        for folder in watch.folders:
            if folder not in sizes:
                sizes[folder] = folder_bytes(folder)
        used = sum(sizes[folder] for folder in watch.folders)
        if used + unlinked_bytes(trees[watch.root]) > watch.most_disk_bytes:
            watch.report("disk")
    return DISK_PAUSE


def _patrols() -> tuple[Patrol, Patrol]:
    return Patrol("sandbox-processes", look_at_processes), Patrol("sandbox-disk", look_at_disk)


_PATROLS = _patrols()


def _after_fork() -> None:
    global _PATROLS
    _PATROLS = _patrols()  # threads do not survive a fork, and a lock may be held


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def start_watching(watch: Watch) -> None:
    for patrol in _PATROLS:
        patrol.add(watch)


def stop_watching(watch: Watch) -> None:
    for patrol in _PATROLS:
        patrol.remove(watch)
