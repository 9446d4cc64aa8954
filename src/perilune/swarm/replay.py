"""A run played again: its states in the order and the rhythm of the journal.

Frames follow the run's own clock in equal steps. Nothing happens for days between a crash and its resume: pauses
longer than `longest_pause` are shortened to it. `play` waits between frames, `frames` does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from perilune.swarm.journal.event import Event
from perilune.swarm.view.state import RunState


@dataclass(frozen=True, kw_only=True)
class Frame:
    seconds: float
    """Since the run began, by the journal's clock."""
    wait: float
    """Seconds since the frame before, long pauses shortened."""
    events: list[Event]
    """What happened since the frame before."""
    state: RunState
    """After these events. The same object in every frame: look at it before the next."""


def frames(
    events: Iterable[Event], state: RunState | None = None, *, step: float = 0.1, longest_pause: float = 2.0
) -> Iterator[Frame]:
    """One frame for each `step` seconds of the run in which something happened."""
    if not step > 0:
        raise ValueError(f"step is {step!r} seconds: expected a positive number")
    state = state or RunState()
    began: float | None = None
    latest = shown = 0.0
    batch: list[Event] = []
    for event in events:
        began = event.time if began is None else began
        now = max(latest, event.time - began)
        if batch and int(now / step) > int(latest / step):
            state.apply(batch)
            yield Frame(seconds=latest, wait=min(latest - shown, longest_pause), events=batch, state=state)
            shown, batch = latest, []
        latest = now
        batch.append(event)
    if batch:
        state.apply(batch)
        yield Frame(seconds=latest, wait=min(latest - shown, longest_pause), events=batch, state=state)


def play(
    events: Iterable[Event],
    state: RunState | None = None,
    *,
    speed: float = 1.0,
    step: float = 0.1,
    longest_pause: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Frame]:
    """Frames at `speed` times the run's pace; whoever draws slowly is not made to wait as well."""
    if not speed > 0:
        raise ValueError(f"speed is {speed!r}: expected a positive number")
    due = clock()
    for frame in frames(events, state, step=step * speed, longest_pause=longest_pause):
        due += frame.wait / speed
        if (left := due - clock()) > 0:
            sleep(left)
        yield frame


__all__ = ["Frame", "frames", "play"]
