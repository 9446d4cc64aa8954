"""A run in the terminal: a tree that fits the screen, or plain lines where there is no terminal.

    with TerminalView(reader=SQLiteReader(path), journal=journal) as terminal:
        ...

Like the web view it follows the journal on a thread of its own. It draws at most eight times a second, and less often
where drawing is dear: never more than a fortieth of one processor. More agents than lines are summed up, those at work
first. What agents write is stripped of everything that a terminal would obey.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Self

from rich.cells import set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.style import Style

from perilune.swarm.journal.event import Journal
from perilune.swarm.view.agent_state import ENDED, AgentState
from perilune.swarm.view.controls import Approvals
from perilune.swarm.view.inbox import Inbox
from perilune.swarm.view.projection import Projection, Reader
from perilune.swarm.view.state import STATUSES, Cost, RunState

LEAST_PAUSE = 1 / 8
CPU_SHARE = 1 / 40
SUMMARY_SECONDS = 10.0
MANY_LINES = 12
"""More changes than this at a time become one line, where there is no terminal."""

MARKS = {"running": "●", "waiting": "◔", "queued": "○", "done": "✓", "failed": "✕", "cancelled": "⊘", "budget": "▣"}
PLAIN_MARKS = {
    "running": "*",
    "waiting": "~",
    "queued": ".",
    "done": "+",
    "failed": "x",
    "cancelled": "/",
    "budget": "#",
}
COLOURS = {
    "running": Style(color="blue"),
    "waiting": Style(dim=True),
    "queued": Style(dim=True),
    "done": Style(color="green"),
    "failed": Style(color="red"),
    "cancelled": Style(color="red"),
    "budget": Style(color="red"),
}
FAINT, BOLD, WARN = Style(dim=True), Style(bold=True), Style(color="yellow", bold=True)
ORDER = {
    status: rank
    for rank, status in enumerate(("running", "waiting", "failed", "budget", "queued", "cancelled", "done"))
}

# Control characters move the cursor or worse; the others turn the direction of what follows, are not seen, or (half a
# character) cannot be written at all.
_OBEYED = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e007f]+"
)

Line = list[Segment]


def harmless(text: str) -> str:
    """One line without anything a terminal obeys."""
    return _OBEYED.sub(" ", text)


class TerminalView:
    def __init__(
        self,
        *,
        reader: Reader,
        journal: Journal | None = None,
        approvals: Approvals | None = None,
        cost: Cost | None = None,
        console: Console | None = None,
        address: str | None = None,
    ) -> None:
        """The reader is this view's alone, and closed with it. `address`: of the web view, to be shown."""
        self.console = console or Console(stderr=True)
        self.state = RunState(cost)
        self._reader = reader
        self._journal = journal
        self._approvals = approvals or Approvals()
        self._address = address
        self._inbox = Inbox()
        self._projection = Projection(reader, self._inbox, self.state)
        self._unsubscribe: Callable[[], None] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="perilune-terminal", daemon=True)
        self._lines = PlainLines()

    def start(self) -> Self:
        """On the swarm's loop where there is a journal to follow."""
        if self._journal is not None:
            self._unsubscribe = self._journal.subscribe(self._inbox.receive)
        self._inbox.wake()
        if self._address:
            self.console.print(f"watch it at {self._address}", markup=False, highlight=False, soft_wrap=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Draw a last time, write the summary, end the thread."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()
            for line in summary(self.state):
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            if self.console.is_terminal and not self.console.is_dumb_terminal:
                with Live(console=self.console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
                    self._follow(lambda: live.update(Screen(self.state, self._now()), refresh=True))
            else:
                self._follow(self._write_lines)
        finally:
            self._reader.close()

    def _follow(self, show: Callable[[], None]) -> None:
        while True:
            is_last = self._stop.is_set()
            began = time.thread_time()
            for _ in self._projection.advance():
                time.sleep(0)  # the swarm goes first
            self.state.set_approvals(self._approvals.waiting())
            self.state.take_delta()
            show()
            if is_last:
                return
            self._stop.wait(max(LEAST_PAUSE, (time.thread_time() - began) / CPU_SHARE))

    def _now(self) -> int:
        """Milliseconds since the run began."""
        state = self.state
        if state.began is None or state.ended is not None:
            return state.last
        return max(state.last, round((time.time() - state.began) * 1000))

    def _write_lines(self) -> None:
        for line in self._lines.since_last(self.state, self._now()):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


# Drawn ---------------------------------------------------------------------------------------------------------------


class Screen:
    """What is on the screen at one moment, made of segments: rich's tables would cost ten times as much."""

    def __init__(self, state: RunState, now: int) -> None:
        self._state = state
        self._now = now

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        marks = PLAIN_MARKS if options.ascii_only else MARKS
        height = max(4, console.size.height - 1)
        width = options.max_width
        lines = head(self._state, self._now, width)
        for agent, depth, group in rows(self._state, height - len(lines)):
            lines.append(
                agent_line(agent, depth, self._now, width, marks) if agent else group_line(group, depth, width)
            )
        for line in lines[:height]:
            yield from line
            yield Segment.line()


def head(state: RunState, now: int, width: int) -> list[Line]:
    lines = [[Segment(set_cell_size(harmless(state.task), width), BOLD)]] if state.task else []
    lines.append([Segment(set_cell_size(numbers(state, now), width))])
    for request in state.approvals[:3]:
        agent = state.by_id.get(request.agent)
        who = agent.name if agent else request.agent
        text = f"waits for approval: {who}: {request.tool} {request.arguments}"
        lines.append([Segment(set_cell_size(harmless(text), width), WARN)])
    if len(state.approvals) > 3:
        lines.append([Segment(set_cell_size(f"and {len(state.approvals) - 3} more approvals", width), WARN)])
    return lines


def numbers(state: RunState, now: int) -> str:
    totals = state.totals()
    critical = state.critical_steps
    over = sum(state.counts[status] for status in ENDED)
    parts = [
        f"width {totals['width']} (peak {totals['peak']})",
        f"agents {over}/{totals['agents']}",
        f"steps {state.steps}" + (f" (critical {critical}, {state.steps / critical:.1f}x)" if critical else ""),
        f"tokens {short(totals['prompt_tokens'] + totals['completion_tokens'])}",
        f"cost {state.cost:.4g}" if state.cost else "",
        f"time {clock(now)}",
    ]
    return "  ".join(part for part in parts if part)


Row = tuple[AgentState | None, int, Counter[str]]
"""An agent, its depth, and how many of which status are hidden below it; without an agent, hidden here."""


def rows(state: RunState, height: int) -> list[Row]:
    """The tree in at most `height` rows: those at work first, the rest as counts."""
    children: dict[int | None, list[AgentState]] = {}
    for agent in state.agents:
        children.setdefault(agent.parent, []).append(agent)
    if len(state.agents) > height:
        for each in children.values():
            each.sort(key=lambda agent: (ORDER[agent.status], agent.number))
    sizes: dict[int, int] = {}
    for agent in reversed(state.agents):  # a child is younger than its parent
        sizes[agent.number] = 1 + sum(sizes.get(child.number, 1) for child in children.get(agent.number, ()))
    shown: list[Row] = []
    _place(children.get(None, []), 0, max(1, height), children, sizes, shown)
    return shown


def _place(
    siblings: list[AgentState],
    depth: int,
    room: int,
    children: dict[int | None, list[AgentState]],
    sizes: dict[int, int],
    shown: list[Row],
) -> None:
    needed = sum(sizes[agent.number] for agent in siblings)
    for position, agent in enumerate(siblings):
        rest = siblings[position:]
        if room < needed and room <= 1 and len(rest) > 1:
            hidden = Counter(_statuses(rest, children))
            shown.append((None, depth, hidden))
            return
        below = children.get(agent.number, [])
        room -= 1
        needed -= sizes[agent.number]
        # One row is kept for each sibling that is at work, as far as there is room, or for their count.
        kept = min(
            sum(other.status in ("running", "waiting") for other in rest[1:]) or len(rest) > 1, max(1, room // 2)
        )
        given = min(sizes[agent.number] - 1, room - kept)
        shown.append((agent, depth, Counter(_statuses(below, children)) if given < 1 else Counter()))
        if given >= 1:
            before = len(shown)
            _place(below, depth + 1, given, children, sizes, shown)
            room -= len(shown) - before


def _statuses(agents: Iterable[AgentState], children: dict[int | None, list[AgentState]]) -> Iterable[str]:
    stack = list(agents)
    while stack:
        agent = stack.pop()
        yield agent.status
        stack.extend(children.get(agent.number, ()))


def agent_line(agent: AgentState, depth: int, now: int, width: int, marks: dict[str, str], hidden: int = 0) -> Line:
    indent = "  " * min(depth, 8)
    right = f"{agent.steps:>5} {short(agent.prompt_tokens + agent.completion_tokens):>7}"
    room = max(12, width - len(indent) - 2 - len(right))
    name_width = min(32, room // 2)
    name = harmless(agent.name) + (f" (+{hidden})" if hidden else "")
    doing = f"{agent.activity()} {clock(now - agent.since)}" if agent.activity() else ""
    # Agents of one kind have one name: what sets them apart is the task.
    about = agent.error or ("" if agent.parent is None else agent.task) or ("" if doing else agent.status)
    doing = "  ".join(part for part in (doing, about) if part)
    return [
        Segment(f"{indent}{marks[agent.status]} ", COLOURS[agent.status]),
        Segment(set_cell_size(name, name_width - 1) + " "),
        Segment(set_cell_size(harmless(doing), room - name_width), FAINT),
        Segment(right, FAINT),
    ]


def group_line(group: Counter[str], depth: int, width: int) -> Line:
    return [Segment(set_cell_size(f"{'  ' * min(depth, 8)}… and {counted(group)}", width), FAINT)]


# Lines ---------------------------------------------------------------------------------------------------------------


class PlainLines:
    """What changed since the last look, in words; sparse, for logs."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}
        self._asked: set[str] = set()
        self._told = 0

    def since_last(self, state: RunState, now: int) -> list[str]:
        changes = []
        for agent in state.agents:
            before = self._known.get(agent.number)
            phase = agent.status if agent.ended is not None else "started" if agent.started is not None else None
            if phase is not None and phase != before:
                self._known[agent.number] = phase
                changes.append((agent, phase))
        lines = [f"{clock(now):>8}  {phase:<9}  {self._about(agent, phase)}" for agent, phase in changes]
        if len(changes) > MANY_LINES:
            lines = [f"{clock(now):>8}  agents     {counted(Counter(phase for _, phase in changes))}"]
        waiting = {request.id: request for request in state.approvals}
        for id in waiting.keys() - self._asked:
            request = waiting[id]
            lines.append(
                f"{clock(now):>8}  approval   {harmless(request.agent)}: {harmless(request.tool)} waits for a person"
            )
        self._asked = set(waiting)
        if now - self._told >= SUMMARY_SECONDS * 1000:
            self._told = now
            lines.append(f"{clock(now):>8}  {numbers(state, now)}")
        return lines

    @staticmethod
    def _about(agent: AgentState, phase: str) -> str:
        if phase == "started":
            return harmless(f"{agent.name}: {agent.task}" if agent.task else agent.name)[:160]
        used = f"{agent.steps} steps, {short(agent.prompt_tokens + agent.completion_tokens)} tokens"
        return harmless(f"{agent.name}: {used}{': ' + agent.error if agent.error else ''}")[:240]


def summary(state: RunState) -> list[str]:
    """How the run went, in a few lines."""
    if not state.agents:
        return []
    status = state.status if state.ended is not None else "unfinished"
    totals = state.totals()
    critical = state.critical_steps
    parts = [
        f"{totals['agents']} agent{'s' if totals['agents'] != 1 else ''} (at most {totals['peak']} at work)",
        f"{state.steps} steps" + (f" (critical {critical}, {state.steps / critical:.1f}x)" if critical else ""),
        f"{state.tool_calls} tool calls",
        f"{short(totals['prompt_tokens'] + totals['completion_tokens'])} tokens",
    ]
    if state.cost:
        parts.append(f"cost {state.cost:.4g}")
    lines = [f"{status} in {clock(state.last)}: {', '.join(parts)}"]
    if state.error:
        lines.append(f"  {harmless(state.error)}")
    bad = [agent for agent in state.agents if agent.status in ("failed", "budget")]
    lines += [f"  {agent.status}: {harmless(agent.name)}: {harmless(agent.error)}" for agent in bad[:5]]
    if len(bad) > 5:
        lines.append(f"  and {len(bad) - 5} more agents that did not finish")
    return lines


def counted(group: Counter[str]) -> str:
    order = [*STATUSES, *sorted(set(group) - set(STATUSES))]
    return ", ".join(f"{group[status]} {status}" for status in order if group[status])


def clock(milliseconds: float) -> str:
    seconds = max(0.0, milliseconds) / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02} min" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02} h"


def short(number: int) -> str:
    for limit, unit in ((10_000, ""), (1_000_000, "k"), (1_000_000_000, "M")):
        if number < limit:
            return str(number) if not unit else f"{number / (limit / 1000):.1f}{unit}"
    return f"{number / 1e9:.1f}G"
