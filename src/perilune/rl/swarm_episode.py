"""An episode in which the policy leads a swarm: the real runtime, its tools and its journal, over a `Talk`.

    await swarm_episode("Who wrote ...?", talk, tools=[search, open_page, answer], settings=SwarmEpisode(...))

`TalkClient` is the runtime's `ModelClient`: "main" speaks through the talk itself, every other agent through an aside
of it, so the orchestrator's tokens are recorded and a frozen worker's are not. Prompts of all agents of all episodes
meet in one batch of their engine.

The episode ends with a call of `answer`, with a reply that calls nothing, or at the cap of critical steps: whoever has
none left is told so and asked for one last reply, in which only `answer` (for main) or the text (for a worker) counts.
Whatever a policy says is bounded: calls beyond the cap, tools that are not its own and tasks beyond `max_workers` are
refused in words; main is asked at most `critical_steps` + 1 times and a worker `worker_steps` + 1 times.

At its end the episode notes its journal, an event a mapping:

    {"chain", "kind", "body", "at"}      chain and kind as in swarm/journal/event.py; `at` in ms, which no judge reads
    started    parent, call, name, task
    reply      step, message (as it was said), cost (steps charged for it), prompt_tokens, tokens
    outcome    tool, status, ran (1: a step), text (of errors and of what workers returned)
    finished   status, error
    ended      critical_steps (the cap), how ("answer" | "text" | "cut": its tokens or turns were used up)
"""

import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import orjson

from perilune.rl.critical_steps import ASSIGN, CREATE, MAIN, StepLedger
from perilune.rl.environment import EpisodeOver, Talk
from perilune.rl.swarm_settings import SwarmEpisode
from perilune.rl.talk import EpisodeParked, TalkError
from perilune.serve.async_engine import EngineDead
from perilune.swarm.client import ModelError, ModelReply, ModelRequest, Usage
from perilune.swarm.journal.event import Event, Journal
from perilune.swarm.journal.memory import MemoryJournal
from perilune.swarm.messages import Message, message_from_plain
from perilune.swarm.secrets import Secrets
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.swarm import Swarm
from perilune.swarm.tools.tool import Tool, ToolContext, ToolError, ToolResult

LAST_REPLY = "No steps are left. Call answer now with what you have."
LAST_REPLY_OF_WORKER = "No steps are left. Answer now with what you have."
ENDLESS_TOKENS = 1 << 30
"""Of a context: an episode is cut by its talk, never compacted, so that what is trained on is what was said."""
SPAWNING: Mapping[str, Mapping[str, Any]] = {
    CREATE: {
        "name": CREATE,
        "description": "Register a sub-agent under a name.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "system_prompt": {"type": "string"}},
            "required": ["name", "system_prompt"],
        },
    },
    ASSIGN: {
        "name": ASSIGN,
        "description": "Give a registered sub-agent a task and get its answer. Calls of one reply run together.",
        "parameters": {
            "type": "object",
            "properties": {"agent": {"type": "string"}, "prompt": {"type": "string"}},
            "required": ["agent", "prompt"],
        },
    },
}
"""As the policy sees them: the two arguments of K2.5. The runtime's own have more, which an episode does not give."""


async def swarm_episode(prompt: str, talk: Talk, *, tools: Iterable[Tool], settings: SwarmEpisode) -> None:
    """Play one episode and note its journal. EpisodeOver passes, noted like any other end."""
    given = {each.name: each for each in tools}
    client = TalkClient(talk, settings, given)
    journal = MemoryJournal()

    async def open_journal() -> Journal:
        return journal

    config = SwarmConfig(
        model="policy",
        system_prompt=settings.system_prompt,
        context_tokens=ENDLESS_TOKENS,
        main_steps=None,
        subagent_steps=None,
        max_active=settings.max_workers + 1,
        tool_seconds=settings.tool_seconds,
    )
    swarm = Swarm(config, client=client, tools=given.values(), secrets=Secrets(), open_journal=open_journal)
    is_parked = False
    writes = any(each.effects != "none" for each in given.values())
    try:
        with _folder(writes) as folder:
            async with swarm.start(prompt, folder=folder) as live:
                live.run.own_folders = writes
                live.run.tools = {name: client.gated(live.run.tools[name]) for name in _own(settings, live.run.tools)}
                await live.begin()
                await live.ended()
        if client.broken is not None:
            raise client.broken
    except EpisodeParked:
        is_parked = True  # it is played again from its beginning, and noted then
        raise
    finally:
        if not is_parked:
            talk.note(*noted(journal.events(), client))


