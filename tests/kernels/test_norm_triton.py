"""Fused add + RMSNorm against the definition in float64, in outputs and gradients."""

import pytest
import torch
from torch import Tensor

from perilune.kernels.norm import add_rms_norm, rms_norm

EPS = 1e-5
# Relative norm. float32 carries 2^-24 = 6e-8 a rounding; a gradient passes about ten roundings and one subtraction of
# parts of its own size.
FLOAT32_RTOL = 3e-6
SHAPES = [(1, 1), (3, 5), (17, 64), (2, 3, 100), (5, 300), (3, 1024)]


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    residual, x = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = 1 + 0.3 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)
    residual, x = residual.to(device, dtype).requires_grad_(), x.to(device, dtype).requires_grad_()
    return [residual, x, weight.to(device, torch.float32).requires_grad_()]


def outputs_and_gradients(residual: Tensor, x: Tensor, weight: Tensor, backend: str) -> list[Tensor]:
    total, normed = add_rms_norm(residual, x, weight, EPS, backend=backend)
    alone = rms_norm(x, weight, EPS, backend=backend)
    generator = torch.Generator().manual_seed(7)
    outputs = [total, normed, alone]
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [residual, x, weight], weights)]


def assert_close(ours: list[Tensor], right: list[Tensor], rtol: float) -> None:
    for index, (mine, expected) in enumerate(zip(ours, right, strict=True)):
        assert mine.shape == expected.shape
        # At width 1 a norm gradient is the difference of two numbers around 1 that nearly agree.
        assert (mine.double() - expected).norm() <= rtol * max(1.0, expected.norm()), index


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_triton_equals_the_definition_in_outputs_and_gradients(shape: tuple[int, ...]) -> None:
    inputs = draw(shape)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    assert_close(outputs_and_gradients(*inputs, "triton"), outputs_and_gradients(*exact, "reference"), FLOAT32_RTOL)


def test_strided_inputs_equal_contiguous_ones() -> None:
    residual, x, weight = draw((4, 6, 64))
    strided = [y.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for y in (residual, x)]
    for ours, right in zip(
        outputs_and_gradients(*strided, weight, "triton"), outputs_and_gradients(residual, x, weight, "triton")
    ):
        assert torch.equal(ours, right)


def test_no_tokens_give_empty_results_and_a_zero_gradient() -> None:
    total, normed, _, *grads = outputs_and_gradients(*draw((0, 8)), "triton")
    assert total.shape == normed.shape == (0, 8)
    assert grads[-1].eq(0).all() and grads[-1].shape == (8,)


@pytest.mark.parametrize("used", ["total", "normed"])
def test_one_output_alone_carries_gradient(used: str) -> None:
    results = []
    for backend in ("triton", "reference"):
        inputs = draw((3, 8))
        total, normed = add_rms_norm(*inputs, EPS, backend=backend)
        grads = torch.autograd.grad((total if used == "total" else normed).square().sum(), inputs, allow_unused=True)
        results.append([x for x in grads if x is not None])
    assert len(results[0]) == len(results[1])
    assert_close(results[0], [x.double() for x in results[1]], 2 * FLOAT32_RTOL)


def test_operators_keep_the_rules_of_torch_library() -> None:
    residual, x, weight = draw((3, 8))
    torch.library.opcheck(torch.ops.perilune.add_rms_norm, (residual, x, weight, EPS))
    torch.library.opcheck(torch.ops.perilune.rms_norm, (x, weight, EPS))


def test_wrong_input_is_named() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"weight has shape \(7,\), expected \(8,\)"):
        rms_norm(x, torch.ones(7), EPS)
    with pytest.raises(ValueError, match=r"residual is torch.float64 \(2, 8\)"):
        add_rms_norm(x.double(), x, torch.ones(8), EPS)
    with pytest.raises(ValueError, match="'fast'"):
        rms_norm(x, torch.ones(8), EPS, backend="fast")
    with pytest.raises(ValueError, match="float64"):
        rms_norm(x.double(), torch.ones(8).double(), EPS, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(777, 1024), (64, 2048), (33, 300)], ids=str)
def test_gpu_equals_the_definition_on_the_same_inputs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = draw(shape, dtype, "cuda")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    right = outputs_and_gradients(*exact, "reference")
    # Half precision: total and results are rounded once each, 2^-9 (bfloat16) or 2^-12 at most.
    rtol = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: FLOAT32_RTOL}[dtype]
    ours = outputs_and_gradients(*inputs, "triton")
    assert_close(ours, right, rtol)
    again = outputs_and_gradients(*inputs, "triton")
    assert all(torch.equal(first, second) for first, second in zip(ours, again))


@pytest.mark.gpu
def test_gpu_takes_triton_by_itself_and_compiles_without_a_break() -> None:
    inputs = draw((64, 1024), torch.bfloat16, "cuda")

    def network(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        total, normed = add_rms_norm(residual, x * 2, weight, EPS)
        return (total + normed.sin()).float().square().sum()

    eager = torch.autograd.grad(network(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(network, fullgraph=True)(*inputs), inputs)
    for ours, right in zip(compiled, eager):
        assert (ours.double() - right.double()).norm() <= 2**-7 * right.double().norm()
