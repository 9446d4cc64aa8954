"""Importing stays cheap, and the examples of the README are real programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run_python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    variables = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=variables, capture_output=True, text=True, timeout=300, check=False
    )


def loaded_by(module: str, cwd: Path) -> set[str]:
    done = run_python("-c", f"import sys, {module}; print(*sys.modules)", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def test_importing_perilune_loads_nothing_heavy(tmp_path: Path) -> None:
    assert not loaded_by("perilune", tmp_path) & {"torch", "numpy", "matplotlib", "transformers", "rich", "tyro"}


@pytest.mark.parametrize("module", ["perilune.report", "perilune.data"])
def test_packages_that_do_without_torch_do_not_load_it(module: str, tmp_path: Path) -> None:
    assert not loaded_by(module, tmp_path) & {"torch", "transformers"}


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_runs(example: Path, tmp_path: Path) -> None:
    assert len(example.read_text().splitlines()) <= 40
    done = run_python(str(example), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
