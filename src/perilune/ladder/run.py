"""Running the cells of a ladder, one after the other or side by side, and going on after an interruption.

Folder of a ladder:

    ladders/NAME/results/CELL+HORIZON.json    what a cell came to (results.py)
                 cells/CELL/                  the trunk's run folder
                 cells/CELL+HORIZON/          a branch's; its checkpoints go when its result is written

`cells` may lie elsewhere (scratch): nothing but a cell that is not finished needs it. A result is written last, so a
kill at any instant costs at most the work since the last checkpoint.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perilune.data import ValidationSet
from perilune.ladder import cost
from perilune.ladder.design import Cell, Horizon, Ladder, branch, fingerprint, trunk
from perilune.ladder.results import (
    RESULTS,
    Result,
    borrowed,
    read_result,
    read_results,
    write_result,
)
from perilune.model import Decoder, ModelConfig
from perilune.train import RunConfig, checkpoint, load_run, run_folder, train
from perilune.train.batches import RunData, open_data
from perilune.train.downstream import downstream
from perilune.train.run_folder import RunError
from perilune.train.trainer import pick_device

CELLS = "cells"
MAX_LOGIT_ENTRIES = 100
OnStep = Callable[[str, int], None]
"""Called with a cell's name and how many of its tokens were trained since the last call."""


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One horizon of a cell: the trunk up to `start`, then the branch to `end`."""

    horizon: Horizon
    start: int
    end: int
    root: RunConfig
    tip: RunConfig
    fingerprint: str


def legs(ladder: Ladder, cell: Cell) -> list[Leg]:
    """Shortest horizon first."""
    steps, config = cost.schedule(ladder, cell.rung), cell.config()
    start_of_all = _start_of_all(ladder, cell)
    found = []
    for horizon, start, end in zip(ladder.ordered_horizons(), steps.starts, steps.ends, strict=True):
        root = trunk(config, steps=start, warmup_steps=steps.warmup_steps)
        tip = branch(config, horizon=horizon, start=start, steps=end, warmup_steps=steps.warmup_steps)
        mark = fingerprint(root, tip, start=start_of_all)
        found.append(Leg(horizon=horizon, start=start, end=end, root=root, tip=tip, fingerprint=mark))
    return found


def _start_of_all(ladder: Ladder, cell: Cell) -> ModelConfig:
    """The model whose initial weights all arms of the rung share."""
    return Cell(rung=cell.rung, arm=ladder.baseline, seed=cell.seed).config().model


def run_cell(
    ladder: Ladder,
    cell: Cell,
    folder: Path,
    *,
    ran_alone: bool,
    scratch: Path | None = None,
    commit: str | None = None,
    on_step: OnStep = lambda name, tokens: None,
) -> list[Result]:
    """All horizons of a cell; what is there already is not done again."""
    config, cells = cell.config(), scratch or folder / CELLS
    per_step = cost.tokens_per_step(config)
    todo = legs(ladder, cell)
    begin = trunk(config, steps=1, warmup_steps=todo[0].root.schedule.warmup_steps)
    _claim(cells / config.name, fingerprint(begin, start=_start_of_all(ladder, cell)))
    found: list[Result] = []
    done, data = 0, None
    for leg in todo:
        known = read_result(folder, cell, leg.horizon.name, leg.fingerprint)
        if known is None:
            begun = time.monotonic()
            report = _reporter(on_step, cell.name, per_step)
            data = data or open_data(config.data, seed=config.seed)  # once: a large corpus takes seconds to survey
            _go_on(ladder, cell, leg.root, cells, report, data)
            _branch_off(cells / leg.root.name, cells / leg.tip.name)
            summary = _go_on(ladder, cell, leg.tip, cells, report, data)
            seconds = time.monotonic() - begun
            known = _result(ladder, cell, leg, summary, cells, ran_alone=ran_alone, commit=commit, seconds=seconds)
            known = _with_downstream(known, cells / leg.tip.name, data)
            write_result(folder, known)
            shutil.rmtree(cells / leg.tip.name / run_folder.CHECKPOINTS)
        else:
            on_step(cell.name, (leg.end - done) * per_step)
        done = leg.start
        found.append(known)
    shutil.rmtree(cells / config.name / run_folder.CHECKPOINTS, ignore_errors=True)
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
    ladder: Ladder, cell: Cell, config: RunConfig, folder: Path, on_phase: Callable[[str], None], data: RunData
) -> dict[str, Any]:
    """Train to the config's last step, from wherever its folder is."""
    resume = (folder / config.name / run_folder.CONFIG).exists()
    same_start = None if cell.arm is ladder.baseline else _baseline_weights(ladder, cell)
    return train(
        config, runs_folder=folder, resume=resume, quiet=True, on_phase=on_phase, initialize=same_start, data=data
    )


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
    ladder: Ladder, cell: Cell, leg: Leg, summary: dict[str, Any], cells: Path, *, ran_alone: bool, commit: str | None,
    seconds: float,
) -> Result:  # fmt: skip
    if summary["valid_loss"] is None:
        raise RunError(
            "a ladder compares validation losses, and this corpus holds nothing out: raise data.corpus.valid_fraction"
        )
    baseline = Cell(rung=cell.rung, arm=ladder.baseline, seed=cell.seed).config()
    tokens, tip = summary["tokens"], cells / leg.tip.name
    found = checkpoint.find(tip / run_folder.CHECKPOINTS)
    environment = json.loads((tip / run_folder.ENVIRONMENT).read_text()) | ({"commit": commit} if commit else {})
    records = _train_records(tip / run_folder.METRICS)
    return Result(
        rung=cell.rung.name,
        arm=cell.arm.name,
        seed=cell.seed,
        horizon=leg.horizon.name,
        loss=summary["valid_loss"],
        bits_per_byte=summary["valid_bits_per_byte"],
        accuracy=summary.get("valid_accuracy"),
        exact_match=summary.get("valid_exact_match"),
        tokens=tokens,
        flops=cost.flops_per_token(leg.tip) * tokens,
        baseline_flops=cost.flops_per_token(baseline) * tokens,
        parameters=cost.active_parameters(leg.tip),
        epochs=summary["epochs"],
        tokens_per_s=_median_speed(_train_records(cells / leg.root.name / run_folder.METRICS)),
        ran_alone=ran_alone,
        skipped_steps=summary["skipped_steps"],
        lr=leg.tip.optimizer.lr,
        fingerprint=leg.fingerprint,
        seconds=seconds,
        corpus="" if found is None else str(found.state.get("corpus_fingerprint", ""))[:16],
        environment=environment,
        max_logits=_thinned_max_logits(records),
        max_logits_are_bounds=any(any(record.get("max_logit_is_bound", ())) for record in records),
        clipped_heads=sum(record.get("clipped_heads", 0) for record in records),
    )


