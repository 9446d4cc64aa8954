"""`perilune ladder plan|run|fit NAME`: the command's part of scaling ladders."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from perilune.cli import UserError, _fail, _nearest, _parse, _positional, _print_json, _with_set

if TYPE_CHECKING:
    from perilune.ladder.design import Cell, Ladder
    from perilune.ladder.run import Result


@dataclass(kw_only=True)
class LadderFlags:
    folder: str = "ladders"
    """Folder that holds ladders."""
    set: tuple[str, ...] = ()
    """Fields of every rung by path with a JSON value, as in `perilune train`: --set data.corpus.source=PATH"""
    seeds: tuple[int, ...] | None = None
    """In place of the ladder's own."""
    held_out: bool = False
    """run: the rung that was predicted, instead of the others."""
    cell: str | None = None
    """run: only this cell, RUNG+ARM+SEED, for schedulers that start one process for each."""
    workers: int = 1
    """run: cells at a time, each in a process of its own, spread over the GPUs; their speeds are marked as shared."""
    alone: bool = True
    """run --cell: whether it has the device for itself; only then its speed counts."""
    floor: float | None = None
    """fit: the loss that compute cannot go below, where the ladder has too few rungs to find it."""
    seed_sd: float | None = None
    """fit: noise of a run in nats, where no seed was repeated."""
    measure: bool = False
    """plan: time a few steps of every rung and arm for an estimate."""
    device: str = "auto"
    """"auto" takes the first of cuda, cpu that is there."""
    json: bool = False
    quiet: bool = False


def ladder_verb(arguments: list[str]) -> None:
    """Plan, run or fit a scaling ladder."""
    steps, example = ("plan", "run", "fit"), "perilune ladder run tiny"
    step, rest = _positional(arguments, "STEP", f"one of {', '.join(steps)}", example)
    if step not in steps:
        _fail(f"unknown step {step!r}{_nearest(step, steps)}; expected one of {', '.join(steps)}", code=2)
    from perilune.recipes.ladders import LADDERS

    name, rest = _positional(rest, "NAME", f"one of {', '.join(LADDERS)}", example)
    if name not in LADDERS:
        _fail(f"unknown ladder {name!r}{_nearest(name, LADDERS)}; expected one of {', '.join(LADDERS)}", code=2)
    what = {
        "plan": "Parameters, tokens, epochs, FLOPs, memory and time of a ladder; refuses what cannot fit.",
        "fit": "What every arm buys over the baseline, with intervals, from the results that are there.",
        "run": "Train all cells of a ladder; goes on where it was stopped, and repeats nothing that is finished.",
    }[step]
    flags = _parse(
        f"perilune ladder {step} {name}", f"{what}\n\nexample: perilune ladder {step} {name}", LadderFlags, rest
    )
    if flags.workers < 1:
        raise UserError(f"--workers is {flags.workers}, expected 1 or more")
    from perilune.ladder.show import LadderProgress, print_plan, print_results
    from perilune.train.trainer import pick_device

    ladder = LADDERS[name]()
    rungs = tuple(dataclasses.replace(rung, config=_with_set(rung.config, flags.set)) for rung in ladder.rungs)
    if flags.device != "auto":
        rungs = tuple(
            dataclasses.replace(r, config=_with_set(r.config, [f"trainer.device={flags.device}"])) for r in rungs
        )
    ladder = dataclasses.replace(ladder, rungs=rungs, seeds=flags.seeds or ladder.seeds)
    device, folder = pick_device(flags.device, "--device"), Path(flags.folder) / name

    from perilune.ladder import plan as planning
    from perilune.ladder.run import read_results, run_cell, run_ladder, unfinished

    if step == "fit":
        _fit(ladder, flags, read_results(folder))
        return
    speeds = dict(planning.known_speeds(read_results(folder)))
    if step == "plan" and flags.measure:
        speeds |= planning.measure_ladder(ladder, device)
    plan = planning.make_plan(ladder, speeds=speeds, available_bytes=planning.available_memory(device))
    if step == "plan":
        _print_json(dataclasses.asdict(plan)) if flags.json else print_plan(plan)
    if plan.problems:
        raise UserError("; ".join(plan.problems))
    if step == "plan":
        return
    cells = list(unfinished(ladder, folder, held_out=flags.held_out))
    if flags.cell is not None:
        known = {cell.name: cell for cell in ladder.cells(held_out=flags.held_out)}
        if flags.cell not in known:
            raise UserError(f"--cell {flags.cell!r} is not in the ladder{_nearest(flags.cell, known)}")
        cells = [known[flags.cell]]
    with LadderProgress(ladder, cells, quiet=flags.quiet or flags.json) as progress:
        if flags.cell is not None:
            run_cell(ladder, cells[0], folder, ran_alone=flags.alone, on_step=progress.step)
        elif flags.workers > 1:
            _run_workers(name, flags, cells, folder, progress.step)
        else:
            run_ladder(ladder, folder, held_out=flags.held_out, on_step=progress.step)
    results = read_results(folder)
    _print_json([dataclasses.asdict(result) for result in results]) if flags.json else print_results(ladder, results)


def _fit(ladder: "Ladder", flags: LadderFlags, results: Sequence["Result"]) -> None:
    from perilune.ladder.fit import fit_ladder
    from perilune.ladder.run import points
    from perilune.ladder.show import print_fit, print_results

    found = points(ladder, results)
    if not found:
        raise UserError(f"ladder {ladder.name!r} has no results yet: `perilune ladder run {ladder.name}` makes them")
    fit = fit_ladder(found, baseline=ladder.baseline.name, floor=flags.floor, seed_sd=flags.seed_sd)
    if flags.json:
        _print_json(fit.to_dict())
        return
    print_results(ladder, results)
    print_fit(fit)


def _run_workers(
    name: str, flags: LadderFlags, cells: Sequence["Cell"], folder: Path, on_step: Callable[[str, int], None]
) -> None:
    import torch

    from perilune.ladder.cost import tokens_per_step
    from perilune.ladder.workers import run_side_by_side

    own = ["--folder", flags.folder, "--device", flags.device, "--no-alone", "--quiet"]
    own += ["--held-out"] if flags.held_out else []
    own += ["--set", *flags.set] if flags.set else []
    own += ["--seeds", *map(str, flags.seeds)] if flags.seeds else []
    count = torch.cuda.device_count() if flags.device in ("auto", "cuda") else 0
    run_side_by_side(
        cells,
        folder,
        command=lambda cell: [sys.executable, "-m", "perilune", "ladder", "run", name, "--cell", cell.name, *own],
        num_workers=flags.workers,
        devices=[str(index) for index in range(count)] if count > 1 else (),
        on_step=on_step,
        tokens_per_step=lambda cell: tokens_per_step(cell.config()),
    )
