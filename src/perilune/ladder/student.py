"""Quantiles of Student's t distribution for any positive number of degrees of freedom, in plain Python.

The tails are a regularised incomplete beta function (Abramowitz and Stegun 26.7.1),

    P(|T| > t) = I_x(nu / 2, 1 / 2)   with   x = nu / (nu + t^2),

by its continued fraction (26.5.8, evaluated by Lentz's method). Fractional nu is wanted because Satterthwaite's
approximation yields it.
"""

import math
from functools import lru_cache
from statistics import NormalDist

_MANY = 1e5  # degrees of freedom from which the series is exact, while the fraction begins to lose digits
_TINY = 1e-300
_EPSILON = 1e-15


def probability_beyond(bound: float, degrees_of_freedom: float) -> float:
    """P(|T| > bound)."""
    if bound <= 0:
        return 1.0
    square = bound * bound
    total = degrees_of_freedom + square
    # 1 - x is passed beside x because the difference loses every digit where one of them is tiny.
    return _tail(degrees_of_freedom / total, square / total, degrees_of_freedom / 2)


@lru_cache(maxsize=4096)
def two_sided_quantile(confidence: float, degrees_of_freedom: float) -> float:
    """The bound that |T| stays within with the probability `confidence`: 2.571 for 0.95 and five degrees of freedom."""
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not {confidence!r}")
    if not degrees_of_freedom > 0:
        raise ValueError(f"Student's t needs degrees of freedom above 0, not {degrees_of_freedom!r}")
    # From the first terms of the series (26.7.5) by Newton's method. log P(|T| > t) is a concave function of log t, and
    # a straight line where tails are heavy, so that on these scales a step passes the solution at most once.
    z, nu = NormalDist().inv_cdf((1 + confidence) / 2), degrees_of_freedom
    bound = z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
    if nu > _MANY:
        return bound
    for _ in range(100):
        beyond = probability_beyond(bound, nu)
        step = beyond * math.log(beyond / (1 - confidence)) / (2 * bound * _density(bound, nu))
        bound *= math.exp(step)
        if abs(step) < 1e-7:  # each step squares the error
            break
    return bound


def _density(t: float, nu: float) -> float:
    log_scale = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - math.log(nu * math.pi) / 2
    return math.exp(log_scale - (nu + 1) / 2 * math.log1p(t * t / nu))


def _tail(x: float, one_minus_x: float, a: float) -> float:
    """I_x(a, 1/2); the fraction converges fast only left of the mean, the symmetry covers the rest."""
    log_x = math.log(x) if x < 0.5 else math.log1p(-one_minus_x)
    front = math.exp(math.lgamma(a + 0.5) - math.lgamma(a) + a * log_x) * math.sqrt(one_minus_x / math.pi)
    if x < (a + 1) / (a + 2.5):
        return front * _beta_fraction(x, a, 0.5) / a
    return 1 - front * _beta_fraction(one_minus_x, 0.5, a) / 0.5


def _beta_fraction(x: float, a: float, b: float) -> float:
    numerator, denominator = 1.0, 1 - (a + b) * x / (a + 1)
    denominator = 1 / (denominator if abs(denominator) > _TINY else _TINY)
    fraction = denominator
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for coefficient in (even, odd):
            denominator = 1 + coefficient * denominator
            denominator = 1 / (denominator if abs(denominator) > _TINY else _TINY)
            numerator = 1 + coefficient / numerator
            numerator = numerator if abs(numerator) > _TINY else _TINY
            change = numerator * denominator
            fraction *= change
        if abs(change - 1) < _EPSILON:
            break
    return fraction
