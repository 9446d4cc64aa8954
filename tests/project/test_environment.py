"""`make` sets up .venv once, repairs it when it was interrupted, and says in one line what is missing.

The shell part is tried through make with programs of our own on PATH; the Python part with pip replaced, since a real
installation takes minutes and a network.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLES_OF_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "TORCH", "PIP_ARGS", "EXTRAS", "DISK_GB", "JOBS"}
# Programs the Makefile and its scripts start, Python apart.
PROGRAMS = ("make", "sh", "env", "awk", "getconf", "id", "echo", "rm", "find", "git")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that set-up reads, in a folder whose name has a space."""
    folder = tmp_path / "a checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "make", folder / "make", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH without any Python."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in PROGRAMS:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


def write_program(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_make(checkout: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES_OF_MAKE}
    return subprocess.run(
        ["make", *arguments], cwd=checkout, env=inherited | variables, capture_output=True, text=True, check=False
    )


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what is wrong, beside make's own last line."""
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(lines) == 1, done.stderr
    return lines[0]


# make and the shell --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["demo", "test"])
def test_no_python_is_one_clear_line(checkout: Path, programs: Path, target: str) -> None:
    assert "needs Python >= 3.11" in complaint(run_make(checkout, target, PATH=str(programs)))
    assert not (checkout / ".venv").exists()


def test_only_an_old_python_is_one_clear_line(checkout: Path, programs: Path) -> None:
    write_program(programs, "python3", "exit 1")  # what `sys.exit(version < (3, 11))` answers
    assert "needs Python >= 3.11" in complaint(run_make(checkout, "test", PATH=str(programs)))


def test_a_python_without_venv_is_one_clear_line(checkout: Path, programs: Path) -> None:
    write_program(programs, "python3.12", 'case "$2" in *ensurepip*) exit 1;; esac')
    line = complaint(run_make(checkout, "test", PATH=str(programs)))
    assert "python3.12 has no venv" in line and "python3-venv" in line


def test_a_python_with_venv_is_preferred_to_a_newer_one_without(checkout: Path, programs: Path) -> None:
    write_program(programs, "python3.13", 'case "$2" in *ensurepip*) exit 1;; esac')
    write_program(programs, "python3.11", 'case "$1" in make/*) echo chosen "$0";; esac')
    done = run_make(checkout, "environment", PATH=str(programs))
    assert done.returncode == 0 and done.stdout.strip().endswith("python3.11")


def test_a_named_python_that_does_not_run_is_one_clear_line(checkout: Path) -> None:
    assert "PYTHON=no-such-python" in complaint(run_make(checkout, "test", "PYTHON=no-such-python"))


def test_too_little_disk_is_one_clear_line(checkout: Path) -> None:
    line = complaint(run_make(checkout, "test", f"PYTHON={sys.executable}", "DISK_GB=1e9"))
    assert "free disk" in line
    assert not (checkout / ".venv").exists()


def test_no_package_index_is_one_clear_line_and_leaves_no_stamp(checkout: Path) -> None:
    # PIP_NO_INDEX stands for the missing network: pip gives up at once in place of after its retries.
    no_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    line = complaint(run_make(checkout, "demo", f"PYTHON={sys.executable}", "DISK_GB=0", **no_index))
    assert "pip install torch==2.13.0 failed" in line and "network" in line
    log = checkout / ".cache" / "install.log"
    assert str(log) in line and "No matching distribution" in log.read_text()
    assert not list((checkout / ".venv").glob(".complete-*"))


def test_system_packages_on_another_system_are_one_clear_line(checkout: Path, programs: Path) -> None:
    line = complaint(run_make(checkout, "system-deps", PATH=str(programs)))  # no apt-get there
    assert "Debian" in line and "chromium" in line


def test_missing_system_packages_as_an_ordinary_user_are_one_clear_line(checkout: Path, programs: Path) -> None:
    (programs / "id").unlink()
    for name, script in {"dpkg-query": "exit 1", "apt-get": "exit 1", "id": "echo 1000"}.items():
        write_program(programs, name, script)
    line = complaint(run_make(checkout, "system-deps", PATH=str(programs)))
    assert ("must run as root" if Path("/etc/debian_version").exists() else "Debian") in line


# environment.py ------------------------------------------------------------------------------------------------------


class Commands:
    """Stands in for the programs that set-up runs; `fail_at` names the one that raises instead."""

    def __init__(self, setup: ModuleType) -> None:
        self.setup = setup
        self.ran: list[str] = []
        self.fail_at: str | None = None
        self.failure: BaseException | None = None

    def __call__(self, environment: object, what: str, command: list[str | Path]) -> None:
        assert isinstance(environment, self.setup.Environment)
        if self.fail_at and self.fail_at in what:
            assert self.failure
            raise self.failure
        self.ran.append(what)
        if what == "creating .venv":
            shutil.rmtree(environment.venv, ignore_errors=True)  # what --clear does
            environment.python.parent.mkdir(parents=True)
            environment.python.symlink_to(sys.executable)
            (environment.venv / "pyvenv.cfg").touch()

    def creations(self) -> int:
        return self.ran.count("creating .venv")

    def installations(self) -> int:
        return sum("pip install" in what for what in self.ran)


@pytest.fixture
def setup(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("environment_of_make", checkout / "make" / "environment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def commands(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Commands:
    stand_in = Commands(setup)
    monkeypatch.setattr(setup, "run_logged", stand_in)
    monkeypatch.setattr(setup, "installed_torch", lambda environment: "2.13.0")
    # The stand-in's .venv has no pip to ask; the other conditions are the real ones.
    monkeypatch.setattr(setup.subprocess, "run", _answers_with_this_version)
    return stand_in


def _answers_with_this_version(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], 0, stdout=".".join(map(str, sys.version_info[:3])), stderr="")


@pytest.fixture
def environment(setup: ModuleType, checkout: Path):
    return setup.Environment(folder=checkout, torch="torch==2.13.0", pip_args=(), extras="train,test", disk_gb=0.0)


def test_second_run_starts_neither_venv_nor_pip(setup, commands, environment) -> None:
    setup.prepare(environment)
    assert commands.creations() == 1 and commands.installations() == 2
    commands.ran.clear()
    setup.prepare(environment)
    assert commands.ran == []


def test_torch_is_installed_before_the_package_and_keeps_its_version(setup, commands, environment) -> None:
    setup.prepare(replace(environment, pip_args=("--pre",)))
    torch, package = commands.ran[1:]
    assert torch == "pip install torch==2.13.0 --pre"
    assert package.startswith("pip install -e") and package.endswith("-c .venv/constraints.txt")
    assert (environment.venv / "constraints.txt").read_text() == "torch==2.13.0\n"


def test_changed_requirements_install_into_the_same_venv(setup, commands, environment) -> None:
    setup.prepare(environment)
    pyproject = environment.folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('"rich>=', '"tabulate", "rich>='))
    setup.prepare(environment)
    setup.prepare(replace(environment, torch="torch==2.11.0"))
    assert commands.creations() == 1 and commands.installations() == 6
    assert len(list(environment.venv.glob(".complete-*"))) == 1


def test_a_changed_setting_of_a_tool_installs_nothing(setup, commands, environment) -> None:
    setup.prepare(environment)
    commands.ran.clear()
    pyproject = environment.folder / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("line-length = 120", "line-length = 100"))
    setup.prepare(environment)
    assert commands.ran == []


