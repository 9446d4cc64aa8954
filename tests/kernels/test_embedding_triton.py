"""Embedding rows and their gradients: Triton's path against torch's, and its promises on a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kernels.embedding import embed
from perilune.kernels.triton_support import why_not_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(why_not_triton(torch.empty(0, device=DEVICE)) is not None, reason="Triton cannot run")


def rows_and_gradient(tokens, weight, dx, backend, dtype=torch.float32):
    x = embed(tokens, weight, dtype, backend=backend)
    return x.detach(), torch.autograd.grad(x, weight, dx.to(x.dtype))[0]


def compared(tokens: torch.Tensor, vocabulary: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocabulary, width, generator=generator).to(DEVICE).requires_grad_()
    dx = torch.randn(*tokens.shape, width, generator=generator).to(DEVICE)
    x, d_weight = rows_and_gradient(tokens, weight, dx, "triton")
    wide = weight.detach().double().requires_grad_()
    right, exact = rows_and_gradient(tokens, wide, dx.double(), "dense", torch.float64)
    assert torch.equal(x, right.float())
    # float32 sums of at most N numbers of size 1
    torch.testing.assert_close(d_weight.double(), exact, rtol=1e-6, atol=2.0**-22 * max(1, tokens.numel()))


# Segments of one token, of exactly a chunk (32), one more, many chunks; widths off a power of two and above a block.
@pytest.mark.parametrize(
    ("counts", "width"),
    [((1,), 1), ((31, 32, 33), 5), ((64, 1, 65, 1), 8), ((200, 3, 97), 3), ((1, 40, 40, 1), 1030), ((0, 7, 0), 16)],
)
def test_rows_and_gradients_equal_the_definition(counts, width) -> None:
    tokens = torch.cat([torch.full((count,), token) for token, count in enumerate(counts)])
    shuffled = tokens[torch.randperm(len(tokens), generator=torch.Generator().manual_seed(1))]
    compared(shuffled.to(DEVICE), len(counts) + 1, width)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=5))
def test_any_lengths_of_segments_are_summed(segments) -> None:
    tokens = torch.cat([torch.full((count,), token) for token, count in segments])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("perilune.kernels.embedding.triton.CHUNK", 4)
        compared(tokens.to(DEVICE), 4, 2)


def test_shapes_strides_and_no_tokens() -> None:
    weight = torch.randn(6, 10, device=DEVICE)[:, ::2].requires_grad_()
    tokens = torch.randint(0, 6, (3, 8), device=DEVICE).T
    dx = torch.randn(5, 8, 3, device=DEVICE).permute(1, 2, 0)
    ours = rows_and_gradient(tokens, weight, dx, "triton")
    for mine, right in zip(ours, rows_and_gradient(tokens, weight, dx, "dense"), strict=True):
        torch.testing.assert_close(mine, right)
    x, d_weight = rows_and_gradient(tokens[:0], weight, dx[:0], "triton")
    assert x.shape == (0, 3, 5) and (d_weight == 0).all()


def test_a_token_outside_of_the_vocabulary_is_nan_and_has_no_gradient() -> None:
    weight = torch.randn(4, 3, device=DEVICE, requires_grad=True)
    tokens = torch.tensor([1, -1, 4, *[4] * 40, *[-7] * 40, 2], device=DEVICE)
    x, d_weight = rows_and_gradient(tokens, weight, torch.ones(len(tokens), 3, device=DEVICE), "triton")
    assert x[1:-1].isnan().all() and torch.equal(x[[0, -1]], weight[[1, 2]])
    assert torch.equal(d_weight, torch.tensor([[0.0], [1.0], [1.0], [0.0]], device=DEVICE).expand(4, 3))


def test_a_wide_number_whose_low_half_is_a_token_is_none() -> None:
    weight = torch.randn(4, 3, device=DEVICE, requires_grad=True)
    tokens = torch.tensor([1, 2**32 + 1, 2**32 + 2, -(2**32) + 3], device=DEVICE)
    x, d_weight = rows_and_gradient(tokens, weight, torch.ones(4, 3, device=DEVICE), "triton")
    assert x[1:].isnan().all() and torch.equal(x[0], weight[1])
    assert torch.equal(d_weight, torch.tensor([[0.0], [1.0], [0.0], [0.0]], device=DEVICE).expand(4, 3))


def test_the_weight_may_change_before_the_backward_and_is_not_kept() -> None:
    weight = torch.randn(4, 3, device=DEVICE, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        x = embed(torch.tensor([1, 1], device=DEVICE), weight, torch.float32, backend="triton")
    with torch.no_grad():
        weight.mul_(2)
    x.sum().backward()
    assert torch.equal(weight.grad, torch.tensor([[0.0], [2.0], [0.0], [0.0]], device=DEVICE).expand(4, 3))
    assert all(x.shape != weight.shape for x in kept)


def test_wrong_arguments_are_refused() -> None:
    weight, tokens = torch.randn(4, 3, device=DEVICE), torch.tensor([1], device=DEVICE)
    with pytest.raises(ValueError, match="tokens are torch.float32"):
        embed(tokens.float(), weight, torch.float32)
    with pytest.raises(ValueError, match="tokens are torch.uint8, expected int32 or int64"):
        embed(tokens.to(torch.uint8), weight, torch.float32)
    with pytest.raises(ValueError, match=r"weight has shape \(3,\)"):
        embed(tokens, weight[0], torch.float32)
    with pytest.raises(ValueError, match="backend='fast' is unknown"):
        embed(tokens, weight, torch.float32, backend="fast")
    with pytest.raises(ValueError, match="got weight torch.float64"):
        embed(tokens, weight.double(), torch.float32, backend="triton")


def test_the_operator_passes_the_library_checks() -> None:
    import perilune.kernels.embedding.triton  # noqa: F401  registers the operator

    weight = torch.randn(4, 3, device=DEVICE, requires_grad=True)
    tokens = torch.tensor([[1, 3, 1]], device=DEVICE)
    torch.library.opcheck(torch.ops.perilune.embed.default, (tokens, weight, torch.float32))


@pytest.mark.gpu
def test_bfloat16_rows_are_rounded_once_and_sums_of_gradients_in_float32_repeat_bit_by_bit() -> None:
    torch.manual_seed(0)
    weight = torch.randn(1000, 1024, device="cuda", requires_grad=True)
    tokens = (torch.rand(4, 3000, device="cuda") ** 4 * 1000).long()  # a few tokens are frequent
    dx = torch.randn(4, 3000, 1024, device="cuda").bfloat16()
    x, d_weight = rows_and_gradient(tokens, weight, dx, "triton", torch.bfloat16)
    assert torch.equal(x, weight.detach()[tokens].bfloat16())
    wide = weight.detach().double().requires_grad_()
    _, exact = rows_and_gradient(tokens, wide, dx.double(), "dense", torch.float64)
    assert (d_weight.double() - exact).norm() / exact.norm() < 1e-6
    for _ in range(3):
        assert torch.equal(rows_and_gradient(tokens, weight, dx, "triton", torch.bfloat16)[1], d_weight)
    compiled = torch.compile(lambda tokens, weight: embed(tokens, weight, torch.bfloat16), fullgraph=True)
    (again,) = torch.autograd.grad(compiled(tokens, weight), weight, dx)
    assert torch.equal(again, d_weight)


@pytest.mark.gpu
def test_the_host_never_waits() -> None:
    weight = torch.randn(50, 64, device="cuda", requires_grad=True)
    tokens = torch.randint(0, 50, (300,), device="cuda")
    embed(tokens, weight, torch.bfloat16).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        embed(tokens, weight, torch.bfloat16).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
