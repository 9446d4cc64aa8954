"""What the person at the terminal sees of a ladder: the plan, a bar over all cells, the losses."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from perilune.ladder import cost
from perilune.ladder.design import Cell, Ladder
from perilune.ladder.findings import Estimate, LadderFit
from perilune.ladder.plan import Plan
from perilune.ladder.prediction import Prediction
from perilune.ladder.results import Result
from perilune.ladder.rounds import Round
from perilune.ladder.sweep import Tuned, taken
from perilune.report.plots import compact


def print_plan(plan: Plan, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    table = Table(
        title=f"ladder {plan.ladder}: {plan.num_cells} cells, {compact(plan.unique_tokens, 3)} unique tokens", box=None
    )
    for name in ("rung", "parameters", "tokens", "steps", "epochs", "FLOPs, all", "memory", "time, all"):
        table.add_column(name, justify="left" if name == "rung" else "right")
    for rung in plan.rungs:
        table.add_row(
            rung.rung + (" (held out)" if rung.is_held_out else ""),
            compact(rung.parameters, 3),
            " / ".join(compact(tokens, 3) for tokens in rung.tokens),
            " / ".join(f"{steps:,}" for steps in rung.steps),
            f"{rung.epochs:.2f}",
            f"{rung.flops:.2g}",
            f"{rung.memory_bytes / 1e9:.2g} GB",
            "not known" if rung.seconds is None else "~" * rung.is_assumed + _duration(rung.seconds),
        )
    console.print(table)
    flops = sum(rung.flops for rung in plan.rungs)
    times = [rung.seconds for rung in plan.rungs]
    known = [each for each in times if each is not None]
    total = f"{_duration(sum(known))}" if len(known) == len(times) else "not known: run a rung, or plan --measure"
    console.print(f"in all {flops:.2g} FLOPs, time {total}")
    if any(rung.is_assumed for rung in plan.rungs):
        console.print("~ assumed for an H200: measure with `perilune ladder speed`")
    share = plan.repeated_tokens / max(1, plan.unique_tokens + plan.repeated_tokens)
    if share >= 0.001:
        console.print(f"{share:.1%} of the text stands in it more than once and counts once")


def print_rounds(rounds: Sequence[Round], *, num_workers: int, seconds: float, console: Console | None = None) -> None:
    """How a ladder is cut into rounds."""
    console = console or Console(highlight=False)
    total = sum(each.seconds for each in rounds)
    console.print(
        f"{len(rounds)} rounds of at most {_duration(seconds)}, {num_workers} cells at a time: {_duration(total)}"
    )
    for number, each in enumerate(rounds, start=1):
        late = " (longer than a round)" if each.seconds > seconds else ""
        console.print(f"  {number}. {_duration(each.seconds)}{late}: {', '.join(each.cells)}", markup=False)


def print_tuned(ladder: Ladder, tuned: Tuned, console: Console | None = None) -> None:
    """What the sweeps found, and the learning rate of every arm."""
    console = console or Console(highlight=False)
    for kind, found in (("", tuned.best), (" (a check: the arm has run already, and stays)", tuned.checks)):
        for best in found:
            interval = "" if best.low is None or best.high is None else f" [{best.low:.3g}, {best.high:.3g}]"
            edge = ", AT THE EDGE of what was tried" if best.at_edge else ""
            tried = ", ".join(f"{lr:.3g}: {'diverged' if loss is None else f'{loss:.4f}'}" for lr, loss in best.tried)
            console.print(
                f"{best.rung} {best.arm}: lr {best.lr:.3g}{interval}{edge}{kind}; {tried}", markup=False, soft_wrap=True
            )
    table = Table(title="learning rates as arms take them", box=None)
    for name in ("rung", *(arm.name for arm in ladder.arms)):
        table.add_column(name)
    for rung in ladder.rungs:
        shown = [taken(ladder, tuned, rung, arm) for arm in ladder.arms]
        table.add_row(rung.name, *(f"{each.lr:.3g} ({each.source})" for each in shown))
    console.print(table)


def print_prediction(prediction: Prediction, path: Path, console: Console | None = None) -> None:
    console = console or Console(highlight=False)
    for each in prediction.predicted:
        interval = "" if each.low is None or each.high is None else f" [{each.low:.4f}, {each.high:.4f}]"
        console.print(f"{each.rung} {each.horizon} {each.arm}: {each.loss:.4f}{interval}", markup=False)
    console.print(f"prediction: {path} (commit it before the held-out rung is run)", markup=False, soft_wrap=True)


def print_results(ladder: Ladder, results: Sequence[Result], console: Console | None = None) -> None:
    """Mean validation loss by rung, horizon and arm, and how much lower than the baseline with the same seeds."""
    console = console or Console(highlight=False)
    losses: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    for result in results:
        losses[result.rung, result.horizon, result.arm][result.seed] = result.loss
    table = Table(
        title=f"ladder {ladder.name}: validation loss in nats, and gain over {ladder.baseline.name}", box=None
    )
    for name in ("rung", "horizon", *(arm.name for arm in ladder.arms)):
        table.add_column(name, justify="left" if name in ("rung", "horizon") else "right")
    for rung in ladder.rungs:
        for horizon in cost.horizon_names(ladder):
            base = losses[rung.name, horizon, ladder.baseline.name]
            shown = [_loss(base, losses[rung.name, horizon, arm.name], arm is ladder.baseline) for arm in ladder.arms]
            table.add_row(rung.name, horizon, *shown)
    console.print(table)


def _loss(base: dict[int, float], own: dict[int, float], is_baseline: bool) -> str:
    if not own:
        return "-"
    mean = f"{statistics.fmean(own.values()):.4f}"
    pairs = [base[seed] - own[seed] for seed in own if seed in base]
    return mean if is_baseline or not pairs else f"{mean} ({statistics.fmean(pairs):+.4f})"


def print_fit(fit: LadderFit, *, notes: Sequence[str] = (), console: Console | None = None) -> None:
    """The curve, and every arm's multipliers with their 95% intervals."""
    console = console or Console(highlight=False)
    curve = fit.curve
    console.print(
        f"L = {curve.floor.value:.3f} + A (rho C)^-{curve.exponent.value:.3f}, scatter {curve.residual_sd:.4f} nats; "
        f"baseline {fit.baseline}"
    )
    console.print("times the baseline's compute that an arm is worth, with 95% intervals:")
    for arm in fit.arms:
        console.print(f"{arm.arm}")
        lines = {
            "rho": _estimate(arm.rho, ".3f"),
            "rho with E = 0": _estimate(arm.rho_without_floor, ".3f"),
            "tokens": _estimate(arm.token_multiplier, ".3f"),
            "wall-clock": _estimate(arm.wall_clock, ".3f"),
            "change of ln rho per e-fold of C": f"{_estimate(arm.trend, '+.3f')} ({arm.tendency})",
            "noise": f"{arm.noise_source}, {arm.num_pairs} pairs",
        }
        for name, text in lines.items():
            console.print(f"  {name:<34}{text}", markup=False)
    for combination in fit.combinations:
        console.print(f"{combination.combined}: {combination.verdict}", markup=False)
    for note in notes or fit.notes:
        console.print(f"note: {note}", markup=False)


