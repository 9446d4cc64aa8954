"""What each kind of attention can remember: accuracy on MQAR, palindrome and stack by length, arm and seed.

    python benchmarks/probes.py --minutes 7 --workers 8                     on a GPU, as many cells as fit
    python benchmarks/probes.py --small --arms kda mla_rope --minutes 1     tiny, to see that it works

Cells are runs of recipes/probes.py, several side by side in processes of their own. A cell ends early when the held-out
accuracy reaches `stop_at`. What is run follows from what is known, for each task, arm and seed:

    1. the shortest length with the middle learning rate; where that does not solve it, with the others
    2. the next length with the rate that was best at the shortest, as long as the length before reached `least`
    3. when nothing of that is left to begin, the other rates where a longer length was not solved: so that no arm fails
       for its learning rate alone

A length that is not run because the one before was failed counts as failed. Whatever is finished is written to
benchmarks/results/probes.json at once and not repeated by the next call, so a grid may take several. A cell that the
clock stops is written with `finished` false; the next call repeats it.
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
from rich.console import Console
from rich.table import Table

from perilune.data.probes import TASKS, Task
from perilune.recipes.probes import ARMS, LENGTHS, changed, probe
from perilune.train import RunConfig, train
from perilune.train.config_file import to_plain
from perilune.train.environment import describe_environment

LRS = (0.0005, 0.0015, 0.005)
STEPS = 1500
EVAL_EVERY = 125
Row = dict[str, Any]

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
    """At the most; 1,500, or 300 with --small."""
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


@dataclass(frozen=True, kw_only=True)
class Cell:
    task: Task
    length: int
    arm: str
    seed: int
    config: RunConfig


class _Enough(Exception):
    """Raised inside training to end it."""


def cell_of(settings: Settings, task: Task, length: int, arm: str, lr: float, seed: int) -> Cell:
    own = {name: json.loads(value) for name, _, value in (each.partition("=") for each in settings.set)}
    config = probe(task, length=length, arm=arm)
    steps = settings.steps or (300 if settings.small else STEPS)
    often = {"trainer.eval_every": EVAL_EVERY}
    fixed = {"trainer.steps": steps, "trainer.report": False, "trainer.keep_last": 1, "optimizer.lr": lr}
    config = changed(config, {**often, **(SMALL if settings.small else {}), **own, **fixed})
    return Cell(task=task, length=length, arm=arm, seed=seed, config=replace(config, seed=seed))


def lengths_of(settings: Settings) -> tuple[int, ...]:
    return settings.lengths or ((32,) if settings.small else LENGTHS)


def rates_of(settings: Settings) -> tuple[float, ...]:
    return settings.lrs or ((SMALL["optimizer.lr"],) if settings.small else LRS)


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
    rates = rates_of(settings)
    middle = rates[len(rates) // 2]
    others = [lr for lr in rates if lr != middle]
    best, waiting = middle, []
    for place, length in enumerate(lengths_of(settings)):
        cells = {lr: cell_of(settings, task, length, arm, lr, seed) for lr in rates}
        rows = {lr: known.get(fingerprint(cell.config)) for lr, cell in cells.items()}
        first = rows[best]
        if first is None:
            return [*waiting, (0, cells[best])]
        solved = (first["accuracy"] or 0.0) >= settings.stop_at
        missing = [] if solved else [lr for lr in rates if rows[lr] is None]
        if place == 0 and missing:
            return [(0, cells[lr]) for lr in others if rows[lr] is None]
        waiting += [(1, cells[lr]) for lr in missing]
        there = {lr: row for lr, row in rows.items() if row is not None}
        reached = max((row["accuracy"] or 0.0) for row in there.values())
        if place == 0:
            best = max(there, key=lambda lr: ((there[lr]["accuracy"] or 0.0), -there[lr]["steps"]))
        if reached < settings.least:
            break
    return waiting


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
        "accuracy": last.get("accuracy"), "exact_match": last.get("exact_match"), "loss": last.get("loss"),
        "steps": max((record["step"] for record in [*trained, *valid]), default=0),
        "steps_to_99": next((record["step"] for record in valid if record["accuracy"] >= 0.99), None),
        "curve": [[record["step"], round(record["accuracy"], 4)] for record in valid],
        "tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
        "finished": why != "time", "ended_by": why, "seconds": round(time.time() - began, 1),
        "fingerprint": fingerprint(cell.config),
    }  # fmt: skip


def fingerprint(config: RunConfig) -> str:
    """Of everything that decides a result."""
    plain = to_plain(config)
    for name in ("device", "log_every", "micro_batch_rows"):
        plain["trainer"].pop(name)
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def records(metrics: Path, kind: str) -> list[dict[str, Any]]:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write_rows(path: Path, rows: list[dict[str, Any]], environment: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    ordered = sorted(rows, key=lambda row: (row["task"], row["length"], row["arm"], row["lr"], row["seed"]))
    content = {"environment": environment, "rows": ordered}
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Accuracy of every arm (the best of its learning rates, the mean of its seeds) by task and length."""
    places = sorted({(row["task"], row["length"]) for row in rows})
    table = Table(title="held-out accuracy (steps to 99%)", title_justify="left")
    table.add_column("arm")
    for task, length in places:
        table.add_column(f"{task} {length}", justify="right")
    for arm in dict.fromkeys([*ARMS, *(row["arm"] for row in rows)]):
        shown = []
        for task, length in places:
            here = [row for row in rows if (row["task"], row["length"], row["arm"]) == (task, length, arm)]
            here = [row for row in here if row["accuracy"] is not None]
            by_lr = {lr: [row for row in here if row["lr"] == lr] for lr in {row["lr"] for row in here}}
            best = max(by_lr.values(), key=lambda group: sum(r["accuracy"] for r in group) / len(group), default=[])
            if not best:
                shown.append("-")
                continue
            fast = [row["steps_to_99"] for row in best if row["steps_to_99"]]
            mean = sum(row["accuracy"] for row in best) / len(best)
            open_end = "" if all(row["finished"] for row in best) else " ..."
            shown.append(f"{mean:.3f}{f' ({min(fast):,})' if fast else ''}{open_end}")
        if set(shown) != {"-"}:
            table.add_row(arm, *shown)
    console.print(table)


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
    show(done, console)
    left = len(next_cells(settings, done))
    console.print(f"{len(done)} rows: {settings.results}" + (f"; at least {left} more to run" if left else ""))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
