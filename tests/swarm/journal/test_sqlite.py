"""The journal in SQLite: order, commits shared by many, artefacts, readers, and what happens when it cannot write."""

import asyncio
import errno
import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from perilune.swarm.journal import seal, sqlite, sqlite_reader
from perilune.swarm.journal.event import Artefact, JournalError, first_link, link
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.journal.verify import verify
from tests.swarm.journal.appending import KEY, fill, open_journal, plain, written


def test_an_event_is_linked_numbered_timed_and_kept(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            assert journal.head("main") == first_link("main")
            event = await journal.append("main", "started", {"b": 1, "a": "é"}, {"seconds": 2.5})
            assert journal.head("main") == event.hash
            return event

    event = asyncio.run(write())
    assert (event.index, event.chain, event.seq, event.kind, event.time) == (0, "main", 0, "started", 1_000_000.0)
    assert event.body == '{"a":"é","b":1}'.encode() and event.read_note() == {"seconds": 2.5}
    assert event.hash == link(first_link("main"), "started", event.body)
    with SQLiteReader(tmp_path / "journal.db") as reader:
        assert list(reader.events()) == [event]


def test_a_commit_waits_for_the_disk(tmp_path):
    """No test can cut the power: the settings that SQLite promises durability for are checked instead."""
    journal = open_journal(tmp_path)
    settings = {
        name: journal._writer.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")
    }
    assert settings == {"journal_mode": "wal", "synchronous": 2}
    asyncio.run(journal.close())


def test_order_within_a_chain_is_the_order_of_calls(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            tasks = [asyncio.create_task(journal.append("main", "task", {"number": n})) for n in range(50)]
            return [(await task).seq for task in tasks]

    assert asyncio.run(write()) == list(range(50))
    with SQLiteReader(tmp_path / "journal.db") as reader:
        assert [event.read()["number"] for event in reader.events("main")] == list(range(50))


def test_appends_to_a_chain_whose_last_one_is_still_being_committed_follow_it(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            tasks = []
            for number in range(300):
                tasks.append(asyncio.create_task(journal.append("main", "task", {"number": number})))
                await asyncio.sleep(0 if number % 3 else 0.0005)
            return [(await task).seq for task in tasks]

    assert asyncio.run(write()) == list(range(300))
    assert verify(tmp_path / "journal.db", KEY).intact


def test_appends_made_together_share_commits_and_a_subscriber_gets_them_as_lists(tmp_path):
    batches = []

    async def write():
        async with open_journal(tmp_path) as journal:
            journal.subscribe(batches.append)
            await fill(journal, chains=40, events=5, artefacts=0)

    asyncio.run(write())
    assert [event.index for batch in batches for event in batch] == list(range(200))
    assert len(batches) <= 10, "40 agents in step need about one commit per step"
    with sqlite3.connect(tmp_path / "journal.db") as database:
        assert database.execute("SELECT count(*) FROM seals").fetchone() == (len(batches),)


def test_an_event_is_on_disk_when_a_subscriber_or_the_caller_sees_it(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            with SQLiteReader(journal.path) as reader:

                def check(batch):
                    assert [event.hash for event in reader.events(after=batch[0].index - 1)][: len(batch)] == [
                        event.hash for event in batch
                    ]
                    seen.append(len(batch))

                journal.subscribe(check)
                event = await journal.append("main", "task", {})
                assert list(reader.events()) == [event]

    seen = []
    asyncio.run(write())
    assert seen == [1]


def test_a_subscriber_that_stops_or_breaks_disturbs_nobody(tmp_path):
    async def write():
        complaints = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        async with open_journal(tmp_path) as journal:
            stop = journal.subscribe(lambda batch: 1 / 0)
            journal.subscribe(seen.extend)
            await journal.append("main", "task", {"number": 0})
            stop()
            stop()
            await journal.append("main", "task", {"number": 1})
        return complaints

    seen = []
    complaints = asyncio.run(write())
    assert len(seen) == 2
    assert [type(each["exception"]) for each in complaints] == [ZeroDivisionError]


def test_a_cancelled_append_is_written_all_the_same(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            task = asyncio.create_task(journal.append("main", "task", {"number": 0}))
            big = asyncio.create_task(journal.put(b"x" * (2 << 20)))
            await asyncio.sleep(0)
            task.cancel()
            await journal.append("main", "task", {"number": 1})
            big.cancel()

    asyncio.run(write())
    with SQLiteReader(tmp_path / "journal.db") as reader:
        assert [event.read()["number"] for event in reader.events()] == [0, 1]


def test_a_journal_is_continued_where_it_ended(tmp_path):
    path = written(tmp_path, chains=3, events=2)

    async def go_on():
        async with open_journal(tmp_path) as journal:
            assert journal.chains() == ["main/agent-0", "main/agent-1", "main/agent-2"]
            before = list(journal.events())
            event = await journal.append("main/agent-1", "finished", {})
            assert event.index == len(before) == 6 and event.seq == 2
            assert event.hash == link(before[-2].hash, "finished", b"{}")
            assert plain(journal.events("main/agent-1", after=before[1].index)) == plain([before[4], event])
            return journal.chains()

    chains = asyncio.run(go_on())
    with SQLiteReader(path) as reader:
        assert reader.chains() == chains


def test_events_are_read_in_pages_of_any_length(tmp_path, monkeypatch):
    path = written(tmp_path, chains=2, events=7)
    with SQLiteReader(path) as reader:
        everything, chain = list(reader.events()), list(reader.events("main/agent-1"))
        for rows in (1, 2, 7, 13, 14, 15):
            monkeypatch.setattr(sqlite_reader, "PAGE_ROWS", rows)
            assert list(reader.events()) == everything
            assert list(reader.events("main/agent-1")) == chain
            assert list(reader.events(after=5)) == everything[6:]
            assert list(reader.events("main/agent-1", after=5)) == [event for event in chain if event.index > 5]


@pytest.mark.parametrize(
    "chain, kind, body, error",
    [
        ("main", "task", {"a": object()}, TypeError),
        ("main", "task", {"a": "\ud800"}, TypeError),
        ("", "task", {}, ValueError),
        ("main", "", {}, ValueError),
        ("ma\0in", "task", {}, ValueError),
        ("main", "ta\0sk", {}, ValueError),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_trace(tmp_path, chain, kind, body, error):
    async def write():
        async with open_journal(tmp_path) as journal:
            await journal.append("main", "task", {})
            with pytest.raises(error, match="JSON|name without"):
                await journal.append(chain, kind, body)
            assert (await journal.append("main", "task", {})).seq == 1

    asyncio.run(write())


# Artefacts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 17) - 1, 1 << 17, (1 << 17) + 1, 3_000_000])
def test_any_range_of_an_artefact_can_be_read_before_and_after_its_commit(tmp_path, size):
    data = hashlib.shake_256(b"artefact").digest(size)
    ranges = [(0, None), (0, 0), (size // 2, None), (size // 3, size // 2 + 1), (size, None), (size + 5, size + 9)]
    ranges += [(max(0, (1 << 17) - 3), (1 << 17) + 3), (0, size + 100)]

    async def write():
        async with open_journal(tmp_path) as journal:
            artefact = await journal.put(data)
            assert artefact == Artefact(hashlib.sha256(data).hexdigest(), size)
            first = [await journal.get(artefact.sha256, *each) for each in ranges]
            await journal.append("main", "task", {})
            assert not journal._unwritten
            return first, [await journal.get(artefact.sha256, *each) for each in ranges]

    expected = [data[start:end] for start, end in ranges]
    assert asyncio.run(write()) == (expected, expected)


def test_an_artefact_is_committed_no_later_than_the_next_event_of_its_writer(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            with SQLiteReader(journal.path) as reader:
                for number in range(20):
                    artefact = await journal.put(f"{number}".encode())
                    await journal.append("main", "reply", {"tokens": artefact.plain()})
                    assert reader.get(artefact.sha256) == f"{number}".encode()

    asyncio.run(write())


def test_equal_bytes_are_stored_once(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            await asyncio.gather(*(journal.put(b"same" * 50_000) for _ in range(5)))
            await asyncio.gather(*(journal.put(b"same") for _ in range(5)))
            await journal.append("main", "task", {})
            await journal.put(b"same")
            await journal.put(b"same" * 500_000)
            await journal.put(b"same" * 500_000)

    asyncio.run(write())
    with sqlite3.connect(tmp_path / "journal.db") as database:
        with SQLiteReader(tmp_path / "journal.db") as reader:
            assert [each.size for each in reader.artefacts()] == [200_000, 4, 2_000_000], "oldest first"
        assert [row[0] for row in database.execute("SELECT size FROM artefacts ORDER BY size")] == [
            4,
            200_000,
            2_000_000,
        ]


def test_an_unknown_artefact_and_an_impossible_range_are_errors(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            waiting = await journal.put(b"x")
            for sha256 in ("ab" * 32, "ab", "zz" * 32):
                with pytest.raises(JournalError, match=sha256):
                    await journal.get(sha256)
            for start, end in ((-1, None), (0, -1)):
                with pytest.raises(ValueError, match="expected numbers from 0"):
                    await journal.get(waiting.sha256, start, end)

    asyncio.run(write())


def test_changed_bytes_of_an_artefact_are_not_handed_out(tmp_path):
    path = written(tmp_path, artefacts=1)
    with sqlite3.connect(path) as database:
        sha256 = database.execute("SELECT sha256 FROM artefacts").fetchone()[0].hex()
        database.execute("UPDATE chunks SET data = CAST(replace(data, 'artefact', 'artifact') AS BLOB)")
    with SQLiteReader(path) as reader, pytest.raises(JournalError, match="was changed"):
        reader.get(sha256)


# One writer, many readers --------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_and_told_who_writes_while_readers_come_and_go(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            await journal.append("main", "task", {})
            with pytest.raises(JournalError, match=f"is being written by process {os.getpid()}"):
                open_journal(tmp_path)
            code = (
                "import sys\n"
                "from perilune.swarm.journal.sqlite import SQLiteJournal\n"
                "from perilune.swarm.journal.sqlite_reader import SQLiteReader\n"
                "print(len(list(SQLiteReader(sys.argv[1]).events())))\n"
                "SQLiteJournal.open(sys.argv[1], key=None)"
            )
            other = subprocess.run(
                [sys.executable, "-c", code, str(journal.path)], capture_output=True, text=True, check=False
            )
            assert other.stdout == "1\n" and other.returncode != 0
            assert f"is being written by process {os.getpid()}" in other.stderr
        async with open_journal(tmp_path) as journal:
            await journal.append("main", "task", {})

    asyncio.run(write())


def test_a_closed_journal_refuses_and_closing_twice_is_harmless(tmp_path):
    async def write():
        journal = open_journal(tmp_path)
        artefact = await journal.put(b"x")
        last = asyncio.create_task(journal.append("main", "task", {}))
        await asyncio.sleep(0)
        await asyncio.gather(journal.close(), journal.close())
        await journal.close()
        assert (await last).index == 0
        for refused in (journal.append("main", "task", {}), journal.put(b"y"), journal.get(artefact.sha256)):
            with pytest.raises(JournalError, match="is closed"):
                await refused

    asyncio.run(write())
    assert not list(tmp_path.glob("*-wal")), "a closed journal is one file"


def test_a_journal_belongs_to_one_loop(tmp_path):
    journal = open_journal(tmp_path)
    asyncio.run(journal.append("main", "task", {}))

    async def other():
        with pytest.raises(JournalError, match="another event loop"):
            await journal.append("main", "task", {})
        await journal.close()

    asyncio.run(other())


@pytest.mark.parametrize("content, message", [(b"", "is empty"), (b"something else", "cannot be read as a journal")])
def test_a_file_that_is_no_journal_is_not_read(tmp_path, content, message):
    (tmp_path / "journal.db").write_bytes(content)
    with pytest.raises(JournalError, match=message):
        SQLiteReader(tmp_path / "journal.db")


def test_other_databases_other_versions_and_missing_files_are_named(tmp_path):
    with pytest.raises(JournalError, match="there is no journal at"):
        SQLiteReader(tmp_path / "missing.db")
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("CREATE TABLE events (idx INTEGER)")
    with pytest.raises(JournalError, match="not a journal"):
        sqlite.SQLiteJournal.open(tmp_path / "other.db", key=None)
    (tmp_path / "text.db").write_text("no database at all, but long enough to look like one" * 100)
    with pytest.raises(JournalError, match="cannot be read as a journal"):
        sqlite.SQLiteJournal.open(tmp_path / "text.db", key=None)
    path = written(tmp_path)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(JournalError, match="has version 9, this program reads version 1"):
        open_journal(tmp_path)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 1")
        database.execute("DELETE FROM identity")
    with pytest.raises(JournalError, match="no identity"):
        open_journal(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot be opened for writing"):
        sqlite.SQLiteJournal.open(tmp_path / "file" / "journal.db", key=None)
    (tmp_path / "folder.db").mkdir()
    with pytest.raises(JournalError, match="cannot be opened for writing"):
        sqlite.SQLiteJournal.open(tmp_path / "folder.db", key=None)


def test_a_journal_in_a_folder_that_nobody_may_write_can_be_read(tmp_path, monkeypatch):
    path = written(tmp_path)
    real = os.access
    monkeypatch.setattr(os, "access", lambda place, mode: place != tmp_path and real(place, mode))
    with SQLiteReader(path) as reader:
        assert len(list(reader.events())) == 12
    assert not list(tmp_path.glob("*-shm"))


# When it cannot write ------------------------------------------------------------------------------------------------


async def _appends_fail(journal, reason):
    """Everyone who waits hears the reason, and so does everyone who comes later."""
    await journal.put(b"something new")
    waiting = [asyncio.create_task(journal.append(f"agent-{n}", "task", {"text": "x" * 5000})) for n in range(20)]
    waiting.append(asyncio.create_task(journal.put(b"x" * (2 << 20))))
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, JournalError) and reason in str(outcome), outcome
    for late in (journal.append("main", "task", {}), journal.put(b"late")):
        with pytest.raises(JournalError, match=reason):
            await late
    await journal.close()


def _survives(folder: Path, events: int) -> None:
    """What was committed before the failure is all there is, and can be continued."""

    async def go_on():
        async with open_journal(folder) as journal:
            assert len(list(journal.events())) == events
            assert (await journal.append("main", "task", {})).index == events

    asyncio.run(go_on())


def test_a_locked_database_fails_every_append_with_the_reason(tmp_path):
    async def write():
        journal = open_journal(tmp_path, busy_seconds=0.05)
        await journal.append("main", "task", {})
        other = sqlite3.connect(journal.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        await _appends_fail(journal, "database is locked")
        other.close()

    asyncio.run(write())
    _survives(tmp_path, 1)


def test_a_full_disk_fails_every_append_with_the_reason(tmp_path):
    """A limit on the size of files is a full disk that an ordinary user can have."""
    code = """
import asyncio, resource, sys
from pathlib import Path
from tests.swarm.journal.appending import open_journal
from tests.swarm.journal.test_sqlite import _appends_fail

async def write():
    journal = open_journal(Path(sys.argv[1]))
    await journal.append("main", "task", {})
    size = Path(sys.argv[1], "journal.db-wal").stat().st_size + 50_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    await _appends_fail(journal, "disk")

asyncio.run(write())
"""
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'src'}"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    _survives(tmp_path, 1)


class FailingConnection(sqlite3.Connection):
    """Fails the next statement that begins with `fail_at`, once it is set."""

    fail_at: str | None = None
    error: Exception = sqlite3.OperationalError("disk I/O error")

    def _check(self, statement):
        if type(self).fail_at is not None and statement.startswith(type(self).fail_at):
            raise self.error

    def execute(self, statement, *values):
        self._check(statement)
        return super().execute(statement, *values)

    def executemany(self, statement, *values):
        self._check(statement)
        return super().executemany(statement, *values)


@pytest.mark.parametrize(
    "statement",
    ["BEGIN", "INSERT INTO events", "INSERT INTO artefacts", "INSERT INTO chunks", "INSERT INTO seals", "COMMIT"],
)
@pytest.mark.parametrize(
    "error",
    [
        sqlite3.OperationalError("disk I/O error"),
        sqlite3.OperationalError("attempt to write a readonly database"),
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError("out of memory"),
    ],
    ids=lambda error: str(error),
)
def test_a_failure_at_any_statement_leaves_nothing_half_written(tmp_path, monkeypatch, statement, error):
    monkeypatch.setattr(FailingConnection, "fail_at", None)
    monkeypatch.setattr(FailingConnection, "error", error)
    real = sqlite3.connect
    monkeypatch.setattr(
        sqlite.sqlite3, "connect", lambda *values, **options: real(*values, factory=FailingConnection, **options)
    )

    async def write():
        journal = open_journal(tmp_path)
        await fill(journal, chains=2, events=2, artefacts=1)
        monkeypatch.setattr(FailingConnection, "fail_at", statement)
        await _appends_fail(journal, str(error).split("] ")[-1])

    asyncio.run(write())
    monkeypatch.undo()
    _survives(tmp_path, 4)


def test_a_head_that_cannot_be_written_stops_the_journal_but_loses_nothing(tmp_path):
    async def write():
        journal = open_journal(tmp_path)
        (tmp_path / "heads").write_text("not a folder")
        event = await journal.append("main", "task", {})
        assert event.index == 0
        later = [journal.append("main", "task", {"number": number}) for number in range(100)]
        outcomes = [await asyncio.gather(each, return_exceptions=True) for each in later]
        assert "its head" in str(outcomes[-1][0]) and isinstance(outcomes[-1][0], JournalError)
        await journal.close()

    asyncio.run(write())
    (tmp_path / "heads").unlink()
    with SQLiteReader(tmp_path / "journal.db") as reader:
        assert len(list(reader.events())) >= 1


def test_a_head_that_cannot_be_written_at_the_end_is_said_when_closing(tmp_path, monkeypatch):
    monkeypatch.setattr(seal, "HEAD_SECONDS", 3600.0)

    async def write():
        journal = open_journal(tmp_path)
        await journal.append("main", "task", {})
        await journal.append("main", "task", {})
        shutil.rmtree(tmp_path / "heads")
        (tmp_path / "heads").write_text("not a folder")
        with pytest.raises(JournalError, match="its head cannot be written"):
            await journal.close()
        (tmp_path / "heads").unlink()
        await open_journal(tmp_path).close()

    asyncio.run(write())


def test_a_failed_opening_lets_the_next_one_in(tmp_path):
    written(tmp_path)
    for _ in range(2):
        with pytest.raises(JournalError, match="another key"):
            open_journal(tmp_path, key=bytes(32))
    asyncio.run(open_journal(tmp_path, key=KEY).close())