@pytest.mark.parametrize("step", ["creating .venv", "torch==", "-e"])
def test_an_interrupted_installation_is_built_anew(setup, commands, environment, step: str) -> None:
    commands.fail_at, commands.failure = step, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        setup.prepare(environment)
    assert not setup.is_complete(environment)
    commands.fail_at = None
    commands.ran.clear()
    setup.prepare(environment)
    assert setup.is_complete(environment) and commands.creations() == 1 and commands.installations() == 2


def test_an_interrupted_update_does_not_pass_for_complete(setup, commands, environment) -> None:
    setup.prepare(environment)
    other = replace(environment, torch="torch==2.11.0")
    commands.fail_at, commands.failure = "-e", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        setup.prepare(other)
    assert not setup.is_complete(other) and not setup.is_complete(environment)


def test_an_installation_that_pip_gave_up_continues_in_the_same_venv(setup, commands, environment) -> None:
    commands.fail_at, commands.failure = "-e", setup.SetupError("no network")
    with pytest.raises(setup.SetupError, match="no network"):
        setup.prepare(environment)
    commands.fail_at = None
    setup.prepare(environment)
    assert setup.is_complete(environment) and commands.creations() == 1


def test_a_moved_folder_builds_its_venv_anew(setup, commands, environment) -> None:
    setup.prepare(environment)
    moved = environment.folder.with_name("moved")
    environment.folder.rename(moved)
    setup.prepare(replace(environment, folder=moved))
    assert commands.creations() == 2


def test_a_venv_whose_python_is_gone_is_not_complete(setup, commands, environment) -> None:
    setup.prepare(environment)
    environment.python.unlink()
    environment.python.symlink_to("gone")
    assert not setup.is_complete(environment)


def test_two_makes_at_once_install_once(setup, commands, environment) -> None:
    threads = [threading.Thread(target=setup.prepare, args=(environment,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert commands.creations() == 1 and commands.installations() == 2


def test_a_folder_of_somebody_else_is_one_clear_line(setup, commands, environment, monkeypatch) -> None:
    setup.prepare(environment)
    # Root may write everywhere, so the answer of the system is replaced.
    monkeypatch.setattr(setup.os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(setup.SetupError, match="cannot write to"):
        setup.prepare(environment)