def _estimate(estimate: Estimate | None, form: str) -> str:
    if estimate is None:
        return "-"
    value = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{estimate.low:{form}}, {estimate.high:{form}}]"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


class LadderProgress:
    """One bar over the tokens of all cells that are left. Plain lines, one a cell, away from a terminal."""

    def __init__(
        self, ladder: Ladder, cells: Sequence[Cell], *, quiet: bool = False, console: Console | None = None
    ) -> None:
        self.console = console or Console(file=sys.stderr, highlight=False, quiet=quiet)
        self._cells = [cell.name for cell in cells]
        self._current: str | None = None
        self._told: set[str] = set()  # side by side, cells come in turns; a line for each is enough
        self._bar: Progress | None = None
        total = sum(cost.cost(ladder, cell.rung, cell.arm).trained_tokens for cell in cells)
        if self.console.is_terminal and not quiet and cells:
            columns = (BarColumn(bar_width=16), TaskProgressColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, TimeRemainingColumn(), TextColumn("left"), console=self.console)
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> LadderProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, cell: str, tokens: int) -> None:
        if cell != self._current and (self._bar is not None or cell not in self._told):
            self._current = cell
            self._told.add(cell)
            place = f"{self._cells.index(cell) + 1} of {len(self._cells)}" if cell in self._cells else ""
            if self._bar is not None:
                self._bar.update(self._task, description=f"cell {place}: {cell}")
            else:
                self.console.print(f"cell {place}: {cell}", markup=False)
        if self._bar is not None:
            self._bar.advance(self._task, tokens)
