"""Contracts of the Ray engine: same run as on one loop, a worker may die, budgets hold, cancelling ends."""

import asyncio
import os
import signal
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="needs ray (pip install 'perilune[scale]')")

from perilune.swarm.budget import Limits
from perilune.swarm.journal.postgres import agent_of, verify_run
from perilune.swarm.scale.ray_engine import EngineError, start_ray
from perilune.swarm.scripted import Behaviour, start_server
from tests.swarm.journal.appending import KEY
from tests.swarm.scale.scaled_runs import run_here, scaled
from tests.swarm.scale.workplaces import traces

pytestmark = pytest.mark.needs_tool("initdb")


@pytest.fixture(scope="module", autouse=True)
def ray_session():
    """One Ray for the file: it takes seconds to start."""
    ray = start_ray()
    yield ray
    ray.shutdown()


def test_a_run_over_two_workers_is_the_same_as_on_one_loop(postgres_dsn, tmp_path):
    with start_server("swarm", {"agents": 6, "steps": 3}, Behaviour(latency=(0.0, 0.05))) as server:
        limits = Limits(calls=60, steps=60, tokens=3_000_000, agents=6)  # each is asked for more than once
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray", limits=limits)
        seen: list[dict[int, list[str]]] = []

        async def look(live, engine):
            while sum(map(len, engine.workers().values())) < 6:
                await asyncio.sleep(0.005)
            seen.append(engine.workers())

        result = one.run(look)
        calls = server.counts()["calls"]
        here, heads = run_here(server.base_url, tmp_path / "here", one.config)
    assert (result.status, result.answer) == (here.status, here.answer) == ("done", "all 6 parts are done")
    assert one.heads() == heads
    assert calls == 3 + 6 * 4 and result.agents == 7
    assert sorted(len(agents) for agents in seen[0].values()) == [3, 3]
    spent = {name: result.spent[name]["spent"] for name in ("calls", "steps", "agents", "tokens")}
    assert spent == {name: here.spent[name]["spent"] for name in spent} and spent["calls"] == calls
    assert all(line["reserved"] == 0 for line in result.spent.values())
    assert verify_run(postgres_dsn, one.name, KEY).intact


def test_a_killed_worker_costs_no_finished_step_and_nothing_runs_twice(postgres_dsn, tmp_path):
    check_kill(postgres_dsn, tmp_path, after=8)


@pytest.mark.long
@pytest.mark.parametrize("after", range(0, 24, 2))
def test_a_worker_killed_at_any_time_costs_no_finished_step(postgres_dsn, tmp_path, after):
    check_kill(postgres_dsn, tmp_path, after=after)


def check_kill(dsn, folder, *, after: int) -> None:
    """Kill one of two workers after so many steps, and compare with a run that nobody disturbs."""
    options = {"agents": 6, "steps": 3, "tool": "leave_trace"}
    with start_server("swarm", options, Behaviour(latency=0.15)) as server:
        one = scaled(dsn, server.base_url, folder / "ray", lease_seconds=1)
        killed: list[str] = []

        async def kill(live, engine):
            await steps(live, after)
            pid, agents = max(engine.workers().items(), key=lambda each: len(each[1]))
            killed.extend(agents)
            os.kill(pid, signal.SIGKILL)

        result = one.run(kill)
        calls = server.counts()["calls"]
        here, heads = run_here(server.base_url, folder / "here", one.config)
    assert (result.status, result.answer) == ("done", here.answer)
    assert calls <= 3 + 6 * 4 + len(killed)  # one call of each agent was under way, at most
    assert max(Counter(traces(one.trace)).values()) == 1
    events = one.events()
    assert max(Counter((event.chain, event.seq) for event in events).values()) == 1
    ends = Counter(event.chain for event in events if event.kind == "finished")
    assert set(ends.values()) == {1} and len(ends) == 7
    # Where a call was under way whose outcome nobody knows, the agent was told so, and has another past.
    unknown = {agent_of(e.chain) for e in events if e.kind == "outcome" and e.read()["status"] == "unknown"}
    assert unknown <= set(killed)
    ours = one.heads()
    assert {chain for chain in heads if ours.get(chain) != heads[chain] and agent_of(chain) not in unknown} == set()
    assert verify_run(dsn, one.name, KEY).intact


async def steps(live, count: int, *, depth: int = 1) -> None:
    """Until sub-agents have taken so many steps."""
    while sum(e.kind == "reply" and e.chain.count("/") == depth for e in await live.journal.read()) < count:
        await asyncio.sleep(0.02)


def test_letters_and_handles_cross_processes(postgres_dsn, tmp_path):
    with start_server("tests.swarm.scale.scripts:relay", {}) as server:
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray")
        result = one.run()
        here, heads = run_here(server.base_url, tmp_path / "here", one.config)
    assert result.answer == here.answer == "one two, 2 letters"
    assert one.heads() == heads


@pytest.mark.long
def test_agents_below_agents_move_with_them(postgres_dsn, tmp_path):
    with start_server("tests.swarm.scale.scripts:deep", {}, Behaviour(latency=0.1)) as server:
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray", lease_seconds=1, max_depth=2)

        async def kill(live, engine):
            await steps(live, 4, depth=2)
            pid, agents = max(engine.workers().items(), key=lambda each: len(each[1]))
            assert agents
            os.kill(pid, signal.SIGKILL)

        result = one.run(kill)
        here, _ = run_here(server.base_url, tmp_path / "here", one.config)
    assert (result.status, result.answer) == ("done", here.answer)
    assert max(Counter(traces(one.trace)).values()) == 1
    assert verify_run(postgres_dsn, one.name, KEY).intact


