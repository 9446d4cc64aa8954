"""Random runs of a swarm as event logs, with the happens-before graph kept on the side.

The simulation knows what every tool does to time: it interleaves agents at random, and writes down for each step which
steps it follows from. `Run.edges` is that truth; it shares nothing with the code under test but the events.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from perilune.swarm.journal.event import Event, canonical, first_link, link

Node = tuple[str, int]
"""Agent and how many steps it had made before."""


class Log:
    """Events with correct chains."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._heads: dict[str, tuple[int, bytes]] = {}

    def add(self, chain: str, kind: str, body: dict[str, Any], *, time: float = 0.0, **note: Any) -> None:
        seq, head = self._heads.get(chain, (0, first_link(chain)))
        data = canonical(body)
        new = link(head, kind, data)
        self._heads[chain] = (seq + 1, new)
        self.events.append(Event(len(self.events), chain, seq, kind, data, canonical(note), time, new))

    def start(self, agent: str, parent: str | None = None, call: str | None = None, task: str | None = "work") -> None:
        body = {"parent": parent, "call": call, "name": agent, "depth": agent.count("/"), "model": "scripted"}
        body |= {"system_prompt": "You work.", "task": task, "tools": [], "rights": {}, "budget": {}, "tainted": False}
        self.add(agent, "started", body)

    def reply(self, agent: str, step: int, *calls: tuple[str, dict[str, Any]], text: str = "", **when: float) -> None:
        wire: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            functions = [{"name": name, "arguments": canonical(arguments).decode()} for name, arguments in calls]
            wire["tool_calls"] = [
                {"id": f"{name}:{at}", "type": "function", "function": each}
                for at, (each, (name, _)) in enumerate(zip(functions, calls, strict=True))
            ]
        body = {"step": step, "message": wire, "finish": "stop", "reads": [], "tokens": None}
        self.add(agent, "reply", body, time=when.get("time", 0.0), seconds=when.get("seconds", 0.0))

    def outcome(
        self, agent: str, step: int, index: int, tool: str, *, text: str = "", spawned: tuple = (), joined: tuple = ()
    ) -> None:
        body = {"tool": tool, "call_id": f"{tool}:{index}", "status": "ok", "text": text, "result": None}
        body |= {"spawned": list(spawned), "joined": list(joined), "untrusted": False}
        self.add(f"{agent}#{step}.{index}", "outcome", body, seconds=0.0)

    def finish(self, agent: str, status: str = "done") -> None:
        self.add(agent, "finished", {"status": status, "result": None, "error": None, "reads": []})


@dataclass
class Actor:
    name: str
    parent: Actor | None
    steps_left: int
    depth: int
    step: int = -1
    made: int = 0
    """Steps, summaries included."""
    known: set[Node] = field(default_factory=set)
    """What its next step follows from."""
    at_step: dict[int, Node] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    children: list[Actor] = field(default_factory=list)
    inbox: list[tuple[Actor, int]] = field(default_factory=list)
    items: list[int] | None = None
    """Steps of each item, for a worker of map_task."""
    delivered: set[Node] | None = None
    has_ended: bool = False


@dataclass
class Call:
    tool: str
    is_ready: Callable[[], bool]
    joined: Callable[[], list[Actor]]


