"""Cells side by side: a process for each, as many at a time as asked for, spread over the GPUs there are.

Small rungs leave most of a GPU idle, so several share it; their speeds then say nothing about the arm, and are marked
so. A process that fails does not stop the others: the ladder goes on, and says at the end which cells failed, and why.
"""

from __future__ import annotations

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
    devices: Sequence[str] = (),
    on_step: Callable[[str, int], None] = lambda name, tokens: None,
    tokens_per_step: Callable[[Cell], int] = lambda cell: 0,
) -> None:
    """Run `command(cell)` for every cell. devices: values of CUDA_VISIBLE_DEVICES to give out, if any."""
    waiting, running, failed = list(cells), list[_Worker](), list[str]()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                running.append(_start(waiting.pop(0), folder, command, _least_busy(devices, running)))
            time.sleep(POLL_SECONDS)
            for worker in list(running):
                code = worker.process.poll()
                steps = _new_steps(worker, folder)
                if steps:
                    on_step(worker.cell.name, steps * tokens_per_step(worker.cell))
                if code is not None:
                    running.remove(worker)
                    if code:
                        failed.append(f"{worker.cell.name} (exit code {code}): {_last_line(worker.log)}")
    except BaseException:
        _stop(running)
        raise
    if failed:
        raise RunError(f"{len(failed)} of {len(cells)} cells failed; run again to go on. " + "; ".join(failed))


def _start(cell: Cell, folder: Path, command: Callable[[Cell], list[str]], device: str | None) -> _Worker:
    log = folder / "logs" / f"{cell.name}.txt"
    environment = dict(os.environ) | ({} if device is None else {"CUDA_VISIBLE_DEVICES": device})
    with log.open("wb") as out:
        # In a session of its own: Ctrl-C reaches this process alone, which then asks the workers to save.
        process = subprocess.Popen(
            command(cell), stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    seen = {path: path.stat().st_size for path in (folder / CELLS).glob(f"{cell.name}*/{METRICS}")}
    return _Worker(cell=cell, process=process, device=device, log=log, seen=seen)


def _least_busy(devices: Sequence[str], running: Sequence[_Worker]) -> str | None:
    if not devices:
        return None
    busy = [worker.device for worker in running]
    return min(devices, key=busy.count)


def _new_steps(worker: _Worker, folder: Path) -> int:
    """Training records written since the last look. A branch begins as a copy of its trunk: that is not counted."""
    steps = 0
    for path in (folder / CELLS).glob(f"{worker.cell.name}*/{METRICS}"):
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


def _stop(running: Sequence[_Worker]) -> None:
    for worker in running:
        worker.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in running:
        try:
            worker.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
