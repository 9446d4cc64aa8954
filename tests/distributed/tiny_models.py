"""One tiny decoder of every kind, and what a spread one is compared with: the same decoder in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from perilune.train.parallel import Parallel, ParallelConfig, parallelize
from tests.distributed.gloo import run

Check = Callable[[], dict[str, Any]]

TOKENS = 48
BORDERS = ([0, 5, 29, 29, 48], [0, 10, 24, 35, 48])
"""Documents that cross every cut of 2 and of 4 ranks, and an empty one; documents that end at a cut, and that begin
one and two tokens before one, which is less than a convolution looks back."""

HYBRID: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "kda": KDAConfig(num_heads=4, head_dim=8),
    "mla": MLAConfig(num_attention_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    "intermediate_size": 48,
    "moe": MoEConfig(num_experts=8, num_experts_per_token=2, moe_intermediate_size=16),
}
OTHER: dict[str, Any] = HYBRID | {
    "kda": KDAConfig(num_heads=4, head_dim=8, gate_lower_bound=-5.0, use_full_rank_gate=True, allow_neg_eigval=True),
    "mla": MLAConfig(
        num_attention_heads=4, q_lora_rank=12, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        rope=RopeConfig(),
    ),
    "residual": "attnres",
}  # fmt: skip
DENSE: dict[str, Any] = HYBRID | {"moe": None, "residual": "plain"}


@dataclass(frozen=True, kw_only=True)
class Case:
    parallel: ParallelConfig
    model: dict[str, Any] = field(default_factory=lambda: HYBRID)
    dtype: str = "float64"
    documents: bool = True

    def config(self) -> ModelConfig:
        return ModelConfig(**{**self.model, "compute_dtype": self.dtype})


def built(config: ModelConfig) -> Decoder:
    """With queries that are not zero: at zero the residual mix has no gradient to be wrong in."""
    model = Decoder(config, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("query"):
                parameter.normal_(0.0, 0.1, generator=generator)
    return model


def batch(number: int, *, documents: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(number)
    rows = 1 if documents else 2
    tokens, targets = torch.randint(0, 64, (2, rows, TOKENS), generator=generator)
    targets[:, ::7] = -100
    return tokens, targets, torch.tensor(BORDERS[number % 2], dtype=torch.int32) if documents else None


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def summed(parallel: Parallel, value: Tensor) -> Tensor:
    value = value.detach().clone()
    for group in parallel.loss_groups():
        dist.all_reduce(value, group=group)
    return value


def compared(case: Case) -> dict[str, Any]:
    """Loss, gradients, router biases and maximum logits of the spread model against those of one process."""
    alone, model = built(case.config()), built(case.config())
    parallel = parallelize(model, case.parallel, device_type="cpu", world_size=dist.get_world_size())
    batches = [batch(number, documents=case.documents) for number in range(2 * parallel.num_data_ranks)]
    expected = torch.stack([alone.loss(*each) for each in batches]).sum()
    expected.backward()

    losses = []
    for tokens, targets, borders in batches[2 * parallel.data_rank :][:2]:
        losses.append(model.loss(*parallel.own_tokens(tokens, targets), borders))
        losses[-1].backward()
    loss = torch.stack(losses).sum()
    return {"loss": relative(summed(parallel, loss), expected), **differences(alone, model)}


def differences(alone: Decoder, model: Decoder, *, same_layers: bool = True) -> dict[str, Any]:
    """same_layers False: `model` has only some of the layers."""
    gradients = {name: parameter.grad for name, parameter in alone.named_parameters()}
    worst, squares, error_squares = ("", 0.0), 0.0, 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        own, other = whole(parameter.grad).double(), gradients[name]
        assert other is not None
        error = float((own - other.double()).norm())
        squares, error_squares = squares + float(other.double().norm()) ** 2, error_squares + error**2
        worst = max(worst, (name, error / (float(other.double().norm()) + 1e-30)), key=lambda pair: pair[1])
    logits = expected_logits = torch.zeros(1)
    if same_layers:
        logits, expected_logits = model.max_logits(), alone.max_logits()
        dist.all_reduce(logits, op=dist.ReduceOp.MAX)
    alone.after_optimizer_step()
    model.after_optimizer_step()
    biases = dict(alone.named_buffers())
    bias_errors = [(bias - biases[name]).abs().max() for name, bias in model.named_buffers() if "bias" in name]
    return {
        "worst_gradient": worst[1],
        "worst_name": worst[0],
        "all_gradients": (error_squares / squares) ** 0.5,
        "max_logit": float((logits - expected_logits).abs().max()),
        "bias": float(max(bias_errors, default=0.0)),
    }


class Outcomes:
    """What checks return, by their name; the checks of a world run when the first of them is asked for.

    Two processes of the test command then share the worlds of a file, where each would else start all of them.
    """

    def __init__(self, checks: Mapping[int, Mapping[str, Check]]) -> None:
        self._checks = checks
        self._found: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._found:
            (world_size,) = [world for world, checks in self._checks.items() if name in checks]
            self._found |= outcomes(world_size, self._checks[world_size])
        return self._found[name]


def outcomes(world_size: int, checks: Mapping[str, Check]) -> dict[str, dict[str, Any]]:
    """What every check returns on rank 0 of one world for all of them: starting a world costs more than a check."""
    return run(world_size, _all_of, checks)[0]


def _all_of(rank: int, checks: Mapping[str, Check]) -> dict[str, dict[str, Any]]:
    results = {}
    for name, check in checks.items():
        try:
            results[name] = check()
        except Exception as error:
            error.add_note(f"in {name!r}")
            raise
    return results


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.detach().double()).abs() / expected.detach().double().abs())