class Run:
    def __init__(self, seed: int, *, most_steps: int = 60) -> None:
        self.draw = random.Random(seed)
        self.log = Log()
        self.nodes: list[Node] = []
        self.edges: list[tuple[Node, Node]] = []
        self.used: set[str] = set()
        self.most_steps = most_steps
        self.actors: list[Actor] = []
        self._spawn(None, None, self.draw.randint(2, 8))
        while not self.actors[0].has_ended:
            self._tick()

    def _tick(self) -> None:
        alive = [actor for actor in self.actors if not actor.has_ended]
        moves: list[tuple[Actor, int | None]] = [(actor, None) for actor in alive if not actor.calls]
        moves += [(actor, at) for actor in alive for at, call in actor.calls.items() if call.is_ready()]
        actor, at = self.draw.choice(moves)
        if at is None:
            self._turn(actor)
        else:
            self._return(actor, at)

    def _spawn(self, parent: Actor | None, call: str | None, steps: int, items: list[int] | None = None) -> Actor:
        name = "main" if parent is None else f"{parent.name}/a{len(self.actors)}-{call}"
        actor = Actor(name, parent, steps, 0 if parent is None else parent.depth + 1, items=items)
        if parent is not None:
            actor.known = {parent.at_step[parent.step]}
            parent.children.append(actor)
        self.actors.append(actor)
        self.log.start(name, parent.name if parent else None, call, None if items else "work")
        return actor

    def _node(self, actor: Actor) -> None:
        node = (actor.name, actor.made)
        actor.made += 1
        self.nodes.append(node)
        self.edges += [(before, node) for before in actor.known]
        actor.known = {node}

    def _turn(self, actor: Actor) -> None:
        draw = self.draw
        while actor.inbox:
            sender, step = actor.inbox.pop(0)
            body = {"id": "m", "sender": sender.name, "step": step, "text": "hear", "tainted": False}
            self.log.add(actor.name, "message", body)
            actor.known.add(sender.at_step[step])
        if draw.random() < 0.05:
            self.log.add(
                actor.name, "message", {"id": "p", "sender": "user", "step": None, "text": "x", "tainted": False}
            )
        if draw.random() < 0.1:
            how = draw.choice(["hidden", "summary"])
            self.log.add(actor.name, "compacted", {"step": actor.step, "how": how, "summary": "short"})
            if how == "summary":
                self._node(actor)
        if draw.random() < 0.03 and actor.parent is not None:
            self._end(actor, "budget")  # perhaps before its first step, perhaps after results it never used
            return
        if actor.items is not None:
            self._item(actor)
            return
        if actor.steps_left <= 1 or len(self.nodes) >= self.most_steps:
            self._reply(actor, [])
            self._end(actor, "done")
            return
        actor.steps_left -= 1
        self._calls(actor)

    def _item(self, worker: Actor) -> None:
        """One step of a worker; a result at the end of each item."""
        assert worker.items is not None
        if not worker.items:
            self._end(worker, "done")
            return
        if draw_first := worker.items[0]:
            self._reply(worker, [])
            worker.items[0] = draw_first - 1
            return
        worker.items.pop(0)
        self.log.add(worker.name, "result", {"number": 0, "status": "done", "result": None, "error": None, "reads": []})
        worker.delivered = set(worker.known)

    def _reply(self, actor: Actor, tools: list[str]) -> None:
        actor.step += 1
        self._node(actor)
        actor.at_step[actor.step] = (actor.name, actor.made - 1)
        self.log.reply(actor.name, actor.step, *((tool, {}) for tool in tools))

    def _calls(self, actor: Actor) -> None:
        draw = self.draw
        running = [child for child in actor.children if not child.has_ended]
        others = [other for other in self.actors if other is not actor and not other.has_ended]
        choices = ["look", "create_subagent", "list_agents"]
        if actor.depth < 2:
            choices += ["assign_task"] * 4 + ["start_task"] * 3 + ["map_task"]
        if actor.children:
            choices += ["wait"] * 4 + ["read_result"]
        if others:
            choices += ["send"] * 2
        if running:
            choices.append("cancel")
        tools = draw.choices(choices, k=draw.choice([1, 1, 2, 3, 5]))
        self._reply(actor, tools)
        for at, tool in enumerate(tools):
            self.used.add(tool)
            actor.calls[at] = self._call(actor, at, tool, running, others)

    def _call(self, actor: Actor, at: int, tool: str, running: list[Actor], others: list[Actor]) -> Call:
        draw, call = self.draw, f"{actor.step}.{at}"
        if tool == "assign_task":
            child = self._spawn(actor, call, draw.randint(1, 6))
            return Call(tool, lambda: child.has_ended, lambda: [child])
        if tool == "start_task":
            self._spawn(actor, call, draw.randint(1, 6))
        elif tool == "map_task":
            for _ in range(draw.randint(1, 3)):
                self._spawn(actor, call, 0, [draw.randint(0, 2) for _ in range(draw.randint(1, 3))])
        elif tool == "wait":
            handles = draw.sample(actor.children, draw.randint(1, len(actor.children)))
            needed = draw.choice([1, len(handles), draw.randint(1, len(handles))])
            patience = draw.randint(0, 40)  # ticks of the whole run, then it returns with what there is
            started = len(self.log.events)

            def ended() -> list[Actor]:
                return [child for child in handles if child.has_ended]

            return Call(tool, lambda: len(ended()) >= needed or len(self.log.events) > started + patience, ended)
        elif tool == "read_result":
            ready = [child for child in actor.children if child.has_ended or child.delivered is not None]
            child = draw.choice(ready) if ready else None
            return Call(tool, lambda: True, lambda: [child] if child else [])
        elif tool == "send":
            draw.choice(others).inbox.append((actor, actor.step))
        elif tool == "cancel":
            self._cancel(draw.choice(running))
        return Call(tool, lambda: True, list)

    def _return(self, actor: Actor, at: int) -> None:
        call = actor.calls.pop(at)
        joined = call.joined()
        self.log.outcome(actor.name, actor.step, at, call.tool, joined=tuple(child.name for child in joined))
        for child in joined:
            actor.known |= child.known if child.delivered is None else child.delivered

    def _cancel(self, actor: Actor) -> None:
        if actor.has_ended:
            return
        for child in actor.children:
            self._cancel(child)
        late = list(actor.calls.items()) if self.draw.random() < 0.5 else []
        self._end(actor, "cancelled")
        for at, call in late:  # outcomes that come too late to be read
            self.log.outcome(actor.name, actor.step, at, call.tool, joined=tuple(c.name for c in call.joined()))

    def _end(self, actor: Actor, status: str) -> None:
        actor.has_ended = True
        actor.calls.clear()
        actor.delivered = set(actor.known)
        self.log.finish(actor.name, status)
        for child in actor.children:
            self._cancel(child)
