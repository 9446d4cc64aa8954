"""Attention Residuals: the hand-written paths against the stacked definition, and what the definition promises."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perilune.kernels.attnres import merge, mix, phase1

# Sums of at most a few hundred float64 products of numbers around 1.
FLOAT64_RTOL = 1e-12
EPS = 1e-6


def draw(
    num_sources: int, leading: tuple[int, ...], width: int, *, queries: int = 1, dtype=torch.float64, seed: int = 0
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Sources, queries [S, d] and gains [S, d], all with gradient."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    sources = [normal(*leading, width).to(dtype).requires_grad_() for _ in range(num_sources)]
    parameter_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    query, gain = normal(queries, width), 1 + 0.3 * normal(queries, width)
    return sources, query.to(parameter_dtype).requires_grad_(), gain.to(parameter_dtype).requires_grad_()


def gradients(outputs: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) for x in outputs]
    return list(torch.autograd.grad(outputs, inputs, weights))


def assert_same(ours: list[Tensor], expected: list[Tensor], rtol: float = FLOAT64_RTOL) -> None:
    for mine, right in zip(ours, expected, strict=True):
        assert mine.shape == right.shape and mine.dtype == right.dtype
        assert (mine - right).norm() <= rtol * max(1.0, right.norm())


@given(
    num_sources=st.integers(1, 6),
    leading=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    width=st.integers(1, 9),
    num_queries=st.integers(1, 4),
    with_gain=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dense_equals_reference_in_outputs_and_gradients(
    num_sources: int, leading: tuple[int, ...], width: int, num_queries: int, with_gain: bool, seed: int
) -> None:
    sources, queries, gain = draw(num_sources, leading, width, queries=num_queries, seed=seed)
    wanted = [*sources, queries, *([gain] if with_gain else [])]
    results = []
    for backend in ("dense", "reference"):
        mixes, lse = phase1(sources, queries, gain=gain if with_gain else None, eps=EPS, backend=backend)
        h = mix(sources, queries[0], gain=gain[0] if with_gain else None, eps=EPS, backend=backend)
        merged = merge(
            mixes[0], lse[0], sources[0] * 2, queries[0], gain=gain[0] if with_gain else None, eps=EPS, backend=backend
        )
        outputs = [mixes, lse, h, merged]
        results.append(outputs + gradients(outputs, wanted))
    assert_same(*results)


def test_gradcheck_of_all_forms() -> None:
    sources, queries, gain = draw(3, (2, 2), 4, queries=2)
    assert torch.autograd.gradcheck(
        lambda query, gain, *sources: mix(sources, query[0], gain=gain[0], eps=EPS), (queries, gain, *sources)
    )
    assert torch.autograd.gradcheck(
        lambda queries, gain, *sources: phase1(sources, queries, gain=gain, eps=EPS), (queries, gain, *sources)
    )
    lse = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda o, lse, running, query, gain: merge(o, lse, running, query[0], gain=gain[0], eps=EPS),
        (sources[0], lse, sources[1], queries, gain),
    )


@pytest.mark.parametrize("num_finished", [1, 2, 5])
def test_two_phases_equal_one_pass(num_finished: int) -> None:
    sources, queries, gain = draw(num_finished + 1, (3, 5), 8, queries=3)
    wanted = [*sources, queries, gain]
    one_pass = [mix(sources, queries[s], gain=gain[s], eps=EPS) for s in range(3)]
    mixes, lse = phase1(sources[:-1], queries, gain=gain, eps=EPS)
    two_phase = [merge(mixes[s], lse[s], sources[-1], queries[s], gain=gain[s], eps=EPS) for s in range(3)]
    assert_same(two_phase + gradients(two_phase, wanted), one_pass + gradients(one_pass, wanted))


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_zero_query_gives_the_mean_and_its_gradient(backend: str) -> None:
    sources, _, gain = draw(4, (6,), 8)
    query = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    h = mix(sources, query, gain=gain[0], eps=EPS, backend=backend)
    mean = torch.stack(sources).mean(dim=0)
    assert_same([h, *gradients([h], sources)], [mean, *gradients([mean], sources)])
    # Zero-initialised queries must still learn: their gradient is not zero.
    assert gradients([mix(sources, query, gain=gain[0], eps=EPS, backend=backend)], [query])[0].norm() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_single_source_comes_back_exactly_and_query_and_gain_get_exact_zeros(dtype: torch.dtype) -> None:
    (source,), query, gain = draw(1, (40,), 16, dtype=dtype)
    h = mix([source], query[0], gain=gain[0], eps=EPS)
    assert torch.equal(h, source)
    d_source, d_query, d_gain = torch.autograd.grad(h.double().square().sum(), [source, query, gain])
    assert torch.equal(d_source, 2 * source)
    assert d_query.eq(0).all() and d_gain.eq(0).all()


@pytest.mark.parametrize("num_sources", [2, 9])
def test_bf16_sources_have_a_float32_softmax(num_sources: int) -> None:
    sources, queries, gain = draw(num_sources, (64,), 32, queries=2, dtype=torch.bfloat16)
    wanted = [*sources, queries, gain]
    exact = [x.detach().double().requires_grad_() for x in wanted]
    mixes, lse = phase1(sources, queries, gain=gain, eps=EPS)
    right = phase1(exact[:num_sources], exact[-2], gain=exact[-1], eps=EPS, backend="reference")
    assert mixes.dtype == torch.bfloat16 and lse.dtype == torch.float32
    # float32 inside: 32 products of numbers around 1.
    torch.testing.assert_close(lse.double(), right[1], rtol=1e-5, atol=1e-5)
    # One rounding to bfloat16 at the end, 2^-9 per entry; gradients of bf16 sources likewise.
    for mine, expected in zip([mixes, *gradients([mixes], wanted)], [right[0], *gradients([right[0]], exact)]):
        assert (mine.double() - expected).norm() <= 2**-8 * expected.norm()


@pytest.mark.parametrize("backend", ["dense", "reference"])
def test_large_scores_and_zero_sources_stay_finite(backend: str) -> None:
    sources, queries, _ = draw(3, (5,), 8, dtype=torch.float32)
    with torch.no_grad():
        sources[1].zero_()
        queries.mul_(1e4)
    h = mix(sources, queries[0], eps=EPS, backend=backend)
    assert all(x.isfinite().all() for x in (h, *gradients([h], [*sources, queries])))


def test_sources_without_gradient_get_none_and_the_others_keep_theirs() -> None:
    sources, queries, _ = draw(3, (5,), 8)
    frozen = [sources[0], sources[1].detach(), sources[2]]
    ours = gradients([mix(frozen, queries[0], eps=EPS)], [sources[0], sources[2]])
    assert_same(ours, gradients([mix(sources, queries[0], eps=EPS)], [sources[0], sources[2]]))


def test_noncontiguous_sources_equal_contiguous_ones() -> None:
    sources, queries, _ = draw(3, (4, 5), 8)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in sources]
    assert_same([mix(strided, queries[0], eps=EPS)], [mix(sources, queries[0], eps=EPS)])


@pytest.mark.parametrize(
    "sources, backend, message",
    [
        ([], None, "at least one"),
        ([torch.zeros(2, 8), torch.zeros(3, 8)], None, r"sources\[1\]"),
        ([torch.zeros(2, 7)], None, "width"),
        ([torch.zeros(2, 8), torch.zeros(2, 8, dtype=torch.bfloat16)], None, "bfloat16"),
        ([torch.zeros(2, 8)], "fast", "'fast'"),
    ],
)
def test_wrong_input_is_named(sources: list[Tensor], backend: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mix(sources, torch.zeros(8), eps=EPS, backend=backend)


def test_queries_gains_and_sums_of_the_wrong_shape_are_named() -> None:
    source, query = torch.zeros(4, 8), torch.zeros(8)
    with pytest.raises(ValueError, match=r"queries has shape \(8,\), expected \[S, d\]"):
        phase1([source], query, eps=EPS)
    with pytest.raises(ValueError, match=r"query has shape \(1, 8\), expected \[d\]"):
        mix([source], query[None], eps=EPS)
    with pytest.raises(ValueError, match=r"gain has shape \(8,\), expected \[S, d\] = \(3, 8\)"):
        phase1([source], torch.zeros(3, 8), gain=query, eps=EPS)
    with pytest.raises(ValueError, match=r"gain has shape \(1,\), expected \[d\] = \(8,\)"):
        mix([source], query, gain=torch.ones(1), eps=EPS)
    with pytest.raises(ValueError, match=r"lse has shape \(1, 4\), expected .* \(4,\)"):
        merge(source, torch.zeros(1, 4), source, query, eps=EPS)
