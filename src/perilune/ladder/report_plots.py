"""The plots of a ladder's report: losses over compute with their fits, multipliers with intervals, logits."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict

from perilune.ladder import cost
from perilune.ladder.design import Cell
from perilune.ladder.evidence import Evidence
from perilune.ladder.findings import Estimate
from perilune.report import Plot, Series, Threshold

CURVE_POINTS = 40


def loss_plots(evidence: Evidence) -> list[Plot]:
    """One for each horizon: the mean of every arm's runs, the fit as a line, what was predicted as rings."""
    ladder, fit = evidence.ladder, evidence.fit
    colours = {arm.name: place for place, arm in enumerate(ladder.arms)}
    found: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for result in evidence.results:
        found[result.horizon, result.arm, result.rung].append((result.flops, result.loss))
    plots = []
    for horizon in ladder.ordered_horizons():
        series = []
        for arm in evidence.present_arms():
            runs = [run for (h, a, _), each in found.items() if (h, a) == (horizon.name, arm) for run in each]
            if not runs:
                continue
            means = [
                (each[0][0], statistics.fmean(loss for _, loss in each))
                for (h, a, _), each in sorted(found.items(), key=lambda entry: entry[1][0][0])
                if (h, a) == (horizon.name, arm)
            ]
            named = fit is None or arm not in fit.spreads or horizon.name not in fit.curve.reducible
            series.append(Series(name="", x=[c for c, _ in runs], y=[y for _, y in runs], faint=True, joined=False,
                                 colour=colours[arm]))  # fmt: skip
            series.append(
                Series(
                    name=arm if named else "",
                    x=[c for c, _ in means],
                    y=[y for _, y in means],
                    joined=named,
                    points=True,
                    colour=colours[arm],
                )
            )
            predicted = [
                each
                for each in (evidence.prediction.predicted if evidence.prediction else ())
                if (each.horizon, each.arm) == (horizon.name, arm)
            ]
            if predicted:
                series.append(
                    Series(
                        name="",
                        x=[each.compute for each in predicted],
                        y=[each.loss for each in predicted],
                        low=[math.nan if each.low is None else each.low for each in predicted],
                        high=[math.nan if each.high is None else each.high for each in predicted],
                        joined=False,
                        hollow=True,
                        colour=colours[arm],
                    )
                )
            if not named and fit is not None:
                ends = [c for c, _ in runs] + [each.compute for each in predicted]
                grid = _between(min(ends), max(ends))
                rho = 1.0 if arm == fit.baseline else fit.arm(arm).rho.value
                series.append(
                    Series(
                        name=arm,
                        x=grid,
                        y=[fit.curve.loss(horizon.name, c, rho=rho) for c in grid],
                        colour=colours[arm],
                    )
                )
        if series:
            plots.append(
                Plot(
                    title=f"Loss over compute, {horizon.tokens_per_parameter:g} tokens per parameter",
                    x_label="FLOPs of the run",
                    y_label="validation loss, nats per token",
                    series=series,
                    log_x=True,
                    caption="Dots are means over seeds, small ones single runs, lines the fit"
                    + (", rings with intervals what was predicted." if evidence.prediction else "."),
                )
            )
    return plots


def multiplier_plots(evidence: Evidence) -> list[Plot]:
    """rho of every arm, its time, and rho by rung."""
    fit = evidence.fit
    if fit is None or not fit.arms:
        return []
    order = [name for name in evidence.present_arms() if name != fit.baseline]
    arms = [fit.arm(name) for name in order if any(arm.arm == name for arm in fit.arms)]
    colours = {arm.name: place for place, arm in enumerate(evidence.ladder.arms)}
    names = [arm.arm.replace("_", "\n").replace("+", "\n+") for arm in arms]

    def forest(title: str, label: str, estimates: list[Estimate | None], caption: str) -> Plot:
        series = [
            _with_interval(place, estimate, colours[arm.arm])
            for place, (arm, estimate) in enumerate(zip(arms, estimates, strict=True))
            if estimate is not None
        ]
        return Plot(
            title=title,
            x_label="",
            y_label=label,
            series=series,
            x_names=names,
            thresholds=[Threshold(value=1.0, name=fit.baseline)],
            caption=caption,
        )

    plots = [
        forest(
            "What an arm is worth in compute",
            f"times the compute of {fit.baseline}",
            [arm.rho for arm in arms],
            "rho with its 95% interval, from paired seeds.",
        )
    ]
    if any(arm.wall_clock is not None for arm in arms):
        plots.append(
            forest(
                "What an arm is worth in time",
                f"times the time of {fit.baseline}",
                [arm.wall_clock for arm in arms],
                "The multiplier of tokens times the measured ratio of tokens a second.",
            )
        )
    if any(len(arm.rungs) > 1 for arm in arms):
        plots.append(
            Plot(
                title="The multiplier over compute",
                x_label="FLOPs of the baseline's run",
                y_label=f"times the compute of {fit.baseline}",
                series=[
                    Series(
                        name=arm.arm,
                        # A little apart, so that intervals of different arms do not hide each other.
                        x=[rung.compute * 1.02 ** (place - len(arms) / 2) for rung in arm.rungs],
                        y=[rung.rho.value for rung in arm.rungs],
                        low=[_or_nan(rung.rho.low) for rung in arm.rungs],
                        high=[_or_nan(rung.rho.high) for rung in arm.rungs],
                        points=True,
                        colour=colours[arm.arm],
                    )
                    for place, arm in enumerate(arms)
                ],
                log_x=True,
                thresholds=[Threshold(value=1.0, name=fit.baseline)],
                caption="Each rung alone; a rising line grows with scale.",
            )
        )
    return plots


