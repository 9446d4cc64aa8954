"""A run saved on some ranks continues on any other number of them, with the same rows and losses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune.model import SamplingConfig, generate
from perilune.train import OptimizerConfig, RunConfig, load_run
from perilune.train.batches import open_data
from perilune.train.evaluate import validate
from perilune.train.parallel import ParallelConfig
from tests.distributed.test_trained_runs import OPTIMIZER, TOLERANCE
from tests.distributed.trained_runs import losses_of, trained, validations_of, worst_difference
from tests.train.tiny_runs import MODEL, MOE, tiny_run

pytestmark = pytest.mark.distributed

TRAINER = {"steps": 6, "micro_batch_rows": 1, "eval_every": 2, "checkpoint_every": 3, "sample_prompts": ()}


def the_run(cache: Path, **changes: Any) -> RunConfig:
    model = replace(MODEL, moe=MOE, residual="block_attnres")
    return tiny_run(cache, model=model, trainer=TRAINER, optimizer=OPTIMIZER, schedule={"kind": "constant"}, **changes)


@pytest.fixture(scope="module")
def uninterrupted(cache, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("uninterrupted")
    trained(the_run(cache), runs, world=None)
    return runs / "tiny"


@pytest.mark.parametrize(
    "first,then",
    [
        ((2, ParallelConfig()), (None, ParallelConfig())),
        ((2, ParallelConfig(dp_replicate=2)), (4, ParallelConfig(dp_shard=2, dp_replicate=2))),
        pytest.param((2, ParallelConfig(dp_replicate=2)), (None, ParallelConfig()), marks=pytest.mark.long),
        pytest.param((None, ParallelConfig()), (2, ParallelConfig(dp_replicate=2)), marks=pytest.mark.long),
        ((2, ParallelConfig(ep=2)), (2, ParallelConfig(tp=2))),
    ],
    ids=["fsdp2_to_one", "ddp2_to_hsdp4", "ddp2_to_one", "one_to_ddp2", "ep2_to_tp2"],
)
def test_a_run_continues_on_another_number_of_ranks(uninterrupted, cache, tmp_path, first, then):
    for (world, parallel), steps in ((first, 3), (then, None)):
        trained(the_run(cache, parallel=parallel), tmp_path, world=world, steps=steps)
    folder = tmp_path / "tiny"
    assert worst_difference(losses_of(folder), losses_of(uninterrupted)) <= TOLERANCE
    assert validations_of(folder)[-1] == pytest.approx(validations_of(uninterrupted)[-1], rel=TOLERANCE)


def test_adamw_on_two_ranks_is_adamw_on_one_and_continues_there(cache, tmp_path):
    config = replace(the_run(cache), optimizer=OptimizerConfig(kind="adamw", lr=0.005, qk_clip_tau=0.02))
    trained(config, tmp_path / "alone", world=None)
    for world, steps in ((2, 3), (None, None)):
        trained(config, tmp_path / "together", world=world, steps=steps)
    found, expected = (losses_of(tmp_path / name / "tiny") for name in ("together", "alone"))
    assert worst_difference(found, expected) <= TOLERANCE


def test_the_model_of_a_larger_mesh_loads_on_one_process(cache, tmp_path):
    config = the_run(cache, parallel=ParallelConfig(dp_shard=2, ep=2))
    trained(config, tmp_path, world=2, steps=2)
    model, tokenizer, _ = load_run(tmp_path / "tiny")
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())
    valid = open_data(config.data, seed=config.seed).valid
    assert valid is not None
    found = validate(model, valid, rows=config.trainer.eval_rows, micro_batch_rows=1, device=torch.device("cpu"))
    assert found["loss"] == pytest.approx(validations_of(tmp_path / "tiny")[-1], rel=TOLERANCE)
    new = list(generate(model, [tokenizer.bos_id], SamplingConfig(max_new_tokens=4, temperature=0.0)))
    assert len(new) == 4
