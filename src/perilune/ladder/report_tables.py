"""The rows of a ladder's report, the same for the page and for Markdown."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perilune.ladder import cost
from perilune.ladder.design import Cell
from perilune.ladder.evidence import Evidence
from perilune.ladder.findings import Estimate
from perilune.ladder.prediction import held_out_results, is_older
from perilune.ladder.sweep import Best, taken
from perilune.report.plots import compact
from perilune.train.config_file import differences, to_plain

COPIED = "copies of"
_LADDERS_OWN = ("name:", "seed:")


@dataclass(frozen=True, kw_only=True)
class Rows:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    text: str = ""
    is_long: bool = False
    """Folded on the page."""


def shown(estimate: Estimate | None, form: str = ".3f") -> str:
    """A value with its interval, which no line break takes apart."""
    if estimate is None:
        return "-"
    value = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low:{form}},\u00a0{estimate.high:{form}}]"


def multipliers(evidence: Evidence) -> Rows | None:
    fit = evidence.fit
    if fit is None or not fit.arms:
        return None
    by_name = {arm.arm: arm for arm in fit.arms}
    rows = [
        (
            name,
            shown(arm.rho),
            shown(arm.rho_without_floor),
            shown(arm.token_multiplier),
            shown(arm.wall_clock),
            f"{shown(arm.trend, '+.3f')} {arm.tendency}",
            arm.num_pairs,
        )
        for name in evidence.present_arms()
        if (arm := by_name.get(name)) is not None
    ]
    curve = fit.curve
    return Rows(
        title="Multipliers",
        columns=("arm", "rho (compute)", "rho with E = 0", "tokens", "wall-clock", "d ln rho / d ln C", "pairs"),
        rows=tuple(rows),
        text=(
            f"How many times the compute, tokens and time of {fit.baseline} an arm is worth, with 95% intervals. "
            f"L = {curve.floor.value:.3f} + A (rho C)^-{curve.exponent.value:.3f}, one A for each horizon; "
            f"the curve leaves {curve.residual_sd:.4f} nats. The trend says whether rho grows or shrinks with compute."
        ),
    )


def by_rung(evidence: Evidence) -> Rows | None:
    fit = evidence.fit
    if fit is None or not fit.arms:
        return None
    rows = [
        (
            arm.arm,
            rung.rung,
            f"{rung.compute:.3g}",
            f"{rung.gain:+.4f}",
            shown(rung.rho),
            "-" if rung.speed_ratio is None else f"{rung.speed_ratio:.3f}",
            shown(rung.wall_clock),
            rung.num_pairs,
        )
        for arm in fit.arms
        for rung in arm.rungs
    ]
    return Rows(
        title="Multipliers by rung",
        columns=("arm", "rung", "FLOPs", "gain in nats", "rho", "tokens/s ratio", "wall-clock", "pairs"),
        rows=tuple(rows),
        text="Each rung alone, from the same curve. The gain is the mean paired difference, baseline less arm.",
        is_long=True,
    )


def combinations(evidence: Evidence) -> Rows | None:
    if evidence.fit is None or not evidence.fit.combinations:
        return None
    rows = [
        (c.combined, " x ".join(c.singles), f"{c.rho:.3f}", f"{c.product:.3f}", shown(c.ratio), c.verdict)
        for c in evidence.fit.combinations
    ]
    return Rows(
        title="Do the gains multiply?",
        columns=("together", "alone", "rho together", "product of rho", "ratio", "verdict"),
        rows=tuple(rows),
        text="A ratio of 1 says that gains multiply, below 1 that they overlap.",
    )


def losses(evidence: Evidence) -> Rows:
    """Mean loss by rung and horizon, and the gain over the baseline with the same seeds."""
    found: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    for result in evidence.results:
        found[result.rung, result.horizon, result.arm][result.seed] = result.loss
    ladder, arms = evidence.ladder, evidence.present_arms()
    rows = []
    for rung in ladder.rungs:
        for horizon in cost.horizon_names(ladder):
            base = found[rung.name, horizon, ladder.baseline.name]
            cells = []
            for arm in arms:
                own = found[rung.name, horizon, arm]
                text = f"{statistics.fmean(own.values()):.4f}" if own else "-"
                pairs = [base[seed] - own[seed] for seed in own if seed in base]
                cells.append(
                    text if arm == ladder.baseline.name or not pairs else f"{text} ({statistics.fmean(pairs):+.4f})"
                )
            if any(cell != "-" for cell in cells):
                rows.append((rung.name + (" (held out)" if rung.is_held_out else ""), horizon, *cells))
    return Rows(
        title="Losses",
        columns=("rung", "horizon", *arms),
        rows=tuple(rows),
        text=f"Validation, nats per token, mean over seeds; in brackets the gain over {ladder.baseline.name}.",
    )


def accuracies(evidence: Evidence) -> Rows | None:
    """Of probes, at the longest horizon: right answers, and rows without a wrong one."""
    longest = cost.horizon_names(evidence.ladder)[-1]
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for result in evidence.results:
        if result.horizon == longest and result.accuracy is not None:
            found[result.rung, result.arm].append((result.accuracy, result.exact_match or 0.0))
    if not found:
        return None
    arms = evidence.present_arms()
    rows = [
        (
            rung.name,
            *(
                f"{statistics.fmean(a for a, _ in each):.3f} ({statistics.fmean(m for _, m in each):.3f})"
                if (each := found.get((rung.name, arm)))
                else "-"
                for arm in arms
            ),
        )
        for rung in evidence.ladder.rungs
    ]
    return Rows(
        title="Accuracy",
        columns=("rung", *arms),
        rows=tuple(rows),
        text="Share of the answers that are right; in brackets that of rows without a wrong one. Mean over seeds.",
    )


def downstream(evidence: Evidence) -> Rows | None:
    """At the longest horizon: copying on every rung, kinds of text on the largest that has any."""
    longest = cost.horizon_names(evidence.ladder)[-1]
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for result in evidence.results:
        if result.horizon == longest:
            for length, share in result.copying.items():
                found[result.rung, f"{COPIED} {length} tokens", result.arm].append(share)
            for domain, bits in result.domains.items():
                found[result.rung, domain, result.arm].append(bits)
    if not found:
        return None
    measured = {rung for rung, _, _ in found}
    largest = [rung.name for rung in evidence.ladder.rungs if rung.name in measured][-1]
    rows = []
    for rung, what in dict.fromkeys((rung, what) for rung, what, _ in found):
        is_copy = what.startswith(COPIED)
        if is_copy or rung == largest:
            cells = [found.get((rung, what, arm)) for arm in evidence.present_arms()]
            form = ".3f" if is_copy else ".4f"
            rows.append((rung, what, *(format(statistics.fmean(cell), form) if cell else "-" for cell in cells)))
    order = [rung.name for rung in evidence.ladder.rungs]
    return Rows(
        title="Beside the loss",
        columns=("rung", "what", *evidence.present_arms()),
        rows=tuple(sorted(rows, key=lambda row: order.index(row[0]))),
        text=(
            f"After {longest}, mean over seeds: bits per byte of the kinds of held-out text (lower is better), and the "
            "share of random tokens that are right the second time they come. Older cells have none."
        ),
    )


def held_out(evidence: Evidence) -> Rows | None:
    prediction = evidence.prediction
    if prediction is None:
        return None
    measured = {(o.predicted.rung, o.predicted.arm, o.predicted.horizon): o for o in evidence.outcomes}
    rows = []
    for each in prediction.predicted:
        outcome = measured.get((each.rung, each.arm, each.horizon))
        inside = None if outcome is None else outcome.is_inside
        rows.append(
            (
                each.rung,
                each.horizon,
                each.arm,
                f"{each.loss:.4f}",
                "-" if each.low is None or each.high is None else f"{each.low:.4f} to {each.high:.4f}",
                "not run yet" if outcome is None else f"{outcome.measured:.4f}",
                "-" if outcome is None else f"{outcome.error:+.4f}",
                "-" if inside is None else "yes" if inside else "no",
                "-" if outcome is None else outcome.num_runs,
            )
        )
    held_out = held_out_results(evidence.ladder, evidence.results)
    when = "before" if is_older(prediction, held_out) else "some of it after"
    return Rows(
        title="The held-out rung, predicted",
        columns=("rung", "horizon", "arm", "predicted", "95% interval", "measured", "error", "inside", "runs"),
        rows=tuple(rows),
        text=(
            f"Written {prediction.date} at commit {prediction.commit or 'not known'}, from {len(prediction.losses)} "
            f"results of the other rungs, {when} this rung was run; the interval is that of a single run."
        ),
    )


def tuning(evidence: Evidence) -> Rows:
    """Which learning rate every arm has, and how it was found."""
    recipe, tuned = evidence.recipe, evidence.tuned
    sweeps = {(best.rung, best.arm): best for best in (*tuned.checks, *tuned.best)}
    rows = []
    for arm in recipe.arms:
        for rung in recipe.rungs:
            lr, source = dataclasses.astuple(taken(recipe, tuned, rung, arm))
            best = sweeps.get((rung.name, arm.name))
            if best is not None and best in tuned.checks:
                source += ", swept after it was run"
            rows.append((arm.name, rung.name, f"{lr:.4g}", source, _tried(best), _best(best), _edge(best)))
    return Rows(
        title="What was tuned",
        columns=("arm", "rung", "lr used", "from", "tried", "best", "at the edge"),
        rows=tuple(rows),
        text=(
            "Learning rates alone, on each rung, to the shortest horizon, with one seed; the best by a parabola in "
            "log lr. An arm without a sweep takes that of the first arm with the same optimizer. Nothing else is tuned."
        ),
    )


def _tried(best: Best | None) -> str:
    return "-" if best is None else f"{best.tried[0][0]:.3g} to {best.tried[-1][0]:.3g} ({len(best.tried)})"


def _best(best: Best | None) -> str:
    if best is None:
        return "-"
    if best.low is None or best.high is None:
        return f"{best.lr:.3g}"
    return f"{best.lr:.3g} [{best.low:.3g}, {best.high:.3g}]"


def _edge(best: Best | None) -> str:
    return "-" if best is None else "YES" if best.at_edge else "no"


def cells(evidence: Evidence) -> Rows:
    order = {rung.name: place for place, rung in enumerate(evidence.ladder.rungs)}
    arms = {arm.name: place for place, arm in enumerate(evidence.ladder.arms)}
    found = sorted(evidence.results, key=lambda r: (order[r.rung], r.tokens, arms[r.arm], r.seed))
    rows = [
        (
            r.rung,
            r.horizon,
            r.arm,
            r.seed,
            f"{r.loss:.4f}",
            "-" if r.bits_per_byte is None else f"{r.bits_per_byte:.4f}",
            compact(r.parameters, 3),
            compact(r.tokens, 3),
            f"{r.epochs:.2f}",
            f"{r.flops:.3g}",
            "-" if r.tokens_per_s is None else compact(r.tokens_per_s, 3) + ("" if r.ran_alone else " shared"),
            f"{r.lr:.3g}",
            r.borrowed_from or "-",
        )
        for r in found
    ]
    return Rows(
        title="Every cell",
        columns=(
            "rung", "horizon", "arm", "seed", "loss", "bits/byte", "parameters", "tokens", "epochs", "FLOPs",
            "tokens/s", "lr", "run by",
        ),
        rows=tuple(rows),
        text="Speeds of runs that shared the card are marked; they take no part in the wall-clock multiplier.",
        is_long=True,
    )  # fmt: skip


def rungs(evidence: Evidence) -> Rows:
    ladder = evidence.ladder
    rows = []
    for rung in ladder.rungs:
        config = Cell(rung=rung, arm=ladder.baseline, seed=ladder.seeds[0]).config()
        costs, model = cost.cost(ladder, rung, ladder.baseline), config.model
        rows.append(
            (
                rung.name + (" (held out)" if rung.is_held_out else ""),
                model.hidden_size,
                model.num_hidden_layers,
                " ".join(model.layer_pattern()),
                compact(costs.parameters, 3),
                " / ".join(compact(tokens, 3) for tokens in costs.tokens),
                compact(cost.tokens_per_step(config), 3),
                config.data.seq_len,
                f"{config.optimizer.lr:.3g}",
            )
        )
    return Rows(
        title=f"Rungs, as {ladder.baseline.name}",
        columns=("rung", "width", "depth", "layers", "parameters", "tokens", "batch", "context", "lr"),
        rows=tuple(rows),
        text="Parameters without the embedding; tokens for each horizon, the same for all arms; batch in tokens.",
    )


def arms(evidence: Evidence) -> Rows:
    """What each arm changes, on the first rung."""
    ladder = evidence.ladder
    rung = ladder.rungs[0]
    base = to_plain(Cell(rung=rung, arm=ladder.baseline, seed=0).config())
    own = to_plain(rung.config)
    rows = [(ladder.baseline.name, "baseline", _listed(_changes(own, base)) or "the recipe as it is")]
    for arm in ladder.arms[1:]:
        plain = to_plain(Cell(rung=rung, arm=arm, seed=0).config())
        rows.append((arm.name, "arm", _listed(_changes(base, plain)) or "nothing"))
    return Rows(
        title="Arms, as differences",
        columns=("arm", "", "from the recipe, or from the baseline"),
        rows=tuple(rows),
        text=f"On rung {rung.name}; learning rates of other rungs stand under tuning.",
    )


def _changes(before: object, after: object) -> list[str]:
    quiet = ("trainer.report", "trainer.tensorboard", "trainer.tracker", "trainer.sample_prompts")
    return [
        line for line in differences(before, after) if not line.startswith(_LADDERS_OWN) and not line.startswith(quiet)
    ]


def _listed(lines: Iterable[str]) -> str:
    return "; ".join(lines)


def all_rows(evidence: Evidence) -> list[Rows]:
    """In the order of the page."""
    found = (
        accuracies(evidence),
        multipliers(evidence),
        combinations(evidence),
        held_out(evidence),
        losses(evidence),
        downstream(evidence),
        tuning(evidence),
        arms(evidence),
        rungs(evidence),
        by_rung(evidence),
        cells(evidence),
    )
    return [rows for rows in found if rows is not None]


def as_markdown(rows: Rows) -> str:
    def line(cells: Sequence[object]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    table = [line(rows.columns), "|" + "---|" * len(rows.columns), *(line(row) for row in rows.rows)]
    return "\n".join([f"## {rows.title}", "", *([rows.text, ""] if rows.text else []), *table])
