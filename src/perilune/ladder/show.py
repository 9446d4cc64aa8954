"""What the person at the terminal sees of a ladder: the plan, a bar over all cells, the losses."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from perilune.ladder import cost
from perilune.ladder.design import Cell, Ladder
from perilune.ladder.findings import Estimate, LadderFit
from perilune.ladder.plan import Plan
from perilune.ladder.run import Result
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
            "not known" if rung.seconds is None else _duration(rung.seconds),
        )
    console.print(table)
    flops = sum(rung.flops for rung in plan.rungs)
    times = [rung.seconds for rung in plan.rungs]
    known = [each for each in times if each is not None]
    total = f"{_duration(sum(known))}" if len(known) == len(times) else "not known: run a rung, or plan --measure"
    console.print(f"in all {flops:.2g} FLOPs, time {total}")


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


def print_fit(fit: LadderFit, console: Console | None = None) -> None:
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
    for note in fit.notes:
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
        if cell != self._current:
            self._current = cell
            place = f"{self._cells.index(cell) + 1} of {len(self._cells)}" if cell in self._cells else ""
            if self._bar is not None:
                self._bar.update(self._task, description=f"cell {place}: {cell}")
            else:
                self.console.print(f"cell {place}: {cell}", markup=False)
        if self._bar is not None:
            self._bar.advance(self._task, tokens)
