"""Tools over several turns: every call is answered, whatever it is, and only a right answer at the end counts."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.chat import parse_messages
from perilune.rl.environment import EpisodeOver
from perilune.rl.environments import tool_use
from perilune.rl.environments.calculator import Calculator
from perilune.rl.environments.tool_calls import ERROR, LONGEST_ANSWER, MOST_CALLS
from perilune.rl.environments.tool_use import ToolUse
from perilune.rl.rollout import Job
from perilune.rl.talk import EngineTalk, TalkConfig
from perilune.serve.request import Output
from perilune.serve.sessions import Sessions
from perilune.swarm.sandbox import SandboxUnavailable
from tests.rl.environments.said import Said, played, tool_call
from tests.rl.test_rollout import collect
from tests.serve.tiny import tokenizer

ENVIRONMENT = ToolUse(max_turns=4)
TASK = ENVIRONMENT.task(0, "train")
BOTH = ("calculator", "python")


def answers(talk: Said) -> list[str]:
    return [message["content"] for message in talk.messages if message["role"] == "tool"]


@pytest.mark.parametrize(
    "name,arguments,told",
    [
        ("calculator", "{", "not JSON"),
        ("calculator", "", "not JSON"),
        ("calculator", "1 + 1", "not JSON"),
        ("calculator", "[" * 100_000, "not JSON"),
        ("calculator", "[1]", "no object"),
        ("calculator", "{}", "expression is missing"),
        ("calculator", '{"expression": 3}', "expression is no text"),
        ("calculator", '{"expression": "1", "base": "2"}', "no argument 'base'"),
        ("calculator", '{"expression": "x"}', "'x' has no value"),
        ("calculator", '{"expression": "\\ud800"}', "no expression"),
        ("abacus", '{"expression": "1"}', "no tool 'abacus'; there is calculator"),
        ("python", '{"code": "print(1)"}', "no tool 'python'"),
        ("", "{}", "no tool ''"),
        ("x" * 9000, "{}", "no tool 'xxx"),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(name, arguments, told):
    facets, talk = played(ENVIRONMENT, TASK, tool_call(name, arguments), "I give up.")
    (answer,) = answers(talk)
    assert answer.startswith(ERROR) and told in answer and len(answer) < 300
    if name == "calculator" and "value" not in told and "no expression" not in told:
        assert '{"expression": "..."}' in answer
    assert facets == {"outcome": 0.0, "called": 0.0, "calls": 1.0}


def test_a_policy_may_learn_from_an_error_and_call_again():
    text = TASK.data["text"].removeprefix("What is ").removesuffix("?")
    wrong, right = tool_call("calculator", text), tool_call("calculator", json.dumps({"expression": text}), 1)
    facets, talk = played(ENVIRONMENT, TASK, wrong, right, f"#### {TASK.data['answer']}")
    assert facets == {"outcome": 1.0, "called": 1.0, "calls": 2.0}
    assert answers(talk)[1] == TASK.data["answer"]


def test_several_calls_of_one_turn_are_answered_each_under_its_id():
    call = tool_call("calculator", '{"expression": "2 + 3"}')["tool_calls"][0]
    calls = [{**call, "id": f"functions.calculator:{number}"} for number in range(MOST_CALLS + 2)]
    facets, talk = played(ENVIRONMENT, TASK, {"content": "", "tool_calls": calls}, "none")
    tools = [message for message in talk.messages if message["role"] == "tool"]
    assert [message["tool_call_id"] for message in tools] == [call["id"] for call in calls]
    assert [message["content"] for message in tools[:MOST_CALLS]] == ["5"] * MOST_CALLS
    assert all(message["content"].startswith(ERROR) for message in tools[MOST_CALLS:])
    assert facets["calls"] == MOST_CALLS + 2


def test_endless_calling_ends_and_is_told_before():
    call = tool_call("calculator", '{"expression": "1 + 1"}')
    facets, talk = played(ENVIRONMENT, TASK, *[call] * 50)
    assert len(talk.asked) == 4 and facets == {"outcome": 0.0, "called": 1.0, "calls": 4.0}
    assert ["answer now" in answer for answer in answers(talk)] == [False, False, True]


CALLS = st.builds(
    lambda name, arguments, number, call_id: {
        "type": "function", "function": {"name": name, "arguments": arguments},
    } | ({"id": call_id or f"functions.{name}:{number}"}),
    st.sampled_from(["calculator", "python", ""]) | st.text(max_size=5),
    st.just('{"expression": "6 * 7"}') | st.text(max_size=20) | st.builds(json.dumps, st.dictionaries(
        st.just("expression") | st.text(max_size=3), st.text(max_size=9) | st.integers(), max_size=2)),
    st.integers(0, 9),
    st.text(max_size=4),
)  # fmt: skip
REPLIES = st.text(max_size=20) | st.fixed_dictionaries(
    {"content": st.text(max_size=9) | st.none(), "tool_calls": st.lists(CALLS, max_size=3)}
)


@given(st.lists(REPLIES, max_size=7), st.integers(2, 5))
@settings(max_examples=150)
def test_whatever_the_policy_says_every_call_is_answered_and_the_talk_is_well_formed(replies, turns):
    environment = ToolUse(max_turns=turns)
    facets, talk = played(environment, TASK, *replies)
    assert len(talk.asked) <= turns
    parse_messages(talk.messages)
    last = max((place for place, message in enumerate(talk.messages) if message["role"] == "assistant"), default=0)
    for place, message in enumerate(talk.messages):
        calls = message.get("tool_calls") or []
        if place == last and len(talk.asked) == turns:
            break  # the calls of the last turn are not worked for
        found = [each["tool_call_id"] for each in talk.messages[place + 1 : place + 1 + len(calls)]]
        assert found == [call["id"] for call in calls]
    assert facets["called"] <= facets["calls"] and set(facets) == {"outcome", "called", "calls"}
    assert facets == environment.judge(TASK, json.loads(json.dumps(talk.messages)))


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
@pytest.mark.parametrize(
    "code,told",
    [
        ("print(6 * 7)", "42"),
        ("", "error: the program printed nothing; print the result"),
        ("1 / 0", "error: the program failed\nTraceback .*ZeroDivisionError: division by zero"),
        ("print('\\ud800')", "error: the program failed"),
        ("import os\nos.write(1, b'\\xff')", "\ufffd"),
        ("print('a' * 5000 + 'b' * 5000)", "a+\n\\[8001 characters left out\\]|a+\n\\[8000 characters left out\\]\nb+"),
        ("print(open('/etc/shadow').read())", "error: the program failed"),
        ("#" * 100_001, "error: the program has 100001 characters"),
        ("print(\0)", "error: the program failed"),
    ],
)
def test_python_says_what_was_printed_or_what_went_wrong(code, told):
    environment = ToolUse(tools=BOTH)
    _, talk = played(environment, TASK, tool_call("python", json.dumps({"code": code})), "done")
    (answer,) = answers(talk)
    assert re.match(told, answer, re.DOTALL) and len(answer) < LONGEST_ANSWER + 100
    answer.encode()


@pytest.mark.needs_tool("bwrap")
@pytest.mark.usefixtures("working_sandbox")
def test_questions_for_python_are_answered_by_a_program():
    environment = ToolUse(tools=BOTH)
    programs = {
        "primes": "a, b = {0}, {1}\nprint(sum(n for n in range(a, b + 1) if all(n % d for d in range(2, n))))",
        "How many": "print(len([n for n in range({0}, {1} + 1) if n % {2} == 0 or '{3}' in str(n)]))",
        "times:": "v = {0}\nfor _ in range({1}): v = (v * {2} + {3}) % {4}\nprint(v)",
    }
    seen = set()
    for number in range(2, 5):
        task = environment.task(number, "test")
        word = next(word for word in programs if word in task.data["text"])
        seen.add(word)
        code = programs[word].format(*re.findall(r"\d+", task.data["text"]))
        facets, talk = played(environment, task, tool_call("python", json.dumps({"code": code})), "")
        assert answers(talk) == [task.data["answer"]] and facets["called"] == 1.0
    assert seen == set(programs)


def test_train_and_test_share_no_task(monkeypatch):
    monkeypatch.setattr(tool_use, "missing_sandbox", lambda: "")
    environment = ToolUse(tools=BOTH)
    names = {split: {environment.task(number, split).name for number in range(200)} for split in ("train", "test")}
    assert len(names["train"]) == len(names["test"]) == 200 and not names["train"] & names["test"]


def test_python_is_refused_where_no_sandbox_starts(monkeypatch):
    monkeypatch.setattr(tool_use, "missing_sandbox", lambda: "no bwrap on PATH")
    with pytest.raises(SandboxUnavailable, match="no bwrap on PATH.*calculator"):
        ToolUse(tools=BOTH)
    assert ToolUse().tools == ("calculator",)


@pytest.mark.parametrize(
    "wrong", [{"tools": ()}, {"tools": ("abacus",)}, {"tools": ("calculator",) * 2}, {"max_turns": 1}]
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ValueError, match="tool_use"):
        ToolUse(**wrong)


class Writing:
    """In the place of an engine: writes the given texts, token by token, one for each request."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def stream(self, request, *, whole=False):
        for token in tokenizer().encode(self.texts.pop(0), allow_special=True):
            is_last = token == tokenizer().special_ids["<|im_end|>"]
            yield Output(
                request_id=request.request_id, token_ids=(token,), logprobs=(SimpleNamespace(logprob=-1.0),),
                finish_reason="stop" if is_last else None,
            )  # fmt: skip


