"""`perilune ladder STEP NAME`: the command's part of scaling ladders."""

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from perilune.cli import UserError, _fail, _nearest, _parse, _positional, _print_json, _with_set

if TYPE_CHECKING:
    import torch

    from perilune.ladder.design import Arm, Cell, Ladder
    from perilune.ladder.plan import Plan

Named = TypeVar("Named")


@dataclass(kw_only=True)
class CommonFlags:
    folder: str = "ladders"
    """Folder that holds ladders."""
    set: tuple[str, ...] = ()
    """Fields of every rung by path with a JSON value, as in `perilune train`: --set data.corpus.source=PATH"""
    seeds: tuple[int, ...] | None = None
    """In place of the ladder's own."""
    device: str = "auto"
    """"auto" takes the first of cuda, cpu that is there."""
    json: bool = False


@dataclass(kw_only=True)
class PlanFlags(CommonFlags):
    measure: bool = False
    """Time a few steps of every rung and arm for an estimate."""
    h200: bool = False
    """Where no speed is known, assume that of an H200; also shows rounds that fit into --round-seconds."""
    round_seconds: float = 540.0
    """Length of a round."""
    workers: int = 3
    """Cells at a time in a round."""


@dataclass(kw_only=True)
class WorkFlags(CommonFlags):
    cell: str | None = None
    """Only this cell, RUNG+ARM+SEED, for schedulers that start one process for each."""
    workers: int = 1
    """Cells at a time, each in a process of its own, spread over the GPUs; their speeds are marked as shared."""
    seconds: float | None = None
    """Begin no cell that would not be done in this time, and stop what still runs then. Largest cells first."""
    scratch: str | None = None
    """Folder for what only unfinished cells need (checkpoints, logs); by default the ladder's own."""
    commit: str | None = None
    """The commit to name in results; from git when not given."""
    quiet: bool = False


@dataclass(kw_only=True)
class RunFlags(WorkFlags):
    held_out: bool = False
    """The rung that was predicted, instead of the others."""
    unpredicted: bool = False
    """Run the held-out rung although nothing was predicted."""
    arms: tuple[str, ...] = ()
    """Cells of these arms alone; of all when none is named."""
    alone: bool = True
    """With --cell: whether it has the device for itself; only then its speed counts."""


@dataclass(kw_only=True)
class SweepFlags(WorkFlags):
    arms: tuple[str, ...] = ()
    """Arms to sweep; the baseline when none is named."""
    seed_sd: float | None = None
    """Noise between runs of one seed in nats, for the interval of the best learning rate."""


@dataclass(kw_only=True)
class SpeedFlags(CommonFlags):
    rungs: tuple[str, ...] = ()
    """Rungs to measure; when none is named, all. What was measured of others before is kept."""
    arms: tuple[str, ...] = ()
    """Arms to measure; when none is named, all."""
    repeats: int = 3
    """How often each arm is measured, in turns."""
    steps: int = 20
    warmup: int = 5
    """Steps before the clock runs."""
    commit: str | None = None
    """The commit to name; from git when not given."""


@dataclass(kw_only=True)
class FitFlags(CommonFlags):
    floor: float | None = None
    """The loss that compute cannot go below, where the ladder has too few rungs to find it."""
    seed_sd: float | None = None
    """Noise of a run in nats, where no seed was repeated."""


@dataclass(kw_only=True)
class PredictFlags(FitFlags):
    commit: str | None = None
    """The commit to name; from git when not given."""


@dataclass(kw_only=True)
class ReportFlags(FitFlags):
    png: bool = False
    """Also write the plots as PNG files beside the page."""


@dataclass(kw_only=True)
class SlurmFlags(CommonFlags):
    held_out: bool = False
    """The held-out rung, instead of the others."""
    gpus: int = 1
    """GPUs of a task; 0 asks for none."""


