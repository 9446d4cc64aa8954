"""Contracts of a run: parallel sub-agents, handles, digests, bounds, resuming, the same chains whoever is faster."""

import asyncio
import json
from pathlib import Path

import pytest

from perilune.swarm.budget import Limits
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.swarm import JOURNAL, Swarm, SwarmError
from perilune.swarm.tools.tool import ToolContext, tool
from tests.swarm.models import FunctionModel, call, results, say, scripted, turn


@tool(effects="none")
def note(text: str) -> str:
    """Say it again."""
    return f"noted: {text}"


def config(**changes) -> SwarmConfig:
    return SwarmConfig(model="test", **changes)


def run(model, folder: Path, *, tools=(note,), task="Do it.", **changes):
    swarm = Swarm(config(**changes), client=model, tools=tools)
    return asyncio.run(asyncio.wait_for(swarm.run(task, folder=folder), 60))


def team(count: int, steps: int = 2):
    """An orchestrator that assigns `count` tasks in one turn, and sub-agents that take `steps` steps each."""

    def orchestrator(request):
        if turn(request) == 0:
            return call(("create_subagent", {"name": "worker", "system_prompt": "You work."}))
        if turn(request) == 1:
            return call(*(("assign_task", {"agent": "worker", "prompt": f"part {n}"}) for n in range(count)))
        return say(" + ".join(results(request)))

    def worker(request):
        if turn(request) < steps - 1:
            return call(("note", {"text": f"{request.messages[1].text}/{turn(request)}"}))
        return say(f"answer to {request.messages[1].text}")

    return scripted({"main": orchestrator, "main/*": worker})


def events(folder: Path):
    with SQLiteReader(folder / JOURNAL) as reader:
        return list(reader.events())


def outcome(folder: Path, chain: str) -> dict:
    return next(e.read() for e in events(folder) if e.chain == chain and e.kind == "outcome")


def test_tasks_of_one_turn_run_at_the_same_time_and_come_back_in_order(tmp_path):
    model = FunctionModel(team(20), seed=1)
    result = run(model, tmp_path)
    assert result.status == "done" and result.agents == 21
    assert result.answer == " + ".join(f"answer to part {n}" for n in range(20))
    assert model.peak == 20
    assert (result.parallelism.total_steps, result.parallelism.critical_steps) == (3 + 40, 3 + 2)


def test_a_sub_agent_sees_its_prompts_and_nothing_else(tmp_path):
    model = FunctionModel(team(2))
    run(model, tmp_path)
    first = next(request for request in model.requests if request.agent == "main/worker-1.1")
    assert [(m.role, m.text) for m in first.messages] == [("system", "You work."), ("user", "part 1")]
    assert b"assign_task" not in first.tools and b"note" in first.tools


def test_every_chain_is_the_same_whoever_is_faster(tmp_path):
    heads = []
    for seed in range(5):
        run(FunctionModel(team(8, steps=3), seed=seed), tmp_path / str(seed))
        with SQLiteReader(tmp_path / str(seed) / JOURNAL) as reader:
            heads.append({chain: head for chain, (_, head) in reader.heads().items()})
    assert len(heads[0]) == 1 + 9 + 1 + 8 + 8 * 2  # run, agents, and their calls
    assert all(each == heads[0] for each in heads[1:])


@pytest.mark.parametrize("commits", range(1, 60, 3))
def test_killed_after_any_event_a_run_goes_on_without_doing_anything_twice(tmp_path, commits):
    behaviour = team(4, steps=3)
    whole = run(FunctionModel(behaviour, seed=0), tmp_path / "whole")
    needed = 3 + 4 * 3

    async def first_life() -> FunctionModel:
        model = FunctionModel(behaviour, seed=commits)
        swarm = Swarm(config(), client=model, tools=[note])
        async with swarm.start("Do it.", folder=tmp_path / "run") as live:
            enough, seen = asyncio.Event(), 0

            def count(batch):
                nonlocal seen
                seen += len(batch)
                if seen >= commits:
                    enough.set()

            live.journal.subscribe(count)
            await live.begin()
            ends = asyncio.ensure_future(live.ended())
            await asyncio.wait({ends, asyncio.ensure_future(enough.wait())}, return_when=asyncio.FIRST_COMPLETED)
            ends.cancel()
        return model

    first = asyncio.run(asyncio.wait_for(first_life(), 60))
    known = sum(event.kind == "reply" for event in events(tmp_path / "run"))
    assert known <= len(first.requests) <= known + 4  # four at a time
    second = FunctionModel(behaviour, seed=7)
    swarm = Swarm(config(), client=second, tools=[note])
    result = asyncio.run(asyncio.wait_for(swarm.resume(tmp_path / "run"), 60))
    assert result.answer == whole.answer and result.status == "done"
    assert len(second.requests) == needed - known
    ours, theirs = events(tmp_path / "run"), events(tmp_path / "whole")
    assert {e.chain: e.hash for e in ours if e.chain != "run"} == {e.chain: e.hash for e in theirs if e.chain != "run"}


