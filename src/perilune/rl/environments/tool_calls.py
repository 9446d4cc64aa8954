"""Tools in a conversation: the policy calls, every call is answered, and calling comes to an end.

    tool = Tool(name="calculator", description="...", parameters={...}, call=calculate)
    await converse(talk, [tool], max_turns=6, max_tokens=256)
    facets = call_facets(messages)

Calls are OpenAI's: message["tool_calls"] in, {"role": "tool", "tool_call_id": ..., "content": ...} out. Whatever is
wrong with a call is told to the policy, with the way to do it right: such an answer begins with "error:". The episode
ends with a message without calls, or when the turns are used up.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.rl.environment import Message, Talk

ERROR = "error: "
MOST_CALLS = 8
"""Answered in one turn."""
LONGEST_ANSWER = 2000
"""Characters of what a tool says."""
LAST_TURN = "\n(No more calls: give the answer now.)"


class CallFailed(Exception):
    """A call that gave no result; the text is for the policy."""


@dataclass(frozen=True, kw_only=True)
class Tool:
    name: str
    description: str
    arguments: Mapping[str, str]
    """What each argument is, by its name. All are texts and all are needed."""
    call: Callable[..., Awaitable[str]]
    """Takes the arguments by name; raises CallFailed."""

    def plain(self) -> dict[str, Any]:
        properties = {name: {"type": "string", "description": text} for name, text in self.arguments.items()}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }

    @property
    def example(self) -> str:
        return json.dumps({name: "..." for name in self.arguments})


async def converse(talk: Talk, tools: Sequence[Tool], *, max_turns: int, max_tokens: int | None = None) -> None:
    """Ask until the policy answers without calling, `max_turns` times at most."""
    shown = [tool.plain() for tool in tools]
    for turn in range(max_turns):
        message = await talk.ask(tools=shown, max_tokens=max_tokens)
        calls = message.get("tool_calls") or ()
        if not calls or turn == max_turns - 1:  # a result that nobody will read is not worked for
            return
        answers = [await _answer(tools, call, place) for place, call in enumerate(calls)]
        if turn == max_turns - 2:
            answers[-1]["content"] += LAST_TURN
        talk.add(*answers)


async def _answer(tools: Sequence[Tool], call: Mapping[str, Any], place: int) -> dict[str, Any]:
    function = call.get("function") or {}
    name = str(function.get("name", ""))
    try:
        if place >= MOST_CALLS:
            raise CallFailed(f"only the first {MOST_CALLS} calls of a turn are answered")
        content = await _result(tools, name, function.get("arguments"))
    except CallFailed as problem:
        content = f"{ERROR}{problem}"
    return {
        "role": "tool",
        "tool_call_id": str(call.get("id") or f"functions.{name}:{place}"),
        "content": _clipped(content).encode("utf-8", "replace").decode(),
    }


async def _result(tools: Sequence[Tool], name: str, arguments: Any) -> str:
    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        names = ", ".join(tool.name for tool in tools)
        raise CallFailed(f"there is no tool {_short(name)}; there is {names}")
    return await tool.call(**read_arguments(tool, arguments))


def read_arguments(tool: Tool, arguments: Any) -> dict[str, str]:
    """The arguments of a call by name; CallFailed says how to write them."""
    wanted = f"write the arguments of {tool.name} as {tool.example}"
    if not isinstance(arguments, Mapping):
        try:
            arguments = json.loads(arguments if isinstance(arguments, str) else "")
        except (ValueError, RecursionError) as problem:
            reason = problem.msg if isinstance(problem, json.JSONDecodeError) else "it cannot be read"
            raise CallFailed(f"the arguments are not JSON ({reason}); {wanted}") from None
    if not isinstance(arguments, Mapping):
        raise CallFailed(f"the arguments are no object; {wanted}")
    if missing := [name for name in tool.arguments if name not in arguments]:
        raise CallFailed(f"{', '.join(missing)} is missing; {wanted}")
    if unknown := [name for name in arguments if name not in tool.arguments]:
        raise CallFailed(f"there is no argument {_short(unknown[0])}; {wanted}")
    if wrong := [name for name, value in arguments.items() if not isinstance(value, str)]:
        raise CallFailed(f"{wrong[0]} is no text; {wanted}")
    return dict(arguments)


def call_facets(messages: Sequence[Message]) -> dict[str, float]:
    """called: 1 if a call succeeded; calls: how many there were."""
    answers = [str(message.get("content")) for message in messages if message.get("role") == "tool"]
    return {
        "called": float(any(not answer.startswith(ERROR) for answer in answers)),
        "calls": float(sum(len(message.get("tool_calls") or ()) for message in messages)),
    }


def settled_answer(messages: Sequence[Message]) -> str:
    """The text of the last message of the policy; empty where that one still calls."""
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content")
            return content if isinstance(content, str) and not message.get("tool_calls") else ""
    return ""


def _short(name: str) -> str:
    return repr(name if len(name) <= 40 else f"{name[:37]}...")


def _clipped(text: str) -> str:
    if len(text) <= LONGEST_ANSWER:
        return text
    half = LONGEST_ANSWER // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
