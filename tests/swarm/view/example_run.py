"""A run as its journal would tell it, made up from a seed, and a journal in memory that tells it."""

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from perilune.swarm.journal.event import Artefact, Event, JournalError, canonical, first_link, link

BEGAN = 1_700_000_000.0
ROLES = ("AI researcher", "physics researcher", "fact checker", "writer", "librarian")
TOOLS = ("web_search", "web_fetch", "read_file", "python", "search_documents")


class MemoryJournal:
    """Commits at once. Reads from any thread."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.clock = clock or (lambda: BEGAN)
        self.all: list[Event] = []
        self._chains: dict[str, list[Event]] = {}
        self._heads: dict[str, bytes] = {}
        self._artefacts: dict[str, bytes] = {}
        self._receivers: list[Callable[[list[Event]], None]] = []

    def add(
        self,
        chain: str,
        kind: str,
        body: Mapping[str, Any],
        note: Mapping[str, Any] | None = None,
        at: float | None = None,
    ) -> Event:
        encoded = canonical(body)
        head = link(self._heads.get(chain, first_link(chain)), kind, encoded)
        self._heads[chain] = head
        time = self.clock() if at is None else BEGAN + at
        of_chain = self._chains.setdefault(chain, [])
        event = Event(len(self.all), chain, len(of_chain), kind, encoded, canonical(note or {}), time, head)
        self.all.append(event)
        of_chain.append(event)
        return event

    def publish(self, events: list[Event]) -> None:
        for receive in self._receivers:
            receive(events)

    def store(self, data: bytes) -> dict[str, Any]:
        sha256 = hashlib.sha256(data).hexdigest()
        self._artefacts[sha256] = data
        return Artefact(sha256, len(data)).plain()

    async def append(
        self, chain: str, kind: str, body: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> Event:
        event = self.add(chain, kind, body, note)
        self.publish([event])
        return event

    async def put(self, data: bytes) -> Artefact:
        plain = self.store(data)
        return Artefact(plain["sha256"], plain["size"])

    async def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        return MemoryReader(self).get(sha256, start, end)

    def head(self, chain: str) -> bytes:
        return self._heads[chain]

    def events(self, chain: str | None = None, *, after: int = -1) -> Iterator[Event]:
        known = self.all if chain is None else self._chains.get(chain, [])
        return (event for event in known[: len(known)] if event.index > after)

    def chains(self) -> list[str]:
        return list(self._chains)

    def subscribe(self, receive: Callable[[list[Event]], None]) -> Callable[[], None]:
        self._receivers.append(receive)
        return lambda: self._receivers.remove(receive)

    async def close(self) -> None:
        await asyncio.sleep(0)


class MemoryReader:
    def __init__(self, journal: MemoryJournal) -> None:
        self._journal = journal
        self.events = journal.events

    def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        data = self._journal._artefacts.get(sha256)
        if data is None:
            raise JournalError(f"there is no artefact {sha256!r}")
        return data[start:end]

    def close(self) -> None:
        pass


@dataclass
class Told:
    """Events to be, each with its time."""

    rows: list[tuple[float, str, str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def add(self, at: float, chain: str, kind: str, body: dict[str, Any], **note: Any) -> None:
        self.rows.append((at, chain, kind, body, note))

    def reply(
        self, at: float, agent: str, step: int, text: str, calls: Iterable[tuple[str, str]] = (), **note: Any
    ) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if made := [
            {"id": f"{tool}:{index}", "type": "function", "function": {"name": tool, "arguments": arguments}}
            for index, (tool, arguments) in enumerate(calls)
        ]:
            message["tool_calls"] = made
        body = {"step": step, "message": message, "finish": "stop", "reads": [], "tokens": None}
        self.add(at, agent, "reply", body, **{"attempts": 1, "prompt_tokens": 900, "completion_tokens": 120, **note})

    def outcome(self, at: float, chain: str, tool: str, text: str, status: str = "ok", **more: Any) -> None:
        seconds = more.pop("seconds", 0.1)
        body = {"tool": tool, "call_id": "x", "status": status, "text": text, "result": None}
        self.add(at, chain, "outcome", body | {"spawned": [], "joined": [], "untrusted": False} | more, seconds=seconds)


def started(
    name: str, parent: str | None, depth: int, task: str | None = "Find out.", call: str = "0.0"
) -> dict[str, Any]:
    return {
        "parent": parent,
        "call": None if parent is None else call,
        "name": name,
        "depth": depth,
        "model": "kimi-k2.5",
        "system_prompt": f"You are {name}.",
        "task": task,
        "tools": ["web_search", "read_file"],
        "rights": {},
        "budget": {"steps": 100},
        "tainted": False,
    }


def ended(status: str = "done", result: dict[str, Any] | None = None, error: str | None = None) -> dict[str, Any]:
    return {"status": status, "result": result, "error": error, "reads": []}


def tell_example(journal: MemoryJournal, agents: int = 20, steps: int = 6, seed: int = 0) -> list[Event]:
    """Write a whole run to the journal without publishing it: agents work in parallel, some fail, one is cancelled."""
    draw = random.Random(seed)
    told = Told()
    task = "Compare the energy use of the ten largest data centres, with sources for every number."
    limits = {"steps": 400, "agents": 300, "tokens": 2_000_000, "cost": None, "seconds": 600.0, "calls": None}
    told.add(
        0,
        "run",
        "run_started",
        {"task": task, "model": "kimi-k2.5", "settings": {}, "tools": {}, "limits": limits, "seed": 0},
    )
    told.add(0.001, "main", "started", started("main", None, 0, task))
    ids = [f"main/{ROLES[number % len(ROLES)].replace(' ', '-')}-{1}.{number}" for number in range(agents)]
    told.reply(
        1.2,
        "main",
        0,
        "I split the task.",
        [("create_subagent", f'{{"name": "{role}"}}') for role in ROLES],
        seconds=1.1,
    )
    for index in range(len(ROLES)):
        told.outcome(1.21, f"main#0.{index}", "create_subagent", "Created.", seconds=0.005)
    calls = [("assign_task", f'{{"agent": "{ROLES[n % len(ROLES)]}", "prompt": "Part {n}"}}') for n in range(agents)]
    told.reply(2.4, "main", 1, "All parts at once.", calls, seconds=1.15)
    last = 2.4
    for number, id in enumerate(ids):
        at = _tell_agent(told, journal, draw, id, ROLES[number % len(ROLES)], number, steps)
        told.outcome(
            at + 0.01, f"main#1.{number}", "assign_task", f"Part {number}: done.", seconds=at - 2.4, joined=[id]
        )
        last = max(last, at)
    told.reply(last + 1.5, "main", 2, "All parts are there; I merge them.", seconds=1.4)
    answer = journal.store(("# Answer\n\n" + "Every number has a source.\n" * 40).encode())
    told.add(last + 1.51, "main", "finished", ended(result=answer))
    told.add(last + 1.52, "run", "run_finished", {"status": "done", "answer": answer, "error": None})
    told.rows.sort(key=lambda row: row[0])
    return [journal.add(chain, kind, body, note, at=at) for at, chain, kind, body, note in told.rows]


def _tell_agent(
    told: Told, journal: MemoryJournal, draw: random.Random, id: str, name: str, number: int, steps: int
) -> float:
    at = 2.45 + 0.01 * number
    told.add(at, id, "started", started(f"{name} {number}", "main", 1, f"Part {number}", f"1.{number}"))
    for step in range(draw.randint(max(1, steps // 2), steps)):
        thought = draw.uniform(0.4, 2.0)
        at += thought
        tools = [draw.choice(TOOLS) for _ in range(draw.choice((1, 1, 1, 2, 3)))]
        text = f"Step {step}: I look into part {number}."
        told.reply(
            at,
            id,
            step,
            text,
            [(tool, f'{{"query": "part {number}, step {step}"}}') for tool in tools],
            seconds=thought,
        )
        longest = 0.0
        for index, tool in enumerate(tools):
            took = draw.uniform(0.05, 0.9)
            longest = max(longest, took)
            is_bad = draw.random() < 0.05
            result = journal.store(b"All of it. " * 4000) if draw.random() < 0.1 else None
            told.outcome(
                at + took,
                f"{id}#{step}.{index}",
                tool,
                "Error: the server answered 503" if is_bad else f"{tool} found three passages.",
                "error" if is_bad else "ok",
                seconds=took,
                untrusted=tool.startswith("web"),
                result=result,
            )
        at += longest
        if step == 1 and number % 7 == 3:
            told.add(
                at + 0.01,
                id,
                "message",
                {"id": "m1", "sender": "user", "step": None, "text": "Use SI units.", "tainted": False},
            )
    status, error = ("failed", "HTTP 400: the endpoint refused") if number % 11 == 5 else ("done", None)
    if number % 17 == 9:
        status = "cancelled"
    at += 0.02
    told.add(
        at,
        id,
        "finished",
        ended(status, journal.store(f"Part {number}.".encode()) if status == "done" else None, error),
    )
    return at
