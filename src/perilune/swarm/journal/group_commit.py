"""Many appends, one commit: what every journal does on the loop's thread, whatever it writes to.

An append links its event to the chain at once, so that the order within a chain is the order of the calls, and waits
in a batch. While one batch is being committed the next one gathers; there is no delay beyond that. When a commit ends,
its futures are resolved together and subscribers get the events in one list.

A commit that fails ends the journal: all who wait and all who come later get `JournalError` with the reason. What an
append returned is stored; what it did not return may or may not be, as after any crash.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import orjson

from perilune.swarm.journal.event import Artefact, Event, JournalError, first_link, link

INLINE_BYTES = 1 << 16
"""Hashing more than this is worth a thread."""
PATIENT_BYTES = 1 << 20
"""Storing more than this waits for the commit, so that what waits in memory stays small."""


class Entry(NamedTuple):
    """An event that waits for its index."""

    chain: str
    seq: int
    kind: str
    body: bytes
    note: bytes
    time: float
    hash: bytes
    token: int | None = None
    """The lease under which it was written, where the journal has leases."""


@dataclass(slots=True)
class Batch:
    entries: list[Entry] = field(default_factory=list)
    futures: list[asyncio.Future[Event]] = field(default_factory=list)
    blobs: dict[str, bytes] = field(default_factory=dict)
    stored: list[asyncio.Future[None]] = field(default_factory=list)

    def is_empty(self) -> bool:
        return not (self.entries or self.blobs or self.stored)


class GroupCommit:
    """The half of a journal that lives on the loop. The other half implements `_commit` and `_read`."""

    def __init__(self, name: str, heads: dict[str, tuple[int, bytes]], clock: Callable[[], float]) -> None:
        self.name = name
        self._heads = heads
        self._tails: dict[str, tuple[int, bytes]] = {}
        self._clock = clock
        self._pending = Batch()
        self._unwritten: dict[str, bytes] = {}
        self._subscribers: list[Callable[[list[Event]], None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._committing: Batch | None = None
        self._scheduled = False
        self._refusal: str | None = None
        self._broken: str | None = None
        self._idle: asyncio.Future[None] | None = None

    # What callers use

    async def append(
        self, chain: str, kind: str, body: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> Event:
        """Commit one event and return it."""
        loop = self._running()
        try:
            body_json = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
            note_json = orjson.dumps(note, option=orjson.OPT_SORT_KEYS) if note else b"{}"
        except TypeError as error:
            raise TypeError(f"event {kind!r} of chain {chain!r} cannot be written as JSON: {error}") from None
        tail = self._tails.get(chain) or self._heads.get(chain)
        check_names(chain, kind)
        seq, previous = tail or (-1, first_link(chain))
        hash = link(previous, kind, body_json)
        token = self._token(chain)
        self._tails[chain] = (seq + 1, hash)
        future: asyncio.Future[Event] = loop.create_future()
        self._pending.entries.append(
            Entry(chain, seq + 1, kind, body_json, note_json, float(self._clock()), hash, token)
        )
        self._pending.futures.append(future)
        self._schedule(loop)
        return await future

    async def put(self, data: bytes) -> Artefact:
        """Store bytes under their hash; committed no later than the next event of the caller."""
        loop = self._running()
        if len(data) > INLINE_BYTES:
            sha256 = await loop.run_in_executor(None, lambda: hashlib.sha256(data).hexdigest())
            self._running()
        else:
            sha256 = hashlib.sha256(data).hexdigest()
        if sha256 not in self._unwritten:
            self._unwritten[sha256] = self._pending.blobs[sha256] = bytes(data)
            self._schedule(loop)
        if len(data) > PATIENT_BYTES:
            stored: asyncio.Future[None] = loop.create_future()
            self._pending.stored.append(stored)
            self._schedule(loop)
            await stored
        return Artefact(sha256, len(data))

    def head(self, chain: str) -> bytes:
        """The hash of the chain's last committed event; of its name while it has none."""
        found = self._heads.get(chain)
        return found[1] if found else first_link(chain)

    def subscribe(self, receive: Callable[[list[Event]], None]) -> Callable[[], None]:
        self._subscribers.append(receive)

        def stop() -> None:
            if receive in self._subscribers:
                self._subscribers.remove(receive)

        return stop

    async def close(self) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # What a backend implements

    def _commit(self, batch: Batch) -> None:
        """Begin to commit; ends in `_committed` or `_failed` on the loop's thread."""
        raise NotImplementedError

    def _token(self, chain: str) -> int | None:
        """The lease under which the chain may be written now."""
        return None

    # What a backend calls

    def _committed(self, batch: Batch, results: Sequence[Event | JournalError]) -> None:
        events = []
        for result, future, entry in zip(results, batch.futures, batch.entries):
            if isinstance(result, JournalError):
                self._tails.pop(entry.chain, None)
                if not future.done():
                    future.set_exception(result)
                continue
            events.append(result)
            self._heads[entry.chain] = (result.seq, result.hash)
            tail = self._tails.get(entry.chain)
            if tail is not None and tail[0] <= result.seq:
                del self._tails[entry.chain]
            if not future.done():
                future.set_result(result)
        for sha256 in batch.blobs:
            self._unwritten.pop(sha256, None)
        for stored in batch.stored:
            if not stored.done():
                stored.set_result(None)
        self._committing = None
        self._continue()
        if events:
            self._feed(events)

    def _failed(self, reason: str) -> None:
        self._refusal = self._broken = reason
        waiting = (self._committing, self._pending)
        self._committing, self._pending = None, Batch()
        for each in waiting:
            for future in [*each.futures, *each.stored] if each else ():
                if not future.done():
                    future.set_exception(JournalError(reason))
        self._continue()

    def _feed(self, events: list[Event]) -> None:
        for receive in tuple(self._subscribers):
            try:
                receive(events)
            except Exception as error:  # one broken viewer must not stop a run
                if self._loop is not None:
                    self._loop.call_exception_handler(
                        {"message": f"journal {self.name}: a subscriber failed", "exception": error}
                    )

    async def _drain(self, refusal: str) -> None:
        """Refuse new appends and wait until those before are committed or have failed."""
        self._refusal = self._refusal or refusal
        if self._committing or self._scheduled:
            self._idle = self._idle or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._idle)

    # Batches

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._refusal is not None:
            raise JournalError(self._refusal)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise JournalError(f"journal {self.name} belongs to another event loop: open it where it is used")
            self._loop = loop
        return loop

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        # The hand-over waits for the callbacks that are ready now: agents that wake together commit together.
        if not self._committing and not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._scheduled = False
        self._continue()

    def _continue(self) -> None:
        batch = self._pending
        if self._committing or self._scheduled:
            return
        if not batch.is_empty():
            self._pending, self._committing = Batch(), batch
            self._commit(batch)
        elif self._idle is not None and not self._idle.done():
            self._idle.set_result(None)


def check_names(chain: str, kind: str) -> None:
    for what, name in (("chain", chain), ("kind", kind)):
        if not name or "\0" in name:
            raise ValueError(f"{what} of an event is {name!r}: expected a name without zero bytes")


def relink(entries: Iterable[Entry], tail: tuple[int, bytes]) -> list[Entry]:
    """The entries of one chain, continued from another tail."""
    linked = []
    for entry in entries:
        seq, previous = tail
        tail = (seq + 1, link(previous, entry.kind, entry.body))
        linked.append(entry._replace(seq=tail[0], hash=tail[1]))
    return linked


__all__ = ["Batch", "Entry", "GroupCommit", "check_names", "relink"]
