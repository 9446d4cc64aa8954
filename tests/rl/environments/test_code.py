"""Functions to be written: tasks are drawn alike everywhere, honest solutions earn all, files may hold broken rows."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.rl.environment import draws
from perilune.rl.environments import code
from perilune.rl.environments.code import Code, CodeError, solution_of
from perilune.rl.environments.code_exchange import ServerLimits, same
from perilune.rl.environments.code_tasks import FAMILIES, draw_exercise
from perilune.swarm.sandbox import SandboxUnavailable
from tests.rl.environments.said import played

PATIENT = ServerLimits(input_seconds=30, total_seconds=60)

# One solution of each family, written from the description alone; K and the other parameters are filled in.
SOLUTIONS = {
    "rotate": (r"end, (\d+) times", "from collections import deque\ndef rotate(text):\n    letters = deque(text)\n"
               "    letters.rotate(-{0})\n    return ''.join(letters)"),
    "chunks": (r"lists of (\d+)", "def chunks(numbers):\n    found = []\n    while numbers:\n"
               "        found.append(numbers[:{0}])\n        numbers = numbers[{0}:]\n    return found"),
    "digits": (r"base (\d+)", "def digits(number):\n    if number < {0}: return [number]\n"
               "    return digits(number // {0}) + [number % {0}]"),
    "count_words": (r"to (\d+) plus", "from collections import Counter\ndef count_words(words):\n"
                    "    return {{word: {0} + count for word, count in Counter(words).items()}}"),
    "polynomial": (r"Return (-?\d+) times.*plus (-?\d+) times x, plus (-?\d+)",
                   "def polynomial(x):\n    return ({0} * x + {1}) * x + {2}"),
    "transposed": (r"entry times (\d+)", "def transposed(rows):\n"
                   "    return [[row[i] * {0} for row in rows] for i in range(len(rows[0]))]"),
    "runs": (r"letters times (\d+)", "import itertools\ndef runs(text):\n    parts = []\n"
             "    for letter, group in itertools.groupby(text):\n        length = len(list(group))\n"
             "        parts.append(letter + str(length * {0}) if length > 1 else letter)\n    return ''.join(parts)"),
}  # fmt: skip


@given(st.sampled_from(sorted(FAMILIES)), st.integers(0, 10**6), st.booleans(), st.integers(1, 20))
@settings(max_examples=200)
def test_an_exercise_is_json_and_pays_nothing_for_a_constant_or_the_input(family, number, test, count):
    split = "test" if test else "train"
    exercise = draw_exercise(draws("code", split, number), family, test=test, num_inputs=count)
    assert exercise == draw_exercise(draws("code", split, number), family, test=test, num_inputs=count)
    assert len(exercise.inputs) == len(exercise.outputs) == count
    assert same([exercise.inputs, exercise.outputs], json.loads(json.dumps([exercise.inputs, exercise.outputs])))
    for place, output in enumerate(exercise.outputs):
        assert not any(same(output, other) for other in exercise.outputs[:place])
    assert sum(output in arguments for arguments, output in zip(exercise.inputs, exercise.outputs)) <= 1


def test_there_are_many_families_and_train_and_test_share_no_task():
    assert len(FAMILIES) >= 12
    for family in FAMILIES:
        texts = {
            test: {draw_exercise(draws("code", "train", n), family, test=test, num_inputs=1).text for n in range(60)}
            for test in (False, True)
        }
        assert len(texts[False]) > 3 and not texts[False] & texts[True], family


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
@pytest.mark.parametrize("family", SOLUTIONS)
def test_a_solution_of_the_description_earns_all(family):
    environment = Code(families=(family,), limits=PATIENT)
    pattern, source = SOLUTIONS[family]
    for split in ("train", "test"):
        task = environment.task(3, split)
        found = re.search(pattern, task.data["prompt"])
        facets, talk = played(environment, task, f"```python\n{source.format(*found.groups())}\n```")
        assert facets == {"outcome": 1.0, "valid": 1.0}
        assert "Examples:" in talk.messages[0]["content"] and task.data["function"] in talk.messages[0]["content"]
        assert not any(str(each) in talk.messages[0]["content"] for each in task.data["outputs"] if len(str(each)) > 6)


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_part_of_the_work_earns_its_part_or_nothing():
    task = Code(families=("polynomial",)).task(0, "train")
    known = dict(zip((arguments[0] for arguments in task.data["inputs"][:6]), task.data["outputs"]))
    reply = f"def polynomial(x):\n    return {known}.get(x, 0)"
    assert played(Code(limits=PATIENT), task, reply)[0] == {"outcome": 0.75, "valid": 1.0}
    assert played(Code(limits=PATIENT, whole=True), task, reply)[0] == {"outcome": 0.0, "valid": 1.0}
    fails = reply.replace(".get(x, 0)", "[x]")
    assert played(Code(limits=PATIENT), task, fails)[0] == {"outcome": 0.75, "valid": 0.0}
    assert played(Code(limits=PATIENT), task)[0] == {"outcome": 0.0, "valid": 0.0}
    assert played(Code(limits=PATIENT), task, "I cannot do that.")[0] == {"outcome": 0.0, "valid": 0.0}


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_a_solution_that_draws_lots_is_judged_again_as_it_was_judged_first():
    task = Code(families=("polynomial",)).task(0, "train")
    known = dict(zip((arguments[0] for arguments in task.data["inputs"]), task.data["outputs"]))
    reply = f"import random\ndef polynomial(x):\n    return random.choice([{known}[x], '\\ud800', None, 1 / 0.5])"
    environment = Code(limits=PATIENT)
    facets, talk = played(environment, task, reply)
    (event,) = talk.events
    assert len(event["answers"]) == len(task.data["inputs"]) and facets["valid"] == 1.0
    assert all(environment.judge_events(task, talk.messages, talk.events) == facets for _ in range(3))
    right = [each == [output] for each, output in zip(event["answers"], task.data["outputs"])]
    assert facets["outcome"] == sum(right) / len(right)
    assert environment.judge_events(task, (), ()) == {"outcome": 0.0, "valid": 0.0}  # of before there were events


SHORTCUTS = {
    "chunks": [lambda numbers: [numbers], lambda numbers: [[each] for each in numbers]],
    "sort_by_rest": [sorted, lambda numbers: sorted(numbers, reverse=True)],
}


@pytest.mark.parametrize("family", SHORTCUTS)
def test_what_is_right_for_short_inputs_alone_earns_next_to_nothing(family):
    shares = []
    for number in range(40):
        test = bool(number % 2)
        split = "test" if test else "train"
        exercise = draw_exercise(draws("code", split, number), family, test=test, num_inputs=8)
        for shortcut in SHORTCUTS[family]:
            right = [shortcut(*arguments) == out for arguments, out in zip(exercise.inputs, exercise.outputs)]
            shares.append(sum(right) / 8)
    assert sum(shares) / len(shares) < 0.02 and max(shares) <= 0.25


def test_large_integers_are_not_close_and_a_float_beside_one_may_be():
    assert not same(10**10 + 1, 10**10, exact=False)
    assert same(10**10, 1e10, exact=False) and same(0.1 + 0.2, 0.3, exact=False) and not same(1, 1.0)


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
@given(st.text(max_size=60) | st.text(alphabet="def polynmia(x):\n return0+*`", max_size=60))
@settings(max_examples=15)
def test_any_reply_is_judged(reply):
    task = Code(families=("polynomial",)).task(1, "train")
    facets = Code(limits=PATIENT).judge(task, [{"role": "assistant", "content": reply}])
    assert facets["outcome"] == 0.0 and facets["valid"] in (0.0, 1.0)


@pytest.mark.parametrize(
    "reply,solution",
    [
        ("def f(): pass", "def f(): pass"),
        ("So:\n```python\nx = 1\n```\nand\n```\ny = 2\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1", "x = 1"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("```python\ns = 'a ``` b'\n```", "s = 'a ``` b'\n"),
        ("```python\n```", ""),
        ("", ""),
    ],
)
def test_the_first_fenced_block_is_the_solution(reply, solution):
    assert solution_of(reply) == solution


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_a_file_with_broken_rows(tmp_path: Path):
    good = {"prompt": "double", "function": "f", "inputs": [[2], [5]], "outputs": [4, 10], "split": "train"}
    rows = [
        good,
        {**good, "prompt": "halve", "outputs": [1, 2.5], "exact": False, "split": "test", "id": "half"},
        {"prompt": "square", "function": "f", "inputs": [[3]], "reference": "def f(x): return x * x", "split": "train"},
        {"prompt": "fails", "function": "f", "inputs": [[3]], "reference": "def f(x): return 1 / 0", "split": "train"},
        {**good, "prompt": "halve", "split": "train"},  # the prompt of a test row: follows it
        *(
            {**good, **wrong}
            for wrong in ({"outputs": [1]}, {"inputs": []}, {"inputs": [2, 5]}, {"function": "no name"}, {"prompt": 3},
                          {"exact": "yes"}, {"outputs": None})
        ),
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*map(json.dumps, rows), "", "no json", '{"prompt": NaN}']))
    environment = Code(source=str(path), limits=PATIENT)
    assert environment.num_broken == 9
    train = [environment.task(number, "train") for number in range(3)]
    assert [task.data["prompt"] for task in train] == ["double", "square", "double"]
    assert train[1].data["outputs"] == [9] and environment.num_broken == 10
    test = environment.task(0, "test")
    assert test.name == "half" and played(environment, test, "def f(x): return x / 2")[0]["outcome"] == 1.0
    assert played(environment, train[0], "def f(x): return x * 2.0")[0] == {"outcome": 0.0, "valid": 1.0}
    assert {environment.task(number, "test").data["prompt"] for number in range(4)} == {"halve"}


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_a_file_without_tasks_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("{}\n")
    with pytest.raises(CodeError, match="holds no task: expected JSON lines"):
        Code(source=str(tmp_path / "a.jsonl")).task(0, "train")


def test_where_no_sandbox_starts_code_is_refused_and_the_calculator_named(monkeypatch):
    monkeypatch.setattr(code, "missing_sandbox", lambda: "no bwrap on PATH")
    with pytest.raises(SandboxUnavailable, match="no bwrap on PATH.*calculator"):
        Code()


@pytest.mark.parametrize("wrong", [{"families": ()}, {"families": ("chess",)}, {"hidden": 0}, {"examples": 9}])
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match=f"code.*{next(iter(wrong))}"):
        Code(**wrong)
