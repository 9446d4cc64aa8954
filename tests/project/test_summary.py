"""The last line of a test run counts the skips by reason, and PERILUNE_REQUIRE=all turns them into a failure."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.needs_tool("no-such-tool")
@pytest.mark.parametrize("number", [1, 2])
def test_needs_a_tool(number):
    pass

def test_asks_for_a_path(tool_path):
    tool_path("no-such-program")

@pytest.mark.long
def test_long_form():
    pass
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_some.py").write_text(TESTS)
    return tmp_path


def run_pytest(project: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # This run may itself be a worker of xdist or hold PERILUNE_REQUIRE.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PERILUNE_"))}
    environment = clean | {"PYTEST_DEBUG_TEMPROOT": str(project)} | variables
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("processes", ["0", "2"])
def test_last_line_counts_skips_by_reason(project: Path, processes: str) -> None:
    done = run_pytest(project, "-n", processes)
    *_, of_pytest, last = done.stdout.splitlines()
    assert done.returncode == 0
    assert of_pytest.startswith("1 passed, 3 skipped")
    counts, _, reasons = last.partition(": ")
    assert counts == "1 passed, 0 failed, 3 skipped"
    assert reasons == "1 x needs no-such-program (make system-deps); 2 x needs no-such-tool (make system-deps)"


@pytest.mark.parametrize("processes", ["0", "2"])
def test_required_tools_turn_a_skip_into_a_failure(project: Path, processes: str) -> None:
    done = run_pytest(project, "-n", processes, PERILUNE_REQUIRE="all")
    assert done.returncode == 1
    assert "PERILUNE_REQUIRE=all" in done.stdout and "1 passed, 0 failed, 3 skipped" in done.stdout


def test_required_tools_accept_a_run_without_skips(project: Path) -> None:
    assert run_pytest(project, "-k", "passes", PERILUNE_REQUIRE="all").returncode == 0


def test_long_forms_run_only_when_asked_for_and_leave_their_result(project: Path) -> None:
    done = run_pytest(project, "-m", "long", "--result-json", "results/long.json")
    assert done.returncode == 0
    result = json.loads((project / "results" / "long.json").read_text())
    assert result["counts"] == {"passed": 1, "failed": 0, "skipped": 0}
    assert result["seconds"] >= 0 and result["versions"]["python"] and result["date"]
