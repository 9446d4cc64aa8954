"""The tower apart from the language model, on two ranks that have different numbers of pictures."""

from pathlib import Path

import pytest
import torch

from perilune.train import RunConfig, decoupled, media_exchange, train
from perilune.train.media_exchange import deal_by_size, dealt_out
from perilune.train.parallel import ParallelConfig
from tests.distributed.gloo import run
from tests.distributed.test_trained_runs import OPTIMIZER, TOLERANCE
from tests.distributed.trained_runs import losses_of, trained, worst_difference
from tests.train.test_vision_runs import vision_run

pytestmark = pytest.mark.distributed

TRAINER = {"steps": 4, "global_batch_rows": 12, "micro_batch_rows": 2, "eval_every": 0, "checkpoint_every": 0}


def in_groups_of_one(rank: int, config: RunConfig, runs: Path) -> list[list[int]]:
    """Train; of every step, how many pictures this rank has, how many it looks at, and how often its tower looked.

    Every picture is looked at by the other rank, so that all features and gradients travel.
    """
    looks: list[list[int]] = []
    real, real_dealt = decoupled._look, decoupled.dealt_out

    def look(*arguments):
        looks[-1][2] += 1
        return real(*arguments)

    def dealt_out(grids):
        found = real_dealt(grids)
        looks.append([len(grids), len(found.grids), 0])
        return found

    decoupled._look, decoupled.dealt_out, decoupled.PATCHES_PER_GROUP = look, dealt_out, 1
    media_exchange.deal_by_size = lambda sizes: [[1 - owner] * len(owned) for owner, owned in enumerate(sizes)]
    train(config, runs_folder=runs, quiet=True)
    return looks


def carried(rank: int, sizes: list[list[int]], dtype: torch.dtype) -> bool:
    """Whether what every item should hold is what arrives, there and back."""

    def rows(owner: int, number: int, count: int) -> torch.Tensor:
        return torch.full((count, 2, 3), 10 * owner + number).to(dtype) + torch.arange(count)[:, None, None].to(dtype)

    grids = [[(1, 2, size) for size in owned] for owned in sizes]
    deal = dealt_out(grids[rank])
    like = torch.empty((0, 2, 3), dtype=dtype)
    own = [rows(rank, number, size) for number, size in enumerate(sizes[rank])]
    held = deal.there(own, like, [grid[2] for grid in deal.grids])
    holders = deal_by_size([[2 * size for size in owned] for owned in sizes])
    expected = [
        rows(owner, number, size)
        for owner, owned in enumerate(sizes)
        for number, size in enumerate(owned)
        if holders[owner][number] == rank
    ]
    back = deal.back(held, like, sizes[rank])
    pairs = [*zip(held, expected, strict=True), *zip(back, own, strict=True)]
    return all(found.dtype == dtype and torch.equal(found, true) for found, true in pairs)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_items_are_carried_to_who_looks_at_them_and_back(dtype):
    assert all(run(3, carried, [[2, 4, 2, 6], [2], []], dtype))


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
    assert any(ours[0] != theirs[0] for ours, theirs in zip(first, second, strict=True)), "pictures differ"
    assert [own for own, *_ in first] == [held for _, held, _ in second]
    assert [looks for *_, looks in first] == [looks for *_, looks in second] and any(looks for *_, looks in first)
    found, expected = (losses_of(tmp_path / name / "tiny") for name in ("together", "alone"))
    assert worst_difference(found, expected) <= TOLERANCE
