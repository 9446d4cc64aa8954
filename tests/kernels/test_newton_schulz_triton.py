"""Newton-Schulz kernels for the GPU: symmetric products, normalisation and the three forms, in Triton's interpreter in
float32 (float16 where rounding is the subject), and on a GPU in half precision."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from perilune.kernels.newton_schulz import COEFFICIENTS, orthogonalize
from perilune.kernels.triton_support import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from perilune.kernels.newton_schulz import choice, fast, forms
from perilune.kernels.newton_schulz.fast import fast_orthogonalize, orthogonalize_operator
from perilune.kernels.newton_schulz.triton import SymmetricProducts, Tiling, normalized_stack, symmetric_product

SHAPES = [(1, 1, 1), (2, 3, 5), (3, 17, 33), (1, 130, 70), (2, 70, 96), (2, 128, 40)]
SMALL, LARGE = (Tiling(edge=edge, depth=32, warps=4, stages=2) for edge in (32, 64))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter runs where there is no GPU")
JORDAN = COEFFICIENTS["jordan"]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(DEVICE, dtype)


def with_tiles(monkeypatch: pytest.MonkeyPatch, tiling: Tiling = LARGE) -> None:
    """Small tiles, so that small matrices have several."""
    monkeypatch.setattr(choice, "tiling_for", lambda *shape: tiling)


def exact_iteration(x: Tensor, coefficients=JORDAN) -> Tensor:
    return orthogonalize(x.double(), coefficients=coefficients, dtype=torch.float64, backend="reference")


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@on_cpu
@pytest.mark.parametrize("group", [1, 2], ids=["single", "grouped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tiling", [SMALL, LARGE], ids=["small", "large"])
def test_a_symmetric_product_equals_the_full_one_and_its_own_transpose(tiling, shape, group):
    for tma in (False, True):
        tiles = replace(tiling, group=group, tma=tma)
        x = normal(*shape)
        gram = symmetric_product(x, x, tiling=tiles)
        polynomial = symmetric_product(gram, gram, tiling=tiles, alpha=2.0, c_BNN=gram, beta=-3.0, diagonal=1.5)
        assert torch.equal(gram, gram.mT) and torch.equal(polynomial, polynomial.mT)
        # Sums of `depth` float32 products, each rounded: a few times 2^-24 of the sum of their sizes.
        size = x.abs() @ x.abs().mT
        torch.testing.assert_close(gram / size, x @ x.mT / size, rtol=0, atol=16 * 2**-24)
        size = 2 * gram.abs() @ gram.abs() + 3 * gram.abs() + 1.5
        want = 2 * gram @ gram - 3 * gram + 1.5 * torch.eye(shape[1])
        torch.testing.assert_close(polynomial / size, want / size, rtol=0, atol=16 * 2**-24)
        # Cubic coefficient sets have no square.
        linear = symmetric_product(gram, gram, tiling=tiles, alpha=0.0, c_BNN=gram, beta=-3.0, diagonal=1.5)
        torch.testing.assert_close(linear, -3 * gram + 1.5 * torch.eye(shape[1]))


@on_cpu
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
def test_products_of_commuting_matrices_are_made_symmetric(tma):
    gram = normal(2, 70, 8)
    gram = gram @ gram.mT / 70
    other = torch.eye(70) + gram @ gram
    product = symmetric_product(gram, other, tiling=replace(SMALL, tma=tma))
    assert torch.equal(product, product.mT)
    torch.testing.assert_close(product, gram @ other, rtol=0, atol=1e-6)


@on_cpu
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
def test_matrices_of_a_stack_do_not_see_each_other(tma):
    # Tiles at the end of a matrix reach into the next one.
    x = normal(3, 20, 20)
    x[1] = torch.nan
    gram = symmetric_product(x, x, tiling=replace(LARGE, tma=tma))
    assert gram[1].isnan().all() and gram[[0, 2]].isfinite().all()


@on_cpu
def test_stacks_that_begin_anywhere_are_served(monkeypatch):
    with_tiles(monkeypatch)
    x = normalized_stack(normal(2, 20, 24), torch.float32)
    moved = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    assert torch.equal(forms.iterate(moved, JORDAN, "symmetric"), forms.iterate(x, JORDAN, "symmetric"))


@on_cpu
def test_wrong_operands_are_named():
    x = normal(2, 8, 8)
    with pytest.raises(ValueError, match=r"C \[b, n, n\], got \[\(2, 8, 8\), \(2, 8, 8\), \(2, 8, 4\)\]"):
        symmetric_product(x, x, tiling=LARGE, c_BNN=x[..., :4])
    with pytest.raises(ValueError, match="contiguous operands of one dtype"):
        symmetric_product(x, x.mT, tiling=LARGE)
    with pytest.raises(ValueError, match="contiguous operands of one dtype"):
        symmetric_product(x, x.double(), tiling=LARGE)
    with pytest.raises(ValueError, match="backend='triton' cannot orthogonalise: x is float64"):
        orthogonalize(x.double(), backend="triton")


@on_cpu
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 3, 5), (2, 5, 3), (1, 130, 70), (2, 70, 300), (3, 300, 64)], ids=str)
def test_normalising_any_scale_gives_norm_one(shape):
    scales = torch.tensor([1e30, 1e-30, 1.0])[: shape[0], None, None]
    x = normal(*shape)
    got = normalized_stack(x * scales, torch.float32)
    wide = x.mT if shape[1] > shape[2] else x
    want = wide / torch.linalg.vector_norm(wide.double(), dim=(-2, -1), keepdim=True).float()
    # The scale rounds x once, the norm sums up to 2e4 squares in pairs, the factor is rounded twice.
    torch.testing.assert_close(got, want, rtol=8 * 2**-24, atol=0)


@on_cpu
def test_tiles_of_very_different_size_keep_their_proportion():
    x = normal(1, 64, 384)
    x[..., 128:256] *= 2.0**-60
    x[..., 256:] = 0
    got, want = normalized_stack(x, torch.float32), x / x.norm()
    torch.testing.assert_close(got, want, rtol=8 * 2**-24, atol=0)


@on_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zero_stays_zero_and_a_broken_matrix_breaks_alone(dtype):
    x = torch.zeros(5, 70, 40)
    x[1, 2, 3] = float("inf")
    x[2, 2, 3] = float("nan")
    x[3, 69, 39] = 2.0**-149
    x[4, 0, 0] = torch.finfo(torch.float32).max
    out = orthogonalize(x, coefficients="polar_express_8", dtype=dtype, backend="triton")
    assert out[0].eq(0).all() and out[1].isnan().all() and out[2].isnan().all()
    for matrix, place in ((3, (69, 39)), (4, (0, 0))):
        expected = torch.zeros(70, 40)
        expected[place] = 1.0
        torch.testing.assert_close(out[matrix], expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@on_cpu
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 33), (1, 70, 130), (2, 70, 33), (1, 9, 1)], ids=str)
@pytest.mark.parametrize("form", forms.FORMS)
def test_every_form_is_the_same_iteration(form, shape, monkeypatch):
    with_tiles(monkeypatch)
    x = normal(*shape)
    before = x.clone()
    got = fast_orthogonalize(x, JORDAN, torch.float32, form)
    assert torch.equal(x, before) and got.shape == x.shape
    # Rounding to float32 is lifted like a small singular value, by at most the slope 485 (gram: of R, squared once more
    # between restarts).
    torch.testing.assert_close(got.double(), exact_iteration(x), rtol=0, atol=485 * 2**-20)


@on_cpu
@pytest.mark.parametrize("name", COEFFICIENTS)
def test_the_gram_form_serves_every_set(name, monkeypatch):
    with_tiles(monkeypatch, SMALL)
    x = normal(2, 24, 96)
    got = fast_orthogonalize(x, COEFFICIENTS[name], torch.float32, "gram")
    slope = math.prod(a for a, _, _ in COEFFICIENTS[name])
    assert relative(got, exact_iteration(x, name)) < slope * 2**-20


@on_cpu
def test_strided_input_and_leading_dimensions(monkeypatch):
    with_tiles(monkeypatch)
    x = normal(2, 3, 20, 64)[..., ::2]
    got = orthogonalize(x, dtype=torch.float32, backend="triton")
    torch.testing.assert_close(got, orthogonalize(x, dtype=torch.float32), rtol=0, atol=485 * 2**-20)
    rows = normal(3, 40, 30)[:, :20]
    got = orthogonalize(rows, dtype=torch.float32, backend="triton")
    torch.testing.assert_close(got, orthogonalize(rows, dtype=torch.float32), rtol=0, atol=485 * 2**-20)


def spectra(n: int) -> dict[str, Tensor]:
    """Singular values that are hard for the gram form: one dominates, or they spread over decades."""
    index = torch.arange(n, dtype=torch.float64)
    return {
        "one dominates": torch.where(index < 1, 1.0, 3e-3),
        "power law": 1 / (1 + index),
        "four decades": 10 ** (-4 * index / n),
    }


@on_cpu
@pytest.mark.parametrize("name", ["jordan", "quintic", "polar_express", "polar_express_8"])
@pytest.mark.parametrize("spectrum", spectra(8))
def test_restarts_keep_the_rounding_of_the_gram_form_in_bounds(spectrum, name, monkeypatch):
    with_tiles(monkeypatch)
    n, m = 64, 128
    left, _ = torch.linalg.qr(normal(n, n, dtype=torch.float64))
    right, _ = torch.linalg.qr(normal(m, n, seed=1, dtype=torch.float64))
    x = ((left * spectra(n)[spectrum]) @ right.mT)[None]
    want = exact_iteration(x, name)
    errors = {
        form: relative(fast_orthogonalize(x.float(), COEFFICIENTS[name], torch.float16, form), want)
        for form in ("plain", "gram")
    }
    # In float16 it must be nearer to the exact iteration than the plain form in bfloat16, whose eps is 8 times as large
    # (it is within 4 times of the plain form in float16). Without restarts it is 14 to 3e4 times off, or not finite.
    assert errors["gram"] < 8 * errors["plain"]


def test_restarts_come_before_the_error_has_grown():
    assert forms.restarts(JORDAN) == (3,)
    assert forms.restarts(COEFFICIENTS["quintic"]) == (2, 4)
    assert forms.restarts(COEFFICIENTS["polar_express"]) == (2, 4)
    assert forms.restarts(COEFFICIENTS["deepseek_v4"]) == (3, 5, 7, 9)
    assert forms.restarts(((1.5, -0.5, 0.0),) * 3) == ()


@on_cpu
@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("form", forms.FORMS)
def test_the_cost_of_a_form_is_what_it_multiplies(form, name, monkeypatch):
    with_tiles(monkeypatch)
    rows, columns = 4, 12
    counts = {"outer": 0, "inner": 0, "wide": 0, "square": 0}

    multiply = SymmetricProducts.__call__

    def count_symmetric(products, a, b, out, **options):
        counts["outer" if a.stack.shape[-1] == columns else "inner"] += 1
        multiply(products, a, b, out, **options)

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function in (torch.bmm, torch.baddbmm):
                left, right = args[-2:]
                counts["wide" if columns in (*left.shape, *right.shape) else "square"] += 1
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr(SymmetricProducts, "__call__", count_symmetric)
    with Counting():
        forms.iterate(normal(1, rows, columns) / 10, COEFFICIENTS[name], form)
    assert tuple(counts.values()) == forms.launches(COEFFICIENTS[name], form)


def test_multiplications_of_five_steps():
    # In units of n^3 at m = 4 n: plain 5 (2 * 4 + 1), symmetric half of 5 (3 * 4 + 1), gram with one restart two whole
    # and two half products with X, and (4 * 3 - 3 + 4 * 2 - 3) / 2 of [n, n] matrices.
    units = [forms.multiplications(10, 40, JORDAN, form) / 1000 for form in forms.FORMS]
    assert units == [45, 32.5, 2 * 4 + 2 * 2 + 7]


@on_cpu
def test_kernels_that_are_wrong_are_not_used(monkeypatch):
    cpu = torch.device("cpu")
    tilings, either = (SMALL, replace(SMALL, tma=True)), (False, True)
    kernels = [fast.Kernel(*each) for each in itertools.product(tilings, either, either)]
    monkeypatch.setattr(fast, "_TRIED", {})
    assert all(fast.is_right(cpu, torch.float32, kernel) for kernel in kernels)
    # As if the assembler had dropped one tile.
    monkeypatch.setattr(fast, "_TRIED", {})

    def wrong(*operands, **options):
        out = symmetric_product(*operands, **options)
        out[..., 32:64, :32] = 0
        return out

    monkeypatch.setattr(fast, "symmetric_product", wrong)
    monkeypatch.setattr(fast, "choose_form", lambda *shape: "gram")
    monkeypatch.setattr(fast, "tiling_for", lambda *shape: SMALL)
    x = normal(1, 140, 150) / 256
    with pytest.warns(UserWarning, match="products by Triton are wrong on cpu in torch.float32"):
        got = fast.iterate_normalized(x.clone(), JORDAN)
    assert torch.equal(got, forms.iterate(x.clone(), JORDAN, "plain"))
    assert torch.equal(fast.iterate_normalized(x.clone(), JORDAN), got)  # and no second warning


@on_cpu
@pytest.mark.parametrize("tma", [False, True], ids=["pointers", "tma"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("tiling", [choice.SMALL, choice.POINTERS], ids=["small", "large"])
def test_what_is_tried_is_what_is_compiled_for_a_stack(tiling, whole, tma, monkeypatch):
    """Steps and stores of whole tiles are other kernels than those of parts, and may be right where these are wrong."""
    tiling, compiled = replace(tiling, tma=tma), []

    def product(x, _, *, tiling, c_BNN=None, **scales):
        compiled.append(SymmetricProducts(*x.shape, tiling, c_BNN is not None)._launch._constants)
        return x @ x.mT

    monkeypatch.setattr(fast, "symmetric_product", product)
    monkeypatch.setattr(fast, "tiling_for", lambda *shape: tiling)
    shape = (2, 4 * tiling.edge, 8 * tiling.depth) if whole else (2, 4 * tiling.edge + 8, 8 * tiling.depth + 8)
    for kernel in fast._kernels.__wrapped__(*shape, "symmetric"):
        fast._error(torch.device("cpu"), torch.float32, kernel)
    wanted = [(shape, False), ((2, shape[1], shape[1]), True)]
    assert compiled == [SymmetricProducts(*each, tiling, has_c)._launch._constants for each, has_c in wanted]


@on_cpu
def test_kernels_that_do_not_fit_on_a_gpu_are_not_used(monkeypatch):
    """A GPU with 100 KiB of shared memory may be asked for a kernel that was measured on one with 228."""

    def too_large(*operands, **options):
        raise OutOfResources(131072, 101376, "shared memory")

    monkeypatch.setattr(fast, "_TRIED", {})
    monkeypatch.setattr(fast, "symmetric_product", too_large)
    monkeypatch.setattr(fast, "choose_form", lambda *shape: "symmetric")
    x = normal(1, 9, 16) / 16
    with pytest.warns(UserWarning, match="do not fit on cpu in torch.float32 .*shared memory"):
        got = fast.iterate_normalized(x.clone(), JORDAN)
    assert torch.equal(got, forms.iterate(x.clone(), JORDAN, "plain"))


def test_the_choice_follows_the_shape():
    assert choice.choose_form(32, 2048, 2048, JORDAN) == "symmetric"
    assert choice.choose_form(64, 1408, 2048, JORDAN) == "symmetric"
    assert choice.choose_form(48, 768, 768, JORDAN) == "symmetric"
    assert choice.choose_form(24, 768, 3072, JORDAN) == "gram"
    assert choice.choose_form(16, 2048, 8192, JORDAN) == "gram"
    assert choice.choose_form(1024, 128, 4096, JORDAN) == "gram"
    # Too small to be worth more launches, or rows that do not begin at multiples of 16 bytes.
    assert choice.choose_form(1, 256, 256, JORDAN) == choice.choose_form(1, 1024, 1024, JORDAN) == "plain"
    assert choice.choose_form(8, 2047, 8192, JORDAN) == choice.choose_form(8, 2048, 8191, JORDAN) == "plain"
    assert choice.choose_form(8, 2048, 8192, ()) == "plain"


# Microseconds on an H200: the library's product, and a symmetric one by the copy engine without and with a sum.
MEASURED = {
    (48, 768, 768): (67, 58, 69),
    (24, 768, 3072): (116, 83, None),
    (24, 768, 768): (37, 31, 36),
    (32, 2048, 2048): (709, 460, 496),
    (16, 2048, 8192): (1417, 982, None),
    (16, 2048, 2048): (407, 263, 286),
    (64, 1408, 2048): (654, 462, None),
    (1, 4096, 4096): (202, 110, 114),
    (1024, 128, 128): (22, 35, 47),
    (256, 256, 256): (23, 30, 38),
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_estimates_are_near_what_was_measured(shape):
    """Near enough to choose by: forms that are compared differ by a third, or the margin decides for the library."""
    batch, rows, depth = shape
    library, symmetric, with_sum = MEASURED[shape]
    estimates = [choice._symmetric(*shape, choice.COPY_ENGINE, has_c) for has_c in (False, True)]
    assert choice._library(batch, rows, depth, rows) == pytest.approx(library, rel=0.2)
    assert estimates[0] == pytest.approx(symmetric, rel=0.2)
    assert with_sum is None or estimates[1] == pytest.approx(with_sum, rel=0.2)
    assert (estimates[0] < choice._library(batch, rows, depth, rows)) == (symmetric < library)


@on_cpu
def test_the_operator_is_well_formed():
    for shape in ((2, 6, 9), (2, 9, 6)):
        flat = [value for step in JORDAN[:2] for value in step]
        torch.library.opcheck(orthogonalize_operator, (normal(*shape), flat, torch.float32, "symmetric"))


@on_cpu
@pytest.mark.parametrize("shape", [(2, 6, 9), (2, 9, 6)], ids=str)
def test_fake_tensors_have_the_shape_and_dtype_of_real_ones(shape):
    with FakeTensorMode():
        got = orthogonalize(torch.empty(shape), dtype=torch.float16, backend="triton")
    assert got.shape == shape and got.dtype == torch.float32


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tiling", "shape", "dtype"),
    [
        (choice.POINTERS, (3, 256, 256), torch.bfloat16),
        (choice.POINTERS, (2, 200, 328), torch.float16),
        (choice.COPY_ENGINE, (3, 384, 512), torch.float16),  # whole tiles, stored by the copy engine
        (choice.COPY_ENGINE, (3, 384, 512), torch.bfloat16),
        (choice.COPY_ENGINE, (2, 200, 328), torch.float16),
        (choice.SMALL, (4, 33, 65), torch.float16),
    ],
    ids=str,
)
def test_half_precision_products_are_rounded_once_and_symmetric_bit_by_bit(tiling, shape, dtype):
    _, rows, columns = shape
    x = normal(*shape, dtype=dtype) / columns**0.5
    for _ in range(2):
        gram = symmetric_product(x, x, tiling=tiling)
        polynomial = symmetric_product(gram, gram, tiling=tiling, alpha=2.0, c_BNN=gram, beta=-3.0, diagonal=1.5)
        assert torch.equal(gram, gram.mT) and torch.equal(polynomial, polynomial.mT)
        wide = gram.double()
        # One rounding of the result to half precision, on top of float32 sums.
        eps = torch.finfo(dtype).eps
        assert relative(gram, x.double() @ x.double().mT) < eps / 2
        want = 2 * wide @ wide - 3 * wide + 1.5 * torch.eye(rows, device="cuda", dtype=torch.float64)
        assert relative(polynomial, want) < eps / 2
        again = symmetric_product(x, x, tiling=tiling)
        assert torch.equal(gram, again)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((2, 640, 160), dtype) for dtype in (torch.float16, torch.bfloat16)),
        *((shape, torch.float16) for shape in ((4, 512, 512), (24, 512, 2048), (3, 100, 100), (1, 5, 7))),
    ],
    ids=str,
)
def test_every_form_points_along_the_polar_factor(shape, dtype):
    x = normal(*shape)
    want = exact_iteration(x)
    u, _, vh = torch.linalg.svd(x[0].double(), full_matrices=False)
    polar = u @ vh
    plain = relative(orthogonalize(x, dtype=dtype, backend="dense"), want)
    for form in (None, *forms.FORMS):
        got = fast_orthogonalize(x, JORDAN, dtype, form)
        assert torch.equal(got, fast_orthogonalize(x, JORDAN, dtype, form))
        cosines = [float((each * polar).sum() / (each.norm() * polar.norm())) for each in (got[0].double(), want[0])]
        assert cosines[0] > cosines[1] - torch.finfo(dtype).eps / 2
        # Of the size of what the arithmetic of torch.optim.Muon loses in this dtype; the gram form rounds about twice
        # as many matrices on the way.
        assert relative(got, want) < 3 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [-30, -10, 10, 30])
def test_any_scale_gives_the_same_direction_on_a_gpu(exponent):
    x = normal(2, 256, 512)
    one = orthogonalize(x, dtype=torch.float16)
    assert torch.equal(orthogonalize(x * 8.0**exponent, dtype=torch.float16), one)
    # Other factors round the input elsewhere. Each result is then as far from the exact one as float16 leaves it.
    two = orthogonalize(x * 10.0**exponent, dtype=torch.float16)
    assert relative(two, one) < 2 * relative(one, exact_iteration(x))


@pytest.mark.gpu
@pytest.mark.parametrize(("form", "shape"), [("plain", (2, 256, 512)), ("gram", (24, 512, 2048))])
def test_it_compiles_and_replays_from_a_graph(form, shape):
    assert choice.choose_form(*shape, JORDAN) == form
    x = normal(*shape)
    run = lambda x: orthogonalize(x, dtype=torch.float16)  # noqa: E731
    eager = run(x)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(x)
    graph.replay()
    assert torch.equal(out, eager)
