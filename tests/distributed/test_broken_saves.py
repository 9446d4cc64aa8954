"""A save that fails on one rank, and a checkpoint that is damaged: all ranks do the same, and the run goes on from the
checkpoint before."""

import os
from pathlib import Path
from typing import Any

import pytest

from perilune.train import CheckpointError, RunConfig, train
from perilune.train.run_folder import CHECKPOINTS
from tests.distributed.gloo import run
from tests.distributed.test_trained_runs import TOLERANCE
from tests.distributed.trained_runs import losses_of, trained, worst_difference
from tests.train.full_disks import fill_up
from tests.train.tiny_runs import tiny_run

pytestmark = pytest.mark.distributed


def the_run(cache: Path, **trainer: Any) -> RunConfig:
    settings = {"steps": 6, "micro_batch_rows": 1, "eval_every": 0, "checkpoint_every": 2, "sample_prompts": ()}
    return tiny_run(cache, trainer={**settings, **trainer})


@pytest.fixture(scope="module")
def uninterrupted(cache, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("uninterrupted")
    trained(the_run(cache), runs, world=None)
    return runs / "tiny"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / CHECKPOINTS).iterdir())


def on_a_full_disk(rank: int, config: RunConfig, runs: Path, full_on: tuple[int, ...]) -> str:
    """Train until the second save, whose tensors some ranks cannot write; the message it ends with."""
    if rank in full_on:
        fill_up("step_00000004", room=5000)
    try:
        train(config, runs_folder=runs, quiet=True)
    except CheckpointError as error:
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize("full_on", [(1,), pytest.param((0, 1), marks=pytest.mark.long)], ids=["one_rank", "all_ranks"])
def test_a_full_disk_ends_the_run_on_all_ranks_with_one_message_and_it_resumes(uninterrupted, cache, tmp_path, full_on):
    for message in run(2, on_a_full_disk, the_run(cache), tmp_path, full_on):
        assert "checkpoint of step 4 could not be written" in message and "the disk is full" in message
    assert names(tmp_path / "tiny") == ["latest", "step_00000002"]
    trained(the_run(cache), tmp_path, world=2)
    assert worst_difference(losses_of(tmp_path / "tiny"), losses_of(uninterrupted)) <= TOLERANCE


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def resumed_aloud(rank: int, config: RunConfig, runs: Path) -> str:
    """What the first rank says to a person."""
    said = os.open(runs / f"said{rank}", os.O_CREAT | os.O_RDWR)
    kept = os.dup(2)
    os.dup2(said, 2)
    try:
        train(config, runs_folder=runs, resume=True)
    finally:
        os.dup2(kept, 2)
    return (runs / f"said{rank}").read_text()


DAMAGES = {
    "flipped_bit_of_rank_1": (lambda folder: flip_a_byte(folder / "__1_0.distcp"), "does not match its sha256"),
    "partial": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
}


@pytest.mark.parametrize(
    "damage,world", [("flipped_bit_of_rank_1", 2), pytest.param("partial", 3, marks=pytest.mark.long)]
)
def test_a_damaged_checkpoint_is_passed_over_by_all_ranks_alike(uninterrupted, cache, tmp_path, damage, world):
    trained(the_run(cache), tmp_path, world=2, steps=4)
    break_it, reason = DAMAGES[damage]
    break_it(tmp_path / "tiny" / CHECKPOINTS / "step_00000004")
    first, *others = run(world, resumed_aloud, the_run(cache), tmp_path)
    assert "checkpoint step_00000004 is damaged: " in first and reason in first
    assert "continuing from the complete checkpoint step_00000002" in first
    assert not any("damaged" in said for said in others)
    assert worst_difference(losses_of(tmp_path / "tiny"), losses_of(uninterrupted)) <= TOLERANCE
