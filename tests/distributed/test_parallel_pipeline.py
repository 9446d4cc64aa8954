"""Stages of layers compute what one process computes, whatever the schedule and wherever a residual block is cut."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from perilune.model import ModelConfig
from perilune.train.parallel import ParallelConfig, parallelize
from perilune.train.parallel_pipeline import interleaved_wire, padded_borders, stage_layers, wire_tensors
from tests.distributed.tiny_models import (
    DENSE,
    HYBRID,
    OTHER,
    Case,
    Outcomes,
    batch,
    built,
    differences,
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
    assert parallel.pipeline is not None
    seen = parallel.pipeline.loss(torch.cat(tokens), torch.cat(targets), borders)
    parallel.reshard()
    loss = parallel.pipeline.forward_backward(torch.cat(tokens), torch.cat(targets), borders, SCALE)
    errors = differences(alone, model, same_layers=False)
    found = {
        "loss": relative(summed(parallel, loss), expected),
        "loss_without_gradients": relative(summed(parallel, seen), expected),
        "worst_gradient": errors["worst_gradient"],
        "bias": errors["bias"],
    }
    everywhere = torch.tensor(list(found.values()))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX)
    return dict(zip(found, everywhere.tolist(), strict=True))


@pytest.fixture(scope="module")
def results():
    worlds = {2: TWO, 4: FOUR}
    return Outcomes(
        {world: {name: partial(piped, case) for name, case in cases.items()} for world, cases in worlds.items()}
    )


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_a_pipeline_equals_one_process(results, name):
    result = results[name]
    assert result["loss"] <= 1e-12
    assert result["loss_without_gradients"] <= 1e-12
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


@given(st.integers(2, 5), st.integers(1, 3), st.integers(1, 3), st.sampled_from(("plain", "attnres", "block_attnres")))
def test_what_a_cache_of_blocks_saves_is_what_a_rank_has_seen(ranks, chunks, layers_a_chunk, residual):
    layers = ranks * chunks * layers_a_chunk
    config = ModelConfig(num_hidden_layers=layers, residual=residual, block_sublayers=3)
    cuts = stage_layers(layers, ranks * chunks)
    seen: list[set[int]] = [set() for _ in range(ranks)]
    everything = cached = 0
    for chunk, cut in enumerate(cuts):
        rank = chunk % ranks
        if chunk > 0:
            blocks = set(range(wire_tensors(config, cut.start) - 1))
            everything, cached = everything + len(blocks) + 1, cached + len(blocks - seen[rank]) + 1
        seen[rank] = set(range(wire_tensors(config, cut.stop) - 1))  # those of the chunk itself, too
    assert interleaved_wire(config, ranks, chunks) == (everything, cached)


def test_padded_borders_add_only_empty_documents():
    padded = padded_borders([torch.tensor([0, 4, 9]), torch.tensor([0, 9])])
    assert padded.tolist() == [[0, 4, 9], [0, 9, 9]]
