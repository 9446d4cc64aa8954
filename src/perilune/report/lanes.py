"""A timeline of a swarm's episode: a lane for every agent, a block for every step, along the critical path.

    timeline("after", events)      events as an episode noted them (rl/swarm_episode.py)

Time is counted in critical steps, not in seconds: a reply of the orchestrator begins when all that it waited for is
done, and its workers begin behind it. The right end of the last block is the episode's critical steps; a line shows the
cap. Colours are the page's, so a timeline is right in light and dark. What models wrote is text, never markup.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from perilune.report.page import Plots
from perilune.report.plots import Plot, Series

LANE, GAP, LEFT, WIDTH, TOP = 18, 4, 120, 660, 24
MOST_LANES = 24
MAIN = "main"
SPAWNING, ANSWER = ("create_subagent", "assign_task"), "answer"
COLOURS = {"direct": 0, "spawn": 1, "worker": 2, "answer": 3}


@dataclass(frozen=True, kw_only=True)
class Block:
    """Steps of one reply."""

    start: int
    steps: int
    """0: a mark (an answer, a last word)."""
    colour: str
    told: str
    """What a reader sees on pointing at it."""


@dataclass(frozen=True, kw_only=True)
class Lane:
    name: str
    task: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Timeline(Plot):
    """A drawing of lanes in the place of a plot."""

    x_label: str = "critical steps"
    y_label: str = "agents"
    series: Sequence[Series] = ()
    lanes: Sequence[Lane] = ()
    length: int = 0
    cap: int | None = None

    @property
    def is_empty(self) -> bool:
        return not self.lanes


@dataclass(frozen=True, kw_only=True)
class Timelines(Plots):
    def figures(self) -> list[tuple[Plot, Markup]]:
        return [(each, lanes_svg(each)) for each in self.plots if isinstance(each, Timeline) and not each.is_empty]


def timeline(title: str, events: Sequence[Mapping[str, Any]], *, caption: str = "") -> Timeline:
    """Of what an episode noted; events that are not of that form are left out."""
    replies: dict[str, list[Mapping[str, Any]]] = {}
    started: dict[str, Mapping[str, Any]] = {}
    cap = None
    for event in events:
        chain, kind, body = str(event.get("chain")), event.get("kind"), event.get("body") or {}
        if kind == "reply":
            replies.setdefault(chain, []).append(body)
        elif kind == "started":
            started[chain] = body
        elif kind == "ended":
            cap = body.get("critical_steps")
    children: dict[int, list[str]] = {}
    for agent, body in started.items():
        if body.get("parent") == MAIN:
            children.setdefault(int(str(body.get("call")).partition(".")[0]), []).append(agent)
    lanes: list[Lane] = []
    main: list[Block] = []
    at = 0
    for reply in sorted(replies.get(MAIN, ()), key=lambda body: body["step"]):
        main.append(_block(reply, at, MAIN))
        at += reply["cost"]
        longest = 0
        for agent in sorted(children.get(reply["step"], ()), key=_call_order):
            blocks, now = [], at
            for own in sorted(replies.get(agent, ()), key=lambda body: body["step"]):
                blocks.append(_block(own, now, agent))
                now += own["cost"]
            longest = max(longest, now - at)
            task = str(started[agent].get("task") or "(an empty task)")
            lanes.append(Lane(name=agent.partition("/")[2], task=task, blocks=tuple(blocks)))
        at += longest
    if not main:
        return Timeline(title=title)
    lanes.insert(0, Lane(name=MAIN, task=str(started.get(MAIN, {}).get("task") or ""), blocks=tuple(main)))
    return Timeline(title=title, lanes=lanes, length=at, cap=cap, caption=caption)


def _call_order(agent: str) -> tuple[int, ...]:
    call = agent.rpartition("-")[2]
    return tuple(int(part) for part in call.split(".") if part.isdigit())


def _block(reply: Mapping[str, Any], start: int, agent: str) -> Block:
    message = reply["message"]
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    names = [str(call.get("name")) for call in calls]
    if ANSWER in names or not calls:
        colour = "answer"
    elif agent != MAIN:
        colour = "worker"
    else:
        colour = "spawn" if set(names) & set(SPAWNING) else "direct"
    told = "; ".join(f"{name}({shortened(call.get('arguments'))})" for name, call in zip(names, calls))
    return Block(start=start, steps=int(reply["cost"]), colour=colour, told=told or shortened(message.get("content")))


def shortened(value: Any, room: int = 120) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= room else f"{text[: room - 1]}…"


def lanes_svg(drawn: Timeline) -> Markup:
    """The drawing itself."""
    shown = list(drawn.lanes[:MOST_LANES])
    hidden = len(drawn.lanes) - len(shown)
    length = max(drawn.length, drawn.cap or 0, 1)
    unit = (WIDTH - LEFT - 30) / length
    height = TOP + (len(shown) + bool(hidden)) * (LANE + GAP) + 24
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="13">']
    for step in range(0, length + 1, max(1, -(-length // 12))):
        x = LEFT + step * unit
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{height - 20}" style="stroke:var(--grid)"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle" style="fill:var(--muted)">{step}</text>')
    for row, lane in enumerate(shown):
        y = TOP + row * (LANE + GAP)
        name = lane.name if len(lane.name) <= 16 else f"{lane.name[:15]}…"
        parts.append(
            f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" style="fill:var(--text)">{escape(name)}'
            f"<title>{escape(shortened(lane.task))}</title></text>"
        )
        parts += [_drawn(block, LEFT + block.start * unit, y, unit) for block in lane.blocks]
    if hidden:
        y = TOP + len(shown) * (LANE + GAP) + 12
        parts.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end" style="fill:var(--muted)">{hidden} more</text>')
    if drawn.cap is not None:
        x = LEFT + drawn.cap * unit
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{height - 20}" style="stroke:var(--alarm)" '
            f'stroke-dasharray="4 3"/><text x="{x:.1f}" y="{TOP - 10}" text-anchor="middle" '
            f'style="fill:var(--alarm)">cap</text>'
        )
    return Markup("".join([*parts, "</svg>"]))


def _drawn(block: Block, x: float, y: int, unit: float) -> str:
    fill = f"fill:var(--series-{COLOURS[block.colour]})"
    title = f"<title>{escape(block.told)}</title>"
    if not block.steps:
        return f'<circle cx="{x:.1f}" cy="{y + LANE / 2:.1f}" r="4.5" style="{fill}">{title}</circle>'
    width = block.steps * unit - 1.5
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{max(1.5, width):.1f}" height="{LANE}" rx="2" style="{fill}">{title}</rect>'
    )


LEGEND = (
    "A lane for each agent, a block for each reply that cost steps, along the critical path: blue the orchestrator's "
    "own calls, orange calls that create or assign, green steps of workers, a violet dot an answer. Point at one to "
    "read it."
)
