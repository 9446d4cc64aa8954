"""Scripted models for the tests of workers: they write letters, hand on handles, and create agents below agents."""

import re

from perilune.swarm.scripted.script import Call, Reply, Script, Turn

HANDLE = re.compile(r"art:[0-9a-f]{16}")


def relay() -> Script:
    """main: one agent makes a document by reference, another, elsewhere, reads it by its handle. Each agent writes to
    main before it answers."""

    def script(turn: Turn) -> Reply:
        if turn.task.startswith("make"):
            return _maker(turn)
        if turn.task.startswith("read"):
            return _reader(turn)
        if not turn.results("create_subagent"):
            return Reply(calls=(Call("create_subagent", {"name": "helper", "system_prompt": "You help."}),))
        given = turn.results("assign_task")
        if not given:
            return Reply(calls=(Call("assign_task", {"agent": "helper", "prompt": "make it"}),))
        handles = HANDLE.findall(given[0][1])
        if len(given) == 1:
            return Reply(calls=(Call("assign_task", {"agent": "helper", "prompt": f"read {handles[0]}"}),))
        letters = sum("[Message from" in str(message.get("content")) for message in turn.messages)
        return Reply(f"{given[1][1]}, {letters} letters")

    return script


def _maker(turn: Turn) -> Reply:
    made = turn.results("compose")
    if not made:
        return Reply(calls=(Call("compose", {"parts": ["one", "two"]}), Call("send", {"to": "parent", "text": "made"})))
    return Reply(HANDLE.findall(made[0][1])[0])


def _reader(turn: Turn) -> Reply:
    read = turn.results("read_result")
    if not read:
        handle = HANDLE.findall(turn.task)[0]
        calls = (Call("read_result", {"handle": handle}), Call("send", {"to": "parent", "text": "read"}))
        return Reply(calls=calls)
    return Reply(" ".join(read[0][1].split()[:2]))


def deep(width: int = 3, steps: int = 2) -> Script:
    """main gives a task to each of `width` leads, each of which gives one to two agents that take `steps` steps."""

    def script(turn: Turn) -> Reply:
        if turn.task.startswith("leaf"):
            if len(turn.results("leave_trace")) < steps:
                return Reply(calls=(Call("leave_trace", {}),))
            return Reply(f"{turn.task} done")
        below, count = ("leaf", 2) if turn.task.startswith("lead") else ("lead", width)
        if not turn.results("create_subagent"):
            return Reply(calls=(Call("create_subagent", {"name": below, "system_prompt": f"A {below}."}),))
        given = turn.results("assign_task")
        if not given:
            prompts = [f"{below} {number} of {turn.task}" for number in range(count)]
            return Reply(calls=tuple(Call("assign_task", {"agent": below, "prompt": each}) for each in prompts))
        return Reply(" | ".join(result for _, result in given))

    return script


def poison() -> Script:
    """main gives three tasks at once; the second one ends the process that works on it."""

    def script(turn: Turn) -> Reply:
        if turn.task.startswith("part"):
            deadly = turn.task == "part 1" and not turn.results("die")
            return Reply(calls=(Call("die", {}),)) if deadly else Reply(f"{turn.task} done")
        if not turn.results("create_subagent"):
            return Reply(calls=(Call("create_subagent", {"name": "worker", "system_prompt": "You work."}),))
        given = turn.results("assign_task")
        if not given:
            prompts = [{"agent": "worker", "prompt": f"part {number}"} for number in range(3)]
            return Reply(calls=tuple(Call("assign_task", each) for each in prompts))
        return Reply(" | ".join(result for _, result in given))

    return script
