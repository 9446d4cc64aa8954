"""An agent has one worker at a time; a worker that lost it can write nothing more."""

import asyncio
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perilune.swarm.journal.event import JournalError
from perilune.swarm.journal.leases import StaleLease
from perilune.swarm.journal.postgres import PostgresJournal, agent_of, verify_run
from perilune.swarm.journal.postgres_reader import PostgresReader
from tests.swarm.journal.appending import KEY

pytestmark = pytest.mark.needs_tool("initdb")
ROOT = Path(__file__).parents[3]
NUMBERS = itertools.count()


@pytest.fixture
def run() -> str:
    return f"leases-{os.getpid()}-{next(NUMBERS)}"


async def joined(dsn: str, run: str) -> PostgresJournal:
    return await PostgresJournal.open(dsn, run=run, key=KEY, leases=True)


async def with_agents(dsn: str, run: str, *agents: str) -> PostgresJournal:
    journal = await joined(dsn, run)
    for agent in agents:
        await journal.append(agent, "started", {"name": agent})
    return journal


def test_an_agent_is_claimed_once_in_the_order_of_their_start(postgres_dsn, run):
    async def work():
        one = await with_agents(postgres_dsn, run, "c", "a", "b", "d")
        two = await joined(postgres_dsn, run)
        taken = [lease.agent for lease in await one.claim("one", 60, limit=2)]
        assert taken == ["c", "a"]
        assert [lease.agent for lease in await two.claim("two", 60, agents=["a", "d"], limit=5)] == ["d"]
        assert [lease.agent for lease in await two.claim("two", 60, limit=5)] == ["b"]
        assert await one.claim("one", 60, limit=5) == []
        for journal in (one, two):
            await journal.close()

    asyncio.run(work())


def test_claims_at_the_same_time_share_nothing(postgres_dsn, run):
    async def work():
        agents = [f"agent-{number}" for number in range(30)]
        journals = [await with_agents(postgres_dsn, run, *agents)] + [await joined(postgres_dsn, run) for _ in range(3)]
        rounds = [journal.claim(f"worker-{n}", 60, limit=4) for n, journal in enumerate(journals) for _ in range(2)]
        claimed = [lease.agent for leases in await asyncio.gather(*rounds) for lease in leases]
        assert len(claimed) == len(set(claimed)) > 0
        for journal in journals:
            await journal.close()

    asyncio.run(work())


def test_only_the_holder_writes_to_an_agent_and_its_calls(postgres_dsn, run):
    async def work():
        one, two = await with_agents(postgres_dsn, run, "main"), await joined(postgres_dsn, run)
        with pytest.raises(StaleLease, match="or nobody yet"):
            await one.append("main", "task", {})
        await two.claim("two", 60)
        await two.append("main", "task", {})
        await two.append("main#0.0", "outcome", {})
        for chain in ("main", "main#0.0", "main#0.1"):
            with pytest.raises(StaleLease, match="'main' .* token 1, not None"):
                await one.append(chain, "reply", {})
        await one.append("run", "control", {})
        await two.append("run", "control", {})
        assert (await two.append("main#0.0", "outcome", {})).seq == 1
        for journal in (one, two):
            await journal.close()

    asyncio.run(work())
    assert verify_run(postgres_dsn, run, KEY).intact


def test_an_expired_lease_changes_hands_and_the_late_worker_is_refused(postgres_dsn, run):
    async def work():
        one, two = await with_agents(postgres_dsn, run, "main"), await joined(postgres_dsn, run)
        (late,) = await one.claim("one", 0.05)
        await one.append("main", "reply", {"step": 0})
        while not (taken := await two.claim("two", 60)):
            await asyncio.sleep(0.01)
        assert taken[0].token == late.token + 1
        # Several at once, on both chains: each is refused, and nothing of them is left behind.
        waiting = [one.append(chain, "reply", {}) for chain in ("main", "main", "main#1.0", "main")]
        assert {type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)} == {StaleLease}
        assert await one.renew([late], 60) == []
        assert (await two.append("main", "reply", {"step": 1})).seq == 2
        assert await two.renew(taken, 60) == taken
        await two.release(taken)
        with pytest.raises(StaleLease):
            await two.append("main", "reply", {"step": 2})
        (again,) = await one.claim("one", 60)
        assert again.token > taken[0].token
        assert (await one.append("main", "reply", {"step": 2})).seq == 3
        for journal in (one, two):
            await journal.close()

    asyncio.run(work())
    assert verify_run(postgres_dsn, run, KEY).intact


@pytest.mark.parametrize("came_back", [True, False])
def test_an_append_that_waited_while_its_lease_went_is_refused(postgres_dsn, run, came_back):
    """The token is taken when the append is called, not when it is written."""

    async def work():
        journal = await with_agents(postgres_dsn, run, "main")
        (lease,) = await journal.claim("one", 60)
        lock = await journal._pool.acquire()
        transaction = lock.transaction()
        await transaction.start()
        await lock.execute("SELECT 1 FROM perilune_journal_1.runs WHERE run = $1 FOR UPDATE", run)
        blocked = asyncio.create_task(journal.append("run", "control", {}))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(journal.append("main", "reply", {"step": 0}))
        await asyncio.sleep(0.01)
        await journal.release([lease])
        if came_back:
            await journal.claim("one", 60)
        await transaction.rollback()
        await journal._pool.release(lock)
        await blocked
        with pytest.raises(StaleLease):
            await waiting
        if not came_back:
            await journal.claim("one", 60)
        assert (await journal.append("main", "reply", {"step": 0})).seq == 1
        await journal.close()

    asyncio.run(work())


