"""The generator against published numbers and chi-square, the draw against a slow definition over fractions."""

import math
from collections import Counter
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from perilune.model import SamplingConfig, sampling
from perilune.model.sampling import (
    FINE,
    NOT_A_NUMBER,
    NOTHING_ALLOWED,
    Settings,
    draw,
    scrambled,
    splitmix64,
    uniform,
)
from perilune.model.sampling import (
    uniforms as many_uniforms,
)

Row = tuple[float, int, float, float, float]  # temperature, top_k, top_p, min_p, uniform


def settings_of(rows: list[Row]) -> Settings:
    temperature, top_k, top_p, min_p, uniforms = zip(*rows, strict=True) if rows else ((),) * 5
    return Settings(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniforms)


def one(logits: list[float] | Tensor, row: Row) -> tuple[int, int]:
    ids, problems = draw(torch.as_tensor(logits, dtype=torch.float64)[None], settings_of([row]))
    return int(ids[0]), int(problems[0])


def kept(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> dict[int, Fraction]:
    """Probabilities of what the cuts leave, in the order and with the ties the module states."""
    tensor = torch.tensor(logits, dtype=torch.float64)
    weights = [Fraction(float(each)) for each in ((tensor - tensor.max()) / temperature).exp()]
    ranked = sorted(weights, reverse=True)[: top_k or None]
    last, mass = ranked[0], Fraction(0)
    for weight in ranked:
        if mass >= Fraction(top_p) * sum(ranked):
            break
        last, mass = weight, mass + weight
    last = max(last, Fraction(min_p))
    left = {token: weight for token, weight in enumerate(weights) if weight >= last}
    return {token: weight / sum(left.values()) for token, weight in left.items()}


def inverse(probabilities: dict[int, Fraction], u: float) -> set[int]:
    """The token at u; two of them where u is too close to a border to tell."""
    found, before = set(), Fraction(0)
    for token, probability in sorted(probabilities.items()):
        if before - Fraction(1, 1 << 40) <= Fraction(u) < before + probability + Fraction(1, 1 << 40):
            found.add(token)
        before += probability
    return found


# --- the generator ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**40)), min_size=1, max_size=20))
def test_many_numbers_at_once_are_those_of_one_at_a_time(pairs: list[tuple[int, int]]) -> None:
    seeds, indices = zip(*pairs, strict=True)
    found = many_uniforms(scrambled(seeds), np.array(indices, np.uint64))
    assert found.tolist() == [uniform(seed, index) for seed, index in pairs]


def test_splitmix64_gives_its_published_outputs() -> None:
    assert [splitmix64(1234567, index) for index in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [splitmix64(0, index) for index in range(3)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_uniform_numbers_are_pinned() -> None:
    """Seeded answers of earlier versions must not change."""
    found = [uniform(seed, index) for seed, index in ((0, 0), (0, 1), (1, 0), (2**63 - 1, 10**6))]
    assert found == [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.39854775898749717]


@pytest.mark.parametrize("along", ["index", "seed"])
def test_uniform_numbers_are_spread_evenly_and_neighbours_are_independent(along: str) -> None:
    """Chi-square over 64 cells of one number, and of 8 x 8 cells of neighbours: within 5 deviations of 63 +- 11.2."""
    size = 1 << 14
    numbers = np.array([uniform(7, n) if along == "index" else uniform(n, 7) for n in range(size)])
    assert numbers.min() >= 0 and numbers.max() < 1
    for cells in (numbers * 64, (numbers[:-1] * 8).astype(int) * 8 + numbers[1:] * 8):
        counts = np.bincount(cells.astype(int), minlength=64)
        expected = len(cells) / 64
        assert abs(((counts - expected) ** 2 / expected).sum() - 63) < 5 * math.sqrt(2 * 63)


# --- the draw ---------------------------------------------------------------------------------------------------------

levels = st.integers(-12, 4).map(lambda n: n / 2) | st.floats(-30, 30)
logit_rows = st.lists(levels | st.just(-math.inf), min_size=1, max_size=12).filter(lambda row: max(row) > -math.inf)
temperatures = st.sampled_from([0.0, 0.5, 1.0, 2.0]) | st.floats(0.01, 5)
uniforms = st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.25, 0.5, 0.75, 1 - 2**-53])
row_settings = st.tuples(
    temperatures, st.integers(0, 14), st.floats(0.01, 1.0) | st.just(1.0), st.floats(0, 1) | st.just(0.0), uniforms
)


@given(logits=logit_rows, row=row_settings)
def test_a_draw_is_the_inverse_of_the_running_sum_of_what_the_cuts_leave(logits: list[float], row: Row) -> None:
    *cuts, u = row
    token, problem = one(logits, row)
    assert problem == FINE
    if row[0] == 0:
        assert token == logits.index(max(logits))
        return
    # A weight or a mass on the border of a cut may be rounded to either side: both are right.
    near = [Fraction(1), 1 - Fraction(1, 1 << 40), 1 + Fraction(1, 1 << 40)]
    temperature, top_k, top_p, min_p = cuts
    allowed = {
        token
        for p in near
        for m in near
        for token in inverse(kept(logits, temperature, top_k, float(top_p * p), float(min_p * m)), u)  # pyrefly: ignore
    }
    assert token in allowed


@given(data=st.data(), tile=st.sampled_from([1, 7, 40, 1 << 24]), short=st.sampled_from([1, 3, 1024]))
def test_a_row_gives_the_same_token_in_any_batch(data: st.DataObject, tile: int, short: int) -> None:
    """Whatever the other rows are, however the batch is cut into tiles and whichever way top-k is found."""
    vocab_size = data.draw(st.integers(1, 12))
    values = levels | st.sampled_from([-math.inf, math.inf, math.nan])
    rows = data.draw(st.lists(st.lists(values, min_size=vocab_size, max_size=vocab_size), min_size=1, max_size=6))
    settings = data.draw(st.lists(row_settings, min_size=len(rows), max_size=len(rows)))
    with patch.object(sampling, "TILE_ELEMENTS", tile), patch.object(sampling, "MAX_SHORT", short):
        ids, problems = draw(torch.tensor(rows, dtype=torch.float64), settings_of(settings))
    assert list(zip(ids.tolist(), problems.tolist())) == [one(row, each) for row, each in zip(rows, settings)]


def test_large_rows_give_the_same_tokens_in_any_batch() -> None:
    """Long enough for every vectorised and threaded path of the device's kernels."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 20_011, generator=generator, dtype=torch.float64) * 3
    choices: list[Row] = [
        (1.0, 0, 1.0, 0.0, 0),
        (0.7, 50, 1.0, 0.0, 0),
        (1.3, 0, 0.9, 0.0, 0),
        (1.0, 2000, 0.8, 0.01, 0),
    ]
    rows = [(*choices[n % 4][:4], uniform(n, 3)) for n in range(12)]
    together, _ = draw(logits, settings_of(rows))
    assert together.tolist() == [one(logits[n], rows[n])[0] for n in range(12)]
    assert len(set(together.tolist())) > 4


def test_draws_follow_temperature_top_k_top_p_and_min_p() -> None:
    """A thousand draws from known probabilities; three standard deviations of a binomial are below 0.05."""
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()

    def frequencies(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
        rows = [(temperature, top_k, top_p, min_p, uniform(0, index)) for index in range(1000)]
        counts = Counter(draw(logits.expand(1000, 4), settings_of(rows))[0].tolist())
        return [counts[token] / 1000 for token in range(4)]

    assert frequencies() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.05)
    assert frequencies(top_k=2) == pytest.approx([0.625, 0.375, 0, 0], abs=0.05)
    assert frequencies(top_p=0.81) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.05)
    assert frequencies(top_p=0.79) == pytest.approx([0.625, 0.375, 0, 0], abs=0.05)
    assert frequencies(min_p=0.29) == pytest.approx([0.526, 0.316, 0.158, 0], abs=0.05)
    assert frequencies(min_p=0.31) == pytest.approx([0.625, 0.375, 0, 0], abs=0.05)
    assert frequencies(top_k=3, top_p=0.5) == pytest.approx([1.0, 0, 0, 0], abs=0.05)  # 0.526 of what top-k left
    assert frequencies(temperature=0.5) == pytest.approx([0.685, 0.247, 0.062, 0.007], abs=0.05)
    assert frequencies(temperature=0.0) == frequencies(temperature=1e-40) == [1.0, 0, 0, 0]


def test_top_k_holds_without_top_p_whatever_the_last_bits_of_the_weights() -> None:
    """Sums of weights have more bits than a float64: a share of 1 must not be rounded below them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, 50, generator=generator, dtype=torch.float64)
    largest = 1 - 2.0**-53
    for top_k in (1, 2, 7):
        ids, problems = draw(logits, settings_of([(1.0, top_k, 1.0, 0.0, largest)] * 400))
        assert not problems.any()
        ranks = (logits > logits.gather(1, ids[:, None])).sum(-1)
        assert (ranks < top_k).all()


