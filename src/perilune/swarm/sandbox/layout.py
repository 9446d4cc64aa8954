"""What a sandbox sees of the file system, written as arguments of bubblewrap.

    /usr /bin /lib* /etc (a few files)   the system, read-only
    /workspace                                the workspace, writable
    /tmp /dev/shm                        memory, limited in size, gone afterwards
    /proc /dev                           of the sandbox alone
and the mounts that were asked for. Nothing else exists, and the root itself is read-only.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from perilune.swarm.sandbox.contract import INSIDE_UID, WORKSPACE, Limits, Mount
from perilune.swarm.sandbox.interpreter import Interpreter

LAUNCHER = "/opt/launch.pyc"
# Public facts about the system; no file here holds a key, a host name or a user.
SYSTEM_FILES = (
    "alternatives", "ca-certificates", "ca-certificates.conf", "crypto-policies", "fonts", "ld.so.cache", "ld.so.conf",
    "ld.so.conf.d", "localtime", "magic", "mime.types", "os-release", "pki/ca-trust/extracted", "pki/tls/certs",
    "protocols", "services", "ssl/certs", "ssl/openssl.cnf", "timezone",
)  # fmt: skip
OWN_FILES = {
    "/etc/passwd": f"root:x:0:0:root:/:/bin/sh\nnobody:x:{INSIDE_UID}:{INSIDE_UID}:nobody:/tmp:/bin/sh\n",
    "/etc/group": f"root:x:0:\nnogroup:x:{INSIDE_UID}:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
RESERVED = (
    "/",
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/proc",
    "/dev",
    "/sys",
    "/tmp",
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A host path and which file it was when it was named: the launcher refuses another one in its place."""

    source: Path
    target: str
    writable: bool
    device: int
    inode: int


def find_places(workspace: Path, mounts: Sequence[Mount]) -> tuple[Place, ...]:
    """The workspace first, then the mounts, each with its identity."""
    if not workspace.is_dir():
        raise ValueError(f"workspace is {str(workspace)!r}; expected an existing folder")
    places = [_place(workspace, WORKSPACE, writable=True)]
    for mount in mounts:
        _check_target(mount.target, [place.target for place in places])
        if not mount.source.exists():
            raise ValueError(f"a mount's source is {str(mount.source)!r}; expected an existing file or folder")
        places.append(_place(mount.source, mount.target, writable=mount.writable))
    return tuple(places)


def _place(source: Path, target: str, *, writable: bool) -> Place:
    source = source.resolve(strict=True)
    status = source.stat()
    return Place(source=source, target=target, writable=writable, device=status.st_dev, inode=status.st_ino)


def _check_target(target: str, others: Iterable[str]) -> None:
    path = PurePosixPath(target)
    if not path.is_absolute() or str(path) != target or ".." in path.parts or "\0" in target:
        raise ValueError(f"a mount's target is {target!r}; expected a plain absolute path, such as '/mnt/documents'")
    for taken in (*RESERVED[1:], "/opt", *others):
        # Beneath /workspace too: the mount point would have to be made there, and the program can rearrange it.
        if path.is_relative_to(taken) or PurePosixPath(taken).is_relative_to(path):
            raise ValueError(f"a mount's target is {target!r}, which overlaps {taken!r}; use one like '/mnt/notes'")


def _parents(targets: Iterable[str]) -> list[str]:
    """Every folder above a target, in order, open to all: bubblewrap would make them for root alone."""
    above = {str(parent) for target in targets for parent in PurePosixPath(target).parents} - {"/"}
    return [word for folder in sorted(above) for word in ("--perms", "0755", "--dir", folder)]


def describe(places: Sequence[Place], interpreter: Interpreter, limits: Limits) -> list[str]:
    """bubblewrap's arguments for everything that needs no descriptor."""
    inside = [*(place.target for place in places), *(target for _, target in interpreter.binds), LAUNCHER, *OWN_FILES]
    inside += [*(f"/etc/{name}" for name in SYSTEM_FILES), *(target for _, target in interpreter.links), "/var/tmp"]
    words = ["--ro-bind", "/usr", "/usr", *_parents(inside)]
    words += ["--ro-bind-try", "/nix/store", "/nix/store"]
    for name in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if os.path.islink(name):
            words += ["--symlink", os.readlink(name), name]
        elif os.path.isdir(name):
            words += ["--ro-bind", name, name]
    for name in SYSTEM_FILES:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for source, target in interpreter.binds:
        words += ["--ro-bind", str(source), target]
    for text, target in interpreter.links:
        words += ["--symlink", text, target]
    words += ["--proc", "/proc", "--dev", "/dev"]
    for target in ("/tmp", "/dev/shm"):
        words += ["--perms", "1777", "--size", str(limits.disk_bytes), "--tmpfs", target]
    words += ["--symlink", "/tmp", "/var/tmp"]
    for place in places:
        words += ["--bind" if place.writable else "--ro-bind", str(place.source), place.target]
    return words


def find_bubblewrap() -> str | None:
    return shutil.which("bwrap")
