"""Cells side by side: a process for each, as many at a time as asked for, spread over the GPUs there are.

Small rungs leave most of a GPU idle, so several share it; their speeds then say nothing about the arm, and are marked
so. A process that fails does not stop the others: the ladder goes on, and says at the end which cells failed, and why.
With a deadline no cell begins that would not be done by then, and what still runs when it comes is stopped and saved.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from perilune.ladder.design import Cell
from perilune.ladder.run import CELLS
from perilune.train import RunError
from perilune.train.run_folder import METRICS

POLL_SECONDS = 0.2
GRACE_SECONDS = 120.0  # to finish a step and save
STOP_SECONDS = 10.0  # the same, where time is short


@dataclass(kw_only=True)
class _Worker:
    cell: Cell
    process: subprocess.Popen[bytes]
    device: str | None
    log: Path
    seen: dict[Path, int]
    """Bytes of each metrics file that were counted."""


def run_side_by_side(
    cells: Sequence[Cell],
    folder: Path,
    *,
    command: Callable[[Cell], list[str]],
    num_workers: int,
    scratch: Path | None = None,
    devices: Sequence[str] = (),
    on_step: Callable[[str, int], None] = lambda name, tokens: None,
    tokens_per_step: Callable[[Cell], int] = lambda cell: 0,
    seconds: float | None = None,
    estimate: Callable[[Cell], float] = lambda cell: 0.0,
    on_end: Callable[[Cell], None] = lambda cell: None,
) -> list[Cell]:
    """Run `command(cell)` for every cell; returns those that did not begin or did not end in time.

    devices: values of CUDA_VISIBLE_DEVICES to give out, if any. seconds: time for all of it; estimate: how long a cell
    takes beside the others. on_end: called when a cell's process has ended well.
    """
    waiting, running, failed = list(cells), list[_Worker](), list[str]()
    logs = (scratch or folder).resolve() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    runs = scratch or folder / CELLS
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    times = {cell.name: estimate(cell) for cell in cells}
    try:
        while waiting or running:
            while len(running) < num_workers:
                fitting = [cell for cell in waiting if time.monotonic() + times[cell.name] <= deadline]
                if not fitting:
                    break
                waiting.remove(fitting[0])
                running.append(_start(fitting[0], logs, runs, command, _least_busy(devices, running)))
            if not running:
                break
            time.sleep(POLL_SECONDS)
            for worker in list(running):
                code = worker.process.poll()
                tokens = _new_steps(worker, runs) * tokens_per_step(worker.cell)
                if tokens:
                    on_step(worker.cell.name, tokens)
                if code is not None:
                    running.remove(worker)
                    if code == 0:
                        on_end(worker.cell)
                    else:
                        failed.append(f"{worker.cell.name} (exit code {code}): {_last_line(worker.log)}")
            if time.monotonic() >= deadline:
                break
    finally:
        _stop(running, grace=GRACE_SECONDS if seconds is None else STOP_SECONDS)
    if failed:
        raise RunError(f"{len(failed)} of {len(cells)} cells failed; run again to go on. " + "; ".join(failed))
    return [*(worker.cell for worker in running), *waiting]


def _start(cell: Cell, logs: Path, runs: Path, command: Callable[[Cell], list[str]], device: str | None) -> _Worker:
    log = logs / f"{cell.name}.txt"
    environment = dict(os.environ) | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    with log.open("wb") as out:
        # In a session of its own: Ctrl-C reaches this process alone, which then asks the workers to save.
        process = subprocess.Popen(
            command(cell), stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    seen = {path: path.stat().st_size for path in runs.glob(f"{cell.name}*/{METRICS}")}
    return _Worker(cell=cell, process=process, device=device, log=log, seen=seen)


def _least_busy(devices: Sequence[str], running: Sequence[_Worker]) -> str | None:
    if not devices:
        return None
    busy = [worker.device for worker in running]
    return min(devices, key=busy.count)


def _new_steps(worker: _Worker, runs: Path) -> int:
    """Training records written since the last look. A branch begins as a copy of its trunk: that is not counted."""
    steps = 0
    for path in runs.glob(f"{worker.cell.name}*/{METRICS}"):
        if path not in worker.seen and path.parent.name != worker.cell.name:
            trunk = path.parent.with_name(worker.cell.name) / METRICS
            worker.seen[path] = trunk.stat().st_size if trunk.exists() else 0
        with path.open("rb") as file:
            file.seek(worker.seen.get(path, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        steps += whole.count(b'"kind": "train"')
        worker.seen[path] = worker.seen.get(path, 0) + len(whole)
    return steps


def _stop(running: Sequence[_Worker], *, grace: float) -> None:
    for worker in running:
        worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for worker in running:
        try:
            worker.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
