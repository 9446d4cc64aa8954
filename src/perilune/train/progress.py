"""What the person at the terminal sees: a bar with loss, tokens/s, max logit and time left; plain lines elsewhere."""

import math
import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from perilune.train.metrics import Record


class TrainingProgress:
    """On a terminal a live bar; otherwise plain lines now and then. Silent when quiet."""

    def __init__(self, *, total_steps: int, quiet: bool = False, console: Console | None = None) -> None:
        # Standard error, so that `--json` on standard output stays machine-readable.
        self.console = console or Console(file=sys.stderr, highlight=False, quiet=quiet)
        self.total_steps = total_steps
        self._bar: Progress | None = None
        if self.console.is_terminal and not quiet:
            self._bar = Progress(
                BarColumn(bar_width=12),  # with the numbers it fits a terminal of 80 columns
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self.console,
            )
            self._task = self._bar.add_task("training", total=total_steps, numbers="")

    def __enter__(self) -> "TrainingProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start_at(self, step: int) -> None:
        if self._bar is not None:
            self._bar.reset(self._task, completed=step)  # an update would count as steps done in no time

    def step(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def record(self, record: Record) -> None:
        if record["kind"] == "train" and self._bar is not None:
            numbers = line_of(record, bits_per_byte=False)
            self._bar.update(self._task, completed=record["step"], numbers=numbers)
        elif self._worth_a_line(record) and (line := line_of(record)):
            self.say(f"step {record['step']}/{self.total_steps}  {line}")

    def _worth_a_line(self, record: Record) -> bool:
        """Away from a terminal about fifty training lines a run, and everything that is not a plain step."""
        if record["kind"] != "train" or not _took_step(record):
            return True
        step, every = record["step"], max(1, self.total_steps // 50)
        return step == 1 or step == self.total_steps or step % every == 0

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)


class DataProgress:
    """A bar per stage of preparing the corpus, on a terminal only; call it as `perilune.data` calls its progress."""

    def __init__(self, *, quiet: bool = False) -> None:
        console = Console(file=sys.stderr, quiet=quiet)
        self._stages: dict[str, TaskID] = {}
        self._bar: Progress | None = None
        if console.is_terminal and not quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> "DataProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if self._bar is None:
            return
        if stage not in self._stages:
            self._stages[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._stages[stage], completed=done, total=total)


def line_of(record: Record, *, bits_per_byte: bool = True) -> str:
    """`loss 3.127  2.05 bits/byte  max logit 31.4  12,345 tok/s`; `max logit <= 31.4` where it is an upper bound."""
    if record["kind"] == "sample":
        return f"{record['prompt']!r} -> {record['text']!r}"
    if record["kind"] == "picture":
        return ""
    if record["kind"] == "pictures":
        return (
            f"{record['count']} held-out pictures: {record['parses']:.0%} of the answers parse, "
            f"score {record['reward']:.3f} ({record['shuffled_reward']:.3f} against other pictures)"
        )
    parts = []
    if record["kind"] == "train" and not _took_step(record):
        parts.append(f"not finite, skipped ({record.get('skipped')} so far)")
    if _number(record.get("loss")):
        parts.append(f"{'valid ' if record['kind'] == 'valid' else ''}loss {record['loss']:.3f}")
    if bits_per_byte and _number(record.get("bits_per_byte")):
        parts.append(f"{record['bits_per_byte']:.3f} bits/byte")
    if _number(record.get("vision_loss")):
        parts.append(f"vision {record['vision_loss']:.3f}")
    logits = [value if _number(value) else -math.inf for value in record.get("max_logit") or []]
    if logits and max(logits) > -math.inf:
        bounds = record.get("max_logit_is_bound") or [False] * len(logits)
        parts.append(f"max logit {'<= ' if bounds[logits.index(max(logits))] else ''}{max(logits):.1f}")
    if record.get("tokens_per_s"):
        parts.append(f"{record['tokens_per_s']:,.0f} tok/s")
    return "  ".join(parts)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and value == value


def _took_step(record: Record) -> bool:
    """Loss and gradient were finite; otherwise the step was skipped."""
    values = (record.get("loss"), record.get("grad_norm"))
    return all(isinstance(value, int | float) and math.isfinite(value) for value in values)
