"""Every row of the data is read once, in its step, however often the number of ranks changes on the way."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perilune.data.packing import PackedDataset
from perilune.train import RunConfig, train
from perilune.train.parallel import ParallelConfig
from perilune.train.run_folder import CONFIG
from tests.distributed.gloo import run
from tests.distributed.test_trained_runs import OPTIMIZER, TOLERANCE
from tests.distributed.trained_runs import losses_of, trained, worst_difference
from tests.train.tiny_runs import MODEL, MOE, tiny_run

pytestmark = pytest.mark.distributed

STEPS, ROWS = 6, 8
TRAINER = {"steps": STEPS, "global_batch_rows": ROWS, "micro_batch_rows": 1, "eval_every": 0, "checkpoint_every": 3}


def the_run(cache: Path, **changes: Any) -> RunConfig:
    model = replace(MODEL, moe=MOE, residual="block_attnres")
    trainer = {**TRAINER, "sample_prompts": ()}
    return tiny_run(cache, model=model, trainer=trainer, optimizer=OPTIMIZER, schedule={"kind": "constant"}, **changes)


def watched(rank: int, config: RunConfig, runs: Path) -> list[tuple[int, int]]:
    """Train; the (step, row) of everything this rank read."""
    resume = (runs / config.name / CONFIG).exists()
    done = len(losses_of(runs / config.name)) if resume else 0
    read, begun, real = [], [0], PackedDataset.batch

    def batch(self, first, count):
        read.extend((done + begun[0], row) for row in range(first, first + count))
        return real(self, first, count)

    def on_phase(phase: str) -> None:
        begun[0] += phase == "step:begin"

    PackedDataset.batch = batch
    try:
        train(config, runs_folder=runs, resume=resume, quiet=True, on_phase=on_phase)
    finally:
        PackedDataset.batch = real
    return read


def part_of_a_run(config: RunConfig, runs: Path, *, world: int | None, until: int) -> list[tuple[int, int]]:
    config = replace(config, trainer=replace(config.trainer, steps=until))
    if world is None:
        return watched(0, config, runs)
    return [pair for pairs in run(world, watched, config, runs) for pair in pairs]


@pytest.fixture(scope="module")
def uninterrupted(cache, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("uninterrupted")
    trained(the_run(cache), runs, world=None)
    return runs / "tiny"


@pytest.fixture(scope="module")
def saved_on_four(cache, tmp_path_factory) -> tuple[Path, list[tuple[int, int]]]:
    """Three steps on four ranks, two of them copies of the other two."""
    runs = tmp_path_factory.mktemp("four")
    config = the_run(cache, parallel=ParallelConfig(dp_shard=2, dp_replicate=2))
    return runs, part_of_a_run(config, runs, world=4, until=3)


@pytest.mark.parametrize("world", [None, 2, *(pytest.param(world, marks=pytest.mark.long) for world in (1, 8))])
def test_a_run_of_four_ranks_goes_on_with_others_and_no_row_is_lost_or_read_twice(
    uninterrupted, saved_on_four, cache, tmp_path, world
):
    runs, read = saved_on_four
    shutil.copytree(runs / "tiny", tmp_path / "runs" / "tiny")
    read = read + part_of_a_run(the_run(cache), tmp_path / "runs", world=world, until=STEPS)
    assert sorted(read) == [(row // ROWS + 1, row) for row in range(STEPS * ROWS)]
    assert worst_difference(losses_of(tmp_path / "runs" / "tiny"), losses_of(uninterrupted)) <= TOLERANCE
