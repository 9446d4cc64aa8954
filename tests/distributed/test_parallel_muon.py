"""Steps of Distributed MuonClip on a spread model change the weights as MuonClip does in one process."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from perilune.optim import MuonClip, clip_grad_norm_
from perilune.optim.sharded import ShardedMuonClip
from perilune.train.parallel import ParallelConfig, parallelize
from tests.distributed.tiny_models import OTHER, Case, Outcomes, batch, built, whole

pytestmark = pytest.mark.distributed

STEPS = 3
OPTIONS: dict[str, Any] = {
    "lr": 0.02,
    "adam_lr": 0.002,
    "qk_clip_tau": 0.005,  # below what is seen, so that heads are clipped on whichever ranks have them
    "orthogonalize_dtype": torch.float32,
}
TWO = {
    "fsdp": Case(parallel=ParallelConfig(), dtype="float32"),
    "tp": Case(parallel=ParallelConfig(tp=2), dtype="float32"),
    "ep": Case(parallel=ParallelConfig(ep=2), dtype="float32"),
    "cp": Case(parallel=ParallelConfig(cp=2), dtype="float32"),
}
FOUR = {
    "copies": Case(parallel=ParallelConfig(dp_replicate=2), dtype="float32"),
    "fsdp_tp": Case(parallel=ParallelConfig(tp=2), dtype="float32", model=OTHER),
    "fsdp_ep": Case(parallel=ParallelConfig(ep=2), dtype="float32"),
    "tp_ep": Case(parallel=ParallelConfig(tp=2, ep=2), dtype="float32"),
    "pp_fsdp": Case(parallel=ParallelConfig(pp=2), dtype="float32"),
}
MICRO_BATCHES = 2


def stepped(case: Case) -> dict[str, Any]:
    alone, model = built(case.config()), built(case.config())
    start = {name: parameter.detach().clone() for name, parameter in alone.named_parameters()}
    parallel = parallelize(model, case.parallel, device_type="cpu", world_size=dist.get_world_size())
    reference = MuonClip.for_model(alone, **OPTIONS)
    optimizer = ShardedMuonClip.for_model(
        model, process_group=parallel.stage_group(), stages=parallel.stages(), payload_dtype=torch.float32, **OPTIONS
    )
    clipped = 0
    for step in range(STEPS):
        count = parallel.num_data_ranks * MICRO_BATCHES
        batches = [batch(step * count + number) for number in range(count)]
        first = parallel.data_rank * MICRO_BATCHES
        own = batches[first : first + MICRO_BATCHES]
        for each in batches:
            (alone.loss(*each) / 100).backward()
        if parallel.pipeline is not None:
            tokens, targets, borders = zip(*own, strict=True)
            parallel.pipeline.forward_backward(torch.cat(tokens), torch.cat(targets), borders, 0.01)
        else:
            for tokens, targets, borders in own:
                (model.loss(*parallel.own_tokens(tokens, targets), borders) / 100).backward()
        expected_norm, norm = clip_grad_norm_(reference, 1.0), optimizer.clip_grad_norm_(1.0)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=0.0)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
        alone.after_optimizer_step()
        model.after_optimizer_step()
        assert reference.qk_report is not None
        clipped += int(reference.qk_report.num_clipped)
    expected = dict(alone.named_parameters())
    worst = max(
        (float((whole(parameter) - expected[name]).norm() / (expected[name] - start[name]).norm()), name)
        for name, parameter in model.named_parameters()
    )
    return {"worst": worst[0], "name": worst[1], "clipped": clipped}


@pytest.fixture(scope="module")
def results():
    worlds = {2: TWO, 4: FOUR}
    return Outcomes(
        {world: {name: partial(stepped, case) for name, case in cases.items()} for world, cases in worlds.items()}
    )


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_steps_on_a_spread_model_are_those_of_one_process(results, name):
    result = results[name]
    assert result["worst"] <= 1e-3, result["name"]
    assert result["clipped"] > 0
