"""Autocast around an operator changes nothing: neither its results nor its gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from perilune.kernels.attention import attention
from perilune.kernels.attnres import merge, mix, phase1
from perilune.kernels.cross_entropy import linear_cross_entropy_sum
from perilune.kernels.gated_norm import gated_rms_norm
from perilune.kernels.kda import SoftplusGate, kda, kda_step
from perilune.kernels.newton_schulz import orthogonalize
from perilune.kernels.norm import add_rms_norm
from perilune.kernels.short_conv import short_conv, short_conv_step
from perilune.kernels.swiglu import swiglu

B, T, H, D = 1, 20, 2, 8


def gate(x: Tensor) -> SoftplusGate:
    return SoftplusGate(x[0, 0, :, 0], x[0, 0])


# Each takes one tensor [B, T, H, D] and returns what the operator returns.
OPERATORS: dict[str, Callable[[Tensor], object]] = {
    "attention tiled": lambda x: attention(x, x, x, backend="tiled"),
    "attention reference": lambda x: attention(x, x, x, backend="reference"),
    "attention by keyword": lambda x: attention(q=x, k=x, v=x),
    "mix": lambda x: mix([x, x.flip(1)], x[0, 0, 0], gain=x[0, 1, 0], eps=1e-6),
    "mix reference": lambda x: mix([x, x.flip(1)], x[0, 0, 0], eps=1e-6, backend="reference"),
    "phase1": lambda x: phase1((x, x.flip(1)), x[0, 0], gain=x[0, 1], eps=1e-6),
    "phase1 reference": lambda x: phase1((x, x.flip(1)), x[0, 0], gain=x[0, 1], eps=1e-6, backend="reference"),
    "merge": lambda x: merge(x, x[..., 0], x.flip(1), x[0, 0, 0], eps=1e-6),
    "merge reference": lambda x: merge(x, x[..., 0], x.flip(1), x[0, 0, 0], eps=1e-6, backend="reference"),
    "kda": lambda x: kda(x, x, x, x, x[..., 0].sigmoid(), gate=gate(x), qk_l2norm=True, output_final_state=True),
    "kda reference": lambda x: kda(x, x, x, x, x[..., 0].sigmoid(), gate=gate(x), qk_l2norm=True, backend="reference"),
    "kda_step": lambda x: kda_step(x[:, 0], x[:, 1], x[:, 2], -x[:, 3].abs(), x[:, 4, :, 0].sigmoid(), x[:, 4:12].mT),
    "short_conv": lambda x: short_conv(x.flatten(2), x[0, :4].flatten(1).T, output_final_state=True),
    "short_conv reference": lambda x: short_conv(x.flatten(2), x[0, :4].flatten(1).T, backend="reference"),
    "short_conv_step": lambda x: short_conv_step(
        x[:, 0].flatten(1), x[:, :3].flatten(2).mT.detach(), x[0, :4].flatten(1).T
    ),
    "cross entropy": lambda x: linear_cross_entropy_sum(x[0, :, 0], x[0, :, 1], torch.arange(T)),
    "add_rms_norm": lambda x: add_rms_norm(x, x.flip(1), x[0, 0, 0], 1e-6),
    "gated_rms_norm": lambda x: gated_rms_norm(x, x.flip(1), x[0, 0, 0], 1e-6),
    "swiglu": lambda x: swiglu(x),
    "orthogonalize float32": lambda x: orthogonalize(x[0], dtype=torch.float32),
    "orthogonalize reference": lambda x: orthogonalize(x[0], dtype=torch.float32, backend="reference"),
    "orthogonalize bfloat16": lambda x: orthogonalize(x[0]),
}
# Only a hand-written backward is ours wherever it is called; torch's own follows the autocast of its caller.
OWN_BACKWARD = ("attention tiled", "mix", "phase1", "merge", "kda", "short_conv", "cross entropy")


def tensors_of(result: object) -> list[Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor)]


def gradient(results: list[Tensor], x: Tensor) -> list[Tensor]:
    differentiable = [result for result in results if result.requires_grad]
    if not differentiable:
        return []
    return list(torch.autograd.grad(differentiable, x, [torch.ones_like(result) for result in differentiable]))


@pytest.mark.parametrize("name", OPERATORS)
def test_autocast_around_an_operator_changes_no_bit(name: str) -> None:
    x = torch.randn(B, T, H, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    if name == "kda_step":
        x = torch.randn(B, T, D, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    plain = tensors_of(OPERATORS[name](x))
    expected = plain + gradient(plain, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = tensors_of(OPERATORS[name](x))
        inside = gradient(mixed, x) if name in OWN_BACKWARD else None
    ours = mixed + (gradient(mixed, x) if inside is None else inside)
    assert len(ours) == len(expected)
    for mine, right in zip(ours, expected, strict=True):
        assert mine.dtype == right.dtype and torch.equal(mine, right)
