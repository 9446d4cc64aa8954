"""What is generated for training and for the test: no question in both, and numbers that look alike."""

import re

import pytest

from perilune.rl.environment import TEST_IN, is_for_test
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.environments.calculator import Calculator
from perilune.rl.environments.tool_use import ToolUse
from perilune.rl.environments.word_problems import WordProblems

GENERATED = {
    "arithmetic": Arithmetic(),
    "word_problems": WordProblems(steps=1),
    "calculator": Calculator(steps=1, digits=2),
    "told": Calculator(form="steps", steps=1, digits=2),
    "tool_use": ToolUse(steps=1, digits=2),
}


@pytest.mark.parametrize("environment", GENERATED.values(), ids=GENERATED.keys())
def test_splits_share_no_question_and_both_begin_with_odd_and_even_numbers(environment) -> None:
    names = {split: {environment.task(n, split).name for n in range(300)} for split in ("train", "test")}
    assert not names["train"] & names["test"]
    for split, found in names.items():
        firsts = [int(re.findall(r"\d+", name)[0]) for name in found]
        assert 0.3 < sum(first % 2 for first in firsts) / len(firsts) < 0.7, split


def test_a_calculation_and_its_words_are_in_the_same_split() -> None:
    plain, told = Calculator(steps=2), Calculator(steps=2, form="steps")
    for split in ("train", "test"):
        for number in range(50):
            numbers = [re.findall(r"\d+", each.task(number, split).data["text"]) for each in (plain, told)]
            assert numbers[0] == numbers[1]


@pytest.mark.parametrize("operator", "+-*")
def test_the_smallest_questions_are_in_both_splits(operator: str) -> None:
    found = {is_for_test(f"{one} {operator} {other}") for one in range(2, 10) for other in range(2, 10)}
    assert found == {True, False}


def test_about_one_question_in_eight_is_for_the_test() -> None:
    share = sum(is_for_test(f"question {number}") for number in range(8000)) / 8000
    assert share == pytest.approx(1 / TEST_IN, abs=0.015)  # four standard deviations
