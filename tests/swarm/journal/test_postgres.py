"""The journal in PostgreSQL keeps the promises of the one in SQLite, with several processes writing."""

import asyncio
import itertools
import os
import shutil

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.swarm.journal import postgres_reader, seal
from perilune.swarm.journal.event import JournalError, canonical, first_link, link
from perilune.swarm.journal.postgres import PostgresJournal, verify_run
from perilune.swarm.journal.postgres_reader import SCHEMA, PostgresReader
from tests.swarm.journal.appending import KEY, fill, plain, ticking

pytestmark = pytest.mark.needs_tool("initdb")
NUMBERS = itertools.count()


@pytest.fixture
def run() -> str:
    return f"run-{os.getpid()}-{next(NUMBERS)}"


async def joined(dsn: str, run: str, key: bytes | None = KEY, **options) -> PostgresJournal:
    return await PostgresJournal.open(dsn, run=run, key=key, clock=ticking(), **options)


async def change(dsn: str, query: str, *values) -> None:
    connection = await asyncpg.connect(dsn)
    await connection.execute(query.replace("TABLES", SCHEMA), *values)
    await connection.close()


def test_events_are_linked_ordered_read_and_continued(postgres_dsn, run, monkeypatch):
    monkeypatch.setattr(postgres_reader, "PAGE_ROWS", 5)

    async def write():
        async with await joined(postgres_dsn, run) as journal:
            first = await journal.append("main", "started", {"b": 1, "a": "é"}, {"seconds": 2.5})
            assert first.hash == link(first_link("main"), "started", '{"a":"é","b":1}'.encode()) == journal.head("main")
            assert journal.head("other") == first_link("other")
            events = [first, *await fill(journal, chains=3, events=4)]
            assert [event.index for event in events] == list(range(13))
            assert list(journal.events()) == events == await journal.read()
            mine = [event for event in events if event.chain == "main/agent-1"]
            assert list(journal.events("main/agent-1")) == mine == await journal.read("main/agent-1")
            assert list(journal.events("main/agent-1", after=mine[1].index)) == mine[2:]
            assert sorted(journal.chains()) == ["main", "main/agent-0", "main/agent-1", "main/agent-2"]
        async with await joined(postgres_dsn, run) as journal:
            event = await journal.append("main/agent-1", "finished", {})
            assert event.index == 13 and event.hash == link(mine[-1].hash, "finished", b"{}")
            assert list(journal.events(after=12)) == [event]

    asyncio.run(write())
    with PostgresReader(postgres_dsn, run) as reader:
        assert reader.chains()[0] == "main" and len(list(reader.events())) == 14
    report = verify_run(postgres_dsn, run, KEY)
    assert report.intact and report.events == 14 and report.artefacts == 2 and report.chains == 4


def test_appends_made_together_share_commits(postgres_dsn, run):
    batches = []

    async def write():
        async with await joined(postgres_dsn, run) as journal:
            journal.subscribe(batches.append)
            await fill(journal, chains=40, events=5, artefacts=0)

    asyncio.run(write())
    assert [event.index for batch in batches for event in batch] == list(range(200)) and len(batches) <= 10


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(histories=st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=6), shared=st.integers(0, 5))
def test_several_writers_leave_no_gap_and_every_listener_hears_all_in_order(postgres_dsn, histories, shared):
    """Agents are spread over three journals; all three also write to the run's own chain."""
    run = f"run-{os.getpid()}-{next(NUMBERS)}"

    async def write():
        journals = [await joined(postgres_dsn, run) for _ in range(3)]
        heard = [[] for _ in journals]
        for journal, list_ in zip(journals, heard):
            journal.subscribe(list_.extend)

        async def agent(number: int, pauses: list[int]) -> None:
            for step, pause in enumerate(pauses):
                for _ in range(pause):
                    await asyncio.sleep(0.001)
                await journals[number % 3].append(f"agent-{number}", "reply", {"step": step})

        async def control(journal: PostgresJournal) -> None:
            for number in range(shared):
                await journal.append("run", "control", {"id": number})

        await asyncio.gather(*itertools.starmap(agent, enumerate(histories)), *map(control, journals))
        total = sum(map(len, histories)) + 3 * shared
        while any(len(each) < total for each in heard):
            await asyncio.sleep(0.01)
        for journal in journals:
            await journal.close()
        return heard

    heard = asyncio.run(write())
    with PostgresReader(postgres_dsn, run) as reader:
        events, heads = list(reader.events()), reader.heads()
    assert [event.index for event in events] == list(range(len(events)))
    assert all(each == events for each in heard)
    for number, pauses in enumerate(histories):
        head = first_link(f"agent-{number}")
        for step in range(len(pauses)):
            head = link(head, "reply", canonical({"step": step}))
        assert heads.get(f"agent-{number}", (0, head))[1] == head
    assert verify_run(postgres_dsn, run, KEY).intact


