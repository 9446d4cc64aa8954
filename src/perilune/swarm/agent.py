"""One agent: think, call tools, think again, until it answers.

The loop is the whole of it. What surrounds a step stands elsewhere and is called from here: budgets and retries
(`client`, `budget`), one call of a tool (`calls`), room in the context (`context`), records (`chronicle`). Every event
is in the journal before the agent acts on it, so an agent can be killed between any two lines and taken up again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import orjson

from perilune.swarm.budget import Budget, BudgetExceeded, meter
from perilune.swarm.calls import Called, call_tool
from perilune.swarm.chronicle import artefact_of
from perilune.swarm.client import ModelError, ModelReply, ModelRequest, Usage
from perilune.swarm.context import FULL, Context
from perilune.swarm.journal.event import Artefact, Event
from perilune.swarm.messages import Message, message_from_plain
from perilune.swarm.rights import Rights
from perilune.swarm.scheduler import Job
from perilune.swarm.settings import AgentSpec, prompt
from perilune.swarm.structured import problem_with
from perilune.swarm.taint import Taint
from perilune.swarm.tools.tool import Tool, ToolError, declarations

if TYPE_CHECKING:
    from perilune.swarm.orchestrator import Assignment
    from perilune.swarm.run import Run

Status = Literal["done", "failed", "cancelled", "budget"]
SCHEMA_TRIES = 3
LAST_STEP = "This is your last step: no calls are possible any more. Answer now with what you have."


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A message on its way to an agent."""

    id: str
    sender: str
    step: int | None
    """Step of the sender; None for a person."""
    text: str
    tainted: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a task ended."""

    status: Status
    text: str = ""
    """Before references are filled in; short enough for a context."""
    artefact: Artefact | None = None
    """All of it."""
    error: str | None = None


@dataclass(kw_only=True)
class Agent:
    id: str
    spec: AgentSpec
    parent: Agent | None
    call: str | None
    """`STEP.INDEX` of the parent's call that created it."""
    depth: int
    model: str
    rights: Rights
    budget: Budget
    tools: dict[str, Tool]
    taint: Taint
    max_steps: int | None
    """Of one task. The last one is for an answer: it has no tools."""
    job: Job | None = None
    step: int = -1
    inbox: deque[Letter] = field(default_factory=deque)
    letters_read: set[str] = field(default_factory=set)
    subagents: dict[str, AgentSpec] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    """What it gave others to do, by handle."""
    seen: set[str] = field(default_factory=set)
    """Agents whose results it has read."""
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.declarations = declarations(self.tools)


async def work(run: Run, agent: Agent, tasks: Sequence[str], *, many: bool = False) -> list[Answer]:
    """All tasks of an agent, one after the other, each in a fresh context. `many`: a worker of `map_task`, whose
    answers are events of their own."""
    answers: list[Answer] = []
    end, reads = Answer(status="done"), list[str]()
    try:
        await run.chronicle.record(agent.id, "started", start_body(agent, tasks[0] if not many else None))
        for number, task in enumerate(tasks):
            if many:
                await run.chronicle.record(agent.id, "task", {"number": number, "text": task})
            end, reads = await _attempt(run, agent, task)
            answers.append(end)
            if many:
                await run.chronicle.record(agent.id, "result", {"number": number, **_end(end, reads)})
        body = _end(Answer(status="done"), []) if many else _end(end, reads)
        await run.chronicle.record(agent.id, "finished", body)
        return answers
    except asyncio.CancelledError:
        if not run.is_stopping and run.chronicle.peek(agent.id) is None:
            await asyncio.shield(run.chronicle.append(agent.id, "finished", _end(Answer(status="cancelled"), [])))
        raise
    finally:
        agent.has_ended = True
        agent.budget.close()


