"""One call of a tool, from the model's text to the message it sees.

In order: records of an earlier life, the tool by its name, arguments, policy and approval, a sign in the journal before
anything that must not happen twice, the call itself under a time limit, secrets masked, length bounded, and the outcome
in the journal. Whatever goes wrong becomes an outcome that the model can read; only the end of the agent passes.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from perilune.swarm.arguments import parse_arguments
from perilune.swarm.chronicle import artefact_of
from perilune.swarm.journal.event import JournalError, canonical
from perilune.swarm.messages import Message, ToolCall
from perilune.swarm.tools.tool import OutcomeUnknown, Tool, ToolContext, ToolError, ToolResult

if TYPE_CHECKING:
    from perilune.swarm.agent import Agent
    from perilune.swarm.run import Run

CallStatus = Literal["ok", "error", "denied", "unknown"]
UNKNOWN = (
    "The runtime stopped while this call was running. Whether it took effect is unknown, and it was not run again. "
    "Check what it did before you repeat it."
)


@dataclass(frozen=True, slots=True)
class Called:
    message: Message
    head: str
    """Of the call's chain, for the agent's next event."""
    untrusted: str | None
    """What the result was, if a stranger may have written it: its reader is tainted from the next step on. Calls of
    the same turn were written before it was read."""


def chain_of(agent: Agent, index: int) -> str:
    return f"{agent.id}#{agent.step}.{index}"


async def call_tool(run: Run, agent: Agent, index: int, call: ToolCall, *, limit: int) -> Called:
    chain = chain_of(agent, index)
    context = run.tool_context(agent, index, limit)
    if run.chronicle.peek(chain) is not None:
        body = await _from_records(run, agent, context, call, chain)
    else:
        began = time.monotonic()
        outcome = await _outcome(run, agent, context, call, chain)
        body = await _bounded(run, agent, call, outcome, limit)
        await run.chronicle.append(chain, "outcome", body, {"seconds": time.monotonic() - began})
    agent.seen.update(body["joined"])
    untrusted = f"{call.name} at step {agent.step}" if body["untrusted"] else None
    return Called(Message("tool", body["text"], tool_call_id=call.id), run.chronicle.close_chain(chain), untrusted)


async def _from_records(run: Run, agent: Agent, context: ToolContext, call: ToolCall, chain: str) -> dict[str, Any]:
    """The outcome as it was; unknown where the journal ends between the start of a call and its outcome."""
    event = run.chronicle.take(chain, "call_started", "outcome")
    if event is not None and event.kind == "call_started":
        event = run.chronicle.take(chain, "outcome")
    if event is None:
        body = _body(call, "unknown", ToolResult(text=UNKNOWN, untrusted=False))
        await run.chronicle.append(chain, "outcome", body, {"seconds": 0.0})
        return body
    body = event.read()
    if (artefact := artefact_of(body["result"])) is not None:
        run.results.learn(artefact, tainted=body["untrusted"] or agent.taint.is_tainted)
    tool = agent.tools.get(call.name)
    if tool is not None and tool.again and (body["status"] == "ok" or body["joined"]):
        arguments, _ = _arguments(tool, call)
        context.extras["is_repeated"] = True
        try:
            await tool.call(context, arguments)
        except ToolError as error:
            raise JournalError(f"{chain} cannot be repeated, and the run not be resumed: {error}") from None
    for assignment in tuple(agent.assignments.values()):
        if any(member.id in body["joined"] for member in assignment.agents):
            await assignment.ended(context)  # its result was known here
    return body


async def _outcome(
    run: Run, agent: Agent, context: ToolContext, call: ToolCall, chain: str
) -> tuple[CallStatus, ToolResult]:
    tool = agent.tools.get(call.name)
    if tool is None:
        return "error", _failure(_no_such_tool(call.name, agent))
    try:
        arguments, raw = _arguments(tool, call)
        denial = await run.allows(agent, tool, raw, f"{agent.step}.{context.index}")
        if denial is not None:
            return "denied", _failure(denial)
        if not tool.may_repeat:
            sha = hashlib.sha256(canonical(raw)).hexdigest()
            await run.chronicle.append(chain, "call_started", {"tool": tool.name, "arguments_sha256": sha})
        result = await _limited(tool, context, arguments, None if tool.waits else run.config.tool_seconds)
    except OutcomeUnknown as error:
        return "unknown", _failure(str(error), untrusted=tool.untrusted)
    except ToolError as error:
        return "error", _failure(str(error), untrusted=tool.untrusted)
    except JournalError:
        raise
    except Exception as error:
        return "error", _failure(f"{tool.name} failed: {type(error).__name__}: {error}", untrusted=tool.untrusted)
    if isinstance(result, str):
        result = ToolResult(text=result)
    untrusted = tool.untrusted if result.untrusted is None else result.untrusted
    known = ToolResult(
        text=result.text,
        is_error=result.is_error,
        untrusted=untrusted,
        spawned=result.spawned,
        joined=result.joined,
    )
    return ("error" if result.is_error else "ok"), known


async def _limited(
    tool: Tool, context: ToolContext, arguments: dict[str, Any], seconds: float | None
) -> ToolResult | str:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await tool.call(context, arguments)
    except TimeoutError as error:
        if limit.expired():
            raise ToolError(f"{tool.name} was stopped after {seconds:g} seconds") from None
        raise ToolError(f"{tool.name}: {error or 'something it needs timed out'}") from None


def _arguments(tool: Tool, call: ToolCall) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checked arguments for the call, and as the model gave them, for policy and records."""
    raw = parse_arguments(call.arguments, tool.effects)
    return (tool.validate(raw) if tool.validate else raw), raw


async def _bounded(
    run: Run, agent: Agent, call: ToolCall, outcome: tuple[CallStatus, ToolResult], limit: int
) -> dict[str, Any]:
    status, result = outcome
    tainted = bool(result.untrusted) or agent.taint.is_tainted
    text, artefact = await run.results.digest(run.secrets.mask(result.text), limit, tainted=tainted)
    body = _body(call, status, result)
    body["text"] = text
    body["result"] = artefact.plain() if artefact else None
    return body


def _body(call: ToolCall, status: CallStatus, result: ToolResult) -> dict[str, Any]:
    return {
        "tool": call.name,
        "call_id": call.id,
        "status": status,
        "text": result.text,
        "result": None,
        "spawned": list(result.spawned),
        "joined": list(result.joined),
        "untrusted": bool(result.untrusted),
    }


def _failure(text: str, *, untrusted: bool = False) -> ToolResult:
    return ToolResult(text=f"Error: {text}", is_error=True, untrusted=untrusted)


def _no_such_tool(name: str, agent: Agent) -> str:
    near = difflib.get_close_matches(name, agent.tools, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"yours are {', '.join(sorted(agent.tools)) or 'none'}"
    return f"there is no tool {name[:80]!r}; {hint}"
