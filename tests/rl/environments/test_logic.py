"""Puzzles have one solution, no idle clue, and are judged by the names in the answer."""

import itertools
import re
import sys
import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.rl.environments.logic import ORDINALS, Logic, named_last
from tests.rl.environments.said import played


def solutions(text: str, people: list[str]) -> list[set[str]]:
    """All answers that the text allows, read from its sentences alone."""
    sentences = re.split(r"(?<=[.?]) ", text)
    found: list[set[str]] = []
    if "heights" in text:
        place = ORDINALS.index(re.fullmatch(r"Who is the (.*)\?", sentences[-1]).group(1))
        for order in itertools.permutations(people):
            rank = {person: index for index, person in enumerate(order)}
            if all(_holds_in_order(sentence, rank) for sentence in sentences[1:-1]):
                found.append({order[place]})
        return found
    for flags in itertools.product((True, False), repeat=len(people)):
        truthful = dict(zip(people, flags))
        if not all(flags) and all(_holds_of_liars(sentence, truthful) for sentence in sentences[1:-1]):
            found.append({person for person in people if not truthful[person]})
    return found


def whole_orders(sentences: list[str], people: list[str]) -> list[tuple[str, ...]]:
    ranks = [(order, {person: index for index, person in enumerate(order)}) for order in itertools.permutations(people)]
    return [order for order, rank in ranks if all(_holds_in_order(sentence, rank) for sentence in sentences)]


def _holds_in_order(sentence: str, rank: dict[str, int]) -> bool:
    if match := re.fullmatch(r"(\w+) is taller than (\w+)\.", sentence):
        return rank[match[1]] < rank[match[2]]
    match = re.fullmatch(r"(\w+) is not the tallest\.", sentence)
    return rank[match[1]] != 0


def _holds_of_liars(sentence: str, truthful: dict[str, bool]) -> bool:
    if match := re.fullmatch(r"(\w+) says that all of them are (not )?alike\.", sentence):
        claim = (len(set(truthful.values())) == 1) != bool(match[2])
    else:
        match = re.fullmatch(r"(\w+) says that (\w+) (lies|tells the truth)\.", sentence)
        claim = truthful[match[2]] == (match[3] != "lies")
    return claim == truthful[match[1]]


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from(["ordering", "knights"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_puzzle_has_one_solution_and_needs_every_clue(number, people, kind, test):
    task = Logic(puzzles=(kind,), people=people).task(number, "test" if test else "train")
    text, names = task.data["text"], task.data["people"]
    assert solutions(text, names) == [set(task.data["answer"])]
    sentences = re.split(r"(?<=[.?]) ", text)
    for index in range(1, len(sentences) - 1):
        fewer = sentences[:index] + sentences[index + 1 :]
        if kind == "ordering":  # the clues tell the whole order, the question asks for one place of it
            assert len(whole_orders(fewer[1:-1], names)) > 1
        else:
            assert len(solutions(" ".join(fewer), names)) > 1


def test_train_and_test_share_no_puzzle():
    environment = Logic(people=2)
    names = {split: {environment.task(number, split).name for number in range(300)} for split in ("train", "test")}
    assert not names["train"] & names["test"]


@pytest.mark.parametrize(
    "reply,found",
    [
        ("Ada", {"Ada"}),
        ("Ada and Ben tell...\nSo it is Ben.", {"Ben"}),
        ("Ben, Ada\n\n(done)", {"Ada", "Ben"}),
        ("Adam", set()),
        ("", set()),
    ],
)
def test_the_last_line_with_a_name_counts(reply, found):
    assert named_last(reply, ["Ada", "Ben"]) == found


def test_the_answer_earns_one_and_another_name_nothing():
    environment = Logic()
    for number in range(4):
        task = environment.task(number, "train")
        assert played(environment, task, " and ".join(task.data["answer"]))[0] == {"outcome": 1.0}
        others = set(task.data["people"]) - set(task.data["answer"])
        assert played(environment, task, " ".join(others) or "nobody")[0] == {"outcome": 0.0}


def test_a_task_set_of_reasoning_gym_is_asked_and_judged_by_it(monkeypatch):
    class Set:
        def __getitem__(self, index):
            return {"question": f"question {index}", "answer": str(index), "metadata": {"index": index}}

        def score_answer(self, answer, entry):
            return 1.5 if answer == entry["answer"] else 0.01

    package = types.ModuleType("reasoning_gym")
    package.create_dataset = lambda name, size, seed: Set()
    monkeypatch.setitem(sys.modules, "reasoning_gym", package)
    environment = Logic(reasoning_gym="sets")
    task = environment.task(3, "test")
    assert task.data["text"] == "question 7"
    assert played(environment, task, " 7 ")[0] == {"outcome": 1.0}
    assert played(environment, task, "8")[0] == {"outcome": 0.01}


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        Logic(reasoning_gym="leg_counting").task(0, "train")


@pytest.mark.parametrize("wrong", [{"people": 1}, {"people": 9}, {"puzzles": ()}, {"puzzles": ("chess",)}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match="logic"):
        Logic(**wrong)