async def _attempt(run: Run, agent: Agent, task: str) -> tuple[Answer, list[str]]:
    """One task; an answer in any case. With it the heads of calls that no event has bound yet."""
    reads: list[str] = []
    try:
        text = await _loop(run, agent, Context(agent.spec.system_prompt, task), reads)
        data = await run.results.expand(text)
        return Answer(status="done", text=text, artefact=await run.results.journal.put(data)), reads
    except BudgetExceeded as error:
        return Answer(status="budget", error=str(error)), reads
    except (ModelError, ToolError) as error:
        if agent.parent is None and isinstance(error, ModelError) and error.kind != "refused":
            raise  # the endpoint is away: the run stops here and can be resumed
        return Answer(status="failed", error=str(error)), reads
    except _EndedBefore as ended:
        body = ended.event.read()
        end = Answer(status=body["status"], artefact=artefact_of(body["result"]), error=body["error"])
        return end, body["reads"]


async def _loop(run: Run, agent: Agent, context: Context, reads: list[str]) -> str:
    refused = 0
    first = agent.step + 1
    while True:
        await _read_letters(run, agent, context)
        await _make_room(run, agent, context)
        is_last = agent.max_steps is not None and agent.step + 1 - first >= agent.max_steps - 1
        message = await _think(run, agent, context, reads, is_last=is_last)
        reads.clear()
        context.add(message)
        if message.tool_calls and not is_last:
            for called in await _call_all(run, agent, message):
                context.add(called.message)
                reads.append(called.head)
            continue
        if agent.inbox and not is_last:
            continue
        if agent.spec.output_schema is None or is_last:
            return message.text
        problem = problem_with(message.text, agent.spec.output_schema)
        if problem is None:
            return message.text
        refused += 1
        if refused == SCHEMA_TRIES:
            raise ToolError(f"no answer that follows the schema after {SCHEMA_TRIES} tries: {problem}")
        context.add(
            Message("user", f"Your answer does not follow the schema: {problem}. Answer again with JSON alone.")
        )


class _EndedBefore(Exception):
    """The records say that the task ended here: it failed, was cancelled or had no budget left."""

    def __init__(self, event: Event) -> None:
        self.event = event


async def _think(run: Run, agent: Agent, context: Context, reads: list[str], *, is_last: bool) -> Message:
    """One step: the model's reply, from the records or from the model."""
    past = run.chronicle.peek(agent.id)
    if past is not None and past.kind in ("finished", "result"):
        raise _EndedBefore(past)
    agent.step += 1
    event = run.chronicle.take(agent.id, "reply")
    if event is not None:
        _restore(run, agent, event.read_note())
        return message_from_plain(event.read()["message"])
    last = (Message("user", LAST_STEP),) if is_last else ()
    reply, note = await _ask(run, agent, (*context.messages, *last), with_tools=not is_last)
    body = {
        "step": agent.step,
        "message": reply.message.plain(),
        "finish": reply.finish_reason,
        "reads": list(reads),
        "tokens": await _keep_tokens(run, reply),
    }
    await run.chronicle.append(agent.id, "reply", body, note)
    return reply.message


async def _ask(
    run: Run, agent: Agent, messages: tuple[Message, ...], *, with_tools: bool
) -> tuple[ModelReply, dict[str, object]]:
    """One call of the model, paid for, with what the journal notes of it."""
    request = ModelRequest(
        agent=agent.id,
        model=agent.model,
        messages=messages,
        tools=agent.declarations if with_tools else b"[]",
        max_tokens=run.config.max_tokens,
        temperature=run.config.temperature,
        seed=run.config.seed,
        session=agent.id,
        meter=meter(agent.budget, run.prices.of(agent.model)),
    )
    reserved = agent.budget.reserve(steps=1)
    began = time.monotonic()
    try:
        async with agent.budget.time_limit():
            reply = await run.client.complete(request)
    except BaseException:
        reserved.release()
        raise
    reserved.settle()
    usage = reply.usage or Usage()
    return reply, {
        "seconds": time.monotonic() - began,
        "attempts": reply.attempts,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "model": reply.model,
        "weight_version": reply.weight_version,
    }


def _restore(run: Run, agent: Agent, note: Mapping[str, Any]) -> None:
    """Count what the step cost in the earlier life of the run."""
    prompt_tokens, completion_tokens = note["prompt_tokens"], note["completion_tokens"]
    agent.budget.restore(
        steps=1,
        calls=note["attempts"],
        tokens=prompt_tokens + completion_tokens,
        cost=run.prices.cost(agent.model, prompt_tokens, completion_tokens),
    )


