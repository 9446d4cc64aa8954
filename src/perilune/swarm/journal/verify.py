"""Is a journal what was written? Reads every row once and names what is not.

Three layers, each with its own reach:

    chains     hash(n) from hash(n-1), kind and body: needs no key, finds what accident or a careless hand changed
    seals      tags of rows and seals of commits: needs the key, finds every edit, insertion, deletion, reordering and
               rewrite, whatever else was recomputed
    head       the last seal known outside: finds commits cut off at the end

The bytes of artefacts are compared with their hashes, and the database's own indexes with its tables.
"""

from __future__ import annotations

import hashlib
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from perilune.swarm.journal.chunks import PART_BITS
from perilune.swarm.journal.event import JournalError
from perilune.swarm.journal.seal import Head, Seal, read_head
from perilune.swarm.journal.sqlite_reader import Identity, SQLiteReader, connect_to_read

NAMED = 100
"""Problems listed one by one; all are counted."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    what: str
    index: int | None = None
    chain: str | None = None

    def __str__(self) -> str:
        place = [f"event {self.index}"] if self.index is not None else []
        place += [f"chain {self.chain!r}"] if self.chain is not None else []
        return f"{', '.join(place)}: {self.what}" if place else self.what


@dataclass(frozen=True, kw_only=True)
class Report:
    journal: str
    identity: str
    events: int
    chains: int
    artefacts: int
    seals: int
    sealed: bool
    """The seals were checked, with the key."""
    problems: tuple[Problem, ...]
    more_problems: int
    """Found beyond those listed."""
    remarks: tuple[str, ...]
    """What could not be checked, and why."""
    seconds: float

    @property
    def intact(self) -> bool:
        return not self.problems

    def plain(self) -> dict[str, Any]:
        problems = [{"what": each.what, "index": each.index, "chain": each.chain} for each in self.problems]
        return {
            "journal": self.journal,
            "identity": self.identity,
            "intact": self.intact,
            "sealed": self.sealed,
            "events": self.events,
            "chains": self.chains,
            "artefacts": self.artefacts,
            "seals": self.seals,
            "problems": problems,
            "more_problems": self.more_problems,
            "remarks": list(self.remarks),
        }


class Rows(Protocol):
    """A journal's rows as they are stored, in order; text as bytes."""

    def events(self) -> Iterable[tuple[int, bytes, int, bytes, bytes, bytes, float, bytes, bytes]]:
        """index, chain, seq, kind, body, note, time, hash, tag"""
        ...

    def seals(self) -> Iterable[tuple[int, int, int, bytes]]:
        """number, events, artefacts, mac"""
        ...

    def artefacts(self) -> Iterable[tuple[int, bytes, int]]:
        """number, sha256, size"""
        ...

    def chunks(self) -> Iterable[tuple[int, bytes]]:
        """(artefact's number << PART_BITS) + part, data"""
        ...


def verify(path: Path | str, key: bytes | None, *, heads: Path | None = None) -> Report:
    """Check the journal at `path`, beside its writer if there is one. `heads`: the folder given to the journal."""
    begun, path = time.perf_counter(), Path(path)
    with SQLiteReader(path) as reader:
        identity = reader.identity
    # Read before the rows: the writer may move it on meanwhile.
    head, unreadable = read_head(heads, identity.name)
    rows = SQLiteRows(path)
    check = Check(rows, identity, key, head=head, heads=heads is not None)
    if unreadable is not None:
        check.problem(unreadable)
    with ThreadPoolExecutor(max_workers=1) as second:
        structure = second.submit(_check_structure, path)
        try:
            check.run()
        except (sqlite3.Error, JournalError) as error:
            check.problem(f"the database is damaged: {error}")
        finally:
            rows.close()
        for line in structure.result():
            check.problem(f"the database is damaged: {line}")
    return check.report(str(path), time.perf_counter() - begun)


