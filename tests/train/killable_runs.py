"""Runs in a process of their own that SIGKILL themselves at a chosen instant.

A fork server imports torch once and computes nothing, so each run costs a fork and starts without threads that a fork
would lose.
"""

import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from perilune.train import RunConfig, train
from perilune.train.run_folder import CONFIG

forks = multiprocessing.get_context("forkserver")
# torch.optim imports the compiler at the first use; two seconds that every fork would pay again.
forks.set_forkserver_preload(["perilune.train", "torch._dynamo"])


def start(
    config: RunConfig, runs_folder: Path, *, kill_at: int | None = None, phases_to: Path | None = None
) -> BaseProcess:
    """Begin or continue the run; `kill_at` counts the phases the trainer reports from its start."""
    process = forks.Process(target=_run, args=(config, runs_folder, kill_at, phases_to))
    process.start()
    return process


def finish(config: RunConfig, runs_folder: Path, **options) -> int:
    """Exit code of the run: 0, or -9 where it killed itself."""
    process = start(config, runs_folder, **options)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(config: RunConfig, runs_folder: Path, kill_at: int | None, phases_to: Path | None) -> None:
    torch.set_num_threads(1)
    reached: list[str] = []

    def on_phase(phase: str) -> None:
        if len(reached) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        reached.append(phase)

    resume = (runs_folder / config.name / CONFIG).exists()
    train(config, runs_folder=runs_folder, resume=resume, quiet=True, on_phase=on_phase)
    if phases_to is not None:
        phases_to.write_text("\n".join(reached))