STEPS: dict[str, tuple[type[CommonFlags], str]] = {
    "plan": (PlanFlags, "Parameters, tokens, epochs, FLOPs, memory and time of a ladder; refuses what cannot fit."),
    "sweep": (SweepFlags, "Find the learning rate of the baseline, or of --arms, on every rung; arms then take it."),
    "run": (RunFlags, "Train all cells of a ladder; goes on where it was stopped, and repeats nothing finished."),
    "speed": (SpeedFlags, "Measure tokens a second of every rung and arm with the device alone."),
    "fit": (FitFlags, "What every arm buys over the baseline, with intervals, from the results that are there."),
    "predict": (PredictFlags, "Write down what the held-out rung will come to, before it is run."),
    "report": (ReportFlags, "Write the report: one HTML page, and the tables as Markdown."),
    "slurm": (SlurmFlags, "Print a SLURM array script with a task for each cell that is left."),
}


def ladder_verb(arguments: list[str]) -> None:
    """Plan, tune, run, fit, predict or report a scaling ladder."""
    example = "perilune ladder run tiny"
    step, rest = _positional(arguments, "STEP", f"one of {', '.join(STEPS)}", example)
    if step not in STEPS:
        _fail(f"unknown step {step!r}{_nearest(step, STEPS)}; expected one of {', '.join(STEPS)}", code=2)
    from perilune.recipes.ladders import LADDERS

    name, rest = _positional(rest, "NAME", f"one of {', '.join(LADDERS)}", example)
    if name not in LADDERS:
        _fail(f"unknown ladder {name!r}{_nearest(name, LADDERS)}; expected one of {', '.join(LADDERS)}", code=2)
    kind, what = STEPS[step]
    flags = _parse(f"perilune ladder {step} {name}", f"{what}\n\nexample: perilune ladder {step} {name}", kind, rest)
    for count in ("workers", "repeats", "steps"):
        if getattr(flags, count, 1) < 1:
            raise UserError(f"--{count} is {getattr(flags, count)}, expected 1 or more")
    ladder = _changed(LADDERS[name](), flags)
    folder = Path(flags.folder) / name
    {
        "plan": _plan, "sweep": _sweep, "run": _run, "speed": _speed, "fit": _fit, "predict": _predict,
        "report": _report, "slurm": _slurm,
    }[step](ladder, flags, folder)  # fmt: skip


def _changed(ladder: "Ladder", flags: CommonFlags) -> "Ladder":
    """The recipe with --set, --device and --seeds."""
    sets = [*flags.set, *([f"trainer.device={flags.device}"] if flags.device != "auto" else [])]
    rungs = tuple(dataclasses.replace(rung, config=_with_set(rung.config, sets)) for rung in ladder.rungs)
    return dataclasses.replace(ladder, rungs=rungs, seeds=flags.seeds or ladder.seeds)


def _device(flags: CommonFlags) -> "torch.device":
    from perilune.train.trainer import pick_device

    return pick_device(flags.device, "--device")


def _tuned(ladder: "Ladder", folder: Path) -> "Ladder":
    from perilune.ladder.sweep import read_tuned, with_tuned

    return with_tuned(ladder, read_tuned(folder))


# plan -----------------------------------------------------------------------------------------------------------------


def _plan(ladder: "Ladder", flags: PlanFlags, folder: Path) -> None:
    from perilune.ladder import rounds
    from perilune.ladder.results import read_results
    from perilune.ladder.run import unfinished
    from perilune.ladder.show import print_plan, print_rounds

    ladder = _tuned(ladder, folder)
    plan = _made_plan(ladder, flags, folder, measure=flags.measure, assume=flags.h200)
    found = ()
    if flags.h200:
        estimate = rounds.estimator(ladder, read_results(folder), num_workers=flags.workers)
        left = [cell for held_out in (False, True) for cell in unfinished(ladder, folder, held_out=held_out)]
        found = rounds.split(left, estimate, seconds=flags.round_seconds, num_workers=flags.workers)
    if flags.json:
        _print_json(dataclasses.asdict(plan) | {"rounds": [dataclasses.asdict(each) for each in found]})
    else:
        print_plan(plan)
        if found:
            print_rounds(found, num_workers=flags.workers, seconds=flags.round_seconds)
    if plan.problems:
        raise UserError("; ".join(plan.problems))


