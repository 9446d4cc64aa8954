"""The journal of one machine: SQLite with a write-ahead log, one writer, one commit for all who wait.

`synchronous=FULL`: a commit returns after the log is on disk. A thread of its own writes; the loop never waits for
the disk. Reading uses other connections. A lock file keeps a second writer out, so that what is read at the start
(heads of chains, the last seal) stays true.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from perilune.swarm.journal.chunks import check_range, split
from perilune.swarm.journal.event import Artefact, Event, JournalError
from perilune.swarm.journal.group_commit import Batch, GroupCommit
from perilune.swarm.journal.seal import Head, HeadFile, Seal
from perilune.swarm.journal.sqlite_reader import TABLES, Identity, SQLiteReader, read_identity

BUSY_SECONDS = 5.0


class SQLiteJournal(GroupCommit):
    """Made by `SQLiteJournal.open`; used on one event loop."""

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        key: bytes | None,
        heads: Path | None = None,
        clock: Callable[[], float] = time.time,
        busy_seconds: float = BUSY_SECONDS,
    ) -> SQLiteJournal:
        """Create a journal or continue one.

        `key` seals it (`seal.load_or_create_key`); None leaves it without a seal. `heads` is a folder outside of the
        run (`seal.state_folder() / "heads"`) for the last seal, without which a cut at the end goes unseen.
        """
        path = Path(path)
        lock = _lock(path)
        try:
            return cls(path, lock, key, heads, clock, busy_seconds)
        except BaseException:
            os.close(lock)
            raise

    def __init__(
        self,
        path: Path,
        lock: int,
        key: bytes | None,
        heads: Path | None,
        clock: Callable[[], float],
        busy_seconds: float,
    ) -> None:
        self.path = path
        self._lock = lock
        self._writer, identity = _connect_to_write(path, key, busy_seconds)
        try:
            self._reader = SQLiteReader(path)
            super().__init__(repr(str(path)), self._reader.heads(), clock)
            self.identity = identity.name
            self._events, self._artefacts = self._reader.count()
            self._seals, last = self._reader.last_seal() or (0, None)
            self._seal = Seal(key, identity.name, last=last)
            self._seal.check_key(self.name, identity.name, identity.key_check)
            self._head_file = HeadFile(heads, identity.name) if key is not None and heads is not None else None
            self._check_head()
        except BaseException:
            self._writer.close()
            raise
        self._closing: asyncio.Task[None] | None = None
        self._inbox: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        # Ranges of artefacts are read there, by a connection of its own.
        self._reading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal-reader")
        self._artefact_reader = SQLiteReader(path)
        self._thread = threading.Thread(target=self._write, name="journal-writer", daemon=True)
        self._thread.start()

    # Reading

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterable[Event]:
        return self._reader.events(chain, after=after)

    def chains(self) -> list[str]:
        return list(self._heads)

    def artefacts(self) -> list[Artefact]:
        return self._reader.artefacts()

    async def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        waiting = self._unwritten.get(sha256)
        if waiting is not None:
            check_range(start, end)
            return waiting[start:end]
        if self._closing is not None:
            raise JournalError(f"journal {self.name} is closed")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reading, self._artefact_reader.get, sha256, start, end)

    async def close(self) -> None:
        """Commit what waits, write the head, let the next writer in."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        broken = self._broken
        await self._drain(f"journal {self.name} is closed")
        loop = asyncio.get_running_loop()
        self._inbox.put(None)
        await loop.run_in_executor(None, self._thread.join)
        await loop.run_in_executor(None, self._reading.shutdown)
        for reader in (self._reader, self._artefact_reader):
            reader.close()
        # The last connection to close moves the log into the database, which can take a while.
        await loop.run_in_executor(None, self._writer.close)
        os.close(self._lock)
        await asyncio.sleep(0)  # for the writer's last word
        if self._broken and not broken:
            raise JournalError(self._broken)

    # Writing

    def _commit(self, batch: Batch) -> None:
        self._inbox.put(batch)

    def _write(self) -> None:
        """The writer's thread: ends when it is told to, or with the first failure."""
        while True:
            try:
                batch = self._inbox.get(timeout=self._head_file.due() if self._head_file else None)
            except queue.Empty:
                batch = Batch()  # nothing but the head is due
            try:
                if batch is not None and not batch.is_empty():
                    self._tell(self._committed, batch, self._store(batch))
            except Exception as error:  # whatever it is: those who wait must hear of it
                with suppress(sqlite3.Error):
                    self._writer.rollback()
                return self._tell(self._failed, f"journal {self.name} cannot be written: {error}")
            try:
                self._save_head(at_once=batch is None)
            except (OSError, JournalError) as error:
                return self._tell(self._failed, f"journal {self.name}: its head cannot be written: {error}")
            if batch is None:
                return None

    def _save_head(self, *, at_once: bool) -> None:
        if self._head_file is None:
            return
        if self._seals:
            self._head_file.update(Head(events=self._events, seals=self._seals, mac=self._seal.last))
        if at_once:
            self._head_file.write()

    def _tell(self, what: Callable[..., None], *values: object) -> None:
        # A loop that was closed waits for nothing any more; what is stored is stored.
        with suppress(RuntimeError):
            assert self._loop is not None
            self._loop.call_soon_threadsafe(what, *values)

    def _store(self, batch: Batch) -> list[Event]:
        tag, index = self._seal.tag, self._events
        events, rows, tags = [], [], []
        for chain, seq, kind, body, note, moment, hash, _ in batch.entries:
            mark = tag(index, chain.encode(), seq, kind.encode(), body, note, moment, hash)
            events.append(Event(index, chain, seq, kind, body, note, moment, hash))
            rows.append((index, chain, seq, kind, body, note, moment, hash, mark))
            tags.append(mark)
            index += 1
        execute = self._writer.execute
        execute("BEGIN IMMEDIATE")
        self._writer.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        stored = [(bytes.fromhex(sha256), data) for sha256, data in batch.blobs.items()]
        stored = [each for each in stored if not self._has(each[0])]
        for number, (digest, data) in enumerate(stored, self._artefacts):
            execute("INSERT INTO artefacts VALUES (?, ?, ?)", (number, digest, len(data)))
            self._writer.executemany("INSERT INTO chunks VALUES (?, ?)", split(number, data))
        artefacts = self._artefacts + len(stored)
        sealed = self._seal.keyed and (rows or stored)
        if sealed:
            mac = self._seal.commit(index, artefacts, tags, [(digest, len(data)) for digest, data in stored])
            execute("INSERT INTO seals VALUES (?, ?, ?, ?)", (self._seals, index, artefacts, mac))
        execute("COMMIT")
        self._events, self._artefacts = index, artefacts
        self._seals += 1 if sealed else 0
        return events

    def _has(self, digest: bytes) -> bool:
        return self._writer.execute("SELECT 1 FROM artefacts WHERE sha256 = ?", (digest,)).fetchone() is not None

    def _check_head(self) -> None:
        head = self._head_file.read() if self._head_file else None
        if head is not None and self._head_file is not None:
            query = "SELECT events, mac FROM seals WHERE number = ?"
            self._head_file.check(self.name, head, self._writer.execute(query, (head.seals - 1,)).fetchone())


