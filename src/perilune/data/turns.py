"""Who builds what lies in a cache: one process at a time, while the others wait and then read what it built.

An advisory lock (flock) on a file beside the entry, which its holder removes at the end. The kernel drops the lock when
the holder ends, however it ends: a builder that was killed leaves an empty file that means nothing. Where a lock cannot
be had (some network file systems) everybody builds: the entry is published as a whole, so that costs time and nothing
else.
"""

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(entry: Path, *, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the right to build `entry`. Look for it again inside: it may have been built meanwhile."""
    descriptor, lock = None, entry.with_name(f"{entry.name}.lock")
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked(lock, on_wait)
    try:
        yield
    finally:
        if descriptor is not None:
            lock.unlink(missing_ok=True)  # ours: nobody else removes the file that lies there
            os.close(descriptor)


def _locked(lock: Path, on_wait: Callable[[], None]) -> int:
    """A descriptor of the file at `lock`, locked. One that its holder removed while we waited is not it."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                    return descriptor
        except BaseException:  # an interrupt too: the file is another's
            os.close(descriptor)
            raise
        os.close(descriptor)