def test_equal_tokens_are_cut_together_and_drawn_evenly() -> None:
    assert {one([1.0, 1.0, 0.0, 1.0], (1.0, 2, 1.0, 0.0, u))[0] for u in (0.0, 0.34, 0.99)} == {0, 1, 3}
    assert [one([1.0, 1.0], (1.0, 0, 1.0, 0.0, u))[0] for u in (0.0, 0.5 - 2**-53, 0.5, 1 - 2**-53)] == [0, 0, 1, 1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_temperatures_and_logits_neither_overflow_nor_lose_the_most_likely(
    temperature: float, dtype: torch.dtype
) -> None:
    logits = torch.tensor([[-torch.finfo(dtype).max, -torch.inf, torch.finfo(dtype).max, 0.0]], dtype=dtype)
    for u in (0.0, 0.5, 1 - 2**-53):
        ids, problems = draw(logits, settings_of([(temperature, 3, 0.9, 0.1, u)]))
        assert int(problems[0]) == FINE
        assert int(ids[0]) == 2 or (temperature == 1e300 and int(ids[0]) in (0, 3))


@example(row=(1.0, 2, 0.9, 0.1, 0.3))
@given(row=row_settings)
def test_a_broken_row_is_named_and_leaves_the_others_alone(row: Row) -> None:
    good = [0.0, 1.0, 2.0]
    rows = [good, [0.0, math.nan, 1.0], [-math.inf] * 3, [math.inf, 0.0, 0.0], good, [-math.inf, 5.0, -math.inf]]
    ids, problems = draw(torch.tensor(rows), settings_of([row] * 6))
    assert problems.tolist() == [FINE, NOT_A_NUMBER, NOTHING_ALLOWED, NOT_A_NUMBER, FINE, FINE]
    assert ids[[1, 2, 3]].tolist() == [0, 0, 0] and int(ids[0]) == int(ids[4]) == one(good, row)[0] and int(ids[5]) == 1


def test_an_empty_batch_and_the_largest_vocabulary_are_fine() -> None:
    assert [len(each) for each in draw(torch.zeros(0, 5), settings_of([]))] == [0, 0]
    flat = torch.zeros(1, 262_144)
    for top_p in (1.0, 0.5):  # the sum of 2**18 largest weights must not overflow
        rows: list[Row] = [(1.0, 0, top_p, 0.0, u) for u in (0.0, 0.5, 1 - 2**-53)]
        found = [int(draw(flat, settings_of([row]))[0][0]) for row in rows]
        assert found == [0, 131_072, 262_143]


def test_wrong_shapes_and_settings_are_refused_with_field_and_value() -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \[1, vocabulary\]"):
        draw(torch.zeros(3), settings_of([(1.0, 0, 1.0, 0.0, 0.0)]))
    with pytest.raises(ValueError, match="'top_k': 2"):
        Settings(temperature=[1.0], top_k=[1, 2], top_p=[1.0], min_p=[0.0], uniform=[0.0])
    with pytest.raises(ValueError, match=r"min_p must be in \[0, 1\], got 1.5"):
        SamplingConfig(min_p=1.5)