def _made_plan(
    ladder: "Ladder", flags: CommonFlags, folder: Path, *, measure: bool = False, assume: bool = False
) -> "Plan":
    from perilune.ladder import plan as planning
    from perilune.ladder.results import one_corpus, read_results
    from perilune.ladder.speed import known_speeds, measure_ladder, read_speeds

    device, results = _device(flags), read_results(folder)
    measured = dict(read_speeds(folder)) | dict(measure_ladder(ladder, device) if measure else {})
    plan = planning.make_plan(
        ladder,
        speeds=known_speeds(results, measured),
        assume=assume,
        available_bytes=planning.available_memory(device),
    )
    one_corpus(results, plan.corpus)
    return plan


# run, sweep, speed ----------------------------------------------------------------------------------------------------


def _run(ladder: "Ladder", flags: RunFlags, folder: Path) -> None:
    from perilune.ladder.prediction import held_out_results, read_prediction
    from perilune.ladder.results import read_results
    from perilune.ladder.run import borrow, run_cell, run_ladder, unfinished
    from perilune.ladder.show import LadderProgress, print_results

    began, ladder = time.monotonic(), _tuned(ladder, folder)
    if flags.held_out and not flags.unpredicted and read_prediction(folder) is None:
        if not any(rung.is_held_out for rung in ladder.rungs):
            raise UserError(f"ladder {ladder.name!r} holds no rung out")
        if not held_out_results(ladder, read_results(folder)):
            raise UserError(
                f"nothing was predicted: `perilune ladder predict {ladder.name}` first, or --unpredicted to run the "
                "held-out rung all the same"
            )
    arms = {arm.name for arm in _named_arms(ladder, flags.arms)} if flags.arms else {arm.name for arm in ladder.arms}
    known = {cell.name: cell for cell in ladder.cells(held_out=flags.held_out) if cell.arm.name in arms}
    if flags.cell is not None and flags.cell not in known:
        raise UserError(f"--cell {flags.cell!r} is not in the ladder{_nearest(flags.cell, known)}")
    if flags.cell is None or flags.alone:  # a worker's plan was made by who started it
        _refuse(_made_plan(ladder, flags, folder))
    scratch = _scratch(flags, ladder.name)
    borrow(ladder, known.values() if flags.cell is None else [known[flags.cell]], folder, folder.parent.glob("*"))
    left = [cell for cell in unfinished(ladder, folder, held_out=flags.held_out) if cell.name in known]
    cells = left if flags.cell is None else [known[flags.cell]]
    with LadderProgress(ladder, cells, quiet=flags.quiet or flags.json) as progress:
        if flags.cell is not None:
            run_cell(
                ladder, cells[0], folder, ran_alone=flags.alone, scratch=scratch, commit=flags.commit,
                on_step=progress.step,
            )  # fmt: skip
        elif flags.workers > 1 or flags.seconds is not None:
            own = ["run", ladder.name, "--no-alone", *(["--held-out", "--unpredicted"] if flags.held_out else [])]
            later = _side_by_side(ladder, flags, cells, folder, own, progress.step, began)
            if later and not flags.json:
                print(f"{len(later)} of {len(cells)} cells are left for another round", file=sys.stderr)
        else:
            run_ladder(ladder, folder, cells=cells, scratch=scratch, commit=flags.commit, on_step=progress.step)
    results = read_results(folder)
    _print_json([dataclasses.asdict(result) for result in results]) if flags.json else print_results(ladder, results)


