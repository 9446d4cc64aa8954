"""All that is known of a ladder, read from its folder: results, fit, prediction, learning rates, speeds.

The report and its Markdown are views of this. A fit needs pairs: arms that have none yet are left out and named. Where
the losses do not allow a fit with a free floor E (two rungs, or gains larger than the curve), E = 0 is taken, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.ladder.design import Ladder
from perilune.ladder.findings import LadderFit, Speeds
from perilune.ladder.fit import fit_ladder
from perilune.ladder.prediction import (
    Outcome,
    Prediction,
    held_out_results,
    is_older,
    outcomes,
    read_prediction,
)
from perilune.ladder.results import Result, points, read_results
from perilune.ladder.settled import settled
from perilune.ladder.speed import read_speeds
from perilune.ladder.sweep import NOT_TUNED, Tuned, read_tuned, taken, with_tuned
from perilune.train.run_folder import RunError


@dataclass(frozen=True, kw_only=True)
class Evidence:
    recipe: Ladder
    """As it is written, before its sweeps."""
    ladder: Ladder
    """With the learning rates that its sweeps found."""
    results: tuple[Result, ...]
    fit: LadderFit | None
    """None where the losses allow none; the notes say why."""
    prediction: Prediction | None
    outcomes: tuple[Outcome, ...]
    tuned: Tuned
    speeds: Speeds
    notes: tuple[str, ...]
    """What a reader has to know."""

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({result.seed for result in self.results}))

    def present_arms(self) -> list[str]:
        """In the ladder's order."""
        there = {result.arm for result in self.results}
        return [arm.name for arm in self.ladder.arms if arm.name in there]


def read_evidence(
    ladder: Ladder, folder: Path, *, floor: float | None = None, seed_sd: float | None = None
) -> Evidence:
    """RunError when there is no result at all. `ladder` as its recipe has it."""
    recipe, tuned = ladder, read_tuned(folder)
    ladder = with_tuned(recipe, tuned)
    arms = {arm.name for arm in ladder.arms}
    rungs = {rung.name for rung in ladder.rungs}
    horizons = {horizon.name for horizon in ladder.horizons}
    results = [
        result
        for result in read_results(folder)
        if result.arm in arms and result.rung in rungs and result.horizon in horizons
    ]
    if not results:
        raise RunError(
            f"ladder {ladder.name!r} has no results yet in {str(folder)!r}: `perilune ladder run {ladder.name}` makes "
            "them"
        )
    speeds, prediction = read_speeds(folder), read_prediction(folder)
    fit, notes = fit_what_is_there(ladder, results, speeds, floor=floor, seed_sd=seed_sd)
    return Evidence(
        recipe=recipe,
        ladder=ladder,
        results=tuple(results),
        fit=fit,
        prediction=prediction,
        outcomes=() if prediction is None else tuple(outcomes(prediction, results)),
        tuned=tuned,
        speeds=speeds,
        notes=(*notes, *_doubts(ladder, results, prediction), *_tuning_doubts(recipe, tuned)),
    )


def fit_what_is_there(
    ladder: Ladder, results: Sequence[Result], speeds: Speeds, *, floor: float | None, seed_sd: float | None
) -> tuple[LadderFit | None, list[str]]:
    """The fit of every arm that has a pair, and what to say about it."""
    there = points(ladder, results)
    found, notes = settled(there)
    base = {(p.rung, p.horizon, p.seed) for p in found if p.arm == ladder.baseline.name}
    paired = {p.arm for p in found if (p.rung, p.horizon, p.seed) in base}
    for arm in ladder.arms:
        if any(p.arm == arm.name for p in there) and arm.name not in paired:
            notes.append(f"{arm.name} is not fitted: the baseline has no run with the same rung, horizon and seed")
    found = [point for point in found if point.arm in paired]
    combinations = {name: singles for name, singles in ladder.combinations.items() if {name, *singles} <= paired}
    if not found:
        return None, [*notes, "no fit: the baseline has no results yet"]
    reason = ""
    for attempt in (floor, 0.0) if floor is None else (floor,):
        try:
            fit = fit_ladder(
                found, baseline=ladder.baseline.name, floor=attempt, combinations=combinations, seed_sd=seed_sd,
                speeds=speeds,
            )  # fmt: skip
        except ValueError as error:
            reason = str(error)
            continue
        if attempt != floor:
            notes.append(f"E = 0 was taken, because the losses do not give a floor: {reason}")
        return fit, [*notes, *fit.notes]
    return None, [*notes, f"no fit: {reason}"]


def _doubts(ladder: Ladder, results: Sequence[Result], prediction: Prediction | None) -> list[str]:
    """Where results do not compare as they should."""
    doubts = []
    if len({result.corpus for result in results if result.corpus}) > 1:
        doubts.append("the results were trained on different text: their losses do not compare")
    machines = {result.environment.get("machine", "") for result in results}
    if len(machines) > 1:
        doubts.append(f"the results come from different machines: {'; '.join(sorted(filter(None, machines)))}")
    skipped = {f"{r.rung}+{r.arm}+{r.seed}" for r in results if r.skipped_steps}
    if skipped:
        doubts.append(f"steps whose numbers were not finite were skipped in {', '.join(sorted(skipped))}")
    over = sorted({result.rung for result in results if result.epochs > ladder.max_epochs})
    if over:
        doubts.append(f"rungs with more than {ladder.max_epochs:g} epochs of the text: {', '.join(over)}")
    held_out = held_out_results(ladder, results)
    if held_out and prediction is None:
        doubts.append("the held-out rung was run without a prediction: it says nothing about the fit")
    elif held_out and prediction is not None and not is_older(prediction, held_out):
        doubts.append("a held-out run began before the prediction's date")
    missing = sum(
        (cell.rung.name, cell.arm.name, cell.seed, horizon.name) not in _places(results)
        for cell in ladder.cells()
        for horizon in ladder.horizons
    )
    if missing:
        doubts.append(f"{missing} results of the ladder's design are not there yet")
    return doubts


def _tuning_doubts(recipe: Ladder, tuned: Tuned) -> list[str]:
    """Arms whose learning rate may not be their best."""
    doubts = [
        f"{best.arm} on {best.rung} is at the edge of its sweep: a learning rate that was not tried may be better"
        for best in (*tuned.best, *tuned.checks)
        if best.at_edge
    ]
    bare = [
        arm.name
        for arm in recipe.arms
        if any(taken(recipe, tuned, rung, arm).source == NOT_TUNED for rung in recipe.rungs)
    ]
    if bare:
        doubts.append(f"learning rates of the recipe, not tuned: {', '.join(bare)}")
    return doubts


def _places(results: Sequence[Result]) -> set[tuple[str, str, int, str]]:
    return {(result.rung, result.arm, result.seed, result.horizon) for result in results}
