"""A small library of scripted models, for tests, benchmarks and demonstrations.

Each function makes a `Script`: a pure function of the conversation. They read their own earlier calls and the results
from the messages; a call whose arguments went out garbled counts as never made, and is made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import orjson

from perilune.swarm.scripted.script import Call, Reply, Script, Turn

SUBTASK = "subtask"


def constant(text: str = "done") -> Script:
    """Always the same answer."""
    return lambda turn: Reply(text)


def worker(
    steps: int = 14,
    tool: str = "no_op",
    arguments: Mapping[str, Any] | None = None,
    answer: str = "answer to: {task}",
    answer_bytes: int = 0,
) -> Script:
    """`steps` calls of one tool, one a turn, then the answer (at least `answer_bytes` long). Without tools it answers
    at once. `{step}` in the text of an argument is the number of the call."""

    def script(turn: Turn) -> Reply:
        made = len(turn.results(tool))
        if made < steps and tool in turn.tool_names:
            filled = {
                key: value.replace("{step}", str(made)) if isinstance(value, str) else value
                for key, value in (arguments or {}).items()
            }
            return Reply(calls=(Call(tool, filled),))
        text = answer.replace("{task}", turn.task)
        return Reply(text + "." * max(0, answer_bytes - len(text)))

    return script


def orchestrator(
    agents: int = 100,
    create: Literal["before", "together", "never"] = "before",
    task: str = SUBTASK + " {number}: {task}",
    name: str = "worker-{number}",
    answer: str = "all {agents} parts are done",
) -> Script:
    """Assign one task to each of `agents` sub-agents in a single turn, then answer.

    `create`: sub-agents are created in the turn before, in the same turn, or never (the runtime makes them by name).
    """

    def script(turn: Turn) -> Reply:
        names = [name.format(number=number) for number in range(agents)]
        created = {arguments.get("name") for arguments, _ in turn.results("create_subagent")}
        assigned = {arguments.get("agent") for arguments, _ in turn.results("assign_task")}
        creations = [
            Call("create_subagent", {"name": each, "system_prompt": f"You are {each}. Do the task you are given."})
            for each in names
            if create != "never" and each not in created and each not in assigned
        ]
        if creations and create == "before":
            return Reply(calls=tuple(creations))
        tasks = [
            Call("assign_task", {"agent": each, "prompt": task.format(number=number, task=turn.task)})
            for number, each in enumerate(names)
            if each not in assigned
        ]
        if tasks and "assign_task" in turn.tool_names:
            return Reply(calls=(*creations, *tasks))
        return Reply(answer.format(agents=agents))

    return script


def swarm(
    agents: int = 100,
    steps: int = 14,
    create: Literal["before", "together", "never"] = "before",
    tool: str = "no_op",
    answer_bytes: int = 0,
) -> Script:
    """`orchestrator` and its `worker`s behind one model name: a task that begins with "subtask" is a worker's."""
    leading = orchestrator(agents, create)
    working = worker(steps, tool, answer_bytes=answer_bytes)
    return lambda turn: (working if turn.task.startswith(SUBTASK) else leading)(turn)


def by_system(roles: Mapping[str, Script], otherwise: Script) -> Script:
    """The first script whose key is in the system prompt, without regard to case; else `otherwise`."""
    keys = [(key.casefold(), script) for key, script in roles.items()]

    def script(turn: Turn) -> Reply:
        system = turn.system.casefold()
        return next((script for key, script in keys if key in system), otherwise)(turn)

    return script


def by_model(models: Mapping[str, Script], otherwise: Script) -> Script:
    return lambda turn: models.get(turn.model, otherwise)(turn)


def table(rows: Sequence[Mapping[str, Any]] | str) -> Script:
    """Replies from a list, or from the JSON file that holds it. The first row that fits is said:

        {"system": "researcher", "task": "moon", "step": 0, "reply": {"calls": [{"name": "t", "arguments": {}}]}}
        {"system": "researcher", "step": 1, "reply": {"content": "The moon."}}

    `system` and `task` are parts of the system prompt and of the first user message, `step` counts replies; a row
    without one of them fits any. No fitting row is an error that names the conversation.
    """
    if isinstance(rows, str):
        rows = orjson.loads(Path(rows).read_bytes())

    def script(turn: Turn) -> Reply:
        for row in rows:
            fits = row.get("system", "") in turn.system and row.get("task", "") in turn.task
            if fits and row.get("step", turn.step) == turn.step:
                reply = row["reply"]
                calls = tuple(
                    Call(call["name"], call.get("arguments", {}), call.get("id")) for call in reply.get("calls", ())
                )
                return Reply(reply.get("content"), calls, reply.get("reasoning"))
        raise LookupError(f"no row for step {turn.step} of system={turn.system[:60]!r} task={turn.task[:60]!r}")

    return script


def long_answer(size: int = 40_000, text: str = "part {number} of a long answer. ") -> Script:
    """An answer of `size` bytes, different for each task."""

    def script(turn: Turn) -> Reply:
        pieces, length, number = [f"{turn.task[:200]}\n"], 0, 0
        while length < size:
            pieces.append(text.format(number=number))
            length += len(pieces[-1])
            number += 1
        return Reply("".join(pieces)[:size])

    return script


__all__ = ["by_model", "by_system", "constant", "long_answer", "orchestrator", "swarm", "table", "worker"]
