"""The journal that lives as long as its run: the same chains as on disk."""

import asyncio

import pytest

from perilune.swarm.journal.event import JournalError
from perilune.swarm.journal.memory import MemoryJournal
from perilune.swarm.journal.sqlite import SQLiteJournal


def test_chains_and_hashes_are_those_of_the_journal_on_disk(tmp_path):
    async def write(journal):
        for number in range(3):
            await journal.append("main", "reply", {"step": number, "text": "ü"}, {"seconds": 0.1})
            await journal.append(f"main#{number}.0", "outcome", {"text": "x"})
        artefact = await journal.put(b"0123456789")
        events = [(each.index, each.chain, each.seq, each.kind, each.body, each.note, each.hash)
                  for each in journal.events()]  # fmt: skip
        heads = {chain: journal.head(chain) for chain in journal.chains()}
        part = await journal.get(artefact.sha256, 2, 5)
        await journal.close()
        return events, heads, artefact, part

    async def both():
        return await write(MemoryJournal()), await write(SQLiteJournal.open(tmp_path / "journal.db", key=None))

    in_memory, on_disk = asyncio.run(both())
    assert in_memory == on_disk and in_memory[3] == b"234"


def test_what_is_asked_for_is_given_and_nothing_is_written_after_its_end():
    async def work():
        journal, heard = MemoryJournal(), []
        stop = journal.subscribe(heard.extend)
        first = await journal.append("a", "x", {})
        stop()
        await journal.append("b", "y", {})
        assert heard == [first]
        assert [event.kind for event in journal.events("b")] == ["y"]
        assert [event.kind for event in journal.events(after=first.index)] == ["y"]
        assert journal.head("never") == MemoryJournal().head("never")
        with pytest.raises(JournalError, match="no artefact"):
            await journal.get("0" * 64)
        await journal.close()
        with pytest.raises(JournalError, match="closed"):
            await journal.append("a", "x", {})

    asyncio.run(work())
