"""Student's t: values from the tables of Abramowitz and Stegun (26.10) and of the NIST handbook (1.3.6.7.2)."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.ladder.student import probability_beyond, two_sided_quantile


@pytest.mark.parametrize(
    "confidence, degrees, expected",
    [
        (0.95, 1, 12.706),
        (0.95, 2, 4.303),
        (0.95, 3, 3.182),
        (0.95, 4, 2.776),
        (0.95, 6, 2.447),
        (0.95, 10, 2.228),
        (0.95, 30, 2.042),
        (0.95, 100, 1.984),
        (0.95, math.inf, 1.960),
        (0.90, 5, 2.015),
        (0.99, 1, 63.657),
        (0.99, 12, 3.055),
        (0.998, 8, 4.501),
    ],
)
def test_student_quantiles_are_those_of_the_published_tables(
    confidence: float, degrees: float, expected: float
) -> None:
    assert two_sided_quantile(confidence, degrees) == pytest.approx(expected, abs=5.1e-4)


@given(st.floats(0.01, 0.999), st.floats(0.2, 1e4))
@settings(max_examples=60, deadline=None)
def test_student_quantile_inverts_the_distribution(confidence: float, degrees: float) -> None:
    bound = two_sided_quantile(confidence, degrees)
    assert probability_beyond(bound, degrees) == pytest.approx(1 - confidence, rel=1e-8)


@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_student_quantile_is_continuous_where_the_series_takes_over(confidence: float) -> None:
    below, above = two_sided_quantile(confidence, 99_999.0), two_sided_quantile(confidence, 100_001.0)
    normal = two_sided_quantile(confidence, math.inf)
    # The distance to the normal quantile falls as 1 / nu.
    assert 0 < above - normal < below - normal < 1e-3
    assert (below - normal) * 99_999 == pytest.approx((above - normal) * 100_001, rel=1e-4)


def test_student_quantile_has_its_closed_forms() -> None:
    assert two_sided_quantile(0.9, 1) == pytest.approx(math.tan(0.45 * math.pi), rel=1e-12)
    assert two_sided_quantile(0.9, 2) == pytest.approx(0.9 * math.sqrt(2 / (1 - 0.9**2)), rel=1e-12)


def test_student_quantile_refuses_what_has_none() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        two_sided_quantile(1.0, 3)
    with pytest.raises(ValueError, match="degrees of freedom above 0"):
        two_sided_quantile(0.95, 0.0)
