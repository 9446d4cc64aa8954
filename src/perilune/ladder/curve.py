"""The shared curve of a ladder: least squares for  L = E + A_h (rho_arm C)^-a.

For a given floor E the model is linear in what is left, log(L - E) = log A_h - a log C - a log rho, so a search over E
alone finds the neighbourhood of the optimum (variable projection; arXiv 2603.22339 shows that the direct fit of all
parameters is ill-conditioned and this one is not). Gauss-Newton steps with Levenberg's damping then minimise Huber's
loss of L itself, from each local minimum (three at most) that the search has seen: squares up to LIMIT nats and
straight lines beyond, so that a run which has not learnt what all others have does not bend the curve of all (Hoffmann
et al., arXiv 2203.15556, fit with Huber's loss for the same reason). No random start: the same losses give the same
bits.

log C is taken relative to a reference compute, which keeps the columns of the design apart and makes the result
independent of the unit of compute. Parameters, in order: E, log A_h per horizon, a, and a log rho per arm but the first
(the baseline has rho = 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray

# Shares of the lowest loss where the search looks for E; denser towards the end, where log(L - E) bends most.
_FLOOR_SHARES = np.array([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.96, 0.98, 0.99, 0.998])
_MAX_STEPS = 200
_ROUNDS = 5
LIMIT = 0.03
"""Nats; more than the noise of a run. A point further off the curve pulls as if it were that far off."""


@dataclass(frozen=True, kw_only=True)
class CurvePoints:
    """Flat arrays, one entry per loss; `arm` 0 is the baseline."""

    log_compute: Array
    loss: Array
    horizon: Array
    arm: Array
    num_horizons: int
    num_arms: int

    @property
    def linear_design(self) -> Array:
        """Columns of log(L - E): one per horizon, the exponent, one per arm but the baseline."""
        horizons = (self.horizon[:, None] == np.arange(self.num_horizons)).astype(float)
        arms = (self.arm[:, None] == np.arange(1, self.num_arms)).astype(float)
        return np.concatenate([horizons, -self.log_compute[:, None], -arms], axis=1)


@dataclass(frozen=True, kw_only=True)
class CurveSolution:
    """`influence` is d(parameters) / d(losses), a row per parameter; the row of a floor that was given is zero."""

    floor: float
    log_amplitudes: Array
    exponent: float
    influence: Array
    residuals: Array


def fit_curve(points: CurvePoints, *, floor: float | None) -> CurveSolution:
    """Least squares with E free in [0, lowest loss), or with a given E."""
    design = points.linear_design
    lowest = float(points.loss.min())
    if floor is not None:
        parameters = _refined(points.loss, design, _projected(points.loss, design, np.array([floor]))[0], free=False)
    else:
        starts = _projected(points.loss, design, _FLOOR_SHARES * lowest)
        costs = np.array([_cost(points.loss, design, start) for start in starts])
        padded = np.concatenate([[np.inf], costs, [np.inf]])
        valleys = np.flatnonzero((costs <= padded[:-2]) & (costs <= padded[2:]))
        valleys = valleys[np.argsort(costs[valleys], kind="stable")][:3]
        candidates = [_refined(points.loss, design, starts[valley], free=True) for valley in valleys]
        parameters = min(candidates, key=lambda found: _cost(points.loss, design, found))
    exponent = float(parameters[1 + points.num_horizons])
    reducible = np.exp(design @ parameters[1:])
    spread = float(points.log_compute.max() - points.log_compute.min())
    if not exponent * spread > 1e-9:
        raise ValueError("the losses do not fall with compute: no curve, and no multiplier, can be derived from them")
    residuals = points.loss - parameters[0] - reducible
    jacobian = np.concatenate([np.ones((len(design), 1)), reducible[:, None] * design], axis=1)
    first = 0 if floor is None else 1
    influence = np.zeros((jacobian.shape[1], len(design)))
    influence[first:] = _influence(jacobian[:, first:], residuals)
    return CurveSolution(
        floor=float(parameters[0]),
        log_amplitudes=parameters[1 : 1 + points.num_horizons],
        exponent=exponent,
        influence=influence,
        residuals=residuals,
    )


def _projected(loss: Array, design: Array, floors: Array) -> Array:
    """For each floor the best other parameters of log(L - E), weighted so that errors count as errors of L, and far
    ones, as the rounds before show them, count less."""
    reducible = loss - floors[:, None]
    roots, found = np.ones_like(reducible), np.zeros((len(floors), design.shape[1]))
    for _ in range(_ROUNDS):
        weighted = design * (reducible * roots)[:, :, None]
        normal = weighted.transpose(0, 2, 1) @ weighted
        right = weighted.transpose(0, 2, 1) @ (reducible * roots * np.log(reducible))[:, :, None]
        ridge = 1e-13 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(design.shape[1])
        found = np.linalg.solve(normal + ridge, right)[:, :, 0]
        with np.errstate(over="ignore"):
            roots = _roots(reducible - np.exp(found @ design.T))
    return np.concatenate([floors[:, None], found], axis=1)


def _roots(residuals: Array) -> Array:
    """Of the weights that make squares Huber's loss."""
    return np.sqrt(LIMIT / np.maximum(np.abs(residuals), LIMIT))