def test_an_agent_continued_elsewhere_is_not_continued_here(postgres_dsn, run):
    async def write():
        one, two = await joined(postgres_dsn, run), await joined(postgres_dsn, run)
        # At once: one that has heard of the other's event goes on behind it.
        both = await asyncio.gather(
            *(journal.append("main", "task", {}) for journal in (one, two)), return_exceptions=True
        )
        (refused,) = [each for each in both if isinstance(each, BaseException)]
        assert isinstance(refused, JournalError) and "'main'" in str(refused)
        assert "was continued by another process" in str(refused)
        await (one if both[0] is refused else two).append("other", "task", {})
        for journal in (one, two):
            await journal.close()

    asyncio.run(write())


@pytest.mark.parametrize("size", [0, 1, (1 << 17) + 1, 3_000_000])
def test_ranges_of_artefacts_are_read_by_every_process_and_equal_bytes_are_stored_once(postgres_dsn, run, size):
    data = os.urandom(size)

    async def write():
        one, two = await joined(postgres_dsn, run), await joined(postgres_dsn, run)
        artefact = await one.put(data)
        assert await one.get(artefact.sha256, size // 2) == data[size // 2 :]
        await one.append("main", "task", {})
        assert await two.put(data) == artefact
        await two.append("other", "task", {})
        for journal in (one, two):
            for start, end in ((0, None), (size // 3, size // 2 + 1), (size + 1, None)):
                assert await journal.get(artefact.sha256, start, end) == data[start:end]
            with pytest.raises(JournalError, match="there is no artefact"):
                await journal.get("ab" * 32)
            assert journal.artefacts() == [artefact]
            await journal.close()
        return artefact

    artefact = asyncio.run(write())
    with PostgresReader(postgres_dsn, run) as reader:
        assert reader.get(artefact.sha256) == data
    report = verify_run(postgres_dsn, run, KEY)
    assert report.intact and report.artefacts == 1


@pytest.mark.parametrize(
    "query, words",
    [
        ("UPDATE TABLES.events SET body = '\\x7b7d' WHERE run = $1 AND idx = 5", "event 5, chain 'main/agent-2'"),
        ("UPDATE TABLES.events SET note = '\\x7b7d' WHERE run = $1 AND idx = 6", "event 6, chain 'main/agent-0'"),
        ("DELETE FROM TABLES.events WHERE run = $1 AND idx = 7", "events 7 to 7 are missing"),
        ("UPDATE TABLES.chunks SET data = '\\x00' WHERE run = $1", "was changed"),
        ("DELETE FROM TABLES.seals WHERE run = $1 AND number = 1", "seals 1 to 1 are missing"),
    ],
)
def test_changes_in_the_tables_are_found(postgres_dsn, run, query, words):
    async def write():
        async with await joined(postgres_dsn, run) as journal:
            await fill(journal)
        await change(postgres_dsn, query, run)

    asyncio.run(write())
    report = verify_run(postgres_dsn, run, KEY)
    assert any(words in str(problem) for problem in report.problems), report.problems


def test_a_cut_is_found_by_the_head_outside(postgres_dsn, run, tmp_path):
    async def write():
        async with await joined(postgres_dsn, run, heads=tmp_path) as journal:
            await fill(journal)
        assert verify_run(postgres_dsn, run, KEY, heads=tmp_path).intact
        await change(postgres_dsn, "DELETE FROM TABLES.seals WHERE run = $1 AND events > 6", run)
        await change(postgres_dsn, "DELETE FROM TABLES.events WHERE run = $1 AND idx >= 6", run)
        await change(postgres_dsn, "UPDATE TABLES.runs SET events = 6 WHERE run = $1", run)
        with pytest.raises(JournalError, match="it was cut"):
            await joined(postgres_dsn, run, heads=tmp_path)

    asyncio.run(write())
    assert "was cut" in verify_run(postgres_dsn, run, KEY, heads=tmp_path).problems[-1].what


def test_keys_must_agree(postgres_dsn, run):
    async def write():
        await (await joined(postgres_dsn, run)).close()
        with pytest.raises(JournalError, match="is sealed: continue"):
            await joined(postgres_dsn, run, key=None)
        with pytest.raises(JournalError, match="another key"):
            await joined(postgres_dsn, run, key=bytes(32))
        async with await joined(postgres_dsn, f"{run}-bare", key=None) as journal:
            await fill(journal)
        with pytest.raises(JournalError, match="without a seal"):
            await joined(postgres_dsn, f"{run}-bare")

    asyncio.run(write())
    report = verify_run(postgres_dsn, f"{run}-bare", None)
    assert report.intact and not report.sealed


@pytest.mark.parametrize("lost", [["_writer"], ["_listener"], ["_writer", "_listener"]])
def test_a_lost_connection_fails_every_append_with_the_reason(postgres_dsn, run, lost):
    async def write():
        journal = await joined(postgres_dsn, run)
        await journal.append("main", "task", {})
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND pid = ANY($1)"
        await change(postgres_dsn, query, [getattr(journal, name).get_server_pid() for name in lost])
        while not (getattr(journal, lost[-1]).is_closed()):
            await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(journal.append(f"agent-{n}", "task", {})) for n in range(5)]
        for outcome in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(outcome, JournalError)
        with pytest.raises(JournalError, match="cannot be written|closed the connection"):
            await journal.append("main", "task", {})
        await journal.close()
        async with await joined(postgres_dsn, run) as journal:
            assert len(await journal.read()) == 1

    asyncio.run(write())


@pytest.mark.parametrize("conflicts, survives", [(1, True), (4, True), (5, False)])
def test_a_commit_that_the_server_broke_off_is_tried_again(postgres_dsn, run, monkeypatch, conflicts, survives):
    async def write():
        async with await joined(postgres_dsn, run) as journal:
            store, left = journal._store, [conflicts]

            async def conflicting(batch):
                done = await store(batch)
                if left[0]:
                    left[0] -= 1
                    raise asyncpg.DeadlockDetectedError("deadlock detected")
                return done

            monkeypatch.setattr(journal, "_store", conflicting)
            outcome = (await asyncio.gather(journal.append("main", "task", {}), return_exceptions=True))[0]
            assert isinstance(outcome, JournalError) != survives
            assert len(await journal.read()) == survives

    asyncio.run(write())
    assert verify_run(postgres_dsn, run, KEY).intact


def test_a_head_that_cannot_be_written_at_the_end_is_said_when_closing(postgres_dsn, run, tmp_path, monkeypatch):
    monkeypatch.setattr(seal, "HEAD_SECONDS", 3600.0)

    async def write():
        journal = await joined(postgres_dsn, run, heads=tmp_path / "heads")
        await journal.append("main", "task", {"number": 0})
        while journal._head_file.read() is None:
            await asyncio.sleep(0.001)
        await journal.append("main", "task", {"number": 1})
        while journal._head_file.due() is None:
            await asyncio.sleep(0.001)
        shutil.rmtree(tmp_path / "heads")
        (tmp_path / "heads").touch()
        with pytest.raises(JournalError, match="its head cannot be"):
            await journal.close()

    asyncio.run(write())


def test_a_head_that_cannot_be_written_stops_the_journal(postgres_dsn, run, tmp_path):
    async def write():
        journal = await joined(postgres_dsn, run, heads=tmp_path / "heads")
        (tmp_path / "heads").write_text("not a folder")
        outcomes = []
        for _ in range(50):
            outcomes += await asyncio.gather(journal.append("main", "task", {}), return_exceptions=True)
            await asyncio.sleep(0.001)
        assert "its head cannot be written" in str(outcomes[-1])
        await journal.close()

    asyncio.run(write())


def test_what_cannot_be_reached_is_a_clear_error_without_secrets(postgres_dsn, run, tmp_path):
    for address in (
        f"postgresql://postgres:hunter2@/postgres?host={tmp_path}",
        "http://hunter2@x",
        "postgresql://x:hun/ter2@y",
    ):
        with pytest.raises(JournalError, match="cannot be reached|address is not valid") as caught:
            asyncio.run(joined(address, run))
        assert "hun" not in str(caught.value)
        with pytest.raises(JournalError, match="cannot be reached|address is not valid"):
            PostgresReader(address, run)
    with pytest.raises(JournalError, match="there is no run"):
        PostgresReader(postgres_dsn, "no such run")


def test_a_closed_journal_and_a_closed_reader_refuse(postgres_dsn, run):
    async def write():
        journal = await joined(postgres_dsn, run)
        last = asyncio.create_task(journal.append("main", "task", {}))
        await asyncio.sleep(0)
        await asyncio.gather(journal.close(), journal.close())
        assert (await last).index == 0
        with pytest.raises(JournalError, match="is closed"):
            await journal.append("main", "task", {})
        for refused in (journal.read(), journal.get("ab" * 32), journal.renew([], 1)):
            with pytest.raises(JournalError, match="cannot be"):
                await refused

    asyncio.run(write())
    reader = PostgresReader(postgres_dsn, run)
    assert plain(reader.events()) == [("main", 0, "task", b"{}")]
    reader.close()
    reader.close()
    with pytest.raises(JournalError, match="is closed"):
        list(reader.events())
