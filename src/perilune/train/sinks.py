"""Further places for the numbers of a run: TensorBoard, and a tracker (Weights & Biases or trackio).

They mirror metrics.jsonl and take no part in resume. What is asked for must be there when a run begins; a sink that
fails later is dropped with one warning, because the run is worth more than its mirror.
"""

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from perilune.train.metrics import Record
from perilune.train.run_config import TrainerConfig
from perilune.train.run_folder import RunError


class Sink(Protocol):
    def log(self, record: Record) -> None: ...

    def close(self) -> None: ...


class TensorBoardSink:
    """Event files under `folder`; on resume the events after `step` are marked as purged."""

    def __init__(self, folder: Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, record: Record) -> None:
        step, kind = record["step"], record["kind"]
        if kind == "sample":
            self._writer.add_text(f"sample/{record['prompt']}", record["text"], step)
            return
        for name, value in scalars(record).items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class TrackerSink:
    """Weights & Biases or trackio: both offer `init(project=, name=, config=)`, `log(dict)` and `finish()`."""

    def __init__(self, module: str, *, name: str, config: Mapping[str, Any]) -> None:
        self._tracker: Any = importlib.import_module(module)
        self._tracker.init(project="perilune", name=name, config=dict(config))

    def log(self, record: Record) -> None:
        if record["kind"] != "sample":
            values = {f"{record['kind']}/{name}": value for name, value in scalars(record).items()}
            self._tracker.log({**values, "step": record["step"]})

    def close(self) -> None:
        self._tracker.finish()


def check_installed(settings: TrainerConfig) -> None:
    """RunError when a sink that is asked for cannot be imported. Changes nothing."""
    try:
        if settings.tracker is not None:
            importlib.import_module(settings.tracker)
    except ImportError as error:
        raise RunError(
            f"trainer.tracker is {settings.tracker!r}, which is not installed: pip install {settings.tracker}, or "
            "leave it None"
        ) from error
    try:
        if settings.tensorboard:
            importlib.import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise RunError(
            "trainer.tensorboard is True, but tensorboard is not installed: pip install tensorboard, or set it to False"
        ) from error


def start_tracker(module: str, *, name: str, config: Mapping[str, Any]) -> TrackerSink:
    """RunError when the tracker does not start, for example without a login."""
    try:
        return TrackerSink(module, name=name, config=config)
    except Exception as error:
        raise RunError(
            f"trainer.tracker is {module!r}, which did not start ({type(error).__name__}: {error}): repair it, or "
            "leave it None"
        ) from error


class Sinks:
    """The sinks of a run. Nothing they raise leaves this class."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._open: dict[str, Sink] = {}

    def add(self, name: str, make: Callable[[], Sink]) -> None:
        try:
            self._open[name] = make()
        except Exception as error:
            self._warn(_dropped(name, error))

    def log(self, record: Record) -> None:
        for name, sink in list(self._open.items()):
            try:
                sink.log(record)
            except Exception as error:
                del self._open[name]
                self._warn(_dropped(name, error))

    def close(self) -> None:
        while self._open:
            name, sink = self._open.popitem()
            try:
                sink.close()
            except Exception as error:
                self._warn(_dropped(name, error))


def _dropped(name: str, error: Exception) -> str:
    return f"warning: {name} failed ({type(error).__name__}: {error}); the run goes on without it"


def scalars(record: Record) -> dict[str, float]:
    """The plottable numbers of a record; a per-layer list becomes one curve a layer."""
    values: dict[str, float] = {}
    for name, value in record.items():
        if name in ("kind", "step"):
            continue
        if isinstance(value, list | tuple):
            values.update({f"{name}/{index}": v for index, v in enumerate(value) if isinstance(v, int | float)})
        elif isinstance(value, int | float):
            values[name] = value
    return values
