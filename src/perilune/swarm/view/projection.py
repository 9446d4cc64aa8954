"""A state that follows a journal from another thread than the swarm's.

Events come through an inbox while somebody watches; what the inbox missed is read from the journal by index. Work is
cut into short pieces, so that a watcher's thread never holds the interpreter for long while agents want to go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Protocol

from perilune.swarm.journal.event import Event
from perilune.swarm.view.inbox import Inbox
from perilune.swarm.view.state import RunState

PIECE = 64
"""Events between two places to pause: about a millisecond."""


class Reader(Protocol):
    """A journal for reading alone, used by one thread at a time (`sqlite_reader.SQLiteReader` is one)."""

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterable[Event]: ...

    def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes: ...

    def close(self) -> None: ...


class Projection:
    def __init__(self, reader: Reader, inbox: Inbox, state: RunState) -> None:
        self.reader = reader
        self.inbox = inbox
        self.state = state

    def advance(self) -> Iterator[None]:
        """Take what was committed; yields after each piece."""
        events, gap = self.inbox.drain()
        # Events of the inbox are younger than the gap, so the journal holds them too by now.
        source = iter(self.reader.events(after=self.state.index)) if gap else iter(events)
        while piece := list(islice(source, PIECE)):
            self.state.apply(piece)
            yield
