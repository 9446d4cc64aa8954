"""Width over time: how many steps were under way at once, by the clock.

A step is under way from `time - seconds` to `time` of its event: `seconds` is how long the model's reply took, queues
and retries included. Beside the levels of `critical_path`, which no clock moves, this shows what the machine and the
provider made of them.

    busy     = sum of the seconds of all steps
    elapsed  = from the start of the first step to the end of the last
    mean     = busy / elapsed
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from perilune.swarm.journal.event import Event


class Point(NamedTuple):
    time: float
    width: int
    """From this time on."""


class Width:
    def __init__(self) -> None:
        self._changes: dict[float, int] = {}
        self.busy = 0.0

    def add(self, event: Event) -> None:
        if event.kind == "reply" or (event.kind == "compacted" and event.read()["how"] == "summary"):
            seconds = max(0.0, event.read_note().get("seconds", 0.0))
            if seconds == 0:
                return
            self.busy += seconds
            for time, change in ((event.time - seconds, 1), (event.time, -1)):
                self._changes[time] = self._changes.get(time, 0) + change

    def curve(self) -> list[Point]:
        """A point wherever the width changes, from the first step to the end of the last."""
        points: list[Point] = []
        width = 0
        for time in sorted(self._changes):
            width += self._changes[time]
            if not points or points[-1].width != width:
                points.append(Point(time, width))
        return points

    @property
    def elapsed(self) -> float:
        return max(self._changes) - min(self._changes) if self._changes else 0.0

    @property
    def peak(self) -> int:
        return max((point.width for point in self.curve()), default=0)

    @property
    def mean(self) -> float:
        return self.busy / self.elapsed if self.elapsed else 0.0

    def plain(self) -> dict[str, Any]:
        return {"busy": self.busy, "elapsed": self.elapsed, "mean_width": self.mean, "peak_width": self.peak}


def width_over_time(events: Iterable[Event]) -> Width:
    width = Width()
    for event in events:
        width.add(event)
    return width


__all__ = ["Point", "Width", "width_over_time"]
