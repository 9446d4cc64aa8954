"""Episodes of a swarm through the real runtime: who speaks where, what is noted, and that nothing passes the cap."""

import asyncio
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import settings as checks
from hypothesis import strategies as st

from perilune.rl.critical_steps import ASSIGN, StepLedger, steps_of
from perilune.rl.environment import EpisodeOver
from perilune.rl.swarm_episode import LAST_REPLY, LAST_REPLY_OF_WORKER, SwarmEpisode, swarm_episode
from perilune.rl.talk import TalkError
from perilune.serve.async_engine import EngineDead
from perilune.swarm.tools.tool import ToolContext, tool
from tests.rl.swarm_talk import ANSWER, CREATE, TOOLS, SwarmTalk, assign, settings


def played(talk: SwarmTalk, **more) -> SwarmTalk:
    asyncio.run(swarm_episode("find it", talk, tools=TOOLS, settings=settings(**more)))
    return talk


def outcomes(talk: SwarmTalk, tool: str) -> list[dict]:
    return [each["body"] for each in talk.events if each["kind"] == "outcome" and each["body"]["tool"] == tool]


def ended(talk: SwarmTalk) -> str:
    return talk.events[-1]["body"]["how"]


def lookups(name: str):
    return [[("search", {"query": "q"})], [("open", {"page": "p"})], f"a: {name}"]


def test_workers_run_beside_each_other_and_their_one_message_comes_back():
    talk = played(SwarmTalk([CREATE], assign("t0", "t1", "t2"), ANSWER, worker=lookups))
    assert sorted(talk.asides) == ["main/r-1.0", "main/r-1.1", "main/r-1.2"]
    assert [message["role"] for message in talk.messages] == [
        "system", "user", "assistant", "tool", "assistant", "tool", "tool", "tool", "assistant",
    ]  # fmt: skip
    assert [message["content"] for message in talk.messages[5:8]] == [f"a: main/r-1.{n}" for n in range(3)]
    for aside in talk.asides.values():
        assert [message["role"] for message in aside.messages] == [
            "system", "user", "assistant", "tool", "assistant", "tool", "assistant",
        ]  # fmt: skip
        assert aside.messages[0]["content"] == "look"
    steps = steps_of(talk.events)
    # create 1, assign 1, and two steps of the longest worker
    assert (steps.critical, steps.total, steps.width) == (4, 1 + 3 + 6, 3)
    assert ended(talk) == "answer"


def test_each_side_is_shown_its_own_tools_and_the_same_ones_in_every_reply():
    talk = played(SwarmTalk([CREATE], assign("t"), ANSWER, worker=lookups))

    def names(how):
        return [each["function"]["name"] for each in how["tools"]]

    assert {tuple(names(how)) for how in talk.asked} == {("create_subagent", "assign_task", "search", "open", "answer")}
    (aside,) = talk.asides.values()
    assert {tuple(names(how)) for how in aside.asked} == {("search", "open")}
    assert set(talk.asked[0]["tools"][0]["function"]["parameters"]["properties"]) == {"name", "system_prompt"}


def test_agents_have_folders_of_their_own_only_where_a_tool_writes():
    seen = []

    def looking(effects):
        @tool(effects=effects)
        async def search(context: ToolContext, query: str) -> str:
            """Search."""
            seen.append((context.agent, context.workspace, list(context.workspace.iterdir())))
            return "found"

        return (search, *TOOLS[1:])

    def folders(effects):
        seen.clear()
        talk = SwarmTalk([("search", {"query": "q"})], [CREATE], assign("t0", "t1"), ANSWER, worker=lookups)
        asyncio.run(swarm_episode("find it", talk, tools=looking(effects), settings=settings()))
        assert len(seen) == 3 and not any(inside for _, _, inside in seen)
        return {workspace for _, workspace, _ in seen}

    (shared,) = folders("none")
    assert folders("none") == {shared} and shared.is_dir() and not any(shared.iterdir())
    own = folders("workspace")
    assert len(own) == 3 and not any(each.exists() for each in own)


def test_direct_calls_of_one_reply_cost_one_step_each():
    talk = played(SwarmTalk([("search", {"query": str(n)}) for n in range(4)], ANSWER))
    assert steps_of(talk.events).critical == 4


def test_creating_and_assigning_are_one_step_each_however_often_and_others_one_for_every_call():
    second = ("create_subagent", {"name": "s", "system_prompt": "look"})
    mixed = [CREATE, ("search", {"query": "q"}), second, *assign("t0", "t1"), ("open", {"page": "p"})]
    talk = played(SwarmTalk(mixed, ANSWER, worker=lookups), critical_steps=9)
    steps = steps_of(talk.events)
    assert (steps.critical, steps.total, steps.width) == (1 + 1 + 1 + 1 + 2, 6 + 4, 2)