def _cost(loss: Array, design: Array, parameters: Array) -> float:
    with np.errstate(over="ignore"):
        residuals = loss - parameters[0] - np.exp(design @ parameters[1:])
        size = np.abs(residuals)
        cost = float(np.where(size <= LIMIT, size**2, LIMIT * (2 * size - LIMIT)).sum())
    return cost if np.isfinite(cost) else np.inf


def _refined(loss: Array, design: Array, parameters: Array, *, free: bool) -> Array:
    """Levenberg's method on the losses themselves, far ones weighing less; with `free` the floor moves too, between 0
    and the lowest loss."""
    highest = float(_FLOOR_SHARES[-1] * loss.min())
    damping = 1e-6
    cost = _cost(loss, design, parameters)
    for _ in range(_MAX_STEPS):
        reducible = np.exp(design @ parameters[1:])
        residuals = loss - parameters[0] - reducible
        jacobian = np.concatenate([np.ones((len(loss), 1)), reducible[:, None] * design], axis=1)
        roots = _roots(residuals)
        jacobian, residuals = jacobian * roots[:, None], residuals * roots
        scale = np.sqrt((jacobian * jacobian).sum(axis=0))
        is_held = not free
        while True:
            step = _step(jacobian / scale, residuals, damping, held=is_held) / scale
            if not is_held and ((parameters[0] <= 0 and step[0] < 0) or (parameters[0] >= highest and step[0] > 0)):
                # On the border, and on its way out: the others move alone.
                is_held = True
                continue
            trial = parameters + step
            if not is_held and not 0 <= trial[0] <= highest:
                # Shortened to end on the border; from there on the others move alone.
                border = 0.0 if step[0] < 0 else highest
                trial = parameters + step * ((border - parameters[0]) / step[0])
                trial[0] = border
            trial_cost = _cost(loss, design, trial)
            if trial_cost <= cost:
                break
            damping = max(10 * damping, 1e-12)
            if damping > 1e8:
                return parameters
        first = 1 if is_held else 0
        is_small = np.abs((step * scale)[first:]).max() <= 1e-11 * np.abs((parameters * scale)[first:]).max()
        is_flat = cost - trial_cost <= 1e-13 * cost and damping < 1e-7
        parameters, cost = trial, trial_cost
        damping = damping / 10 if damping > 1e-15 else 0.0
        if is_small or is_flat:
            break
    return parameters


def _step(jacobian: Array, residuals: Array, damping: float, *, held: bool) -> Array:
    """The damped step towards smaller residuals, column by column; `held`: the first stays where it is."""
    first = 1 if held else 0
    left, singular, right = np.linalg.svd(jacobian[:, first:], full_matrices=False)
    step = np.zeros(jacobian.shape[1])
    step[first:] = right.T @ ((left.T @ residuals) * singular / (singular**2 + damping))
    return step


def _influence(jacobian: Array, residuals: Array) -> Array:
    """d(parameters) / d(losses). A point beyond LIMIT pulls no harder when it moves further: it has none."""
    near = np.abs(residuals) <= LIMIT
    influence = np.zeros(jacobian.T.shape)
    try:
        influence[:, near] = _pseudo_inverse(jacobian[near])
    except ValueError:  # an arm that has no point near the curve, say
        roots = _roots(residuals)
        influence = _pseudo_inverse(jacobian * roots[:, None]) * roots
    return influence


def _pseudo_inverse(jacobian: Array) -> Array:
    if len(jacobian) < jacobian.shape[1]:
        raise ValueError("fewer points than parameters of the curve: add rungs, or give the floor E")
    scale = np.sqrt((jacobian * jacobian).sum(axis=0))
    if not scale.all():
        raise ValueError("a parameter of the curve has no point that shows it: add rungs, or leave its arm out")
    left, singular, right = np.linalg.svd(jacobian / scale, full_matrices=False)
    if singular[-1] < 1e-10 * singular[0]:
        raise ValueError("these points cannot tell the curve's parameters apart: add rungs, or give the floor E")
    return (right.T / singular) @ left.T / scale[:, None]
