"""benchmarks/vision.py in miniature: every kind of arm gives a row, and kept answers can be scored again."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
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
    assert [step for step, _ in late["text_curve"]] == [1, 2, 3, 4, 5] and late["entry_step"] == 4
    control = run(vision, inside, "text-only")
    assert control["vision_loss"] is None and control["tokens"] == pytest.approx(0.9 * late["tokens"])
    assert "own" not in control


def test_mixed_frames_are_the_frames_of_the_video_in_another_order(vision):
    config = vision.config_of(vision.Settings(arm="video", tiny=True, workers=0))
    tokenizer = vision.Tokenizer.train([], 512)
    rows = vision.VisionRows(config.data.vision, tokenizer, seq_len=512, seed=0, held_out=True)
    for each in rows.examples(6, task="video"):
        mixed = vision.frames_mixed(tokenizer, each)
        (_, (chunks,)) = vision.pictures(each.sample)
        frames = [frame.tobytes() for _, media in chunks for frame in np.split(media.pixels, media.grid[0])]
        moved = [frame.tobytes() for media in mixed.media for frame in np.split(media.pixels, media.grid[0])]
        assert sorted(moved) == sorted(frames) and moved != frames


def test_similarity_by_frame_counts_the_videos_that_have_such_a_frame(vision):
    config = vision.config_of(vision.Settings(arm="video", tiny=True, workers=0))
    vision_config = vision.replace(config.data.vision, scenes=vision.replace(config.data.vision.scenes, max_frames=8))
    rows = vision.VisionRows(vision_config, vision.Tokenizer.train([], 512), seq_len=512, seed=0, held_out=True)
    asked = rows.examples(6, task="video")
    lengths = [len(each.sample.frames) for each in asked]
    assert min(lengths) < max(lengths)
    found = vision.pixel_by_frame([each.answer for each in asked], asked)
    assert found == [[sum(number < length for length in lengths), 1.0] for number in range(max(lengths))]
    nothing = vision.pixel_by_frame(["no picture"] * 6, asked)
    assert [similarity for _, similarity in nothing] == [0.0] * max(lengths)


def test_steps_are_those_of_the_arm_unless_others_are_asked_for(vision, inside, monkeypatch):
    monkeypatch.setattr(vision, "TINY_STEPS", 6)
    monkeypatch.setattr(vision, "steps_for", lambda config, seconds: 4)
    assert run(vision, inside, "text-only", steps=None)["steps"] == 6
    assert run(vision, inside, "text-only", steps=None, seconds=9.0)["steps"] == 4
    assert {vision.STEPS[arm] for arm in vision.STEPS if arm not in vision.KINDS} == {vision.FUSION_STEPS}


def test_steps_fill_the_time_that_is_given(vision):
    config = vision.config_of(vision.Settings(arm="scenes", tiny=True, workers=0))
    assert vision.steps_for(config, 1e-6) == vision.MEASURED_STEPS


def test_a_dip_is_the_worst_validation_shortly_after_the_entry(vision):
    curve = [(10, 2.0), (20, 1.5), (30, 1.8), (40, 1.4), (90, 3.0)]
    assert vision.dip(curve, 20, 100, 10)["dip"] == pytest.approx(0.2)
    assert vision.dip(curve, 30, 100, 10)["dip"] == pytest.approx(1.4 / 1.8 - 1)
    assert vision.dip(curve, 95, 100, 10) == {} == vision.dip(curve, 5, 100, 10)


def test_the_bar_asks_for_what_parses_and_for_intervals_that_are_apart(vision):
    assert all(vision.bar(0.95, [0.5, 0.4, 0.6], [0.3, 0.2, 0.39]).values())
    assert not vision.bar(0.94, [0.5, 0.4, 0.6], [0.3, 0.2, 0.39])["parses"]
    assert not vision.bar(1.0, [0.5, 0.4, 0.6], [0.31, 0.2, 0.39])["lower_against_others"]
    assert not vision.bar(1.0, [0.5, 0.4, 0.6], [0.3, 0.2, 0.4])["lower_against_others"]


@pytest.mark.parametrize("steps", [55, 600, 3000])
def test_validation_is_rare_enough_to_cost_little_where_nothing_depends_on_its_curve(vision, steps):
    config = vision.config_of(vision.Settings(arm="scenes"))
    every = vision.steps_between_validations(config, steps)
    validated = steps // every * (config.trainer.eval_rows + vision.VISION_VALID_ROWS)
    assert validated <= 0.05 * steps * config.trainer.global_batch_rows


@pytest.mark.parametrize("arm", ["fusion-early", "fusion-late", "text-only"])
def test_text_is_validated_at_the_same_fifty_steps_in_all_arms_of_the_comparison(vision, arm):
    config = vision.config_of(vision.Settings(arm=arm))
    assert vision.steps_between_validations(config, vision.FUSION_STEPS) == vision.FUSION_STEPS // 50


def test_icons_are_counted_with_those_left_out(vision, inside):
    pen = 'viewBox="0 0 24 24" fill="none" stroke="black" stroke-width="2"'
    drawings = {
        "tabler": ["M4 4h16", "M4 9h6", "M4 4v9"],
        "lucide": ["M4 20c9-9 9 9 16-16", "M12 12h.01", '" transform="scale(2)'],
    }
    records = [
        {
            "source": name,
            "licence": "",
            "name": str(i),
            "style": "outline",
            "svg": f'<svg {pen}><path d="{data}"/></svg>',
        }
        for name, each in drawings.items()
        for i, data in enumerate(each)
    ]
    (inside / "icons.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    row = run(vision, inside, "icons", icons="icons.jsonl", steps=2)
    assert row["icons"] == {"train": 3, "held_out": 2, "left_out": {"attribute transform": 1}}
    assert row["answers_longer_than_sampled"] == 0 or row["answer_tokens"][2] > 64


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
