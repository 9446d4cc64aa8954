"""Reading a journal in PostgreSQL: its tables, and a reader for code that does not run on a loop.

The tables are those of SQLite (`sqlite_reader`) with the run's name in front of each key, and two more:

    runs     one row per run: the counts, the last seal, and the lock under which all its commits are put in order
    leases   one row per agent that workers may claim (see `postgres`)

`PostgresReader` keeps a connection on a loop in a thread of its own, and waits for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import asyncpg

from perilune.swarm.journal.chunks import check_range, cut, digest_of, span
from perilune.swarm.journal.event import Artefact, Event, JournalError
from perilune.swarm.journal.sqlite_reader import Identity

SCHEMA = "perilune_journal_1"
PAGE_ROWS = 512
FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)

TABLES = f"""
CREATE SCHEMA {SCHEMA};
CREATE TABLE {SCHEMA}.runs (
    run text PRIMARY KEY, identity text NOT NULL, key_check bytea,
    events bigint NOT NULL DEFAULT 0, artefacts bigint NOT NULL DEFAULT 0, seals bigint NOT NULL DEFAULT 0, mac bytea
);
CREATE TABLE {SCHEMA}.events (
    run text NOT NULL, idx bigint NOT NULL, chain text COLLATE "C" NOT NULL, seq bigint NOT NULL, kind text NOT NULL,
    body bytea NOT NULL, note bytea NOT NULL, time double precision NOT NULL, hash bytea NOT NULL, tag bytea NOT NULL,
    PRIMARY KEY (run, idx), UNIQUE (run, chain, seq)
);
CREATE TABLE {SCHEMA}.artefacts (
    run text NOT NULL, number bigint NOT NULL, sha256 bytea NOT NULL, size bigint NOT NULL,
    PRIMARY KEY (run, number), UNIQUE (run, sha256)
);
CREATE TABLE {SCHEMA}.chunks (run text NOT NULL, id bigint NOT NULL, data bytea NOT NULL, PRIMARY KEY (run, id));
ALTER TABLE {SCHEMA}.chunks ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE {SCHEMA}.seals (
    run text NOT NULL, number bigint NOT NULL, events bigint NOT NULL, artefacts bigint NOT NULL, mac bytea NOT NULL,
    PRIMARY KEY (run, number)
);
CREATE TABLE {SCHEMA}.leases (
    run text NOT NULL, agent text COLLATE "C" NOT NULL, position bigint NOT NULL, worker text,
    token bigint NOT NULL DEFAULT 0, expires timestamptz NOT NULL DEFAULT '-infinity',
    finished boolean NOT NULL DEFAULT false, PRIMARY KEY (run, agent)
);
"""

EVENT = "idx, chain, seq, kind, body, note, time, hash"
ALL_EVENTS = f"SELECT {EVENT} FROM {SCHEMA}.events WHERE run = $1 AND idx > $2 ORDER BY idx LIMIT $3"
EVENTS_OF_CHAIN = (
    f"SELECT {EVENT} FROM {SCHEMA}.events WHERE run = $1 AND chain = $4 AND seq > $5 AND idx > $2 ORDER BY seq LIMIT $3"
)
HEADS = f"""
SELECT e.chain, e.seq, e.hash FROM (
    SELECT chain, max(seq) AS last, min(idx) AS first FROM {SCHEMA}.events
    WHERE run = $1 AND ($2::text IS NULL OR chain = $2 OR chain >= $2 || '#' AND chain < $2 || '$') GROUP BY chain
) AS c JOIN {SCHEMA}.events AS e ON e.run = $1 AND e.chain = c.chain AND e.seq = c.last ORDER BY c.first
"""

Found = TypeVar("Found")


async def connect(dsn: str) -> asyncpg.Connection:
    try:
        return await asyncpg.connect(dsn)
    except ValueError:
        # Its text may quote a part of the address, and with it a password.
        raise JournalError("the journal's address is not valid: expected postgresql://USER@HOST/DATABASE") from None
    except FAILURES as error:
        raise JournalError(f"the journal's PostgreSQL server cannot be reached: {error}") from None


async def read_events(
    connection: asyncpg.Connection | asyncpg.Pool, run: str, chain: str | None, after: int
) -> AsyncIterator[list[Event]]:
    """Pages of committed events in order, each by a query of its own."""
    position = -1
    while True:
        if chain is None:
            rows = await connection.fetch(ALL_EVENTS, run, after, PAGE_ROWS)
        else:
            rows = await connection.fetch(EVENTS_OF_CHAIN, run, after, PAGE_ROWS, chain, position)
        if rows:
            yield [Event(*row) for row in rows]
            after, position = rows[-1][0], rows[-1][2]
        if len(rows) < PAGE_ROWS:
            return


async def read_heads(
    connection: asyncpg.Connection | asyncpg.Pool, run: str, agent: str | None = None
) -> dict[str, tuple[int, bytes]]:
    """The last event of each chain, or of an agent's chain and those of its calls."""
    return {chain: (seq, link) for chain, seq, link in await connection.fetch(HEADS, run, agent)}


