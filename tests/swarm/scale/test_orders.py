"""Contracts of orders: an agent crosses as it was made, and what workers spend never exceeds what was set aside."""

from contextlib import suppress
from pathlib import Path

import orjson
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm import compose, orchestrator
from perilune.swarm.agent import Agent, Answer, Letter, start_body
from perilune.swarm.approvals import ApprovalDesk
from perilune.swarm.budget import Budget, BudgetExceeded, Limits, Prices
from perilune.swarm.journal.event import Artefact
from perilune.swarm.policy import Policy
from perilune.swarm.rights import ANY, Rights
from perilune.swarm.run import Run
from perilune.swarm.scale.orders import (
    agent_of_order,
    allotment,
    answer_of,
    left_of,
    letter_of,
    more_for,
    order_of,
    plain_answer,
    settle,
)
from perilune.swarm.secrets import Secrets
from perilune.swarm.settings import AgentSpec, SwarmConfig
from perilune.swarm.taint import Taint
from tests.swarm.scale.workplaces import tools

NAMED = {**orchestrator.TOOLS, **compose.TOOLS} | {each.name: each for each in tools("unused")}


def small_run() -> Run:
    nothing: dict = dict.fromkeys(("client", "chronicle", "results", "scheduler"))
    return Run(
        **nothing,
        config=SwarmConfig(model="m"),
        tools=NAMED,
        policy=Policy(),
        desk=ApprovalDesk(),
        secrets=Secrets(),
        prices=Prices(),
        folder=Path("unused"),
    )


def agent(budget: Budget, *, limits: Limits | None = None, depth: int = 0, parent: Agent | None = None) -> Agent:
    rights = Rights(tools=ANY, depth=depth)
    return Agent(
        id="main/worker-1.0",
        spec=AgentSpec(
            name="worker", system_prompt="Work.", limits=limits or Limits(), output_schema={"type": "string"}
        ),
        parent=parent,
        call="1.0",
        depth=1,
        model="m",
        rights=rights,
        budget=budget.child(limits),
        tools=small_run().tools_for(rights),
        taint=Taint("web_fetch at step 0"),
        max_steps=7,
        after=("main/other-0.0",),
    )


def test_an_agent_crosses_as_it_was_made():
    root = Budget.root(Limits(calls=100, agents=5, seconds=60))
    main = agent(root, depth=1)
    main.id = "main"
    sent = agent(root, limits=Limits(calls=10), parent=main)
    sent.inbox.append(Letter(id="a#0.0", sender="user", step=None, text="hello"))
    order = order_of(sent, ["do it"], many=False, allotted=allotment(sent, 0), is_new=True)
    got = agent_of_order(orjson.loads(orjson.dumps(order)), small_run())
    assert start_body(got, "do it") == start_body(sent, "do it")
    assert (got.max_steps, got.spec, got.taint.sources) == (sent.max_steps, sent.spec, sent.taint.sources)
    assert [letter_of(each) for each in order["letters"]] == list(sent.inbox)
    assert got.budget.left("calls") == 10 and 0 < got.budget.left("seconds") <= 60


def test_an_answer_crosses_as_it_is():
    answer = Answer(status="done", text="x", artefact=Artefact("ab" * 32, 3), error=None, untrusted=True)
    assert answer_of(orjson.loads(orjson.dumps(plain_answer(answer)))) == answer


amounts = st.integers(0, 40)


@given(
    limits=st.fixed_dictionaries({"calls": amounts, "tokens": amounts, "cost": amounts.map(lambda units: units / 1e9)}),
    agents=st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=6), min_size=1, max_size=5),
)
def test_whatever_workers_do_the_run_is_never_overspent_and_the_rest_comes_back(limits, agents):
    root = Budget.root(Limits(**limits, agents=100))
    at_work = []
    for number, steps in enumerate(agents):
        one = agent(root)
        allotted = allotment(one, len(agents) - number - 1)
        reserved = [(one.budget.reserve(**allotted), allotted)]
        order = order_of(one, ["t"], many=False, allotted=allotted, is_new=True)
        at_work.append((one, reserved, agent_of_order(order, small_run()), list(steps)))
    while any(steps for *_, steps in at_work):
        for one, reserved, there, steps in at_work:
            if not steps:
                continue
            wanted, asks = steps.pop()
            need = {"calls": 1, "tokens": wanted, "cost": wanted * 1e-9}
            short = {name: need[name] - left_of(there.budget, name) for name in need}
            short = {name: amount for name, amount in short.items() if amount > 0}
            if short and asks and (given := more_for(one.budget, short, len(agents))):
                reserved.append((one.budget.reserve(**given), given))
                there.budget.grow(**given)
            with suppress(BudgetExceeded):
                there.budget.reserve(**need).settle()
    spent = {name: 0.0 for name in limits}
    for one, reserved, there, _ in at_work:
        lines = there.budget.snapshot()
        settle(one.budget, reserved, {name: lines[name]["spent"] for name in (*limits, "steps", "agents")})
        one.budget.close()
        for name in limits:
            spent[name] += lines[name]["spent"]
    lines = root.snapshot()
    for name, limit in limits.items():
        assert spent[name] <= limit + 1e-12 and lines[name]["reserved"] == lines[name]["excess"] == 0
        assert abs(lines[name]["spent"] - spent[name]) < 1e-12


def test_what_nobody_knows_counts_as_spent():
    root = Budget.root(Limits(calls=20, agents=3))
    one = agent(root, limits=Limits(calls=8))
    allotted = allotment(one, 0)
    settle(one.budget, [(one.budget.reserve(**allotted), allotted)], None)
    one.budget.close()
    assert root.left("calls") == 12


def test_tokens_beyond_the_allotment_are_reported_as_excess():
    root = Budget.root(Limits(tokens=100, agents=3))
    one = agent(root, limits=Limits(tokens=50))
    allotted = allotment(one, 0)
    settle(one.budget, [(one.budget.reserve(**allotted), allotted)], {"tokens": 60, "calls": 1})
    assert root.snapshot()["tokens"]["excess"] == 10 and root.snapshot()["calls"]["spent"] == 1
