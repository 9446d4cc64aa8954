"""Generated dialogues: true by what the code prints, the same question in both arms, pictures in one of them only."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.dialogues import read_dialogues
from perilune.data.picture_dialogues import KINDS, dialogue, paint, regions, run, write_dialogues
from perilune.data.scenes import COLOURS, Sample, Shape, box


def code_of(plain: dict) -> str | None:
    calls = [call for message in plain["messages"] for call in message.get("tool_calls", [])]
    return json.loads(calls[0]["function"]["arguments"])["code"] if calls else None


def text_of(content: object) -> str:
    return content if isinstance(content, str) else next(part["text"] for part in content if part["type"] == "text")


@pytest.mark.parametrize("kind", KINDS)
def test_every_dialogue_can_be_read_and_only_one_kind_shows_pictures(kind: str, tmp_path: Path) -> None:
    path = write_dialogues(kind, tmp_path, count=40, seed=3)
    found, broken = read_dialogues([path])
    assert len(found) == 40 and broken.count == 0
    assert {each.has_pictures for each in found} == {kind == "text_image"}
    words = path.read_text()
    assert ("<svg" in words) == (kind == "zero_vision")
    assert ("image" in words or "picture" in words) == (kind != "none")


def test_both_arms_ask_the_same_and_answer_the_same() -> None:
    operations: Counter[str] = Counter()
    for number in range(60):
        blind, seeing = (dialogue(kind, seed=5, number=number) for kind in ("zero_vision", "text_image"))
        assert code_of(blind) == code_of(seeing)
        assert blind["messages"][-1] == seeing["messages"][-1]
        asked = [
            next(text_of(m["content"]) for m in each["messages"] if m["role"] == "user") for each in (blind, seeing)
        ]
        assert asked[0].endswith(asked[1])
        code = code_of(blind) or "source"
        operations[next((word for word in ("sum()", "nonzero", "regions", "unique") if word in code), "source")] += 1
    assert set(operations) == {"sum()", "nonzero", "regions", "unique", "source"}, "every operation comes up"


def test_what_is_measured_is_what_was_drawn() -> None:
    square = Shape(kind="rect", numbers=(10, 20, 30, 40), fill="red")
    hidden = Shape(kind="rect", numbers=(20, 0, 5, 112), fill="blue")
    sample = Sample(kind="scene", size=(112, 112), shapes=(square, hidden))
    session = {"image": paint(sample), "np": np, "regions": regions}
    mask = f"mask = (image == {COLOURS['red']}).all(-1)\n"
    assert run(mask + "print(mask.sum())", session) == str(30 * 40 - 5 * 40)
    assert run(mask + "print(regions(mask))", session) == "2", "a bar over it cuts it in two"
    measured = "y, x = mask.nonzero()\nprint([x.min(), y.min(), x.max() + 1, y.max() + 1])"
    assert eval(run(mask + measured, session), {"np": np}) == list(box(square))


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_regions_are_those_of_merging_neighbours(rows: list[list[bool]]) -> None:
    chosen = np.array(rows)
    names = {(y, x): (y, x) for y, x in zip(*chosen.nonzero())}
    for _ in range(len(names)):  # every round passes the least name on to neighbours
        for y, x in names:
            near = [names[place] for place in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)) if place in names]
            names[y, x] = min([names[y, x], *near])
    assert regions(chosen) == len(set(names.values()))


def test_the_same_numbers_give_the_same_file_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    first, second = (write_dialogues("zero_vision", tmp_path / name, count=4, seed=1) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes() and first.name == second.name
    assert write_dialogues("zero_vision", tmp_path / "a", count=4, seed=2).read_bytes() != first.read_bytes()
    with pytest.raises(ValueError, match="count is 0"):
        write_dialogues("none", tmp_path, count=0, seed=0)
    with pytest.raises(ValueError, match="'other', expected one of"):
        write_dialogues("other", tmp_path, count=1, seed=0)
    assert not list(tmp_path.rglob(".*.jsonl*")), "nothing half-written is left"
