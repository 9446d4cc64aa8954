"""The Triton convolution against the shifted path, in Triton's interpreter, and its promises on a GPU."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.kernels.short_conv import short_conv
from perilune.kernels.triton_support import why_not_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.skipif(why_not_triton(torch.empty(0, device=DEVICE)) is not None, reason="Triton cannot run")

# Sums of up to 8 products for y and dx, of up to T for dweight, each rounded to 24 bits; inputs are of size 1.
EPS = 2.0**-24


if not why_not_triton(torch.empty(0, device=DEVICE)):
    from perilune.kernels.short_conv.triton import LAUNCHES

    SHIPPED = dict(LAUNCHES)


@pytest.fixture(scope="module", autouse=True)
def short_runs():
    """Runs of 16 rows (13 in the backward for width 4), so that a few tokens already cross from run to run."""
    from perilune.kernels.short_conv import triton

    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":  # the interpreter pays for every row
            small = triton.Launch(run=16, rows=4, stages=3, channels=16, num_warps=1)
            patch.setattr(triton, "LAUNCHES", dict.fromkeys(SHIPPED, small))
        yield


def inputs(tokens: int, sequences: int, channels: int = 5, width: int = 4, batch: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, tokens, channels), (channels, width), (sequences, channels, width - 1))
    return [torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def outputs_and_gradients(x, weight, state, **options):
    y, final = short_conv(x, weight, initial_state=state, output_final_state=True, **options)
    generator = torch.Generator().manual_seed(7)
    loss = (y * torch.randn(y.shape, generator=generator).to(y)).sum()
    loss = loss + (final * torch.randn(final.shape, generator=generator).to(final)).sum()
    sources = [x, weight] if state is None else [x, weight, state]
    return [y, final, *torch.autograd.grad(loss, sources, materialize_grads=True)]


def assert_same(ours, exact, tokens: int) -> None:
    for mine, right in zip(ours, exact, strict=True):
        assert mine.shape == right.shape
        assert not mine.isnan().any()
        bound = 16 * EPS * max(1, tokens) ** 0.5 * (1 + right.abs().max().item() if right.numel() else 1)
        torch.testing.assert_close(mine.double(), right, rtol=0, atol=bound)


def check(tensors, **options) -> None:
    wide = [x if x is None else x.detach().double().requires_grad_() for x in tensors]
    exact = outputs_and_gradients(*wide, **options, backend="reference")
    assert_same(outputs_and_gradients(*tensors, **options, backend="triton"), exact, tensors[0].shape[1])


@settings(max_examples=4)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6),
    width=st.integers(1, 5),
    activation=st.sampled_from(["silu", None]),
    with_state=st.booleans(),
    seed=st.integers(0, 999),
)
@example(lengths=[0, 1, 2, 3, 0, 4], width=4, activation="silu", with_state=True, seed=0)
@example(lengths=[1], width=4, activation="silu", with_state=False, seed=0)
@example(lengths=[13, 3, 0, 2, 1], width=4, activation="silu", with_state=True, seed=0)
@example(lengths=[3, 2, 9], width=8, activation="silu", with_state=True, seed=1)
@example(lengths=[0, 0], width=3, activation="silu", with_state=True, seed=1)
def test_packed_documents_equal_separate_convolutions(lengths, width, activation, with_state, seed) -> None:
    borders = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    x, weight, state = inputs(sum(lengths), len(lengths), width=width, seed=seed)
    check([x, weight, state if with_state else None], cu_seqlens=borders, activation=activation)


@pytest.mark.parametrize(("batch", "tokens"), [(3, 2), (1, 13), (2, 14), (1, 16), (2, 17), (1, 33)])
@pytest.mark.parametrize("with_state", [False, True])
def test_rows_of_a_batch_equal_the_definition(batch, tokens, with_state) -> None:
    x, weight, state = inputs(tokens, batch, channels=19, batch=batch)
    check([x, weight, state if with_state else None])


def test_strided_rows_and_channels_are_read_in_place_or_copied() -> None:
    x, weight, _ = inputs(9, 1, channels=6)
    wide = torch.randn(1, 9, 20, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for view in (wide[..., 5:11], wide[..., 1:13:2], wide[:, ::2, 2:8], wide[:, :, :9].mT[:, :6].mT):
        check([view.detach().requires_grad_(), weight, None])


def test_shipped_launches_cover_all_rows_and_channels() -> None:
    from perilune.kernels.short_conv import triton

    x, weight, _ = inputs(70, 1, channels=9)
    wide = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    exact, _ = short_conv(*wide, backend="reference")
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    right = torch.autograd.grad(exact, wide, dy.double())
    for (direction, _), launch in SHIPPED.items():
        assert launch.run % launch.rows == 0
        if direction == "forward":
            ours = triton.forward_parts(x, weight, parts=1, origins=None, state=None, silu=True, launch=launch)
            assert_same(ours, [exact], 70)
        else:
            dx = torch.full_like(x, torch.nan)
            dweight = triton.backward_parts(
                [dy], x, weight, dx_BTC=dx, origins=None, state=None, silu=True, launch=launch
            )
            assert_same([dx, dweight], right, 70)


def test_three_parts_equal_one_convolution_cut_in_three() -> None:
    from perilune.kernels.short_conv import triton

    generator = torch.Generator().manual_seed(0)
    projected = torch.randn(1, 18, 3 * 7 + 4, generator=generator).to(DEVICE)
    weight = torch.randn(21, 4, generator=generator).to(DEVICE)
    x = projected[..., :21]
    parts = triton.forward_parts(x, weight, parts=3, origins=None, state=None, silu=True)
    whole = short_conv(x, weight, backend="triton")[0]
    assert torch.equal(torch.cat(parts, dim=-1), whole)

    gradients = [torch.randn(part.shape, generator=generator).to(DEVICE) for part in parts]
    d_projected = torch.full_like(projected, 9.0)
    dweight = triton.backward_parts(
        gradients, x, weight, dx_BTC=d_projected[..., :21], origins=None, state=None, silu=True
    )
    source, taps = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y, _ = short_conv(source, taps, backend="triton")
    expected = torch.autograd.grad(y, [source, taps], torch.cat(gradients, dim=-1))
    assert torch.equal(d_projected[..., :21], expected[0]) and torch.equal(dweight, expected[1])
    assert (d_projected[..., 21:] == 9.0).all()


def test_wrong_arguments_are_refused_before_anything_is_launched() -> None:
    x, weight, _ = inputs(6, 1)
    with pytest.raises(ValueError, match=r"width 9 is more than 8; use backend='shifted'"):
        short_conv(x, x.new_ones(5, 9), backend="triton")
    with pytest.raises(ValueError, match=r"it takes float32, bfloat16 and float16, got x torch.float64"):
        short_conv(x.double(), weight, backend="triton")
    with pytest.raises(ValueError, match="batch size 2"):
        short_conv(x.expand(2, -1, -1), weight, cu_seqlens=torch.tensor([0, 6]), backend="triton")
    with pytest.raises(ValueError, match="expected integers"):
        short_conv(x, weight, cu_seqlens=torch.tensor([0.0, 6.0]), backend="triton")
    with pytest.raises(ValueError, match="cu_seqlens has no documents"):
        short_conv(x, weight, cu_seqlens=torch.tensor([0]), backend="triton")
    with pytest.raises(ValueError, match="cu_seqlens is on .*meta"):
        short_conv(x, weight, cu_seqlens=torch.zeros(2, dtype=torch.int32, device="meta"), backend="triton")


def test_the_operator_passes_the_library_checks() -> None:
    x, weight, state = inputs(5, 2, channels=3)
    borders = torch.tensor([0, 2, 5], device=DEVICE)
    torch.library.opcheck(torch.ops.perilune.short_conv.default, (x, weight, borders, state, True))


# On a GPU -------------------------------------------------------------------------------------------------------------


def gpu_inputs(dtype: torch.dtype = torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3000, 3 * 256 + 40, generator=generator)[..., :768].to("cuda", dtype)
    weight = torch.randn(768, 4, generator=generator).cuda()
    borders = torch.tensor([0, 1, 1, 700, 703, 2999, 3000], device="cuda")
    return x.requires_grad_(), weight.requires_grad_(), borders


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype) -> None:
    x, weight, borders = gpu_inputs(dtype)
    wide = [x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    exact, _ = short_conv(*wide, cu_seqlens=borders, backend="reference")
    y, _ = short_conv(x, weight, cu_seqlens=borders)
    dy = torch.randn_like(y)
    ours = [y, *torch.autograd.grad(y, [x, weight], dy)]
    right = [exact, *torch.autograd.grad(exact, wide, dy.double())]
    for mine, expected in zip(ours, right, strict=True):
        error = (mine.double() - expected).norm() / expected.norm()
        assert error < (torch.finfo(dtype).eps if mine.dtype == dtype else 1e-6)  # dweight is summed in float32


@pytest.mark.gpu
def test_the_same_bits_every_time_compiled_and_in_a_cuda_graph() -> None:
    x, weight, borders = gpu_inputs()
    dy = torch.randn_like(x)

    def step(x, weight, run=lambda x, weight: short_conv(x, weight, cu_seqlens=borders)[0]):
        y = run(x, weight)
        return (y, *torch.autograd.grad(y, [x, weight], dy))

    first = step(x, weight)
    # Leaves of its own: autograd ties a leaf to the stream that first used it, which is not the one that captures.
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, weight)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(*leaves)
    graph.replay()
    compiled = torch.compile(lambda x, weight: short_conv(x, weight, cu_seqlens=borders)[0], fullgraph=True)
    for other in (step(x, weight), captured, step(x, weight, compiled)):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_borders_are_never_read_by_the_host() -> None:
    x, weight, borders = gpu_inputs()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y, _ = short_conv(x, weight, cu_seqlens=borders)
        y.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