class Check:
    """One pass over a journal's rows."""

    def __init__(self, rows: Rows, identity: Identity, key: bytes | None, *, head: Head | None, heads: bool) -> None:
        self.rows, self.identity, self.head = rows, identity, head
        self.problems: list[Problem] = []
        self.more = self.events = self.artefacts = self.seals = self.chains = 0
        self.remarks: list[str] = []
        self.seal: Seal | None = Seal(key, identity.name)
        self.sealed = key is not None and identity.key_check is not None
        if key is None and identity.key_check is not None:
            self.seal = None
            self.remarks.append("no key: the seals were not checked, an edit that recomputed the chains goes unseen")
        elif key is None:
            self.remarks.append("the journal has no seals: an edit that recomputed the chains goes unseen")
        elif identity.key_check is None:
            self.problem("the journal has no seals: it was begun without a key, or they were removed")
            self.seal = None
        elif identity.key_check != self.seal.key_check(identity.name):
            self.problem("the journal is sealed with another key: it was rewritten, or this is not its key")
            self.seal, self.sealed = None, False
        if self.sealed and head is None:
            reason = "there is no head file for it" if heads else "no folder of heads was given"
            self.remarks.append(f"{reason}: commits cut off at the end go unseen")

    def problem(self, what: str, index: int | None = None, chain: bytes | None = None) -> None:
        if len(self.problems) == NAMED:
            self.more += 1
        else:
            name = chain.decode(errors="backslashreplace") if isinstance(chain, bytes) else None
            self.problems.append(Problem(what=what, index=index, chain=name))

    def run(self) -> None:
        self._check_rows()
        self._check_artefacts()

    def report(self, journal: str, seconds: float) -> Report:
        return Report(
            journal=journal,
            identity=self.identity.name,
            events=self.events,
            chains=self.chains,
            artefacts=self.artefacts,
            seals=self.seals,
            sealed=self.sealed,
            problems=tuple(self.problems),
            more_problems=self.more,
            remarks=tuple(self.remarks),
            seconds=seconds,
        )

    def _check_rows(self) -> None:
        tag_of = self.seal.tag if self.seal else None
        sha256 = hashlib.sha256
        heads: dict[bytes, tuple[int, bytes]] = {}
        commits = _Commits(self)
        tags: list[bytes] = []
        expected = 0
        for index, chain, seq, kind, body, note, moment, link, tag in self.rows.events():
            while index >= commits.until:
                expected, tags = commits.end(tags, expected), []
            if index != expected:
                self.problem(f"events {expected} to {index - 1} are missing", expected)
                expected = index
            expected += 1
            try:
                if tag_of is not None:
                    right = tag_of(index, chain, seq, kind, body, note, moment, link)
                    tags.append(right)
                    if right != tag:
                        self.problem("the row was changed after it was sealed", index, chain)
                next_seq, previous = heads.get(chain) or (0, sha256(chain).digest())
                if seq != next_seq:
                    self.problem(f"it has number {seq} on its chain, expected {next_seq}", index, chain)
                if sha256(b"".join((previous, kind, b"\0", body))).digest() != link:
                    self.problem("its hash does not follow from what is before it", index, chain)
                heads[chain] = (seq + 1, link)
            except (TypeError, struct.error) as error:
                self.problem(f"the row holds something that no journal writes: {error}", index)
        self.events, self.chains = commits.finish(tags, expected), len(heads)

    def _check_artefacts(self) -> None:
        chunks = iter(self.rows.chunks())
        chunk = next(chunks, None)
        for number, digest, size in self.rows.artefacts():
            name = digest.hex() if isinstance(digest, bytes) else repr(digest)
            if number != self.artefacts:
                self.problem(f"artefacts {self.artefacts} to {number - 1} are missing")
            self.artefacts = number + 1
            found, seen, part = hashlib.sha256(), 0, number << PART_BITS
            while chunk is not None and chunk[0] < (number + 1) << PART_BITS:
                if chunk[0] != part:
                    self.problem(f"chunk {chunk[0]} of artefact {name} is out of place, expected {part}")
                found.update(chunk[1])
                seen, part = seen + len(chunk[1]), chunk[0] + 1
                chunk = next(chunks, None)
            if (found.digest(), seen) != (digest, size):
                self.problem(f"artefact {name} was changed: its {seen} bytes have the hash {found.hexdigest()}")
        while chunk is not None:
            self.problem(f"chunk {chunk[0]} belongs to no artefact")
            chunk = next(chunks, None)


