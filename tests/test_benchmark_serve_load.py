"""benchmarks/serve_load.py: the load it makes, and the whole script in miniature with transformers beside it."""

from pathlib import Path
from types import ModuleType

import pytest

from perilune.bench.rows import read_rows
from tests.benchmark_scripts import load_script


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script(monkeypatch, "serve_load")


def test_rounds_have_the_same_lengths_and_no_common_prompt(script: ModuleType) -> None:
    settings = script.Settings()
    first, second = (script.works(settings, 20, seed) for seed in (1, 1001))
    assert [(len(work.prompt), work.answer) for work in first] == [(len(work.prompt), work.answer) for work in second]
    assert not {work.prompt for work in first} & {work.prompt for work in second}
    assert all(64 <= len(work.prompt) <= 2048 and 64 <= work.answer <= 256 for work in first)


def test_arrivals_are_in_order_within_the_time_and_as_many_as_the_rate_says(script: ModuleType) -> None:
    times = list(script.poisson(50.0, 100.0, seed=3))
    assert times == sorted(times) and times[0] == 0.0 and times[-1] <= 100.0
    assert 4500 < len(times) < 5500  # seven standard deviations
    assert len(list(script.poisson(1e-6, 1.0, seed=3))) == 1


def test_the_miniature_measures_load_and_waiting_times(script: ModuleType, tmp_path: Path) -> None:
    settings = script.Settings(tiny=True, parts=("throughput", "latency"), results=tmp_path / "rows.json")
    assert script.main(settings) == 0
    rows = read_rows(tmp_path / "rows.json")
    assert [row.unit for row in rows[:2]] == ["tokens/s", "tokens/s"]
    waits = [row for row in rows if row.case.startswith("load ")]
    assert len(waits) == 3 * (1 + 6)
    for load in (waits[:7], waits[7:14], waits[14:]):
        first = [row.ours for row in load if row.metric.startswith("first token")]
        assert 0 < first[0] <= first[1] <= first[2]


def test_transformers_answers_the_same_requests_from_the_same_weights(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    settings = script.Settings(tiny=True, parts=("throughput", "peer"), results=tmp_path / "rows.json")
    assert script.main(settings) == 0
    compared = [row for row in read_rows(tmp_path / "rows.json") if row.peer_name == "transformers"]
    assert [row.metric.split(",")[0] for row in compared] == [
        "against generate one batch",
        "against generate one by one",
    ]
    assert all(row.ratio == pytest.approx(row.ours / (row.peer or 0)) for row in compared)
    assert "5 of 5 equal tokens" in capsys.readouterr().out  # float32: the same greedy answer


def test_a_peer_that_cannot_start_leaves_what_was_measured(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_nothing(model: object, folder: Path, target: str) -> None:
        folder.mkdir()

    monkeypatch.setattr(script.hub, "save_pretrained", write_nothing)
    settings = script.Settings(tiny=True, parts=("throughput", "peer"), results=tmp_path / "rows.json")
    assert script.main(settings) == 1
    assert len(read_rows(tmp_path / "rows.json")) == 2
    assert "last words" in capsys.readouterr().err
