"""Learning rates of a ladder, found by a sweep on every rung, and the rule by which arms take them.

A sweep trains an arm to the shortest horizon with learning rates lr x 2^k, k = -1, 0, 1, around the recipe's lr, and
goes on beyond the best one while that is at an edge, up to seven in all. The best lr is where the parabola in log lr
through the best point and its two neighbours has its minimum:

    x* = x_0 + h (L_- - L_+) / (2 (L_- - 2 L_0 + L_+))        h = ln 2; its interval by the delta method from the noise

RULE by which an arm takes a learning rate:
  1. its own sweep's best on that rung;
  2. on a rung without a sweep (the held-out one): the recipe's value times the geometric mean of best / recipe over
     the arm's swept rungs;
  3. an arm without a sweep: that of the first arm that has one, the same optimizer and the same recipe value;
  4. else the recipe's value, and the report says that it was not tuned.

    LADDER/sweep/results/    results of the sweep's own cells, RUNG+ARM.lrVALUE+SEED, kept like any others
    LADDER/sweep/diverged/   cells whose numbers broke: worse than any loss
    LADDER/tuned.json        what the sweeps found. An entry that would change a run which has results already is kept
                             as a check: the report compares, the arm stays as it was run
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perilune.ladder.design import Arm, Cell, Ladder, Rung
from perilune.ladder.results import Result, read_results, write_json
from perilune.ladder.run import run_cell
from perilune.train import TrainingStopped
from perilune.train.run_folder import RunError

FOLDER, FILE, DIVERGED = "sweep", "tuned.json", "diverged"
RATIO = 2.0
FIRST = (-1, 0, 1)
MAX_POINTS = 7
ASSUMED_SD = 0.003  # nats between runs that share seed and data; larger when measured
QUANTILE = 1.96

OWN, SCALED, NOT_TUNED = "own sweep", "own sweep of other rungs", "not tuned"


@dataclass(frozen=True, kw_only=True)
class Best:
    """What the sweep of an arm on a rung found."""

    rung: str
    arm: str
    lr: float
    low: float | None
    """95% interval; None where no parabola could be laid through the best point."""
    high: float | None
    at_edge: bool
    """The best learning rate tried has no worse one on one side: the true best may lie beyond."""
    tried: tuple[tuple[float, float | None], ...]
    """Learning rate and loss, in order; None: it diverged."""
    recipe_lr: float
    noise: str


@dataclass(frozen=True, kw_only=True)
class Tuned:
    best: tuple[Best, ...] = ()
    checks: tuple[Best, ...] = ()
    """Sweeps of arms that had run already."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The learning rate of an arm on a rung, and where it comes from."""

    lr: float
    source: str


# Cells of a sweep -----------------------------------------------------------------------------------------------------


def sweep_ladder(ladder: Ladder) -> Ladder:
    """The ladder's rungs at the shortest horizon; its arms are there for their sizes and starts."""
    return replace(ladder, horizons=ladder.ordered_horizons()[:1], combinations={}, seeds=ladder.seeds[:1])


def recipe_lr(rung: Rung, arm: Arm) -> float:
    return Cell(rung=rung, arm=arm, seed=0).config().optimizer.lr


def grid_lr(recipe: float, step: int) -> float:
    """Rounded to what its cell's name can hold."""
    return float(f"{recipe * RATIO**step:.4g}")


def varied_name(arm: Arm, lr: float) -> str:
    return f"{arm.name}.lr{lr:.4g}"


def sweep_cell(rung: Rung, arm: Arm, seed: int, step: int) -> Cell:
    lr = grid_lr(recipe_lr(rung, arm), step)
    # Values for a rung go over those for all of them.
    own = dict(arm.by_rung.get(rung.name, {})) | {"optimizer.lr": lr}
    varied = Arm(name=varied_name(arm, lr), changes=arm.changes, by_rung={rung.name: own})
    return Cell(rung=rung, arm=varied, seed=seed)


def next_cells(ladder: Ladder, arms: Sequence[Arm], folder: Path) -> list[Cell]:
    """What the sweeps of these arms need now, smallest rung first; empty when all are done."""
    losses = read_losses(folder)
    found = []
    for rung in ladder.rungs:
        if not rung.is_held_out:
            for arm in arms:
                for step in wanted_steps(rung, arm, ladder.seeds[0], losses):
                    found.append(sweep_cell(rung, arm, ladder.seeds[0], step))
    return found


