"""One process trains a run at a time: an advisory lock (flock) on `.lock` in the run's folder.

The kernel drops the lock when its holder ends, however it ends: after kill -9 the run resumes at once, and a `.lock`
that lies there means nothing by itself. Reading a run (report, generate) takes no lock.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perilune.train.run_folder import RunError, cannot_write

LOCK = ".lock"

_held: set[int] = set()


def _close_in_child() -> None:
    # A forked child shares the lock through its copy of the descriptor, and would keep it after its parent's death.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, which is made when it is absent; RunError when another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise cannot_write(folder, error) from error
    _held.add(descriptor)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        raise RunError(
            f"{str(folder)!r} is being trained by another process (pid {holder}): wait for it, stop it, or give this "
            "run another name"
        ) from error
    except OSError as error:
        raise cannot_write(folder, error) from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
