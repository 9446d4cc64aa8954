"""The tools with which an agent creates others, gives them work and collects it.

`create_subagent(name, system_prompt)` and `assign_task(agent, prompt)` are those of K2.5: a registered kind of agent,
and a call that runs one instance of it and returns its one message; several in one turn run at the same time. The rest
is for work that should not block the turn: `start_task` and `map_task` give handles, `wait` collects, `read_result`
reads, `send` and `cancel` reach a running agent, `list_agents` tells. Long documents: see `compose`.

An instance is named after the call that made it (`main/researcher-2.0`: main's step 2, first call), so names do not
depend on who was faster. After a resume the same calls are made again; each instance finds its own records.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
from pydantic import Field

from perilune.swarm.agent import Agent, Answer, Letter, leave_records
from perilune.swarm.budget import BudgetExceeded, Limits
from perilune.swarm.journal.event import JournalError
from perilune.swarm.rights import Rights, RightsExceeded, RightsRequest
from perilune.swarm.scheduler import Job
from perilune.swarm.settings import AgentSpec
from perilune.swarm.structured import check_schema
from perilune.swarm.taint import Taint
from perilune.swarm.tools.tool import Tool, ToolContext, ToolError, ToolResult, tool

if TYPE_CHECKING:
    from perilune.swarm.run import Run

LARGEST_READ = 32_768
SHOWN_ITEMS = 20
SMALLEST_DIGEST = 300


@dataclass(kw_only=True)
class Assignment:
    """Work that an agent gave away. Its job returns the answers, one for each task."""

    handle: str
    what: str
    agents: list[Agent]
    job: Job
    count: int = 1
    whole: str | None = None
    """Handle to all answers, once somebody asked for it."""

    @property
    def answers(self) -> list[Answer]:
        if isinstance(self.job.error, JournalError):
            raise self.job.error  # records that cannot be written or do not fit end the run
        return self.job.result or []

    @property
    def is_tainted(self) -> bool:
        return any(agent.taint.is_tainted for agent in self.agents) or any(each.untrusted for each in self.answers)

    @property
    def started(self) -> tuple[str, ...]:
        """Its agents, without those that ended in the queue."""
        return tuple(agent.id for agent in self.agents if agent.job is not None or agent.has_records)

    async def ended(self, context: ToolContext) -> None:
        """Wait for its end, as the caller did in an earlier life of the run; its handle is known again."""
        run, parent = who(context)
        async with run.scheduler.resting(_job(parent)):
            await self.job.ended()
        if self.count > 1 and self.answers:
            await whole_of(run, self)


# ---------------------------------------------------------------------------------------------------------------------
# Tools


@tool(effects="none", again=True)
def create_subagent(
    context: ToolContext,
    name: str,
    system_prompt: str,
    model: str | None = None,
    tools: list[str] | None = None,
    budget: dict[str, float] | None = None,
    output_schema: dict[str, Any] | None = None,
) -> str:
    """Register a kind of sub-agent under a name, with a system prompt that describes its role. Use it with assign_task,
    start_task or map_task as often as needed. Optional: its model, the names of its tools (a part of yours), its budget
    (calls, steps, agents, tokens, cost, seconds), and a JSON schema for its answers."""
    _, agent = who(context)
    if not name.strip():
        raise ToolError("name is empty")
    if output_schema is not None and (problem := check_schema(output_schema)):
        raise ToolError(problem)
    spec = AgentSpec(
        name=name,
        system_prompt=system_prompt,
        model=model,
        tools=None if tools is None else tuple(tools),
        limits=_limits(budget),
        output_schema=output_schema,
    )
    _grant(agent, spec)
    agent.subagents[name] = spec
    return f"Sub-agent {name!r} is ready: assign_task(agent={name!r}, prompt=...)."


@tool(effects="none", waits=True, again=True)
async def assign_task(context: ToolContext, agent: str, prompt: str) -> ToolResult:
    """Run a registered sub-agent on a prompt and return its final message. It sees nothing but its system prompt and
    this prompt. Several calls in one turn run at the same time."""
    run, parent = who(context)
    assignment = _start_one(run, parent, context, registered(parent, agent), prompt)
    async with run.scheduler.resting(_job(parent)):
        await assignment.job.ended()
    return await _report(run, context.limit, [assignment], single=True)


@tool(effects="none", again=True)
def start_task(context: ToolContext, agent: str, prompt: str) -> ToolResult:
    """Start a registered sub-agent on a prompt and return a handle at once. Collect its result with wait."""
    run, parent = who(context)
    assignment = _start_one(run, parent, context, registered(parent, agent), prompt)
    return ToolResult(text=f"Started {assignment.handle}.", spawned=(assignment.agents[0].id,))


@tool(effects="none", again=True)
async def map_task(
    context: ToolContext,
    agent: str,
    template: str,
    items: list[str] | None = None,
    items_from: str | None = None,
    agents: Annotated[int | None, Field(ge=1)] = None,
) -> ToolResult:
    """Run a registered sub-agent on every item: {item} in the template is replaced by it. Items are given as a list, or
    as the handle (items_from) of a stored result with one item on each line. Returns one handle for all. At most
    `agents` instances share the items (default: one for each item, if the budget allows)."""
    run, parent = who(context)
    spec = registered(parent, agent)
    source = Source(handle="", is_tainted=False)
    if (items is None) == (items_from is None):
        raise ToolError("give either items or items_from")
    if items_from is not None:
        source = await handle_of(context, items_from)
        items = [line for line in (await run.results.read(source.handle)).splitlines() if line.strip()]
    if not items:
        raise ToolError("there are no items")
    if "{item}" not in template:
        raise ToolError("template has no {item}")
    prompts = [template.replace("{item}", item) for item in items]
    count = min(agents or len(prompts), len(prompts))
    shares = [list(range(first, len(prompts), count)) for first in range(count)]
    members = create_agents(run, parent, context, spec, [f".{number}" for number in range(count)])
    for member in members:
        rest_on(member, [source])

    async def share_out(job: Job) -> list[Answer]:
        jobs = [
            run_agent(run, member, [prompts[at] for at in share], owner=job, many=True)
            for member, share in zip(members, shares)
        ]
        async with run.scheduler.resting(job):
            await run.scheduler.wait(jobs, count=len(jobs))
        answers: dict[int, Answer] = {}
        for one, member, share in zip(jobs, members, shares):
            got = one.result or member.answers
            lost = lost_answer(one)
            answers |= {at: got[number] if number < len(got) else lost for number, at in enumerate(share)}
        return [answers[at] for at in range(len(prompts))]

    assignment = start_job(run, parent, context, spec, members, share_out, what=f"{len(items)} items")
    assignment.count = len(items)
    text = f"Started {assignment.handle}: {len(items):,} items over {count} agents."
    return ToolResult(text=text, spawned=tuple(member.id for member in members), joined=source.agents)


@tool(effects="none", waits=True)
async def wait(
    context: ToolContext,
    handles: list[str] | None = None,
    mode: Literal["any", "all"] | Annotated[int, Field(ge=1)] = "all",
    seconds: Annotated[float | None, Field(gt=0)] = None,
) -> ToolResult:
    """Wait for tasks by handle (default: all whose results you have not seen) until any, all or a number of them have
    ended, or the seconds are over. Returns what has ended; the others go on."""
    run, parent = who(context)
    chosen = [assigned(parent, handle) for handle in dict.fromkeys(handles)] if handles else _unseen(parent)
    if not chosen:
        return ToolResult(text="There is nothing to wait for.")
    count = 1 if mode == "any" else len(chosen) if mode == "all" else min(int(mode), len(chosen))
    async with run.scheduler.resting(_job(parent)):
        await run.scheduler.wait([each.job for each in chosen], count=count, seconds=seconds)
    done = [each for each in chosen if each.job.has_ended]
    open_handles = ", ".join(each.handle for each in chosen if not each.job.has_ended)
    report = await _report(run, context.limit, done)
    rest = f"\n\nStill running: {open_handles}" if open_handles else ""
    return replace(report, text=report.text + rest)


@tool(effects="none")
async def read_result(
    context: ToolContext,
    handle: str,
    start: Annotated[int, Field(ge=0)] = 0,
    end: Annotated[int | None, Field(ge=0)] = None,
) -> ToolResult:
    """Read a stored result, or the part of it from byte `start` to byte `end`, by the handle of a task or an artefact
    (art:...). At most 32,768 bytes at a time."""
    run, parent = who(context)
    source = await handle_of(context, handle)
    size = run.results.find(source.handle).size
    room = max(200, min(LARGEST_READ, context.limit - 100))
    text, stop = await run.results.read_part(source.handle, start, size if end is None else end, room)
    untrusted = source.is_tainted or parent.taint.is_tainted
    return ToolResult(
        text=f"{text}\n[bytes {start:,} to {stop:,} of {size:,}]", joined=source.agents, untrusted=untrusted
    )


@tool(effects="none", again=True)
def send(context: ToolContext, to: str, text: str) -> str:
    """Send a message to a running task by its handle, or to "parent", who reads it before its next step."""
    run, sender = who(context)
    if to == "parent" and sender.parent is None:
        raise ToolError("you have no parent: answer instead")
    targets = [sender.parent] if to == "parent" else assigned(sender, to).agents
    open_targets = [each for each in targets if each is not None and not each.has_ended]
    if not open_targets and not is_repeated(context):
        raise ToolError(f"{to} has ended and reads nothing any more")
    letter_id = f"{sender.id}#{context.step}.{context.index}"
    tainted = sender.taint.is_tainted
    for target in open_targets:
        run.deliver(target, Letter(id=letter_id, sender=sender.id, step=context.step, text=text, tainted=tainted))
    return f"Sent to {to}."


@tool(effects="none", waits=True, again=True)
async def cancel(context: ToolContext, handle: str) -> str:
    """End a running task and all that it started."""
    run, parent = who(context)
    assignment = assigned(parent, handle)
    if _ends_by_itself(run, assignment):
        await assignment.ended(context)
    await run.scheduler.cancel(assignment.job)
    return f"{handle} {'is cancelled' if assignment.job.state == 'cancelled' else 'had already ended'}."


@tool(effects="none")
def list_agents(context: ToolContext) -> str:
    """Your kinds of sub-agents and the tasks you gave them, with their state."""
    _, parent = who(context)
    kinds = [f"{name}: {' '.join(spec.system_prompt.split())[:80]}" for name, spec in parent.subagents.items()]
    tasks = [f"{each.handle}: {each.job.state}, {each.what}" for each in parent.assignments.values()]
    return "\n".join(["Kinds:", *(kinds or ["none"]), "Tasks:", *(tasks or ["none"])])


TOOLS: dict[str, Tool] = {
    each.name: each
    for each in (create_subagent, assign_task, start_task, map_task, wait, read_result, send, cancel, list_agents)
}


# ---------------------------------------------------------------------------------------------------------------------
# Starting agents


def _start_one(run: Run, parent: Agent, context: ToolContext, spec: AgentSpec, prompt: str) -> Assignment:
    [member] = create_agents(run, parent, context, spec, [""])

    async def one(job: Job) -> list[Answer]:
        member.job = job
        return await run.perform(member, [prompt], many=False)

    return start_job(run, parent, context, spec, [member], one, what=" ".join(prompt.split())[:80])


def start_job(
    run: Run,
    parent: Agent,
    context: ToolContext,
    spec: AgentSpec,
    members: list[Agent],
    job_work: Callable[[Job], Awaitable[list[Answer]]],
    *,
    what: str,
) -> Assignment:
    handle = f"{spec.slug}-{context.step}.{context.index}"
    job = run.scheduler.start(f"{parent.id}/{handle}", job_work, owner=_job(parent))
    job.when_ended(lambda: _dismiss(run, parent, members))
    assignment = Assignment(handle=handle, what=what, agents=members, job=job)
    parent.assignments[handle] = assignment
    return assignment


def _dismiss(run: Run, parent: Agent, members: Sequence[Agent]) -> None:
    """Those that never came to work give back what was set aside for them; if they did in an earlier life of the run,
    the nearest agent above them that is still there writes their end."""
    while parent.has_ended and parent.parent is not None:
        parent = parent.parent
    for member in members:
        if member.job is None:
            if member.has_records and not run.is_stopping:
                if not leave_records(run, member):
                    member.left_open.append(member.id)
                parent.left_open += member.left_open
            member.has_ended = True
            member.budget.close()


def _ends_by_itself(run: Run, assignment: Assignment) -> bool:
    """Whether the records of an earlier life, not yet repeated, say that it ended, and not by being cancelled."""
    ends = [run.chronicle.will_take(agent.id, "finished") for agent in assignment.agents]
    return all(end is not None and end.read()["status"] != "cancelled" for end in ends)


def run_agent(run: Run, member: Agent, prompts: Sequence[str], *, owner: Job, many: bool) -> Job:
    async def one(job: Job) -> list[Answer]:
        member.job = job
        return await run.perform(member, prompts, many=many)

    return run.scheduler.start(member.id, one, owner=owner)


def create_agents(
    run: Run, parent: Agent, context: ToolContext, spec: AgentSpec, suffixes: Sequence[str]
) -> list[Agent]:
    """Instances with their shares of rights and budget, all of them or none; `ToolError` says what is missing."""
    rights = _grant(parent, spec)
    call = f"{context.step}.{context.index}"
    agents: list[Agent] = []
    try:
        for suffix in suffixes:
            name = f"{parent.id}/{spec.slug}-{call}{suffix}"
            agents.append(
                Agent(
                    id=name,
                    spec=spec,
                    parent=parent,
                    call=call,
                    depth=parent.depth + 1,
                    model=spec.model or parent.model,
                    rights=rights,
                    budget=parent.budget.child(
                        spec.limits,
                        name=name,
                        is_repeated=is_repeated(context) or run.chronicle.peek(name) is not None,
                    ),
                    has_records=run.chronicle.peek(name) is not None,
                    tools=run.tools_for(rights),
                    taint=Taint.inherited(parent.taint),
                    max_steps=run.config.subagent_steps if spec.limits.steps is None else spec.limits.steps,
                )
            )
    except BudgetExceeded as error:
        for agent in agents:
            agent.budget.close()
        raise ToolError(f"no budget for {len(suffixes)} of {spec.name!r}: {error}") from None
    for agent in agents:
        run.add(agent)
    return agents


def _grant(parent: Agent, spec: AgentSpec) -> Rights:
    """What an instance of the kind may do: never more than its parent."""
    models = None if spec.model is None else (spec.model,)
    try:
        return parent.rights.grant(RightsRequest(tools=spec.tools, models=models))
    except (RightsExceeded, ValueError) as error:
        raise ToolError(str(error)) from None


# ---------------------------------------------------------------------------------------------------------------------
# Telling what came of it


async def _report(run: Run, limit: int, ended: Sequence[Assignment], *, single: bool = False) -> ToolResult:
    share = max(SMALLEST_DIGEST, limit // max(1, len(ended)) - 80)
    parts = [await _told(run, each, share) for each in ended]
    text = parts[0] if single else "\n\n".join(f"## {each.handle}\n{part}" for each, part in zip(ended, parts))
    failed = single and ended[0].answers and ended[0].answers[0].status != "done"
    return ToolResult(
        text=text or "Nothing has ended yet.",
        is_error=bool(failed) or (single and not ended[0].answers),
        joined=tuple(name for each in ended for name in each.started),
        untrusted=any(each.is_tainted for each in ended),
    )


async def _told(run: Run, assignment: Assignment, limit: int) -> str:
    """What the parent reads of an assignment: an answer, or a digest of many."""
    answers = assignment.answers
    if not answers:
        return _ending(assignment.job)
    if assignment.count == 1:
        return await _answer_text(run, answers[0], limit)
    good = sum(answer.status == "done" for answer in answers)
    handle = await whole_of(run, assignment)
    lines = [f"{good:,} of {len(answers):,} items done. All results, one JSON line each: {handle}"]
    for at, answer in enumerate(answers[:SHOWN_ITEMS]):
        lines.append(f"{at}: {(await _answer_text(run, answer, limit // (SHOWN_ITEMS + 2)))}")
    if len(answers) > SHOWN_ITEMS:
        lines.append(f"... {len(answers) - SHOWN_ITEMS:,} more")
    return "\n".join(lines)


async def _answer_text(run: Run, answer: Answer, limit: int) -> str:
    if answer.status != "done" or answer.artefact is None:
        return f"Ended without an answer ({answer.status}): {answer.error or 'no reason given'}"
    handle = run.results.learn(answer.artefact, tainted=answer.untrusted)
    shown, cut = await run.results.digest(answer.text, limit, tainted=answer.untrusted)
    filled_in = answer.artefact.size != len(answer.text.encode("utf-8", "replace"))
    return (
        f"{shown}\n[with its references {answer.artefact.size:,} bytes: {handle}]" if filled_in and not cut else shown
    )


async def whole_of(run: Run, assignment: Assignment) -> str:
    """A handle to all that came of an assignment."""
    answers = assignment.answers
    if not answers:
        raise ToolError(_ending(assignment.job))
    if assignment.count == 1:
        if answers[0].artefact is None:
            raise ToolError(f"Ended without an answer ({answers[0].status}): {answers[0].error or 'no reason given'}")
        return run.results.learn(answers[0].artefact, tainted=answers[0].untrusted)
    if assignment.whole is None:
        lines = []
        for at, answer in enumerate(answers):
            handle = run.results.learn(answer.artefact, tainted=answer.untrusted) if answer.artefact else None
            row = {"item": at, "status": answer.status, "text": answer.text, "handle": handle, "error": answer.error}
            lines.append(orjson.dumps(row))
        assignment.whole = await run.results.keep(b"\n".join(lines) + b"\n", tainted=assignment.is_tainted)
    return assignment.whole


@dataclass(frozen=True, kw_only=True)
class Source:
    """A stored result that a call reads."""

    handle: str
    agents: tuple[str, ...] = ()
    """Who made it, where it is the result of a task."""
    is_tainted: bool


async def handle_of(context: ToolContext, name: str) -> Source:
    """The artefact behind the handle of an ended task, or the artefact itself."""
    run, parent = who(context)
    assignment = parent.assignments.get(name)
    if assignment is None:
        return Source(handle=name, is_tainted=run.results.is_tainted(name))
    if is_repeated(context):
        await assignment.ended(context)
    if not assignment.job.has_ended:
        raise ToolError(f"{name} is still running: wait for it first")
    handle = await whole_of(run, assignment)
    return Source(handle=handle, agents=assignment.started, is_tainted=assignment.is_tainted)


def rest_on(agent: Agent, sources: Sequence[Source]) -> None:
    """The task of an agent that has not begun is made of these results."""
    agent.after = tuple(dict.fromkeys(name for source in sources for name in source.agents))
    if any(source.is_tainted for source in sources):
        agent.taint.add("a result in its task")


def lost_answer(job: Job) -> Answer:
    """In place of an answer that a job did not come to."""
    if isinstance(job.error, JournalError):
        raise job.error
    status = "cancelled" if job.state == "cancelled" else "failed"
    return Answer(status=status, error=str(job.error or "") or "ended early")


def is_repeated(context: ToolContext) -> bool:
    """Whether the call was made in an earlier life of the run and is made again for what it sets up."""
    return context.extras.get("is_repeated", False)


def _ending(job: Job) -> str:
    return f"Ended without an answer ({job.state}): {str(job.error or '') or 'no reason given'}"


def who(context: ToolContext) -> tuple[Run, Agent]:
    return context.extras["run"], context.extras["agent"]


def _job(agent: Agent) -> Job:
    if agent.job is None:
        raise RuntimeError(f"agent {agent.id!r} has not started")
    return agent.job


def registered(parent: Agent, name: str) -> AgentSpec:
    spec = parent.subagents.get(name)
    if spec is None:
        known = ", ".join(repr(each) for each in parent.subagents) or "none yet"
        raise ToolError(f"no sub-agent is called {name!r}; registered: {known}. create_subagent makes one.")
    return spec


def assigned(parent: Agent, handle: str) -> Assignment:
    assignment = parent.assignments.get(handle)
    if assignment is None:
        raise ToolError(f"no task has the handle {handle!r}; yours: {', '.join(parent.assignments) or 'none'}")
    return assignment


def _unseen(parent: Agent) -> list[Assignment]:
    return [each for each in parent.assignments.values() if not parent.seen.issuperset(a.id for a in each.agents)]


def _limits(budget: dict[str, float] | None) -> Limits:
    amounts: dict[str, Any] = {
        name: int(value) if float(value).is_integer() else value for name, value in (budget or {}).items()
    }
    try:
        return Limits(**amounts)
    except (TypeError, ValueError) as error:
        raise ToolError(f"budget: {error}; expected some of calls, steps, agents, tokens, cost, seconds") from None
