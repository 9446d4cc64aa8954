"""Serial collapse: one thing after the other although the things do not need each other.

A stretch is a run of turns of one agent, each with a single task given out or a single search, where the text of every
turn but the first uses nothing that the results since the first brought. "Uses" is read off the words: a word (or
number, or pair of CJK signs) that a result of the stretch was first to say. A word that the agent had before, from its
task, its prompts or older results, says nothing. Turns that only wait, read or create agents neither belong to a
stretch nor end it.

A stretch of at least three turns is a warning when meanwhile nothing else ran: every level of the critical path from
its first step to its last has a width of one, turns of mere waiting apart. The test errs towards silence: an
accidental word in common ends a stretch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from perilune.swarm.critical_path import CriticalPath
from perilune.swarm.journal.event import Event

DELEGATING = frozenset({"assign_task", "start_task"})
SEARCHING = frozenset({"web_search", "web_fetch", "search_documents", "read_document"})
NEUTRAL = frozenset({"create_subagent", "wait", "read_result", "list_agents", "send"})
AT_LEAST = 3
WORD = re.compile(r"\w+")
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


@dataclass(frozen=True, kw_only=True)
class SerialCollapse:
    """Independent work that was done one piece at a time."""

    agent: str
    steps: tuple[int, ...]
    tool: str

    def __str__(self) -> str:
        what = "tasks" if self.tool in DELEGATING else f"calls of {self.tool}"
        return (
            f"serial collapse: {self.agent} made {len(self.steps)} {what} one at a time (steps {self.steps[0]} to "
            f"{self.steps[-1]}) while nothing else ran, though none uses the result of another: one turn could hold all"
        )


@dataclass(slots=True)
class _Reader:
    known: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    """First said by a result since the stretch began."""
    kind: str = ""
    tool: str = ""
    steps: list[int] = field(default_factory=list)


class SerialWatch:
    """Add the events of a run in the order of their commits, the same that its critical path got."""

    def __init__(self, path: CriticalPath, *, at_least: int = AT_LEAST) -> None:
        self._path = path
        self._at_least = at_least
        self._readers: dict[str, _Reader] = {}
        self._found: list[SerialCollapse] = []
        self._idle: list[tuple[str, int]] = []
        """Turns that only wait, read or create."""

    def add(self, event: Event) -> None:
        agent, mark, _ = event.chain.partition("#")
        if event.kind == "started":
            body = event.read()
            known = words(body["system_prompt"]) | words(body["task"] or "")
            self._readers[agent] = _Reader(known=known)
        elif (reader := self._readers.get(agent)) is None:
            return
        elif event.kind == "message" or (event.kind == "outcome" and mark):
            self._learn(reader, event.read()["text"])
        elif event.kind == "task":
            self._end(agent, reader)
            reader.known |= words(event.read()["text"])
        elif event.kind == "reply":
            body = event.read()
            self._turn(agent, reader, body["step"], body["message"].get("tool_calls") or [])
        elif event.kind == "finished":
            self._end(agent, reader)

    def warnings(self) -> list[SerialCollapse]:
        """So far; the stretch that an agent is in counts as it is."""
        open_ones = [self._collapse(agent, reader) for agent, reader in self._readers.items()]
        found = [*self._found, *(each for each in open_ones if each is not None)]
        idle = Counter(self._path.level(agent, step) for agent, step in self._idle)
        return [each for each in found if self._was_alone(each, idle)]

    def _turn(self, agent: str, reader: _Reader, step: int, calls: list[Mapping[str, Any]]) -> None:
        functions = [call["function"] for call in calls]
        working = [each for each in functions if each["name"] not in NEUTRAL]
        if functions and not working:
            self._idle.append((agent, step))
            return
        kind = _kind(working[0]["name"]) if len(working) == 1 else None
        said = set().union(*(words(_text(each)) for each in working))
        if kind is None or kind != reader.kind or said & reader.fresh:
            self._end(agent, reader)
        reader.known |= said
        if kind is not None:
            reader.kind, reader.tool = kind, working[0]["name"]
            reader.steps.append(step)

    def _learn(self, reader: _Reader, text: str) -> None:
        if reader.steps:
            reader.fresh |= words(text) - reader.known
        else:
            reader.known |= words(text)

    def _end(self, agent: str, reader: _Reader) -> None:
        collapse = self._collapse(agent, reader)
        if collapse is not None:
            self._found.append(collapse)
        reader.known |= reader.fresh
        reader.fresh, reader.steps, reader.kind = set(), [], ""

    def _collapse(self, agent: str, reader: _Reader) -> SerialCollapse | None:
        if len(reader.steps) < self._at_least:
            return None
        return SerialCollapse(agent=agent, steps=tuple(reader.steps), tool=reader.tool)

    def _was_alone(self, found: SerialCollapse, idle: Mapping[int, int]) -> bool:
        first, last = (self._path.level(found.agent, step) for step in (found.steps[0], found.steps[-1]))
        widths = self._path.level_widths
        return all(widths[level - 1] - idle.get(level, 0) <= 1 for level in range(first, last + 1))


def serial_collapses(events: Iterable[Event]) -> list[SerialCollapse]:
    path = CriticalPath()
    watch = SerialWatch(path)
    for event in events:
        path.add(event)
        watch.add(event)
    return watch.warnings()


def words(text: str) -> set[str]:
    """Words of four letters or more, anything with a digit of two signs or more, and pairs of CJK signs."""
    found = {word for word in WORD.findall(text.casefold()) if len(word) > 3 or (len(word) > 1 and not word.isalpha())}
    if runs := CJK.findall(text):
        found = {word for word in found if not CJK.search(word)}
        found.update(run[at : at + 2] for run in runs for at in range(len(run) - 1))
    return found


def _kind(tool: str) -> str | None:
    if tool in DELEGATING:
        return "task"
    return tool if tool in SEARCHING else None


def _text(function: Mapping[str, Any]) -> str:
    """What a call says: all strings of its arguments, but not which agent does it."""
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return function["arguments"]
    if isinstance(arguments, dict):
        arguments = {name: value for name, value in arguments.items() if name not in ("agent", "name")}
    return " ".join(_strings(arguments))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _strings(each)


__all__ = ["SerialCollapse", "SerialWatch", "serial_collapses"]
