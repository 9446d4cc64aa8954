"""What the cells of a ladder came to, as files: one JSON document for each horizon of each cell.

    LADDER/results/CELL+HORIZON.json

That folder is all a fit or a report reads, and all that has to travel between machines. A file is written at once
(rename). A result counts for a cell as long as its fingerprint is that of the cell's configuration now; another ladder
that trains the very same run may borrow it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from perilune.ladder.design import Cell, Ladder
from perilune.ladder.findings import Point
from perilune.train.run_folder import RunError

RESULTS = "results"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One horizon of one cell."""

    rung: str
    arm: str
    seed: int
    horizon: str
    loss: float
    """Validation, nats per token."""
    bits_per_byte: float | None
    """None where there is no text."""
    tokens: int
    flops: float
    """Of the arm itself, up to this horizon."""
    baseline_flops: float
    """Of the baseline for the same tokens."""
    parameters: int
    epochs: float
    tokens_per_s: float | None
    """Median of the trunk's steps; only comparable where runs had the device for themselves."""
    ran_alone: bool
    skipped_steps: int
    lr: float
    fingerprint: str
    seconds: float
    accuracy: float | None = None
    """Of a probe: share of the answers that are right."""
    exact_match: float | None = None
    """Of a probe: share of the rows whose answers are all right."""
    domains: Mapping[str, float] = field(default_factory=dict)
    """Bits per byte of held-out text by its kind (train/downstream.py)."""
    copying: Mapping[str, float] = field(default_factory=dict)
    """Share of right tokens, by how many random ones there are to copy."""
    corpus: str = ""
    """Fingerprint of the text it was trained on."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Date, commit, versions and machine."""
    max_logits: Sequence[Sequence[float]] = ()
    """[step, largest attention logit over layers and heads since the entry before], about a hundred of them."""
    max_logits_are_bounds: bool = False
    """Some of them are upper bounds: below QK-Clip's threshold a GPU does not compute more."""
    clipped_heads: int = 0
    """How often QK-Clip shrank a head, over all steps."""
    borrowed_from: str = ""
    """The ladder that ran it, where it was another one."""


def result_path(folder: Path, rung: str, arm: str, seed: int, horizon: str) -> Path:
    return folder / RESULTS / f"{rung}+{arm}+{seed}+{horizon}.json"


def write_result(folder: Path, result: Result) -> None:
    path = result_path(folder, result.rung, result.arm, result.seed, result.horizon)
    write_json(path, asdict(result))


def write_json(path: Path, value: Any) -> None:
    """Complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


def read_result(folder: Path, cell: Cell, horizon: str, expected: str) -> Result | None:
    """The finished result, or None; RunError when it belongs to another design."""
    path = result_path(folder, cell.rung.name, cell.arm.name, cell.seed, horizon)
    if not path.exists():
        return None
    result = _read(path)
    if result.fingerprint != expected:
        raise RunError(
            f"{str(path)!r} was measured with another configuration ({result.fingerprint}, now {expected}): "
            "give the ladder another name, or remove the result to measure it again"
        )
    return result


def read_results(folder: Path) -> list[Result]:
    """All of them, whatever the design says now."""
    return [_read(path) for path in sorted((folder / RESULTS).glob("[!.]*.json"))]


def _read(path: Path) -> Result:
    try:
        return Result(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise RunError(f"{str(path)!r} is not a result of a ladder ({error}): remove it to measure it again") from error


def borrowed(result: Result, cell: Cell, horizon: str, lender: str) -> Result:
    """The same run under this ladder's names."""
    origin = result.borrowed_from or lender
    return replace(
        result, rung=cell.rung.name, arm=cell.arm.name, seed=cell.seed, horizon=horizon, borrowed_from=origin
    )


def one_corpus(results: Iterable[Result], now: str = "") -> None:
    """RunError when results, or the text that is there now, differ in what was read: their losses do not compare."""
    found = {result.corpus for result in results} | {now}
    found.discard("")
    if len(found) > 1:
        raise RunError(
            f"results of this ladder were trained on different text ({', '.join(sorted(found))}): restore the corpus, "
            "or remove the results of the other one"
        )


def points(ladder: Ladder, results: Sequence[Result]) -> list[Point]:
    """What the fit takes: no held-out rung, and speeds only of runs that had the device for themselves."""
    fitted = {rung.name for rung in ladder.rungs if not rung.is_held_out}
    arms = {arm.name for arm in ladder.arms}
    horizons = {horizon.name for horizon in ladder.horizons}
    kept = [r for r in results if r.rung in fitted and r.arm in arms and r.horizon in horizons]
    return [
        Point(
            arm=result.arm,
            rung=result.rung,
            horizon=result.horizon,
            seed=result.seed,
            compute=result.flops,
            tokens=result.tokens,
            loss=result.loss,
            tokens_per_second=result.tokens_per_s if result.ran_alone else None,
        )
        for result in kept
    ]
