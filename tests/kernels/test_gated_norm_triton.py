"""RMSNorm with a sigmoid gate: Triton's kernel against the definition, and its promises on a GPU."""

import pytest
import torch

from perilune.kernels.gated_norm import gated_rms_norm
from perilune.kernels.triton_support import why_not_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(why_not_triton(torch.empty(0, device=DEVICE)) is not None, reason="Triton cannot run")


def inputs(*shape: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(2))
    weight = (1 + torch.randn(shape[-1], generator=generator)).to(DEVICE)
    return [y.requires_grad_() for y in (x, 3 * gate.detach(), weight)]


def outputs_and_gradients(tensors, dy, backend=None):
    y = gated_rms_norm(*tensors, 1e-5, backend=backend)
    return [y, *torch.autograd.grad(y, tensors, dy.to(y.dtype))]


def exact_of(tensors, dy):
    wide = [x.detach().double().requires_grad_() for x in tensors]
    return outputs_and_gradients(wide, dy.double(), "reference")


def relative_error(mine, right) -> float:
    return ((mine.double() - right).norm() / right.norm()).item()


def test_rows_in_flight_fit_into_the_shared_memory_of_small_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from perilune.kernels.gated_norm import triton

    launches = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *tensors, **constants: launches.append(constants)

    monkeypatch.setattr(triton, "_backward_kernel", Recorder())
    for width in (16, 128, 2048, 4096, triton.MAX_WIDTH):
        x = torch.zeros(2, width, device=DEVICE)
        triton._backward(x, x, x, x[0], 1e-5)
        constants = launches.pop()
        in_flight = 3 * (constants["STAGES"] - 1) * constants["ROWS"] * constants["BLOCK"] * 4  # dy, x and gate
        assert in_flight + constants["BLOCK"] <= 99 << 10, width


# 4096 elements are a tile: widths on both sides of a power of two, one row, several tiles per program.
@pytest.mark.parametrize("shape", [(1, 1), (1, 128), (3, 5, 20), (2, 70, 2, 33), (7, 4096), (1100, 32)])
def test_outputs_and_gradients_equal_the_definition(shape) -> None:
    tensors = inputs(*shape)
    dy = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    exact = exact_of(tensors, dy)
    ours = outputs_and_gradients(tensors, dy, "triton")
    for mine, right in zip(ours, exact, strict=True):
        # float32 sums over a row (dx) and over all rows (dweight), whose errors add up at random. One column alone is
        # divided by its own size, which leaves dx = 0 up to eps.
        rows = torch.Size(shape[:-1]).numel()
        bound = 8 * 2.0**-24 * (1 + max(shape[-1], rows) ** 0.5)
        assert (mine.double() - right).norm() < bound * max(right.norm().item(), 1.0)


def test_strided_inputs_give_the_same() -> None:
    x, gate, weight = inputs(6, 40)
    dy = torch.randn(6, 20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    views = [x[:, ::2], gate[:, 20:], weight[::2]]
    views = [view.detach().requires_grad_() for view in views]
    ours = outputs_and_gradients(views, dy.T.contiguous().T, "triton")
    for mine, right in zip(ours, exact_of(views, dy), strict=True):
        assert relative_error(mine, right) < 1e-6


def test_no_rows_give_no_rows_and_zero_gradient() -> None:
    tensors = inputs(0, 8)
    y, dx, dgate, dweight = outputs_and_gradients(tensors, torch.empty(0, 8, device=DEVICE), "triton")
    assert y.shape == dx.shape == dgate.shape == (0, 8) and (dweight == 0).all()


def test_wrong_arguments_are_refused() -> None:
    x, gate, weight = inputs(4, 8)
    with pytest.raises(ValueError, match=r"gate \(4, 7\)"):
        gated_rms_norm(x, gate[:, :7], weight, 1e-5)
    with pytest.raises(ValueError, match="backend='fast' is unknown"):
        gated_rms_norm(x, gate, weight, 1e-5, backend="fast")
    with pytest.raises(ValueError, match="gate is torch.float64"):
        gated_rms_norm(x, gate.double(), weight, 1e-5, backend="triton")


def test_the_operator_passes_the_library_checks() -> None:
    torch.library.opcheck(torch.ops.perilune.gated_rms_norm.default, (*inputs(3, 5), 1e-5))


@pytest.mark.gpu
def test_bfloat16_rounds_once() -> None:
    tensors = inputs(2, 700, 4, 128, dtype=torch.bfloat16)
    dy = torch.randn_like(tensors[0])
    exact = exact_of(tensors, dy)
    for mine, right in zip(outputs_and_gradients(tensors, dy), exact, strict=True):
        assert relative_error(mine, right) < (torch.finfo(torch.bfloat16).eps if mine.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
def test_the_same_bits_every_time_compiled_and_in_a_cuda_graph() -> None:
    tensors = inputs(3000, 128, dtype=torch.bfloat16)
    dy = torch.randn_like(tensors[0])
    first = outputs_and_gradients(tensors, dy)
    # Leaves of its own: autograd ties a leaf to the stream that first used it, which is not the one that captures.
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs_and_gradients(leaves, dy)
    graph.replay()
    compiled = torch.compile(lambda: gated_rms_norm(*tensors, 1e-5), fullgraph=True, backend="aot_eager")()
    for other in (
        outputs_and_gradients(tensors, dy),
        captured,
        [compiled, *torch.autograd.grad(compiled, tensors, dy)],
    ):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
