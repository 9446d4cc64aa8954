"""The PostgreSQL journal of one process among several: what it writes, it holds by lease.

An agent that this process starts is claimed at once. Leases are renewed while the process lives; one that passed to
somebody else is reported, and whatever is still written under it is refused by the journal.

`take` is how an agent changes hands: wait until nobody holds it or anything below it that has not finished, hold all of
it, and read its past. What was read is complete, since nobody else can write to it from then on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from perilune.swarm.journal.event import Artefact, Event, JournalError
from perilune.swarm.journal.leases import Lease, StaleLease
from perilune.swarm.journal.postgres import PostgresJournal, agent_of
from perilune.swarm.journal.postgres_reader import EVENT, FAILURES, PAGE_ROWS, SCHEMA

LEASE_SECONDS = 6.0
"""How long an agent of a lost worker waits for another one."""
POLL_SECONDS = 0.2
# Names are compared as bytes: '$' follows '#', and '0' follows '/'.
SUBTREE = f"""
SELECT {EVENT} FROM {SCHEMA}.events
WHERE run = $1 AND idx > $3
    AND (chain = $2 OR chain >= $2 || '#' AND chain < $2 || '$' OR chain >= $2 || '/' AND chain < $2 || '0')
ORDER BY idx LIMIT $4
"""
STORED = f"SELECT number, sha256, size FROM {SCHEMA}.artefacts WHERE run = $1 AND number > $2 ORDER BY number"


class LeasedJournal(PostgresJournal):
    """Made by `await LeasedJournal.join(...)`."""

    worker = ""
    seconds = LEASE_SECONDS
    on_lost: Callable[[str], None] | None = None
    """Called with an agent that was held here and now belongs to another worker."""
    _owns: Callable[[str], bool]
    _mine: dict[str, Lease]
    _written: set[str]
    _renewing: asyncio.Task[None]
    _stored = -1

    @classmethod
    async def join(
        cls,
        dsn: str,
        *,
        run: str,
        key: bytes | None,
        worker: str,
        heads: Path | None = None,
        seconds: float = LEASE_SECONDS,
        owns: Callable[[str], bool] = lambda agent: True,
    ) -> Self:
        """`owns` says which agents this process claims when it starts them; the others are left for workers."""
        journal = await cls.open(dsn, run=run, key=key, heads=heads, leases=True)
        assert isinstance(journal, cls)
        journal.worker, journal.seconds, journal._owns = worker, seconds, owns
        journal._mine, journal._written = {}, set()
        journal._renewing = asyncio.create_task(journal._renew_all(), name=f"leases of {worker}")
        return journal

    async def append(
        self, chain: str, kind: str, body: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> Event:
        event = await super().append(chain, kind, body, note)
        self._written.add(agent_of(chain))
        if kind == "finished":
            self._mine.pop(chain, None)
        elif kind == "started" and self._owns(chain):
            await self._hold([chain])
            if chain not in self._mine:
                raise StaleLease(f"agent {chain!r} of run {self.run!r} was started here and claimed elsewhere")
        return event

    async def take(self, agent: str, *, patience: float, alone: bool = False) -> list[Event]:
        """Hold the agent and (unless `alone`) all below it, and return their events; `StaleLease` when others go on
        holding them."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        while True:
            past = await (self.read(agent) if alone else self.subtree(agent))
            wanted = [each for each in unfinished(past) if each == agent or not alone]
            free = [each for each in wanted if each not in self._mine]
            if not free:
                return past
            await self._hold(free)
            if any(each not in self._mine for each in free):
                if loop.time() > deadline:
                    raise StaleLease(f"agent {agent!r} of run {self.run!r} is still held by another worker")
                await asyncio.sleep(POLL_SECONDS)

    @property
    def is_broken(self) -> bool:
        """Whether nothing can be written any more."""
        return self._broken is not None

    def has_written(self, agent: str) -> bool:
        """Whether this process wrote an event of the agent since it holds it."""
        return agent in self._written

    async def let_go(self, agent: str) -> None:
        """Let others have the agent and all below it at once."""
        await self.release([self._mine.pop(name) for name in list(self._mine) if is_below(name, agent)])

    async def subtree(self, agent: str) -> list[Event]:
        """Events of an agent, of its calls, and of all below it."""
        events: list[Event] = []
        while True:
            after = events[-1].index if events else -1
            rows = await self._fetch(SUBTREE, agent, after, PAGE_ROWS)
            events.extend(Event(*row) for row in rows)
            if len(rows) < PAGE_ROWS:
                return events

    async def newly_stored(self) -> list[Artefact]:
        """Artefacts of all processes since this was last asked."""
        rows = await self._fetch(STORED, self._stored)
        if rows:
            self._stored = rows[-1][0]
        return [Artefact(digest.hex(), size) for _, digest, size in rows]

    async def close(self) -> None:
        self._renewing.cancel()
        with suppress(JournalError):  # they expire by themselves
            await self.release([self._mine.pop(name) for name in list(self._mine)])
        await super().close()

    async def _fetch(self, query: str, *values: object) -> list[Any]:
        try:
            return await self._pool.fetch(query, self.run, *values)
        except FAILURES as error:
            raise JournalError(f"journal {self.name} cannot be read: {error}") from None

    async def _hold(self, agents: list[str]) -> None:
        for lease in await self.claim(self.worker, self.seconds, limit=len(agents), agents=agents):
            self._mine[lease.agent] = lease
            self._written.discard(lease.agent)

    async def _renew_all(self) -> None:
        while True:
            await asyncio.sleep(self.seconds / 4)
            held = list(self._mine.values())
            try:
                kept = set(await self.renew(held, self.seconds)) if held else set()
            except JournalError:
                continue  # the server is away: what cannot be renewed expires
            for lease in held:
                if lease not in kept and self._mine.get(lease.agent) == lease:
                    del self._mine[lease.agent]
                    if self.on_lost is not None:
                        self.on_lost(lease.agent)


async def open_run(
    dsn: str,
    *,
    run: str,
    key: bytes | None,
    heads: Path | None = None,
    seconds: float = LEASE_SECONDS,
    elsewhere: bool = True,
) -> LeasedJournal:
    """For the process that runs the orchestrator. `elsewhere`: it holds `main`, and leaves the others to workers."""
    journal = await LeasedJournal.join(
        dsn,
        run=run,
        key=key,
        heads=heads,
        worker=f"run-{uuid.uuid4().hex[:8]}",
        seconds=seconds,
        owns=lambda agent: agent == "main" or not elsewhere,
    )
    try:
        await journal.take("main", patience=2 * seconds, alone=elsewhere)
    except StaleLease:
        await journal.close()
        raise JournalError(f"run {run!r} is under way in another process: end that one first") from None
    return journal


def unfinished(events: Iterable[Event]) -> list[str]:
    """Agents that have started and not finished, in the order they started."""
    open_agents: dict[str, None] = {}
    for event in events:
        if event.kind == "started":
            open_agents[event.chain] = None
        elif event.kind == "finished":
            open_agents.pop(event.chain, None)
    return list(open_agents)


def is_below(name: str, agent: str) -> bool:
    """Whether it is the agent or one that it created."""
    return name == agent or name.startswith(f"{agent}/")


__all__ = ["LEASE_SECONDS", "LeasedJournal", "is_below", "open_run", "unfinished"]
