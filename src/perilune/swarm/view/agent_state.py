"""One agent as a view shows it: what it does now, what it did (as bars on a timeline), what it used. Bounded memory.

Times are milliseconds since the run began, so that a state built from a live feed equals one built from the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL, TOOL, WAIT, MANY = range(4)
"""Kinds of bars: a model call, a tool call, a call that waits for other agents, several merged to save room."""

MAX_BARS = 512
WAITING_TOOLS = frozenset({"assign_task", "wait"})
ENDED = frozenset({"done", "failed", "cancelled", "budget"})

Bar = tuple[int, int, int, int, int, int]
"""Kind, start, end, step, label (index into the run's labels), 1 where it failed."""


def cut(text: Any, length: int) -> str:
    """At most `length` characters of a text; a value that is not text is shown as one."""
    text = text if isinstance(text, str) else str(text)
    return text if len(text) <= length else f"{text[: length - 1]}…"


@dataclass(slots=True)
class AgentState:
    number: int
    """Order of first appearance in the journal."""
    id: str
    name: str
    parent: int | None
    depth: int
    model: str = ""
    task: str = ""
    budget: dict[str, Any] = field(default_factory=dict)

    status: str = "queued"
    final: str = ""
    """The status it ended with."""
    steps: int = 0
    tasks: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0
    started: int | None = None
    ended: int | None = None
    since: int = 0
    """When it began what it does now."""
    thinking: bool = False
    """A model call is open."""
    open: dict[str, str] = field(default_factory=dict)
    """Calls without an outcome: `STEP.INDEX` -> tool."""
    asking: int = 0
    """Calls that wait for a person."""
    tainted: bool = False
    error: str = ""
    result: dict[str, Any] | None = None
    entries: int = 0
    """Events so far: a reader of the transcript sees by it that there is more."""
    length: int = 0
    """Events of its own chain: entries of the transcript."""
    bars: list[Bar] = field(default_factory=list)

    def status_now(self) -> str:
        if self.ended is not None:
            return self.final
        if self.started is None:
            return "queued"
        if self.asking or (self.open and all(tool in WAITING_TOOLS for tool in self.open.values())):
            return "waiting"
        return "running"

    def activity(self) -> str:
        if self.ended is not None or self.started is None:
            return ""
        if self.asking:
            return "approval"
        if self.open:
            tools = dict.fromkeys(self.open.values())
            names = ", ".join(cut(tool, 40) for tool in list(tools)[:3]) + ("…" if len(tools) > 3 else "")
            return names if len(self.open) == 1 else f"{len(self.open)} × {names}"
        return "model" if self.thinking else ""

    def add_bar(self, bar: Bar) -> bool:
        """Append; true when older bars were merged to make room, so that a viewer's copy is void."""
        self.bars.append(bar)
        if len(self.bars) <= MAX_BARS:
            return False
        half = MAX_BARS // 2
        merged = [_merge(left, right) for left, right in zip(self.bars[:half:2], self.bars[1:half:2])]
        self.bars = merged + self.bars[half:]
        return True

    def born(self) -> dict[str, Any]:
        """What hardly ever changes, sent when it does."""
        return {
            "number": self.number,
            "id": self.id,
            "name": self.name,
            "parent": self.parent,
            "depth": self.depth,
            "model": self.model,
            "task": cut(self.task, 160),
        }

    def live(self) -> dict[str, Any]:
        """What changes, sent in every frame in which it did."""
        return {
            "number": self.number,
            "status": self.status,
            "activity": self.activity(),
            "since": self.since,
            "steps": self.steps,
            "tasks": self.tasks,
            "tokens": self.prompt_tokens + self.completion_tokens,
            "cost": round(self.cost, 6),
            "started": self.started,
            "ended": self.ended,
            "tainted": self.tainted,
            "entries": self.entries,
            "length": self.length,
        }

    def details(self) -> dict[str, Any]:
        """All of it, for the one agent somebody looks at."""
        return {
            **self.born(),
            **self.live(),
            "task": self.task,
            "budget": self.budget,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "error": self.error,
            "result": self.result,
        }


def _merge(left: Bar, right: Bar) -> Bar:
    kind, label = (left[0], left[4]) if left[0] == right[0] and left[4] == right[4] else (MANY, -1)
    return kind, min(left[1], right[1]), max(left[2], right[2]), left[3], label, left[5] | right[5]