def test_a_finished_run_tells_its_end_again_without_a_call(tmp_path):
    first = run(FunctionModel(team(2)), tmp_path)
    model = FunctionModel(team(2))
    again = asyncio.run(Swarm(config(), client=model, tools=[note]).resume(tmp_path))
    assert again.answer == first.answer and model.requests == []


def test_a_call_that_must_not_run_twice_is_flagged_when_its_outcome_is_unknown(tmp_path):
    ran = []

    @tool(effects="workspace")
    async def write(context: ToolContext, text: str) -> str:
        """Write."""
        ran.append(text)
        await asyncio.Event().wait()
        return "never"

    behaviour = scripted({"main": lambda r: call(("write", {"text": "x"})) if turn(r) == 0 else say(results(r)[0])})

    async def killed():
        async with Swarm(config(), client=FunctionModel(behaviour), tools=[write]).start("t", folder=tmp_path) as live:
            await live.begin()
            while not ran:
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(killed(), 60))
    result = asyncio.run(Swarm(config(), client=FunctionModel(behaviour), tools=[write]).resume(tmp_path))
    assert ran == ["x"] and "unknown" in result.answer
    assert outcome(tmp_path, "main#0.0")["status"] == "unknown"


def test_started_tasks_are_collected_by_wait_any_all_and_number(tmp_path):
    def orchestrator(request):
        script = [
            call(("create_subagent", {"name": "w", "system_prompt": "s"})),
            call(*(("start_task", {"agent": "w", "prompt": str(n)}) for n in range(4))),
            call(("wait", {"mode": "any"})),
            call(("wait", {"mode": 2, "handles": ["w-1.0", "w-1.1", "w-1.2"]})),
            call(("wait", {})),
            call(("wait", {}), ("list_agents", {})),
            say("done"),
        ]
        return script[turn(request)]

    run(FunctionModel(scripted({"main": orchestrator, "main/*": lambda r: say(r.messages[1].text)}), seed=3), tmp_path)
    any_of = outcome(tmp_path, "main#2.0")
    assert 1 <= len(any_of["joined"]) <= 4 and all(f"w-1.{n}" in any_of["text"] for n in range(4))
    assert len(outcome(tmp_path, "main#3.0")["joined"]) >= 2
    joined = set(any_of["joined"]) | set(outcome(tmp_path, "main#3.0")["joined"])
    assert joined | set(outcome(tmp_path, "main#4.0")["joined"]) == {f"main/w-1.{n}" for n in range(4)}
    assert outcome(tmp_path, "main#5.0")["text"] == "There is nothing to wait for."
    assert outcome(tmp_path, "main#5.1")["text"].count("done") == 4


def test_map_task_shares_items_over_agents_and_keeps_every_answer(tmp_path):
    def orchestrator(request):
        script = [
            call(("create_subagent", {"name": "w", "system_prompt": "s"})),
            call(
                ("map_task", {"agent": "w", "template": "<{item}>", "items": [str(n) for n in range(50)], "agents": 7})
            ),
            call(("wait", {})),
            call(("read_result", {"handle": "w-1.0"})),
            say("done"),
        ]
        return script[turn(request)]

    model = FunctionModel(
        scripted({"main": orchestrator, "main/*": lambda r: say("got " + r.messages[-1].text)}), seed=1
    )
    result = run(model, tmp_path)
    rows = [json.loads(line) for line in outcome(tmp_path, "main#3.0")["text"].splitlines()[:50]]
    assert [row["text"] for row in rows] == [f"got <{n}>" for n in range(50)]
    assert result.agents == 8 and all(len(r.messages) == 2 for r in model.requests if r.agent != "main")


def test_long_answers_reach_the_parent_as_digests_and_every_byte_by_handle(tmp_path):
    long = {n: "".join(f"{n}:{line} " for line in range(6000)) for n in range(100)}
    assert all(len(text) > 40_000 for text in long.values())

    def orchestrator(request):
        if turn(request) == 0:
            return call(("create_subagent", {"name": "w", "system_prompt": "s"}))
        if turn(request) == 1:
            return call(*(("assign_task", {"agent": "w", "prompt": str(n)}) for n in range(100)))
        if turn(request) == 2:
            return call(("read_result", {"handle": "w-1.42", "start": 32_000, "end": 33_000}))
        digest = next(m.text for m in request.messages if m.tool_call_id == "call_42")
        return say("{{art:" + digest.split("art:")[1][:16] + "}}")

    model = FunctionModel(scripted({"main": orchestrator, "main/*": lambda r: say(long[int(r.messages[1].text)])}))
    result = run(model, tmp_path, context_tokens=32_000)
    sizes = [sum(len(m.wire) for m in r.messages) for r in model.requests if r.agent == "main"]
    assert max(sizes) <= 3 * 32_000
    assert outcome(tmp_path, "main#2.0")["text"].startswith(long[42][32_000:33_000])
    assert result.answer == long[42]


