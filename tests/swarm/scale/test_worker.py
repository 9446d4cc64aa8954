"""Contracts of a worker, without Ray: what it took over it pays for, and what it must not do it leaves alone."""

import asyncio
import uuid

import pytest

pytest.importorskip("asyncpg", reason="needs asyncpg (pip install 'perilune[scale]')")

from perilune.swarm.agent import start_body
from perilune.swarm.budget import Budget, Limits
from perilune.swarm.scale.leased import open_run
from perilune.swarm.scale.orders import Plan, order_of
from perilune.swarm.scale.worker import Worker
from perilune.swarm.scripted import ThreadedServer, load_script
from perilune.swarm.settings import SwarmConfig
from tests.swarm.journal.appending import KEY
from tests.swarm.scale.test_orders import agent
from tests.swarm.scale.workplaces import traces

pytestmark = pytest.mark.needs_tool("initdb")
NAME = "main/worker-1.0"


def perform(dsn, folder, *, is_new=True, script=("worker", {"steps": 1}), past=(), before=None, **changes):
    """One order, done by a worker of this process: its outcome, the calls that the model saw, and the events."""

    async def work():
        run = uuid.uuid4().hex
        with ThreadedServer(load_script(*script)) as server:
            options = {"base_url": server.base_url, "trace": str(folder / "trace")}
            plan = Plan(
                dsn=dsn,
                run=run,
                key=KEY,
                config=SwarmConfig(model="m"),
                folder=str(folder),
                workplace="tests.swarm.scale.workplaces:workplace",
                options=options,
                lease_seconds=0.5,
            )
            journal = await open_run(dsn, run=run, key=KEY, seconds=0.5)
            one = agent(Budget.root(Limits(agents=9)))
            one.spec = type(one.spec)(name="worker", system_prompt="Work.")
            one.taint = type(one.taint)()
            await journal.append(NAME, "started", start_body(one, "do it"))
            if past:
                await journal.take(NAME, patience=0)
                for chain, kind, body in past:
                    await journal.append(chain, kind, body, {"attempts": 1, "prompt_tokens": 1, "completion_tokens": 1})
                await journal.let_go(NAME)
            worker = Worker(plan, "w")
            await worker.open()
            if before is not None:
                await before(worker, journal)
            order = order_of(one, ["do it"], many=False, allotted={}, is_new=is_new)
            order |= {"learned": [], "cancelled": []} | changes
            outcome = await worker.perform(order)
            events = await journal.subtree("main")
            await worker.close()
            await journal.close()
            return outcome, server.counts()["calls"], events

    return asyncio.run(asyncio.wait_for(work(), 60))


def test_a_new_agent_pays_for_its_own_calls_alone(postgres_dsn, tmp_path):
    outcome, calls, events = perform(postgres_dsn, tmp_path)
    assert outcome["ending"] == "done" and outcome["answers"][0]["text"] == "answer to: do it"
    assert outcome["spent"]["calls"] == calls == 2
    assert [event.kind for event in events if event.chain == NAME] == ["started", "reply", "reply", "finished"]


def test_a_call_that_a_lost_worker_may_have_made_is_paid_for(postgres_dsn, tmp_path):
    outcome, calls, _ = perform(postgres_dsn, tmp_path, is_new=False)
    assert calls == 2 and outcome["spent"]["calls"] == 3


def test_an_announced_call_without_outcome_is_not_made_again(postgres_dsn, tmp_path):
    function = {"name": "leave_trace", "arguments": "{}"}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "0", "type": "function", "function": function}],
    }
    past = [
        (NAME, "reply", {"step": 0, "message": message, "finish": "tool_calls", "reads": [], "tokens": None}),
        (f"{NAME}#0.0", "call_started", {"tool": "leave_trace", "arguments_sha256": "00"}),
    ]
    script = ("worker", {"steps": 1, "tool": "leave_trace"})
    outcome, calls, events = perform(postgres_dsn, tmp_path, is_new=False, script=script, past=past)
    assert [event.read()["status"] for event in events if event.kind == "outcome"] == ["unknown"]
    assert traces(tmp_path / "trace") == []
    # The lost worker was in a tool, not in a call of the model: nothing is paid twice.
    assert calls == 1 and outcome["spent"]["calls"] == 2


def test_a_person_who_ended_an_agent_in_an_earlier_life_ended_it(postgres_dsn, tmp_path):
    outcome, calls, events = perform(postgres_dsn, tmp_path, is_new=False, cancelled=[NAME])
    assert (outcome["ending"], calls) == ("cancelled", 0)
    assert [event.read()["status"] for event in events if event.kind == "finished"] == ["cancelled"]


def test_an_agent_that_another_worker_holds_is_not_touched(postgres_dsn, tmp_path):
    async def another(worker, journal):
        worker.plan = type(worker.plan)(**{**vars(worker.plan), "lease_seconds": 0.02})  # less patient
        await journal.claim("another", 600, agents=[NAME])

    outcome, calls, _ = perform(postgres_dsn, tmp_path, before=another)
    assert (outcome["ending"], calls) == ("failed", 0) and "held by another worker" in outcome["error"]