def _lock(path: Path) -> int:
    """An open lock file: ends with the process, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise JournalError(f"journal {str(path)!r} cannot be opened for writing: {error}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock)
        raise JournalError(
            f"journal {str(path)!r} is being written by process {owner}: wait for it, or read it with SQLiteReader"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _connect_to_write(path: Path, key: bytes | None, busy_seconds: float) -> tuple[sqlite3.Connection, Identity]:
    try:
        if not path.exists():
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        connection = sqlite3.connect(path, timeout=busy_seconds, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.Error) as error:
        raise JournalError(f"journal {str(path)!r} cannot be opened for writing: {error}") from None
    try:
        identity = read_identity(connection, path)
        mode = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        if mode != "wal":
            raise JournalError(f"journal {str(path)!r}: its file system cannot hold a write-ahead log (got {mode!r})")
        connection.execute("PRAGMA synchronous=FULL")
        if identity is None:
            name = os.urandom(16).hex()
            identity = Identity(name, Seal(key, name).key_check(name) if key is not None else None)
            connection.execute("BEGIN IMMEDIATE")
            for statement in TABLES.strip().split(";\n"):
                connection.execute(statement)
            connection.execute("INSERT INTO identity VALUES (?, ?)", identity)
            connection.execute("COMMIT")
    except (sqlite3.Error, JournalError) as error:
        connection.close()
        if isinstance(error, JournalError):
            raise
        raise JournalError(f"journal {str(path)!r} cannot be opened for writing: {error}") from None
    return connection, identity


__all__ = ["SQLiteJournal"]
