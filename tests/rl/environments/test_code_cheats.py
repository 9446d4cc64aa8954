"""Solutions that try everything but solving the task: none earns more than the honest part of its work."""

import os
import tempfile
from pathlib import Path

import pytest

from perilune.rl.environment import Task
from perilune.rl.environments.code import Code
from perilune.rl.environments.code_exchange import ServerLimits
from tests.rl.environments.said import played

pytestmark = pytest.mark.needs_tool("bwrap")

INPUTS = [[5], [17], [29], [101]]
OUTPUTS = [11, 35, 59, 203]
TASK = Task(name="f", data={"prompt": "Write f.", "function": "f", "inputs": INPUTS, "outputs": OUTPUTS, "exact": True})
QUICK = ServerLimits(input_seconds=1.0, total_seconds=20.0, cpu_seconds=1.0, memory_bytes=96 << 20)
PATIENT = ServerLimits(input_seconds=30.0, total_seconds=60.0, cpu_seconds=3.0)
NEED_LANDLOCK = ("starts a program", "imports the reference")

CORPUS = (Path(__file__).parent / "test_code_cheats.txt").read_text(encoding="utf-8")


def blocks() -> dict[str, tuple[str, float]]:
    """Sources and what they earn, by name."""
    found = {}
    for block in CORPUS.split("\n=== ")[1:]:
        title, _, source = block.partition("\n")
        name, _, share = title.partition(" = ")
        found[name] = (source.split("\n### ")[0].strip("\n") + "\n", float(share or 0))
    pipe, _ = found.pop("PIPE")
    return {name: (source.replace("PIPE\n", pipe, 1), share) for name, (source, share) in found.items()}


CHEATS = blocks() | {
    "holds a NUL": ("def f(x):\n    return 2 * x + 1\0", 0.0),
    "holds half a character": ("def f(x):\n    return 2 * x + 1  # \ud800", 0.0),
    "is too long": ("def f(x):\n    return 2 * x + 1\n" + "#" * 300_000, 0.0),
    "is nested too deeply": ("f = " + "(" * 5000 + "1" + ")" * 5000, 0.0),
    "is empty": ("", 0.0),
}


@pytest.fixture
def judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, working_sandbox: None):
    """`judged(source)`: facets of a reply with this source; nothing may be left of it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    open_before = os.listdir("/proc/self/fd")

    def judge(source: str, limits: ServerLimits) -> dict[str, float]:
        facets, _ = played(Code(limits=limits), TASK, f"Here it is:\n```python\n{source}\n```\nAll tests pass.")
        return facets

    yield judge
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) <= len(open_before) + 2  # threads of the sandbox keep a few


@pytest.mark.parametrize("name", [name for name, (_, share) in CHEATS.items() if not share])
def test_a_cheat_earns_nothing(judged, name, request):
    if name in NEED_LANDLOCK:
        request.getfixturevalue("landlock")
    assert judged(CHEATS[name][0], QUICK)["outcome"] == 0.0


@pytest.mark.parametrize("name", [name for name, (_, share) in CHEATS.items() if share])
def test_honest_work_is_paid_and_nothing_beside_it(judged, name):
    source, share = CHEATS[name]
    assert judged(source, PATIENT)["outcome"] == share


def test_there_are_many_of_them():
    assert sum(not share for _, share in CHEATS.values()) >= 60
