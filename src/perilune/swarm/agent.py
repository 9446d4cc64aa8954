"""One agent: think, call tools, think again, until it answers.

The loop is the whole of it. What surrounds a step stands elsewhere and is called from here: budgets and retries
(`client`, `budget`), one call of a tool (`calls`), room in the context (`context`), records (`chronicle`). Every event
is in the journal before the agent acts on it, so an agent can be killed between any two lines and taken up again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import orjson

from perilune.swarm.budget import Budget, BudgetExceeded, meter
from perilune.swarm.calls import Called, call_tool, chain_of
from perilune.swarm.chronicle import artefact_of
from perilune.swarm.client import ModelError, ModelReply, ModelRequest, Usage
from perilune.swarm.context import FIXED, FULL, Context
from perilune.swarm.journal.event import Artefact, Event, JournalError
from perilune.swarm.messages import Message, ToolCall, clean, message_from_plain
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
ENDS = ("finished", "result")
"""Kinds of records that say how a task ended."""
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
    untrusted: bool = False
    """A stranger may have had a hand in it."""


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
    after: tuple[str, ...] = ()
    """Agents whose results stand in its task."""
    answers: list[Answer] = field(default_factory=list)
    """Of the tasks that have ended."""
    has_records: bool = False
    """It had begun to work in an earlier life of the run."""
    left_open: list[str] = field(default_factory=list)
    """Agents whose end is to be written, since they do not live to write it."""
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.declarations = declarations(self.tools)


async def work(run: Run, agent: Agent, tasks: Sequence[str], *, many: bool = False) -> list[Answer]:
    """All tasks of an agent, one after the other, each in a fresh context. `many`: a worker of `map_task`, whose
    answers are events of their own."""
    end, reads = Answer(status="done"), list[str]()
    try:
        await run.chronicle.record(agent.id, "started", start_body(agent, tasks[0] if not many else None))
        if agent.id in run.cancelled and run.chronicle.will_take(agent.id, "finished") is None:
            raise asyncio.CancelledError  # a person ended it before it began, or in an earlier life of the run
        for number, task in enumerate(tasks):
            _stay_cancelled(run, agent)
            if many:
                await run.chronicle.record(agent.id, "task", {"number": number, "text": task})
            end, reads = await _attempt(run, agent, task)
            if many:
                await run.chronicle.record(agent.id, "result", {"number": number, **_end(end, reads)})
            agent.answers.append(end)
        _stay_cancelled(run, agent)
        body = _end(Answer(status="done"), []) if many else _end(end, reads)
        if run.chronicle.peek(agent.id) is not None:
            await run.chronicle.record(agent.id, "finished", body)  # at once: others count on its budget from now on
        else:
            await _surely(run.chronicle.append(agent.id, "finished", body))
        leave_records(run, agent)
        await end_left_open(run, agent)
        return agent.answers
    except asyncio.CancelledError:
        if not run.is_stopping:
            if not leave_records(run, agent):
                agent.left_open.append(agent.id)
            await end_left_open(run, agent)
        raise
    finally:
        agent.has_ended = True
        agent.budget.close()


async def _surely(writing: Coroutine[Any, Any, Event]) -> None:
    """Wait until the last event is written: who is cancelled meanwhile has ended before."""
    task = asyncio.ensure_future(writing)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
    task.result()


def leave_records(run: Run, agent: Agent) -> bool:
    """Records of an earlier life that nobody comes to repeat, since the agent has ended: count what it and those it
    created spent. Whether the agent's own end is among them; those whose end is not go to `left_open`."""
    if not run.chronicle.has_records:
        return False

    def is_mine(chain: str) -> bool:
        name = chain.partition("#")[0]
        while name and name not in run.agents:
            name = name.rpartition("/")[0]
        return name == agent.id

    left: dict[str, bool] = {}
    """Whether each agent had ended."""
    for event in run.chronicle.drop(is_mine):
        if event.kind == "reply" or (event.kind == "compacted" and event.read()["how"] == "summary"):
            _restore(run, agent, event.read_note())
        elif event.kind in ("started", "finished"):
            left[event.chain] = event.kind == "finished"
    has_end = left.pop(agent.id, False)
    agent.budget.restore(agents=len(left))
    agent.left_open += [name for name, has_ended in left.items() if not has_ended]
    return has_end


async def end_left_open(run: Run, agent: Agent) -> None:
    """Write the ends of those that do not live to write them."""
    while agent.left_open:
        body = _end(Answer(status="cancelled"), [])
        await _surely(run.chronicle.append(agent.left_open.pop(0), "finished", body))


