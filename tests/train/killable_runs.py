"""Runs in a process of their own that SIGKILL themselves at a chosen instant.

A fork server imports torch once and computes nothing, so each run costs a fork and starts without threads that a fork
would lose.
"""

import multiprocessing
import os
import signal
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from perilune.train import RunConfig, train
from perilune.train.run_folder import CONFIG

forks = multiprocessing.get_context("forkserver")
# torch.optim imports the compiler at the first use; two seconds that every fork would pay again.
forks.set_forkserver_preload(["perilune.train", "torch._dynamo"])


def start(
    config: RunConfig,
    runs_folder: Path,
    *,
    kill_at: int | None = None,
    kill_in: tuple[str, int] | None = None,
    kill_after_bytes: int | None = None,
    phases_to: Path | None = None,
) -> BaseProcess:
    """Begin or continue the run; `kill_at` counts the phases the trainer reports from its start, `kill_in` those of
    one name. Saves report theirs while training goes on.

    `kill_after_bytes` counts what DCP itself has written to its files: the kill comes in the middle of one.
    """
    process = forks.Process(target=_run, args=(config, runs_folder, kill_at, kill_in, kill_after_bytes, phases_to))
    process.start()
    return process


def finish(config: RunConfig, runs_folder: Path, **options) -> int:
    """Exit code of the run: 0, or -9 where it killed itself."""
    process = start(config, runs_folder, **options)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


class DyingFile:
    """A file of DCP that writes as much as is left of the process' life."""

    written = 0

    def __init__(self, file: BinaryIO, last_byte: int) -> None:
        self._file = file
        self._last_byte = last_byte

    def write(self, data: bytes) -> int:
        left = self._last_byte - DyingFile.written
        if len(data) >= left:
            self._file.write(bytes(data)[:left])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        DyingFile.written += len(data)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _die_in_write(last_byte: int) -> None:
    real = FileSystem.create_stream

    @contextmanager
    def create_stream(self, path, mode):
        with real(self, path, mode) as file:
            yield DyingFile(file, last_byte) if "w" in mode else file

    FileSystem.create_stream = create_stream


def _run(
    config: RunConfig,
    runs_folder: Path,
    kill_at: int | None,
    kill_in: tuple[str, int] | None,
    kill_after_bytes: int | None,
    phases_to: Path | None,
) -> None:
    torch.set_num_threads(1)
    if kill_after_bytes is not None:
        _die_in_write(kill_after_bytes)
    reached: list[str] = []

    def on_phase(phase: str) -> None:
        if len(reached) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        reached.append(phase)
        if kill_in == (phase, reached.count(phase)):
            os.kill(os.getpid(), signal.SIGKILL)

    resume = (runs_folder / config.name / CONFIG).exists()
    train(config, runs_folder=runs_folder, resume=resume, quiet=True, on_phase=on_phase)
    if phases_to is not None:
        phases_to.write_text("\n".join(reached))
