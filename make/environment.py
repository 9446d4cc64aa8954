"""Create or repair .venv: torch first, then this package with its extras. Standard library only.

torch goes first and alone, by its exact version, because a range would let pip choose a build several gigabytes larger;
the second step is constrained to whatever version the first one installed.

A stamp in .venv, named by a hash of everything the installation depends on, says that it is complete: the next run
finds it and starts neither pip nor the network. An installation that is killed leaves the mark `.installing` behind
instead, and the next run builds .venv anew, since a half-copied package can look installed to pip. An installation that
pip itself gives up (no network) is kept and continued.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


class SetupError(Exception):
    """What is missing and what to do about it, in one line."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    folder: Path
    torch: str
    pip_args: tuple[str, ...]
    extras: str
    disk_gb: float

    @property
    def venv(self) -> Path:
        return self.folder / ".venv"

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"

    @property
    def cache(self) -> Path:
        return self.folder / ".cache"

    @property
    def log(self) -> Path:
        return self.cache / "install.log"

    @property
    def installing(self) -> Path:
        return self.venv / ".installing"

    @property
    def stamp(self) -> Path:
        # The folder counts because scripts and the editable install hold absolute paths: a moved .venv is stale.
        # Of pyproject.toml only the tables that pip reads count: a new lint rule needs no network.
        project = tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))
        project["tool"] = project.get("tool", {}).get("hatch")
        parts = (project, self.torch, self.extras, python_version(), str(self.folder))
        return self.venv / f".complete-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}"


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def is_complete(environment: Environment) -> bool:
    # X_OK follows the link: the interpreter behind .venv may have been removed, or belong to somebody else.
    return environment.stamp.exists() and os.access(environment.python, os.X_OK)


def check_writable(environment: Environment) -> None:
    for path in (environment.folder, environment.venv, environment.cache):
        if path.exists() and not os.access(path, os.W_OK):
            raise SetupError(
                f"cannot write to {path} (it belongs to {path.owner()}); give it to this user or remove it"
            )


def check_disk(environment: Environment, needed_gb: float) -> None:
    free_gb = shutil.disk_usage(environment.folder).free / 2**30
    if free_gb < needed_gb:
        raise SetupError(f"needs {needed_gb:g} GB of free disk for {environment.venv}, found {free_gb:.1f} GB")


def is_usable(environment: Environment) -> bool:
    """Whether .venv can be installed into, as opposed to built anew."""
    if environment.installing.exists() or not (environment.venv / "pyvenv.cfg").exists():
        return False
    if any(stamp.read_text() != str(environment.folder) for stamp in environment.venv.glob(".complete-*")):
        return False
    probe = "import pip, sys; print('.'.join(map(str, sys.version_info[:3])))"
    try:
        answer = subprocess.run([environment.python, "-c", probe], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return answer.returncode == 0 and answer.stdout.strip() == python_version()


def pip_variables(environment: Environment) -> dict[str, str]:
    """The caller's variables (indexes, certificates, proxies), minus what would leave the folder or ask a question."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    temporary = environment.cache / "tmp"  # a small /tmp is a usual reason for a failed torch installation
    temporary.mkdir(parents=True, exist_ok=True)
    return variables | {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_INPUT": "1",
        "PIP_USER": "0",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(temporary),
    }


def run_logged(environment: Environment, what: str, command: list[str | Path]) -> None:
    """Run a command into the log, its latest line on the terminal; a failure becomes one line with the reason."""
    width = shutil.get_terminal_size().columns - 3 if sys.stdout.isatty() else 0
    reason = ""
    with environment.log.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(map(str, command))}\n")
        process = subprocess.Popen(
            command, env=pip_variables(environment), cwd=environment.folder, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, close_fds=False,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if "ERROR:" in line:
                reason = line.partition("ERROR:")[2].strip()
            if width:
                print(f"\r\033[K  {line.strip()[:width]}", end="", flush=True)
        if width:
            print("\r\033[K", end="", flush=True)
        if process.wait() != 0:
            hint = reason or f"exit status {process.returncode}"
            raise SetupError(f"{what} failed: {hint} (is the network up? log: {environment.log})")


def installed_torch(environment: Environment) -> str:
    probe = "import importlib.metadata as metadata; print(metadata.version('torch'))"
    return subprocess.run([environment.python, "-c", probe], capture_output=True, text=True, check=True).stdout.strip()


def pip_install(environment: Environment, *arguments: str) -> None:
    command = [environment.python, "-m", "pip", "install", *arguments]
    run_logged(environment, f"pip install {shlex.join(arguments)}", command)


def install(environment: Environment) -> None:
    usable = is_usable(environment)
    check_disk(environment, min(1.0, environment.disk_gb) if usable else environment.disk_gb)
    environment.log.write_text("")
    if not usable:
        print(f"== creating .venv with Python {python_version()}", flush=True)
        # The interpreter behind .venv, not .venv's own, which --clear removes.
        creator = getattr(sys, "_base_executable", None) or sys.executable
        run_logged(environment, "creating .venv", [creator, "-m", "venv", "--clear", environment.venv])
    for stamp in environment.venv.glob(".complete-*"):
        stamp.unlink()
    environment.installing.touch()
    try:
        print(f"== installing {environment.torch} (some minutes; log: .cache/install.log)", flush=True)
        pip_install(environment, environment.torch, *environment.pip_args)
        (environment.venv / "constraints.txt").write_text(f"torch=={installed_torch(environment)}\n")
        print(f"== installing perilune[{environment.extras}]", flush=True)
        pip_install(environment, "-e", f".[{environment.extras}]", "-c", ".venv/constraints.txt")
    except SetupError:
        environment.installing.unlink()  # pip ended by itself and left whole packages
        raise
    environment.stamp.write_text(str(environment.folder))
    environment.installing.unlink()
    shutil.rmtree(environment.cache / "tmp", ignore_errors=True)


@contextmanager
def only_one(lock: Path) -> Iterator[None]:
    """Let one process at a time set up. The lock passes to pip, so that it holds for as long as a pip outlives us."""
    with lock.open("w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("== another make is setting up .venv; continuing when it is done", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare(environment: Environment) -> None:
    check_writable(environment)
    environment.cache.mkdir(exist_ok=True)
    if is_complete(environment):
        return
    with only_one(environment.cache / "environment.lock"):
        if not is_complete(environment):  # the one before us may have finished it
            install(environment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--torch", required=True, help="requirement for torch, for example torch==2.13.0")
    parser.add_argument("--pip-args", default="", help="more arguments for the installation of torch")
    parser.add_argument("--extras", required=True, help="extras of the package, separated by commas")
    parser.add_argument("--disk-gb", type=float, required=True, help="free disk a new .venv needs")
    arguments = parser.parse_args()
    environment = Environment(
        folder=Path(__file__).resolve().parent.parent,
        torch=arguments.torch,
        pip_args=tuple(shlex.split(arguments.pip_args)),
        extras=arguments.extras,
        disk_gb=arguments.disk_gb,
    )
    try:
        prepare(environment)
    except SetupError as error:
        print(f"perilune: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"perilune: cannot set up {environment.venv}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nperilune: interrupted; the next run starts the set-up again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
