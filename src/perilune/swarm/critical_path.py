"""Critical steps: how long a run is when everything that could run at the same time did.

Steps are calls of a model: replies, and summaries when a context is compacted. One step happens before another when it
is earlier in the same agent, or when its outcome was known there:

    spawn     the parent's step that made the call    ->  the child's first step
    result    the child's end                         ->  the step after the call that returned its result (`joined`),
                                                          and the first step of an agent given it as a task (`after`)
    message   the sender's step                       ->  the receiver's step after it read the message

Critical steps are the number of steps on the longest path in this graph. For a run in stages, where the orchestrator
makes S_main(t) steps and then waits for sub-agents that make S_sub,i(t), this is the published measure

    sum over t of ( S_main(t) + max over i of S_sub,i(t) )                          (K2.5, arXiv 2602.02276)

The level of a step is the length of the longest path that ends with it. From these:

    speed-up    = total steps / critical steps      (the mean number of steps per level)
    width       = steps on the widest level
    efficiency  = speed-up / width                  (1: every level is as wide as the widest)

Events come in the order of their commits, where a cause is always before its effect. Each costs a constant time beside
reading its body, so the same object serves a live view and a finished run. It depends on no clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from perilune.swarm.journal.event import Event


class Step(NamedTuple):
    agent: str
    number: int
    """As in the journal; a summary has the number of the reply before it."""
    kind: Literal["reply", "summary"]


NOTHING = -1
"""No step: before the first of all."""


@dataclass(slots=True)
class _Agent:
    front: int = NOTHING
    """The last step of the longest path that has reached this agent."""
    delivered: int | None = None
    """`front` when its latest result was made: a call that outlived its agent is not in it."""
    replies: dict[int, int] = field(default_factory=dict)


class CriticalPath:
    """Add events in the order of their commits; ask at any time."""

    def __init__(self) -> None:
        self.level_widths: list[int] = []
        """Number of steps on each level, from the first."""
        self._steps: list[Step] = []
        self._levels: list[int] = []
        self._before: list[int] = []
        self._deepest = NOTHING
        self._agents: dict[str, _Agent] = {}

    @property
    def total_steps(self) -> int:
        return len(self._steps)

    @property
    def critical_steps(self) -> int:
        return len(self.level_widths)

    @property
    def agents(self) -> int:
        return len(self._agents)

    @property
    def width(self) -> int:
        return max(self.level_widths, default=0)

    @property
    def speed_up(self) -> float:
        return self.total_steps / self.critical_steps if self._steps else 1.0

    @property
    def efficiency(self) -> float:
        return self.speed_up / self.width if self._steps else 1.0

    def path(self) -> list[Step]:
        """One longest path, from its first step to its last."""
        found = []
        at = self._deepest
        while at != NOTHING:
            found.append(self._steps[at])
            at = self._before[at]
        return found[::-1]

    def level(self, agent: str, number: int) -> int:
        """Of a reply, counted from 1."""
        return self._level(self._agents[agent].replies[number])

    def add(self, event: Event) -> None:
        agent, mark, _ = event.chain.partition("#")
        if event.kind == "outcome" and mark:
            self._read_outcome(event, agent)
        elif event.kind == "started":
            self._start(event)
        elif event.kind == "message":
            self._read_message(event)
        elif event.kind == "reply":
            self._step(event, "reply")
        elif event.kind == "compacted" and event.read()["how"] == "summary":
            self._step(event, "summary")
        elif event.kind in ("result", "finished"):
            state = self._agent(agent, event)
            state.delivered = state.front

    def _start(self, event: Event) -> None:
        body = event.read()
        state = self._agents[event.chain] = _Agent()
        if body["parent"] is not None:
            number = int(body["call"].partition(".")[0])
            state.front = self._reply(body["parent"], number, event)
        for name in body.get("after", ()):
            self._read_end(state, name, event)

    def _read_message(self, event: Event) -> None:
        body = event.read()
        if body["step"] is not None:
            self._learn(self._agent(event.chain, event), self._reply(body["sender"], body["step"], event))

    def _read_outcome(self, event: Event, agent: str) -> None:
        state = self._agent(agent, event)
        for name in event.read()["joined"]:
            self._read_end(state, name, event)

    def _read_end(self, state: _Agent, name: str, event: Event) -> None:
        """What the other knew when its latest result was made is known here."""
        other = self._agent(name, event)
        self._learn(state, other.front if other.delivered is None else other.delivered)

    def _step(self, event: Event, kind: Literal["reply", "summary"]) -> None:
        number = event.read()["step"]
        state = self._agent(event.chain, event)
        new, level = len(self._steps), self._level(state.front) + 1
        self._steps.append(Step(event.chain, number, kind))
        self._levels.append(level)
        self._before.append(state.front)
        if level > len(self.level_widths):
            self.level_widths.append(0)
            self._deepest = new
        self.level_widths[level - 1] += 1
        state.front = new
        if kind == "reply":
            state.replies[number] = new

    def _level(self, step: int) -> int:
        return 0 if step == NOTHING else self._levels[step]

    def _learn(self, state: _Agent, step: int) -> None:
        if self._level(step) > self._level(state.front):
            state.front = step

    def _agent(self, name: str, event: Event) -> _Agent:
        state = self._agents.get(name)
        if state is None:
            raise ValueError(_out_of_order(event, f"agent {name!r} has not started"))
        return state

    def _reply(self, agent: str, number: int, event: Event) -> int:
        step = self._agent(agent, event).replies.get(number)
        if step is None:
            raise ValueError(_out_of_order(event, f"step {number} of {agent!r} is not there"))
        return step

    def plain(self) -> dict[str, Any]:
        return {
            "total_steps": self.total_steps,
            "critical_steps": self.critical_steps,
            "agents": self.agents,
            "width": self.width,
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
        }


def critical_path(events: Iterable[Event]) -> CriticalPath:
    path = CriticalPath()
    for event in events:
        path.add(event)
    return path


def _out_of_order(event: Event, why: str) -> str:
    return f"event {event.index} ({event.kind} on {event.chain!r}): {why}; add all events in the order of their commits"


__all__ = ["CriticalPath", "Step", "critical_path"]