def _sweep(ladder: "Ladder", flags: SweepFlags, folder: Path) -> None:
    from perilune.ladder import sweep
    from perilune.ladder.results import read_results
    from perilune.ladder.run import borrow
    from perilune.ladder.show import LadderProgress, print_tuned

    began, arms = time.monotonic(), _named_arms(ladder, flags.arms)
    short = sweep.sweep_ladder(ladder)
    scratch = _scratch(flags, ladder.name)
    if flags.cell is not None:
        cell = sweep.find_cell(ladder, flags.cell)
        if cell is None:
            raise UserError(f"--cell {flags.cell!r} is not of this sweep: expected RUNG+ARM.lrVALUE+SEED")
        sweep.run_sweep_cell(ladder, cell, folder, scratch=scratch, commit=flags.commit)
        return
    _refuse(_made_plan(short, flags, folder / sweep.FOLDER))
    left: Sequence[Cell] = ()
    while not left and (cells := sweep.next_cells(ladder, arms, folder)):
        if borrow(short, cells, folder / sweep.FOLDER, folder.parent.glob(f"*/{sweep.FOLDER}")):
            continue
        with LadderProgress(short, cells, quiet=flags.quiet or flags.json) as progress:
            if flags.workers > 1 or flags.seconds is not None:
                own = ["sweep", ladder.name]
                left = _side_by_side(short, flags, cells, folder / sweep.FOLDER, own, progress.step, began)
            else:
                for cell in cells:
                    sweep.run_sweep_cell(
                        ladder, cell, folder, scratch=scratch, commit=flags.commit, on_step=progress.step
                    )
    found = sweep.found_by(ladder, arms, folder, seed_sd=flags.seed_sd)
    if left:
        raise UserError(f"{len(left)} cells of the sweep are left for another round; nothing was tuned yet")
    tuned = sweep.merged(ladder, sweep.read_tuned(folder), found, read_results(folder))
    sweep.write_tuned(folder, tuned)
    _print_json(dataclasses.asdict(tuned)) if flags.json else print_tuned(ladder, tuned)


def _named_arms(ladder: "Ladder", names: Sequence[str]) -> "list[Arm]":
    return _named("--arms", {arm.name: arm for arm in ladder.arms}, names) or [ladder.baseline]


def _named(flag: str, known: Mapping[str, Named], names: Sequence[str]) -> list[Named]:
    for name in names:
        if name not in known:
            raise UserError(f"{flag} {name!r} is not in the ladder{_nearest(name, known)}")
    return [known[name] for name in names]


def _speed(ladder: "Ladder", flags: SpeedFlags, folder: Path) -> None:
    from perilune.ladder.speed import FILE as SPEEDS
    from perilune.ladder.speed import measure_ladder, read_speeds, write_speeds

    device, ladder = _device(flags), _tuned(ladder, folder)
    rungs = _named("--rungs", {rung.name: rung for rung in ladder.rungs}, flags.rungs) or ladder.rungs
    arms = _named("--arms", {arm.name: arm for arm in ladder.arms}, flags.arms) or ladder.arms
    known, found = dict(read_speeds(folder)), dict[tuple[str, str], list[float]]()

    def keep(rung: str, arm: str, speed: float) -> None:
        """At once: a machine may be gone before the last one."""
        found.setdefault((rung, arm), []).append(speed)
        write_speeds(folder, known | found, device, flags.commit)
        if not flags.json:
            print(f"{rung} {arm}: {speed:,.0f} tokens/s", flush=True)

    measure_ladder(
        ladder, device, rungs=rungs, arms=arms, repeats=flags.repeats, steps=flags.steps, warmup=flags.warmup,
        on_measured=keep,
    )  # fmt: skip
    path = folder / SPEEDS
    _print_json({"speeds": str(path)}) if flags.json else print(f"speeds: {path}")


def _refuse(plan: "Plan") -> None:
    if plan.problems:
        raise UserError("; ".join(plan.problems))


def _scratch(flags: WorkFlags, name: str) -> Path | None:
    return None if flags.scratch is None else Path(flags.scratch) / name


def _side_by_side(
    ladder: "Ladder",
    flags: WorkFlags,
    cells: "Sequence[Cell]",
    folder: Path,
    command: list[str],
    on_step: Callable[[str, int], None],
    began: float,
) -> "list[Cell]":
    import torch

    from perilune.ladder.cost import tokens_per_step
    from perilune.ladder.results import read_results
    from perilune.ladder.rounds import estimator, largest_first
    from perilune.ladder.workers import run_side_by_side

    own = _repeated(flags) + ["--quiet"]
    for flag, value in (("--scratch", flags.scratch), ("--commit", flags.commit)):
        own += [flag, value] if value is not None else []
    count = torch.cuda.device_count() if flags.device in ("auto", "cuda") else 0
    options: dict[str, Any] = {}
    if flags.seconds is not None:
        estimate = estimator(ladder, read_results(folder), num_workers=flags.workers)
        cells = largest_first(cells, estimate)
        # Opening the corpus took its part.
        options = {"seconds": flags.seconds - (time.monotonic() - began), "estimate": estimate}
    return run_side_by_side(
        cells,
        folder,
        command=lambda cell: [sys.executable, "-m", "perilune", "ladder", *command, "--cell", cell.name, *own],
        num_workers=flags.workers,
        scratch=_scratch(flags, ladder.name),
        devices=[str(index) for index in range(count)] if count > 1 else (),
        on_step=on_step,
        tokens_per_step=lambda cell: tokens_per_step(cell.config()) * cell.config().trainer.log_every,
        **options,
    )


