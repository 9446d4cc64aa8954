"""silu(gate) * up: Triton's kernel against the definition, and its promises on a GPU."""

import pytest
import torch
import torch.nn.functional as F

from perilune.kernels.swiglu import swiglu
from perilune.kernels.triton_support import why_not_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(why_not_triton(torch.empty(0, device=DEVICE)) is not None, reason="Triton cannot run")


def inputs(*shape: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = 4 * torch.randn(shape, generator=generator)
    dh = torch.randn(*shape[:-1], shape[-1] // 2, generator=generator)
    return x.to(DEVICE, dtype).requires_grad_(), dh.to(DEVICE, dtype)


def output_and_gradient(x, dh, backend=None):
    h = swiglu(x, backend=backend)
    return [h, *torch.autograd.grad(h, [x], dh.to(h.dtype))]


def test_the_definition_is_silu_of_the_first_half_times_the_second() -> None:
    x, _ = inputs(3, 10)
    assert torch.equal(swiglu(x, backend="reference"), F.silu(x[:, :5]) * x[:, 5:])


# Tiles are 8 rows of 256 columns.
@pytest.mark.parametrize("shape", [(1, 2), (3, 5, 14), (8, 512), (9, 514), (17, 2, 66), (0, 4)])
def test_output_and_gradient_equal_the_definition(shape) -> None:
    x, dh = inputs(*shape)
    exact = output_and_gradient(x.detach().double().requires_grad_(), dh.double(), "reference")
    for mine, right in zip(output_and_gradient(x, dh, "triton"), exact, strict=True):
        # A handful of float32 roundings; gates reach 16, where silu' is near 1 and its terms are as large as the gate.
        torch.testing.assert_close(mine.double(), right, rtol=16 * 2**-24, atol=64 * 2**-24)


def test_extreme_gates_stay_finite() -> None:
    x = torch.tensor([[-200.0, -90.0, 90.0, 200.0, 1.0, 1.0, 1.0, 1.0]], device=DEVICE, requires_grad=True)
    h, dx = output_and_gradient(x, torch.ones(1, 4, device=DEVICE), "triton")
    torch.testing.assert_close(h.detach(), torch.tensor([[0.0, 0.0, 90.0, 200.0]], device=DEVICE))
    torch.testing.assert_close(dx[:, :4], torch.tensor([[0.0, 0.0, 1.0, 1.0]], device=DEVICE))


def test_strided_inputs_give_the_same() -> None:
    x, dh = inputs(12, 10)
    view = x.detach().T.contiguous().T.requires_grad_()
    for mine, right in zip(output_and_gradient(view, dh, "triton"), output_and_gradient(x, dh, "triton"), strict=True):
        assert torch.equal(mine, right)


def test_a_second_derivative_is_refused_and_never_zero() -> None:
    """The gradient of the sum of h depends on x although that of h does not."""
    x, _ = inputs(3, 10)
    (dx,) = torch.autograd.grad(swiglu(x, backend="triton").sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError, match="swiglu_backward"):
        (dx.square().sum() + x.sum()).backward()


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 7\), expected \[..., 2 I\]"):
        swiglu(torch.zeros(4, 7))
    with pytest.raises(ValueError, match="backend='fast' is unknown"):
        swiglu(torch.zeros(4, 8), backend="fast")
    with pytest.raises(ValueError, match="got torch.float64"):
        swiglu(torch.zeros(4, 8, dtype=torch.float64, device=DEVICE), backend="triton")


def test_the_operator_passes_the_library_checks() -> None:
    torch.library.opcheck(torch.ops.perilune.swiglu.default, (inputs(3, 10)[0],))


@pytest.mark.gpu
def test_bfloat16_rounds_once_and_gives_the_same_bits_compiled_and_in_a_cuda_graph() -> None:
    x, dh = inputs(2000, 2 * 704, dtype=torch.bfloat16)
    exact = output_and_gradient(x.detach().double().requires_grad_(), dh.double(), "reference")
    first = output_and_gradient(x, dh)
    for mine, right in zip(first, exact, strict=True):
        assert (mine.double() - right).norm() / right.norm() < torch.finfo(torch.bfloat16).eps
    # A leaf of its own: autograd ties a leaf to the stream that first used it, which is not the one that captures.
    leaf = x.detach().clone().requires_grad_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = output_and_gradient(leaf, dh)
    graph.replay()
    compiled = torch.compile(lambda: swiglu(x), fullgraph=True, backend="aot_eager")()
    for other in (output_and_gradient(x, dh), captured, [compiled, *torch.autograd.grad(compiled, [x], dh)]):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