def test_at_the_cap_main_is_told_and_only_its_answer_counts():
    talk = played(SwarmTalk(*[[("search", {"query": "q"})]] * 6, ANSWER))
    assert talk.messages[-2] == {"role": "user", "content": LAST_REPLY}
    assert steps_of(talk.events).critical == 6 and ended(talk) == "answer"
    stubborn = played(SwarmTalk([("search", {"query": "q"})]))
    assert len(stubborn.asked) == 7 and ended(stubborn) == "text"
    assert sum(body["ran"] for body in outcomes(stubborn, "search")) == 6


def test_calls_beyond_the_cap_are_refused_in_words():
    talk = played(SwarmTalk([("search", {"query": str(n)}) for n in range(9)], ANSWER))
    ran = outcomes(talk, "search")
    assert [body["ran"] for body in ran] == [1] * 6 + [0] * 3
    assert "no steps are left" in ran[-1]["text"]


def test_a_worker_has_what_the_stage_left_and_is_asked_for_a_last_word():
    talk = played(SwarmTalk([CREATE], [("search", {"query": "q"})], assign("t"), ANSWER,
                            worker=lambda _: [[("open", {"page": "p"})]]), critical_steps=5)  # fmt: skip
    (aside,) = talk.asides.values()
    assert steps_of(talk.events).workers == {"main/r-2.0": 2}  # 5 - create - search - assign
    assert aside.messages[-2] == {"role": "user", "content": LAST_REPLY_OF_WORKER}
    assert steps_of(talk.events).critical == 5


def test_a_thousand_tasks_in_one_reply_start_no_more_workers_than_allowed():
    talk = played(SwarmTalk([CREATE], assign(*map(str, range(1000))), ANSWER), max_workers=8)
    assert len(talk.asides) == 8
    bodies = outcomes(talk, ASSIGN)
    assert len(bodies) == 1000 and sum(body["ran"] for body in bodies) == 8
    assert steps_of(talk.events).critical == 2


def test_a_worker_that_tries_to_spawn_or_to_answer_is_told_that_it_cannot():
    def tries(_):
        return [[CREATE], ANSWER, "a: b"]

    talk = played(SwarmTalk([CREATE], assign("t"), ANSWER, worker=tries))
    texts = [message["content"] for message in talk.asides["main/r-1.0"].messages if message["role"] == "tool"]
    assert len(talk.asides) == 1 and all("there is no tool" in text for text in texts) and len(texts) == 2
    assert steps_of(talk.events).workers == {"main/r-1.0": 2}


@pytest.mark.parametrize("tools", ["start_task", "map_task", "wait", "read_result", "reduce_task"])
def test_other_tools_of_the_runtime_are_not_there(tools):
    talk = played(SwarmTalk([(tools, {"agent": "r", "prompt": "t", "template": "{item}", "items": ["1"]})], ANSWER))
    assert "there is no tool" in talk.messages[3]["content"] and steps_of(talk.events).critical == 1


def test_a_budget_or_model_in_create_subagent_changes_nothing():
    spec = ("create_subagent", {"name": "r", "system_prompt": "x", "budget": {"steps": 1}, "tools": ["answer"]})
    talk = played(SwarmTalk([spec], assign("t"), ANSWER, worker=lookups), worker_prompt="work")
    (aside,) = talk.asides.values()
    assert aside.messages[0]["content"] == "work"
    assert steps_of(talk.events).workers == {"main/r-1.0": 2}


@pytest.mark.parametrize(
    "worker,status",
    [([EpisodeOver()], "failed"), ([RuntimeError("bug")], "failed"), ([TalkError("x: the engine failed: y")], "failed"),
     ([""], "done")],
    ids=["cut", "raises", "engine", "says nothing"],
)  # fmt: skip
def test_a_worker_that_fails_costs_itself_alone(worker, status):
    talk = played(SwarmTalk([CREATE], assign("bad", "good"), ANSWER,
                            worker=lambda name: worker if name.endswith(".0") else lookups(name)))  # fmt: skip
    ends = {each["chain"]: each["body"]["status"] for each in talk.events if each["kind"] == "finished"}
    assert ends["main/r-1.0"] == status and ends["main/r-1.1"] == "done"
    assert talk.messages[-2]["content"] == "a: main/r-1.1" and ended(talk) == "answer"