async def _call_all(run: Run, agent: Agent, message: Message) -> list[Called]:
    """All calls of a turn at once; their results in the order of the calls."""
    limit = max(400, run.config.turn_bytes // len(message.tool_calls))
    calls = [call_tool(run, agent, index, call, limit=limit) for index, call in enumerate(message.tool_calls)]
    return [await calls[0]] if len(calls) == 1 else await asyncio.gather(*calls)


async def _read_letters(run: Run, agent: Agent, context: Context) -> None:
    """Messages that came since the last step; after a resume those of the records, at the place they were read."""
    while (past := run.chronicle.peek(agent.id)) is not None and past.kind == "message":
        run.chronicle.take(agent.id, "message")
        body = past.read()
        agent.letters_read.add(body["id"])
        _hear(agent, context, body["sender"], body["text"], tainted=body["tainted"])
    if run.chronicle.peek(agent.id) is not None:
        return
    while agent.inbox:
        letter = agent.inbox.popleft()
        if letter.id in agent.letters_read:
            continue
        agent.letters_read.add(letter.id)
        body = {"id": letter.id, "sender": letter.sender, "step": letter.step, "text": letter.text}
        await run.chronicle.append(agent.id, "message", body | {"tainted": letter.tainted})
        _hear(agent, context, letter.sender, letter.text, tainted=letter.tainted)


def _hear(agent: Agent, context: Context, sender: str, text: str, *, tainted: bool) -> None:
    if tainted:
        agent.taint.add(f"message from {sender}")
    context.add(Message("user", text if sender == "user" else f"[Message from {sender}]\n{text}"))


async def _make_room(run: Run, agent: Agent, context: Context) -> None:
    """Keep the context below its limit: hide old results, then summarize. See `context`."""
    if run.chronicle.peek(agent.id) is not None:
        _make_room_as_before(run, agent, context)
        return
    limit = FULL * run.config.context_bytes
    if context.size <= limit:
        return
    if positions := context.hideable():
        handles = [await run.results.keep(context.messages[at].text.encode("utf-8", "replace")) for at in positions]
        body = {"step": agent.step, "how": "hidden", "positions": positions, "handles": handles}
        await run.chronicle.append(agent.id, "compacted", body)
        context.hide(positions, handles)
    if context.size <= limit:
        return
    question = Message("user", prompt("compact"))
    reply, note = await _ask(run, agent, (*context.messages, question), with_tools=False)
    body = {"step": agent.step, "how": "summary", "summary": reply.message.text}
    await run.chronicle.append(agent.id, "compacted", body, note)
    context.summarize(reply.message.text, limit)


def _make_room_as_before(run: Run, agent: Agent, context: Context) -> None:
    while (past := run.chronicle.peek(agent.id)) is not None and past.kind == "compacted":
        run.chronicle.take(agent.id, "compacted")
        body = past.read()
        if body["how"] == "hidden":
            context.hide(body["positions"], body["handles"])
        else:
            _restore(run, agent, past.read_note())
            context.summarize(body["summary"], FULL * run.config.context_bytes)


async def _keep_tokens(run: Run, reply: ModelReply) -> dict[str, object] | None:
    """Token ids and log-probabilities exactly as the endpoint served them, for traces."""
    if reply.token_ids is None:
        return None
    served = {"prompt_token_ids": reply.prompt_token_ids, "token_ids": reply.token_ids, "logprobs": reply.logprobs}
    return (await run.results.journal.put(orjson.dumps(served))).plain()


def start_body(agent: Agent, task: str | None) -> dict[str, object]:
    """Of the event `started`."""
    return {
        "parent": agent.parent.id if agent.parent else None,
        "call": agent.call,
        "name": agent.spec.name,
        "depth": agent.depth,
        "model": agent.model,
        "system_prompt": agent.spec.system_prompt,
        "task": task,
        "tools": sorted(agent.tools),
        "rights": agent.rights.plain(),
        "budget": agent.spec.limits.plain(),
        "tainted": agent.taint.is_tainted,
    }


def _end(answer: Answer, reads: list[str]) -> dict[str, object]:
    result = answer.artefact.plain() if answer.artefact else None
    return {"status": answer.status, "result": result, "error": answer.error, "reads": reads}
