"""benchmarks/attnres_decode.py and deterministic_cost.py in miniature."""

from pathlib import Path

import pytest

from perilune.bench.rows import read_rows
from tests.benchmark_scripts import load_script


def test_decoding_with_attention_residuals_is_compared_with_plain_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script(monkeypatch, "attnres_decode")
    assert script.main(script.Settings(tiny=True, results=tmp_path / "rows.json")) == 0
    rows = read_rows(tmp_path / "rows.json")
    for batch in (1, 4):
        step, overhead = (row for row in rows if row.case.startswith(f"decode, batch {batch},"))
        assert step.peer_name == "plain residual"
        assert overhead.ours == pytest.approx(100 * (step.ours / (step.peer or 0) - 1))
    counted, a_block, a_sublayer = (row for row in rows if row.case.startswith("launches"))
    extra = counted.ours - (counted.peer or 0)
    assert a_sublayer.ours == pytest.approx(extra / 8) and a_block.ours == pytest.approx(extra / 3)


def test_the_deterministic_mode_gives_the_bits_of_training_and_its_price(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script(monkeypatch, "deterministic_cost")
    assert script.main(script.Settings(tiny=True, results=tmp_path / "rows.json")) == 0
    rows = {row.metric: row for row in read_rows(tmp_path / "rows.json")}
    assert [name for name, row in rows.items() if row.peer_name == "ordinary"] == [
        "training forward",
        "prefill",
        "decode",
    ]
    assert rows["log-probs of 46 that differ"].ours == 0


def test_bits_that_differ_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script(monkeypatch, "deterministic_cost")
    right = script.scores
    calls = []

    def shaken(logits, tokens):
        calls.append(None)
        return right(logits, tokens) + 1e-6 * len(calls)

    monkeypatch.setattr(script, "scores", shaken)
    assert script.main(script.Settings(tiny=True, results=tmp_path / "rows.json")) == 1
