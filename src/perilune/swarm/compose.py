"""Long documents by reference: parts are joined where they are stored, and merged in a tree.

`compose` joins results into a new one without showing them to anybody. `reduce_task` merges many results into one:
groups of `fan_in` parts go to instances of a sub-agent, their answers are grouped again, until one is left. Every
prompt holds a digest of each part and its handle, so no context grows with the number or the size of the parts; an
answer may include a part whole by writing `{{art:...}}`.
"""

from __future__ import annotations

from typing import Annotated

import orjson
from pydantic import Field

from perilune.swarm.agent import Agent, Answer
from perilune.swarm.orchestrator import create_agents, handle_of, registered, run_agent, start_job, who
from perilune.swarm.results import HANDLE
from perilune.swarm.run import Run
from perilune.swarm.scheduler import Job
from perilune.swarm.tools.tool import Tool, ToolContext, ToolError, ToolResult, tool

PROMPT_SHARE = 0.5
"""Share of the context that the parts of one group may take."""


@tool(effects="none")
async def compose(context: ToolContext, parts: list[str], title: str = "") -> ToolResult:
    """Join stored results and texts into one document, in order, without reading them: every part is the handle of a
    task or artefact (art:...) or a text of its own. Returns the handle of the document."""
    run, agent = who(context)
    if not parts:
        raise ToolError("parts is empty")
    pieces: list[str] = [f"# {title}"] if title else []
    joined: list[str] = []
    untrusted = agent.taint.is_tainted
    for part in parts:
        assignment = agent.assignments.get(part)
        if assignment is not None:
            joined.extend(member.id for member in assignment.agents)
            untrusted = untrusted or assignment.is_tainted
            part = await handle_of(run, agent, part)
        if HANDLE.fullmatch(part):
            run.results.find(part)
            part = f"{{{{{part}}}}}"
        pieces.append(part)
    data = await run.results.expand("\n\n".join(pieces) + "\n")
    handle = await run.results.keep(data)
    text = f"{handle} holds {len(parts)} parts, {len(data):,} bytes. {{{{{handle}}}}} in an answer includes it."
    return ToolResult(text=text, joined=tuple(joined), untrusted=untrusted)


@tool(effects="none", again=True)
async def reduce_task(
    context: ToolContext,
    agent: str,
    template: str,
    handles: list[str],
    fan_in: Annotated[int, Field(ge=2, le=100)] = 10,
) -> ToolResult:
    """Merge many results into one with a registered sub-agent: groups of fan_in parts at a time, then their answers,
    until one is left. {parts} in the template is replaced by a digest of each part with its handle. Parts are handles
    of ended tasks (all items of a map_task) or artefacts. Returns a handle for wait."""
    run, parent = who(context)
    spec = registered(parent, agent)
    if "{parts}" not in template:
        raise ToolError("template has no {parts}")
    parts = [part for handle in handles for part in await _parts_of(run, parent, handle)]
    if not parts:
        raise ToolError("there is nothing to merge: handles has no results")
    levels = _levels(len(parts), fan_in)
    suffixes = [f".{level}.{number}" for level, groups in enumerate(levels) for number in range(groups)]
    members = create_agents(run, parent, context, spec, suffixes)
    by_suffix = dict(zip(suffixes, members))

    async def merge(job: Job) -> list[Answer]:
        current = parts
        answers: list[Answer] = []
        for level, count in enumerate(levels):
            groups = [current[first : first + fan_in] for first in range(0, len(current), fan_in)]
            prompts = [template.replace("{parts}", await _shown(run, group, fan_in)) for group in groups]
            jobs = [
                run_agent(run, by_suffix[f".{level}.{number}"], [prompts[number]], owner=job, many=False)
                for number in range(count)
            ]
            async with run.scheduler.resting(job):
                await run.scheduler.wait(jobs, count=len(jobs))
            answers = [one.result[0] if one.result else Answer(status="failed", error=str(one.error)) for one in jobs]
            failed = [answer for answer in answers if answer.status != "done" or answer.artefact is None]
            if failed:
                return [
                    Answer(status=failed[0].status, error=f"{len(failed)} of {count} merges failed: {failed[0].error}")
                ]
            current = [run.results.learn(answer.artefact) for answer in answers if answer.artefact]
        return answers

    assignment = start_job(run, parent, context, spec, members, merge, what=f"merge of {len(parts)} parts")
    text = f"Started {assignment.handle}: {len(parts)} parts in {len(levels)} levels, {len(members)} agents."
    return ToolResult(text=text, spawned=tuple(member.id for member in members))


TOOLS: dict[str, Tool] = {each.name: each for each in (compose, reduce_task)}


def _levels(parts: int, fan_in: int) -> list[int]:
    """Groups on each level: 100 parts by 10 are 10 groups, then 1."""
    levels = []
    while not levels or parts > 1:
        parts = -(-parts // fan_in)
        levels.append(parts)
    return levels


async def _parts_of(run: Run, parent: Agent, handle: str) -> list[str]:
    assignment = parent.assignments.get(handle)
    whole = await handle_of(run, parent, handle)
    if assignment is None or assignment.count == 1:
        return [whole]
    rows = (await run.results.read(whole)).splitlines()
    return [row["handle"] for row in map(orjson.loads, rows) if row["handle"]]


async def _shown(run: Run, group: list[str], fan_in: int) -> str:
    room = int(PROMPT_SHARE * run.config.context_bytes) // fan_in
    shown = []
    for handle in group:
        text, _ = await run.results.digest(await run.results.read(handle, 0, 2 * room), room)
        shown.append(f"<part handle={handle!r} bytes={run.results.find(handle).size}>\n{text}\n</part>")
    return "\n".join(shown)