async def read_artefact(
    connection: asyncpg.Connection | asyncpg.Pool, run: str, sha256: str, start: int, end: int | None
) -> bytes:
    check_range(start, end)
    query = f"SELECT number, size FROM {SCHEMA}.artefacts WHERE run = $1 AND sha256 = $2"
    found = await connection.fetchrow(query, run, digest_of(sha256))
    if found is None:
        raise JournalError(f"there is no artefact {sha256!r} in run {run!r}")
    number, size = found
    end = size if end is None else min(end, size)
    if start >= end:
        return b""
    query = f"SELECT data FROM {SCHEMA}.chunks WHERE run = $1 AND id BETWEEN $2 AND $3 ORDER BY id"
    rows = await connection.fetch(query, run, *span(number, start, end))
    return cut([row[0] for row in rows], sha256, size, start, end)


class PostgresReader:
    """One run for reading alone, without a loop; from one thread at a time."""

    def __init__(self, dsn: str, run: str) -> None:
        self.run = run
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="journal-reader", daemon=True)
        self._thread.start()
        self._connection: asyncpg.Connection | None = None
        try:
            self._connection = self._wait(connect(dsn))
            self.identity = self._wait(self._identify())
        except BaseException:
            self.close()
            raise

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterator[Event]:
        pages = read_events(self._open(), self.run, chain, after)
        while True:
            page = self._wait(_next(pages))
            if page is None:
                return
            yield from page

    def chains(self) -> list[str]:
        return list(self.heads())

    def heads(self) -> dict[str, tuple[int, bytes]]:
        return self._wait(read_heads(self._open(), self.run))

    def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        return self._wait(read_artefact(self._open(), self.run, sha256, start, end))

    def artefacts(self) -> list[Artefact]:
        """All that is stored, oldest first."""
        query = f"SELECT sha256, size FROM {SCHEMA}.artefacts WHERE run = $1 ORDER BY number"
        return [Artefact(digest.hex(), size) for digest, size in self._wait(self._open().fetch(query, self.run))]

    def rows(self, query: str) -> Iterator[tuple]:
        """The rows of a query over this run, page by page; several may be read side by side in `snapshot`."""

        async def start() -> Any:
            return await self._open().cursor(query, self.run)

        cursor = self._wait(start())
        while page := self._wait(cursor.fetch(5 * PAGE_ROWS)):
            yield from map(tuple, page)

    def snapshot(self) -> None:
        """From now on all is read as of one instant."""
        self._wait(self._open().execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))

    async def _identify(self) -> Identity:
        connection = self._open()
        found = None
        if await connection.fetchval("SELECT to_regclass($1)", f"{SCHEMA}.runs"):
            found = await connection.fetchrow(f"SELECT identity, key_check FROM {SCHEMA}.runs WHERE run = $1", self.run)
        if found is None:
            raise JournalError(f"there is no run {self.run!r} in this database")
        return Identity(*found)

    def _open(self) -> asyncpg.Connection:
        if self._connection is None:
            raise JournalError(f"the reader of run {self.run!r} is closed")
        return self._connection

    def _wait(self, work: Coroutine[Any, Any, Found]) -> Found:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except FAILURES as error:
            raise JournalError(f"run {self.run!r} cannot be read: {error}") from None

    def close(self) -> None:
        if self._thread.is_alive():
            connection, self._connection = self._connection, None
            if connection is not None:
                with suppress(JournalError):
                    self._wait(connection.close(timeout=5))
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> PostgresReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _next(pages: AsyncIterator[Found]) -> Found | None:
    return await anext(pages, None)


class PostgresRows:
    """The rows of a run for `verify.Check`; text as bytes."""

    def __init__(self, reader: PostgresReader) -> None:
        reader.snapshot()
        self._rows: Callable[[str], Iterator[tuple]] = reader.rows

    def events(self) -> Iterator[tuple[int, bytes, int, bytes, bytes, bytes, float, bytes, bytes]]:
        # convert_to: a name is compared as the bytes it was hashed as.
        return self._rows(
            "SELECT idx, convert_to(chain, 'UTF8'), seq, convert_to(kind, 'UTF8'), body, note, time, hash, tag"
            f" FROM {SCHEMA}.events WHERE run = $1 ORDER BY idx"
        )

    def seals(self) -> Iterator[tuple[int, int, int, bytes]]:
        return self._rows(f"SELECT number, events, artefacts, mac FROM {SCHEMA}.seals WHERE run = $1 ORDER BY number")

    def artefacts(self) -> Iterator[tuple[int, bytes, int]]:
        return self._rows(f"SELECT number, sha256, size FROM {SCHEMA}.artefacts WHERE run = $1 ORDER BY number")

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        return self._rows(f"SELECT id, data FROM {SCHEMA}.chunks WHERE run = $1 ORDER BY id")


__all__ = ["PostgresReader", "PostgresRows"]
