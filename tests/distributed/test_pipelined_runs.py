"""A run whose layers are spread over stages is the run of one process, and continues with or without stages."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.train import RunConfig, checkpoint
from perilune.train.optimizer import build_optimization
from perilune.train.parallel import ParallelConfig, ParallelError, parallelize
from perilune.train.run_folder import CHECKPOINTS, build_model
from tests.distributed.gloo import run
from tests.distributed.test_trained_runs import OPTIMIZER, TOLERANCE
from tests.distributed.trained_runs import (
    clipped_heads,
    imbalances_of,
    losses_of,
    max_logits_of,
    trained,
    validations_of,
    worst_difference,
)
from tests.train.tiny_runs import MODEL, MOE, tiny_run

pytestmark = pytest.mark.distributed

# Softmax attention on both stages, experts too, and a cut inside a residual block.
LAYERS = {"num_hidden_layers": 4, "layer_types": ("kda", "mla", "mla", "kda"), "moe": MOE}
STREAM = {"residual": "block_attnres", "block_sublayers": 3}
TRAINER = {"steps": 4, "global_batch_rows": 8, "micro_batch_rows": 2, "eval_every": 2, "checkpoint_every": 2}
TWO = ParallelConfig(pp=2)


def the_run(cache: Path, **changes: Any) -> RunConfig:
    model = replace(MODEL, **LAYERS, **STREAM)
    optimizer = {**OPTIMIZER, "lr": 0.005}
    return tiny_run(cache, model=model, trainer=TRAINER, optimizer=optimizer, schedule={"kind": "constant"}, **changes)


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("alone")
    trained(the_run(cache), runs, world=None)
    return runs / "tiny"


def assert_same_run(found: Path, expected: Path) -> None:
    assert worst_difference(losses_of(found), losses_of(expected)) <= TOLERANCE
    assert worst_difference(max_logits_of(found), max_logits_of(expected)) <= 1e-4
    assert clipped_heads(found) == clipped_heads(expected) and any(clipped_heads(expected))
    assert imbalances_of(found) == pytest.approx(imbalances_of(expected), rel=0.02)
    assert validations_of(found) == pytest.approx(validations_of(expected), rel=TOLERANCE)


@pytest.mark.parametrize(
    "world,parallel",
    [
        (2, ParallelConfig(pp=2, schedule="gpipe", recompute="full")),
        (4, ParallelConfig(pp=2, dp_shard=2)),
        pytest.param(2, TWO, marks=pytest.mark.long),
        pytest.param(4, ParallelConfig(pp=4), marks=pytest.mark.long),
        pytest.param(4, ParallelConfig(pp=2, dp_shard=2, ep=2), marks=pytest.mark.long),
        pytest.param(4, ParallelConfig(pp=2, dp_replicate=2), marks=pytest.mark.long),
        pytest.param(4, ParallelConfig(pp=2, tp=2), marks=pytest.mark.long),
        pytest.param(4, ParallelConfig(pp=2, cp=2), marks=pytest.mark.long),
    ],
    ids=["gpipe_recompute", "fsdp", "1f1b", "four_stages", "ep", "ddp", "tp", "cp"],
)
def test_a_run_through_stages_has_the_losses_of_one_process(alone, cache, tmp_path, world, parallel):
    config = the_run(cache, parallel=parallel)
    if parallel.pp * (parallel.dp_shard or 1) * parallel.dp_replicate > 2:
        config = replace(config, trainer=replace(config.trainer, micro_batch_rows=1))
    summary = trained(config, tmp_path, world=world)
    assert_same_run(tmp_path / "tiny", alone)
    assert summary["samples"] and summary["parameters"] == sum(
        tensor.numel() for tensor in weights_of(alone, only_parameters=True).values()
    )


def weights_of(folder: Path, *, only_parameters: bool = False) -> dict[str, torch.Tensor]:
    found = checkpoint.find(folder / CHECKPOINTS)
    assert found is not None
    tensors = checkpoint.load_tensors(found.folder)
    buffers = ("e_score_correction_bias", "counts") if only_parameters else ()
    return {
        name: tensor for name, tensor in tensors.items() if name.startswith("model.") and not name.endswith(buffers)
    }


@pytest.mark.parametrize(
    "first,then",
    [
        ((2, TWO), (None, ParallelConfig())),
        ((None, ParallelConfig()), (2, TWO)),
        pytest.param((4, ParallelConfig(pp=2, dp_shard=2)), (4, ParallelConfig(pp=4)), marks=pytest.mark.long),
        pytest.param((2, ParallelConfig(tp=2)), (4, ParallelConfig(pp=2, dp_shard=2)), marks=pytest.mark.long),
    ],
    ids=["stages_to_one", "one_to_stages", "pp2_fsdp2_to_pp4", "tp2_to_pp2_fsdp2"],
)
def test_a_run_continues_with_or_without_stages(alone, cache, tmp_path, first, then):
    for (world, parallel), steps in ((first, 2), (then, None)):
        config = the_run(cache, parallel=parallel)
        config = replace(config, trainer=replace(config.trainer, micro_batch_rows=1))
        trained(config, tmp_path, world=world, steps=steps)
    assert_same_run(tmp_path / "tiny", alone)
    found, expected = (checkpoint.find(folder / CHECKPOINTS) for folder in (tmp_path / "tiny", alone))
    assert found is not None and expected is not None
    tensors, others = (checkpoint.load_tensors(each.folder) for each in (found, expected))
    kept = {name for name in others if not name.startswith("rng.")}
    assert {name for name in tensors if not name.startswith("rng.")} == kept
    assert torch.equal(tensors["qk_clip.ever_clipped"], others["qk_clip.ever_clipped"])


def statistics_come_back(rank: int, config: RunConfig) -> dict[str, Any]:
    """Statistics of QK-Clip that differ on the stages, through the tensors of a checkpoint."""
    model = build_model(config, torch.device("cpu"))
    parallel = parallelize(model, config.parallel, device_type="cpu", world_size=2)
    optimization = build_optimization(model, config.optimizer, parallel)
    assert optimization.clip is not None
    marked = torch.tensor([[rank == 0, rank == 1]])
    optimization.clip.ever_clipped = marked.clone()
    optimization.clip.last_max_logits = 10.0 * rank + torch.arange(2.0)[None]
    saved = optimization.clip_tensors()
    optimization.clip.ever_clipped.zero_()
    optimization.load_clip_tensors(saved)
    back = torch.equal(optimization.clip.ever_clipped, marked)
    return {**{name: tensor.tolist() for name, tensor in saved.items()}, "back": back}


def test_statistics_of_all_stages_are_saved_in_the_order_of_layers_and_each_stage_takes_its_own(cache):
    for found in run(2, statistics_come_back, the_run(cache, parallel=TWO)):
        assert found == {
            "qk_clip.ever_clipped": [[True, False], [False, True]],
            "qk_clip.last_max_logits": [[0.0, 1.0], [10.0, 11.0]],
            "back": True,
        }


def test_uneven_micro_batches_are_refused_with_what_would_do(cache):
    config = the_run(cache, parallel=TWO)
    for rows, micro in ((8, 3), (8, 8), (7, 2)):
        uneven = replace(config, trainer=replace(config.trainer, global_batch_rows=rows, micro_batch_rows=micro))
        with pytest.raises(ParallelError, match=f"multiple of {micro}, at least {2 * micro}"):
            uneven.check_ranks(2)
    config.check_ranks(2)
