"""Stages of layers compute what one process computes, whatever the schedule and wherever a residual block is cut."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from perilune.train.parallel import ParallelConfig, parallelize
from perilune.train.parallel_pipeline import padded_borders, stage_layers
from tests.distributed.tiny_models import (
    DENSE,
    HYBRID,
    OTHER,
    Case,
    batch,
    built,
    differences,
    outcomes,
    relative,
    summed,
)

pytestmark = pytest.mark.distributed

SCALE = 0.25
MICRO_BATCHES = 4

TWO = {
    "blocks": Case(parallel=ParallelConfig(pp=2)),
    "cut_inside_a_block": Case(parallel=ParallelConfig(pp=2), model=HYBRID | {"block_sublayers": 3}),
    "every_sublayer_gpipe": Case(parallel=ParallelConfig(pp=2, schedule="gpipe", recompute="full"), model=OTHER),
    "scalars": Case(parallel=ParallelConfig(pp=2), model=DENSE | {"residual": "scalars"}),
}
FOUR = {
    "four_stages": Case(parallel=ParallelConfig(pp=4), model=HYBRID | {"block_sublayers": 5}),
    "pp_fsdp": Case(parallel=ParallelConfig(pp=2, dp_shard=2)),
    "pp_ep": Case(parallel=ParallelConfig(pp=2, dp_shard=2, ep=2)),
    "pp_tp": Case(parallel=ParallelConfig(pp=2, tp=2), model=OTHER),
}


def piped(case: Case) -> dict[str, Any]:
    alone, model = built(case.config()), built(case.config())
    parallel = parallelize(model, case.parallel, device_type="cpu", world_size=dist.get_world_size())
    batches = [batch(number) for number in range(parallel.num_data_ranks * MICRO_BATCHES)]
    expected = torch.stack([alone.loss(*each) for each in batches]).sum()
    (expected * SCALE).backward()
    first = parallel.data_rank * MICRO_BATCHES
    tokens, targets, borders = zip(*batches[first : first + MICRO_BATCHES], strict=True)
    pipeline = parallel.pipeline(torch.device("cpu"))
    loss = pipeline.forward_backward(torch.cat(tokens), torch.cat(targets), borders, SCALE)
    errors = differences(alone, model, same_layers=False)
    everywhere = torch.tensor([relative(summed(parallel, loss), expected), errors["worst_gradient"], errors["bias"]])
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return dict(zip(("loss", "worst_gradient", "bias"), everywhere.tolist(), strict=True))


@pytest.fixture(scope="module")
def results():
    found = {}
    for world_size, cases in ((2, TWO), (4, FOUR)):
        found |= outcomes(world_size, {name: partial(piped, case) for name, case in cases.items()})
    return found


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_a_pipeline_equals_one_process(results, name):
    result = results[name]
    assert result["loss"] <= 1e-12
    assert result["worst_gradient"] <= 1e-10
    assert result["bias"] == 0.0


@given(st.integers(1, 70), st.integers(1, 16))
def test_stages_hold_every_layer_once_and_differ_by_one_at_most(layers, stages):
    stages = min(stages, layers)
    cuts = stage_layers(layers, stages)
    assert [index for cut in cuts for index in cut] == list(range(layers))
    sizes = [len(cut) for cut in cuts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes) or layers % stages == stages - 1


def test_padded_borders_add_only_empty_documents():
    padded = padded_borders([torch.tensor([0, 4, 9]), torch.tensor([0, 9])])
    assert padded.tolist() == [[0, 4, 9], [0, 9, 9]]
