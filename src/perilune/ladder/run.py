"""Running the cells of a ladder, one after the other or side by side, and going on after an interruption.

Folder of a ladder:

    ladders/NAME/cells/CELL/           the trunk's run folder
                 cells/CELL+HORIZON/   a branch's; its checkpoints go when its result is written
                 results/CELL+HORIZON.json

A result is written last and at once (rename), so a kill at any instant costs at most the work since the last
checkpoint. A result counts as long as its fingerprint, that of the two configs that led to it, is the one the ladder
has now.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from perilune.ladder import cost
from perilune.ladder.design import Cell, Horizon, Ladder, branch, fingerprint, trunk
from perilune.ladder.findings import Point
from perilune.model import Decoder
from perilune.train import RunConfig, run_folder, train
from perilune.train.run_folder import RunError

CELLS, RESULTS = "cells", "results"
OnStep = Callable[[str, int], None]
"""Called with a cell's name and how many of its tokens were trained since the last call."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """One horizon of one cell."""

    rung: str
    arm: str
    seed: int
    horizon: str
    loss: float
    """Validation, nats per token."""
    bits_per_byte: float
    tokens: int
    flops: float
    """Of the arm itself, up to this horizon."""
    baseline_flops: float
    """Of the baseline for the same tokens: compute as the fit counts it, so that a multiplier is one of tokens."""
    parameters: int
    epochs: float
    tokens_per_s: float | None
    """Median of the trunk's steps; only comparable where runs had the device for themselves."""
    ran_alone: bool
    skipped_steps: int
    lr: float
    fingerprint: str
    seconds: float


