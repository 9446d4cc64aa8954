"""The points of a ladder as arrays, and what cannot be fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perilune.ladder.findings import Point, Speeds

Array = np.ndarray


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Points as arrays [arm, rung, seed, horizon], NaN where nothing was run; the baseline is arm 0."""

    arms: tuple[str, ...]
    rungs: tuple[str, ...]
    horizons: tuple[str, ...]
    loss: Array
    log_compute: Array
    """Relative to `log_reference`, the mean."""
    log_reference: float
    log_flops_per_token: Array
    log_speed: Array
    """[arm, rung, measurement], NaN where there are fewer."""

    @property
    def present(self) -> Array:
        return np.isfinite(self.loss)

    @property
    def shaping(self) -> Array:
        """Points that the curve is fitted to: an arm of one rung shows no slope, and only its rho is asked for."""
        rungs = self.present.any(axis=(2, 3)).sum(axis=1)
        return self.present & ((rungs > 1) | (np.arange(len(rungs)) == 0))[:, None, None, None]

    def gains(self, arm: int) -> Array:
        """Paired differences [rung, seed, horizon]."""
        return self.loss[0] - self.loss[arm]

    def dense(self, influence: Array) -> Array:
        """Rows over the points of the curve, in the order of `shaping`, as [row, arm, rung, seed, horizon]."""
        rows = np.zeros((len(influence), *self.loss.shape))
        rows[:, self.shaping] = influence
        return rows


def arranged(points: list[Point], baseline: str, speeds: Speeds | None = None) -> Losses:
    """speeds: tokens a second by rung and arm that were measured apart; they take the place of those of the points."""
    if not points:
        raise ValueError("a ladder without points cannot be fitted")
    for point in points:
        for name in ("compute", "tokens", "loss"):
            value = getattr(point, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is a number above 0, not {value!r}, in {point!r}")
        speed = point.tokens_per_second
        if speed is not None and not (math.isfinite(speed) and speed > 0):
            raise ValueError(f"tokens_per_second is a number above 0 or None, not {speed!r}, in {point!r}")
    names = sorted({point.arm for point in points})
    if baseline not in names:
        raise ValueError(f"no point belongs to the baseline {baseline!r}, only to {', '.join(map(repr, names))}")

    def by_size(kind: str, size: str) -> tuple[str, ...]:
        """Names in order of their mean size, so that nothing depends on the order of the points."""
        sizes: dict[str, list[float]] = {}
        for point in points:
            sizes.setdefault(getattr(point, kind), []).append(math.log(getattr(point, size)))
        return tuple(sorted(sizes, key=lambda name: (math.fsum(sizes[name]) / len(sizes[name]), name)))

    arms = (baseline, *(name for name in names if name != baseline))
    rungs, horizons = by_size("rung", "compute"), by_size("horizon", "tokens")
    seeds = sorted({point.seed for point in points})
    shape = (len(arms), len(rungs), len(seeds), len(horizons))
    loss, log_compute, flops_per_token, speed = (np.full(shape, np.nan) for _ in range(4))
    for point in points:
        place = (
            arms.index(point.arm),
            rungs.index(point.rung),
            seeds.index(point.seed),
            horizons.index(point.horizon),
        )
        if np.isfinite(loss[place]):
            raise ValueError(f"two points share arm, rung, horizon and seed: {point!r}")
        loss[place] = point.loss
        log_compute[place] = math.log(point.compute)
        flops_per_token[place] = math.log(point.compute / point.tokens)
        speed[place] = math.nan if point.tokens_per_second is None else math.log(point.tokens_per_second)
    reference = float(np.nanmean(log_compute))
    return Losses(
        arms=arms,
        rungs=rungs,
        horizons=horizons,
        loss=loss,
        log_compute=log_compute - reference,
        log_reference=reference,
        log_flops_per_token=flops_per_token,
        log_speed=_log_speeds(mean_where_present(speed, axis=-1), arms, rungs, speeds or {}),
    )


def _log_speeds(
    of_points: Array,
    arms: tuple[str, ...],
    rungs: tuple[str, ...],
    speeds: Speeds,
) -> Array:
    """[arm, rung, measurement]: as many as there are, however many seeds were trained."""
    most = max([of_points.shape[-1], *map(len, speeds.values())])
    found = np.full((*of_points.shape[:2], most), np.nan)
    found[..., : of_points.shape[-1]] = of_points
    for (rung, arm), measured in speeds.items():
        for speed in measured:
            if not (math.isfinite(speed) and speed > 0):
                raise ValueError(f"a speed is a number above 0, not {speed!r}, of rung {rung!r} and arm {arm!r}")
        if measured and rung in rungs and arm in arms:
            place = (arms.index(arm), rungs.index(rung))
            found[place] = np.nan
            found[place][: len(measured)] = np.log(measured)
    return found


def check_identifiable(losses: Losses, floor: float | None) -> None:
    lowest = float(np.nanmin(losses.loss))
    if floor is not None and not 0 <= floor < lowest:
        raise ValueError(f"the floor E lies in [0, {lowest:.4f}), below every loss; it is {floor!r}")
    # Arms move along the curve by an unknown rho: only one arm's own rungs, at one horizon, show the curve's shape.
    sizes = np.round(mean_where_present(losses.log_compute, axis=2), 6)
    rungs = max(
        len({float(x) for x in row if np.isfinite(x)}) for row in sizes.swapaxes(1, 2).reshape(-1, len(losses.rungs))
    )
    if rungs < 2:
        raise ValueError(
            "one rung shows no slope: a multiplier needs two rungs of different compute in one arm at one horizon"
        )
    if rungs == 2 and floor is None:
        raise ValueError("two rungs cannot tell the floor E from the exponent: give the floor, floor=0.0 for none")
    for horizon, name in enumerate(losses.horizons):
        if not losses.shaping[..., horizon].any():
            raise ValueError(
                f"the horizon {name!r} was run on one rung of each arm only, and not by the baseline "
                f"{losses.arms[0]!r}: nothing shows its place on the curve"
            )
    for arm in range(1, len(losses.arms)):
        if not np.isfinite(losses.gains(arm)).any():
            raise ValueError(
                f"the arm {losses.arms[arm]!r} has no pair: no point of the baseline {losses.arms[0]!r} has the same "
                "rung, horizon and seed"
            )


def mean_where_present(values: Array, *, axis: int) -> Array:
    """The mean over an axis without its NaN; NaN where nothing is left."""
    present = np.isfinite(values)
    counts = present.sum(axis=axis)
    sums = np.where(present, values, 0).sum(axis=axis)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
