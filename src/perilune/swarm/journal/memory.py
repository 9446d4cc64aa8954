"""A journal that lives as long as its run: the same events, chains and hashes as on disk, and nothing is kept.

For runs by the thousand whose events go elsewhere, such as episodes of reinforcement learning: no thread, no file, an
append costs one hash. Whoever needs a run to survive its process uses `SQLiteJournal`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from perilune.swarm.journal.chunks import check_range
from perilune.swarm.journal.event import Artefact, Event, JournalError, first_link, link
from perilune.swarm.journal.group_commit import check_names


class MemoryJournal:
    """Implements `event.Journal`; used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: list[Event] = []
        self._heads: dict[str, tuple[int, bytes]] = {}
        self._artefacts: dict[str, bytes] = {}
        self._subscribers: list[Callable[[list[Event]], None]] = []
        self._closed = False

    async def append(
        self, chain: str, kind: str, body: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> Event:
        if self._closed:
            raise JournalError("the journal is closed")
        check_names(chain, kind)
        written = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        noted = orjson.dumps(note, option=orjson.OPT_SORT_KEYS) if note else b"{}"
        seq, previous = self._heads.get(chain) or (-1, first_link(chain))
        hash = link(previous, kind, written)
        event = Event(len(self._events), chain, seq + 1, kind, written, noted, float(self._clock()), hash)
        self._events.append(event)
        self._heads[chain] = (seq + 1, hash)
        for receive in tuple(self._subscribers):
            receive([event])
        return event

    async def put(self, data: bytes) -> Artefact:
        sha256 = hashlib.sha256(data).hexdigest()
        self._artefacts[sha256] = bytes(data)
        return Artefact(sha256, len(data))

    async def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        if sha256 not in self._artefacts:
            raise JournalError(f"no artefact {sha256!r} is stored")
        return self._artefacts[sha256][start:end]

    def artefacts(self) -> list[Artefact]:
        return [Artefact(sha256, len(data)) for sha256, data in self._artefacts.items()]

    def head(self, chain: str) -> bytes:
        found = self._heads.get(chain)
        return found[1] if found else first_link(chain)

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterable[Event]:
        return [event for event in self._events[after + 1 :] if chain is None or event.chain == chain]

    def chains(self) -> list[str]:
        return list(self._heads)

    def subscribe(self, receive: Callable[[list[Event]], None]) -> Callable[[], None]:
        self._subscribers.append(receive)

        def stop() -> None:
            if receive in self._subscribers:
                self._subscribers.remove(receive)

        return stop

    async def close(self) -> None:
        self._closed = True


__all__ = ["MemoryJournal"]
