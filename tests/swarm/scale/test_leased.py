"""Contracts of leased journals: who takes an agent reads all of its past, and who lost it writes nothing any more."""

import asyncio
import uuid

import pytest

pytest.importorskip("asyncpg", reason="needs asyncpg (pip install 'perilune[scale]')")

from perilune.swarm.journal.event import JournalError
from perilune.swarm.journal.leases import StaleLease
from perilune.swarm.scale.leased import LeasedJournal, open_run, unfinished
from tests.swarm.journal.appending import KEY

pytestmark = pytest.mark.needs_tool("initdb")


def journals(work, dsn: str, *, seconds: float = 0.4):
    """Run `work(first, second)` with two journals of one run, as of two processes."""

    async def both():
        run = uuid.uuid4().hex
        first, second = [
            await LeasedJournal.join(dsn, run=run, key=KEY, worker=name, seconds=seconds) for name in ("a", "b")
        ]
        try:
            return await work(first, second)
        finally:
            await first.close()
            await second.close()

    return asyncio.run(asyncio.wait_for(both(), 60))


async def fall_silent(journal: LeasedJournal) -> None:
    """As if its process had stopped: leases are not renewed."""
    journal._renewing.cancel()


def test_what_a_process_starts_it_holds_and_may_write(postgres_dsn):
    async def work(first, second):
        await first.append("main/a", "started", {})
        await first.append("main/a", "reply", {"step": 0})
        with pytest.raises(JournalError):
            await second.append("main/a", "reply", {"step": 1})

    journals(work, postgres_dsn)


def test_an_agent_is_taken_with_all_below_it_and_with_all_of_its_past(postgres_dsn):
    async def work(first, second):
        for chain in ("main/a", "main/a/x", "main/a/y", "main/ab", "main/a.0", "main/a0", "main/a$"):
            await first.append(chain, "started", {})
        await first.append("main/a/y", "finished", {})
        await first.append("main/a#0.0", "outcome", {})
        await fall_silent(first)
        past = await second.take("main/a", patience=30)
        assert {event.chain for event in past} == {"main/a", "main/a/x", "main/a/y", "main/a#0.0"}
        assert unfinished(past) == ["main/a", "main/a/x"]
        for chain in ("main/a", "main/a/x"):
            with pytest.raises(StaleLease):
                await first.append(chain, "reply", {"step": 0})
            assert not second.has_written(chain)
            await second.append(chain, "reply", {"step": 0})
            assert second.has_written(chain)
        await first.append("main/ab", "reply", {"step": 0})  # a neighbour stays where it was

    journals(work, postgres_dsn)


def test_an_agent_whose_holder_lives_is_not_taken(postgres_dsn):
    async def work(first, second):
        await first.append("main/a", "started", {})
        with pytest.raises(StaleLease):
            await second.take("main/a", patience=0.5)
        await first.append("main/a", "reply", {"step": 0})

    journals(work, postgres_dsn, seconds=5)


def test_who_lost_an_agent_hears_of_it(postgres_dsn):
    async def work(first, second):
        lost: asyncio.Queue[str] = asyncio.Queue()
        first.on_lost = lost.put_nowait
        await first.append("main/a", "started", {})
        await fall_silent(first)
        await second.take("main/a", patience=30)
        first._renewing = asyncio.create_task(first._renew_all())  # it wakes up again
        assert await lost.get() == "main/a"

    journals(work, postgres_dsn)


def test_what_is_let_go_can_be_had_at_once(postgres_dsn):
    async def work(first, second):
        await first.append("main/a", "started", {})
        await first.append("main/a/x", "started", {})
        await first.let_go("main/a")
        await second.take("main/a", patience=0)

    journals(work, postgres_dsn, seconds=600)


def test_a_run_is_opened_by_one_process_at_a_time(postgres_dsn):
    async def work():
        run = uuid.uuid4().hex
        first = await open_run(postgres_dsn, run=run, key=KEY, seconds=0.4)
        await first.append("main", "started", {})
        await first.append("main/a", "started", {})
        assert [lease.agent for lease in await first.claim("worker", 60, limit=9)] == ["main/a"]  # left for workers
        with pytest.raises(JournalError, match="another process"):
            await open_run(postgres_dsn, run=run, key=KEY, seconds=0.4)
        await first.close()
        second = await open_run(postgres_dsn, run=run, key=KEY, seconds=0.4)
        await second.append("main", "reply", {"step": 0})
        await second.close()

    asyncio.run(asyncio.wait_for(work(), 60))
