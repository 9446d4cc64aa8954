"""The tower apart from the language model, on two ranks that have different numbers of pictures."""

from pathlib import Path

import pytest

from perilune.train import RunConfig, decoupled, train
from perilune.train.parallel import ParallelConfig
from tests.distributed.gloo import run
from tests.distributed.test_trained_runs import OPTIMIZER, TOLERANCE
from tests.distributed.trained_runs import losses_of, trained, worst_difference
from tests.train.test_vision_runs import vision_run

pytestmark = pytest.mark.distributed

TRAINER = {"steps": 4, "global_batch_rows": 12, "micro_batch_rows": 2, "eval_every": 0, "checkpoint_every": 0}


def in_groups_of_one(rank: int, config: RunConfig, runs: Path) -> list[tuple[int, int]]:
    """Train; of every step, how many groups of pictures this rank has, and how often its tower looked."""
    looks: list[tuple[int, int]] = []
    real, real_balanced = decoupled._look, decoupled.balanced

    def look(*arguments):
        looks[-1] = (looks[-1][0], looks[-1][1] + 1)
        return real(*arguments)

    def balanced(sizes, groups):
        found = real_balanced(sizes, groups)
        looks.append((len(found), 0))
        return found

    decoupled._look, decoupled.balanced, decoupled.PATCHES_PER_GROUP = look, balanced, 1
    train(config, runs_folder=runs, quiet=True)
    return looks


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(), pytest.param(ParallelConfig(dp_replicate=2), marks=pytest.mark.long)],
    ids=["fsdp", "ddp"],
)
def test_a_decoupled_run_on_two_ranks_has_the_losses_of_the_plain_one_of_one_process(cache, tmp_path, parallel):
    how = {"trainer": TRAINER, "optimizer": OPTIMIZER}
    trained(vision_run(cache, **how), tmp_path / "alone", world=None)
    apart = vision_run(cache, **{**how, "trainer": {**TRAINER, "decoupled_vision": True}}, parallel=parallel)
    first, second = run(2, in_groups_of_one, apart, tmp_path / "together")
    assert any(ours[0] != theirs[0] for ours, theirs in zip(first, second, strict=True)), "groups differ"
    assert [looks for _, looks in first] == [looks for _, looks in second] and any(looks for _, looks in first)
    found, expected = (losses_of(tmp_path / name / "tiny") for name in ("together", "alone"))
    assert worst_difference(found, expected) <= TOLERANCE