class _Commits:
    """Walks the seals beside the rows: which commit a row belongs to, and whether the commit's seal is right."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.seal = check.seal if check.sealed else None
        self._seals: Iterator[tuple[int, int, int, bytes]] = iter(check.rows.seals() if self.seal else ())
        self._artefacts = iter(check.rows.artefacts() if self.seal else ())
        self._events = self._stored = 0
        self._problems = 0
        self._head_seen = False
        self._current: tuple[int, int, int, bytes] | None = None
        self.until: float = float("inf")
        """The first index that is not in this commit."""
        self._next()

    def _next(self) -> None:
        self._current = next(self._seals, None)
        self._problems = self._count()
        self.until = self._current[1] if self._current else float("inf")

    def _count(self) -> int:
        return len(self.check.problems) + self.check.more

    def end(self, tags: list[bytes], read: int) -> int:
        """The rows of this commit have been read, up to before index `read`; returns where the next commit begins."""
        check = self.check
        if self._current is None or self.seal is None:
            if self.seal is not None and tags:
                check.problem(f"{len(tags)} events from {self._events} on are not sealed", self._events)
            return read
        number, events, artefacts, mac = self._current
        if read < events:
            check.problem(f"events {read} to {events - 1} are missing", read)
        if number != check.seals:
            check.problem(f"seals {check.seals} to {number - 1} are missing", self._events)
        check.seals = number + 1
        stored = []
        while self._stored < artefacts and (row := next(self._artefacts, None)) is not None:
            stored.append((row[1], row[2]))
            self._stored = row[0] + 1
        try:
            right = self.seal.commit(events, artefacts, tags, stored)
        except (TypeError, struct.error):
            right = b""
        if right != mac and self._count() == self._problems:
            covered = (
                f"event {self._events}" if events <= self._events + 1 else f"events {self._events} to {events - 1}"
            )
            check.problem(f"seal {number} does not match {covered} and the artefacts stored with it", self._events)
        # Go on from the stored seal, so that a broken one does not take all that follow with it.
        self.seal.last = mac
        head = check.head
        self._head_seen |= head is not None and (head.seals, head.events, head.mac) == (number + 1, events, mac)
        self._events = events
        self._next()
        return max(read, events)

    def finish(self, tags: list[bytes], read: int) -> int:
        """All rows have been read, up to before index `read`; returns how many there are."""
        check, events = self.check, read
        read = self.end(tags, read)
        while self._current is not None:
            read = self.end([], read)
        if self.seal is not None and next(self._artefacts, None) is not None:
            check.problem(f"artefacts from {self._stored} on are not sealed")
        if self.seal is not None and check.head is not None and not self._head_seen:
            check.problem(
                f"the journal ends at {events} events without the seal known outside, at {check.head.events} events: "
                "it was cut, rewritten or replaced by an older copy",
                min(events, check.head.events),
            )
        return events


class SQLiteRows:
    """The rows of a journal in SQLite."""

    def __init__(self, path: Path) -> None:
        self._connection = connect_to_read(path)
        self._connection.text_factory = bytes
        # One transaction: all tables are seen at the same instant, also beside a writer.
        self._connection.execute("BEGIN")

    def events(self) -> Iterator[tuple[int, bytes, int, bytes, bytes, bytes, float, bytes, bytes]]:
        return self._connection.execute(
            "SELECT idx, chain, seq, kind, body, note, time, hash, tag FROM events ORDER BY idx"
        )

    def seals(self) -> Iterator[tuple[int, int, int, bytes]]:
        return self._connection.execute("SELECT number, events, artefacts, mac FROM seals ORDER BY number")

    def artefacts(self) -> Iterator[tuple[int, bytes, int]]:
        return self._connection.execute("SELECT number, sha256, size FROM artefacts ORDER BY number")

    def chunks(self) -> Iterator[tuple[int, bytes]]:
        return self._connection.execute("SELECT id, data FROM chunks ORDER BY id")

    def close(self) -> None:
        self._connection.close()


def _check_structure(path: Path) -> list[str]:
    """What SQLite itself finds: indexes that do not fit their tables, broken pages."""
    connection = connect_to_read(path)
    try:
        lines = [row[0] for row in connection.execute("PRAGMA integrity_check(10)")]
        return [] if lines == ["ok"] else lines
    except sqlite3.Error as error:
        return [str(error)]
    finally:
        connection.close()


__all__ = ["Check", "Problem", "Report", "Rows", "verify"]
