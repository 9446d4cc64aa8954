"""benchmarks/serve_prefill.py: what it fits and sums, and the whole script in miniature."""

from pathlib import Path
from types import ModuleType

import pytest

from perilune.bench.rows import Row, read_rows
from tests.benchmark_scripts import load_script

LENGTHS = [1024, 2048, 4096, 8192]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script(monkeypatch, "serve_prefill")


def test_the_fit_finds_both_terms_of_a_prefill(script: ModuleType) -> None:
    a, b = script.fit(LENGTHS, [3e-6 * length + 2e-9 * length**2 for length in LENGTHS])
    assert (a, b) == pytest.approx((3e-6, 2e-9))


@pytest.mark.parametrize("power", [0.9, 1, 2, 2.2])
def test_no_term_of_the_fit_is_below_zero(script: ModuleType, power: float) -> None:
    a, b = script.fit(LENGTHS, [1e-6 * length**power for length in LENGTHS])
    assert min(a, b) >= 0 and max(a, b) > 0


def test_the_slope_of_linear_time_is_one(script: ModuleType) -> None:
    assert script.slope(LENGTHS, [5e-9 * length for length in LENGTHS]) == pytest.approx(1.0)
    assert script.slope(LENGTHS, [5e-9 * length**1.5 for length in LENGTHS]) == pytest.approx(1.5)


def test_chunks_between_measured_ones_are_interpolated(script: ModuleType) -> None:
    # A chunk after p tokens takes 1 + p / 100 seconds: the sum over p = 0, 100, ..., 700 is 8 + 28.
    assert script.summed([0, 100, 400, 700], [1.0, 2.0, 5.0, 8.0], 100, 800) == pytest.approx(36.0)
    assert script.summed([0, 100, 400, 700], [1.0, 2.0, 5.0, 8.0], 100, 200) == pytest.approx(3.0)


def test_the_miniature_measures_every_length_and_compares_both_models(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(script.Settings(tiny=True, results=tmp_path / "rows.json", commit="abc")) == 0
    rows = read_rows(tmp_path / "rows.json")
    named = {(row.case, row.metric): row for row in rows}
    assert sum("slope" in row.metric for row in rows) == 2
    for kind in ("3to1", "mla"):
        assert named[f"prefill {kind}, 4 layers", "fit, b"].ours >= 0
        assert named[f"prefill {kind}, 4 layers, 4,096 tokens", "whole run"].peer_name == "sum of chunks"
    compared: Row = named["prefill 3to1, 4 layers, 4,096 tokens", "sum of chunks"]
    assert compared.peer_name == "all-MLA" and compared.ratio == pytest.approx((compared.peer or 0) / compared.ours)
    assert {row.commit for row in rows} == {"abc"}


def test_a_chunk_that_does_not_divide_the_longest_prompt_is_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="--chunk 1000"):
        script.main(script.Settings(chunk=1000))
