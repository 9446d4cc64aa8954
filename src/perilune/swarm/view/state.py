"""A run as a view shows it: agents, timeline, totals. An incremental projection of the journal.

`apply` takes events in the order of their index. The state depends on the events alone, so a view of a live run and one
of the finished file agree, however the events were cut into batches. Memory is bounded per agent; whole transcripts
stay in the journal and are read when somebody looks (`transcript.py`).

`snapshot` is the whole state, `take_delta` what changed since the last call: a viewer holds a snapshot and adds deltas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from perilune.swarm.critical_path import CriticalPath
from perilune.swarm.journal.event import Event
from perilune.swarm.view.agent_state import ENDED, MODEL, TOOL, WAIT, WAITING_TOOLS, AgentState, Bar, cut
from perilune.swarm.view.controls import ApprovalRequest, plain
from perilune.swarm.view.width_history import WidthHistory

Cost = Callable[[str, int, int], float]
MAX_LABELS = 1000
STATUSES = ("running", "waiting", "queued", "done", "failed", "cancelled", "budget")


class RunState:
    def __init__(self, cost: Cost | None = None) -> None:
        """`cost` gives the price of a call from model, prompt tokens and completion tokens."""
        self._cost = cost
        self.index = -1
        self.agents: list[AgentState] = []
        self.by_id: dict[str, AgentState] = {}
        self.task = ""
        self.model = ""
        self.status = "running"
        self.error = ""
        self.limits: dict[str, Any] = {}
        self.answer: dict[str, Any] | None = None
        self.began: float | None = None
        """Seconds since the epoch; all other times count from here, in milliseconds."""
        self.ended: int | None = None
        self.last = 0
        self.steps = 0
        self.model_calls = 0
        self.tool_calls = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cost = 0.0
        self.counts = dict.fromkeys(STATUSES, 0)
        self.width = WidthHistory()
        self.labels: list[str] = []
        self._path: CriticalPath | None = CriticalPath()
        self._path_sent: list[str] = []
        self.approvals: tuple[ApprovalRequest, ...] = ()
        self._label_index: dict[str, int] = {}
        self._born: dict[int, None] = {}
        self._changed: dict[int, None] = {}
        self._bars: list[tuple[int, Bar]] = []
        self._rebarred: dict[int, None] = {}
        self._labels_sent = 0
        self._run_changed = False
        self._approvals_changed = False

    # Events in -------------------------------------------------------------------------------------------------------

    def apply(self, events: Iterable[Event]) -> None:
        """Take events in order; those already taken are skipped."""
        for event in events:
            if event.index > self.index:
                self._apply(event)
                self._follow_path(event)
                self.index = event.index

    def _apply(self, event: Event) -> None:
        if self.began is None:
            self.began = event.time
        # Clocks of several writers differ a little; time on the screen only moves on.
        now = self.last = max(self.last, round((event.time - self.began) * 1000))
        if event.chain == "run":
            self._apply_to_run(event, now)
            return
        owner, hash_sign, call = event.chain.rpartition("#")
        agent = self._agent(owner if hash_sign else event.chain)
        agent.entries += 1
        agent.length += not hash_sign
        if hash_sign:
            if event.kind == "outcome":
                self._outcome(agent, call, event, now)
        elif event.kind == "reply":
            self._reply(agent, event, now)
        elif event.kind == "started":
            self._started(agent, event, now)
        elif event.kind == "finished":
            self._finished(agent, event, now)
        elif event.kind == "task":
            agent.tasks += 1
            agent.task = cut(event.read().get("text") or "", 400)
            self._born[agent.number] = None
            agent.thinking, agent.since = True, now
        elif event.kind == "message":
            agent.tainted = agent.tainted or bool(event.read().get("tainted"))
        elif event.kind == "compacted" and event.read().get("how") == "summary":
            self._use_model(agent, event, int(event.read().get("step") or 0), now)
            agent.since = now
        self._settle(agent, now)

    def _follow_path(self, event: Event) -> None:
        if self._path is None:
            return
        try:
            self._path.add(event)
        except (ValueError, KeyError, TypeError, AttributeError):
            # A journal that was cut or is strange has no critical path, but everything else can still be shown.
            self._path = None

    @property
    def critical_steps(self) -> int | None:
        """Steps on the longest chain that had to follow each other; None where the journal does not tell."""
        return self._path.critical_steps if self._path else None

    def critical_path(self) -> list[str]:
        """One such chain: `NUMBER.STEP` of agents and their steps."""
        steps = self._path.path() if self._path else []
        return [f"{self.by_id[step.agent].number}.{step.number}" for step in steps]

    def _apply_to_run(self, event: Event, now: int) -> None:
        body = event.read()
        self._run_changed = True
        if event.kind == "run_started":
            self.task = cut(body.get("task", ""), 2000)
            self.model = cut(body.get("model", ""), 120)
            self.limits = body.get("limits") or {}
        elif event.kind == "run_finished":
            self.status = cut(body.get("status", "done"), 20)
            self.answer = body.get("answer")
            self.error = cut(body.get("error") or "", 2000)
            self.ended = now

    def _started(self, agent: AgentState, event: Event, now: int) -> None:
        body = event.read()
        parent = self.by_id.get(body.get("parent") or "")
        agent.name = cut(body.get("name") or agent.id, 120)
        agent.parent = None if parent is None or parent is agent else parent.number
        agent.depth = int(body.get("depth") or 0)
        agent.model = cut(body.get("model") or "", 120)
        agent.task = cut(body.get("task") or "", 400)
        agent.budget = body.get("budget") or {}
        agent.started = agent.since = now
        agent.tainted = bool(body.get("tainted"))
        agent.thinking = True
        self._born[agent.number] = None

    def _reply(self, agent: AgentState, event: Event, now: int) -> None:
        body = event.read()
        step = int(body.get("step") or 0)
        self._use_model(agent, event, step, now)
        calls = (body.get("message") or {}).get("tool_calls") or ()
        agent.thinking = False
        agent.open = {
            f"{step}.{index}": cut((call.get("function") or {}).get("name", ""), 60) for index, call in enumerate(calls)
        }
        agent.since = now

    def _use_model(self, agent: AgentState, event: Event, step: int, now: int) -> None:
        """A model call ended: count it and draw it."""
        note = event.read_note()
        prompt, completion = int(note.get("prompt_tokens") or 0), int(note.get("completion_tokens") or 0)
        cost = self._cost(agent.model, prompt, completion) if self._cost else 0.0
        agent.steps += 1
        agent.prompt_tokens += prompt
        agent.completion_tokens += completion
        agent.cost += cost
        self.steps += 1
        self.model_calls += int(note.get("attempts") or 1)
        self.prompt_tokens += prompt
        self.completion_tokens += completion
        self.cost += cost
        self._bar(agent, MODEL, now, note, step, -1, failed=False)

    def _outcome(self, agent: AgentState, call: str, event: Event, now: int) -> None:
        body, note = event.read(), event.read_note()
        tool = cut(body.get("tool") or agent.open.get(call, ""), 60)
        self.tool_calls += 1
        kind = WAIT if tool in WAITING_TOOLS else TOOL
        step = int(number) if (number := call.partition(".")[0]).isdecimal() else 0
        failed = body.get("status") not in ("ok", None)
        self._bar(agent, kind, now, note, step, self._label(tool), failed=failed)
        agent.open.pop(call, None)
        agent.tainted = agent.tainted or bool(body.get("untrusted"))
        for child in body.get("spawned") or ():
            if child not in self.by_id:
                self._agent(child, parent=agent)
        if not agent.open and agent.ended is None:
            agent.thinking, agent.since = True, now

    def _finished(self, agent: AgentState, event: Event, now: int) -> None:
        body = event.read()
        status = body.get("status")
        agent.final = status if status in ENDED else "failed"
        agent.error = cut(body.get("error") or "", 400)
        agent.result = body.get("result")
        agent.ended = agent.since = now
        agent.open = {}
        agent.thinking = False

    def _agent(self, id: str, parent: AgentState | None = None) -> AgentState:
        agent = self.by_id.get(id)
        if agent is None:
            depth = parent.depth + 1 if parent else 0
            name = cut(id.rpartition("/")[2], 120)
            agent = AgentState(len(self.agents), id, name, parent.number if parent else None, depth)
            agent.since = self.last
            self.agents.append(agent)
            self.by_id[id] = agent
            self.counts["queued"] += 1
            self._born[agent.number] = None
            self._changed[agent.number] = None
        return agent

    def _settle(self, agent: AgentState, now: int) -> None:
        """Bring status, counts and width up to date after something happened to an agent."""
        status = agent.status_now()
        if status != agent.status:
            self.counts[agent.status] -= 1
            self.counts[status] += 1
            agent.status = status
        if self.counts["running"] != self.width.now:
            self.width.change(now, self.counts["running"])
        self._changed[agent.number] = None

    def _bar(
        self,
        agent: AgentState,
        kind: int,
        now: int,
        note: dict[str, Any],
        step: int,
        label: int,
        *,
        failed: bool,
    ) -> None:
        seconds = note.get("seconds")
        start = agent.since if seconds is None else max(agent.started or 0, now - round(float(seconds) * 1000))
        bar = (kind, min(start, now), now, step, label, int(failed))
        if agent.add_bar(bar):
            self._rebarred[agent.number] = None
        else:
            self._bars.append((agent.number, bar))

    def _label(self, text: str) -> int:
        index = self._label_index.get(text)
        if index is None:
            if len(self.labels) >= MAX_LABELS:
                return -1
            index = self._label_index[text] = len(self.labels)
            self.labels.append(text)
        return index

    def set_approvals(self, requests: Sequence[ApprovalRequest]) -> None:
        """Which calls wait for a person now. They are not in the journal until they are decided."""
        requests = tuple(requests)
        if requests == self.approvals:
            return
        touched = {request.agent for request in (*self.approvals, *requests)}
        self.approvals, self._approvals_changed = requests, True
        for id in touched:
            if agent := self.by_id.get(id):
                agent.asking = sum(request.agent == id for request in requests)
                self._settle(agent, self.last)

    # State out -------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "model": self.model,
            "status": self.status,
            "error": self.error,
            "limits": self.limits,
            "answer": self.answer,
            "began": self.began,
            "ended": self.ended,
        }

    def totals(self) -> dict[str, Any]:
        return {
            "last": self.last,
            "agents": len(self.agents),
            "counts": self.counts,
            "steps": self.steps,
            "critical_steps": self.critical_steps,
            "model_calls": self.model_calls,
            "tool_calls": self.tool_calls,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cost": round(self.cost, 6),
            "width": self.width.now,
            "peak": self.width.peak,
        }

    def snapshot(self, *, bars: bool = True) -> dict[str, Any]:
        """The whole state. Without bars for a viewer that has those of the whole run and looks at an earlier moment."""
        snapshot: dict[str, Any] = {
            "index": self.index,
            "run": self.run(),
            "totals": self.totals(),
            "born": [agent.born() for agent in self.agents],
            "agents": [agent.live() for agent in self.agents],
            "labels": self.labels,
            "width": self.width.plain(),
            "critical": self.critical_path(),
            "approvals": [shown(request) for request in self.approvals],
        }
        if bars:
            snapshot["all_bars"] = {agent.number: agent.bars for agent in self.agents if agent.bars}
        return snapshot

    def take_delta(self) -> dict[str, Any] | None:
        """What changed since the last call, or None."""
        if not (self._changed or self._run_changed or self._approvals_changed):
            return None
        delta: dict[str, Any] = {"index": self.index, "totals": self.totals()}
        if self._run_changed:
            delta["run"] = self.run()
        if self._born:
            delta["born"] = [self.agents[number].born() for number in self._born]
        delta["agents"] = [self.agents[number].live() for number in self._changed]
        if len(self.labels) > self._labels_sent:
            delta["labels_from"], delta["labels"] = self._labels_sent, self.labels[self._labels_sent :]
            self._labels_sent = len(self.labels)
        if self._rebarred:
            delta["all_bars"] = {number: self.agents[number].bars for number in self._rebarred}
        if self._bars:
            delta["bars"] = [(number, *bar) for number, bar in self._bars if number not in self._rebarred]
        if (path := self.critical_path()) != self._path_sent:
            delta["critical"] = self._path_sent = path
        if width := self.width.take_changes():
            delta["width"] = width
        if self._approvals_changed:
            delta["approvals"] = [shown(request) for request in self.approvals]
        self._born, self._changed, self._rebarred, self._bars = {}, {}, {}, []
        self._run_changed = self._approvals_changed = False
        return delta


def shown(request: ApprovalRequest, length: int = 4000) -> dict[str, Any]:
    """A request with the beginning of its arguments; the page fetches long ones before it lets anybody allow them."""
    whole = len(request.arguments) <= length
    return {**plain(request), "arguments": request.arguments[:length], "whole": whole}


def encode(state: dict[str, Any]) -> bytes:
    return orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS)