async def _attempt(run: Run, agent: Agent, task: str) -> tuple[Answer, list[str]]:
    """One task; an answer in any case. With it the heads of calls that no event has bound yet."""
    reads: list[str] = []
    try:
        answer = await _answer(run, agent, task, reads)
    except BudgetExceeded as error:
        answer = Answer(status="budget", error=str(error))
    except _EndedBefore:
        answer = Answer(status="done")  # in name only: the records say
    except JournalError:
        raise
    except Exception as error:
        if agent.parent is None and not isinstance(error, ToolError) and not _is_refusal(error):
            raise  # the endpoint is away, or something is broken: the run stops here and can be resumed
        known = isinstance(error, (ModelError, ToolError))
        text = run.secrets.mask(clean(str(error) if known else f"{type(error).__name__}: {error}"))
        answer = Answer(status="failed", error=text)
    _stay_cancelled(run, agent)
    past = run.chronicle.peek(agent.id)
    if past is not None and past.kind in ENDS:
        body = past.read()
        artefact = artefact_of(body["result"])
        return replace(answer, status=body["status"], artefact=artefact, error=body["error"]), body["reads"]
    return answer, reads


def _stay_cancelled(run: Run, agent: Agent) -> None:
    """An agent that was cancelled at this point in an earlier life of the run is cancelled again."""
    past = run.chronicle.peek(agent.id)
    if past is not None and past.kind == "finished" and past.read()["status"] == "cancelled":
        raise asyncio.CancelledError


async def _answer(run: Run, agent: Agent, task: str, reads: list[str]) -> Answer:
    context = Context(agent.spec.system_prompt, task)
    if context.size > FIXED * run.config.context_bytes:
        raise ToolError(
            f"the system prompt and the task take {context.size:,} bytes, and a context of "
            f"{run.config.context_bytes:,} bytes has room for {int(FIXED * run.config.context_bytes):,} of them: "
            "shorten them, pass long texts by handle, or raise context_tokens"
        )
    text = await _loop(run, agent, context, reads)
    data, rests_on_tainted = await run.results.expand(text)
    untrusted = rests_on_tainted or agent.taint.is_tainted
    artefact = await run.results.journal.put(data)
    run.results.learn(artefact, tainted=untrusted)
    return Answer(status="done", text=text, artefact=artefact, untrusted=untrusted)


def _is_refusal(error: Exception) -> bool:
    return isinstance(error, ModelError) and error.kind == "refused"


async def _loop(run: Run, agent: Agent, context: Context, reads: list[str]) -> str:
    refused = 0
    first = agent.step + 1
    while True:
        await run.catch_up(agent)
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
                if called.untrusted:
                    agent.taint.add(called.untrusted)
            continue
        await run.catch_up(agent)
        if not is_last and _has_letters(run, agent):
            continue
        problem = _problem(agent, message)
        if problem is None:
            return message.text
        refused += 1
        if refused == SCHEMA_TRIES or is_last:
            raise ToolError(f"no answer that follows the schema after {refused} tries: {problem}")
        context.add(
            Message("user", f"Your answer does not follow the schema: {problem}. Answer again with JSON alone.")
        )


def _problem(agent: Agent, message: Message) -> str | None:
    """What keeps a message from being an answer."""
    if message.tool_calls and not message.text.strip():
        raise ToolError("the last step, which is for an answer, had calls and no text: no steps are left")
    return None if agent.spec.output_schema is None else problem_with(message.text, agent.spec.output_schema)


class _EndedBefore(Exception):
    """The records say that the task ended here: it failed, was cancelled or had no budget left."""


async def _think(run: Run, agent: Agent, context: Context, reads: list[str], *, is_last: bool) -> Message:
    """One step: the model's reply, from the records or from the model."""
    if _ended_before(run, agent):
        raise _EndedBefore
    agent.step += 1
    event = run.chronicle.take(agent.id, "reply")
    if event is not None:
        _restore(run, agent, event.read_note())
        return message_from_plain(event.read()["message"])
    last = (Message("user", LAST_STEP),) if is_last else ()
    reply, note = await _ask(run, agent, (*context.messages, *last), with_tools=not is_last)
    message = _sound(run, reply.message)
    body = {
        "step": agent.step,
        "message": message.plain(),
        "finish": reply.finish_reason,
        "reads": list(reads),
        "tokens": await _keep_tokens(run, reply),
    }
    await run.chronicle.append(agent.id, "reply", body, note)
    return message


def _ended_before(run: Run, agent: Agent) -> bool:
    past = run.chronicle.peek(agent.id)
    return past is not None and past.kind in ENDS