def test_hundred_parts_become_one_document_without_passing_a_context(tmp_path):
    part = "x" * 12_000

    def orchestrator(request):
        script = [
            call(
                ("create_subagent", {"name": "w", "system_prompt": "s"}),
                ("create_subagent", {"name": "m", "system_prompt": "s"}),
            ),
            call(("map_task", {"agent": "w", "template": "{item}", "items": [str(n) for n in range(100)]})),
            call(("wait", {})),
            call(("reduce_task", {"agent": "m", "template": "Join: {parts}", "handles": ["w-1.0"], "fan_in": 10})),
            call(("wait", {})),
        ]
        if turn(request) < len(script):
            return script[turn(request)]
        return say("# Report\n{{" + results(request)[0].split("bytes: ")[1].split("]")[0] + "}}")

    def merge(request):
        handles = [piece.split("'")[0] for piece in request.messages[1].text.split("<part handle='")[1:]]
        return say("\n".join("{{" + handle + "}}" for handle in handles))

    behaviour = scripted(
        {"main": orchestrator, "main/w*": lambda r: say(f"part {r.messages[1].text} {part}"), "main/m*": merge}
    )
    model = FunctionModel(behaviour)
    result = run(model, tmp_path, context_tokens=20_000)
    assert len(result.answer) > 1_200_000
    at = [result.answer.index(f"part {n} x") for n in range(100)]
    assert at == sorted(at) and result.answer.count("part ") == 100
    assert max(sum(len(m.wire) for m in r.messages) for r in model.requests) <= 60_000


def test_messages_reach_a_running_agent_before_its_next_step(tmp_path):
    def orchestrator(request):
        script = [
            call(("create_subagent", {"name": "w", "system_prompt": "s"})),
            call(("start_task", {"agent": "w", "prompt": "listen"})),
            call(("send", {"to": "w-1.0", "text": "the word is moon"})),
            call(("wait", {})),
        ]
        return script[turn(request)] if turn(request) < 4 else say(results(request)[0])

    def worker(request):
        heard = [m.text for m in request.messages if m.role == "user"]
        if len(heard) == 1 and turn(request) < 50:
            return call(("note", {"text": "waiting"}))
        return say(heard[-1])

    result = run(FunctionModel(scripted({"main": orchestrator, "main/*": worker}), seed=2), tmp_path)
    assert "[Message from main]\nthe word is moon" in result.answer


def test_cancel_ends_an_agent_and_what_it_started(tmp_path):
    def orchestrator(request):
        script = [
            call(("create_subagent", {"name": "w", "system_prompt": "s"})),
            call(("start_task", {"agent": "w", "prompt": "p"})),
            call(("note", {"text": "a"})),
            call(("note", {"text": "b"})),
            call(("cancel", {"handle": "w-1.0"})),
            say("done"),
        ]
        return script[turn(request)]

    def worker(request):
        if request.agent.count("/") == 1:
            script = [
                call(("create_subagent", {"name": "v", "system_prompt": "s"})),
                call(("assign_task", {"agent": "v", "prompt": "p"})),
            ]
            return script[turn(request)]
        return call(("note", {"text": "on and on"}))

    run(
        FunctionModel(scripted({"main": orchestrator, "main/*": worker}), seed=5),
        tmp_path,
        max_depth=2,
        subagent_steps=None,
    )
    ends = {e.chain: e.read()["status"] for e in events(tmp_path) if e.kind == "finished"}
    assert ends["main"] == "done" and ends["main/w-1.0"] == "cancelled"
    assert all(status == "cancelled" for chain, status in ends.items() if chain != "main")
    started = {e.chain for e in events(tmp_path) if e.kind == "started"}
    assert started == set(ends)


def test_budgets_stop_agents_and_are_never_overshot(tmp_path):
    result = run(FunctionModel(team(30, steps=5), seed=1), tmp_path, limits=Limits(calls=40, agents=20))
    assert result.spent["calls"]["spent"] <= 40 and result.spent["agents"]["spent"] <= 20
    assert result.spent["agents"]["spent"] == 20
    assert sum(e.kind == "reply" for e in events(tmp_path)) == 40


