"""benchmarks/vision.py in miniature: every kind of arm gives a row, and kept answers can be scored again."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "vision.py"


@pytest.fixture(scope="module")
def vision() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_vision", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_vision"] = module
    spec.loader.exec_module(module)
    return module


def run(vision: ModuleType, folder: Path, arm: str, **more) -> dict:
    given = {"tiny": True, "steps": 5, "samples": 2, "workers": 0, "results": folder / "vision.json", **more}
    vision.main(vision.Settings(arm=arm, **given))
    (row,) = [row for row in json.loads((folder / "vision.json").read_text()) if row["arm"] == arm]
    return row


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_arm_that_draws_gives_scores_with_intervals_and_a_control(vision, inside):
    row = run(vision, inside, "scenes")
    assert row["samples"] == 2 and 0 <= row["parses"] <= 1 and row["text_bits_per_byte"] > 0
    for part in ("own", "shuffled"):
        mean, low, high = row[part]["reward"]
        assert 0 <= low <= mean <= high <= 1
    kept = json.loads((inside / "vision-scenes-0-tiny.json").read_text())
    assert len(kept["texts"]) == 2
    kept["texts"] = [each.answer for each in _asked(vision, kept)]
    (inside / "vision-scenes-0-tiny.json").write_text(json.dumps(kept))
    again = run(vision, inside, "scenes", rescore=True)
    assert again["own"]["reward"][0] == again["parses"] == 1.0 and again["steps"] == 5
    assert again["shuffled"]["reward"][0] < 1


def _asked(vision: ModuleType, kept: dict) -> list:
    config = vision.from_plain(vision.RunConfig, kept["config"])
    tokenizer = vision.Tokenizer.train([], 512)
    rows = vision.VisionRows(config.data.vision, tokenizer, seq_len=512, seed=0, held_out=True)
    return rows.examples(2, task="svg")


def test_late_fusion_tells_the_dip_and_the_control_has_the_same_text(vision, inside):
    late = run(vision, inside, "fusion-late")
    assert late["dip"] == pytest.approx(late["after_entry"] / late["before_entry"] - 1)
    control = run(vision, inside, "text-only")
    assert control["vision_loss"] is None and control["tokens"] == pytest.approx(0.9 * late["tokens"])
    assert "own" not in control


def test_steps_fill_the_time_that_is_given(vision):
    config = vision.config_of(vision.Settings(arm="scenes", tiny=True, workers=0))
    assert vision.steps_for(config, 1e-6) == vision.MEASURED_STEPS


def test_arms_of_one_comparison_take_as_many_steps_as_the_first_of_them(vision, inside, monkeypatch):
    monkeypatch.setattr(vision, "steps_for", lambda config, seconds: 6)
    assert run(vision, inside, "fusion-late", steps=None, seconds=9.0)["steps"] == 6
    monkeypatch.setattr(vision, "steps_for", lambda config, seconds: 7)
    assert run(vision, inside, "text-only", steps=None, seconds=9.0)["steps"] == 6
    assert run(vision, inside, "text-only", steps=None, seconds=8.0)["steps"] == 7
    assert run(vision, inside, "scenes", steps=None, seconds=9.0)["steps"] == 7


@pytest.mark.parametrize("arm", ["scenes", "fusion-late", "text-only"])
@pytest.mark.parametrize("steps", [16, 55, 600, 3000])
def test_validation_is_rare_enough_to_cost_little_and_often_enough_to_be_a_curve(vision, arm, steps):
    config = vision.config_of(vision.Settings(arm=arm))
    every = vision.steps_between_validations(config, steps)
    vision_rows = 0 if arm == "text-only" else vision.VISION_VALID_ROWS
    validated = steps // every * (config.trainer.eval_rows + vision_rows)
    assert validated <= 0.05 * steps * config.trainer.global_batch_rows
    assert steps < 3000 or steps // every >= 40


@pytest.mark.parametrize("arm", ["scenes", "icons", "html", "video"])
def test_every_step_of_an_arm_that_draws_has_the_same_rows_of_each_kind(vision, arm):
    """So that few shapes of micro-batches come, and steps are replayed."""
    config = vision.config_of(vision.Settings(arm=arm, icons="icons.jsonl"))
    fusion, rows = config.fusion(), config.trainer.global_batch_rows
    counts = {fusion.vision_before((step + 1) * rows) - fusion.vision_before(step * rows) for step in range(50)}
    assert len(counts) == 1 and max(counts) <= config.trainer.micro_batch_rows


def test_the_arms_of_one_comparison_spend_the_same_rows(vision):
    spent = set()
    for timing in ("early", "mid", "late"):
        config = vision.config_of(vision.Settings(arm=f"fusion-{timing}"))
        rows = config.trainer.steps * config.trainer.global_batch_rows
        spent.add(config.fusion().vision_before(rows))
    control = vision.config_of(vision.Settings(arm="text-only"))
    (vision_rows,) = spent
    assert control.trainer.steps * control.trainer.global_batch_rows == rows - vision_rows
