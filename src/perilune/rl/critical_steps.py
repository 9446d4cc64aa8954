"""Steps of a swarm's episode, how many of them lie on the critical path, and the ledger that ends it at a cap.

A step is a call of a tool. The path goes through the orchestrator's replies; each is a stage:

    CriticalSteps = sum over replies t of ( S_main(t) + max over workers i started by t of S_i )      (arXiv 2602.02276)

    S_main(t)   1 for every direct call (search, open, a tool that does not exist, ...), even of one reply: only workers
                make work parallel; 1 for all create_subagent together; 1 for all assign_task together
    S_i         1 for every call of the worker
    answer      costs nothing and ends the episode; whatever else its reply calls is refused

`StepLedger` charges a reply before any of its calls runs, so no order of events can pass the cap: what does not fit is
refused, and the workers of a stage share out what the stage left, each of them alone. `steps_of` reads the same numbers
from what an episode noted.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CREATE, ASSIGN = "create_subagent", "assign_task"
MAIN = "main"
NO_STEPS = "no steps are left: this call was not made"
AFTER_ANSWER = "the answer was given in the same reply: this call was not made"


@dataclass(frozen=True, kw_only=True)
class Steps:
    critical: int
    total: int
    """All calls that ran, of everybody."""
    width: int
    """Most workers in one stage."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Steps of each worker, by its id."""


@dataclass(kw_only=True)
class StepLedger:
    """The steps of one episode while it lasts."""

    cap: int
    worker_steps: int
    max_workers: int
    answer: str = "answer"
    critical: int = 0
    """Of the stages that are over, and of the orchestrator's part in the last."""
    is_answered: bool = False
    _assigned: int = 0
    _room: int = 0
    """Steps that each worker of this stage may take."""
    _stage: dict[str, int] = field(default_factory=dict)
    """Steps of the workers of this stage."""

    def is_last(self, agent: str) -> bool:
        """Whether the next reply of the agent is its last: it has no steps left."""
        if agent == MAIN:
            self._close_stage()
            return self.critical >= self.cap
        return self._stage.get(agent, 0) >= self._room

    def charge(self, agent: str, calls: Sequence[str]) -> tuple[int, list[str | None]]:
        """What a reply with these calls costs, and for each of them None, or why it is not made."""
        return self._charge_main(calls) if agent == MAIN else self._charge_worker(agent, calls)

    def _charge_main(self, calls: Sequence[str]) -> tuple[int, list[str | None]]:
        self._close_stage()
        if self.answer in calls:
            self.is_answered = True
            first = list(calls).index(self.answer)
            return 0, [None if place == first else AFTER_ANSWER for place in range(len(calls))]
        left, cost, groups = self.cap - self.critical, 0, set[str]()
        verdicts: list[str | None] = []
        for name in calls:
            price = 0 if name in groups else 1
            if cost + price > left:
                verdicts.append(NO_STEPS)
                continue
            cost += price
            if name in (CREATE, ASSIGN):
                groups.add(name)
            self._assigned += name == ASSIGN
            many = name == ASSIGN and self._assigned > self.max_workers
            verdicts.append(f"at most {self.max_workers} tasks can be assigned: this one was not" if many else None)
        self.critical += cost
        self._room = min(self.worker_steps, self.cap - self.critical)
        return cost, verdicts

    def _charge_worker(self, agent: str, calls: Sequence[str]) -> tuple[int, list[str | None]]:
        used = self._stage.setdefault(agent, 0)
        cost = min(len(calls), self._room - used)
        self._stage[agent] = used + cost
        return cost, [None if place < cost else NO_STEPS for place in range(len(calls))]

    def _close_stage(self) -> None:
        """The orchestrator goes on: the workers of its last reply have ended."""
        self.critical += max(self._stage.values(), default=0)
        self._stage = {}


def steps_of(events: Iterable[Mapping[str, Any]]) -> Steps:
    """From what an episode noted, in any order of workers that ran at the same time."""
    costs: dict[str, int] = {}
    stages: dict[int, int] = {}
    started: dict[str, int] = {}
    total = 0
    for event in events:
        chain, kind, body = event["chain"], event["kind"], event["body"]
        if kind == "reply" and chain == MAIN:
            stages[body["step"]] = stages.get(body["step"], 0) + body["cost"]
        elif kind == "reply":
            costs[chain] = costs.get(chain, 0) + body["cost"]
        elif kind == "started" and body["parent"] == MAIN:
            started[chain] = int(str(body["call"]).partition(".")[0])
        elif kind == "outcome":
            total += body["ran"]
    longest: dict[int, int] = {}
    widths: dict[int, int] = {}
    for agent, step in started.items():
        longest[step] = max(longest.get(step, 0), costs.get(agent, 0))
        widths[step] = widths.get(step, 0) + 1
    return Steps(
        critical=sum(stages.values()) + sum(longest.values()),
        total=total,
        width=max(widths.values(), default=0),
        workers={agent: costs.get(agent, 0) for agent in started},
    )
