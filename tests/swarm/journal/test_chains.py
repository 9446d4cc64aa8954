"""A chain's head depends on what was appended to it, never on what else happened at the same time."""

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm.journal.event import canonical, first_link, link
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.journal.verify import verify
from tests.swarm.journal.appending import KEY, open_journal

NAMES = st.sampled_from(["run", "main", "main#0.0", "main#0.1", "main/physicist-0.0", "main/ärztin-0.1"])
BODIES = st.dictionaries(st.text(max_size=5), st.one_of(st.integers(-5, 5), st.text(max_size=8), st.none()), max_size=3)
HISTORIES = st.dictionaries(
    NAMES, st.lists(st.tuples(st.sampled_from(["task", "reply"]), BODIES), max_size=6), max_size=6
)


def expected_head(chain: str, history: list) -> bytes:
    head = first_link(chain)
    for kind, body in history:
        head = link(head, kind, canonical(body))
    return head


@settings(max_examples=20)
@given(histories=HISTORIES, pauses=st.lists(st.integers(0, 3), min_size=1, max_size=40), lives=st.integers(1, 3))
def test_heads_are_the_same_for_every_interleaving_and_number_of_lives(histories, pauses, lives):
    with tempfile.TemporaryDirectory() as name:
        folder, given_out = Path(name), iter(pauses * 100)

        async def live(part: int) -> None:
            async with open_journal(folder) as journal:

                async def agent(chain: str, history: list) -> None:
                    begin, end = (len(history) * border // lives for border in (part, part + 1))
                    for kind, body in history[begin:end]:
                        for _ in range(next(given_out)):
                            await asyncio.sleep(0)
                        event = await journal.append(chain, kind, body)
                        assert journal.head(chain) == event.hash

                await asyncio.gather(*(agent(chain, history) for chain, history in histories.items()))

        for part in range(lives):
            asyncio.run(live(part))
        with SQLiteReader(folder / "journal.db") as reader:
            heads = {chain: head for chain, (_, head) in reader.heads().items()}
            assert heads == {chain: expected_head(chain, history) for chain, history in histories.items() if history}
            assert [event.index for event in reader.events()] == list(range(sum(map(len, histories.values()))))
            for chain, history in histories.items():
                found = [(event.seq, event.kind, event.read()) for event in reader.events(chain)]
                assert found == [(seq, kind, body) for seq, (kind, body) in enumerate(history)]
        assert verify(folder / "journal.db", KEY, heads=folder / "heads").intact


@settings(max_examples=10)
@given(numbers=st.lists(st.integers(0, 200_000), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_artefacts_stored_and_read_by_many_at_once_are_what_was_stored(numbers, seed):
    async def write(folder: Path) -> None:
        async with open_journal(folder) as journal:

            async def agent(number: int) -> None:
                data = bytes([number % 251]) * number
                artefact = await journal.put(data)
                start = number * seed // 100
                assert await journal.get(artefact.sha256, start) == data[start:]
                await journal.append(f"agent-{number}", "reply", {"tokens": artefact.plain()})
                assert await journal.get(artefact.sha256, start, start + 70_000) == data[start : start + 70_000]

            await asyncio.gather(*(agent(number) for number in numbers))

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(write(Path(name)))
        report = verify(Path(name) / "journal.db", KEY, heads=Path(name) / "heads")
        assert report.intact and report.artefacts == len(set(numbers))
