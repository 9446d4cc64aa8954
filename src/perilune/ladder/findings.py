"""What the fit of a ladder says: the curve, each arm's multipliers with intervals, and predictions from them.

All of it is plain data: `to_dict` gives what JSON can hold, `from_dict` gives it back, predictions included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perilune.ladder.noise import half_width

Speeds = Mapping[tuple[str, str], Sequence[float]]
"""Tokens a second by rung and arm, each measured several times with the device alone."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One loss: an arm on a rung with a seed, at one token horizon."""

    arm: str
    rung: str
    horizon: str
    seed: int
    compute: float
    """FLOPs spent up to the horizon."""
    tokens: float
    loss: float
    """Nats per token."""
    tokens_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its 95% interval; the ends are None where the ladder does not show its noise."""

    value: float
    low: float | None
    high: float | None
    degrees_of_freedom: float | None
    """Of Student's t behind the interval; None where the noise was given, or is not known."""

    def holds(self, value: float) -> bool:
        return self.low is not None and self.high is not None and self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Curve:
    """L = floor + reducible[horizon] (rho C / reference_compute)^-exponent."""

    floor: Estimate
    floor_is_given: bool
    exponent: Estimate
    reference_compute: float
    reducible: dict[str, float]
    residual_sd: float
    """Root mean square of what the curve leaves, in nats."""

    def loss(self, horizon: str, compute: float, *, rho: float = 1.0) -> float:
        return self.floor.value + self._reducible(horizon, rho * compute)

    def slope(self, horizon: str, compute: float, *, rho: float = 1.0) -> float:
        """dL / d ln C, negative."""
        return -self.exponent.value * self._reducible(horizon, rho * compute)

    def amplitude(self, horizon: str) -> float:
        """A_h, for compute in FLOPs."""
        return self._reducible(horizon, 1.0)

    def _reducible(self, horizon: str, compute: float) -> float:
        if horizon not in self.reducible:
            raise ValueError(f"the ladder has no horizon {horizon!r}, only {', '.join(map(repr, self.reducible))}")
        return self.reducible[horizon] * (compute / self.reference_compute) ** -self.exponent.value


@dataclass(frozen=True, kw_only=True)
class RungFinding:
    rung: str
    compute: float
    """Geometric mean over the baseline's runs that have a pair."""
    num_pairs: int
    gain: float
    """Mean paired difference, baseline less arm, in nats."""
    rho: Estimate
    speed_ratio: float | None
    """Tokens per second, arm over baseline."""
    wall_clock: Estimate | None


