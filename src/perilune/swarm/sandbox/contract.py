"""What a sandbox is to the rest of the swarm: limits, mounts, the result of a run, and the protocol both backends keep.

A run either happens inside every layer of confinement that the machine was found to have, or raises SandboxUnavailable.
It is never repeated outside.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

WORKSPACE = "/workspace"
INSIDE_UID = 65534  # "nobody" on every distribution
SEARCH_PATH = "/usr/local/bin:/usr/bin:/bin"


# Surrogates but for those that stand for a byte of a file's name.
_HALF_CHARACTER = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class SandboxUnavailable(RuntimeError):
    """No sandbox could be started. The text says which layer is missing and how to get it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one run may use. A run that passes a limit is killed, with everything it started."""

    wall_seconds: float = 60
    memory_bytes: int = 1 << 30  # of all its processes together, with what they keep in /tmp and /dev/shm
    processes: int = 64  # threads included where the kernel does the counting
    disk_bytes: int = 256 << 20  # how far workspace and writable mounts may grow from the first run; the size of /tmp
    output_bytes: int = 1 << 20  # kept of stdout and of stderr, each
    cpu_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("wall_seconds", "memory_bytes", "processes", "disk_bytes", "output_bytes", "cpu_seconds"):
            value = getattr(self, name)
            if value is None and name == "cpu_seconds":
                continue
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value!r}; expected a positive, finite number")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file or folder of the host that the sandbox sees at `target`, read-only unless `writable`."""

    source: Path
    target: str
    writable: bool = False


@dataclass(frozen=True, kw_only=True)
class Completed:
    """How a run ended. `exit_code` is None when it was killed from outside; `stopped` then says why.

    stopped: "wall time", "cpu time", "memory", "processes", "disk", "output" or "cancelled". A program that a signal
    ended by itself has the shell's exit code for it (128 + signal).
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool
    stopped: str | None


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of confinement: whether it is in force on this machine and why, or why not."""

    name: str
    active: bool
    reason: str


class Sandbox(Protocol):
    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = WORKSPACE,
        env: Mapping[str, str] = {},
        limits: Limits,
        network: bool = False,
    ) -> Completed: ...

    async def close(self) -> None: ...


def check_command(argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> None:
    """Refuse what no kernel could execute, with the name of the field, before anything is started."""
    if isinstance(argv, str | bytes) or not argv or not all(isinstance(word, str) for word in argv):
        raise ValueError(f"argv is {argv!r}; expected a list of one or more strings, such as ['sh', '-c', 'ls']")
    for word in argv:
        if "\0" in word:
            raise ValueError(f"argv holds {word!r}; a word of a command cannot contain a NUL character")
    if not cwd.startswith("/") or "\0" in cwd:
        raise ValueError(f"cwd is {cwd!r}; expected an absolute path inside the sandbox, such as '/workspace'")
    for field, words in (("argv", argv), ("cwd", [cwd]), ("env", [*env, *env.values()])):
        for word in filter(_HALF_CHARACTER.search, words):
            raise ValueError(f"{field} holds {word[:200]!r}, with half a character in it; expected whole ones")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"env holds {name!r}={value!r}; a name needs a character and no '=', and no NUL anywhere")
