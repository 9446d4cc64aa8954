"""What a run writes beside its checkpoints: metrics.jsonl, the optional sinks, and the progress bar."""

import errno
from pathlib import Path
from types import TracebackType

from perilune.train import ranks
from perilune.train.config_file import to_plain
from perilune.train.metrics import JsonLines, Record, Sink, open_sinks
from perilune.train.progress import TrainingProgress
from perilune.train.run_config import RunConfig
from perilune.train.run_folder import METRICS, RunError


class Outputs:
    """Context manager. Ranks other than 0 write nothing and say nothing.

    `metrics_bytes` is where the checkpoint's metrics ended; what was written after it belongs to steps to be repeated.
    """

    def __init__(self, config: RunConfig, folder: Path, *, quiet: bool, step: int, metrics_bytes: int) -> None:
        self._name = config.name
        self._sinks: list[Sink] = []
        self.metrics: JsonLines | None = None
        self.progress = TrainingProgress(total_steps=config.trainer.steps, done=step, quiet=quiet or ranks.rank() != 0)
        if ranks.rank() == 0:
            self.metrics = JsonLines(folder / METRICS)
            self.metrics.cut_to(metrics_bytes)
            self._sinks = open_sinks(
                folder,
                tensorboard=config.trainer.tensorboard,
                tracker=config.trainer.tracker,
                name=config.name,
                config=to_plain(config),
                step=step,
            )

    def __enter__(self) -> "Outputs":
        self.progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)
        for sink in self._sinks:
            sink.close()
        if self.metrics is not None:
            self.metrics.close()

    def write(self, record: Record) -> None:
        if self.metrics is None:
            return
        try:
            self.metrics.append(record)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise RunError(
                f"{str(self.metrics.path)!r} could not be written: the disk is full; checkpoints are untouched: "
                f"free some space and continue with `perilune train {self._name} --resume`"
            ) from error
        for sink in self._sinks:
            sink.log(record)
        self.progress.record(record)

    def metrics_bytes(self) -> int:
        return 0 if self.metrics is None else self.metrics.position()

    def say(self, text: str) -> None:
        self.progress.say(text)

    def say_stopping(self, signal_name: str) -> None:
        self.say(f"{signal_name}: finishing this step, then saving (Ctrl-C again stops at once, without saving)")
