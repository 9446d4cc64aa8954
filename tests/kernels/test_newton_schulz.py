"""Newton-Schulz: parity with torch.optim.Muon, scale invariance, convergence, and the published coefficient tables."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from perilune.kernels.newton_schulz import COEFFICIENTS, orthogonalize

JORDAN = (3.4445, -4.7750, 2.0315)
# Converges quadratically to 1 from anywhere in (0, 1.5); lifts small singular values by 1.875 a step.
CONVERGING = ((15 / 8, -10 / 8, 3 / 8),)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def polar_factor(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh


def cosine(x: Tensor, y: Tensor) -> float:
    return (x.double() * y.double()).sum().item() / (x.double().norm() * y.double().norm()).item()


@pytest.mark.parametrize("shape", [(64, 64), (48, 200), (200, 48), (1, 9), (9, 1), (5, 7), (128, 128)])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 100.0])
def test_bf16_jordan_equals_torch_muon(shape: tuple[int, int], scale: float) -> None:
    stack = normal(3, *shape) * scale
    theirs = torch.stack([_zeropower_via_newtonschulz(x.clone(), JORDAN, 5, 1e-7).float() for x in stack])
    # The same operations on the same bits, so equal on any one machine unless a batched matmul sums in another order.
    torch.testing.assert_close(orthogonalize(stack), theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(orthogonalize(stack[0]), theirs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power", [-100, -30, 30, 100])
def test_power_of_two_factors_change_no_bit(dtype: torch.dtype, power: int) -> None:
    x = normal(2, 24, 40)
    assert torch.equal(orthogonalize(x * 2.0**power, dtype=dtype), orthogonalize(x, dtype=dtype))


@given(exponent=st.floats(-30, 30), seed=st.integers(0, 9))
def test_any_factor_gives_the_same_direction(exponent: float, seed: int) -> None:
    x = normal(12, 20, seed=seed)
    scaled = x * 10.0**exponent
    # float32: the factor itself rounds x by 2^-24, amplified by the slope at zero of at most 485.
    torch.testing.assert_close(
        orthogonalize(scaled, dtype=torch.float32), orthogonalize(x, dtype=torch.float32), rtol=0, atol=485 * 2**-22
    )
    # bfloat16: x rounds by up to 2^-9 per entry.
    assert cosine(orthogonalize(scaled), orthogonalize(x)) > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("largest", [torch.finfo(torch.float32).max, 2.0**-126, 2.0**-140])
def test_the_ends_of_the_number_range_work(dtype: torch.dtype, largest: float) -> None:
    signs = normal(10, 16).sign()
    # Entries of one magnitude lose nothing even as subnormal numbers.
    assert torch.equal(orthogonalize(signs * largest, dtype=dtype), orthogonalize(signs * (largest / 2), dtype=dtype))
    assert cosine(orthogonalize(signs * largest, dtype=dtype), polar_factor(signs)) > 0.97


def test_smallest_subnormal_is_not_zero() -> None:
    x = torch.zeros(3, 4)
    x[1, 2] = 2.0**-149
    out = orthogonalize(x, coefficients="polar_express_8", dtype=torch.float32)
    expected = torch.zeros(3, 4)
    expected[1, 2] = 1.0
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_zero_stays_zero_and_empty_stays_empty(dtype: torch.dtype, backend: str) -> None:
    assert orthogonalize(torch.zeros(2, 3, 5), dtype=dtype, backend=backend).eq(0).all()
    for shape in ((0, 3, 5), (2, 0, 5), (2, 3, 0)):
        assert orthogonalize(torch.zeros(shape), dtype=dtype, backend=backend).shape == shape


def test_the_input_is_never_written() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for shape in ((2, 4, 6), (2, 6, 4)):
            x = normal(*shape, dtype=dtype)
            before = x.clone()
            for iterate_in in (torch.bfloat16, torch.float32, torch.float64):
                out = orthogonalize(x, dtype=iterate_in)
                assert torch.equal(x, before) and out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_matrix_poisons_only_itself(poison: float) -> None:
    clean = normal(3, 8, 6)
    dirty = clean.clone()
    dirty[1, 2, 3] = poison
    out = orthogonalize(dirty)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], orthogonalize(clean)[[0, 2]])


@pytest.mark.parametrize("shape", [(3, 32, 96), (3, 64, 64)], ids=str)
@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_set_points_along_the_polar_factor(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    # In exact arithmetic U S V^T becomes U p(S) V^T, whose cosine with U V^T follows from the singular values alone.
    # Square Gaussian matrices are the hard case: their smallest values lie far below the lifted range.
    values = torch.linalg.svdvals(x.double())
    lifted = values / values.norm(dim=-1, keepdim=True)
    for a, b, c in COEFFICIENTS[name]:
        lifted = a * lifted + b * lifted**3 + c * lifted**5
    exact = lifted.sum(dim=-1) / (lifted.norm(dim=-1) * lifted.shape[-1] ** 0.5)
    if shape[1] != shape[2]:
        # All values start above 3e-3, so they end in the published range [low, high], and no cosine of such values with
        # ones is below 2 sqrt(low high) / (low + high) (Kantorovich); the widest range is that of jordan, 0.68 to 1.20.
        assert (values / values.norm(dim=-1, keepdim=True)).min() > 3e-3
        assert exact.min() >= 2 * math.sqrt(0.68 * 1.20) / (0.68 + 1.20)
    # Rounding: half an epsilon of bfloat16 (as large as what torch.optim.Muon loses); float32 results of 64 sums.
    rounding = max(64 * 2**-24, torch.finfo(dtype).eps / 2)
    ours = orthogonalize(x, coefficients=name, dtype=dtype)
    for mine, matrix, expected in zip(ours, x, exact.tolist(), strict=True):
        assert abs(cosine(mine, polar_factor(matrix)) - expected) <= rounding


@pytest.mark.parametrize("backend", ["dense", "reference"])
@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5)])
def test_many_steps_in_float64_converge_to_the_polar_factor(backend: str, shape: tuple[int, int]) -> None:
    x = normal(2, *shape, dtype=torch.float64)
    # Condition number c costs about log_1.875(c) steps of lifting, here below 1e4, plus five of quadratic convergence.
    out = orthogonalize(x, coefficients=CONVERGING * 24, dtype=torch.float64, backend=backend)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, torch.stack([polar_factor(m) for m in x]), rtol=0, atol=1e-11)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(1, 12)),
    name=st.sampled_from(sorted(COEFFICIENTS)),
    seed=st.integers(0, 99),
)
def test_a_stack_equals_the_loop_over_its_matrices(shape: tuple[int, int, int], name: str, seed: int) -> None:
    scales = torch.logspace(-20, 20, shape[0], dtype=torch.float64)
    x = normal(*shape, dtype=torch.float64, seed=seed) * scales[:, None, None]
    options = {"coefficients": name, "dtype": torch.float64}
    stack = orthogonalize(x, **options)
    # Rounding (1e-16) is lifted like a small singular value, by at most the slope of deepseek_v4, 8e4.
    torch.testing.assert_close(stack, torch.stack([orthogonalize(m, **options) for m in x]), rtol=0, atol=1e-10)
    torch.testing.assert_close(stack, orthogonalize(x, backend="reference", **options), rtol=0, atol=1e-10)
    torch.testing.assert_close(stack, orthogonalize(x.mT, **options).mT, rtol=0, atol=1e-10)


def test_leading_dimensions_are_kept() -> None:
    x = normal(2, 3, 4, 5)
    torch.testing.assert_close(orthogonalize(x).view(6, 4, 5), orthogonalize(x.view(6, 4, 5)), rtol=0, atol=1e-6)
    assert orthogonalize(x, dtype=torch.float64).dtype == torch.float32
    assert orthogonalize(x.double()).dtype == torch.float32


@pytest.mark.parametrize(
    "name, slope, low, high",
    [
        ("jordan", 485, 0.68, 1.20),
        ("quintic", 493, 0.98, 1.15),
        ("polar_express", 990, 0.86, 1.14),
        ("polar_express_8", 6363, 1.00, 1.00),
        ("deepseek_v4", 79263, 1.00, 1.00),
    ],
)
def test_coefficient_sets_have_their_published_slope_and_range(
    name: str, slope: float, low: float, high: float
) -> None:
    steps = COEFFICIENTS[name]
    assert math.prod(a for a, _, _ in steps) == pytest.approx(slope, abs=0.6)
    x = np.geomspace(3e-3, 1, 20001)
    for a, b, c in steps:
        x = a * x + b * x**3 + c * x**5
    assert (round(x.min(), 2), round(x.max(), 2)) == (low, high)
    assert set(COEFFICIENTS) == {"jordan", "quintic", "polar_express", "polar_express_8", "deepseek_v4"}


@pytest.mark.parametrize("name", COEFFICIENTS)
def test_a_norm_that_rounds_above_one_does_no_harm(name: str) -> None:
    # The bfloat16 norm of a rank-one matrix may leave a singular value of 1 + 2^-8.
    x = np.linspace(1, 1 + 2**-7, 101)
    for a, b, c in COEFFICIENTS[name]:
        x = a * x + b * x**3 + c * x**5
    assert x.min() > 0.65 and x.max() < 1.21


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rank_one_matrices_keep_a_top_singular_value_near_one(name: str, dtype: torch.dtype) -> None:
    x = normal(20, 12, 1) * normal(20, 1, 30, seed=1)
    top = torch.linalg.matrix_norm(orthogonalize(x, coefficients=name, dtype=dtype), ord=2)
    # The published ranges end at 0.68 and 1.20; bfloat16 adds a few times 2^-8.
    assert top.min() > 0.65 and top.max() < 1.25


def test_polar_express_8_follows_from_the_minimax_construction() -> None:
    """Greedy best odd quintics on a shrinking interval (arXiv 2505.16932), with its cushion and a safety of 1.01."""
    cushion, safety = 0.02407327424182761, 1.01

    def best_quintic(low: float, high: float) -> np.ndarray:
        """Largest distance to 1 on [low, high] smallest: the error has equal size and changing sign at four points."""
        inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
        for _ in range(50):
            points = np.array([low, *inner, high])
            system = np.stack([points, points**3, points**5, np.array([1, -1, 1, -1])], axis=1)
            a, b, c, _ = np.linalg.solve(system, np.ones(4))
            inner = np.sqrt((-3 * b + np.array([-1, 1]) * np.sqrt(9 * b * b - 20 * a * c)) / (10 * c))
        return np.array([a, b, c])

    low, high = 1e-3, 1.0
    for step in COEFFICIENTS["polar_express_8"][:6]:
        quintic = best_quintic(max(low, cushion * high), high)

        def value(x: float, quintic: np.ndarray = quintic) -> float:
            return float(quintic @ [x, x**3, x**5])

        if cushion * high > low:
            quintic = quintic * 2 / (value(low) + value(high))
        low = float(quintic @ [low, low**3, low**5])
        high = 2 - low
        np.testing.assert_allclose(step, quintic / [safety, safety**3, safety**5], rtol=1e-9)


def test_a_machine_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.kernels.newton_schulz.HAS_TRITON", False)
    assert orthogonalize(torch.eye(3)).shape == (3, 3)
    with pytest.raises(ValueError, match="Triton is not installed"):
        orthogonalize(torch.eye(3), backend="triton")


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'jordan'"):
        orthogonalize(torch.zeros(2, 2), coefficients="jordn")
    with pytest.raises(ValueError, match="n, m"):
        orthogonalize(torch.zeros(3))
    with pytest.raises(ValueError, match="floating-point"):
        orthogonalize(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="int32"):
        orthogonalize(torch.zeros(3, 3), dtype=torch.int32)
    with pytest.raises(ValueError, match="'fast'"):
        orthogonalize(torch.zeros(3, 3), backend="fast")
