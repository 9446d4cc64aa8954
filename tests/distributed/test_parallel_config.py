"""What cannot be is refused with the reason and something that would do; what can be, has all its ranks."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from perilune.kernels.context import cut_borders
from perilune.model import ModelConfig, MoEConfig
from perilune.train.parallel import ParallelConfig, ParallelError
from tests.distributed.tiny_models import HYBRID, Case, batch, built, outcomes, summed

MODEL = ModelConfig(**HYBRID)


@pytest.mark.parametrize(
    "parallel,world_size,model,words",
    [
        (ParallelConfig(tp=2, dp_shard=2), 8, {}, "= 4, but this run has 8 ranks; start 4, or leave dp_shard None"),
        (ParallelConfig(tp=3), 8, {}, "tp=3 = 3 does not divide the 8 ranks of this run; start a multiple of 3"),
        (ParallelConfig(tp=3), 3, {}, "tp=3 cannot split kda.num_heads=4 evenly: take a divisor of it, such as 2"),
        (ParallelConfig(tp=8), 8, {"layer_types": ("mla",) * 4}, "mla.num_attention_heads=4"),
        (ParallelConfig(ep=2), 4, {"moe": None}, "ep=2, but the model has no experts"),
        (ParallelConfig(ep=3), 4, {}, "ep=3 must divide dp_shard x cp = 4, whose ranks own the experts: take 2"),
        (ParallelConfig(ep=4), 4, {"moe": MoEConfig(num_experts=6)}, "cannot share moe.num_experts=6 evenly"),
        (ParallelConfig(pp=8), 8, {}, "num_hidden_layers is 4: lower pp"),
        (ParallelConfig(pp=2), 2, {"tie_word_embeddings": True}, "untie it"),
    ],
)
def test_an_impossible_combination_is_refused_with_reason_and_suggestion(parallel, world_size, model, words):
    with pytest.raises(ParallelError) as refused:
        parallel.check(ModelConfig(**{**HYBRID, **model}), world_size)
    assert words in str(refused.value)


@pytest.mark.parametrize("name", ["dp_replicate", "dp_shard", "tp", "ep", "cp", "pp"])
def test_sizes_are_at_least_one(name):
    with pytest.raises(ParallelError, match=f"parallel.{name} is 0, expected at least 1"):
        ParallelConfig(**{name: 0})


@given(st.integers(1, 64), *[st.sampled_from([1, 2, 4]) for _ in range(4)])
def test_what_is_left_is_sharded(world_size, tp, cp, pp, copies):
    parallel = ParallelConfig(tp=tp, cp=cp, pp=pp, dp_replicate=copies)
    assume(world_size % (tp * cp * pp * copies) == 0)
    found = parallel.check(MODEL, world_size)
    assert found.dp_shard is not None
    assert found.dp_shard * tp * cp * pp * copies == world_size


@given(st.lists(st.integers(0, 24), max_size=6), st.sampled_from([1, 2, 3, 4, 6]))
def test_parts_of_a_row_hold_every_token_of_every_document_once(inner, ranks):
    borders = (0, *sorted(inner), 24)
    num_tokens = 24 // ranks
    open_tokens = 0
    lengths = []
    for rank in range(ranks):
        local, before, goes_on = cut_borders(borders, rank, ranks, num_tokens)
        assert local is not None and local[0] == 0 and local[-1] == num_tokens
        assert before == open_tokens, "what the next part is told lies before it is what this one left open"
        pieces = [stop - start for start, stop in zip(local[:-1], local[1:])]
        pieces[0] += before
        open_tokens = pieces[-1] if goes_on else 0
        lengths += pieces[:-1] if goes_on else pieces
    assert open_tokens == 0
    assert lengths == [stop - start for start, stop in zip(borders[:-1], borders[1:]) if stop > start]


def half_precision() -> dict[str, object]:
    """Dtypes that the layers compute with, and the gradients' that arrive."""
    from perilune.train.parallel import parallelize

    case = Case(parallel=ParallelConfig(), dtype="bfloat16")
    alone, model = built(case.config()), built(case.config())
    seen = {}

    def look(module, args, output):
        seen["matrix"] = str(module.q_proj.weight.dtype)
        seen["small"] = {str(p.dtype) for p in (module.A_log, module.dt_bias, module.conv_weight, module.o_norm.weight)}

    def look_at_router(module, args, output):
        seen["router"] = str(module.weight.dtype)

    model.layers[0].self_attn.register_forward_hook(look)
    model.layers[1].mlp.gate.register_forward_hook(look_at_router)
    parallel = parallelize(model, case.parallel, device_type="cpu", world_size=dist.get_world_size())
    loss = model.loss(*batch(parallel.data_rank))
    loss.backward()
    expected = torch.stack([alone.loss(*batch(number)) for number in range(2)]).sum()
    return {
        "matrix": seen["matrix"],
        "small": sorted(seen["small"]),
        "router": seen["router"],
        "gradients": sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None}),
        "loss": float((summed(parallel, loss) - expected).abs() / expected),
    }


@pytest.mark.distributed
def test_matrices_travel_in_half_precision_and_what_is_sensitive_does_not():
    result = outcomes(2, {"half": half_precision})["half"]
    assert result["matrix"] == "torch.bfloat16"
    assert result["small"] == ["torch.float32"] and result["router"] == "torch.float32"
    assert result["gradients"] == ["torch.float32"]
    assert result["loss"] < 1e-3, "one rounding of weights and activations to bfloat16 either way"