def _with_downstream(result: Result, folder: Path, data: RunData) -> Result:
    """What the model does beside its loss, where it was trained on text; its checkpoint is about to go."""
    if not isinstance(data.valid, ValidationSet):
        return result
    config = run_folder.read_config(folder)
    device = pick_device(config.trainer.device)
    model, tokenizer, _ = load_run(folder, device=device)
    found = downstream(model, tokenizer, data.valid, seq_len=config.data.seq_len, device=device)
    return replace(result, domains=found.domains, copying=found.copying)


def _train_records(metrics: Path) -> list[dict[str, Any]]:
    return [record for line in metrics.read_text().splitlines() if (record := json.loads(line)).get("kind") == "train"]


def _median_speed(records: Sequence[dict[str, Any]]) -> float | None:
    """Of the second half of the steps: the first ones compile and fill caches."""
    speeds = [record["tokens_per_s"] for record in records if record.get("tokens_per_s")]
    tail = sorted(speeds[len(speeds) // 2 :])
    return tail[len(tail) // 2] if tail else None


def _thinned_max_logits(records: Sequence[dict[str, Any]]) -> tuple[tuple[float, float], ...]:
    """The largest logit of every interval of steps, so that no spike is lost; empty without softmax attention."""
    seen = [
        (int(record["step"]), max(values))
        for record in records
        if (values := [v for v in record.get("max_logit") or () if isinstance(v, int | float)])
    ]
    width = max(1, -(-len(seen) // MAX_LOGIT_ENTRIES))
    groups = [seen[first : first + width] for first in range(0, len(seen), width)]
    return tuple((group[-1][0], round(max(value for _, value in group), 3)) for group in groups)


# What is left to do ---------------------------------------------------------------------------------------------------


def unfinished(ladder: Ladder, folder: Path, *, held_out: bool) -> Iterator[Cell]:
    """Cells of which a horizon is missing."""
    for cell in ladder.cells(held_out=held_out):
        if not is_finished(ladder, cell, folder):
            yield cell


def is_finished(ladder: Ladder, cell: Cell, folder: Path) -> bool:
    return all(read_result(folder, cell, leg.horizon.name, leg.fingerprint) is not None for leg in legs(ladder, cell))


def borrow(ladder: Ladder, cells: Iterable[Cell], folder: Path, lenders: Iterable[Path]) -> int:
    """Take over what folders of other ladders have of these cells; says how many results that were.

    The fingerprint holds everything that decides a result, the weights a run starts from included, so it is the very
    run that this ladder would repeat.
    """
    theirs = {
        result.fingerprint: (lender.name, result)
        for lender in lenders
        if lender.resolve() != folder.resolve() and (lender / RESULTS).is_dir()
        for result in read_results(lender)
    }
    count = 0
    for cell in cells:
        for leg in legs(ladder, cell) if theirs else ():
            if leg.fingerprint in theirs and read_result(folder, cell, leg.horizon.name, leg.fingerprint) is None:
                lender_name, result = theirs[leg.fingerprint]
                write_result(folder, borrowed(result, cell, leg.horizon.name, lender_name))
                count += 1
    return count


def run_ladder(
    ladder: Ladder,
    folder: Path,
    *,
    cells: Iterable[Cell] | None = None,
    held_out: bool = False,
    scratch: Path | None = None,
    commit: str | None = None,
    on_step: OnStep = lambda name, tokens: None,
) -> Sequence[Result]:
    """Every missing cell, one after the other in this process."""
    todo = unfinished(ladder, folder, held_out=held_out) if cells is None else cells
    for cell in list(todo):
        run_cell(ladder, cell, folder, ran_alone=True, scratch=scratch, commit=commit, on_step=on_step)
    return read_results(folder)
