"""The multiplier of one arm from its paired differences on a given curve, with its derivatives by every loss.

With g_h(C) = A_h C^-a a paired difference is  d = g_h(C_baseline) - rho^-a g_h(C_arm),  linear in rho^-a, so that least
squares over pairs p has the closed form

    rho^-a = N / D,        N = sum_p g_arm (g_baseline - d),        D = sum_p g_arm^2.

A loss moves ln rho in two ways: through d, where only the difference of a pair counts, and through the curve (a, A_h).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perilune.ladder.curve import CurveSolution
from perilune.ladder.losses import Losses, mean_where_present

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """ln rho of an arm and what it depends on; forms are derivatives by each loss [..., arm, rung, seed, horizon]."""

    arm: int
    log_rho: float
    by_rung: Array
    """NaN where a rung has no pair."""
    compute_by_rung: Array
    """Mean log compute of the baseline's runs that have a pair, as in `Losses`."""
    trend: float | None
    """Slope of the straight line through ln rho over ln C, rungs weighed as in the mean."""
    parameter_forms: Array
    """Of floor, log amplitudes and exponent."""
    form: Array
    rung_forms: Array
    trend_form: Array
    residuals: Array
    """Paired differences less those of the fit [rung, seed, horizon]."""
    line_residuals: Array
    """The same where rho follows the trend."""


def multiplier_of(losses: Losses, solution: CurveSolution, arm: int) -> Multiplier:
    gains = losses.gains(arm)
    paired = np.isfinite(gains)
    exponent = solution.exponent
    gains = np.where(paired, gains, 0)
    x_base, x_arm = (np.where(paired, losses.log_compute[side], 0) for side in (0, arm))
    base, own = (np.where(paired, np.exp(solution.log_amplitudes - exponent * x), 0) for x in (x_base, x_arm))

    parameter_forms = losses.dense(solution.influence[: 2 + len(losses.horizons)])
    amplitude_forms, exponent_form = parameter_forms[1:-1], parameter_forms[-1]

    def solve(chosen: Array) -> tuple[float, Array]:
        """ln rho over the pairs of the chosen rungs, and its derivative by every loss."""
        weight = np.where(chosen[:, None, None], own, 0)
        weight = weight / (weight * own).sum()
        power = float((weight * (base - gains)).sum())
        if not power > 0:
            raise ValueError(
                f"the arm {losses.arms[arm]!r} gains more than the curve has above its floor E = {solution.floor:.4f}: "
                "no multiplier describes it; give a lower floor"
            )
        log_rho = -math.log(power) / exponent
        by_base = weight * base
        by_own = weight * (base - gains - 2 * power * own)
        # log g moves by 1 with log A_h and by -x with a.
        by_amplitudes = (by_base + by_own).sum(axis=(0, 1))
        by_exponent = -float((by_base * x_base + by_own * x_arm).sum())
        power_form = np.tensordot(by_amplitudes, amplitude_forms, axes=1) + by_exponent * exponent_form
        power_form[0] -= weight
        power_form[arm] += weight
        return log_rho, -power_form / (exponent * power) - (log_rho / exponent) * exponent_form

    denominator = (own * own).sum(axis=(1, 2))
    num_rungs = len(losses.rungs)
    by_rung = np.full(num_rungs, np.nan)
    rung_forms = np.zeros((num_rungs, *losses.loss.shape))
    log_rho, form = solve(denominator > 0)
    for rung in np.flatnonzero(denominator > 0):
        by_rung[rung], rung_forms[rung] = solve(np.arange(num_rungs) == rung)
    compute = mean_where_present(np.where(paired, x_base, np.nan).reshape(num_rungs, -1), axis=1)
    trend, trend_form, line = None, np.zeros_like(losses.loss), np.full(num_rungs, log_rho)
    weights = denominator / denominator.sum()
    centre = float(np.nansum(weights * compute))
    offsets = np.where(weights > 0, compute - centre, 0)
    if (square := float(weights @ offsets**2)) > 0:
        shares = weights * offsets / square
        known = np.where(weights > 0, by_rung, 0)
        trend = float(shares @ known)
        trend_form = np.tensordot(shares, rung_forms, axes=1)
        line = float(weights @ known) + trend * offsets

    def residuals(log_rhos: Array) -> Array:
        return np.where(paired, gains - base + np.exp(-exponent * log_rhos)[:, None, None] * own, np.nan)

    return Multiplier(
        arm=arm,
        log_rho=log_rho,
        by_rung=by_rung,
        compute_by_rung=compute,
        trend=trend,
        parameter_forms=parameter_forms,
        form=form,
        rung_forms=rung_forms,
        trend_form=trend_form,
        residuals=residuals(np.full(num_rungs, log_rho)),
        line_residuals=residuals(line),
    )
