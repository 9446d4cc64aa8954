"""benchmarks/vision_page.py and vision_memory.py in miniature: answers become a sheet and a page, both steps agree."""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from perilune.data import Tokenizer, VisionDataConfig, VisionRows
from perilune.data.scenes import ScenesConfig
from perilune.recipes.pretrain import nano
from perilune.train.config_file import to_plain
from tests.benchmark_scripts import load_script


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script(monkeypatch, "vision_page")


def kept(folder: Path, kind: str, task: str, texts: list[str] | None) -> Path:
    """A file of answers; without `texts` the true ones."""
    vision = VisionDataConfig(
        scenes=ScenesConfig(kinds=(kind,), sizes=((56, 56),), max_frames=4), tasks=(task,), workers=0
    )  # type: ignore[arg-type]
    config = to_plain(nano())
    config["data"]["vision"] = to_plain(vision)
    if texts is None:
        rows = VisionRows(vision, Tokenizer.train([], 512), seq_len=256, seed=nano().seed, held_out=True)
        texts = [each.answer for each in rows.examples(3, task=task)]
    path = folder / "vision-arm-0.json"
    path.write_text(json.dumps({"config": config, "texts": texts}))
    return path


@pytest.mark.parametrize("kind, task, frames", [("scene", "svg", 1), ("animation", "video", 3)])
def test_a_true_answer_draws_what_was_shown(
    page: ModuleType, tmp_path: Path, kind: str, task: str, frames: int
) -> None:
    answers = kept(tmp_path, kind, task, None)
    for each in page.pairs_of(answers, 3):
        assert len(each.shown) == len(each.drawn) == frames and each.reward == pytest.approx(1.0)
        assert all(np.array_equal(shown, drawn) for shown, drawn in zip(each.shown, each.drawn))
    page.main(page.Settings(answers=answers, count=3, columns=2))
    width, height = Image.open(answers.with_suffix(".png")).size
    assert width >= 2 * 2 * frames * 56 and height >= 2 * 56
    assert "picture 2" in answers.with_suffix(".html").read_text()


def test_an_answer_that_cannot_be_drawn_is_shown_with_its_reason_and_escaped(page: ModuleType, tmp_path: Path) -> None:
    answers = kept(tmp_path, "scene", "svg", ["<svg><script>alert(1)</script></svg>"])
    (found,) = page.pairs_of(answers, 24)
    assert found.reward == 0 and not found.drawn and found.problem
    page.main(page.Settings(answers=answers))
    assert "<script>alert" not in answers.with_suffix(".html").read_text()


def test_a_file_without_answers_is_named(page: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="none.json is not there"):
        page.main(page.Settings(answers=tmp_path / "none.json"))
    with pytest.raises(SystemExit, match="holds no answers"):
        page.main(page.Settings(answers=kept(tmp_path, "scene", "svg", [])))


def test_both_steps_give_the_same_gradients_and_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    memory = load_script(monkeypatch, "vision_memory")
    monkeypatch.setattr(memory, "TEXT", 16)
    monkeypatch.setattr(memory.Bench, "time", lambda self, step: float(step() is None))
    memory.main(memory.Settings(tiny=True, results=tmp_path))
    rows = json.loads((tmp_path / "vision_memory_tiny.json").read_text())
    errors = [row["ours"] for row in rows if row["metric"].startswith("relative error")]
    assert len(errors) == 3 and all(0 <= error < 1e-5 for error in errors)
    assert rows[0]["metric"] == "time of a step"
