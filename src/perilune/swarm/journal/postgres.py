"""The journal of many machines: PostgreSQL, with agents claimed by lease.

All commits of a run take the lock of its row first. That gives events an order without gaps, and the chain of seals
one end. Whoever listens is told of every commit and reads what others wrote in that order.

Leases (`open(..., leases=True)`). The event `started` of an agent makes it claimable; `claim` takes agents that nobody
holds, or whose holder fell silent, and gives each a token one higher than the last. An event of the agent, or of its
calls, is refused inside the transaction unless it carries the token that is current then. So two workers may both
believe that they run an agent, but only one of them can write; a tool that must not run twice is announced in the
journal first (`call_started`), and that announcement is what a late worker cannot make. All times are the server's.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import asyncpg

from perilune.swarm.journal import leases as leasing
from perilune.swarm.journal.chunks import check_range, split
from perilune.swarm.journal.event import Artefact, Event, JournalError, first_link
from perilune.swarm.journal.group_commit import Batch, Entry, GroupCommit, relink
from perilune.swarm.journal.leases import Lease, StaleLease
from perilune.swarm.journal.postgres_reader import (
    ALL_EVENTS,
    FAILURES,
    PAGE_ROWS,
    SCHEMA,
    TABLES,
    PostgresReader,
    PostgresRows,
    connect,
    read_artefact,
    read_events,
    read_heads,
)
from perilune.swarm.journal.seal import Head, HeadFile, Seal, read_head
from perilune.swarm.journal.sqlite_reader import Identity
from perilune.swarm.journal.verify import Check, Report

RUN_CHAIN = "run"
ATTEMPTS = 5
"""Of a commit that the server broke off to resolve a conflict."""


class PostgresJournal(GroupCommit):
    """Made by `await PostgresJournal.open(...)`; one per process and run, used on one event loop."""

    @classmethod
    async def open(
        cls,
        dsn: str,
        *,
        run: str,
        key: bytes | None,
        heads: Path | None = None,
        leases: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> PostgresJournal:
        """Create a run or join it. `key` and `heads` as in SQLite; all workers need the same key."""
        writer = await connect(dsn)
        listener: asyncpg.Connection | None = None
        pool: asyncpg.Pool | None = None
        try:
            await _create_tables(writer)
            identity = await _identify(writer, run, key)
            head_file = HeadFile(heads, identity.name) if key is not None and heads is not None else None
            await _check_head(writer, run, head_file)
            pool = await asyncpg.create_pool(dsn, min_size=1, max_size=4)
            listener = await connect(dsn)
            journal = cls(dsn, run, writer, listener, pool, Seal(key, identity.name), head_file, leases, clock)
            await listener.add_listener(journal._channel, journal._told)
            listener.add_termination_listener(journal._connection_lost)
            journal._heads = await read_heads(writer, run)
            journal._begin(await writer.fetchval(f"SELECT events FROM {SCHEMA}.runs WHERE run = $1", run) or 0)
            return journal
        except BaseException as error:
            for each in (writer, listener, pool):
                if each is not None:
                    each.terminate()
            if isinstance(error, FAILURES):
                raise JournalError(f"run {run!r} cannot be opened: {error}") from None
            raise

    def __init__(
        self,
        dsn: str,
        run: str,
        writer: asyncpg.Connection,
        listener: asyncpg.Connection,
        pool: asyncpg.Pool,
        seal: Seal,
        head_file: HeadFile | None,
        leases: bool,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(f"of run {run!r}", {}, clock)
        self.run = run
        self._dsn, self._writer, self._listener, self._pool = dsn, writer, listener, pool
        self._seal, self._head_file, self._leases = seal, head_file, leases
        self._channel = "perilune_" + hashlib.sha256(run.encode()).hexdigest()[:32]
        self._held: dict[str, int] = {}
        self._reader: PostgresReader | None = None
        self._position = self._known = -1
        self._own: dict[int, Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._catching_up = True  # until it is known where to begin
        self._closing: asyncio.Task[None] | None = None

    # Reading

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterable[Event]:
        """As in `Journal`; waits for the server. On the loop prefer `read`."""
        return self._waiting_reader().events(chain, after=after)

    def artefacts(self) -> list[Artefact]:
        """All that is stored, oldest first; waits for the server."""
        return self._waiting_reader().artefacts()

    def _waiting_reader(self) -> PostgresReader:
        self._reader = self._reader or PostgresReader(self._dsn, self.run)
        return self._reader

    async def read(self, chain: str | None = None, *, after: int = -1) -> list[Event]:
        """What `events` gives, without blocking the loop."""
        try:
            return [event async for page in read_events(self._pool, self.run, chain, after) for event in page]
        except FAILURES as error:
            raise JournalError(f"journal {self.name} cannot be read: {error}") from None

    def chains(self) -> list[str]:
        """Those this process knows: at its start, its own, and what it heard of since."""
        return list(self._heads)

    async def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        waiting = self._unwritten.get(sha256)
        if waiting is not None:
            check_range(start, end)
            return waiting[start:end]
        try:
            return await read_artefact(self._pool, self.run, sha256, start, end)
        except FAILURES as error:
            raise JournalError(f"journal {self.name} cannot be read: {error}") from None

    # Leases

    async def claim(
        self, worker: str, seconds: float, *, limit: int = 1, agents: Sequence[str] | None = None
    ) -> list[Lease]:
        """Take up to `limit` agents (of those named) that nobody holds, the longest waiting first."""
        self._running()
        claimed = await leasing.claim(self._pool, self.run, worker, seconds, limit, agents)
        for lease in claimed:
            # The last holder may have written more than this process has heard of.
            known = await read_heads(self._pool, self.run, lease.agent)
            for chain in [each for each in self._tails if agent_of(each) == lease.agent]:
                del self._tails[chain]
            self._heads.update(known)
            self._held[lease.agent] = lease.token
        return claimed

    async def renew(self, leases: Iterable[Lease], seconds: float) -> list[Lease]:
        """Hold them that much longer; returns those that are still ours. The others belong to somebody else."""
        leases = list(leases)
        kept = await leasing.renew(self._pool, self.run, leases, seconds)
        self._let_go(lease for lease in leases if lease not in kept)
        return kept

    async def release(self, leases: Iterable[Lease]) -> None:
        """Let others have them at once."""
        leases = list(leases)
        self._let_go(leases)
        await leasing.release(self._pool, self.run, leases)

    def _let_go(self, leases: Iterable[Lease]) -> None:
        for lease in leases:
            if self._held.get(lease.agent) == lease.token:
                del self._held[lease.agent]

    def _token(self, chain: str) -> int | None:
        return self._held.get(agent_of(chain))

    # Writing

    def _commit(self, batch: Batch) -> None:
        self._start(self._write(batch))

    async def _write(self, batch: Batch) -> None:
        try:
            results, head = await self._transact(batch)
        except Exception as error:  # whatever it is: those who wait must hear of it
            return self._failed(f"journal {self.name} cannot be written: {error}")
        self._committed(batch, results)
        if self._head_file is not None and head is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(None, self._head_file.update, head)
            except (OSError, JournalError) as error:
                self._failed(f"journal {self.name}: its head cannot be written: {error}")

    async def _transact(self, batch: Batch, attempts: int = ATTEMPTS) -> tuple[list[Event | JournalError], Head | None]:
        try:
            async with self._writer.transaction():
                return await self._store(batch)
        except (asyncpg.DeadlockDetectedError, asyncpg.SerializationError):
            if attempts == 1:
                raise
            return await self._transact(batch, attempts - 1)

    async def _store(self, batch: Batch) -> tuple[list[Event | JournalError], Head | None]:
        fetch, execute, run = self._writer.fetch, self._writer.execute, self.run
        ((index, artefacts, seals, mac),) = await fetch(
            f"SELECT events, artefacts, seals, mac FROM {SCHEMA}.runs WHERE run = $1 FOR UPDATE", run
        )
        results, admitted, started = await self._admit(batch.entries, index)
        blobs = {bytes.fromhex(sha256): data for sha256, data in batch.blobs.items()}
        if blobs:
            query = f"SELECT sha256 FROM {SCHEMA}.artefacts WHERE run = $1 AND sha256 = ANY($2)"
            for (digest,) in await fetch(query, run, list(blobs)):
                del blobs[digest]
        tag = self._seal.tag
        tags = [
            tag(e.index, e.chain.encode(), e.seq, e.kind.encode(), e.body, e.note, e.time, e.hash) for e in admitted
        ]
        if admitted:
            columns = zip(*((e.index, e.chain, e.seq, e.kind, e.body, e.note, e.time, e.hash) for e in admitted))
            await execute(
                f"INSERT INTO {SCHEMA}.events SELECT $1, * FROM unnest($2::bigint[], $3::text[], $4::bigint[],"
                " $5::text[], $6::bytea[], $7::bytea[], $8::double precision[], $9::bytea[], $10::bytea[])",
                *(run, *columns, tags),
            )
        for number, (digest, data) in enumerate(blobs.items(), artefacts):
            await execute(f"INSERT INTO {SCHEMA}.artefacts VALUES ($1, $2, $3, $4)", run, number, digest, len(data))
            chunks = [(run, part, bytes(chunk)) for part, chunk in split(number, data)]
            await self._writer.executemany(f"INSERT INTO {SCHEMA}.chunks VALUES ($1, $2, $3)", chunks)
        if not admitted and not blobs:
            return results, None
        events, artefacts = index + len(admitted), artefacts + len(blobs)
        if self._seal.keyed:
            self._seal.last = mac if mac is not None else self._seal.first
            mac = self._seal.commit(events, artefacts, tags, [(digest, len(data)) for digest, data in blobs.items()])
            await execute(f"INSERT INTO {SCHEMA}.seals VALUES ($1, $2, $3, $4, $5)", run, seals, events, artefacts, mac)
            seals += 1
        await execute(
            f"UPDATE {SCHEMA}.runs SET events = $2, artefacts = $3, seals = $4, mac = $5 WHERE run = $1",
            *(run, events, artefacts, seals, mac),
        )
        if started:
            await execute(leasing.BEGIN, run, list(started), list(started.values()))
        if finished := [event.chain for event in admitted if event.kind == "finished"]:
            await execute(leasing.FINISH, run, finished)
        if admitted:
            await execute("SELECT pg_notify($1, $2)", self._channel, str(events))
        return results, Head(events=events, seals=seals, mac=mac) if self._seal.keyed else None

    async def _admit(
        self, entries: Sequence[Entry], index: int
    ) -> tuple[list[Event | JournalError], list[Event], dict[str, int]]:
        """Which entries may be written, as events; and the agents that begin with them."""
        chains = list({entry.chain for entry in entries})
        agents = list({agent_of(chain) for chain in chains})
        tokens = dict(await self._writer.fetch(leasing.LOCK, self.run, agents)) if chains else {}
        query = (
            "SELECT c.chain, e.seq, e.hash FROM unnest($2::text[]) AS c (chain) CROSS JOIN LATERAL (SELECT seq, hash"
            f" FROM {SCHEMA}.events WHERE run = $1 AND chain = c.chain ORDER BY seq DESC LIMIT 1) AS e"
        )
        rows = await self._writer.fetch(query, self.run, chains) if chains else ()
        tails: dict[str, tuple[int, bytes]] = {chain: (seq, link) for chain, seq, link in rows}
        results: list[Event | JournalError] = []
        admitted: list[Event] = []
        started: dict[str, int] = {}
        for entry in entries:
            chain, agent = entry.chain, agent_of(entry.chain)
            if agent in tokens and entry.token != tokens[agent]:
                results.append(
                    StaleLease(
                        f"agent {agent!r} of run {self.run!r} is held under token {tokens[agent]}, not {entry.token}: "
                        "another worker has it, or nobody yet"
                    )
                )
                continue
            (linked,) = relink([entry], tails.get(chain) or (-1, first_link(chain)))
            if (linked.seq, linked.hash) != (entry.seq, entry.hash) and chain != RUN_CHAIN:
                results.append(JournalError(f"chain {chain!r} of run {self.run!r} was continued by another process"))
                continue
            event = Event(
                index + len(admitted), chain, linked.seq, entry.kind, entry.body, entry.note, entry.time, linked.hash
            )
            if self._leases and entry.kind == "started" and chain == agent:
                started[agent] = event.index
                tokens[agent] = 0
            tails[chain] = (event.seq, event.hash)
            results.append(event)
            admitted.append(event)
        return results, admitted, started

    # What others write

    def _begin(self, events: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._position, self._catching_up = events - 1, False
        self._learn(events - 1)

    def _feed(self, events: list[Event]) -> None:
        self._own.update((event.index, event) for event in events)
        self._learn(events[-1].index)

    def _told(self, _: object, pid: int, channel: str, events: object) -> None:
        """A commit was made, perhaps by this process: then it knows by itself."""
        if pid != self._writer.get_server_pid():
            self._learn(int(str(events)) - 1)

    def _learn(self, index: int) -> None:
        """There are events up to this one."""
        self._known = max(self._known, index)
        if self._catching_up:
            return
        self._deliver_own()
        if self._position < self._known:
            self._catching_up = True
            self._start(self._catch_up())

    def _deliver_own(self) -> None:
        """As far as nothing of others lies between."""
        own = []
        while (event := self._own.pop(self._position + 1, None)) is not None:
            own.append(event)
            self._position += 1
        if own:
            super()._feed(own)

    async def _catch_up(self) -> None:
        try:
            while self._position < self._known:
                rows = await self._pool.fetch(ALL_EVENTS, self.run, self._position, PAGE_ROWS)
                page = [Event(*row) for row in rows]
                for event in page:
                    self._own.pop(event.index, None)
                    if event.seq >= self._heads.get(event.chain, (0, b""))[0]:
                        self._heads[event.chain] = (event.seq, event.hash)
                self._position = page[-1].index
                super()._feed(page)
                self._deliver_own()
        except FAILURES as error:
            self._failed(f"journal {self.name} cannot be read: {error}")
        finally:
            self._catching_up = False

    def _connection_lost(self, *_: object) -> None:
        if self._closing is None:
            self._failed(f"journal {self.name}: the server closed the connection")

    def _start(self, work) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._drain(f"journal {self.name} is closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        loop = asyncio.get_running_loop()
        try:
            if self._head_file is not None and not self._broken:
                await loop.run_in_executor(None, self._head_file.write)
        except (OSError, JournalError) as error:
            raise JournalError(f"journal {self.name}: its head cannot be written: {error}") from None
        finally:
            if self._reader is not None:
                await loop.run_in_executor(None, self._reader.close)
            for connection in (self._writer, self._listener, self._pool):
                connection.terminate()


def agent_of(chain: str) -> str:
    """The agent whose chain it is, or whose call's."""
    return chain.partition("#")[0]


