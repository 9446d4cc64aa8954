"""Opening a file beneath a folder, and only there, whatever its name says and whoever rearranges the folder meanwhile.

`open_beneath` asks the kernel (openat2 with RESOLVE_BENEATH, NO_SYMLINKS and NO_MAGICLINKS) or, where that call is not
to be had, walks one component at a time with O_NOFOLLOW. Either way the decision and the opening are one act: there is
no moment between a check and a use in which a link could be put in place. Absolute names, "..", links of any kind,
devices, pipes and sockets are refused, and so is writing to a file that has a second name, which may lie outside.
"""

import ctypes
import errno
import os
import stat
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OPENAT2 = 437  # the same on every processor
BENEATH, NO_MAGIC_LINKS, NO_LINKS = 0x08, 0x02, 0x04
ALWAYS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY | os.O_NONBLOCK  # a pipe without a writer must not block us
DEEPEST, LONGEST = 64, 4000  # folders and bytes of a name; what is deeper cannot be removed by most programs
TRIES = 100  # openat2 asks to be called again when something was renamed meanwhile
_UNKNOWN = (errno.ENOSYS, errno.EPERM, errno.E2BIG, errno.EINVAL)

_LIBC = ctypes.CDLL(None, use_errno=True)

Root = Path | str | int


class PathRefused(ValueError):
    """A name that leads, or could lead, out of its folder, or to something that is no plain file or folder."""


class _HowToOpen(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64)]


def split_name(relative: str | os.PathLike[str]) -> list[str]:
    """The components of a relative name; [] is the folder itself. Refuses what is no plain name."""
    name = os.fspath(relative)
    if not isinstance(name, str) or not name:
        raise PathRefused(f"path is {name!r}; expected a name relative to the workspace, such as 'notes/plan.md'")
    if name.startswith("/"):
        raise PathRefused(f"path is {name!r}, which is absolute; expected a name relative to the workspace")
    # Compatibility forms of "." and "/" mean nothing to the kernel, but whatever normalises the name later is not it.
    folded = unicodedata.normalize("NFKC", name)
    if ".." in name.split("/") or ".." in folded.replace("\\", "/").split("/") or folded.count("/") != name.count("/"):
        raise PathRefused(f"path is {name!r}, which leads upwards or hides a separator; expected plain names and '/'")
    for character in name:
        if unicodedata.category(character) in ("Cc", "Cs") or character in "\u2028\u2029\u202a\u202b\u202d\u202e":
            raise PathRefused(f"path is {name!r}, which holds a control character; expected printable text")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if len(parts) > DEEPEST or len(os.fsencode(name)) > LONGEST:
        raise PathRefused(f"path is {name[:60]!r}...; expected at most {DEEPEST} folders deep and {LONGEST} bytes long")
    return parts


def open_beneath(root_fd: int, relative: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """A descriptor of a plain file or folder beneath `root_fd`. PathRefused for an escape, OSError for the usual."""
    parts = split_name(relative)
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    # Truncation waits for the checks below: at the time of opening it would already have harmed a second name.
    descriptor = open_raw(root_fd, "/".join(parts) or ".", flags & ~os.O_TRUNC, mode)
    try:
        status = os.fstat(descriptor)
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise PathRefused(f"path is {os.fspath(relative)!r}, which is no plain file or folder")
        if writes and status.st_nlink > 1:
            raise PathRefused(f"path is {os.fspath(relative)!r}, a file with a second name (hard link); copy it first")
        if writes and flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_raw(root_fd: int, relative: str, flags: int, mode: int = 0) -> int:
    """Resolve beneath `root_fd` without following anything; no check of the name or of what was opened."""
    try:
        try:
            return _ask_kernel(root_fd, relative, flags, mode)
        except OSError as problem:
            if problem.errno not in _UNKNOWN:
                raise
        return _walk(root_fd, relative, flags, mode)
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EXDEV, errno.ENXIO):
            raise PathRefused(f"path is {relative!r}, which passes a link, leaves its folder or is a pipe") from problem
        problem.filename = relative
        raise


def _ask_kernel(root_fd: int, relative: str, flags: int, mode: int) -> int:
    if sys.platform != "linux":  # there the number means something else
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    creates = flags & (os.O_CREAT | getattr(os, "O_TMPFILE", 0))
    how = _HowToOpen(flags=flags | ALWAYS, mode=mode if creates else 0, resolve=BENEATH | NO_MAGIC_LINKS | NO_LINKS)
    name = os.fsencode(relative)
    for _ in range(TRIES):
        size = ctypes.c_size_t(ctypes.sizeof(how))
        result = _LIBC.syscall(ctypes.c_long(OPENAT2), ctypes.c_int(root_fd), name, ctypes.byref(how), size)
        if result >= 0:
            return result
        if (error := ctypes.get_errno()) not in (errno.EAGAIN, errno.EINTR):
            raise OSError(error, os.strerror(error))
    raise PathRefused(f"path is {relative!r}, whose folders are renamed too often to be opened safely")


def _walk(root_fd: int, relative: str, flags: int, mode: int) -> int:
    parts = [part for part in relative.split("/") if part not in ("", ".")]
    if ".." in parts or relative.startswith("/"):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    folder = os.dup(root_fd)
    try:
        for part in parts[:-1]:
            try:
                deeper = os.open(part, os.O_RDONLY | os.O_DIRECTORY | ALWAYS, dir_fd=folder)
            except NotADirectoryError:
                # Linux reports a link met with O_DIRECTORY this way.
                if stat.S_ISLNK(os.stat(part, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
                raise
            os.close(folder)
            folder = deeper
        try:
            return os.open(parts[-1] if parts else ".", flags | ALWAYS, mode, dir_fd=folder)
        except NotADirectoryError:
            if stat.S_ISLNK(os.stat(parts[-1], dir_fd=folder, follow_symlinks=False).st_mode):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
            raise
    finally:
        os.close(folder)


@contextmanager
def opened_root(root: Root) -> Iterator[int]:
    """A descriptor of the folder itself; an open descriptor is used as it is."""
    if isinstance(root, int):
        yield root
        return
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened(root: Root, relative: str | os.PathLike[str], flags: int, mode: int = 0o644) -> Iterator[int]:
    with opened_root(root) as root_fd:
        descriptor = open_beneath(root_fd, relative, flags, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_folders(root_fd: int, parts: list[str]) -> int:
    """A descriptor of the folder `parts` beneath the root; what is missing is made, with the root's owner."""
    folder = os.dup(root_fd)
    for part in parts:
        try:
            with suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=folder)
            deeper = open_beneath(folder, part, os.O_RDONLY | os.O_DIRECTORY)
            give_to_owner(deeper, root_fd)
        finally:
            os.close(folder)
        folder = deeper
    return folder


def give_to_owner(descriptor: int, root_fd: int) -> None:
    """What root makes in another user's folder belongs to that user, who could not change it otherwise."""
    if os.geteuid() != 0:
        return
    owner, made = os.fstat(root_fd), os.fstat(descriptor)
    if made.st_uid == 0 != owner.st_uid:
        os.fchown(descriptor, owner.st_uid, owner.st_gid)
