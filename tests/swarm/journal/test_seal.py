"""The key outside the journal, the head beside it, and what a seal depends on."""

import asyncio
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.journal import seal as sealing
from perilune.swarm.journal.event import JournalError
from perilune.swarm.journal.seal import Head, HeadFile, Seal, load_or_create_key, state_folder
from perilune.swarm.journal.sqlite import SQLiteJournal
from tests.swarm.journal.appending import KEY, open_journal, written


def test_a_key_is_made_once_for_its_owner_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    key = load_or_create_key()
    path = tmp_path / "state" / "perilune" / "seal.key"
    assert len(key) == 32 and load_or_create_key(path) == key and path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["seal.key"]
    assert load_or_create_key(tmp_path / "other.key") != key


def test_without_an_environment_the_state_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "perilune"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o666])
def test_a_key_that_others_can_reach_is_refused_with_the_fix(tmp_path, mode):
    path = tmp_path / "seal.key"
    load_or_create_key(path)
    path.chmod(mode)
    with pytest.raises(JournalError, match=f"mode {mode:04o}, expected 0600.*chmod 600"):
        load_or_create_key(path)


@pytest.mark.parametrize("content", [b"", b"abcd", b"zz" * 32, b"ab" * 33, b"\xff" * 64])
def test_a_file_that_holds_no_key_is_refused(tmp_path, content):
    path = tmp_path / "seal.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(JournalError, match="hexadecimal digits|cannot be read"):
        load_or_create_key(path)


def test_a_key_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match="cannot be created"):
        load_or_create_key(tmp_path / "file" / "seal.key")


def test_processes_that_start_together_agree_on_the_key(tmp_path):
    code = "import sys; from pathlib import Path; from perilune.swarm.journal.seal import load_or_create_key as load\n"
    code += "print(load(Path(sys.argv[1])).hex())"
    command = [sys.executable, "-c", code, str(tmp_path / "state" / "seal.key")]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert len({each.communicate()[0] for each in started}) == 1
    assert all(each.returncode == 0 for each in started)


def test_two_makers_of_one_key_keep_the_first(tmp_path, monkeypatch):
    path = tmp_path / "seal.key"
    first = load_or_create_key(path)
    sealing._create_key(path)
    assert load_or_create_key(path) == first and len(list(tmp_path.iterdir())) == 1


@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 2**40),
            st.binary(max_size=3),
            st.integers(0, 99),
            *[st.binary(max_size=3)] * 3,
            st.floats(0, 1e10),
            st.just(b"h" * 32),
        ),
        min_size=2,
        max_size=2,
        unique=True,
    )
)
def test_different_rows_have_different_tags(rows):
    """Also where only the border between two fields moves."""
    seal = Seal(KEY, "name")
    assert seal.tag(*rows[0]) != seal.tag(*rows[1])


def test_a_tag_and_a_seal_depend_on_the_key_and_on_the_journal():
    row = (0, b"main", 0, b"task", b"{}", b"{}", 1.0, b"h" * 32)
    seals = [Seal(KEY, "one"), Seal(KEY, "two"), Seal(b"o" * 32, "one"), Seal(None, "one")]
    assert len({seal.tag(*row) for seal in seals}) == 4
    assert len({seal.commit(1, 0, [b"t" * 16], []) for seal in seals}) == 4
    assert len({seal.key_check("one") for seal in seals[1:]}) == 3


def test_the_head_outside_is_written_after_the_commit_seldom_and_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(sealing, "HEAD_SECONDS", 3600.0)
    writes = []
    real = HeadFile.write
    monkeypatch.setattr(HeadFile, "write", lambda self: (writes.append(1), real(self)))

    async def write():
        journal = open_journal(tmp_path)
        for number in range(50):
            await journal.append("main", "task", {"number": number})
        head = journal._head_file.read()
        assert head is not None and head.events == 1, "the first commit, then not again within the hour"
        await journal.close()
        return journal._head_file.read()

    assert asyncio.run(write()).events == 50
    assert len(writes) == 2


def test_the_head_follows_soon_when_a_journal_falls_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(sealing, "HEAD_SECONDS", 0.01)

    async def write():
        async with open_journal(tmp_path) as journal:
            for number in range(5):
                await journal.append("main", "task", {"number": number})
            while journal._head_file.read().events < 5:
                await asyncio.sleep(0.01)

    asyncio.run(write())


def test_a_head_file_is_replaced_as_a_whole_and_nonsense_in_it_is_an_error(tmp_path):
    file = HeadFile(tmp_path / "heads", "a" * 32)
    assert file.read() is None and file.due() is None
    file.write()
    assert file.read() is None
    head = Head(events=3, seals=2, mac=b"m" * 32)
    file.update(head)
    assert file.read() == head and os.listdir(tmp_path / "heads") == ["a" * 32 + ".json"]
    file.update(Head(events=4, seals=3, mac=b"n" * 32))
    assert file.read() == head and 0 < file.due() <= sealing.HEAD_SECONDS
    file._written = time.monotonic() - 10
    file.update(Head(events=5, seals=4, mac=b"n" * 32))
    assert file.read().events == 5
    file.update(Head(events=1, seals=1, mac=b"o" * 32))
    file.write()
    assert file.read().events == 5, "another process knew more"
    for content in ("", "[]", '{"events": 3}', '{"events": 3, "seals": 1, "mac": "zz"}'):
        file.path.write_text(content)
        with pytest.raises(JournalError, match="cannot be read"):
            file.read()


def test_a_journal_is_continued_with_the_key_it_was_begun_with(tmp_path):
    path = written(tmp_path)
    with pytest.raises(JournalError, match="is sealed: continue it with the key"):
        SQLiteJournal.open(path, key=None)
    with pytest.raises(JournalError, match="sealed with another key"):
        SQLiteJournal.open(path, key=bytes(32))
    bare = written(tmp_path / "bare", key=None)
    with pytest.raises(JournalError, match="begun without a seal"):
        SQLiteJournal.open(bare, key=KEY)
    asyncio.run(SQLiteJournal.open(bare, key=None).close())