@pytest.mark.parametrize("error", [EngineDead("gone"), TalkError("x: the prompt of turn 0 is not the one")])
def test_what_is_wrong_with_the_run_is_not_taken_for_a_failed_worker(error):
    talk = SwarmTalk([CREATE], assign("t"), ANSWER, worker=lambda _: [error])
    with pytest.raises(type(error)):
        played(talk)


def test_a_tool_that_hangs_is_stopped_and_a_hung_worker_ends_with_its_episode():
    async def forever(**_):
        await asyncio.sleep(1000)

    talk = SwarmTalk([CREATE], assign("t"), ANSWER)
    talk.aside("main/r-1.0").ask = forever

    async def play():
        async with asyncio.timeout(0.3):
            await swarm_episode("find it", talk, tools=TOOLS, settings=settings())

    with pytest.raises(TimeoutError):
        asyncio.run(play())
    assert talk.events[-1]["kind"] == "ended" and ended(talk) == "cut"


def test_an_episode_that_is_cut_is_noted_and_says_so():
    talk = SwarmTalk([CREATE], EpisodeOver())
    with pytest.raises(EpisodeOver):
        played(talk)
    assert ended(talk) == "cut" and steps_of(talk.events).critical == 1


def test_wrong_settings_and_missing_tools_are_named():
    with pytest.raises(ValueError, match="critical_steps is 0"):
        settings(critical_steps=0)
    with pytest.raises(ValueError, match="worker_tools holds 'assign_task'"):
        settings(worker_tools=("search", "assign_task"))
    with pytest.raises(ValueError, match="expected 'answer' among them"):
        SwarmEpisode(system_prompt="x", main_tools=("search",))
    with pytest.raises(ValueError, match="no tool 'lookup'"):
        played(SwarmTalk("x"), main_tools=("lookup", "answer"))


# --- whatever is said, the cap holds ----------------------------------------------------------------------------------

NAMES = st.sampled_from(["search", "open", "create_subagent", "assign_task", "answer", "nonsense", "map_task", ""])
ARGUMENTS = st.one_of(
    st.sampled_from(["", "{", "[]", "null"]),
    st.fixed_dictionaries({}, optional={
        "query": st.text(max_size=3), "page": st.sampled_from(["p", "broken"]), "name": st.sampled_from(["r", "s", ""]),
        "system_prompt": st.just("x"), "agent": st.sampled_from(["r", "s"]), "prompt": st.sampled_from(["", "t", "u"]),
        "table": st.just([]),
    }).map(json.dumps),
)  # fmt: skip
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=6)
REPLIES = st.lists(st.one_of(CALLS, st.text(max_size=4)), min_size=1, max_size=8)


@given(
    main=REPLIES, workers=st.lists(REPLIES, min_size=1, max_size=4), cap=st.integers(1, 9),
    worker_steps=st.integers(1, 4), creates=st.booleans(),
)  # fmt: skip
@checks(max_examples=60, deadline=None)
def test_no_behaviour_passes_the_cap(main, workers, cap, worker_steps, creates):
    given_main = [[CREATE], assign("t", "u")] * creates + main
    talk = SwarmTalk(*given_main, worker=lambda name: workers[sum(map(ord, name)) % len(workers)])
    with contextlib.suppress(EpisodeOver):
        played(talk, critical_steps=cap, worker_steps=worker_steps, max_workers=5)
    steps = steps_of(talk.events)
    assert steps.critical <= cap
    assert all(taken <= worker_steps for taken in steps.workers.values())
    assert len(talk.asked) <= cap + 1 and len(talk.asides) <= 5
    assert all(len(aside.asked) <= worker_steps + 1 for aside in talk.asides.values())
    ran = sum(each["body"]["ran"] for each in talk.events if each["kind"] == "outcome")
    assert steps.total == ran <= cap * 6 + 5 * worker_steps * 6


@given(st.lists(st.tuples(st.sampled_from(["main", "a", "b"]), st.lists(st.sampled_from(
    ["search", "create_subagent", "assign_task"]), max_size=5)), max_size=12), st.integers(1, 8))  # fmt: skip
def test_the_ledger_never_charges_more_than_the_cap(said, cap):
    ledger = StepLedger(cap=cap, worker_steps=4, max_workers=3)
    for agent, calls in said:
        is_last = ledger.is_last(agent)
        cost, verdicts = ledger.charge(agent, calls)
        assert len(verdicts) == len(calls) and 0 <= cost <= len(calls)
        assert not (is_last and cost)
    ledger.is_last("main")
    assert ledger.critical <= cap
