"""The journal as a run writes it, and as a resumed run reads it first.

A resumed run does all it did before, but takes what the journal holds in place of doing it: replies of the model,
outcomes of tools, messages in the order they were read. Where the records of a chain end, life goes on. A record that
does not fit what the run does now means that something else changed (tools, prompts, code): that is an error, never a
guess.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from perilune.swarm.journal.event import Artefact, Event, Journal, JournalError, canonical


class Chronicle:
    def __init__(self, journal: Journal, past: Iterable[Event] = ()) -> None:
        self.journal = journal
        self._past: dict[str, deque[Event]] = {}
        self._heads: dict[str, bytes] = {}
        for event in past:
            self._past.setdefault(event.chain, deque()).append(event)

    def peek(self, chain: str) -> Event | None:
        """The next record of the chain that has not been taken yet."""
        past = self._past.get(chain)
        return past[0] if past else None

    def take(self, chain: str, *kinds: str) -> Event | None:
        """The next record if it is of one of these kinds; None where the records of the chain have ended."""
        past = self._past.get(chain)
        if not past:
            return None
        if past[0].kind not in kinds:
            raise JournalError(
                f"the journal has {past[0].kind!r} next on {chain!r} where the run expects {' or '.join(kinds)}: "
                "it was written with other tools, prompts or settings, and cannot be resumed with these"
            )
        event = past.popleft()
        if not past:
            del self._past[chain]
        self._heads[chain] = event.hash
        return event

    async def record(
        self, chain: str, kind: str, body: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> Event:
        """Write an event, or take it from the records, where it must be the same."""
        event = self.take(chain, kind)
        if event is None:
            return await self.append(chain, kind, body, note)
        if event.body != canonical(body):
            raise JournalError(f"the journal's {kind!r} on {chain!r} is not what this run does: it cannot be resumed")
        return event

    async def append(
        self, chain: str, kind: str, body: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> Event:
        event = await self.journal.append(chain, kind, body, note)
        self._heads[chain] = event.hash
        return event

    def close_chain(self, chain: str) -> str:
        """The head of a chain that nothing more is written to, as a hexadecimal string."""
        return self._heads.pop(chain).hex()


def artefact_of(plain: Mapping[str, Any] | None) -> Artefact | None:
    return None if plain is None else Artefact(plain["sha256"], plain["size"])
