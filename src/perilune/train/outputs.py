"""What a run writes beside its checkpoints: metrics.jsonl, the optional sinks, and the progress bar."""

import errno
from pathlib import Path
from types import TracebackType

from perilune.train import ranks
from perilune.train.config_file import to_plain
from perilune.train.metrics import JsonLines, Record
from perilune.train.progress import TrainingProgress
from perilune.train.run_config import RunConfig
from perilune.train.run_folder import METRICS, RunError, resume_command
from perilune.train.sinks import Sinks, TensorBoardSink, start_tracker


class Outputs:
    """Context manager. Ranks other than 0 write nothing and say nothing.

    Entering it starts what lies outside the run's folder, the tracker; `open_files` comes once the folder is ours.
    """

    def __init__(self, config: RunConfig, folder: Path, *, quiet: bool) -> None:
        self._config = config
        self._folder = folder
        self._sinks = Sinks(warn=self.say)
        self.metrics: JsonLines | None = None
        self.progress = TrainingProgress(total_steps=config.trainer.steps, quiet=quiet or ranks.rank() != 0)

    def __enter__(self) -> "Outputs":
        if ranks.rank() == 0 and self._config.trainer.tracker is not None:
            tracker = start_tracker(self._config.trainer.tracker, name=self._config.name, config=to_plain(self._config))
            self._sinks.add("trainer.tracker", lambda: tracker)
        self.progress.__enter__()
        return self

    def open_files(self, *, step: int, metrics_bytes: int) -> None:
        """`metrics_bytes` is where the metrics ended at `step`; what comes after belongs to steps to be repeated."""
        self.progress.start_at(step)
        if ranks.rank() == 0:
            self.metrics = JsonLines(self._folder / METRICS)
            self.metrics.cut_to(metrics_bytes)
            if self._config.trainer.tensorboard:
                events = self._folder / "tensorboard"
                self._sinks.add("trainer.tensorboard", lambda: TensorBoardSink(events, step=step))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.__exit__(kind, error, trace)
        self._sinks.close()
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
                f"free some space and continue with `{resume_command(self._folder)}`"
            ) from error
        self._sinks.log(record)
        self.progress.record(record)

    def metrics_bytes(self) -> int:
        return 0 if self.metrics is None else self.metrics.position()

    def files(self) -> list[Path]:
        """What a checkpoint counts on: `metrics_bytes` of it have to be on the disk when it does."""
        return [] if self.metrics is None else [self.metrics.path]

    def say(self, text: str) -> None:
        self.progress.say(text)

    def say_stopping(self, signal_name: str) -> None:
        self.say(f"{signal_name}: finishing this step, then saving (Ctrl-C again stops at once, without saving)")
