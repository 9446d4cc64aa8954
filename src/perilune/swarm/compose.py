"""Long documents by reference: parts are joined where they are stored, and merged in a tree.

`compose` joins results into a new one without showing them to anybody. `reduce_task` merges many results into one:
groups of `fan_in` parts go to instances of a sub-agent, their answers are grouped again, until one is left. Every
prompt holds a digest of each part and its handle, so no context grows with the number or the size of the parts; an
answer may include a part whole by writing `{{art:...}}`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from perilune.swarm.agent import Answer
from perilune.swarm.orchestrator import (
    Source,
    create_agents,
    handle_of,
    lost_answer,
    registered,
    rest_on,
    run_agent,
    start_job,
    who,
)
from perilune.swarm.results import HANDLE, shortened
from perilune.swarm.run import Run
from perilune.swarm.scheduler import Job
from perilune.swarm.tools.tool import Tool, ToolContext, ToolError, ToolResult, tool

PROMPT_SHARE = 0.4
"""Share of the context that the parts of one group may take."""


@tool(effects="none", again=True)
async def compose(context: ToolContext, parts: list[str], title: str = "") -> ToolResult:
    """Join stored results and texts into one document, in order, without reading them: every part is the handle of a
    task or artefact (art:...) or a text of its own. Returns the handle of the document."""
    run, agent = who(context)
    if not parts:
        raise ToolError("parts is empty")
    pieces: list[str] = [f"# {title}"] if title else []
    sources: list[Source] = []
    for part in parts:
        if part in agent.assignments or HANDLE.fullmatch(part):
            sources.append(await handle_of(context, part))
            part = f"{{{{{sources[-1].handle}}}}}"
        pieces.append(part)
    data, rests_on_tainted = await run.results.expand("\n\n".join(pieces) + "\n")
    tainted = rests_on_tainted or agent.taint.is_tainted
    handle = await run.results.keep(data, tainted=tainted)
    text = f"{handle} holds {len(parts)} parts, {len(data):,} bytes. {{{{{handle}}}}} in an answer includes it."
    # Only a handle is read here: who reads what is behind it is tainted then.
    return ToolResult(text=text, joined=tuple(name for source in sources for name in source.agents), untrusted=False)


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
    parts = [part for handle in handles for part in await _parts_of(context, handle)]
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
            team = [by_suffix[f".{level}.{number}"] for number in range(count)]
            jobs = []
            for member, group in zip(team, groups, strict=True):
                rest_on(member, group)
                prompt = template.replace("{parts}", await _shown(run, group, fan_in))
                jobs.append(run_agent(run, member, [prompt], owner=job, many=False))
            async with run.scheduler.resting(job):
                await run.scheduler.wait(jobs, count=len(jobs))
            answers = [one.result[0] if one.result else lost_answer(one) for one in jobs]
            failed = [answer for answer in answers if answer.status != "done" or answer.artefact is None]
            if failed:
                why = f"{len(failed)} of {count} merges failed: {failed[0].error}"
                return [Answer(status=failed[0].status, error=why)]
            current = [
                Source(
                    handle=run.results.learn(answer.artefact, tainted=answer.untrusted),
                    agents=(member.id,),
                    is_tainted=answer.untrusted,
                )
                for member, answer in zip(team, answers)
                if answer.artefact
            ]
        return answers

    assignment = start_job(run, parent, context, spec, members, merge, what=f"merge of {len(parts)} parts")
    text = f"Started {assignment.handle}: {len(parts)} parts in {len(levels)} levels, {len(members)} agents."
    read = tuple(dict.fromkeys(name for part in parts for name in part.agents))
    return ToolResult(text=text, spawned=tuple(member.id for member in members), joined=read)


TOOLS: dict[str, Tool] = {each.name: each for each in (compose, reduce_task)}


def _levels(parts: int, fan_in: int) -> list[int]:
    """Groups on each level: 100 parts by 10 are 10 groups, then 1."""
    levels = []
    while not levels or parts > 1:
        parts = -(-parts // fan_in)
        levels.append(parts)
    return levels


async def _parts_of(context: ToolContext, name: str) -> list[Source]:
    run, parent = who(context)
    assignment = parent.assignments.get(name)
    whole = await handle_of(context, name)
    if assignment is None or assignment.count == 1:
        return [whole]
    artefacts = [answer.artefact for answer in assignment.answers if answer.artefact is not None]
    return [replace(whole, handle=run.results.learn(artefact)) for artefact in artefacts]


async def _shown(run: Run, group: list[Source], fan_in: int) -> str:
    room = int(PROMPT_SHARE * run.config.context_bytes) // fan_in
    shown = []
    for part in group:
        size = run.results.find(part.handle).size
        whole = await run.results.read(part.handle, 0, room)
        text = shortened(whole, room)
        rest = (
            "" if text == whole and size <= room else f"\n[... read_result({part.handle!r}, start, end) reads the rest]"
        )
        shown.append(f"<part handle={part.handle!r} bytes={size}>\n{text}{rest}\n</part>")
    return "\n".join(shown)