def test_calls_written_in_tokens_are_heard_and_played_again_on_an_engine():
    environment = Calculator(max_tokens=400)
    task = environment.task(1, "train")
    text = task.data["text"].removeprefix("What is ").removesuffix("?")
    call = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.calculator:0<|tool_call_argument_begin|>"
        f"{json.dumps({'expression': text})}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
    )
    engine = Writing(call, f"So it is #### {task.data['answer']}<|im_end|>")
    talk = EngineTalk(engine, Sessions(tokenizer()), tokenizer(), TalkConfig(), name="calculator/1", seed=0)
    asyncio.run(environment.episode(task, talk))
    expected = {"outcome": 1.0, "called": 1.0, "calls": 1.0}
    assert environment.judge(task, talk.messages) == expected

    job = Job(environment="calculator", task=task, sample=0, seed=0, iteration=0, turns=tuple(talk.turns))
    (again,) = collect(environment, [job]).trajectories
    assert again.facets == expected and again.messages == talk.messages
    (branch,) = again.branches
    written = tokenizer().decode(branch.tokens[branch.mask].tolist())
    assert written.startswith("<|tool_calls_section_begin|>") and "## Return of" not in written
    assert "## Return of functions.calculator:0" in tokenizer().decode(branch.tokens[~branch.mask].tolist())


def test_it_runs_on_an_engine_that_has_learned_nothing():
    environment = Calculator(max_tokens=8)
    todo = [
        Job(environment="calculator", task=environment.task(number, "train"), sample=0, seed=1, iteration=0)
        for number in range(2)
    ]
    found = collect(environment, todo)
    assert len(found.trajectories) == 2 and not found.failures


def test_an_episode_that_is_over_is_let_pass():
    with pytest.raises(EpisodeOver):
        asyncio.run(ENVIRONMENT.episode(TASK, Said()))
