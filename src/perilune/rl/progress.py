"""What the person at the terminal sees of a run: a bar and two lines of numbers; plain lines elsewhere."""

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

LINES = 20
"""Of iterations, about, where there is no terminal."""


SWARM = (
    ("outcome", "outcome", ".3f"), ("parallel", "parallel", ".2f"), ("finished", "finished", ".0%"),
    ("width", "width", ".1f"), ("critical_steps", "critical steps", ".1f"), ("unused", "unused", ".0%"),
)  # fmt: skip


class RLProgress:
    """On a terminal a live view; otherwise plain lines now and then. Silent when quiet."""

    def __init__(self, *, iterations: int, quiet: bool = False, console: Console | None = None) -> None:
        # Standard error, so that `--json` on standard output stays machine-readable.
        self.console = console or Console(file=sys.stderr, highlight=False, quiet=quiet)
        self.iterations = iterations
        self._live: Live | None = None
        if self.console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("iteration"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("left"), console=self.console,
            )  # fmt: skip
            self._task = self._bar.add_task("rl", total=iterations)
            self._live = Live(Group(self._bar, Text("")), console=self.console)

    def __enter__(self) -> "RLProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def start_at(self, iteration: int) -> None:
        if self._live is not None:
            self._bar.reset(self._task, completed=iteration)

    def record(self, record: Mapping[str, Any]) -> None:
        """One iteration."""
        iteration = int(record["iteration"])
        if self._live is not None:
            self._bar.update(self._task, completed=iteration)
            self._live.update(Group(self._bar, Text("\n".join(parts_of(record)))))
        elif self._worth_a_line(record):
            self.say(f"iteration {iteration}/{self.iterations}  {'  '.join(parts_of(record))}")

    def evaluation(self, record: Mapping[str, Any]) -> None:
        for name, numbers in record["environments"].items():
            self.say(f"evaluation at {record['iteration']}: {name} {evaluation_line(numbers)}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def _worth_a_line(self, record: Mapping[str, Any]) -> bool:
        iteration, every = int(record["iteration"]), max(1, self.iterations // LINES)
        return bool(record.get("failures")) or iteration in (1, self.iterations) or iteration % every == 0


def parts_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """What was played, and how it was learnt from."""
    if "reward" in record:
        played = f"reward {record['reward']:.3f}  finished {record['finished']:.0%}  length {record['length']:.1f}"
    else:
        played = "no episode ended"
    if kinds := record.get("kinds"):
        played += "".join(f"\n  {kind}: {swarm_line(numbers)}" for kind, numbers in kinds.items())
        if parl := record.get("parl"):
            played += f"\n  rewards for parallel work at {parl['share']:.0%}"
    if record.get("parked"):
        played += f"  parked {record['parked']}"
    if record.get("empty"):
        played += f"  empty {record['empty']}"
    if failures := record.get("failures"):
        played += "  lost " + ", ".join(f"{count} ({kind})" for kind, count in sorted(failures.items()))
    learnt = (
        f"gap {record['gap']:.1e}  clipped {record['clipped']:.1%}  "
        f"{record['rollout_tokens_per_s']:,.0f} tok/s played  {record['learn_tokens_per_s']:,.0f} tok/s learnt  "
        f"waiting {record['waiting']:.0%}"
    )
    return played, learnt


def swarm_line(numbers: Mapping[str, float]) -> str:
    """How the episodes of one kind of task were worked on."""
    line = f"spawn {numbers['spawn']:.0%}"
    for name, told, form in SWARM:
        if name in numbers:
            line += f"  {told} {numbers[name]:{form}}"
    return line


def evaluation_line(numbers: Mapping[str, Any]) -> str:
    if not numbers["count"]:
        return "gave no episode"
    reward = numbers["reward"]
    line = f"{reward['mean']:.3f} [{reward['low']:.3f}, {reward['high']:.3f}] of {numbers['count']} test tasks"
    if gain := numbers.get("gain"):
        line += f", {gain['mean']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] since the start"
    if looking := numbers.get("looking"):
        line += f", {looking['mean']:+.3f} by looking at the right picture"
    for kind, found in (numbers.get("kinds") or {}).items():
        line += f"\n  {kind}: {swarm_line(found)}"
    return line