def _sound(run: Run, message: Message) -> Message:
    """The message without registered secrets, and as UTF-8 can hold it."""

    def sound(text: str) -> str:
        return run.secrets.mask(clean(text))

    texts = [
        message.text,
        message.reasoning or "",
        *(each for call in message.tool_calls for each in (call.id, call.name, call.arguments)),
    ]
    if all(sound(text) == text for text in texts):
        return message
    content = message.content
    if isinstance(content, str):
        content = sound(content)
    elif content is not None:
        content = tuple({**part, "text": sound(str(part["text"]))} if part.get("text") else part for part in content)
    calls = tuple(ToolCall(clean(call.id), clean(call.name), sound(call.arguments)) for call in message.tool_calls)
    reasoning = None if message.reasoning is None else sound(message.reasoning)
    return Message(message.role, content, calls, message.tool_call_id, reasoning)


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
    """All calls of a turn at once, until the agent's time is over; their results in the order of the calls."""
    limit = max(400, run.config.turn_bytes // len(message.tool_calls))
    numbered = list(enumerate(message.tool_calls))
    if _ended_before(run, agent):  # then calls without an outcome never had one
        numbered = [(at, call) for at, call in numbered if run.chronicle.will_take(chain_of(agent, at), "outcome")]
    if not any(run.chronicle.has_children(agent.id, f"{agent.step}.{at}") for at, _ in numbered):
        await run.catch_up(agent)
    async with agent.budget.time_limit():
        if len(numbered) == 1:
            return [await call_tool(run, agent, *numbered[0], limit=limit)]
        calls = [asyncio.ensure_future(call_tool(run, agent, at, call, limit=limit)) for at, call in numbered]
        try:
            return await asyncio.gather(*calls)
        except BaseException:  # no call outlives its turn
            for each in calls:
                each.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            raise


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


def _has_letters(run: Run, agent: Agent) -> bool:
    """Whether there is something to read before it may end; where there are records, they say."""
    if (past := run.chronicle.peek(agent.id)) is not None:
        return past.kind == "message"
    return any(letter.id not in agent.letters_read for letter in agent.inbox)


def _hear(agent: Agent, context: Context, sender: str, text: str, *, tainted: bool) -> None:
    if tainted:
        agent.taint.add(f"message from {sender}")
    context.add(Message("user", text if sender == "user" else f"[Message from {sender}]\n{text}"))


async def _make_room(run: Run, agent: Agent, context: Context) -> None:
    """Keep the context below its limit: hide old results, then summarize. See `context`."""
    if run.chronicle.peek(agent.id) is not None:
        _make_room_as_before(run, agent, context)
        return
    limit, question = FULL * run.config.context_bytes, Message("user", prompt("compact"))
    if context.size <= limit:
        return
    await _hide(run, agent, context, context.hideable())
    if context.size + len(question.wire) > run.config.context_bytes:
        await _hide(run, agent, context, context.hideable(kept=0))
    if context.size <= limit:
        return
    if context.size + len(question.wire) > run.config.context_bytes:
        handle = await run.results.keep(context.past(), tainted=agent.taint.is_tainted)
        await run.chronicle.append(agent.id, "compacted", {"step": agent.step, "how": "dropped", "handle": handle})
        context.drop(handle)
        return
    reply, note = await _ask(run, agent, (*context.messages, question), with_tools=False)
    summary = _sound(run, reply.message).text
    body = {"step": agent.step, "how": "summary", "summary": summary}
    await run.chronicle.append(agent.id, "compacted", body, note)
    context.summarize(summary, limit)


async def _hide(run: Run, agent: Agent, context: Context, positions: list[int]) -> None:
    if not positions:
        return
    tainted = agent.taint.is_tainted
    handles = [await run.results.keep(context.messages[at].text.encode(), tainted=tainted) for at in positions]
    body = {"step": agent.step, "how": "hidden", "positions": positions, "handles": handles}
    await run.chronicle.append(agent.id, "compacted", body)
    context.hide(positions, handles)


def _make_room_as_before(run: Run, agent: Agent, context: Context) -> None:
    while (past := run.chronicle.peek(agent.id)) is not None and past.kind == "compacted":
        run.chronicle.take(agent.id, "compacted")
        body = past.read()
        handles = body.get("handles", [body["handle"]] if "handle" in body else [])
        for handle in handles:
            run.results.learn(run.results.find(handle), tainted=agent.taint.is_tainted)
        if body["how"] == "hidden":
            context.hide(body["positions"], handles)
        elif body["how"] == "dropped":
            context.drop(*handles)
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
        "after": list(agent.after),
    }


def _end(answer: Answer, reads: list[str]) -> dict[str, object]:
    result = answer.artefact.plain() if answer.artefact else None
    return {"status": answer.status, "result": result, "error": answer.error, "reads": reads}
