"""Sums are drawn alike everywhere, judged by their number, and train and test share none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.rl.environment import reward_of
from perilune.rl.environments.arithmetic import Arithmetic
from tests.rl.environments.said import played

NUMBERS = st.integers(0, 10**6)


@given(NUMBERS, st.integers(2, 5), st.integers(1, 4), st.sampled_from(["+", "-", "+-", "+-*", "*"]))
def test_the_answer_is_what_python_computes(number, terms, digits, operators):
    environment = Arithmetic(terms=terms, digits=digits, operators=operators)
    task = environment.task(number, "train")
    assert task.data["answer"] == eval(task.data["text"])  # written by ourselves
    assert task == environment.task(number, "train") and json.loads(json.dumps(dict(task.data))) == dict(task.data)
    facets, talk = played(environment, task, str(task.data["answer"]))
    assert facets == {"outcome": 1.0, "format": 1.0} and reward_of(task, facets) == 1.0
    assert talk.messages[0]["content"].startswith(task.data["text"])


def test_train_and_test_share_no_task():
    environment = Arithmetic(digits=1)
    names = {split: {environment.task(number, split).name for number in range(500)} for split in ("train", "test")}
    assert not names["train"] & names["test"]


@pytest.mark.parametrize(
    "reply,outcome,form",
    [
        ("{answer}", 1.0, 1.0),
        ("First 3, then 4, so {answer}.", 1.0, 0.0),
        ("{answer} or 7", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("no idea", 0.0, 0.0),
        ("{answer}.5", 0.0, 0.0),
        ("9" * 5000, 0.0, 1.0),
        ("٣", 0.0, 0.0),
    ],
)
def test_the_last_integer_counts(reply, outcome, form):
    environment = Arithmetic()
    task = environment.task(3, "train")
    facets, _ = played(environment, task, reply.format(answer=task.data["answer"]))
    assert facets == {"outcome": outcome, "format": form}


def test_an_episode_without_a_reply_is_judged_as_nothing():
    environment = Arithmetic()
    facets, _ = played(environment, environment.task(0, "test"))
    assert facets == {"outcome": 0.0, "format": 0.0}


@pytest.mark.parametrize("wrong", [{"terms": 1}, {"digits": 0}, {"operators": "/"}, {"operators": ""}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match="arithmetic"):
        Arithmetic(**wrong)
