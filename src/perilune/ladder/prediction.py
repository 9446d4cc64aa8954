"""The held-out rung, predicted before it is run: a file that says what, from which results, when and at which commit.

    LADDER/prediction.json

It may be made again while the held-out rung has no result, and never after: what was said before the run stands.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from perilune.ladder import cost
from perilune.ladder.design import Ladder
from perilune.ladder.findings import Estimate, LadderFit
from perilune.ladder.results import Result, points, write_json
from perilune.ladder.settled import settled
from perilune.train.run_folder import RunError

FILE = "prediction.json"


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The loss of one run of an arm on a held-out rung at a horizon, with its 95% interval."""

    rung: str
    arm: str
    horizon: str
    compute: float
    loss: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    ladder: str
    date: str
    commit: str
    floor: float
    exponent: float
    seed_sd: float | None
    """Noise of a run in nats, behind the intervals."""
    losses: Mapping[str, float]
    """What it rests on: the loss of every result that was fitted, by name."""
    predicted: tuple[Predicted, ...]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A prediction beside what was measured."""

    predicted: Predicted
    measured: float
    """Mean over seeds."""
    num_runs: int

    @property
    def error(self) -> float:
        return self.measured - self.predicted.loss

    @property
    def is_inside(self) -> bool | None:
        low, high = self.predicted.low, self.predicted.high
        return None if low is None or high is None else low <= self.measured <= high


def held_out_results(ladder: Ladder, results: Sequence[Result]) -> list[Result]:
    held_out = {rung.name for rung in ladder.rungs if rung.is_held_out}
    return [result for result in results if result.rung in held_out]


def predict(ladder: Ladder, fit: LadderFit, results: Sequence[Result], *, commit: str) -> Prediction:
    """Every arm that was fitted and has more than one rung, on every held-out rung, at every horizon."""
    rungs = [rung for rung in ladder.rungs if rung.is_held_out]
    if not rungs:
        raise RunError(f"ladder {ladder.name!r} holds no rung out: there is nothing to predict")
    if fit.seed_sd is None:
        raise RunError(
            "nothing shows the noise of a run, and a prediction without an interval cannot fail: run a second seed (of "
            "the smallest rung at least), or give --seed-sd in nats"
        )
    fitted, _ = settled(points(ladder, results))
    run_on = {arm.name: {point.rung for point in fitted if point.arm == arm.name} for arm in ladder.arms}
    predicted = []
    for rung in rungs:
        for arm in ladder.arms:
            if arm.name not in fit.spreads or len(run_on[arm.name]) < 2:
                continue
            costs = cost.cost(ladder, rung, arm)
            for horizon, tokens in zip(cost.horizon_names(ladder), costs.tokens, strict=True):
                if horizon not in fit.curve.reducible:
                    continue
                compute = costs.flops_per_token * tokens
                found = fit.predict(arm.name, compute=compute, horizon=horizon)
                predicted.append(
                    Predicted(
                        rung=rung.name,
                        arm=arm.name,
                        horizon=horizon,
                        compute=compute,
                        loss=found.value,
                        low=found.low,
                        high=found.high,
                    )
                )
    return Prediction(
        ladder=ladder.name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit,
        floor=fit.curve.floor.value,
        exponent=fit.curve.exponent.value,
        seed_sd=fit.seed_sd,
        losses={f"{p.rung}+{p.arm}+{p.seed}+{p.horizon}": p.loss for p in fitted if p.arm in fit.spreads},
        predicted=tuple(predicted),
    )


def write_prediction(folder: Path, prediction: Prediction, ladder: Ladder, results: Sequence[Result]) -> Path:
    """RunError when the held-out rung has a result already."""
    if known := held_out_results(ladder, results):
        first = known[0]
        raise RunError(
            f"the held-out rung has results already ({first.rung}+{first.arm}+{first.seed}): what would be written now "
            "is no prediction, and one that was made before stays as it is"
        )
    write_json(folder / FILE, asdict(prediction))
    return folder / FILE


def read_prediction(folder: Path) -> Prediction | None:
    path = folder / FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
        return Prediction(**values | {"predicted": tuple(Predicted(**each) for each in values["predicted"])})
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{str(path)!r} is not a prediction ({error}): restore it") from error


def outcomes(prediction: Prediction, results: Sequence[Result]) -> list[Outcome]:
    """Those that were run."""
    found = []
    for each in prediction.predicted:
        place = (each.rung, each.arm, each.horizon)
        losses = [result.loss for result in results if (result.rung, result.arm, result.horizon) == place]
        if losses:
            found.append(Outcome(predicted=each, measured=statistics.fmean(losses), num_runs=len(losses)))
    return found


def is_older(prediction: Prediction, results: Sequence[Result]) -> bool:
    """Whether it was made before every held-out run that says when it began."""
    begun = [result.environment["started"] for result in results if result.environment.get("started")]
    return all(datetime.fromisoformat(prediction.date) <= datetime.fromisoformat(each) for each in begun)


def as_estimate(predicted: Predicted) -> Estimate:
    return Estimate(value=predicted.loss, low=predicted.low, high=predicted.high, degrees_of_freedom=None)