def wanted_steps(rung: Rung, arm: Arm, seed: int, losses: Mapping[str, float]) -> list[int]:
    steps = known_steps(rung, arm, seed, losses)
    if missing := [step for step in FIRST if step not in steps]:
        return missing
    best = min(steps, key=lambda step: (steps[step], abs(step)))
    if len(steps) >= MAX_POINTS or math.isinf(steps[best]):
        return []
    return [best - 1] if best == min(steps) else [best + 1] if best == max(steps) else []


def known_steps(rung: Rung, arm: Arm, seed: int, losses: Mapping[str, float]) -> dict[int, float]:
    """Losses of the grid's points that were tried, in order of the learning rate."""
    recipe = recipe_lr(rung, arm)
    names = {
        step: f"{rung.name}+{varied_name(arm, grid_lr(recipe, step))}+{seed}"
        for step in range(1 - MAX_POINTS, MAX_POINTS)
    }
    return {step: losses[name] for step, name in names.items() if name in losses}


def find_cell(ladder: Ladder, name: str) -> Cell | None:
    """The cell that a name means, for a process that runs one of them."""
    for rung in ladder.rungs:
        for arm in ladder.arms:
            if name.startswith(f"{rung.name}+{arm.name}.lr"):
                for step in range(1 - MAX_POINTS, MAX_POINTS):
                    if (cell := sweep_cell(rung, arm, ladder.seeds[0], step)).name == name:
                        return cell
    return None


def run_sweep_cell(
    ladder: Ladder, cell: Cell, folder: Path, *, scratch: Path | None = None, commit: str | None = None, **options
) -> None:  # fmt: skip
    """Train one cell of a sweep. A run whose numbers break is an answer too."""
    try:
        run_cell(
            sweep_ladder(ladder), cell, folder / FOLDER, ran_alone=False, scratch=scratch, commit=commit, **options
        )
    except TrainingStopped as stopped:
        write_json(folder / FOLDER / DIVERGED / f"{cell.name}.json", {"reason": str(stopped)})


def read_losses(folder: Path) -> dict[str, float]:
    """By cell; infinite where it diverged."""
    found = {path.stem: math.inf for path in (folder / FOLDER / DIVERGED).glob("[!.]*.json")}
    return found | {f"{r.rung}+{r.arm}+{r.seed}": r.loss for r in read_results(folder / FOLDER)}


# What they found ------------------------------------------------------------------------------------------------------


def best_of(rung: Rung, arm: Arm, steps: Mapping[int, float], *, seed_sd: float | None) -> Best:
    """The parabola's minimum around the best of the learning rates tried."""
    best = min(steps, key=lambda step: (steps[step], abs(step)))
    around = [steps.get(best + offset, math.nan) for offset in (-1, 0, 1)]
    recipe = recipe_lr(rung, arm)
    lr, low, high = grid_lr(recipe, best), None, None
    sd = ASSUMED_SD if seed_sd is None else seed_sd
    if all(math.isfinite(loss) for loss in around):
        offset, error = parabola(*around, sd=sd)
        centre = math.log(lr) + offset * math.log(RATIO)
        half = QUANTILE * error * math.log(RATIO)
        lr, low, high = (float(f"{math.exp(centre + shift):.4g}") for shift in (0.0, -half, half))
    return Best(
        rung=rung.name,
        arm=arm.name,
        lr=lr,
        low=low,
        high=high,
        at_edge=best in (min(steps), max(steps)),
        tried=tuple((grid_lr(recipe, k), loss if math.isfinite(loss) else None) for k, loss in steps.items()),
        recipe_lr=recipe,
        noise=f"{sd:g} nats, {'assumed' if seed_sd is None else 'given'}",
    )


def parabola(left: float, middle: float, right: float, *, sd: float) -> tuple[float, float]:
    """Where the minimum lies, in steps from the middle, and its standard error; `middle` is the lowest."""
    bend = left - 2 * middle + right
    if not bend > 0:  # three equal losses
        return 0.0, math.inf
    offset = (left - right) / (2 * bend)
    by_left, by_right = (0.5 - offset) / bend, (-0.5 - offset) / bend
    by_middle = 2 * offset / bend
    return offset, sd * math.sqrt(by_left**2 + by_middle**2 + by_right**2)


