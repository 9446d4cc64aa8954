"""Runs with pictures: two losses, the same text as without them, the end of a run, and exact resume."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perilune.data import FusionConfig, VisionDataConfig
from perilune.data.packing import IGNORED
from perilune.data.scenes import ScenesConfig
from perilune.model import VisionConfig
from perilune.train import RunConfig, RunError, checkpoint, load_run, train, trainer
from perilune.train.metrics import TIMING_FIELDS
from perilune.train.run_folder import CHECKPOINTS, METRICS
from tests.train import killable_runs
from tests.train.tiny_runs import MODEL, tiny_run

TOWER = VisionConfig(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, pos_emb_height=2, pos_emb_width=2
)
PICTURES = VisionDataConfig(
    scenes=ScenesConfig(sizes=((28, 28),), max_shapes=1, primitives=("rect",), background_share=0.0, max_questions=0),
    fusion=FusionConfig(share=0.25),
    workers=0,
    dialect_texts=100,
    samples=3,
    sample_tokens=8,
)


def vision_run(cache: Path, **changes) -> RunConfig:
    """The tiny run with a picture in every fourth row."""
    pictures = replace(PICTURES, **changes.pop("pictures", {}))
    data = {"seq_len": changes.pop("seq_len", 96), "vocab_size": 360, "vision": pictures}
    model = replace(MODEL, vocab_size=360, vision=changes.pop("tower", TOWER))
    return tiny_run(cache, model=model, data=data, **changes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def records_of(folder: Path, kind: str | None = None) -> list[dict]:
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [record for record in records if kind in (None, record["kind"])]


def started(config, folder):
    quiet = {"resume": False, "overwrite": False, "quiet": True, "on_phase": lambda phase: None}
    return trainer.prepared(config, folder / config.name, **quiet)


def test_a_step_has_a_text_loss_and_a_vision_loss_and_bytes_of_text_only(cache, tmp_path):
    with started(vision_run(cache), tmp_path) as run:
        batches = trainer.load_batches(run)
        count = trainer.totals(batches, run.device)
        text = [batch for batch in batches if batch.media is None]
        vision = [batch for batch in batches if batch.media is not None]
        assert sum(batch.tokens_BT.numel() for batch in text) == 3 * 96
        assert sum(batch.tokens_BT.numel() for batch in vision) == 96
        assert count.text_bytes == sum(batch.num_bytes for batch in text)
        assert count.vision_targets == sum(int((batch.targets_BT != IGNORED).sum()) for batch in vision) > 0
        sums = trainer.forward_backward(run.model, batches, count.targets)
        with torch.no_grad():
            again = [
                sum(run.model.loss(b.tokens_BT, b.targets_BT, b.cu_seqlens, media=b.media) for b in group)
                for group in (text, vision)
            ]
    assert sums.tolist() == pytest.approx([float(each) for each in again], rel=1e-5)
    assert run.model.vision_tower is not None
    assert all(parameter.grad is not None for parameter in run.model.vision_tower.parameters())


def test_text_rows_are_those_of_the_run_without_pictures_in_the_same_order(cache, tmp_path):
    joint = vision_run(cache, name="joint")
    alone = vision_run(cache, name="alone", pictures={"fusion": FusionConfig(share=0.0)})
    seen: dict[str, list[torch.Tensor]] = {}
    for config, steps in ((joint, 4), (alone, 3)):
        with started(config, tmp_path) as run:
            rows = seen[config.name] = []
            for step in range(steps):
                run.position.rows = step * 4
                rows += [row for b in trainer.load_batches(run) if b.media is None for row in b.tokens_BT[0].split(96)]
    assert len(seen["joint"]) == len(seen["alone"]) == 12
    assert all(torch.equal(one, other) for one, other in zip(seen["joint"], seen["alone"], strict=True))


def test_the_decoupled_step_has_the_gradients_of_the_plain_one(cache, tmp_path):
    gradients = []
    for decoupled in (False, True):
        with started(vision_run(cache, name=f"run{decoupled}"), tmp_path) as run:
            batches = trainer.load_batches(run)
            trainer.forward_backward(run.model, batches, 100, decoupled=decoupled)
            gradients.append({name: p.grad for name, p in run.model.named_parameters()})
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain, rtol=1e-4, atol=1e-7, msg=name)


def test_a_run_ends_with_drawings_of_held_out_pictures_and_their_control(cache, tmp_path):
    summary = train(vision_run(cache), runs_folder=tmp_path, quiet=True)
    pictures, (means,) = records_of(tmp_path / "tiny", "picture"), records_of(tmp_path / "tiny", "pictures")
    assert [record["number"] for record in pictures] == [0, 1, 2]
    assert all(record["image"] and record["truth"].startswith("<svg") for record in pictures)
    assert all((record["drawn"] is None) == bool(record["reason"]) for record in pictures)
    assert means["count"] == 3 and summary["pictures"]["f1"] == means["f1"]
    for name in ("parses", "pixel", "f1", "reward"):
        assert means[name] == pytest.approx(sum(record["scores"][name] for record in pictures) / 3)
    assert 0 <= means["shuffled_reward"] <= 1
    assert summary["valid_vision_loss"] == records_of(tmp_path / "tiny", "valid")[-1]["vision_loss"]
    model, _, config = load_run(tmp_path / "tiny")
    assert config.data.vision == PICTURES and model.vision_tower is not None


def test_a_run_whose_engine_finds_no_room_draws_module_by_module_and_keeps_its_end(cache, tmp_path, capsys):
    def no_room(*_: object, **__: object) -> list[str]:
        raise RuntimeError("out of memory")

    config = vision_run(cache, trainer={"steps": 2, "checkpoint_every": 0})
    train(config, runs_folder=tmp_path, answer=no_room)
    folder = tmp_path / config.name
    assert "module by module, since the engine failed: out of memory" in capsys.readouterr().err
    assert len(records_of(folder, "picture")) == PICTURES.samples
    load_run(folder)  # there is a checkpoint


def test_pictures_enter_where_the_schedule_says(cache, tmp_path):
    late = {"fusion": FusionConfig(share=0.5, start=0.5)}
    train(vision_run(cache, pictures={**late, "samples": 0}), runs_folder=tmp_path, quiet=True)
    with_pictures = ["vision_loss" in record for record in records_of(tmp_path / "tiny", "train")]
    assert with_pictures == [False] * 3 + [True] * 3


def outcome(folder: Path) -> tuple[list[dict], dict[str, torch.Tensor]]:
    records = [{k: v for k, v in record.items() if k not in TIMING_FIELDS} for record in records_of(folder)]
    found = checkpoint.find(folder / CHECKPOINTS)
    assert found is not None and found.state["step"] == 6
    return records, checkpoint.load_tensors(found.folder)


@pytest.mark.parametrize("kills", [[9], [23, 4]])
def test_a_killed_run_with_pictures_made_ahead_resumes_to_the_same_bits(cache, tmp_path, kills):
    config = vision_run(cache, pictures={"workers": 1})
    assert killable_runs.finish(config, tmp_path / "whole") == 0
    for kill_at in kills:
        assert killable_runs.finish(config, tmp_path / "killed", kill_at=kill_at) == -9
    assert killable_runs.finish(config, tmp_path / "killed") == 0
    whole, killed = (outcome(tmp_path / name / "tiny") for name in ("whole", "killed"))
    assert whole[0] == killed[0] and whole[1].keys() == killed[1].keys()
    assert all(torch.equal(value, killed[1][name]) for name, value in whole[1].items())


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"train_prompt": True}, "pictures"),
        ({"scenes": replace(PICTURES.scenes, max_shapes=2)}, "pictures"),
        ({"fusion": FusionConfig(share=0.5)}, "fusion"),
    ],
)
def test_other_pictures_cannot_continue_a_run(cache, tmp_path, change, reason):
    def config(**change) -> RunConfig:
        # A tokenizer that has seen none of the pictures' sources does not change with them.
        return vision_run(
            cache, seq_len=192, pictures={"dialect_texts": 0, "samples": 0, **change}, trainer={"steps": 1}
        )

    train(config(), runs_folder=tmp_path, quiet=True)
    with pytest.raises(RunError, match=f"the {reason} fingerprint"):
        train(config(**change), runs_folder=tmp_path, resume=True, quiet=True)


def test_a_later_end_may_be_added_only_where_the_schedule_does_not_depend_on_it(cache, tmp_path):
    for name, start in (("early", 0.0), ("late", 0.5)):
        fusion = {"fusion": FusionConfig(share=0.5, start=start), "samples": 0}
        train(vision_run(cache, name=name, pictures=fusion, trainer={"steps": 2}), runs_folder=tmp_path, quiet=True)
        longer = vision_run(cache, name=name, pictures=fusion, trainer={"steps": 4})
        if start:
            with pytest.raises(RunError, match="fusion fingerprint.*number of steps"):
                train(longer, runs_folder=tmp_path, resume=True, quiet=True)
        else:
            assert train(longer, runs_folder=tmp_path, resume=True, quiet=True)["steps"] == 4


def test_pictures_without_a_tower_are_refused(cache):
    with pytest.raises(ValueError, match=r"model.vision is None.*share=0"):
        vision_run(cache, tower=None)