def run_cell(
    ladder: Ladder, cell: Cell, folder: Path, *, ran_alone: bool, on_step: OnStep = lambda name, tokens: None
) -> list[Result]:
    """All horizons of a cell; what is there already is not done again."""
    steps, config = cost.schedule(ladder, cell.rung), cell.config()
    _claim(folder / CELLS / config.name, fingerprint(trunk(config, steps=1, warmup_steps=steps.warmup_steps)))
    found: list[Result] = []
    done_tokens = 0
    for horizon, start, end in zip(ladder.ordered_horizons(), steps.starts, steps.ends, strict=True):
        root = trunk(config, steps=start, warmup_steps=steps.warmup_steps)
        tip = branch(config, horizon=horizon, start=start, steps=end, warmup_steps=steps.warmup_steps)
        per_step = cost.tokens_per_step(config)
        known = read_result(folder, cell, horizon, fingerprint(root, tip))
        if known is None:
            begun = time.monotonic()
            report = _reporter(on_step, cell.name, per_step)
            _go_on(ladder, cell, root, folder / CELLS, report)
            _branch_off(folder / CELLS / root.name, folder / CELLS / tip.name)
            summary = _go_on(ladder, cell, tip, folder / CELLS, report)
            known = _result(ladder, cell, horizon, root, tip, summary, folder, ran_alone, time.monotonic() - begun)
            write_result(folder, known)
            shutil.rmtree(folder / CELLS / tip.name / run_folder.CHECKPOINTS)
        else:
            on_step(cell.name, (start - done_tokens // per_step + end - start) * per_step)
        done_tokens = start * per_step
        found.append(known)
    shutil.rmtree(folder / CELLS / config.name / run_folder.CHECKPOINTS, ignore_errors=True)
    return found


def _claim(folder: Path, mark: str) -> None:
    """A trunk goes on only as what it began: a changed learning rate would be no reason for a run not to resume."""
    path = folder / "fingerprint"
    if path.exists() and path.read_text() != mark:
        raise RunError(
            f"{str(folder)!r} was begun with another configuration: give the ladder another name, or remove the folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(mark)


def _go_on(
    ladder: Ladder, cell: Cell, config: RunConfig, folder: Path, on_phase: Callable[[str], None]
) -> dict[str, Any]:
    """Train to the config's last step, from wherever its folder is."""
    resume = (folder / config.name / run_folder.CONFIG).exists()
    same_start = None if cell.arm is ladder.baseline else _baseline_weights(ladder, cell)
    return train(config, runs_folder=folder, resume=resume, quiet=True, on_phase=on_phase, initialize=same_start)


def _baseline_weights(ladder: Ladder, cell: Cell) -> Callable[[Decoder], None]:
    """Gives a new model the weights that the baseline starts from with this seed, wherever names and shapes agree."""

    def initialize(model: Decoder) -> None:
        config = Cell(rung=cell.rung, arm=ladder.baseline, seed=cell.seed).config()
        theirs = dict(Decoder(config.model, seed=config.seed).named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in theirs and theirs[name].shape == parameter.shape:
                    parameter.copy_(theirs[name])

    return initialize


def _reporter(on_step: OnStep, name: str, tokens: int) -> Callable[[str], None]:
    def on_phase(phase: str) -> None:
        if phase == "step:logged":
            on_step(name, tokens)

    return on_phase


def _branch_off(root: Path, tip: Path) -> None:
    """A branch begins as a copy of the trunk. config.json, which claims the folder, comes last."""
    if (tip / run_folder.CONFIG).exists():
        return
    shutil.rmtree(tip, ignore_errors=True)
    tip.mkdir(parents=True)
    for name in (run_folder.TOKENIZER, run_folder.ENVIRONMENT, run_folder.METRICS):
        if (root / name).exists():
            shutil.copy2(root / name, tip / name)
    shutil.copytree(root / run_folder.CHECKPOINTS, tip / run_folder.CHECKPOINTS)
    shutil.copy2(root / run_folder.CONFIG, tip / run_folder.CONFIG)


def _result(
    ladder: Ladder, cell: Cell, horizon: Horizon, root: RunConfig, tip: RunConfig, summary: dict[str, Any],
    folder: Path, ran_alone: bool, seconds: float,
) -> Result:  # fmt: skip
    if summary["valid_loss"] is None:
        raise RunError(
            "a ladder compares validation losses, and this corpus holds nothing out: raise data.corpus.valid_fraction"
        )
    baseline = Cell(rung=cell.rung, arm=ladder.baseline, seed=cell.seed).config()
    tokens = summary["tokens"]
    return Result(
        rung=cell.rung.name,
        arm=cell.arm.name,
        seed=cell.seed,
        horizon=horizon.name,
        loss=summary["valid_loss"],
        bits_per_byte=summary["valid_bits_per_byte"],
        tokens=tokens,
        flops=cost.flops_per_token(tip) * tokens,
        baseline_flops=cost.flops_per_token(baseline) * tokens,
        parameters=cost.active_parameters(tip),
        epochs=summary["epochs"],
        tokens_per_s=_median_speed(folder / CELLS / root.name / run_folder.METRICS),
        ran_alone=ran_alone,
        skipped_steps=summary["skipped_steps"],
        lr=tip.optimizer.lr,
        fingerprint=fingerprint(root, tip),
        seconds=seconds,
    )


def _median_speed(metrics: Path) -> float | None:
    """Of the second half of the steps: the first ones compile and fill caches."""
    speeds = [
        record["tokens_per_s"]
        for line in metrics.read_text().splitlines()
        if (record := json.loads(line))["kind"] == "train" and record.get("tokens_per_s")
    ]
    tail = sorted(speeds[len(speeds) // 2 :])
    return tail[len(tail) // 2] if tail else None


# Results on disk ------------------------------------------------------------------------------------------------------


def result_path(folder: Path, rung: str, arm: str, seed: int, horizon: str) -> Path:
    return folder / RESULTS / f"{rung}+{arm}+{seed}+{horizon}.json"


def write_result(folder: Path, result: Result) -> None:
    path = result_path(folder, result.rung, result.arm, result.seed, result.horizon)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(asdict(result), indent=1) + "\n")
    os.replace(partial, path)


def read_result(folder: Path, cell: Cell, horizon: Horizon, expected: str) -> Result | None:
    """The finished result, or None; RunError when it belongs to another design."""
    path = result_path(folder, cell.rung.name, cell.arm.name, cell.seed, horizon.name)
    if not path.exists():
        return None
    result = Result(**json.loads(path.read_text()))
    if result.fingerprint != expected:
        raise RunError(
            f"{str(path)!r} was measured with another configuration ({result.fingerprint}, now {expected}): "
            "give the ladder another name, or remove the result to measure it again"
        )
    return result


def read_results(folder: Path) -> list[Result]:
    """All of them, whatever the design says now."""
    return [Result(**json.loads(path.read_text())) for path in sorted((folder / RESULTS).glob("[!.]*.json"))]


def points(ladder: Ladder, results: Sequence[Result]) -> list[Point]:
    """What the fit takes: no held-out rung, and speeds only of runs that had the device for themselves."""
    fitted = {rung.name for rung in ladder.rungs if not rung.is_held_out}
    arms = {arm.name for arm in ladder.arms}
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
        for result in results
        if result.rung in fitted and result.arm in arms
    ]


def unfinished(ladder: Ladder, folder: Path, *, held_out: bool) -> Iterator[Cell]:
    """Cells of which a horizon is missing."""
    for cell in ladder.cells(held_out=held_out):
        steps, config = cost.schedule(ladder, cell.rung), cell.config()
        for horizon, start, end in zip(ladder.ordered_horizons(), steps.starts, steps.ends, strict=True):
            root = trunk(config, steps=start, warmup_steps=steps.warmup_steps)
            tip = branch(config, horizon=horizon, start=start, steps=end, warmup_steps=steps.warmup_steps)
            if read_result(folder, cell, horizon, fingerprint(root, tip)) is None:
                yield cell
                break


def run_ladder(
    ladder: Ladder, folder: Path, *, held_out: bool = False, on_step: OnStep = lambda name, tokens: None
) -> Sequence[Result]:
    """Every missing cell, one after the other in this process."""
    for cell in list(unfinished(ladder, folder, held_out=held_out)):
        run_cell(ladder, cell, folder, ran_alone=True, on_step=on_step)
    return read_results(folder)
