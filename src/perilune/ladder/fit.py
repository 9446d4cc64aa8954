"""From the losses of a ladder to what each arm buys over the baseline, with intervals.

    L = E + A_h (rho_arm C)^-a        one A_h per token horizon; E and a shared by all arms; rho of the baseline = 1

(shared exponents with one factor per method: arXiv 2602.07712; separate fits per method are ill-conditioned.)

1. The curve (E, A_h, a) by least squares, Huber's loss for far points, over all arms of several rungs (curve.py).
2. rho of an arm from paired differences alone, d = L_baseline - L_arm at the same rung, horizon and seed: on the curve
   d = g_h(C_baseline) - rho^-a g_h(C_arm) with g_h = A_h C^-a, which is linear in rho^-a. To first order
   ln rho = d / |dL/dlnC|. The same over the pairs of one rung gives that rung's rho; the slope of these over ln C is
   the trend.
3. Intervals by the delta method: every estimate is differentiated through both steps down to the single losses, and
   noise.py turns the derivatives into a variance with the noise measured between seeds. So the uncertainty of the
   curve's slope is in, with its correlation to the differences, and the horizons of a run are one observation.
   Resampling seeds instead would cover too rarely: with n seeds a bootstrap sees (n - 1) / n of the variance.

rho multiplies compute. Where an arm spends other FLOPs on a token than the baseline, tokens and time need the ratio of
FLOPs per token f as well:

    token multiplier = rho f_arm / f_baseline        wall-clock multiplier = token multiplier x ratio of tokens / second

What the intervals leave out: an error of the model itself (curves of other shape, arms of other exponent), and learning
rates that were not tuned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perilune.ladder.curve import CurvePoints, CurveSolution, fit_curve
from perilune.ladder.findings import (
    Anchor,
    ArmFinding,
    Combination,
    Curve,
    Estimate,
    LadderFit,
    Point,
    RungFinding,
    Speeds,
    Spread,
)
from perilune.ladder.losses import Losses, arranged, check_identifiable, mean_where_present
from perilune.ladder.multiplier import Multiplier, multiplier_of
from perilune.ladder.noise import (
    Noise,
    NoiseModel,
    covariance_over_runs,
    covariance_over_seeds,
    half_width,
    pooled_over_arms,
)

Array = np.ndarray
Parts = list[tuple[float, float]]
"""Variances with their degrees of freedom."""

OWN_SEEDS = "own seeds"
_MIN_OWN_DEGREES = 2  # below, Student's t is so wide that the seeds of the other arms say more


def fit_ladder(
    points: Iterable[Point],
    *,
    baseline: str,
    floor: float | None = None,
    combinations: Mapping[str, Sequence[str]] | None = None,
    seed_sd: float | None = None,
    speeds: Speeds | None = None,
) -> LadderFit:
    """Fit a ladder.

    `floor` fixes E, which two rungs need. `combinations` names arms that have the changes of several others at once:
    {"all": ["muon", "attnres"]}. `seed_sd`, in nats, stands in for the noise of a run where no seed was repeated.
    `speeds`, tokens a second by rung and arm, take the place of those of the points.
    """
    losses = arranged(list(points), baseline, speeds)
    check_identifiable(losses, floor)
    if seed_sd is not None and not (seed_sd >= 0 and math.isfinite(seed_sd)):
        raise ValueError(f"seed_sd is a standard deviation in nats, not {seed_sd!r}")
    curve_points = _curve_points(losses)
    solution = fit_curve(curve_points, floor=floor)
    without_floor = fit_curve(curve_points, floor=0.0)
    multipliers = [multiplier_of(losses, solution, arm) for arm in range(1, len(losses.arms))]
    notes: list[str] = []
    mean, num_averaged = _mean_noise(losses, solution, seed_sd, notes)
    models, trend_models = (
        [NoiseModel(mean=mean, own=own, num_averaged=num_averaged) for own in owns]
        for owns in _own_noises(losses, multipliers, notes)
    )

    speed_noise = _speed_noise(losses)
    findings, spreads = [], {}
    for multiplier, model, trend_model in zip(multipliers, models[1:], trend_models[1:]):
        bare = multiplier_of(losses, without_floor, multiplier.arm)
        trend = None
        if multiplier.trend is not None:
            trend = _estimate(multiplier.trend, _parts(trend_model, multiplier.trend_form))
        findings.append(_finding(losses, model, multiplier, bare, trend, speed_noise))
        spreads[losses.arms[multiplier.arm]] = _spread(
            losses, multiplier.arm, model, multiplier.parameter_forms, multiplier.form
        )
    parameter_forms = losses.dense(solution.influence[: 2 + len(losses.horizons)])
    spreads[baseline] = _spread(losses, 0, models[0], parameter_forms, np.zeros_like(losses.loss))
    if np.isfinite(losses.log_speed).any() and speed_noise.degrees_of_freedom == 0:
        notes.append("no speed was measured twice: wall-clock intervals hold the noise of the losses only")
    seed_variances = [sum(models[0].new_run(horizon)) for horizon in range(len(losses.horizons))]
    return LadderFit(
        baseline=baseline,
        curve=_curve(losses, solution, models[0], floor_is_given=floor is not None),
        curve_without_floor=_curve(losses, without_floor, models[0], floor_is_given=True),
        arms=tuple(findings),
        combinations=tuple(
            _combination(losses, multipliers, models, name, tuple(singles))
            for name, singles in sorted((combinations or {}).items())
        ),
        spreads=dict(sorted(spreads.items())),
        seed_sd=math.sqrt(float(np.mean(seed_variances))) if mean.is_known else None,
        notes=tuple(notes),
    )


def _curve_points(losses: Losses) -> CurvePoints:
    shaping = losses.shaping
    arm, _, _, horizon = np.nonzero(shaping)
    arms, arm = np.unique(arm, return_inverse=True)
    return CurvePoints(
        log_compute=losses.log_compute[shaping],
        loss=losses.loss[shaping],
        horizon=horizon,
        arm=arm,
        num_horizons=len(losses.horizons),
        num_arms=len(arms),
    )


def _mean_noise(
    losses: Losses, solution: CurveSolution, seed_sd: float | None, notes: list[str]
) -> tuple[Noise, float]:
    """Noise over seeds of the mean of arms, and how many arms that mean has."""
    present = losses.present
    # Only arms run wherever the baseline was: a mean over changing arms would count their gains as noise.
    complete = (present == present[0]).all(axis=(2, 3))
    averaged = np.full(losses.loss.shape[1:], np.nan)
    for rung in range(len(losses.rungs)):
        averaged[rung] = losses.loss[complete[:, rung], rung].mean(axis=0)
    covariance, degrees = covariance_over_seeds(averaged)
    repeated = present[0].any(axis=-1).sum(axis=1) > 1
    num_averaged = 1 / float(np.mean(1 / complete.sum(axis=0)[repeated if repeated.any() else slice(None)]))
    if degrees > 0:
        most = np.isfinite(averaged).sum(axis=1).max(axis=0)
        notes += [
            f"no seed was repeated at {name}: it has the noise of the other horizons"
            for name, count in zip(losses.horizons, most)
            if count == 1
        ]
        return Noise(covariance=covariance, degrees_of_freedom=degrees, source="seeds"), num_averaged
    size = len(losses.horizons)
    if seed_sd is not None:
        notes.append(f"no seed of the baseline was repeated: the noise of a run is the given {seed_sd:g} nats")
        # Branches of one run move together; taking them as one is the careful choice.
        covariance = np.full((size, size), seed_sd**2)
        return Noise(covariance=covariance, degrees_of_freedom=math.inf, source="given"), 1.0
    residuals = np.full(losses.loss.shape, np.nan)
    residuals[losses.shaping] = solution.residuals
    residuals = mean_where_present(residuals, axis=0)
    num_fitted = 2 if np.all(solution.influence[0] == 0) else 3
    covariance, degrees = covariance_over_runs(residuals, num_fitted=num_fitted)
    if degrees > 0:
        notes.append("no seed of the baseline was repeated: the noise of a run is what the curve leaves of the losses")
        return Noise(covariance=covariance, degrees_of_freedom=degrees, source="residuals of the curve"), num_averaged
    notes.append(
        "no seed of the baseline was repeated, and the curve leaves no residuals to judge by: nothing has an interval; "
        "give seed_sd, the noise of a run in nats"
    )
    return Noise(covariance=np.zeros((size, size)), degrees_of_freedom=0.0, source="not known"), num_averaged


def _own_noises(losses: Losses, multipliers: list[Multiplier], notes: list[str]) -> tuple[list[Noise], list[Noise]]:
    """Noise of an arm's own (half that of its paired differences) by arm, the baseline's being that of all arms; the
    second list is for trends, because scatter about a constant rho would count a trend as noise."""
    by_seeds, about_constant, about_line = [], [], []
    for arm, multiplier in enumerate(multipliers, start=1):
        by_seeds.append(_halved(covariance_over_seeds(losses.gains(arm)), OWN_SEEDS))
        about_constant.append(_halved(covariance_over_runs(multiplier.residuals, num_fitted=1), "own scatter"))
        about_line.append(_halved(covariance_over_runs(multiplier.line_residuals, num_fitted=2), "own scatter"))
    size = len(losses.horizons)
    pooled = pooled_over_arms(by_seeds, size=size, source="seeds of all arms")
    pooled_for_trends = pooled
    if not pooled.is_known:
        pooled = pooled_over_arms(about_constant, size=size, source="scatter of all arms over rungs")
        pooled_for_trends = pooled_over_arms(about_line, size=size, source=pooled.source)
    noises, noises_for_trends = [pooled], [pooled_for_trends]
    for name, own in zip(losses.arms[1:], by_seeds):
        takes_pooled = own.degrees_of_freedom < min(_MIN_OWN_DEGREES, pooled.degrees_of_freedom) or not own.is_known
        if takes_pooled:
            notes.append(
                f"{name}: its paired noise is the {pooled.source}, for want of repeated seeds"
                if pooled.is_known
                else f"{name}: neither seeds nor rungs show its paired noise; it has no interval"
            )
        noises.append(pooled if takes_pooled else own)
        noises_for_trends.append(pooled_for_trends if takes_pooled else own)
    return noises, noises_for_trends


def _halved(found: tuple[Array, float], source: str) -> Noise:
    """The noise of one arm from that of a difference of two."""
    covariance, degrees = found
    return Noise(covariance=covariance / 2, degrees_of_freedom=degrees, source=source)


@dataclass(frozen=True, kw_only=True)
class _SpeedNoise:
    """Variance of ln(tokens per second) between runs of one arm on one rung."""

    variance: float
    degrees_of_freedom: float


def _speed_noise(losses: Losses) -> _SpeedNoise:
    covariance, degrees = covariance_over_seeds(losses.log_speed.reshape(-1, losses.log_speed.shape[-1], 1))
    return _SpeedNoise(variance=float(covariance[0, 0]), degrees_of_freedom=degrees)


def _estimate(value: float, parts: Parts | None) -> Estimate:
    if parts is None:
        return Estimate(value=value, low=None, high=None, degrees_of_freedom=None)
    half, degrees = half_width(parts)
    degrees_of_freedom = None if math.isinf(degrees) else degrees
    return Estimate(value=value, low=value - half, high=value + half, degrees_of_freedom=degrees_of_freedom)


def _exponential(log_value: float, parts: Parts | None) -> Estimate:
    found = _estimate(log_value, parts)
    # exp overflows beyond 709; an interval that wide says nothing either way.
    low, high = (None if end is None else math.exp(min(end, 700.0)) for end in (found.low, found.high))
    return Estimate(value=math.exp(log_value), low=low, high=high, degrees_of_freedom=found.degrees_of_freedom)


def _parts(model: NoiseModel, form: Array) -> Parts | None:
    """Variances of an estimate that rests on pairs and on the curve; None where the ladder does not show both."""
    if not (model.own.is_known and model.mean.is_known):
        return None
    shared, own = model.parts(form[None])
    return [
        (float(shared[0, 0]), model.mean.degrees_of_freedom),
        (float(own[0, 0]), model.own.degrees_of_freedom),
    ]


def _finding(
    losses: Losses,
    model: NoiseModel,
    multiplier: Multiplier,
    bare: Multiplier,
    trend: Estimate | None,
    speeds: _SpeedNoise,
) -> ArmFinding:
    arm = multiplier.arm
    paired = np.isfinite(losses.gains(arm))
    tokens = losses.log_flops_per_token[arm] - losses.log_flops_per_token[0]
    tokens = mean_where_present(np.where(paired, tokens, np.nan).reshape(len(paired), -1), axis=1)
    speed = mean_where_present(losses.log_speed[arm], axis=1) - mean_where_present(losses.log_speed[0], axis=1)
    counts = np.isfinite(losses.log_speed).sum(axis=2)
    speed_variance = speeds.variance * (1 / np.maximum(counts[arm], 1) + 1 / np.maximum(counts[0], 1))

    def with_speed(parts: Parts | None, variance: float) -> Parts | None:
        if parts is None or speeds.degrees_of_freedom == 0:
            return parts
        return [*parts, (variance, speeds.degrees_of_freedom)]

    rungs = []
    with_pairs = np.flatnonzero(paired.any(axis=(1, 2)))
    for rung in with_pairs:
        log_rho = float(multiplier.by_rung[rung])
        parts = _parts(model, multiplier.rung_forms[rung])
        has_speed = bool(np.isfinite(speed[rung]))
        log_time = log_rho + float(tokens[rung]) + float(speed[rung])
        time_parts = with_speed(parts, float(speed_variance[rung]))
        rungs.append(
            RungFinding(
                rung=losses.rungs[rung],
                compute=math.exp(losses.log_reference + float(multiplier.compute_by_rung[rung])),
                num_pairs=int(paired[rung].any(axis=-1).sum()),
                gain=float(losses.gains(arm)[rung][paired[rung]].mean()),
                rho=_exponential(log_rho, parts),
                speed_ratio=math.exp(speed[rung]) if has_speed else None,
                wall_clock=_exponential(log_time, time_parts) if has_speed else None,
            )
        )
    parts = _parts(model, multiplier.form)
    log_tokens = multiplier.log_rho + float(tokens[with_pairs].mean())
    timed = with_pairs[np.isfinite(speed[with_pairs])]
    wall_clock = None
    if len(timed):
        log_time = multiplier.log_rho + float((tokens + speed)[timed].mean())
        wall_clock = _exponential(log_time, with_speed(parts, float(speed_variance[timed].sum()) / len(timed) ** 2))
    variance = float(np.mean(np.diagonal(model.own.covariance)))
    return ArmFinding(
        arm=losses.arms[arm],
        num_pairs=int(paired.any(axis=-1).sum()),
        rho=_exponential(multiplier.log_rho, parts),
        rho_without_floor=_exponential(bare.log_rho, _parts(model, bare.form)),
        token_multiplier=_exponential(log_tokens, parts),
        wall_clock=wall_clock,
        trend=trend,
        tendency=_tendency(trend),
        paired_sd=math.sqrt(2 * variance) if model.own.is_known else None,
        noise_source=model.own.source,
        rungs=tuple(rungs),
    )


def _tendency(trend: Estimate | None) -> str:
    if trend is None or trend.low is None or trend.high is None:
        return "undecided"
    return "shrinks" if trend.high < 0 else "grows" if trend.low > 0 else "undecided"


def _combination(
    losses: Losses, multipliers: list[Multiplier], models: list[NoiseModel], combined: str, singles: tuple[str, ...]
) -> Combination:
    places = {name: place for place, name in enumerate(losses.arms) if place > 0}
    for name in (combined, *singles):
        if name not in places:
            raise ValueError(f"the combination {combined!r} names {name!r}, which is no arm beside the baseline")
    if len(singles) < 2 or len({combined, *singles}) != len(singles) + 1:
        raise ValueError(f"a combination is one arm against at least two others, not {combined!r} against {singles!r}")
    whole = multipliers[places[combined] - 1]
    parts_of = [multipliers[places[name] - 1] for name in singles]
    product = math.fsum(part.log_rho for part in parts_of)
    owns = [models[places[name]].own for name in (combined, *singles)]
    own = models[0].own
    if all(noise.source == OWN_SEEDS for noise in owns):
        own = pooled_over_arms(owns, size=len(losses.horizons), source="seeds of these arms")
    model = NoiseModel(mean=models[0].mean, own=own, num_averaged=models[0].num_averaged)
    form = whole.form - sum(part.form for part in parts_of)
    ratio = _exponential(whole.log_rho - product, _parts(model, form))
    verdict = "undecided"
    if ratio.low is not None and ratio.high is not None:
        verdict = (
            "gains overlap"
            if ratio.high < 1
            else "gains reinforce"
            if ratio.low > 1
            else "gains multiply, within error"
        )
    return Combination(
        combined=combined,
        singles=singles,
        rho=math.exp(whole.log_rho),
        product=math.exp(product),
        ratio=ratio,
        verdict=verdict,
    )


def _curve(losses: Losses, solution: CurveSolution, model: NoiseModel, *, floor_is_given: bool) -> Curve:
    forms = losses.dense(solution.influence[[0, 1 + len(losses.horizons)]])
    shared, own = model.parts(forms)
    estimates = []
    for place, value in enumerate((solution.floor, solution.exponent)):
        parts = [
            (float(shared[place, place]), model.mean.degrees_of_freedom),
            (float(own[place, place]), model.own.degrees_of_freedom),
        ]
        estimates.append(_estimate(value, parts if model.mean.is_known else None))
    return Curve(
        floor=estimates[0],
        floor_is_given=floor_is_given,
        exponent=estimates[1],
        reference_compute=math.exp(losses.log_reference),
        reducible={name: math.exp(value) for name, value in zip(losses.horizons, solution.log_amplitudes)},
        residual_sd=math.sqrt(float(np.mean(solution.residuals**2))),
    )


def _spread(losses: Losses, arm: int, model: NoiseModel, parameter_forms: Array, log_rho_form: Array) -> Spread:
    anchors, anchor_forms = _anchors(losses, arm)
    shared, own = model.parts(np.concatenate([parameter_forms, log_rho_form[None], anchor_forms]))
    runs = [model.new_run(horizon) for horizon in range(model.mean.covariance.shape[0])]

    def finite(degrees: float) -> float | None:
        return None if math.isinf(degrees) else degrees

    return Spread(
        anchors=anchors,
        shared=tuple(tuple(map(float, row)) for row in shared),
        own=tuple(tuple(map(float, row)) for row in own),
        run_shared=tuple(run[0] for run in runs),
        run_own=tuple(run[1] for run in runs),
        shared_degrees=finite(model.mean.degrees_of_freedom),
        own_degrees=finite(model.own.degrees_of_freedom),
        is_known=model.mean.is_known and (model.own.is_known or not log_rho_form.any()),
    )


def _anchors(losses: Losses, arm: int) -> tuple[tuple[Anchor | None, ...], Array]:
    """The arm's largest rung by horizon, and the mean over its seeds as forms [horizon, arm, rung, seed, horizon]."""
    found: list[Anchor | None] = []
    forms = np.zeros((len(losses.horizons), *losses.loss.shape))
    for horizon in range(len(losses.horizons)):
        there = losses.present[arm, :, :, horizon]
        if not there.any():
            found.append(None)
            continue
        rung = int(np.flatnonzero(there.any(axis=1))[-1])
        seeds = there[rung]
        log_compute = float(losses.log_compute[arm, rung, seeds, horizon].mean())
        loss = float(losses.loss[arm, rung, seeds, horizon].mean())
        found.append(Anchor(loss=loss, compute=math.exp(log_compute + losses.log_reference)))
        forms[horizon, arm, rung, seeds, horizon] = 1 / seeds.sum()
    return tuple(found), forms
