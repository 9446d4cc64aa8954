"""Kill -9 of any rank at any time: the run that is started again ends as if nothing had happened.

The instant is drawn: a phase that the rank reaches, and a part of a step after it, by the clock. It may fall into the
data, a collective operation, the optimizer, or a save that goes on behind the training.
"""

import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from perilune.train import RunConfig, train
from perilune.train.parallel import ParallelConfig
from perilune.train.run_folder import CONFIG
from tests.distributed.gloo import run
from tests.distributed.test_trained_runs import OPTIMIZER, TOLERANCE
from tests.distributed.trained_runs import losses_of, trained, worst_difference
from tests.train.tiny_runs import MODEL, MOE, tiny_run

pytestmark = pytest.mark.distributed

STEPS = 6
PHASES_A_STEP = 4
"""Of the loop; saves have more."""
STEP_S = 0.1
"""About what a step takes here; where it takes longer, kills come earlier in it."""


def the_run(cache: Path, **changes: Any) -> RunConfig:
    trainer = {"steps": STEPS, "micro_batch_rows": 1, "eval_every": 0, "checkpoint_every": 1, "sample_prompts": ()}
    return tiny_run(cache, model=replace(MODEL, moe=MOE), trainer=trainer, optimizer=OPTIMIZER, **changes)


@pytest.fixture(scope="module")
def uninterrupted(cache, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("uninterrupted")
    trained(the_run(cache), runs, world=None)
    return runs / "tiny"


def doomed(rank: int, config: RunConfig, runs: Path, victim: int, phase: int, delay_s: float) -> None:
    """Train; the victim dies `delay_s` after its phase-th phase, at the latest when it has nothing left to do."""
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
    left = [phase]

    def on_phase(name: str) -> None:
        left[0] -= 1
        if left[0] == 0 and rank == victim:
            timer.start()

    resume = (runs / config.name / CONFIG).exists()
    train(config, runs_folder=runs, resume=resume, quiet=True, on_phase=on_phase)
    if rank == victim:
        if not timer.ident:
            timer.start()
        timer.join()


FSDP, DDP, STAGES = ParallelConfig(), ParallelConfig(dp_replicate=2), ParallelConfig(pp=2)
MESHES = ((2, FSDP), (3, FSDP), (2, DDP), (2, STAGES), (4, STAGES))
"""Ranks, and how they share the work."""


def kill_and_resume(
    cache: Path, runs: Path, seed: int, *, kills: int, meshes: Sequence[tuple[int, ParallelConfig]]
) -> None:
    drawn = random.Random(seed)
    for _ in range(kills):
        world, parallel = drawn.choice(meshes)
        victim, phase = drawn.randrange(world), drawn.randint(1, PHASES_A_STEP * STEPS)
        with pytest.raises(AssertionError):
            run(world, doomed, the_run(cache, parallel=parallel), runs, victim, phase, drawn.uniform(0.0, STEP_S))
    trained(the_run(cache), runs, world=2)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_rank_costs_nothing_but_time(uninterrupted, cache, tmp_path, seed):
    kill_and_resume(cache, tmp_path, seed, kills=1, meshes=[(2, FSDP)])
    assert worst_difference(losses_of(tmp_path / "tiny"), losses_of(uninterrupted)) <= TOLERANCE


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_run_that_lost_a_rank_twice_ends_as_if_nothing_had_happened(uninterrupted, cache, tmp_path, seed):
    kill_and_resume(cache, tmp_path, seed, kills=2, meshes=MESHES)
    assert worst_difference(losses_of(tmp_path / "tiny"), losses_of(uninterrupted)) <= TOLERANCE
