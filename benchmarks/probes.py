"""What each kind of attention can remember: accuracy on MQAR, palindrome and stack by length, arm and seed.

    python benchmarks/probes.py --minutes 7 --workers 8                     on a GPU, as many cells as fit
    python benchmarks/probes.py --small --arms kda mla_rope --minutes 1     tiny, to see that it works

Cells are runs of recipes/probes.py, several side by side in processes of their own. A cell ends early when the held-out
accuracy reaches `stop_at`. What is run follows from what is known, for each task, arm and seed:

    1. the shortest length with the middle learning rate; where that does not solve it, the same with twice the steps,
       the first half of them on short problems (ProbeConfig.short_first)
    2. the next length with what was best at the shortest, as long as the length before reached `least`
    3. when nothing of that is left to begin, where a length was not solved: the other rates, and short problems first,
       so that no arm fails for its learning rate or for how its rows begin alone

Short problems are for softmax attention, which on MQAR of 256 tokens was at a guess among the values of a row after all
1,500 steps, at any of the rates. An arm that solves a task without them is given half the tokens, and fewer attempts.

A length that is not run because the one before was failed counts as failed. Whatever is finished is written to
benchmarks/results/probes.json at once and not repeated by the next call, so a grid may take several. A cell that the
clock stops is written with `finished` false; the next call repeats it. `python benchmarks/probes_report.py` makes a
table and a plot of the file.
"""

import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from probes_report import Row, short_steps, table
from rich.console import Console

from perilune.data.probes import TASKS, ProbeConfig, Task
from perilune.data.probes.rows import short_lengths
from perilune.recipes.probes import LENGTHS, changed, probe
from perilune.train import RunConfig, train
from perilune.train.config_file import to_plain
from perilune.train.environment import describe_environment

LRS = (0.0005, 0.0015, 0.005)
STEPS = 1500
SHORT_FIRST_TIMES = 2
"""As many times the steps where short problems come first; they take half of them."""
EVAL_EVERY = 125