@dataclass(frozen=True, kw_only=True)
class ArmFinding:
    """What an arm buys. `rho` multiplies compute, `token_multiplier` tokens, `wall_clock` time."""

    arm: str
    num_pairs: int
    """Pairs of runs (rung and seed); the horizons of a run count once."""
    rho: Estimate
    rho_without_floor: Estimate
    """The same with E = 0."""
    token_multiplier: Estimate
    """rho times the ratio of FLOPs per token: how many times the tokens the baseline would need."""
    wall_clock: Estimate | None
    """token_multiplier times the ratio of tokens per second, mean over rungs; None without measured speeds."""
    trend: Estimate | None
    """d ln rho / d ln C over the rungs."""
    tendency: str
    """What the trend's interval says: "shrinks", "grows" or "undecided"."""
    paired_sd: float | None
    """Of one paired difference in nats, root mean square over horizons."""
    noise_source: str
    rungs: tuple[RungFinding, ...]


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """An arm's largest rung at one horizon, mean over seeds: predictions go on from there."""

    loss: float
    compute: float


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What a prediction for one arm needs: its anchors, and covariances of (floor, log amplitudes, exponent, ln rho,
    the anchors' losses) and of a run."""

    anchors: tuple[Anchor | None, ...]
    """By horizon."""
    shared: tuple[tuple[float, ...], ...]
    own: tuple[tuple[float, ...], ...]
    run_shared: tuple[float, ...]
    run_own: tuple[float, ...]
    shared_degrees: float | None
    own_degrees: float | None
    is_known: bool


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Do gains multiply? ln rho of an arm that has all changes, less the sum of ln rho of the single ones."""

    combined: str
    singles: tuple[str, ...]
    rho: float
    product: float
    ratio: Estimate
    """rho / product: 1 when gains multiply, below 1 when they overlap."""
    verdict: str


@dataclass(frozen=True, kw_only=True)
class LadderFit:
    baseline: str
    curve: Curve
    curve_without_floor: Curve
    arms: tuple[ArmFinding, ...]
    combinations: tuple[Combination, ...]
    spreads: dict[str, Spread]
    """By arm, the baseline included."""
    seed_sd: float | None
    """Of one run's loss over seeds in nats, root mean square over horizons; None: not known."""
    notes: tuple[str, ...]
    """What a reader of the intervals has to know."""

    def arm(self, name: str) -> ArmFinding:
        for finding in self.arms:
            if finding.arm == name:
                return finding
        raise ValueError(f"the ladder has no arm {name!r} beside its baseline {self.baseline!r}")

    def predict(self, arm: str, *, compute: float, horizon: str, num_runs: int = 1) -> Estimate:
        """The loss of a rung that was not run, mean over `num_runs` seeds; the interval covers noise and curve.

        The curve says how much the loss falls from the arm's largest rung on. Where it misses that rung, because rho is
        not quite the same on all rungs, it misses the next by about as much.
        """
        if arm not in self.spreads:
            raise ValueError(f"the ladder has no arm {arm!r}, only {', '.join(map(repr, self.spreads))}")
        if not (compute > 0 and math.isfinite(compute)) or num_runs < 1:
            raise ValueError(f"a prediction needs compute above 0 and at least one run, not {compute!r}, {num_runs!r}")
        rho = 1.0 if arm == self.baseline else self.arm(arm).rho.value
        loss = self.curve.loss(horizon, compute, rho=rho)
        spread = self.spreads[arm]
        place = list(self.curve.reducible).index(horizon)
        gradient = self._gradient(place, horizon, compute, rho, size=len(spread.shared))
        if (anchor := spread.anchors[place]) is not None:
            loss += anchor.loss - self.curve.loss(horizon, anchor.compute, rho=rho)
            there = self._gradient(place, horizon, anchor.compute, rho, size=len(gradient))
            gradient = [here - before for here, before in zip(gradient, there)]
            gradient[place - len(self.curve.reducible)] = 1.0
        if not spread.is_known:
            return Estimate(value=loss, low=None, high=None, degrees_of_freedom=None)
        parts = []
        for covariance, run, degrees in (
            (spread.shared, spread.run_shared, spread.shared_degrees),
            (spread.own, spread.run_own, spread.own_degrees),
        ):
            variance = sum(
                left * right * entry for left, row in zip(gradient, covariance) for right, entry in zip(gradient, row)
            )
            parts.append((max(variance, 0.0) + run[place] / num_runs, math.inf if degrees is None else degrees))
        half, degrees = half_width(parts)
        return Estimate(
            value=loss, low=loss - half, high=loss + half, degrees_of_freedom=None if math.isinf(degrees) else degrees
        )

    def _gradient(self, place: int, horizon: str, compute: float, rho: float, *, size: int) -> list[float]:
        """Of the curve's loss by what `Spread` has covariances of."""
        reducible = self.curve.loss(horizon, compute, rho=rho) - self.curve.floor.value
        after = 1 + len(self.curve.reducible)
        gradient = [0.0] * size
        gradient[0] = 0.0 if self.curve.floor_is_given else 1.0
        gradient[1 + place] = reducible
        gradient[after] = -reducible * math.log(rho * compute / self.curve.reference_compute)
        gradient[after + 1] = -reducible * self.curve.exponent.value
        return gradient

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LadderFit:
        """The inverse of `to_dict`, also of what JSON made of it."""
        return cls(
            baseline=values["baseline"],
            curve=_curve(values["curve"]),
            curve_without_floor=_curve(values["curve_without_floor"]),
            arms=tuple(_arm(arm) for arm in values["arms"]),
            combinations=tuple(_combination(found) for found in values["combinations"]),
            spreads={arm: _spread(spread) for arm, spread in values["spreads"].items()},
            seed_sd=values["seed_sd"],
            notes=tuple(values["notes"]),
        )


def _curve(values: Mapping[str, Any]) -> Curve:
    return Curve(**_with_estimates(values, "floor", "exponent"))


def _arm(values: Mapping[str, Any]) -> ArmFinding:
    changed = _with_estimates(values, "rho", "rho_without_floor", "token_multiplier", "wall_clock", "trend")
    changed["rungs"] = tuple(RungFinding(**_with_estimates(rung, "rho", "wall_clock")) for rung in values["rungs"])
    return ArmFinding(**changed)


def _combination(values: Mapping[str, Any]) -> Combination:
    changed = _with_estimates(values, "ratio")
    changed["singles"] = tuple(values["singles"])
    return Combination(**changed)


def _spread(values: Mapping[str, Any]) -> Spread:
    changed = dict(values)
    changed["anchors"] = tuple(None if anchor is None else Anchor(**anchor) for anchor in values["anchors"])
    for name in ("shared", "own"):
        changed[name] = tuple(tuple(row) for row in values[name])
    for name in ("run_shared", "run_own"):
        changed[name] = tuple(values[name])
    return Spread(**changed)


def _with_estimates(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    changed = dict(values)
    for name in names:
        changed[name] = None if values[name] is None else Estimate(**values[name])
    return changed
