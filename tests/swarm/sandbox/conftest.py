"""Who runs a scenario: the user of the test run and, when that is root, an ordinary user too."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from perilune.swarm.sandbox import layers

ROOT = Path(__file__).resolve().parents[3]
ORDINARY = 54321
ENVIRONMENT = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]}


@pytest.fixture(scope="session")
def working_sandbox() -> None:
    """Skips where bubblewrap is there but the machine forbids what it needs."""
    first = layers()[0]
    if not first.active:
        pytest.skip(f"no sandbox here: {first.reason}")


def _run(python: str, words: list[str], user: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *words], env=ENVIRONMENT, cwd="/", capture_output=True, text=True, timeout=300, check=False, **user
    )


@pytest.fixture(scope="session")
def ordinary_python() -> str:
    """A Python that an ordinary user may execute: root's own may lie in root's home."""
    found = [sys.executable, *filter(None, [shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")])]
    user = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}
    for python in found:
        try:
            if (
                _run(
                    python, ["-c", "import sys, tests.swarm.sandbox; assert sys.version_info >= (3, 11)"], user
                ).returncode
                == 0
            ):
                return python
        except PermissionError:
            continue
    pytest.skip("no Python >= 3.11 and copy of this repository that an ordinary user may read")


@pytest.fixture(params=["own user", "ordinary user"] if os.geteuid() == 0 else ["own user"])
def play(
    request: pytest.FixtureRequest, tmp_path: Path, working_sandbox: None
) -> Generator[Callable[[str], dict[str, Any]]]:
    """`play("escapes")` runs that scenario and gives what it found."""
    python, user = sys.executable, {}
    folder = tmp_path
    if request.param == "ordinary user":
        python = request.getfixturevalue("ordinary_python")
        user = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []}
        # Below tmp_path, which is closed to others, that user would not find it.
        folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
        os.chown(folder, ORDINARY, ORDINARY)

    def run(name: str) -> dict[str, Any]:
        done = _run(python, ["-m", "tests.swarm.sandbox.scenarios", name, str(folder)], user)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    yield run
    shutil.rmtree(folder, ignore_errors=True)
