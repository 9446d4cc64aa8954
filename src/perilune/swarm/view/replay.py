"""The state of a run at an earlier moment, for a slider through time.

Moving on continues from where the last look ended; moving back starts again from the first event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

from perilune.swarm.journal.event import Event
from perilune.swarm.view.projection import PIECE, Reader
from perilune.swarm.view.state import RunState


class Replay:
    def __init__(self, reader: Reader, new_state: Callable[[], RunState]) -> None:
        self._reader = reader
        self._new_state = new_state
        self._turn = asyncio.Lock()
        self._until = -1
        self._restart()

    def _restart(self) -> None:
        self._state = self._new_state()
        self._rest: Iterator[Event] | None = None
        self._next: Event | None = None

    def _take(self) -> Event | None:
        """The next event; None at the end, which a run that goes on moves."""
        if self._next is None:
            self._rest = self._rest or iter(self._reader.events(after=self._state.index))
            self._next = next(self._rest, None)
            if self._next is None:
                self._rest = None
        return self._next

    async def at(self, until: int) -> RunState:
        """The state after the events of the first `until` milliseconds. Good until the next call."""
        async with self._turn:
            if until < self._until:
                self._restart()
            self._until = until
            taken = 0
            while (event := self._take()) is not None:
                state = self._state
                if state.began is not None and round((event.time - state.began) * 1000) > until:
                    break
                state.apply((event,))
                self._next = None
                taken += 1
                if taken % PIECE == 0:
                    await asyncio.sleep(0)
            return self._state
