"""The journal as a run writes it, and as a resumed run reads it first.

A resumed run does all it did before, but takes what the journal holds in place of doing it: replies of the model,
outcomes of tools, messages in the order they were read. Where the records of a chain end, life goes on. A record that
does not fit what the run does now means that something else changed (tools, prompts, code): that is an error, never a
guess.

Who has no records left waits until nobody has (`caught_up`). Only then is all that was spent counted, and every message
of the earlier life delivered: a model that is asked sooner could be asked for too much, or too early.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from perilune.swarm.journal.event import Artefact, Event, Journal, JournalError, canonical

PATIENCE: float | None = 5.0
"""Seconds without a record being taken after which nobody waits for the others any more."""


class Chronicle:
    def __init__(self, journal: Journal, past: Iterable[Event] = ()) -> None:
        self.journal = journal
        self._past: dict[str, deque[Event]] = {}
        self._heads: dict[str, bytes] = {}
        for event in past:
            self._past.setdefault(event.chain, deque()).append(event)
        started = [event.read() for events in self._past.values() for event in events if event.kind == "started"]
        self._parents = {(body["parent"], body["call"]) for body in started}
        self._unread = sum(_is_agent(chain) for chain in self._past)
        """Agents with records that have not been taken."""
        self._taken = 0
        self._all_taken = asyncio.Event()

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
        self._taken += 1
        if not past:
            self._forget(chain)
        self._heads[chain] = event.hash
        return event

    def will_take(self, chain: str, *kinds: str) -> Event | None:
        """The last record of the chain, if it is of one of these kinds and has not been taken yet."""
        past = self._past.get(chain)
        return past[-1] if past and past[-1].kind in kinds else None

    def drop(self, is_mine: Callable[[str], bool]) -> list[Event]:
        """All records of these chains, which nobody will take any more."""
        chains = [chain for chain in self._past if is_mine(chain)]
        events = [event for chain in chains for event in self._past[chain]]
        for chain in chains:
            self._forget(chain)
        return events

    @property
    def has_records(self) -> bool:
        return bool(self._past)

    @property
    def is_caught_up(self) -> bool:
        return self._unread == 0

    def has_children(self, agent: str, call: str) -> bool:
        """Whether the call, made again, creates agents that have records."""
        return (agent, call) in self._parents

    async def caught_up(self) -> None:
        """Wait until all records of agents have been taken, or their taking has come to a halt."""
        taken = -1
        while not self.is_caught_up and taken != self._taken:
            taken = self._taken
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._all_taken.wait()
            except TimeoutError:
                continue

    def _forget(self, chain: str) -> None:
        del self._past[chain]
        self._unread -= _is_agent(chain)
        if self.is_caught_up:
            self._all_taken.set()

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


def _is_agent(chain: str) -> bool:
    return chain != "run" and "#" not in chain


def artefact_of(plain: Mapping[str, Any] | None) -> Artefact | None:
    return None if plain is None else Artefact(plain["sha256"], plain["size"])