def test_a_shared_limit_is_never_overshot_and_is_spent_to_the_last(postgres_dsn, tmp_path):
    with start_server("swarm", {"agents": 8, "steps": 5}, Behaviour(latency=(0.0, 0.02))) as server:
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray", limits=Limits(calls=20, agents=20))
        result = one.run()
        calls = server.counts()["calls"]
    assert calls <= 20 and result.spent["calls"]["spent"] == calls
    assert result.spent["calls"]["reserved"] == 0
    ends = [event.read()["status"] for event in one.events() if event.kind == "finished"]
    assert "budget" in ends


@pytest.mark.long
@pytest.mark.parametrize("after", (1, 3, 5, 7))
def test_a_limit_is_not_overshot_either_when_a_worker_dies(postgres_dsn, tmp_path, after):
    with start_server("swarm", {"agents": 8, "steps": 5}, Behaviour(latency=0.1)) as server:
        one = scaled(
            postgres_dsn, server.base_url, tmp_path / "ray", lease_seconds=1, limits=Limits(calls=30, agents=9)
        )

        async def kill(live, engine):
            await steps(live, after)
            os.kill(next(iter(engine.workers())), signal.SIGKILL)

        result = one.run(kill)
        calls = server.counts()["calls"]
    assert calls <= result.spent["calls"]["spent"] <= 30


@pytest.mark.long
def test_an_agent_that_kills_its_workers_is_given_up_and_the_others_finish(postgres_dsn, tmp_path):
    with start_server("tests.swarm.scale.scripts:poison", {}) as server:
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray", lease_seconds=1)
        result = one.run()
    ends = {event.chain: event.read()["status"] for event in one.events() if event.kind == "finished"}
    assert ends == {"main": "done", "main/worker-1.0": "done", "main/worker-1.1": "failed", "main/worker-1.2": "done"}
    assert "lost 3 times" in result.answer


@pytest.mark.long
def test_a_person_at_the_run_approves_what_an_agent_in_a_worker_asks_for(postgres_dsn, tmp_path):
    with start_server("swarm", {"agents": 2, "steps": 1, "tool": "ask_first"}) as server:
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray")
        asked = []

        async def person(live, engine):
            live.run.desk.attach("a person", lambda request: asked.append(request) or "worker-0" in request.agent)

        one.run(person)
    decisions = {e.read()["agent"]: e.read()["decision"] for e in one.events() if e.kind == "approval"}
    assert decisions == {"main/worker-0-1.0": "allow", "main/worker-1-1.1": "deny"} and len(asked) == 2
    outcomes = {e.chain: e.read()["status"] for e in one.events() if e.kind == "outcome" and "/" in e.chain}
    assert outcomes == {"main/worker-0-1.0#0.0": "ok", "main/worker-1-1.1#0.0": "denied"}


def test_cancelling_an_agent_ends_it_in_its_worker(postgres_dsn, tmp_path):
    with start_server("swarm", {"agents": 2, "steps": 3}, Behaviour(latency=0.2)) as server:
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray")

        async def cancel(live, engine):
            await steps(live, 1)
            await live.cancel("main/worker-1-1.1")
            ended = [event.kind for event in await live.journal.read("main/worker-1-1.1")]
            assert ended[-1] == "finished" and not any(
                "worker-1" in a for each in engine.workers().values() for a in each
            )

        result = one.run(cancel)
    ends = {event.chain: event.read()["status"] for event in one.events() if event.kind == "finished"}
    assert ends == {"main": "done", "main/worker-0-1.0": "done", "main/worker-1-1.1": "cancelled"}
    assert result.status == "done"


def test_a_worker_that_cannot_start_is_one_clear_error(postgres_dsn, tmp_path):
    one = scaled(postgres_dsn, "http://127.0.0.1:1/v1", tmp_path / "ray")
    one.workplace = "tests.swarm.scale.workplaces:elsewhere"
    with pytest.raises(EngineError, match=r"cannot start.*workplaces:elsewhere"):
        one.run()


@pytest.mark.long
def test_without_workers_a_run_stops_and_can_be_resumed(postgres_dsn, tmp_path):
    with start_server("swarm", {"agents": 4, "steps": 3}, Behaviour(latency=0.1)) as server:
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray", lease_seconds=1)

        async def kill(live, engine):
            await steps(live, 2)
            engine.plan = replace(engine.plan, workplace="tests.swarm.scale.workplaces:elsewhere")
            for pid in engine.workers():
                os.kill(pid, signal.SIGKILL)

        with pytest.raises(EngineError, match="no worker is left"):
            one.run(kill)
        assert not any(event.kind == "finished" for event in one.events())
        assert one.run(task=None).answer == "all 4 parts are done"


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_where_it_was(postgres_dsn, tmp_path):
    with start_server("swarm", {"agents": 4, "steps": 3}, Behaviour(latency=0.1)) as server:
        one = scaled(postgres_dsn, server.base_url, tmp_path / "ray")

        async def first_life():
            async with one.start() as (live, _):
                await live.begin()
                while sum(event.kind == "reply" for event in await live.journal.read()) < 8:
                    await asyncio.sleep(0.02)

        asyncio.run(asyncio.wait_for(first_life(), 60))
        known = sum(event.kind == "reply" for event in one.events())
        assert not any(event.kind == "finished" and event.chain == "main" for event in one.events())
        server.reset()
        result = one.run(task=None)
        calls = server.counts()["calls"]
        _, heads = run_here(server.base_url, tmp_path / "here", one.config)
    assert result.status == "done" and calls == 3 + 4 * 4 - known
    assert {**one.heads(), "run": b""} == {**heads, "run": b""}  # the run's own chain tells that it was resumed