@contextmanager
def _folder(writes: bool) -> Iterator[Path]:
    """Where an episode works. Thousands of them whose tools write nothing share one: a folder a worker, made and
    removed on the event loop, takes as long as a reply."""
    if not writes:
        yield Path(_empty_folder().name)
        return
    folder = Path(tempfile.mkdtemp(prefix="perilune-episode-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _empty_folder() -> tempfile.TemporaryDirectory[str]:
    """One for the process, gone with it."""
    return tempfile.TemporaryDirectory(prefix="perilune-episodes-")


def _own(settings: SwarmEpisode, known: Mapping[str, Tool]) -> list[str]:
    wanted = dict.fromkeys((*settings.main_tools, *settings.worker_tools))
    if missing := [name for name in wanted if name not in known]:
        raise ValueError(f"the episode has no tool {missing[0]!r}: give it in tools=...")
    return list(wanted)


@dataclass(kw_only=True)
class _Line:
    """One agent's conversation."""

    talk: Talk
    declared: Sequence[Mapping[str, Any]]
    max_tokens: int | None
    replies: int = 0
    heard: int = 0
    """Messages of the runtime's context that the talk has."""
    spent: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    """Cost and message of every reply, as it was said."""


class TalkClient:
    """Implements `swarm.client.ModelClient` over a talk and its asides, and keeps to the cap."""

    def __init__(self, talk: Talk, settings: SwarmEpisode, tools: Mapping[str, Tool]) -> None:
        self._talk, self._settings = talk, settings
        self._main_tools = [declaration(name, tools) for name in settings.main_tools]
        self._worker_tools = [declaration(name, tools) for name in settings.worker_tools]
        self._lines: dict[str, _Line] = {}
        self._refused: dict[str, str] = {}
        """Why a call is not made, by its chain."""
        self.ledger = StepLedger(
            cap=settings.critical_steps,
            worker_steps=settings.worker_steps,
            max_workers=settings.max_workers,
            answer=settings.answer,
        )
        self.broken: Exception | None = None
        """What ends the episode, though it met a worker."""
        self.how = "cut"

    async def complete(self, request: ModelRequest) -> ModelReply:
        agent = request.agent
        if self.broken is not None:
            raise self.broken
        if agent == MAIN and self.ledger.is_answered:
            return ModelReply(message=Message("assistant", "Answered."))
        line = self._line(agent)
        line.talk.add(*(message.plain() for message in request.messages[line.heard :]))
        line.heard = len(request.messages) + 1  # and the reply
        is_last = self.ledger.is_last(agent)
        if is_last:
            line.talk.add({"role": "user", "content": LAST_REPLY if agent == MAIN else LAST_REPLY_OF_WORKER})
        said = await self._asked(agent, line)
        message = message_from_plain(_with_ids(said))
        cost, verdicts = self.ledger.charge(agent, [call.name for call in message.tool_calls])
        for place, refusal in enumerate(verdicts):
            if refusal is not None:
                self._refused[f"{agent}#{line.replies}.{place}"] = refusal
        line.replies += 1
        line.spent.append((cost, said))
        if is_last and not (agent == MAIN and self.ledger.is_answered):
            message = replace(message, content=message.text, tool_calls=())
        if agent == MAIN:
            self.how = "answer" if self.ledger.is_answered else "cut" if message.tool_calls else "text"
        return ModelReply(message=message, usage=_usage(line.talk))

    async def close(self) -> None: ...

    def gated(self, tool: Tool) -> Tool:
        """The tool as an episode has it: refused where the ledger says so; workers get their own tools and no more."""

        async def call(context: ToolContext, arguments: dict[str, Any]) -> ToolResult | str:
            if (refusal := self.refusal(context.agent, context.step, context.index)) is not None:
                raise ToolError(refusal)
            own = self._settings.main_tools if context.agent == MAIN else self._settings.worker_tools
            if tool.name not in own:
                raise ToolError(f"{tool.name} is not yours; yours are {', '.join(own)}")
            if tool.name == CREATE:
                fixed = self._settings.worker_prompt
                arguments = {
                    "name": arguments["name"],
                    "system_prompt": arguments["system_prompt"] if fixed is None else fixed,
                    "tools": list(self._settings.worker_tools),
                }
            return await tool.call(context, arguments)

        return replace(tool, call=call)

    def refusal(self, agent: str, step: int, index: int) -> str | None:
        return self._refused.get(f"{agent}#{step}.{index}")

    def spent(self, agent: str, step: int) -> tuple[int, Mapping[str, Any]]:
        """What a reply cost, and what was said."""
        line = self._lines.get(agent)
        return line.spent[step] if line is not None and step < len(line.spent) else (0, {})

    def _line(self, agent: str) -> _Line:
        if agent not in self._lines:
            settings = self._settings
            self._lines[agent] = (
                _Line(talk=self._talk, declared=self._main_tools, max_tokens=settings.reply_tokens)
                if agent == MAIN
                else _Line(
                    talk=self._talk.aside(agent), declared=self._worker_tools, max_tokens=settings.worker_reply_tokens
                )
            )
        return self._lines[agent]

    async def _asked(self, agent: str, line: _Line) -> Mapping[str, Any]:
        """The reply. A worker that is cut or cannot go on has failed, as its parent reads; what is wrong with the run
        itself ends the episode."""
        try:
            return await line.talk.ask(tools=line.declared, max_tokens=line.max_tokens)
        except EpisodeOver:
            if agent == MAIN:
                raise
            raise ModelError("its tokens or turns are used up", kind="refused") from None
        except (TalkError, EngineDead) as error:
            if agent != MAIN and isinstance(error, TalkError) and "engine failed" in str(error):
                raise ModelError(str(error), kind="refused") from error
            self.broken = error
            raise


def declaration(name: str, tools: Mapping[str, Tool]) -> dict[str, Any]:
    """A tool as a policy is shown it."""
    if name in SPAWNING:
        return {"type": "function", "function": dict(SPAWNING[name])}
    if name not in tools:
        raise ValueError(f"the episode has no tool {name!r}: give it in tools=...")
    return orjson.loads(tools[name].declaration)


def _with_ids(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Calls with an id, so that results can name them; the runtime's copy only, what was said stays."""
    calls = said.get("tool_calls")
    if not calls or all(call.get("id") for call in calls):
        return said
    named = [{**call, "id": call.get("id") or f"functions.{call['function']['name']}:{place}"}
             for place, call in enumerate(calls)]  # fmt: skip
    return {**said, "tool_calls": named}


def _usage(talk: Talk) -> Usage | None:
    turns = getattr(talk, "turns", None)
    return Usage(prompt_tokens=len(turns[-1].prompt), completion_tokens=len(turns[-1].tokens)) if turns else None


# ---------------------------------------------------------------------------------------------------------------------
# What is noted


def noted(events: Iterable[Event], client: TalkClient) -> list[dict[str, Any]]:
    """The journal as far as judges, timelines and audits need it."""
    found: list[dict[str, Any]] = []
    first: float | None = None
    for event in events:
        first = event.time if first is None else first
        body = _noted(event, client)
        if body is not None:
            at = round(1000 * (event.time - first), 1)
            found.append({"chain": event.chain, "kind": event.kind, "body": body, "at": at})
    end = {"how": client.how, "critical_steps": client.ledger.cap}
    found.append({"chain": "run", "kind": "ended", "body": end, "at": found[-1]["at"] if found else 0.0})
    return found


def _noted(event: Event, client: TalkClient) -> dict[str, Any] | None:
    if event.kind == "started":
        body = event.read()
        return {name: body[name] for name in ("parent", "call", "name", "task")}
    if event.kind == "reply":
        body, note = event.read(), event.read_note()
        cost, said = client.spent(event.chain, body["step"])
        if not said:
            return None  # the end after an answer, which nobody said
        tokens = {"prompt_tokens": note["prompt_tokens"], "tokens": note["completion_tokens"]}
        return {"step": body["step"], "message": said, "cost": cost, **tokens}
    if event.kind == "outcome":
        body = event.read()
        agent, _, call = event.chain.partition("#")
        step, _, index = call.partition(".")
        is_refused = client.refusal(agent, int(step), int(index)) is not None
        found = {
            "tool": body["tool"],
            "status": body["status"],
            "ran": int(not is_refused and body["tool"] != client.ledger.answer),
        }
        return found | ({"text": body["text"]} if body["status"] != "ok" or body["tool"] == ASSIGN else {})
    if event.kind == "finished":
        body = event.read()
        return {"status": body["status"], "error": body["error"]}
    return None


__all__ = ["LAST_REPLY", "LAST_REPLY_OF_WORKER", "SwarmEpisode", "TalkClient", "declaration", "noted", "swarm_episode"]
