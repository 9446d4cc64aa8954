"""A model spread over ranks computes what one process computes: loss, every gradient, router balance, logit maxima.

In float64, where the order of sums costs 1e-16 a term, any real difference shows: the bound of 1e-10 leaves room for
the condition of the network and none for a missing term. In float32 the gradient as a whole is within 1e-5.
"""

from functools import partial

import pytest

from perilune.train.parallel import ParallelConfig
from tests.distributed.tiny_models import DENSE, HYBRID, OTHER, Case, Outcomes, compared

pytestmark = pytest.mark.distributed

TWO = {
    "fsdp": Case(parallel=ParallelConfig()),
    "fsdp_tied_float32": Case(parallel=ParallelConfig(), model=HYBRID | {"tie_word_embeddings": True}, dtype="float32"),
    "copies": Case(parallel=ParallelConfig(dp_replicate=2)),
    "scalars": Case(parallel=ParallelConfig(), model=DENSE | {"residual": "scalars"}),
    "recompute_full": Case(parallel=ParallelConfig(recompute="full")),
    "recompute_selective": Case(parallel=ParallelConfig(recompute="selective", reshard_after_forward=False)),
    "tp": Case(parallel=ParallelConfig(tp=2)),
    "tp_other": Case(parallel=ParallelConfig(tp=2, recompute="full"), model=OTHER),
    "tp_float32": Case(parallel=ParallelConfig(tp=2), dtype="float32"),
    "ep": Case(parallel=ParallelConfig(ep=2)),
    "ep_float32": Case(parallel=ParallelConfig(ep=2, recompute="selective"), dtype="float32"),
    "cp": Case(parallel=ParallelConfig(cp=2)),
    "cp_other": Case(parallel=ParallelConfig(cp=2, recompute="full"), model=OTHER),
    "cp_rows": Case(parallel=ParallelConfig(cp=2), model=OTHER, documents=False),
    "cp_float32": Case(parallel=ParallelConfig(cp=2), dtype="float32"),
}
FOUR = {
    "fsdp_hsdp": Case(parallel=ParallelConfig(dp_replicate=2, dp_shard=2)),
    "fsdp_tp": Case(parallel=ParallelConfig(dp_shard=2, tp=2)),
    "fsdp_ep": Case(parallel=ParallelConfig(dp_shard=4, ep=2)),
    "ep_four": Case(parallel=ParallelConfig(ep=4), model=OTHER),
    "copies_ep": Case(parallel=ParallelConfig(dp_replicate=2, dp_shard=2, ep=2)),
    "tp_ep": Case(parallel=ParallelConfig(dp_shard=2, tp=2, ep=2)),
    "fsdp_cp": Case(parallel=ParallelConfig(dp_shard=2, cp=2)),
    "cp_four": Case(parallel=ParallelConfig(cp=4), model=OTHER),
    "cp_four_rows": Case(parallel=ParallelConfig(cp=4), documents=False),
    "cp_tp": Case(parallel=ParallelConfig(cp=2, tp=2)),
    "cp_ep": Case(parallel=ParallelConfig(dp_shard=2, cp=2, ep=4)),
}


@pytest.fixture(scope="module")
def results():
    worlds = {2: TWO, 4: FOUR}
    return Outcomes(
        {world: {name: partial(compared, case) for name, case in cases.items()} for world, cases in worlds.items()}
    )


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_a_spread_model_equals_one_process(results, name):
    case, result = (TWO | FOUR)[name], results[name]
    exact = case.dtype == "float64"
    assert result["loss"] <= (1e-12 if exact else 1e-6)
    if exact:
        assert result["worst_gradient"] <= 1e-10, result["worst_name"]
    assert result["all_gradients"] <= (1e-10 if exact else 1e-5)
    assert result["max_logit"] <= (1e-6 if exact else 1e-4), "maxima are reported in float32"
    assert result["bias"] == 0.0