def found_by(ladder: Ladder, arms: Iterable[Arm], folder: Path, *, seed_sd: float | None) -> list[Best]:
    """The best of every rung that was swept."""
    losses = read_losses(folder)
    found = []
    for rung in ladder.rungs:
        for arm in arms:
            steps = known_steps(rung, arm, ladder.seeds[0], losses)
            if all(step in steps for step in FIRST) and any(map(math.isfinite, steps.values())):
                found.append(best_of(rung, arm, steps, seed_sd=seed_sd))
    return found


# What arms take -------------------------------------------------------------------------------------------------------


def taken(ladder: Ladder, tuned: Tuned, rung: Rung, arm: Arm) -> Taken:
    """The rule of this module's docstring."""
    by_arm = {each.name: [best for best in tuned.best if best.arm == each.name] for each in ladder.arms}
    value = recipe_lr(rung, arm)

    def from_sweep(found: Sequence[Best], whose: str) -> Taken:
        for best in found:
            if best.rung == rung.name:
                return Taken(lr=best.lr, source=OWN if whose == arm.name else f"sweep of {whose}")
        mean = math.exp(math.fsum(math.log(best.lr / best.recipe_lr) for best in found) / len(found))
        source = SCALED if whose == arm.name else f"sweep of {whose} on other rungs"
        return Taken(lr=float(f"{value * mean:.4g}"), source=source)

    if by_arm[arm.name]:
        return from_sweep(by_arm[arm.name], arm.name)
    for other in ladder.arms:
        same_kind = _kind(rung, other) == _kind(rung, arm)
        if by_arm[other.name] and same_kind and recipe_lr(rung, other) == value:
            return from_sweep(by_arm[other.name], other.name)
    return Taken(lr=value, source=NOT_TUNED)


def _kind(rung: Rung, arm: Arm) -> str:
    return Cell(rung=rung, arm=arm, seed=0).config().optimizer.kind


def with_tuned(ladder: Ladder, tuned: Tuned) -> Ladder:
    """The ladder with learning rates as the rule gives them."""
    if not tuned.best:
        return ladder
    arms = []
    for arm in ladder.arms:
        by_rung = {
            rung.name: {**arm.by_rung.get(rung.name, {}), "optimizer.lr": taken(ladder, tuned, rung, arm).lr}
            for rung in ladder.rungs
        }
        arms.append(replace(arm, by_rung=by_rung))
    return replace(ladder, arms=tuple(arms))


def merged(ladder: Ladder, before: Tuned, found: Sequence[Best], results: Sequence[Result]) -> Tuned:
    """New findings over old ones; those that would change a run which has a result become checks."""
    for best in found:
        kept = tuple(each for each in before.best if (each.rung, each.arm) != (best.rung, best.arm))
        checks = tuple(each for each in before.checks if (each.rung, each.arm) != (best.rung, best.arm))
        after = Tuned(best=(*kept, best), checks=checks)
        is_free = all(
            taken(ladder, before, rung, arm).lr == taken(ladder, after, rung, arm).lr
            for rung in ladder.rungs
            for arm in ladder.arms
            if any((result.rung, result.arm) == (rung.name, arm.name) for result in results)
        )
        before = after if is_free else Tuned(best=before.best, checks=(*checks, best))
    return before


def write_tuned(folder: Path, tuned: Tuned) -> Path:
    write_json(folder / FILE, asdict(tuned))
    return folder / FILE


def read_tuned(folder: Path) -> Tuned:
    """Empty where nothing was swept."""
    path = folder / FILE
    if not path.exists():
        return Tuned()
    try:
        values = json.loads(path.read_text())
        return Tuned(**{name: tuple(_best(each) for each in values[name]) for name in ("best", "checks")})
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{str(path)!r} does not hold what a sweep found ({error}): run the sweep again") from error


def _best(values: Mapping[str, Any]) -> Best:
    fields: dict[str, Any] = {**values, "tried": tuple((lr, loss) for lr, loss in values["tried"])}
    return Best(**fields)
