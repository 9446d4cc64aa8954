"""The Python that tools use, as the sandbox sees it.

The installation (`sys.base_prefix`) appears at its own path, where its shared libraries expect it; an environment
appears at /opt/environment with a pyvenv.cfg of its own, because its host path may lie where the sandbox has something
else (a workspace at /workspace). Only `bin`, `lib` and `lib64` are shown: a prefix may be somebody's home.
"""

import sys
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ENVIRONMENT = "/opt/environment"
MOVED = "/opt/python"  # for an installation whose own path is taken inside
TAKEN = ("/workspace", "/tmp", "/proc", "/dev", "/etc", "/opt/environment", "/opt/launch")
FOLDERS = ("bin", "lib", "lib64")


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """`binds` are (host path, inside path), `links` (text, inside path), `files` inside path -> content."""

    executable: str
    base_executable: str
    binds: tuple[tuple[Path, str], ...]
    links: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, bytes], ...]


def find_interpreter() -> Interpreter:
    """Where the running Python and its virtual environment, if any, go."""
    return place_interpreter(
        base=Path(sys.base_prefix).resolve(),
        prefix=Path(sys.prefix).resolve(),
        version=f"python{sys.version_info.major}.{sys.version_info.minor}",
    )


def place_interpreter(*, base: Path, prefix: Path, version: str) -> Interpreter:
    inside = str(base)
    if inside == "/" or any(PurePosixPath(inside).is_relative_to(taken) for taken in TAKEN):
        inside = MOVED
    binds: list[tuple[Path, str]] = []
    if not base.is_relative_to("/usr"):
        binds += [(base / name, f"{inside}/{name}") for name in FOLDERS if (base / name).is_dir()]
    base_executable = f"{inside}/bin/{version}"
    if prefix == base:
        return Interpreter(
            executable=base_executable,
            base_executable=base_executable,
            binds=tuple(binds),
            links=tuple((base_executable, f"{ENVIRONMENT}/bin/{name}") for name in ("python", "python3")),
            files=(),
        )
    binds += [(prefix / "lib", f"{ENVIRONMENT}/lib")]
    if (prefix / "lib64").is_dir() and not (prefix / "lib64").is_symlink():
        binds += [(prefix / "lib64", f"{ENVIRONMENT}/lib64")]
    settings = f"home = {inside}/bin\ninclude-system-site-packages = false\n"
    return Interpreter(
        executable=f"{ENVIRONMENT}/bin/python",
        base_executable=base_executable,
        binds=tuple(binds),
        links=tuple((base_executable, f"{ENVIRONMENT}/bin/{name}") for name in ("python", "python3", version)),
        files=((f"{ENVIRONMENT}/pyvenv.cfg", settings.encode()),),
    )


def python_argv() -> list[str]:
    """The words that start this Python, with the packages of its environment, inside a sandbox."""
    return [find_interpreter().executable]
