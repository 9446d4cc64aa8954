"""Random runs through the whole runtime: a journal in memory, a model that draws its calls, and what must hold after.

The clock is virtual, so latencies cost nothing, and a run in which everybody waits for nobody is an error, not a hang.
`lives` ends a run after any number of committed events, as the loss of its process would, and takes it up again.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import networkx
import orjson

from perilune.swarm import chronicle
from perilune.swarm.budget import Limits
from perilune.swarm.client import ModelRequest
from perilune.swarm.journal.event import Artefact, Event, JournalError, first_link, link
from perilune.swarm.messages import Message
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.swarm import Swarm, SwarmResult
from perilune.swarm.tools.tool import ToolContext, tool
from tests.swarm.models import FunctionModel, call, say, turn
from tests.swarm.virtual_time import run_virtually

Node = tuple[str, int]
HANDLE = re.compile(r"Started ([A-Za-z0-9_-]+-\d+\.\d+)")
ARTEFACT = re.compile(r"art:[0-9a-f]{16}")


class MemoryJournal:
    """What is enqueued is committed in that order, whoever still waits for it."""

    def __init__(self, events: Iterable[Event] = (), blobs: Mapping[str, bytes] | None = None, seed: int = 0) -> None:
        self.all = list(events)
        self.blobs = dict(blobs or {})
        self.stored_at = dict.fromkeys(self.blobs, 0)
        """How many events there were when it came: it is committed with the next one."""
        self.refuses_after: int | None = None
        self._rng = random.Random(seed)
        self._heads = {event.chain: (event.seq, event.hash) for event in self.all}
        self._time = 0.0

    async def append(
        self, chain: str, kind: str, body: Mapping[str, Any], note: Mapping[str, Any] | None = None
    ) -> Event:
        if self.refuses_after is not None and len(self.all) >= self.refuses_after:
            raise JournalError("the disk is full")
        data = orjson.dumps(body, option=orjson.OPT_SORT_KEYS)
        seq, head = self._heads.get(chain, (-1, first_link(chain)))
        new = link(head, kind, data)
        event = Event(len(self.all), chain, seq + 1, kind, data, orjson.dumps(note or {}), self._time, new)
        self.all.append(event)
        self._heads[chain] = seq + 1, new
        await asyncio.sleep(self._rng.random() * 0.002)
        return event

    async def put(self, data: bytes) -> Artefact:
        sha256 = hashlib.sha256(data).hexdigest()
        self.blobs[sha256] = data
        self.stored_at.setdefault(sha256, len(self.all))
        await asyncio.sleep(0)
        return Artefact(sha256, len(data))

    async def get(self, sha256: str, start: int = 0, end: int | None = None) -> bytes:
        await asyncio.sleep(0)
        return self.blobs[sha256][start:end]

    def cut(self, keep: int | None, seed: int = 0) -> MemoryJournal:
        """What is left when the process is lost after `keep` events."""
        blobs = {sha: data for sha, data in self.blobs.items() if keep is None or self.stored_at[sha] < keep}
        return MemoryJournal(self.all[:keep], blobs, seed)

    def artefacts(self) -> list[Artefact]:
        return [Artefact(sha256, len(data)) for sha256, data in self.blobs.items()]

    def head(self, chain: str) -> bytes:
        return self._heads[chain][1] if chain in self._heads else first_link(chain)

    def events(self, chain: str | None = None, *, after: int = -1) -> list[Event]:
        return [event for event in self.all if event.index > after and chain in (None, event.chain)]

    def chains(self) -> list[str]:
        return list(self._heads)

    def subscribe(self, receive: Callable[[list[Event]], None]) -> Callable[[], None]:
        return lambda: None

    async def close(self) -> None:
        pass


# Tools ---------------------------------------------------------------------------------------------------------------


@tool(effects="none")
async def note(text: str) -> str:
    """Say it again, after a while."""
    await asyncio.sleep((len(text) % 7) / 1000)
    return f"noted: {text}"


@tool(effects="none", untrusted=True)
async def fetch(page: str) -> str:
    """A page by a stranger."""
    return f"page {page}"


@tool(effects="workspace")
async def write(context: ToolContext, text: str) -> str:
    """Write a file; must not happen twice."""
    await asyncio.sleep(0.003)
    context.extras["written"].append(f"{context.agent}#{context.step}.{context.index}")
    return f"wrote {text}"


@tool(effects="outside")
def mail(to: str) -> str:
    """Goes outside; nobody is there to approve it."""
    raise AssertionError("a call without approval")


@tool(effects="none")
def fails() -> str:
    """Always breaks."""
    raise KeyError("broken \ud800 inside")


TOOLS = (note, fetch, write, mail, fails)


# A model that draws --------------------------------------------------------------------------------------------------


def drawn(seed: int, *, racy: bool, most_turns: int = 7, depth: int = 2) -> Callable[[ModelRequest], Message]:
    """A behaviour that is a function of what the agent sees. `racy`: also what depends on who is faster."""

    def behave(request: ModelRequest) -> Message:
        at, level = turn(request), request.agent.count("/")
        draw = random.Random(f"{seed}/{request.agent}/{at}/{len(request.messages)}")
        if "nearly full" in request.messages[-1].text:
            return say(f"summary at {at}")
        last = random.Random(f"{seed}/{request.agent}").randint(2, most_turns if level == 0 else 3)
        if any("summary at" in message.text for message in request.messages):
            at = last if _has_waited(request) else last - 1
        if request.tools == b"[]" or at >= last:
            return say(_final(draw, request))
        leads = level < depth and "poor" not in request.messages[0].text
        if leads and at == 0:
            return call(*_kinds())
        if leads and at == last - 1 and (not racy or draw.random() < 0.7):
            return call(("wait", {}))  # otherwise what was started ends with the agent, wherever it is
        moves = _alone(draw)
        if leads:
            moves = draw.sample(moves, 2) + _with_others(draw, request, racy=racy)
        if racy and level:
            moves.append(("send", {"to": "parent", "text": f"from {request.agent} {at}"}))
        return call(*draw.sample(moves, min(len(moves), draw.randint(1, 3))), text=draw.choice([None, "thinking"]))

    return behave


def _has_waited(request: ModelRequest) -> bool:
    replies = [message for message in request.messages if message.role == "assistant"]
    return bool(replies) and [each.name for each in replies[-1].tool_calls] == ["wait"]


def _final(draw: random.Random, request: ModelRequest) -> str:
    if "schema" in request.messages[0].text:
        return draw.choice(["not json", '{"n": 1}', '{"n": 2}'])
    seen = sorted(set(ARTEFACT.findall(" ".join(m.text for m in request.messages))))
    if seen and draw.random() < 0.5:
        return "with {{" + draw.choice(seen) + "}}"
    return f"answer {draw.randint(0, 9)} of {request.agent}" + " word" * draw.choice([0, 0, 700])


def _kinds() -> list[tuple[str, dict]]:
    schema = {"type": "object", "required": ["n"]}
    return [
        ("create_subagent", {"name": "a", "system_prompt": "plain"}),
        ("create_subagent", {"name": "s", "system_prompt": "schema", "output_schema": schema}),
        ("create_subagent", {"name": "b", "system_prompt": "poor", "budget": {"steps": 2, "calls": 2}}),
    ]


def _alone(draw: random.Random) -> list[tuple[str, Any]]:
    return [
        ("note", {"text": "x" * draw.choice([3, 4, 2500])}),
        ("write", {"text": "y"}),
        ("mail", {"to": "z"}),
        ("fails", {}),
        ("fetch", {"page": "p"}),
        ("note", "{broken"),
        ("no_such_tool", {}),
    ]


def _with_others(draw: random.Random, request: ModelRequest, *, racy: bool) -> list[tuple[str, Any]]:
    texts = " ".join(message.text for message in request.messages)
    known = sorted(set(HANDLE.findall(texts)))
    kind = draw.choice("aasb")
    items = [str(number) for number in range(draw.randint(1, 5))]
    prompt = f"task {draw.randint(0, 99)}"
    moves: list[tuple[str, Any]] = [
        ("assign_task", {"agent": kind, "prompt": prompt}),
        ("start_task", {"agent": kind, "prompt": prompt}),
        ("map_task", {"agent": kind, "template": "item {item}", "items": items, "agents": draw.randint(1, 3)}),
        ("compose", {"parts": ["text", *sorted(set(ARTEFACT.findall(texts)))[:2]], "title": "t"}),
    ]
    if known:
        moves.append(("wait", {}))
    if known and racy:
        one = draw.choice(known)
        moves += [
            ("wait", {"mode": draw.choice(["any", 1, 2])}),
            ("wait", {"handles": [one], "seconds": 0.004}),
            ("read_result", {"handle": one}),
            ("send", {"to": one, "text": "hello"}),
            ("cancel", {"handle": one}),
            ("list_agents", {}),
            ("reduce_task", {"agent": "a", "template": "join {parts}", "handles": [one], "fan_in": 2}),
            ("compose", {"parts": [one, "end"]}),
        ]
    return moves


# Lives ---------------------------------------------------------------------------------------------------------------


def config(**changes: Any) -> SwarmConfig:
    defaults: dict[str, Any] = {"max_depth": 2, "context_tokens": 4000, "subagent_steps": 4, "main_steps": 12}
    limits = Limits(steps=500, agents=200, calls=500)
    return SwarmConfig(**({"model": "test", "limits": limits, "system_prompt": "lead"} | defaults | changes))


@contextmanager
def no_patience() -> Iterator[None]:
    """Who waits for the records of others waits for good: a record that nobody takes is a deadlock."""
    before, chronicle.PATIENCE = chronicle.PATIENCE, None
    try:
        yield
    finally:
        chronicle.PATIENCE = before


def live(
    behaviour: Callable[[ModelRequest], Message],
    folder: Path,
    *,
    seed: int = 0,
    past: MemoryJournal | None = None,
    keep: int | None = None,
    refuses_after: int | None = None,
    **changes: Any,
) -> tuple[SwarmResult, MemoryJournal, FunctionModel, list[str]]:
    """A whole run, or the rest of one of which the first `keep` events of `past` are left."""
    model, written = FunctionModel(behaviour, seed=seed), list[str]()
    journal = past.cut(keep, seed) if past is not None else MemoryJournal(seed=seed)
    journal.refuses_after = refuses_after

    async def opened() -> MemoryJournal:
        return journal

    swarm = Swarm(config(**changes), client=model, tools=TOOLS, open_journal=opened, extras={"written": written})
    start = swarm.resume(folder) if past is not None else swarm.run("Do it.", folder=folder)
    with no_patience():
        return run_virtually(start), journal, model, written


# What must hold ------------------------------------------------------------------------------------------------------


def is_step(event: Event) -> bool:
    return event.kind == "reply" or (event.kind == "compacted" and event.read()["how"] == "summary")


def check(events: list[Event], result: SwarmResult) -> None:
    """Contracts of every journal of a run that ended."""
    chains: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        chains[event.chain].append(event)
    for chain, own in chains.items():
        kinds = Counter(event.kind for event in own)
        if "#" in chain:
            assert kinds["outcome"] <= 1 and kinds["call_started"] <= 1, chain
            continue
        if chain == "run":
            assert own[-1].kind == "run_finished" and kinds["run_finished"] == 1
            continue
        assert kinds["started"] == kinds["finished"] == 1, (chain, kinds)
        assert own[0].kind == "started" and own[-1].kind == "finished"
        assert [e.read()["step"] for e in own if e.kind == "reply"] == list(range(kinds["reply"])), chain
        letters = [e.read()["id"] for e in own if e.kind == "message"]
        assert len(letters) == len(set(letters)), chain
        _check_reads(chain, own, chains)
    steps = sum(map(is_step, events))
    assert result.spent["steps"]["spent"] == steps <= result.spent["calls"]["spent"]
    for line in result.spent.values():
        assert line["reserved"] == 0
        assert line["limit"] is None or line["spent"] <= line["limit"], result.spent


def _check_reads(chain: str, own: list[Event], chains: Mapping[str, list[Event]]) -> None:
    """Every event binds the outcomes of the calls before it, in their order."""
    heads: list[str] = []
    for event in own:
        body = event.read()
        if event.kind == "reply":
            assert body["reads"] == heads, (chain, body["step"])
            calls = body["message"].get("tool_calls") or ()
            own_chains = [chains.get(f"{chain}#{body['step']}.{at}") for at in range(len(calls))]
            heads = [each[-1].hash.hex() for each in own_chains if each and each[-1].kind == "outcome"]
        elif event.kind == "finished" and body["status"] != "cancelled" and body["reads"]:
            assert body["reads"] == heads, chain


def longest_path(events: list[Event]) -> int:
    """Critical steps by a graph library, from the journal alone."""
    graph = networkx.DiGraph()
    made: Counter[str] = Counter()
    replies: dict[tuple[str, int], Node] = {}
    known: dict[str, set[Node]] = {}
    ends: dict[str, set[Node]] = {}
    for event in events:
        body, agent = event.read(), event.chain.partition("#")[0]
        if event.kind == "started":
            parent = body["parent"]
            known[agent] = {replies[parent, int(body["call"].partition(".")[0])]} if parent else set()
            for other in body["after"]:
                known[agent] |= ends[other]
        elif event.kind == "message" and body["step"] is not None:
            known[agent].add(replies[body["sender"], body["step"]])
        elif event.kind == "outcome":
            for other in body["joined"]:
                known[agent] |= ends[other]
        elif event.kind in ("result", "finished"):
            ends[agent] = set(known[agent])
        elif is_step(event):
            node = agent, made[agent]
            made[agent] += 1
            graph.add_node(node)
            graph.add_edges_from((before, node) for before in known[agent])
            known[agent] = {node}
            if event.kind == "reply":
                replies[agent, body["step"]] = node
    return networkx.dag_longest_path_length(graph, default_weight=1) + 1 if graph else 0
