"""A run on several ranks is the run of one process: losses, gradient norms, validation, with experts and pictures."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from perilune.model import Decoder
from perilune.train import RunConfig
from perilune.train.parallel import ParallelConfig, parallelize
from tests.distributed.gloo import run
from tests.distributed.trained_runs import (
    clipped_heads,
    imbalances_of,
    losses_of,
    trained,
    validations_of,
    worst_difference,
)
from tests.train.test_vision_runs import vision_run
from tests.train.tiny_runs import MODEL, MOE, tiny_run

pytestmark = pytest.mark.distributed

TRAINER = {"steps": 5, "global_batch_rows": 4, "micro_batch_rows": 1, "eval_every": 0, "checkpoint_every": 0}
OPTIMIZER = {"qk_clip_tau": 0.02}
"""Below what the first steps see, so that heads are clipped."""
TOLERANCE = 1e-5
"""Of float32 losses after five steps: ranks add gradients in another order."""


def text_run(cache: Path, **changes: Any) -> RunConfig:
    """Every kind of layer; experts in the second."""
    model = replace(MODEL, moe=MOE, residual="block_attnres")
    return tiny_run(cache, model=model, trainer=TRAINER, optimizer=OPTIMIZER, **changes)


def picture_run(cache: Path, **changes: Any) -> RunConfig:
    """One row in four has a picture: some ranks have none in a step."""
    return vision_run(cache, trainer=TRAINER, optimizer=OPTIMIZER, **changes)


def uneven_run(cache: Path, **changes: Any) -> RunConfig:
    """Five rows on two ranks: one has a micro-batch less, and runs a filler that routers must not count."""
    config = text_run(cache, **changes)
    return replace(config, trainer=replace(config.trainer, global_batch_rows=5))


RUNS = {"text": text_run, "pictures": picture_run, "uneven": uneven_run}


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for name, make in RUNS.items():
        runs = tmp_path_factory.mktemp(name)
        trained(make(cache), runs, world=None)
        folders[name] = runs / "tiny"
    return folders


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_a_world_of_one_rank_has_the_numbers_of_the_plain_process(alone, cache, tmp_path, kind):
    # Distributed MuonClip with nobody to talk to, parameters as they are: the same operations in the same order.
    trained(RUNS[kind](cache), tmp_path, world=1)
    assert losses_of(tmp_path / "tiny") == losses_of(alone[kind])
    assert validations_of(tmp_path / "tiny") == validations_of(alone[kind])
    assert clipped_heads(tmp_path / "tiny") == clipped_heads(alone[kind])


def kinds_of_parameters(rank: int) -> set[str]:
    model = Decoder(MODEL, seed=0)
    parallelize(model, ParallelConfig(), device_type="cpu", world_size=dist.get_world_size())
    return {type(parameter).__name__ for parameter in model.parameters() if parameter.ndim > 0}


@pytest.mark.parametrize("world,kinds", [(1, {"Parameter"}), (2, {"DTensor"})])
def test_a_rank_that_shares_with_nobody_keeps_its_parameters_as_they_are(world, kinds):
    assert run(world, kinds_of_parameters) == [kinds] * world


@pytest.mark.parametrize(
    "kind,parallel",
    [
        ("text", ParallelConfig()),
        ("text", ParallelConfig(dp_replicate=2)),
        ("text", ParallelConfig(ep=2, recompute="full")),
        ("text", ParallelConfig(tp=2)),
        ("text", ParallelConfig(cp=2)),
        ("uneven", ParallelConfig()),
        ("pictures", ParallelConfig()),
        pytest.param("pictures", ParallelConfig(dp_replicate=2), marks=pytest.mark.long),
    ],
    ids=["fsdp", "ddp", "ep_recompute", "tp", "cp", "uneven", "pictures_fsdp", "pictures_ddp"],
)
def test_a_run_on_two_ranks_has_the_losses_of_one_process(alone, cache, tmp_path, kind, parallel):
    summary = trained(RUNS[kind](cache, parallel=parallel), tmp_path, world=2)
    expected = losses_of(alone[kind])
    assert len(expected) == TRAINER["steps"]
    assert any(clipped_heads(alone[kind])), "QK-Clip has something to do"
    assert all(vision > 0 for _, _, vision in expected) == (kind == "pictures")
    # Within the few tokens whose choice of experts may turn on rounding.
    assert imbalances_of(tmp_path / "tiny") == pytest.approx(imbalances_of(alone[kind]), rel=0.02)
    assert clipped_heads(tmp_path / "tiny") == clipped_heads(alone[kind])
    assert worst_difference(losses_of(tmp_path / "tiny"), expected) <= TOLERANCE
    assert validations_of(tmp_path / "tiny") == pytest.approx(validations_of(alone[kind]), rel=TOLERANCE)
    assert summary["samples"] and summary["steps"] == TRAINER["steps"]