def test_the_last_step_of_an_agent_is_an_answer(tmp_path):
    seen = []

    def endless(request):
        seen.append((request.tools == b"[]", request.messages[-1].text))
        return say("all I have") if request.tools == b"[]" else call(("note", {"text": "more"}))

    result = run(FunctionModel(endless), tmp_path, main_steps=4)
    assert result.answer == "all I have" and [last for last, _ in seen] == [False, False, False, True]
    assert "last step" in seen[-1][1]


def test_answers_follow_their_schema_or_are_asked_for_again(tmp_path):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

    def orchestrator(request):
        script = [
            call(("create_subagent", {"name": "w", "system_prompt": "s", "output_schema": schema})),
            call(("assign_task", {"agent": "w", "prompt": "p"})),
        ]
        return script[turn(request)] if turn(request) < 2 else say(results(request)[0])

    def worker(request):
        return say(["not json", '{"n": "x"}', '```json\n{"n": 3}\n```'][turn(request)])

    result = run(FunctionModel(scripted({"main": orchestrator, "main/*": worker})), tmp_path)
    assert '{"n": 3}' in result.answer


def test_what_a_model_gets_wrong_comes_back_to_it_in_words(tmp_path):
    wrong = [
        (("assign_task", {"agent": "nobody", "prompt": "p"}), "no sub-agent is called 'nobody'"),
        (("asign_task", {"agent": "a", "prompt": "p"}), "did you mean 'assign_task'"),
        (("assign_task", {"agent": "a"}), "prompt: Field required"),
        (("assign_task", "{not json"), "JSON"),
        (("read_result", {"handle": "art:0000000000000000"}), "no result has the handle"),
        (("wait", {"handles": ["w-9.9"]}), "no task has the handle 'w-9.9'"),
        (("map_task", {"agent": "a", "template": "x", "items": ["1"]}), "registered: none yet"),
        (("send", {"to": "parent", "text": "x"}), "you have no parent"),
        (("create_subagent", {"name": "x", "system_prompt": "s", "tools": ["rm_rf"]}), "rm_rf"),
        (("create_subagent", {"name": "x", "system_prompt": "s", "budget": {"apples": 3}}), "apples"),
        (("create_subagent", {"name": " ", "system_prompt": "s"}), "name is empty"),
    ]

    def orchestrator(request):
        return call(*(each for each, _ in wrong)) if turn(request) == 0 else say("\n".join(results(request)))

    run(FunctionModel(orchestrator), tmp_path)
    for at, (_, expected) in enumerate(wrong):
        body = outcome(tmp_path, f"main#0.{at}")
        assert body["status"] == "error" and expected in body["text"], body["text"]


def test_old_results_are_hidden_and_then_summarized_when_the_context_fills(tmp_path):
    sizes = []

    def behaviour(request):
        sizes.append(sum(len(m.wire) for m in request.messages))
        if "context is nearly full" in request.messages[-1].text:
            return say("summary of all")
        if sum("art:" in m.text for m in request.messages if m.role == "tool") > 10 or len(sizes) > 60:
            return say("end")
        return call(("note", {"text": "y" * 1500}))

    result = run(FunctionModel(behaviour), tmp_path, context_tokens=4000)
    kinds = [e.read()["how"] for e in events(tmp_path) if e.kind == "compacted"]
    assert "hidden" in kinds and result.status == "done"
    assert max(sizes) <= 12_000


def test_a_person_steers_and_cancels_a_running_agent(tmp_path):
    def worker(request):
        heard = [m.text for m in request.messages if m.role == "user"]
        return say(heard[-1]) if len(heard) > 1 else call(("note", {"text": "busy"}))

    async def scene():
        swarm = Swarm(config(main_steps=None), client=FunctionModel(worker, seed=1), tools=[note])
        async with swarm.start("wait for me", folder=tmp_path) as live:
            await live.begin()
            await live.steer("main", "stop and answer")
            await live.ended()
            with pytest.raises(SwarmError, match="at work"):
                await live.steer("main", "too late")
            return await live._result()

    assert asyncio.run(asyncio.wait_for(scene(), 60)).answer == "stop and answer"
    assert [e.read()["sender"] for e in events(tmp_path) if e.kind == "message"] == ["user"]


def test_a_folder_holds_one_run(tmp_path):
    run(FunctionModel(team(1)), tmp_path)
    with pytest.raises(SwarmError, match="holds a run already"):
        run(FunctionModel(team(1)), tmp_path)
    with pytest.raises(SwarmError, match="holds no run"):
        asyncio.run(Swarm(config(), client=FunctionModel(team(1))).resume(tmp_path / "empty"))
    with pytest.raises(SwarmError, match="needs a model"):
        Swarm(client=FunctionModel(team(1)))
