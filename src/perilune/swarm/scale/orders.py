"""What passes between a run and its workers: orders, letters and outcomes, as plain values.

An order names an agent with all it was created with, its tasks, and its allotment: what was set aside from the run's
budget for it. A worker spends no more than that, so budgets hold across processes. An outcome is the answers with what
the run must learn besides: what was spent, taint, letters to the parent.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from perilune.swarm.agent import Agent, Answer, Letter
from perilune.swarm.budget import ACCOUNTS, COUNTS, Budget, Dimension, Limits, Prices, Reservation
from perilune.swarm.chronicle import artefact_of
from perilune.swarm.client import ModelClient
from perilune.swarm.policy import Policy
from perilune.swarm.prices import BILLIONTHS
from perilune.swarm.rights import Rights
from perilune.swarm.run import Run
from perilune.swarm.sandbox import Sandbox
from perilune.swarm.secrets import Secrets
from perilune.swarm.settings import AgentSpec, SwarmConfig
from perilune.swarm.taint import Taint
from perilune.swarm.tools.tool import Tool

Plain = dict[str, Any]
PART = 4
"""Of an even share: what is given at a time."""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """What a worker gives its agents: made anew in each process."""

    client: ModelClient
    tools: Iterable[Tool] = ()
    policy: Policy = field(default_factory=Policy)
    secrets: Secrets = field(default_factory=Secrets)
    prices: Prices = field(default_factory=Prices)
    open_sandbox: Callable[[Path], Sandbox] | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All a worker needs to know of a run."""

    dsn: str
    run: str
    """Its name in the journal."""
    key: bytes | None
    config: SwarmConfig
    folder: str
    """On a file system that all workers see."""
    workplace: str
    """`package.module:function` of an asynchronous context manager that gives a `Workplace`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Its keyword arguments: plain values."""
    lease_seconds: float = 6.0

    def open_workplace(self) -> AbstractAsyncContextManager[Workplace]:
        module, colon, function = self.workplace.partition(":")
        if not colon:
            raise ValueError(f"workplace {self.workplace!r}: expected package.module:function")
        try:
            make = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"workplace {self.workplace!r} cannot be imported by a worker: {error}") from None
        return make(**self.options)


# Agents --------------------------------------------------------------------------------------------------------------


def order_of(agent: Agent, tasks: Sequence[str], *, many: bool, allotted: Mapping[str, float], is_new: bool) -> Plain:
    seconds = agent.budget.left("seconds")
    return {
        "id": agent.id,
        "spec": asdict(agent.spec),
        "parent": agent.parent.id if agent.parent else None,
        "call": agent.call,
        "depth": agent.depth,
        "model": agent.model,
        "rights": agent.rights.plain(),
        "allotted": dict(allotted) | ({} if seconds == math.inf else {"seconds": seconds}),
        "max_steps": agent.max_steps,
        "taint": list(agent.taint.sources),
        "letters": [asdict(letter) for letter in agent.inbox],
        "tasks": list(tasks),
        "many": many,
        "after": list(agent.after),
        "is_new": is_new,
    }


def agent_of_order(order: Plain, run: Run) -> Agent:
    """The agent as its parent created it; its budget is the allotment."""
    spec = dict(order["spec"])
    spec["limits"] = Limits(**spec["limits"])
    spec["tools"] = None if spec["tools"] is None else tuple(spec["tools"])
    rights = Rights.from_plain(order["rights"])
    return Agent(
        id=order["id"],
        spec=AgentSpec(**spec),
        parent=None if order["parent"] is None else _distant(order["parent"], order["depth"] - 1),
        call=order["call"],
        depth=order["depth"],
        model=order["model"],
        rights=rights,
        budget=Budget.root(Limits(**order["allotted"]), name=order["id"]),
        tools=run.tools_for(rights),
        taint=Taint(*order["taint"]),
        max_steps=order["max_steps"],
        after=tuple(order["after"]),
    )


def _distant(name: str, depth: int) -> Agent:
    """A parent that runs in another process: a name to write to."""
    spec = AgentSpec(name=name.rpartition("/")[2], system_prompt="")
    budget, rights, taint = Budget.root(Limits(), name=name), Rights(), Taint()
    made = {"id": name, "spec": spec, "depth": depth, "rights": rights, "budget": budget, "taint": taint}
    return Agent(**made, parent=None, call=None, model="", tools={}, max_steps=None)


def letter_of(plain: Mapping[str, Any]) -> Letter:
    return Letter(**plain)


def plain_answer(answer: Answer) -> Plain:
    return asdict(answer) | {"artefact": answer.artefact.plain() if answer.artefact else None}


def answer_of(plain: Mapping[str, Any]) -> Answer:
    return Answer(
        status=plain["status"],
        text=plain["text"],
        artefact=artefact_of(plain["artefact"]),
        error=plain["error"],
        untrusted=plain["untrusted"],
    )


# Budgets -------------------------------------------------------------------------------------------------------------


def allotment(agent: Agent, waiting: int) -> dict[str, float]:
    """What to set aside for an agent that runs elsewhere: its own limits whole; of what it shares with others, an even
    part for it, for each of `waiting` agents that come after it, and for those that stay here. An agent that creates
    no others begins with less, and its worker asks for more."""
    allotted: dict[str, float] = {}
    for dimension in ACCOUNTS:
        left = left_of(agent.budget, dimension)
        if left == math.inf:
            continue
        own = getattr(agent.spec.limits, dimension) is not None
        parts = 1 if own else waiting + 2 if agent.rights.depth else PART * (waiting + 2)
        allotted[dimension] = 0 if dimension == "agents" and not agent.rights.depth else _part(dimension, left, parts)
    return allotted


def more_for(budget: Budget, short: Mapping[str, float], orders: int) -> dict[str, float]:
    """What to give an agent elsewhere that is so much short: at least that, if it is there; of counts what there is."""
    given: dict[str, float] = {}
    for dimension, amount in short.items():
        left = left_of(budget, dimension)
        if left >= amount:
            given[dimension] = max(amount, _part(dimension, left, PART * (orders + 1)))
        elif dimension in COUNTS:
            given[dimension] = left
    return {dimension: amount for dimension, amount in given.items() if amount > 0}


def settle(budget: Budget, reserved: Sequence[tuple[Reservation, Mapping[str, float]]], spent: Plain | None) -> None:
    """Count what a worker spent, and give the rest back. Nobody knows (None): all counts as spent."""
    rest = dict(spent or {})
    for at, (reservation, amounts) in enumerate(reserved):
        if spent is None:
            reservation.settle()
            continue
        used = {name: min(rest.get(name, 0), amount) for name, amount in amounts.items()}
        if at == len(reserved) - 1:  # an endpoint that ignores `max_tokens`: the excess is counted as one
            used |= {name: rest.get(name, 0) for name in used if name not in COUNTS}
        for name, amount in used.items():
            rest[name] = max(0, rest.get(name, 0) - amount)
        reservation.settle(**used)
    budget.restore(**rest)


def left_of(budget: Budget, dimension: str) -> float:
    return budget.left(cast(Dimension, dimension))


def _part(dimension: str, left: float, parts: int) -> float:
    if dimension == "cost":
        return round(left * BILLIONTHS) // parts / BILLIONTHS
    return max(int(left) // parts, min(int(left), 1))


__all__ = [
    "Plain",
    "Plan",
    "Workplace",
    "agent_of_order",
    "allotment",
    "answer_of",
    "left_of",
    "letter_of",
    "more_for",
    "order_of",
    "plain_answer",
    "settle",
]