SMALL: dict[str, Any] = {
    "model.hidden_size": 64, "model.intermediate_size": 128, "model.vocab_size": 512, "data.vocab_size": 64,
    "model.kda.num_heads": 2, "model.kda.head_dim": 32, "model.mla.num_attention_heads": 2,
    "model.mla.kv_lora_rank": 64, "model.mla.qk_nope_head_dim": 32, "model.mla.qk_rope_head_dim": 16,
    "model.mla.v_head_dim": 32, "data.probe.num_stacks": 4, "trainer.precision": "float32",
    "trainer.global_batch_rows": 32, "trainer.micro_batch_rows": 32, "trainer.eval_rows": 64,
    "trainer.eval_every": 50, "schedule.warmup_steps": 20, "optimizer.lr": 5e-3,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Settings:
    tasks: tuple[Task, ...] = TASKS
    lengths: tuple[int, ...] | None = None
    """256 to 2048, or 32 with --small."""
    arms: tuple[str, ...] = ("kda", "kda_head_decay", "mla", "mla_rope", "hybrid")
    """Of recipes/probes.py."""
    seeds: tuple[int, ...] = (0,)
    lrs: tuple[float, ...] | None = None
    """Learning rates, from the lowest; 0.0005, 0.0015 and 0.005, or the recipe's with --small."""
    steps: int | None = None
    """At the most; 1,500, or 300 with --small. Twice as many where short problems come first."""
    stop_at: float = 0.99
    """Held-out accuracy that ends a run."""
    least: float = 0.5
    """Accuracy at a length, below which an arm is not asked for longer ones."""
    minutes: float = 9.0
    """When they are over, cells that run are stopped and no other begins."""
    workers: int = 1
    """Cells at a time."""
    set: tuple[str, ...] = ()
    """More fields by path with a JSON value, for all cells: --set optimizer.kind='"muonclip"'"""
    small: bool = False
    """Widths of 64 and short rows, for a CPU."""
    commit: str = ""
    results: Path = Path("benchmarks/results/probes.json")


@dataclass(frozen=True)
class Attempt:
    """How a cell is trained."""

    lr: float
    short_first: bool = False


@dataclass(frozen=True, kw_only=True)
class Cell:
    task: Task
    length: int
    arm: str
    seed: int
    config: RunConfig


class _Enough(Exception):
    """Raised inside training to end it."""


def cell_of(settings: Settings, task: Task, length: int, arm: str, attempt: Attempt, seed: int) -> Cell:
    own = {name: json.loads(value) for name, _, value in (each.partition("=") for each in settings.set)}
    config = probe(task, length=length, arm=arm)
    steps = settings.steps or (300 if settings.small else STEPS)
    steps *= SHORT_FIRST_TIMES if attempt.short_first else 1
    often = {"trainer.eval_every": EVAL_EVERY}
    fixed = {"trainer.steps": steps, "trainer.report": False, "trainer.keep_last": 1, "optimizer.lr": attempt.lr}
    config = changed(config, {**often, **(SMALL if settings.small else {}), **own, **fixed})
    if attempt.short_first:
        lengths = len(short_lengths(length))
        begin = max(1, steps // 2 // lengths) * lengths  # whole steps of every length
        config = changed(config, {"data.probe.short_first": begin * config.trainer.global_batch_rows})
    return Cell(task=task, length=length, arm=arm, seed=seed, config=replace(config, seed=seed))


def lengths_of(settings: Settings) -> tuple[int, ...]:
    return settings.lengths or ((32,) if settings.small else LENGTHS)


def rates_of(settings: Settings) -> tuple[float, ...]:
    return settings.lrs or ((SMALL["optimizer.lr"],) if settings.small else LRS)


def attempts_of(settings: Settings, length: int) -> list[list[Attempt]]:
    """At the shortest length, one list after the other until the task is solved; those after the second can wait."""
    rates = rates_of(settings)
    middle = rates[len(rates) // 2]
    others = [lr for lr in rates if lr != middle]
    ways = (False, True) if short_lengths(length) else (False,)
    lists = [[Attempt(lr, short) for lr in found] for found in ([middle], others) for short in ways]
    # A plateau is left by shorter problems, hardly ever by another rate.
    return [each for each in lists if each]


def next_cells(settings: Settings, rows: Sequence[Row]) -> list[Cell]:
    """What there is to run, given the rows that are finished: short before long, other rates last."""
    known = {row["fingerprint"]: row for row in rows if row["finished"]}
    found: list[tuple[int, int, Cell]] = []
    for seed in settings.seeds:
        for task in settings.tasks:
            for arm in settings.arms:
                found += [(order, cell.length, cell) for order, cell in _next_of(settings, known, task, arm, seed)]
    return [cell for _, _, cell in sorted(found, key=lambda each: each[:2])]


def _next_of(settings: Settings, known: Mapping[str, Row], task: Task, arm: str, seed: int) -> list[tuple[int, Cell]]:
    """(0 or 1, cell): those of the third rule have 1."""

    def cell(length: int, attempt: Attempt) -> Cell:
        return cell_of(settings, task, length, arm, attempt, seed)

    def row(length: int, attempt: Attempt) -> Row | None:
        return known.get(fingerprint(cell(length, attempt).config))

    first, *longer = lengths_of(settings)
    there: dict[Attempt, Row] = {}
    waiting: list[tuple[int, Cell]] = []
    for number, attempts in enumerate(attempts_of(settings, first)):
        there |= {attempt: found for attempt in attempts if (found := row(first, attempt)) is not None}
        missing = [cell(first, attempt) for attempt in attempts if attempt not in there]
        if missing and number < 2:
            return [(0, each) for each in missing]
        waiting += [(1, each) for each in missing]
        if missing or any(_accuracy(found) >= settings.stop_at for found in there.values()):
            break
    best = max(there, key=lambda attempt: (_accuracy(there[attempt]), -there[attempt]["steps"]))
    reached = _accuracy(there[best])
    for length in longer:
        if reached < settings.least:
            break
        if (found := row(length, best)) is None:
            return [*waiting, (0, cell(length, best))]
        reached = _accuracy(found)
        if reached >= settings.stop_at:
            continue
        others = [Attempt(lr, best.short_first) for lr in rates_of(settings) if lr != best.lr]
        for attempt in [*others, *([] if best.short_first else [Attempt(best.lr, True)])]:
            if (found := row(length, attempt)) is None:
                waiting.append((1, cell(length, attempt)))
            else:
                reached = max(reached, _accuracy(found))
    return waiting


def _accuracy(row: Row) -> float:
    return row["accuracy"] or 0.0


def run_cell(cell: Cell, *, stop_at: float, deadline: float) -> dict[str, Any]:
    """Train until the steps, the accuracy or the time are reached; a row of the results."""
    began = time.time()
    with tempfile.TemporaryDirectory() as runs:
        metrics = Path(runs) / cell.config.name / "metrics.jsonl"

        def on_phase(phase: str) -> None:
            if phase == "step:validated" and records(metrics, "valid")[-1]["accuracy"] >= stop_at:
                raise _Enough("accuracy")
            if phase == "step:logged" and time.time() > deadline:
                raise _Enough("time")

        why = "steps"
        try:
            train(cell.config, runs_folder=runs, quiet=True, on_phase=on_phase)
        except _Enough as enough:
            why = str(enough)
        valid, trained = records(metrics, "valid"), records(metrics, "train")
    last = valid[-1] if valid else {}
    speeds = sorted(record["tokens_per_s"] for record in trained if record.get("tokens_per_s"))
    return {
        "task": cell.task, "length": cell.length, "arm": cell.arm, "seed": cell.seed,
        "lr": cell.config.optimizer.lr, "optimizer": cell.config.optimizer.kind,
        "short_steps": probe_of(cell.config).short_first // cell.config.trainer.global_batch_rows,
        "tokens_per_step": cell.config.trainer.global_batch_rows * cell.length,
        "accuracy": last.get("accuracy"), "exact_match": last.get("exact_match"), "loss": last.get("loss"),
        "steps": max((record["step"] for record in [*trained, *valid]), default=0),
        "steps_to_99": next((record["step"] for record in valid if record["accuracy"] >= 0.99), None),
        "curve": [[record["step"], round(record["accuracy"], 4)] for record in valid],
        "tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
        "finished": why != "time", "ended_by": why, "seconds": round(time.time() - began, 1),
        "fingerprint": fingerprint(cell.config),
    }  # fmt: skip


def probe_of(config: RunConfig) -> ProbeConfig:
    assert config.data.probe is not None, "every cell is a run on a probe"
    return config.data.probe


def fingerprint(config: RunConfig) -> str:
    """Of everything that decides a result."""
    plain = to_plain(config)
    for name in ("device", "log_every", "micro_batch_rows"):
        plain["trainer"].pop(name)
    if not plain["data"]["probe"]["short_first"]:
        plain["data"]["probe"].pop("short_first")  # rows from before there was such a field are of the same run
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def records(metrics: Path, kind: str) -> list[dict[str, Any]]:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write_rows(path: Path, rows: list[dict[str, Any]], environment: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    place = ("task", "length", "arm", "lr", "seed")
    ordered = sorted(rows, key=lambda row: (*(row[name] for name in place), short_steps(row)))
    content = {"environment": environment, "rows": ordered}
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def main(settings: Settings) -> None:
    deadline = time.time() + 60 * settings.minutes
    import torch

    environment = describe_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    environment |= {"commit": settings.commit} if settings.commit else {}
    done = read_rows(settings.results)
    console = Console(width=None if os.isatty(1) else 160)
    there = sum(row["finished"] for row in done)
    console.print(f"{there} rows are there already, {settings.workers} cells at a time, {settings.minutes:g} minutes")
    begun: set[str] = set()
    # Processes that are started anew: a forked one cannot use the GPU.
    with ProcessPoolExecutor(settings.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        running: set[Future[Row]] = set()
        while True:
            fresh = [cell for cell in next_cells(settings, done) if fingerprint(cell.config) not in begun]
            # Never more than can run: what should come next may be known better when there is room.
            while fresh and len(running) < settings.workers and time.time() < deadline:
                cell = fresh.pop(0)
                begun.add(fingerprint(cell.config))
                running.add(pool.submit(run_cell, cell, stop_at=settings.stop_at, deadline=deadline))
            if not running:
                break
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for row in (future.result() for future in ended):
                done = [each for each in done if each["fingerprint"] != row["fingerprint"]] + [row]
                write_rows(settings.results, done, environment)
                accuracy = float("nan") if row["accuracy"] is None else row["accuracy"]
                console.print(
                    f"{row['task']} {row['length']} {row['arm']} seed {row['seed']} lr {row['lr']:g}: accuracy "
                    f"{accuracy:.3f} after {row['steps']:,} steps, {row['seconds']:.0f} s, ended by {row['ended_by']}"
                )
    console.print("\n".join(table(done)), markup=False, soft_wrap=True)
    left = len(next_cells(settings, done))
    console.print(f"{len(done)} rows: {settings.results}" + (f"; at least {left} more to run" if left else ""))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