def test_a_new_holder_continues_what_it_never_heard_of(postgres_dsn, run):
    async def work():
        one, two = await with_agents(postgres_dsn, run, "main"), await joined(postgres_dsn, run)
        await two._listener.remove_listener(two._channel, two._told)
        leases = await one.claim("one", 60)
        await one.append("main", "reply", {"step": 0})
        await one.append("main#0.0", "call_started", {})
        await one.release(leases)
        await two.claim("two", 60)
        assert (await two.append("main", "reply", {"step": 1})).seq == 2
        assert (await two.append("main#0.0", "outcome", {})).seq == 1
        for journal in (one, two):
            await journal.close()

    asyncio.run(work())


def test_a_finished_agent_is_not_claimed_again(postgres_dsn, run):
    async def work():
        async with await with_agents(postgres_dsn, run, "main") as journal:
            (lease,) = await journal.claim("one", 60)
            await journal.append("main", "finished", {"status": "done"})
            await journal.release([lease])
            assert await journal.claim("two", 60) == []
            with pytest.raises(StaleLease):
                await journal.append("main", "started", {})

    asyncio.run(work())


def test_without_leases_a_journal_writes_as_one_process_does(postgres_dsn, run):
    async def work():
        async with await PostgresJournal.open(postgres_dsn, run=run, key=None) as journal:
            await journal.append("main", "started", {})
            await journal.append("main", "reply", {})
            assert await journal.claim("one", 60) == []

    asyncio.run(work())


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["claim", "append", "release", "steal", "renew"]), st.integers(0, 1)), max_size=25
    )
)
def test_whatever_workers_do_an_agent_is_written_under_rising_tokens_only(postgres_dsn, moves):
    """Against a model: the agent's holder is the last who claimed it; only that one's appends get through."""
    run = f"leases-{os.getpid()}-{next(NUMBERS)}"

    async def work():
        journals = [await with_agents(postgres_dsn, run, "main"), await joined(postgres_dsn, run)]
        leases, holder, written = [None, None], None, 0
        for move, who in moves:
            journal, mine = journals[who], leases[who]
            if move == "claim":
                claimed = await journal.claim(f"worker-{who}", 60)
                assert bool(claimed) == (holder is None)
                if claimed:
                    leases[who], holder = claimed[0], who
            elif move == "append":
                try:
                    await journal.append("main", "reply", {"number": written}, {"worker": who})
                    assert holder == who
                    written += 1
                except StaleLease:
                    assert holder != who
            elif move == "release" and mine is not None:
                await journal.release([mine])
                holder = None if holder == who else holder
            elif move == "renew" and mine is not None:
                assert bool(await journal.renew([mine], 60)) == (holder == who)
            elif move == "steal":  # time passes until every lease has expired
                await journal._pool.execute(
                    "UPDATE perilune_journal_1.leases SET expires = '-infinity' WHERE run = $1", run
                )
                claimed = await journal.claim(f"worker-{who}", 60)
                leases[who], holder = claimed[0], who
        numbers = [event.read()["number"] for event in await journals[0].read("main") if event.kind == "reply"]
        assert numbers == list(range(written))
        for journal in journals:
            await journal.close()

    asyncio.run(work())


@pytest.mark.parametrize("agents, kills", [(6, 1), pytest.param(40, 5, marks=pytest.mark.long)])
def test_a_killed_worker_is_replaced_and_no_step_is_written_twice(postgres_dsn, run, agents, kills):
    seconds, steps = 1.0, 12

    async def prepare():
        await (await with_agents(postgres_dsn, run, *(f"agent-{number}" for number in range(agents)))).close()

    asyncio.run(prepare())
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}

    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.swarm.journal.leased_worker"]
        command += [postgres_dsn, run, name, str(seconds), str(steps)]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)

    survivor, victims = start("survivor"), []
    for number in range(kills):
        victim = start(f"victim-{number}")
        assert victim.stdout is not None and victim.stdout.readline().startswith("claimed")
        time.sleep(0.05)
        victim.kill()
        victim.wait()
        victims.append(victim)
    try:
        survivor.communicate(timeout=120)
        assert survivor.returncode == 0
    finally:
        survivor.kill()
    with PostgresReader(postgres_dsn, run) as reader:
        events = list(reader.events())
    for number in range(agents):
        mine = [event for event in events if event.chain == f"agent-{number}"]
        assert [event.read()["step"] for event in mine if event.kind == "reply"] == list(range(steps))
        assert mine[-1].kind == "finished"
    assert verify_run(postgres_dsn, run, KEY).intact


def test_the_agent_of_a_chain():
    assert [agent_of(chain) for chain in ("run", "main", "main#2.0", "main/a-0.1#3.2")] == [
        "run",
        "main",
        "main",
        "main/a-0.1",
    ]


def test_a_closed_journal_claims_nothing(postgres_dsn, run):
    async def work():
        journal = await joined(postgres_dsn, run)
        await journal.close()
        with pytest.raises(JournalError, match="is closed"):
            await journal.claim("one", 1)

    asyncio.run(work())