def logit_plots(evidence: Evidence) -> list[Plot]:
    """Largest attention logits over the run, where arms differ in QK-Clip or it has clipped; the first seed's."""
    ladder = evidence.ladder
    taus = {Cell(rung=ladder.rungs[0], arm=arm, seed=0).config().optimizer.qk_clip_tau for arm in ladder.arms}
    if len(taus) < 2 and not any(result.clipped_heads for result in evidence.results):
        return []
    plots, longest = [], cost.horizon_names(ladder)[-1]
    for rung in ladder.rungs:
        series, are_bounds = [], False
        for place, arm in enumerate(ladder.arms):
            runs = [
                r
                for r in evidence.results
                if (r.rung, r.arm, r.horizon) == (rung.name, arm.name, longest) and r.max_logits
            ]
            if runs:
                first = min(runs, key=lambda run: run.seed)
                are_bounds |= first.max_logits_are_bounds
                steps, values = zip(*first.max_logits, strict=True)
                series.append(Series(name=arm.name, x=list(steps), y=list(values), colour=place))
        if series:
            bounds = " Some are upper bounds: below the threshold a GPU computes no more." if are_bounds else ""
            plots.append(
                Plot(
                    title=f"Largest attention logit, {rung.name}",
                    x_label="step",
                    y_label="logit",
                    series=series,
                    log_y=True,
                    thresholds=[Threshold(value=tau, name=f"tau {tau:g}") for tau in sorted(filter(None, taus))],
                    caption="Over all layers and heads, the maximum of every interval of steps." + bounds,
                )
            )
    return plots


def accuracy_plots(evidence: Evidence) -> list[Plot]:
    """Of probes: right answers of every arm over the rungs, mean over seeds."""
    ladder, longest = evidence.ladder, cost.horizon_names(evidence.ladder)[-1]
    series = []
    for place, arm in enumerate(ladder.arms):
        means = {}
        for number, rung in enumerate(ladder.rungs):
            values = [
                r.accuracy
                for r in evidence.results
                if (r.rung, r.arm, r.horizon) == (rung.name, arm.name, longest) and r.accuracy is not None
            ]
            if values:
                means[number] = statistics.fmean(values)
        if means:
            series.append(Series(name=arm.name, x=list(means), y=list(means.values()), points=True, colour=place))
    names = [rung.name for rung in ladder.rungs]
    title, label = "Right answers", "share of answers"
    return (
        [Plot(title=title, x_label="rung", y_label=label, series=series, x_names=names, from_zero=True)]
        if series
        else []
    )


def sweep_plots(evidence: Evidence) -> list[Plot]:
    """Losses of the sweeps, one plot for each arm."""
    found: dict[str, list[Series]] = defaultdict(list)
    colours = {rung.name: place for place, rung in enumerate(evidence.ladder.rungs)}
    for best in (*evidence.tuned.best, *evidence.tuned.checks):
        pairs = [(lr, loss) for lr, loss in best.tried if loss is not None]
        if pairs and best.rung in colours:
            found[best.arm].append(
                Series(
                    name=best.rung,
                    x=[lr for lr, _ in pairs],
                    y=[loss for _, loss in pairs],
                    points=True,
                    colour=colours[best.rung],
                )
            )
    return [
        Plot(
            title=f"Learning rates of {arm}",
            x_label="learning rate",
            y_label="validation loss, nats per token",
            series=series,
            log_x=True,
        )
        for arm, series in found.items()
    ]


def _with_interval(place: int, estimate: Estimate, colour: int) -> Series:
    return Series(
        name="",
        x=[place],
        y=[estimate.value],
        low=[_or_nan(estimate.low)],
        high=[_or_nan(estimate.high)],
        joined=False,
        colour=colour,
    )


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _between(low: float, high: float) -> list[float]:
    """Points at equal ratios."""
    step = math.log(high / low) / (CURVE_POINTS - 1)
    return [low * math.exp(step * place) for place in range(CURVE_POINTS)]
