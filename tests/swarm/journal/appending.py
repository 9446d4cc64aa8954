"""Journals for tests: how to open, fill and read one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from perilune.swarm.journal.event import Event
from perilune.swarm.journal.sqlite import SQLiteJournal

KEY = bytes(range(32))


def ticking() -> Callable[[], float]:
    """A clock that moves by one at each look."""
    count = itertools.count(1_000_000)
    return lambda: float(next(count))


def open_journal(folder: Path, key: bytes | None = KEY, **options: Any) -> SQLiteJournal:
    options.setdefault("heads", folder / "heads")
    return SQLiteJournal.open(folder / "journal.db", key=key, clock=ticking(), **options)


async def fill(journal: SQLiteJournal, chains: int = 3, events: int = 4, artefacts: int = 2) -> list[Event]:
    """Several agents append at the same time, and store something."""

    async def agent(name: str) -> list[Event]:
        return [await journal.append(name, "reply", {"step": step}, {"seconds": 0.5}) for step in range(events)]

    for number in range(artefacts):
        await journal.put(f"artefact {number} ".encode() * 100)
    done = await asyncio.gather(*(agent(f"main/agent-{number}") for number in range(chains)))
    return sorted((event for events in done for event in events), key=lambda event: event.index)


def written(folder: Path, key: bytes | None = KEY, **options: Any) -> Path:
    """The path of a closed journal with a few commits."""

    async def write() -> None:
        async with open_journal(folder, key) as journal:
            await fill(journal, **options)

    asyncio.run(write())
    return folder / "journal.db"


def plain(events: Iterable[Event]) -> list[tuple[str, int, str, bytes]]:
    """Events without what depends on time and speed."""
    return [(event.chain, event.seq, event.kind, event.body) for event in events]
