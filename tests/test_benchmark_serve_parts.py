"""benchmarks/parts.py: a part that fails or comes too late takes nothing from the others."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from perilune.bench.rows import read_rows
from tests.benchmark_scripts import load_script


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script(monkeypatch, "parts")


def test_a_part_that_fails_keeps_its_rows_and_the_next_one_runs(
    parts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = parts.Session(60.0, tmp_path / "rows.json", "abc", torch.device("cpu"))

    def broken() -> None:
        session.bench.add("first", "time", "ms", 1.0)
        raise RuntimeError("the middle is missing")

    session.run("broken", broken)
    session.run("whole", lambda: session.bench.add("second", "time", "ms", 2.0, peers={"other": 4.0}))
    assert session.close() == 1
    first, second = read_rows(tmp_path / "rows.json")
    assert (first.case, second.case, second.ratio, second.commit) == ("first", "second", 2.0, "abc")
    said = capsys.readouterr()
    assert "the middle is missing" in said.err
    assert "FAILED: broken" in said.out


def test_a_part_is_not_begun_when_the_time_is_over(parts: ModuleType, tmp_path: Path) -> None:
    session = parts.Session(0.0, tmp_path / "rows.json", "", torch.device("cpu"))
    ran: list[str] = []
    session.run("late", lambda: ran.append("late"))
    assert session.close() == 0
    assert ran == []
    assert any("late" in note for note in session.bench.notes)