def verify_run(dsn: str, run: str, key: bytes | None, *, heads: Path | None = None) -> Report:
    """`verify` for a run in PostgreSQL."""
    begun = time.perf_counter()
    with PostgresReader(dsn, run) as reader:
        head, unreadable = read_head(heads, reader.identity.name)
        check = Check(PostgresRows(reader), reader.identity, key, head=head, heads=heads is not None)
        if unreadable is not None:
            check.problem(unreadable)
        check.run()
    return check.report(run, time.perf_counter() - begun)


async def _create_tables(connection: asyncpg.Connection) -> None:
    async with connection.transaction():
        # Workers that start together must not create the tables together.
        await connection.execute("SELECT pg_advisory_xact_lock(5785234478)")
        if await connection.fetchval("SELECT to_regnamespace($1)", SCHEMA) is None:
            await connection.execute(TABLES)


async def _identify(connection: asyncpg.Connection, run: str, key: bytes | None) -> Identity:
    name = os.urandom(16).hex()
    check = Seal(key, name).key_check(name) if key is not None else None
    query = f"INSERT INTO {SCHEMA}.runs (run, identity, key_check) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING"
    await connection.execute(query, run, name, check)
    rows = await connection.fetch(f"SELECT identity, key_check FROM {SCHEMA}.runs WHERE run = $1", run)
    identity = Identity(*rows[0])
    Seal(key, identity.name).check_key(f"of run {run!r}", identity.name, identity.key_check)
    return identity


async def _check_head(connection: asyncpg.Connection, run: str, head_file: HeadFile | None) -> None:
    head = head_file.read() if head_file else None
    if head is None or head_file is None:
        return
    query = f"SELECT events, mac FROM {SCHEMA}.seals WHERE run = $1 AND number = $2"
    row = await connection.fetchrow(query, run, head.seals - 1)
    head_file.check(f"of run {run!r}", head, tuple(row) if row else None)


__all__ = ["Lease", "PostgresJournal", "StaleLease", "agent_of", "verify_run"]
