"""Borders may be filled up with empty documents at the end: no operator of a training step gives another bit for it."""

import pytest
import torch

from perilune.kernels.attention import attention
from perilune.kernels.kda import SoftplusGate, kda
from perilune.kernels.short_conv import short_conv
from perilune.kernels.triton_support import why_not_triton
from perilune.model.documents import positions_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_triton = pytest.mark.skipif(why_not_triton(torch.empty(0, device=DEVICE)) is not None, reason="Triton cannot run")
TOKENS = 70  # a document of more than one chunk
BORDERS = [0, 2, 3, TOKENS]
EMPTY = 6


def random(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()


def with_kda(borders: torch.Tensor, backend: str) -> list[torch.Tensor]:
    q, k, v, g = (random(1, TOKENS, 2, 16, seed=seed) for seed in range(4))
    beta, rate, bias = random(1, TOKENS, 2, seed=4), random(2, seed=5), random(32, seed=6)
    o, _ = kda(
        q, k, v, g, beta, cu_seqlens=borders, gate=SoftplusGate(A_log=rate, dt_bias=bias), qk_l2norm=True,
        beta_max=1.0, backend=backend,
    )  # fmt: skip
    return [o, *torch.autograd.grad(o.square().sum(), (q, k, v, g, beta, rate, bias))]


def with_short_conv(borders: torch.Tensor, backend: str) -> list[torch.Tensor]:
    x, weight = random(1, TOKENS, 16, seed=0), random(16, 4, seed=1)
    y, _ = short_conv(x, weight, cu_seqlens=borders, activation="silu", backend=backend)
    return [y, *torch.autograd.grad(y.square().sum(), (x, weight))]


def with_attention(borders: torch.Tensor, backend: str) -> list[torch.Tensor]:
    q, k, v = (random(1, TOKENS, 2, 16, seed=seed) for seed in range(3))
    o, maximum, is_bound = attention(q, k, v, cu_seqlens=borders, backend=backend)
    return [o, maximum, is_bound, *torch.autograd.grad(o.square().sum(), (q, k, v))]


def with_positions(borders: torch.Tensor, backend: str) -> list[torch.Tensor]:
    return [positions_of(torch.zeros(1, TOKENS, device=DEVICE), borders, 0)]


@pytest.mark.parametrize(
    ("operator", "backend"),
    [
        pytest.param(with_kda, "chunked"),
        pytest.param(with_kda, "triton", marks=needs_triton),
        pytest.param(with_short_conv, "shifted"),
        pytest.param(with_short_conv, "triton", marks=needs_triton),
        pytest.param(with_attention, "tiled"),
        pytest.param(with_attention, "triton", marks=needs_triton),
        pytest.param(with_positions, "torch"),
    ],
)
def test_empty_documents_at_the_end_change_no_bit(operator, backend) -> None:
    plain, filled = (
        operator(torch.tensor([*BORDERS, *[TOKENS] * count], dtype=torch.int32, device=DEVICE), backend)
        for count in (0, EMPTY)
    )
    for ours, theirs in zip(filled, plain, strict=True):
        assert torch.equal(ours, theirs)
