"""Gathering pieces, alone or with workers: what the cap leaves to one agent, what workers bring, what show is worth."""

import asyncio

import pytest

from perilune.rl.environments.gathering import Gathering
from perilune.rl.tiny_swarm import ANSWER, Scripted, Teaching, delegating, serial, traces, worker


def played(environment: Gathering, script, *, kind: str = "wide"):
    task = next(task for number in range(99) if (task := environment.task(number, "test")).data["kind"] == kind)
    talk = Scripted(script=script(task.data["count"]), worker=worker)
    asyncio.run(environment.episode(task, talk))
    return environment.judge_events(task, talk.messages, talk.events), task, talk


def test_alone_the_cap_leaves_half_of_a_wide_task_and_all_of_a_narrow_one():
    facets, task, _ = played(Gathering(), lambda count: serial(3))
    assert facets["outcome"] == 3 / task.data["count"] and 0.5 <= facets["outcome"] <= 0.6
    assert facets["critical_steps"] == 3 and facets["spawned"] == facets["parallel"] == facets["finish"] == 0
    assert played(Gathering(), lambda count: serial(3), kind="narrow")[0]["outcome"] == 1.0


def test_workers_gather_all_of_it_within_the_cap():
    facets, task, _ = played(Gathering(), lambda count: delegating(count, "well"))
    count = task.data["count"]
    assert facets["outcome"] == facets["parallel"] == facets["finish"] == 1.0 and facets["critical_steps"] == 3
    assert facets["width"] == facets["spawned"] == count and facets["unused_workers"] == 0
    assert facets["total_steps"] == 1 + 2 * count


def test_tokens_are_those_of_everybody_and_workers_have_theirs_beside():
    environment = Gathering()
    _, task, talk = played(environment, lambda count: delegating(count, "well"))
    events = [
        {**each, "body": {**each["body"], "tokens": 10}} if each["kind"] == "reply" else each for each in talk.events
    ]
    facets = environment.judge_events(task, talk.messages, events)
    own = sum(each["kind"] == "reply" and each["chain"] == "main" for each in events)
    assert facets["tokens"] == facets["worker_tokens"] + 10 * own > facets["worker_tokens"] > 0


@pytest.mark.parametrize("how,parallel,outcome", [("empty", 1.0, 0.0), ("nobody", 0.0, 0.0), ("one", 1 / 3, 0.2)])
def test_clumsy_delegation_brings_little_and_is_told_apart(how, parallel, outcome):
    environment = Gathering(wide=(5, 5))
    facets, _, _ = played(environment, lambda count: delegating(count, how))
    assert facets["parallel"] == pytest.approx(parallel) and facets["outcome"] == pytest.approx(outcome)
    assert facets["finish"] == (1.0 if how == "one" else 0.0)
    assert facets["unused_workers"] == (5.0 if how == "empty" else 0.0)


def test_pieces_are_shared_out_by_calls_and_nobody_takes_two():
    def greedy(count):
        def script(messages):
            yield [("create_subagent", {"name": "r", "system_prompt": "go"})]
            yield [("assign_task", {"agent": "r", "prompt": "go"})] * (count + 2)
            yield ANSWER

        return script

    def twice(messages):
        yield [("take", {}), ("take", {})]
        yield "done"

    environment = Gathering(wide=(5, 5))
    task = next(task for number in range(99) if (task := environment.task(number, "test")).data["kind"] == "wide")
    talk = Scripted(script=greedy(5), worker=twice)
    asyncio.run(environment.episode(task, talk))
    facets = environment.judge_events(task, talk.messages, talk.events)
    assert facets["outcome"] == 1.0 and facets["spawned"] == 7 and facets["unused_workers"] == 2
    empty = [name for name, aside in talk.asides.items() if "nothing is left" in str(aside.messages)]
    assert sorted(empty) == ["main/r-1.5", "main/r-1.6"]


def test_without_an_answer_nothing_is_handed_in():
    def silent(count):
        def script(messages):
            yield [("take", {})]
            yield "done"

        return script

    assert played(Gathering(), silent)[0]["outcome"] == 0.0


def test_a_policy_without_workers_has_no_tools_for_them():
    _, _, talk = played(Gathering(delegates=False), lambda count: serial(3))
    assert [each["function"]["name"] for each in talk.tools] == ["take", "answer"]
    with pytest.raises(ValueError, match="gathering.wide is"):
        Gathering(wide=(5, 4))


def test_traces_are_the_same_again_and_have_the_shares_they_were_asked_for():
    first, again = (traces(120, Teaching(delegating=0.5, well_formed=0.5), seed=3) for _ in range(2))
    assert first == again and ANSWER
    calls = [[call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
             for messages, tools in first if len(tools) == 4]  # fmt: skip
    wide = [names for names in calls if names.count("take") == 3 or "assign_task" in names]
    assert len(calls) == 120 and 0.35 < sum("assign_task" in names for names in wide) / len(wide) < 0.65
    works = [messages for messages, tools in first if len(tools) == 1]
    assert works and all(messages[-1]["content"] in ("done", "none") for messages in works)
