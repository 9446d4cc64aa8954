"""Verification names every change that somebody without the key can make, and nothing in a journal left alone."""

import asyncio
import hashlib
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm.journal import verify as verification
from perilune.swarm.journal.event import JournalError, first_link, link
from perilune.swarm.journal.seal import HeadFile, Seal
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.journal.verify import verify
from tests.swarm.journal.appending import KEY, fill, open_journal, written

OTHER_KEY = bytes(32)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """A folder with a journal of several commits and chains; never changed."""
    folder = tmp_path_factory.mktemp("original")
    written(folder, chains=4, events=6, artefacts=3)
    return folder


@pytest.fixture
def folder(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def check(folder: Path, key: bytes | None = KEY) -> verification.Report:
    return verify(folder / "journal.db", key, heads=folder / "heads")


def test_a_journal_left_alone_is_intact(folder):
    report = check(folder)
    assert report.intact and report.sealed and not report.remarks
    assert (report.events, report.chains, report.artefacts) == (24, 4, 3)
    assert report.seals >= 6 and report.plain()["problems"] == []


def test_a_journal_is_verified_while_it_is_written(tmp_path):
    async def write():
        async with open_journal(tmp_path) as journal:
            for _ in range(5):
                await fill(journal)
                report = await asyncio.to_thread(check, tmp_path)
                assert report.intact, report.problems

    asyncio.run(write())


def test_an_empty_journal_is_intact(tmp_path):
    written(tmp_path, chains=0, artefacts=0)
    assert check(tmp_path).intact


@pytest.mark.parametrize(
    "statement, index, chain",
    [
        ("UPDATE events SET body = CAST(replace(body, '3', '4') AS BLOB) WHERE idx = 13", 13, "main/agent-1"),
        ("UPDATE events SET note = CAST(replace(note, '5', '4') AS BLOB) WHERE idx = 9", 9, "main/agent-1"),
        ("UPDATE events SET time = time + 1e-9 + 0.001 WHERE idx = 7", 7, "main/agent-3"),
        ("UPDATE events SET kind = 'task' WHERE idx = 6", 6, "main/agent-2"),
        ("UPDATE events SET chain = 'main/agent-9' WHERE idx = 5", 5, "main/agent-9"),
        ("UPDATE events SET seq = 77 WHERE idx = 10", 10, "main/agent-2"),
        ("UPDATE events SET hash = zeroblob(32) WHERE idx = 11", 11, "main/agent-3"),
        ("UPDATE events SET tag = zeroblob(16) WHERE idx = 12", 12, "main/agent-0"),
        ("DELETE FROM events WHERE idx = 14", 14, None),
        ("DELETE FROM events WHERE idx = 0", 0, None),
        ("DELETE FROM events WHERE idx = 23", 23, None),
        ("UPDATE events SET idx = 99 WHERE idx = 23", 23, None),
        (
            "INSERT INTO events SELECT 24, chain, 6, kind, body, note, time, hash, tag FROM events WHERE idx = 20",
            24,
            "main/agent-0",
        ),
    ],
)
def test_an_edit_of_one_row_is_named(folder, statement, index, chain):
    change(folder, statement)
    report = check(folder)
    assert (index, chain) in [(problem.index, problem.chain) for problem in report.problems], report.problems
    assert f"event {index}" in str(report.problems[0]) and not report.intact


def test_swapped_events_are_found(folder):
    """Two rows of one commit change places: their chains still verify, their places do not."""
    change(
        folder,
        "UPDATE events SET idx = -1 WHERE idx = 8",
        "UPDATE events SET idx = 8 WHERE idx = 9",
        "UPDATE events SET idx = 9 WHERE idx = -1",
    )
    assert {problem.index for problem in check(folder).problems} == {8, 9}
    assert check(folder, key=None).intact, "the chains alone cannot see it"


@pytest.mark.parametrize(
    "statement, words",
    [
        ("UPDATE chunks SET data = CAST(replace(data, 'fact', 'fiat') AS BLOB) WHERE id >> 24 = 1", "was changed"),
        ("DELETE FROM chunks WHERE id >> 24 = 1", "was changed"),
        ("INSERT INTO chunks VALUES (999999999999, 'x')", "belongs to no artefact"),
        ("INSERT INTO chunks VALUES ((1 << 24) + 5, CAST('' AS BLOB))", "out of place"),
        ("UPDATE artefacts SET size = size + 1 WHERE number = 2", "was changed"),
        ("DELETE FROM artefacts WHERE number = 1", "missing"),
        (f"INSERT INTO artefacts VALUES (3, x'{hashlib.sha256().hexdigest()}', 0)", "not sealed"),
        ("UPDATE seals SET mac = zeroblob(32) WHERE number = 2", "seal 2 does not match"),
        ("UPDATE seals SET events = events + 1 WHERE number = 2", "does not match"),
        ("DELETE FROM seals WHERE number = 2", "seals 2 to 2 are missing"),
        ("DELETE FROM seals WHERE number = (SELECT max(number) FROM seals)", "not sealed"),
        ("DELETE FROM seals", "not sealed"),
        ("UPDATE identity SET name = 'another'", "another key"),
        ("UPDATE identity SET key_check = NULL", "no seals"),
    ],
)  # fmt: skip
def test_changes_beside_the_events_are_found(folder, statement, words):
    change(folder, statement.replace("'x'", "x'00'"))
    report = check(folder)
    assert any(words in str(problem) for problem in report.problems), report.problems


def test_commits_cut_off_at_the_end_are_found_by_the_head_outside(folder):
    change(
        folder,
        "DELETE FROM seals WHERE number = (SELECT max(number) FROM seals)",
        "DELETE FROM events WHERE idx >= (SELECT max(events) FROM seals)",
    )
    report = check(folder)
    assert [problem.index for problem in report.problems] == [20] and "was cut" in report.problems[0].what
    blind = verify(folder / "journal.db", KEY)
    assert blind.intact and "cut off at the end go unseen" in blind.remarks[0]
    with pytest.raises(JournalError, match="known outside, at 24 events: it was cut"):
        open_journal(folder)


def test_an_older_copy_in_its_place_is_found(folder, tmp_path):
    older = shutil.copy(folder / "journal.db", tmp_path / "older.db")

    async def go_on():
        async with open_journal(folder) as journal:
            await fill(journal)

    asyncio.run(go_on())
    assert check(folder).intact
    shutil.copy(older, folder / "journal.db")
    assert "older copy" in check(folder).problems[0].what


def test_a_head_that_lags_behind_after_a_crash_is_fine(folder):
    with SQLiteReader(folder / "journal.db") as reader:
        name = reader.identity.name
        row = reader.connection.execute("SELECT number, events, mac FROM seals WHERE number = 3").fetchone()
    HeadFile(folder / "heads", name).path.write_text(f'{{"events":{row[1]},"seals":4,"mac":"{row[2].hex()}"}}')
    assert check(folder).intact
    asyncio.run(open_journal(folder).close())


def test_an_artefact_replaced_with_its_name_is_found(folder):
    other = b"something else"
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as database:
        digest = hashlib.sha256(other).digest()
        database.execute("UPDATE artefacts SET sha256 = ?, size = ? WHERE number = 1", (digest, len(other)))
        database.execute("UPDATE chunks SET data = ? WHERE id >> 24 = 1", (other,))
    assert "the artefacts stored with it" in check(folder).problems[0].what


def test_a_commit_taken_from_another_future_of_the_same_journal_is_found(folder, tmp_path):
    """Both were sealed with the key, from the same beginning: their commits cannot be mixed."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))

    async def go_on(place: Path, text: str) -> None:
        async with open_journal(place) as journal:
            await journal.append("run", "control", {"text": text})
            await journal.append("main/late", "task", {})

    for place, text in ((folder, "stop"), (other, "go")):
        asyncio.run(go_on(place, text))
        assert check(place).intact
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as database:
        database.execute("ATTACH ? AS other", (str(other / "journal.db"),))
        database.execute("REPLACE INTO events SELECT * FROM other.events WHERE idx = 24")
        database.execute("REPLACE INTO seals SELECT * FROM other.seals WHERE events = 25")
    report = check(folder)
    assert [problem.what for problem in report.problems] == [
        "seal 8 does not match event 25 and the artefacts stored with it"
    ]


def rewrite(folder: Path, key: bytes | None) -> None:
    """What a forger does who knows the format: a word changed, then every hash, tag and seal made anew."""
    path = folder / "journal.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        (name,) = database.execute("SELECT name FROM identity").fetchone()
        seal = Seal(key, name)
        heads: dict[str, bytes] = {}
        tags = {}
        for index, chain, seq, kind, body, note, time, *_ in database.execute(
            "SELECT * FROM events ORDER BY idx"
        ).fetchall():
            body = body.replace(b'"step":3', b'"step":8')
            heads[chain] = link(heads.get(chain, first_link(chain)), kind, body)
            tags[index] = seal.tag(index, chain.encode(), seq, kind.encode(), body, note, time, heads[chain])
            database.execute(
                "UPDATE events SET body = ?, hash = ?, tag = ? WHERE idx = ?", (body, heads[chain], tags[index], index)
            )
        artefacts = database.execute("SELECT sha256, size FROM artefacts ORDER BY number").fetchall()
        done, stored = 0, 0
        for number, events, count, _ in database.execute("SELECT * FROM seals ORDER BY number").fetchall():
            mac = seal.commit(events, count, [tags[n] for n in range(done, events)], artefacts[stored:count])
            database.execute("UPDATE seals SET mac = ? WHERE number = ?", (mac, number))
            done, stored = events, count
        if key is not None:
            database.execute("UPDATE identity SET key_check = ?", (seal.key_check(name),))


def test_a_complete_rewrite_with_another_key_is_found(folder):
    rewrite(folder, OTHER_KEY)
    assert check(folder, OTHER_KEY).problems[0].what.startswith("the journal ends at 24 events without the seal known")
    shutil.rmtree(folder / "heads")
    assert check(folder, OTHER_KEY).intact, "the forger did everything right but for the key"
    assert "another key" in check(folder).problems[0].what
    with pytest.raises(JournalError, match="another key"):
        open_journal(folder)


def test_without_a_key_chains_are_checked_and_the_report_says_what_is_not(folder):
    report = check(folder, key=None)
    assert report.intact and not report.sealed and "no key" in report.remarks[0]
    change(folder, "UPDATE events SET body = CAST(replace(body, '3', '4') AS BLOB) WHERE idx = 13")
    assert [(problem.index, problem.chain) for problem in check(folder, key=None).problems] == [(13, "main/agent-1")]
    change(folder, "UPDATE events SET seq = 77 WHERE idx = 20")
    assert "it has number 77 on its chain, expected 5" in check(folder, key=None).problems[1].what


def test_a_journal_without_seals_still_finds_accidents(tmp_path):
    written(tmp_path, key=None)
    report = check(tmp_path, key=None)
    assert report.intact and not report.sealed and "has no seals" in report.remarks[0]
    change(tmp_path, "UPDATE events SET note = CAST(replace(note, '5', '4') AS BLOB) WHERE idx = 9")
    assert [problem.index for problem in check(tmp_path, key=None).problems] == [9]
    assert "begun without a key, or they were removed" in check(tmp_path, key=KEY).problems[0].what


def test_many_problems_are_counted_and_the_first_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "NAMED", 5)
    written(tmp_path, chains=3, events=5)
    change(tmp_path, "UPDATE events SET time = time + 1")
    report = check(tmp_path)
    assert len(report.problems) == 5 and report.more_problems == 10


def test_rows_of_an_impossible_type_are_problems_not_crashes(folder):
    change(
        folder,
        "CREATE TABLE loose AS SELECT * FROM events",
        "UPDATE loose SET chain = 7, note = 'text', time = 'noon' WHERE idx = 5",
        "DROP TABLE events",
        "ALTER TABLE loose RENAME TO events",
    )
    assert "something that no journal writes" in check(folder).problems[0].what
    change(
        folder,
        "CREATE TABLE loose AS SELECT * FROM artefacts",
        "UPDATE loose SET sha256 = 7 WHERE number = 0",
        "DROP TABLE artefacts",
        "ALTER TABLE loose RENAME TO artefacts",
    )
    assert any("artefact 7 was changed" in str(problem) for problem in check(folder).problems)
    change(folder, "DROP TABLE seals")
    assert "damaged" in check(folder).problems[0].what


COLUMNS = [
    ("events", "idx", column) for column in ("idx", "chain", "seq", "kind", "body", "note", "time", "hash", "tag")
] + [("artefacts", "number", "sha256"), ("artefacts", "number", "size"), ("chunks", "id", "data")]
COLUMNS += [("seals", "number", column) for column in ("events", "artefacts", "mac")]
COLUMNS += [("identity", "rowid", column) for column in ("name", "key_check")]


@settings(max_examples=60)
@given(data=st.data())
def test_any_one_byte_of_the_content_that_changes_is_found(original, data):
    change_one_byte_and_verify(original, data)


@pytest.mark.long
@settings(max_examples=1000)
@given(data=st.data())
def test_any_one_byte_of_the_content_that_changes_is_found_in_long(original, data):
    change_one_byte_and_verify(original, data)


def change_one_byte_and_verify(original, data) -> None:
    table, key, column = data.draw(st.sampled_from(COLUMNS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(original, Path(name) / "copy"))
        with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as database:
            rows = database.execute(f"SELECT {key}, {column} FROM {table} ORDER BY {key}").fetchall()
            number, value = data.draw(st.sampled_from(rows))
            if isinstance(value, int):
                changed = value + data.draw(st.sampled_from([-1, 1, 256, 1000]))
            elif isinstance(value, float):
                changed = value + data.draw(st.sampled_from([-1.0, 0.001, 86400.0]))
            else:
                content = bytearray(value.encode() if isinstance(value, str) else value)
                position = data.draw(st.integers(0, len(content) - 1))
                content[position] ^= data.draw(st.integers(1, 127))
                changed = content.decode() if isinstance(value, str) else bytes(content)
            if column == "idx" and (changed,) in database.execute("SELECT idx FROM events"):
                return
            try:
                database.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (changed, number))
            except sqlite3.IntegrityError:
                return
        assert not check(folder).intact


@settings(max_examples=40)
@given(position=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_flipped_byte_in_the_file_is_found_or_changes_nothing(original, position, flip):
    """Some bytes of a database mean nothing (free space, counters): then all rows must read as before."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(original, Path(name) / "copy"))
        content = bytearray((folder / "journal.db").read_bytes())
        content[int(position * len(content))] ^= flip
        (folder / "journal.db").write_bytes(content)
        try:
            report = check(folder)
        except JournalError:
            return
        if report.intact:
            assert everything(folder) == everything(original)


def everything(folder: Path) -> list:
    with SQLiteReader(folder / "journal.db") as reader:
        artefacts = [row[0].hex() for row in reader.connection.execute("SELECT sha256 FROM artefacts")]
        assert all(hashlib.sha256(reader.get(sha256)).hexdigest() == sha256 for sha256 in artefacts)
        chains = [list(reader.events(chain)) for chain in reader.chains()]
        return [reader.identity, list(reader.events()), chains, artefacts]


@pytest.mark.parametrize("name", ["\x00df33d0f841a10d3c014d0000e235f49", "../heads/df33d0f841a10d3c014d0000e2", "x"])
def test_an_identity_that_names_another_file_is_found_and_not_followed(folder, name):
    with sqlite3.connect(folder / "journal.db") as database:
        database.execute("UPDATE identity SET name = ?", (name,))
    report = check(folder)
    assert not report.intact and any("identity" in str(problem) for problem in report.problems)
