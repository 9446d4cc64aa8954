"""Questions about pictures that are told in text: right answers, balance, and scores against a slow definition."""

import re

import numpy as np
import pytest
import torch
from tests.serve import tiny

from perilune.data.generated import SplitMix
from perilune.data.scenes import parse_svg
from perilune.eval.told_pictures import KINDS, ToldItem, told_items, told_score


def test_items_are_the_same_each_time_and_another_seed_gives_others() -> None:
    assert told_items(20) == told_items(40)[:20]
    assert told_items(20, seed=1) != told_items(20)
    with pytest.raises(ValueError, match="count is 0"):
        told_items(0)


def test_kinds_take_turns_and_spatial_answers_are_yes_as_often_as_no() -> None:
    items = told_items(100)
    assert {kind: sum(item.kind == kind for item in items) for kind in KINDS} == {
        "spatial": 60, "count": 20, "colour": 20,
    }  # fmt: skip
    answers = [item.choices[item.answer] for item in items if item.kind == "spatial"]
    assert answers.count("yes") == answers.count("no") == 30


def test_answers_are_right() -> None:
    """Counts of all shapes and colours of the only shape of a kind, read from the source again."""
    checked = 0
    for item in told_items(200):
        picture = parse_svg(item.text.splitlines()[1])
        question, answer = item.text.splitlines()[-1], item.choices[item.answer]
        if item.kind == "count" and re.search(r"many shapes are there|Count the shapes", question):
            assert int(answer) == len(picture.shapes)
            checked += 1
        elif item.kind == "colour":
            kind = question.rstrip("?.").replace(" have", "").split()[-1]
            assert [shape.colour for shape in picture.shapes if shape.name == kind] == [answer]
            checked += 1
    assert checked > 40


def test_a_score_is_the_log_prob_of_the_right_answer_among_its_choices() -> None:
    model, tokenizer = tiny.model().eval(), tiny.tokenizer()
    items = [
        ToldItem(kind="spatial", text="The moon turns", choices=("yes", "no"), answer=dice.below(2))
        for dice in map(SplitMix, range(3))
    ]
    items.append(ToldItem(kind="count", text="Satz 你好", choices=("0", "1", "2"), answer=2))
    score = told_score(model, tokenizer, items, row_tokens=24)
    for item, found, is_right in zip(items, score.log_probs, score.right, strict=True):
        slow = []
        for choice in item.choices:
            before = [tokenizer.special_ids["[BOS]"], *tokenizer.encode(item.text)]
            tokens = [*before, *tokenizer.encode(f" {choice}")]
            with torch.no_grad():
                table = model(torch.tensor([tokens])).double().log_softmax(-1)[0]
            slow.append(sum(float(table[place - 1, tokens[place]]) for place in range(len(before), len(tokens))))
        assert found == pytest.approx(slow[item.answer] - np.log(np.exp(slow).sum()), abs=1e-4)
        assert is_right == (int(np.argmax(slow)) == item.answer)
    plain = score.plain()
    assert plain["items"] == 4 and plain["by_kind"]["count"]["items"] == 1
    assert plain["log_prob"] == pytest.approx(np.mean(score.log_probs))
