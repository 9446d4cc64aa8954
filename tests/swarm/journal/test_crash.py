"""After a crash at any instant, every event whose append returned is there, in order, and the journal goes on."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.journal.verify import verify
from tests.swarm.journal.appending import KEY, open_journal, plain

ROOT = Path(__file__).parents[3]


def killed(folder: Path, lines: int) -> list[tuple[str, int, bytes]]:
    """Start a writer, kill it after that many lines, return what it said."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    command = [sys.executable, "-m", "tests.swarm.journal.killable_writer", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        said += process.stdout.readlines()
    words = [line.decode().split() for line in said if line.endswith(b"\n")]
    return [(chain, int(seq), bytes.fromhex(link)) for chain, seq, link in words]


def check_after_crash(folder: Path, returned: list[tuple[str, int, bytes]]) -> None:
    report = verify(folder / "journal.db", KEY, heads=folder / "heads")
    assert report.intact, report.problems
    with SQLiteReader(folder / "journal.db") as reader:
        there = {(event.chain, event.seq, event.hash): event for event in reader.events()}
        assert sorted(event.index for event in there.values()) == list(range(len(there)))
        for each in returned:
            assert each in there, f"the append of {each[:2]} returned and is lost"
        for event in there.values():
            result = event.read()["result"]
            assert len(reader.get(result["sha256"])) == result["size"]


@pytest.mark.parametrize("lives", [4, pytest.param(60, marks=pytest.mark.long)])
def test_kill_9_of_the_writer_loses_nothing_that_returned(tmp_path, lives):
    """The same journal through several lives, each ended at a random point."""
    chance, returned = random.Random(7), []
    for _ in range(lives):
        returned += killed(tmp_path, lines=chance.choice([1, chance.randrange(1, 50), chance.randrange(50, 1000)]))
        check_after_crash(tmp_path, returned)


@pytest.fixture(scope="module")
def grown(tmp_path_factory) -> tuple[Path, list[tuple[int, int]]]:
    """The files of a journal that was never closed, and the length of its log after each append that returned."""
    folder = tmp_path_factory.mktemp("grown")
    log, lengths = folder / "journal.db-wal", []

    async def write():
        async with open_journal(folder, heads=None) as journal:
            chance = random.Random(3)
            for number in range(60):
                together = chance.choice([1, 1, 5])
                await asyncio.gather(
                    *(
                        journal.append(f"agent-{n}", "task", {"text": "x" * chance.randrange(3000)})
                        for n in range(together)
                    )
                )
                if number % 7 == 0:
                    await journal.put(os.urandom(20_000))
                lengths.append((log.stat().st_size, len(list(journal.events()))))
            (folder / "crashed").mkdir()
            for name in ("journal.db", "journal.db-wal"):
                shutil.copy(folder / name, folder / "crashed" / name)

    asyncio.run(write())
    return folder / "crashed", lengths


@settings(max_examples=40)
@given(cut=st.floats(0, 1), torn=st.binary(max_size=40))
def test_a_log_that_ends_anywhere_gives_back_what_was_committed_before_that_point(grown, cut, torn):
    crashed, lengths = grown
    with tempfile.TemporaryDirectory() as name:
        folder = Path(shutil.copytree(crashed, Path(name) / "copy"))
        log = folder / "journal.db-wal"
        end = int(cut * log.stat().st_size)
        log.write_bytes(log.read_bytes()[:end] + torn)
        certain = max((events for length, events in lengths if length <= end), default=0)
        if certain == 0:
            return  # the file may not even be a journal yet

        async def go_on():
            async with open_journal(folder, heads=None) as journal:
                events = list(journal.events())
                assert len(events) >= certain
                with SQLiteReader(crashed / "journal.db") as reader:
                    assert plain(events) == plain(reader.events())[: len(events)]
                await journal.append("main", "task", {})

        asyncio.run(go_on())
        report = verify(folder / "journal.db", KEY)
        assert report.intact and report.events > certain, report.problems
