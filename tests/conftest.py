"""What every test gets: determinism, one thread, no network, and an honest count at the end.

The last lines of a run count what passed, failed and was skipped, and the skips by reason. With PERILUNE_REQUIRE=all a
skip fails the run: a machine that claims to have every tool must use every one.
"""

import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import hypothesis
import pytest

# Before torch is imported anywhere, and inherited by the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Without a GPU the Triton kernels are tested in Triton's interpreter, which must be chosen before they are defined.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile("perilune", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("perilune")

STARTED = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result-json", metavar="PATH", help="also write date, versions, counts and duration to PATH")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Same random numbers in every test, whatever ran before it in the same process."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """A fresh folder in the place of `runs/`."""
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def _find_tool(name: str) -> str | None:
    if found := shutil.which(name):
        return found
    # Debian keeps the server's programs off PATH, one folder per version.
    servers = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(servers[-1]) if servers else None


@pytest.fixture(scope="session")
def tool_path() -> Callable[[str], str]:
    """`tool_path("chromium")` gives the program's path, or skips the test with the command that installs it."""

    def find(name: str) -> str:
        if found := _find_tool(name):
            return found
        pytest.skip(f"needs {name} (make system-deps)")

    return find


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs_tool"):
        for name in mark.args:
            if _find_tool(name) is None:
                pytest.skip(f"needs {name} (make system-deps)")


# The count at the end ------------------------------------------------------------------------------------------------


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The text of a skip, whose report holds (file, line, "Skipped: text")."""
    place = report.longrepr
    text = place[2] if isinstance(place, tuple) else str(place)
    return text.removeprefix("Skipped: ")


def _count(reporter: pytest.TerminalReporter) -> tuple[dict[str, int], Counter[str]]:
    counts = {outcome: len(reporter.stats.get(outcome, ())) for outcome in ("passed", "failed", "skipped")}
    counts["failed"] += len(reporter.stats.get("error", ()))
    return counts, Counter(_reason(report) for report in reporter.stats.get("skipped", ()))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    try:
        answer = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _gpu() -> str | None:
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None


def _write_result(path: Path, root: Path, counts: dict[str, int], reasons: Counter[str], seconds: float) -> None:
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(root),
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "gpu": _gpu(),
        },
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("perilune", "torch", "transformers", "numpy")},
        "counts": counts,
        "skipped_by_reason": dict(reasons),
        "seconds": round(seconds, 1),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    unfinished.replace(path)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STARTED] = time.monotonic()


# Outermost, so that its line is the last one: after pytest's own summary, which stays as it is.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None]:
    yield
    config = session.config
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):  # a process of xdist: the one that started it counts
        return
    counts, reasons = _count(reporter)
    if reasons and os.environ.get("PERILUNE_REQUIRE") == "all":
        reporter.write_line("PERILUNE_REQUIRE=all: a skipped test fails the run")
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if path := config.getoption("--result-json"):
        seconds = time.monotonic() - config.stash[STARTED]
        _write_result(config.rootpath / path, config.rootpath, counts, reasons, seconds)
    line = ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    by_reason = "; ".join(f"{number} x {reason}" for reason, number in sorted(reasons.items()))
    reporter.write_line(f"{line}: {by_reason}" if reasons else line)
