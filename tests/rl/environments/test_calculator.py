"""The calculator computes what Python computes and nothing else; its environment is solved by calling it."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.rl.environment import reward_of
from perilune.rl.environments.calculator import MOST_BITS, Calculator, CalculatorError, evaluate
from tests.rl.environments.said import played, tool_call

INTEGERS = st.integers(0, 10**6).map(str)
EXPRESSIONS = st.recursive(
    INTEGERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "//", "%"]), inner).map(lambda parts: f"({' '.join(parts)})"),
        inner.map(lambda text: f"-{text}"),
        inner.map(lambda text: f"abs({text})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda each: f"{each[0]}({each[1]}, {each[2]})"),
    ),
    max_leaves=12,
)  # fmt: skip


@given(EXPRESSIONS)
def test_the_value_of_an_expression_is_what_python_computes(text):
    try:
        expected = eval(text)  # written by ourselves
    except ZeroDivisionError:
        with pytest.raises(CalculatorError, match="division by zero"):
            evaluate(text)
        return
    if expected.bit_length() <= MOST_BITS and len(text) <= 1000:
        found = evaluate(text)
        assert found == expected and type(found) is int


@given(st.text(alphabet="0123456789.+-*/%() ,eE_jxabmin^<[]'\0\n", max_size=60) | st.text(max_size=40))
@settings(max_examples=400)
def test_any_text_has_a_bounded_value_or_an_error(text):
    try:
        value = evaluate(text)
    except CalculatorError:
        return
    assert type(value) in (int, float) and len(str(value)) <= 1300
    assert type(value) is int or math.isfinite(value)


@pytest.mark.parametrize(
    "text,value",
    [
        ("7 / 2", 3.5),
        ("6 / 3", 2),
        ("10**40 / 10", 10**39),
        ("2 ** -3", 0.125),
        ("round(2.567, 2)", 2.57),
        ("round(1234, -2)", 1200),
        ("  1 + 1\n", 2),
        ("-7 // 2", -4),
        ("1_000 + 1", 1001),
        ("1 ** 10**18", 1),
    ],
)
def test_divisions_powers_and_rounding(text, value):
    assert evaluate(text) == value and type(evaluate(text)) is type(value)


@pytest.mark.parametrize(
    "text,reason",
    [
        ("2 ** 10000", "too large"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("(2 ** 4000) * (2 ** 4000)", "too large"),
        ("1 ** (10 ** 100)", "exponent"),
        ("1e308 * 10", "too large"),
        ("(-8) ** 0.5", "no real number"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("2 ^ 3", "write \\*\\*"),
        ("1,234 * 2", "without commas"),
        ("x + 1", "'x' has no value"),
        ("__import__('os').system('id')", "only numbers"),
        ("sqrt(4)", "only min, max, abs, round can be called"),
        ("1if 1else 2", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("abs", "has no value"),
        ("abs(1, 2)", "abs was given 2"),
        ("min(*[1, 2])", "can be called"),
        ("round(1, ndigits=2)", "can be called"),
        ("round(5, 10 ** 9)", "-50 to 50"),
        ("True + 1", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("1j", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("lambda: 1", "only numbers"),
        ("", "no expression"),
        ("1 +", "no expression"),
        ("1\0", "no expression"),
        ("(" * 300 + "1" + ")" * 300, "expression"),
        ("9" * 1001, "1001 characters"),
        ("9" * 1000 + " ** 3", "characters"),
    ],
)
def test_what_has_no_value_says_why(text, reason):
    with pytest.raises(CalculatorError, match=reason):
        evaluate(text)


@given(
    st.integers(0, 10**6), st.sampled_from(["expression", "steps"]), st.integers(1, 5), st.integers(1, 5), st.booleans()
)
def test_a_task_has_the_answer_of_its_text(number, form, steps, digits, test):
    environment = Calculator(form=form, steps=steps, digits=digits)
    task = environment.task(number, "test" if test else "train")
    assert task == environment.task(number, "test" if test else "train")
    text = task.data["text"]
    if form == "expression":
        assert str(eval(text.removeprefix("What is ").removesuffix("?"))) == task.data["answer"]
    else:
        value = 0
        for sentence in text.split(". "):
            word, *_, last = sentence.split(",")[0].split()
            if word != "What":
                operand = int(last)
                value = {"Start": operand, "Multiply": value * operand, "Add": value + operand,
                         "Subtract": value - operand, "Divide": value // operand}[word]  # fmt: skip
        assert str(value) == task.data["answer"]


def test_train_and_test_share_no_task():
    environment = Calculator(digits=1, steps=1)
    names = {split: {environment.task(number, split).name for number in range(300)} for split in ("train", "test")}
    assert len(names["train"]) > 20 and not names["train"] & names["test"]


def test_calling_and_then_answering_earns_all():
    environment = Calculator(called=0.1)
    task = environment.task(5, "train")
    text = task.data["text"].removeprefix("What is ").removesuffix("?")
    call = tool_call("calculator", json.dumps({"expression": text}))
    facets, talk = played(environment, task, call, f"It is #### {int(task.data['answer']):,}")
    assert facets == {"outcome": 1.0, "called": 1.0, "calls": 1.0}
    assert reward_of(task, facets) == 1.1
    assert talk.messages[2] == {
        "role": "tool", "tool_call_id": "functions.calculator:0", "content": task.data["answer"]
    }  # fmt: skip
    assert talk.asked[0]["tools"][0]["function"]["name"] == "calculator"


def test_an_answer_counts_only_in_a_message_without_calls():
    environment = Calculator()
    task = environment.task(5, "train")
    call = {**tool_call("calculator", '{"expression": "1"}'), "content": f"#### {task.data['answer']}"}
    assert played(environment, task, call)[0] == {"outcome": 0.0, "called": 1.0, "calls": 1.0}
    assert played(environment, task)[0] == {"outcome": 0.0, "called": 0.0, "calls": 0.0}
    assert played(environment, task, task.data["answer"])[0] == {"outcome": 1.0, "called": 0.0, "calls": 0.0}


@pytest.mark.parametrize("wrong", [{"form": "song"}, {"steps": 0}, {"digits": 0}, {"steps": 20}, {"max_turns": 1}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match="calculator"):
        Calculator(**wrong)
