"""Reading a journal in SQLite: its tables, and a connection that only reads.

    identity   one row: the journal's name for itself, the check of its key (null: not sealed)
    events     the rows of `Event` in the order of commits, each with its tag (see `seal`)
    artefacts  stored bytes by hash; chunks hold their parts (see `chunks`)
    seals      one per commit: how many events and artefacts there were after it, and the link of the seal's chain

Reading never needs the writer's lock: it works beside a running swarm and on a read-only copy. Pages are fetched by
their own short queries, so that a slow reader holds no transaction open.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from perilune.swarm.journal.chunks import check_range, cut, digest_of, span
from perilune.swarm.journal.event import Artefact, Event, JournalError

APPLICATION_ID = 0x50524C4E
VERSION = 1
PAGE_ROWS = 256

TABLES = f"""
CREATE TABLE identity (name TEXT NOT NULL, key_check BLOB) STRICT;
CREATE TABLE events (
    idx INTEGER PRIMARY KEY, chain TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    body BLOB NOT NULL, note BLOB NOT NULL, time REAL NOT NULL, hash BLOB NOT NULL, tag BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX events_by_chain ON events (chain, seq);
CREATE TABLE artefacts (number INTEGER PRIMARY KEY, sha256 BLOB NOT NULL UNIQUE, size INTEGER NOT NULL) STRICT;
CREATE TABLE chunks (id INTEGER PRIMARY KEY, data BLOB NOT NULL) STRICT;
CREATE TABLE seals (
    number INTEGER PRIMARY KEY, events INTEGER NOT NULL, artefacts INTEGER NOT NULL, mac BLOB NOT NULL
) STRICT;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
"""

_EVENT = "idx, chain, seq, kind, body, note, time, hash"


class Identity(NamedTuple):
    name: str
    key_check: bytes | None


def read_identity(connection: sqlite3.Connection, path: Path) -> Identity | None:
    """Whose journal it is; None when the file is still empty. Raises `JournalError` for anything else."""
    try:
        application, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        tables = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if not tables and not application:
            return None
        if application != APPLICATION_ID:
            raise JournalError(f"{str(path)!r} is a database, but not a journal of a swarm")
        if version != VERSION:
            raise JournalError(f"journal {str(path)!r} has version {version}, this program reads version {VERSION}")
        row = connection.execute("SELECT name, key_check FROM identity").fetchone()
    except sqlite3.Error as error:
        raise JournalError(f"{str(path)!r} cannot be read as a journal: {error}") from None
    if row is None:
        raise JournalError(f"journal {str(path)!r} has no identity: it was damaged")
    return Identity(*row)


def connect_to_read(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise JournalError(f"there is no journal at {str(path)!r}")
    place = f"file:{quote(str(path.absolute()))}?mode=ro"
    # SQLite reads a write-ahead log through a shared file that it must be able to make. Where it cannot and there is
    # no log, nobody writes and the file is read as it is.
    if not os.access(path.parent, os.W_OK) and not path.with_name(path.name + "-wal").exists():
        place += "&immutable=1"
    try:
        return sqlite3.connect(place, uri=True, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise JournalError(f"journal {str(path)!r} cannot be opened: {error}") from None


class SQLiteReader:
    """A journal for reading alone, from one thread at a time."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.connection = connect_to_read(self.path)
        try:
            identity = read_identity(self.connection, self.path)
            if identity is None:
                raise JournalError(f"{str(self.path)!r} is empty, not a journal")
        except JournalError:
            self.connection.close()
            raise
        self.identity = identity

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterator[Event]:
        """Committed events in order, of one chain or of all, with an index above `after`."""
        position = -1
        while True:
            if chain is None:
                rows = self._all(f"SELECT {_EVENT} FROM events WHERE idx > ? ORDER BY idx LIMIT ?", after, PAGE_ROWS)
            else:
                rows = self._all(
                    f"SELECT {_EVENT} FROM events WHERE chain = ? AND seq > ? AND idx > ? ORDER BY seq LIMIT ?",
                    *(chain, position, after, PAGE_ROWS),
                )
            for row in rows:
                yield Event(*row)
            if len(rows) < PAGE_ROWS:
                return
            after, position = rows[-1][0], rows[-1][2]

    def chains(self) -> list[str]:
        """In the order of their first events."""
        return [row[0] for row in self._all("SELECT chain FROM events WHERE seq = 0 ORDER BY idx")]

    def heads(self) -> dict[str, tuple[int, bytes]]:
        """The last event of each chain: its number and its hash."""
        rows = self._all(
            "SELECT e.chain, e.seq, e.hash FROM (SELECT chain, max(seq) AS last, min(idx) AS first FROM events"
            " GROUP BY chain) AS c JOIN events AS e ON e.chain = c.chain AND e.seq = c.last ORDER BY c.first"
        )
        return {chain: (seq, link) for chain, seq, link in rows}

    def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        """The bytes of an artefact from `start` to before `end`; only the chunks that hold them are read."""
        check_range(start, end)
        found = self._all("SELECT number, size FROM artefacts WHERE sha256 = ?", digest_of(sha256))
        if not found:
            raise JournalError(f"there is no artefact {sha256!r} in {str(self.path)!r}")
        number, size = found[0]
        end = size if end is None else min(end, size)
        if start >= end:
            return b""
        first, last = span(number, start, end)
        rows = self._all("SELECT data FROM chunks WHERE id BETWEEN ? AND ? ORDER BY id", first, last)
        return cut([row[0] for row in rows], sha256, size, start, end)

    def artefacts(self) -> list[Artefact]:
        """All that is stored, oldest first."""
        rows = self._all("SELECT sha256, size FROM artefacts ORDER BY number")
        return [Artefact(digest.hex(), size) for digest, size in rows]

    def last_seal(self) -> tuple[int, bytes] | None:
        """How many seals there are, and the last."""
        rows = self._all("SELECT number, mac FROM seals ORDER BY number DESC LIMIT 1")
        return (rows[0][0] + 1, rows[0][1]) if rows else None

    def count(self) -> tuple[int, int]:
        """How many events and artefacts there are."""
        rows = self._all(
            "SELECT (SELECT coalesce(max(idx) + 1, 0) FROM events),"
            " (SELECT coalesce(max(number) + 1, 0) FROM artefacts)"
        )
        return rows[0]

    def _all(self, query: str, *values: object) -> list[tuple]:
        try:
            return self.connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise JournalError(f"journal {str(self.path)!r} cannot be read: {error}") from None

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> SQLiteReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


__all__ = ["TABLES", "Identity", "SQLiteReader", "connect_to_read", "read_identity"]