def _repeated(flags: CommonFlags) -> list[str]:
    """The flags that another process of the same ladder needs."""
    own = ["--folder", flags.folder, "--device", flags.device]
    own += ["--set", *flags.set] if flags.set else []
    return own + (["--seeds", *map(str, flags.seeds)] if flags.seeds else [])


# fit, predict, report, slurm ------------------------------------------------------------------------------------------


def _fit(ladder: "Ladder", flags: FitFlags, folder: Path) -> None:
    from perilune.ladder.evidence import read_evidence
    from perilune.ladder.show import print_fit, print_results

    evidence = read_evidence(ladder, folder, floor=flags.floor, seed_sd=flags.seed_sd)
    if evidence.fit is None:
        raise UserError("; ".join(evidence.notes))
    if flags.json:
        _print_json(evidence.fit.to_dict())
        return
    print_results(evidence.ladder, evidence.results)
    print_fit(evidence.fit, notes=evidence.notes)


def _predict(ladder: "Ladder", flags: PredictFlags, folder: Path) -> None:
    import torch

    from perilune.ladder import prediction
    from perilune.ladder.evidence import read_evidence
    from perilune.ladder.show import print_prediction
    from perilune.train.environment import describe_environment

    evidence = read_evidence(ladder, folder, floor=flags.floor, seed_sd=flags.seed_sd)
    if evidence.fit is None:
        raise UserError("; ".join(evidence.notes))
    commit = flags.commit or describe_environment(torch.device("cpu")).get("commit", "")
    made = prediction.predict(evidence.ladder, evidence.fit, evidence.results, commit=commit)
    path = prediction.write_prediction(folder, made, evidence.ladder, evidence.results)
    _print_json(dataclasses.asdict(made)) if flags.json else print_prediction(made, path)


def _report(ladder: "Ladder", flags: ReportFlags, folder: Path) -> None:
    from perilune.ladder.evidence import read_evidence
    from perilune.ladder.report import write_report

    written = write_report(
        read_evidence(ladder, folder, floor=flags.floor, seed_sd=flags.seed_sd), folder, png=flags.png
    )
    if flags.json:
        _print_json({"report": str(written[0]), "files": [str(path) for path in written]})
    else:
        print("\n".join(f"report: {path}" for path in written))


def _slurm(ladder: "Ladder", flags: SlurmFlags, folder: Path) -> None:
    from perilune.ladder import cost
    from perilune.ladder.results import read_results
    from perilune.ladder.run import unfinished
    from perilune.ladder.slurm import array_script
    from perilune.ladder.speed import known_speeds, read_speeds

    ladder = _tuned(ladder, folder)
    cells = list(unfinished(ladder, folder, held_out=flags.held_out))
    speeds = known_speeds(read_results(folder), read_speeds(folder))
    times = [
        cost.cost(ladder, cell.rung, cell.arm).trained_tokens / speed
        for cell in cells
        if (speed := speeds.get((cell.rung.name, cell.arm.name)))
    ]
    script = array_script(
        ladder.name,
        cells,
        command=[
            sys.executable, "-m", "perilune", "ladder", "run", ladder.name, *_repeated(flags),
            *(["--held-out"] if flags.held_out else []),
        ],
        logs=str(folder / "logs"),
        seconds=max(times) if times and len(times) == len(cells) else None,
        gpus=flags.gpus,
    )  # fmt: skip
    _print_json({"script": script, "cells": [cell.name for cell in cells]}) if flags.json else print(script, end="")
