"""What a scripted model is: a function from a conversation to a reply, and nothing else.

    def echo(turn: Turn) -> Reply:
        return Reply(f"You said: {turn.task}")

A script keeps no state. The same messages give the same reply, so a run that was killed and resumed hears the same
answers, whatever order its calls arrive in. What a script needs to know (how far it is, what its tools returned) it
reads from the messages, as a model does.

Tokens are counted as four bytes each, so that a request's size in bytes is always an upper bound.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import orjson

BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call the script wants to make."""

    name: str
    arguments: Mapping[str, Any] | str
    """A mapping is encoded as JSON; a text goes out as it is, valid or not."""
    id: str | None = None
    """None: `functions.NAME:NUMBER`, as Kimi models write it, counted over the conversation."""


@dataclass(frozen=True, slots=True)
class Reply:
    content: str | None = None
    calls: tuple[Call, ...] = ()
    reasoning: str | None = None


@dataclass(frozen=True)
class Turn:
    """One request as a script sees it. Messages are in the wire's form."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    model: str = ""
    seed: int | None = None

    @cached_property
    def tool_names(self) -> frozenset[str]:
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @cached_property
    def system(self) -> str:
        """The system prompt, or nothing."""
        first = self.messages[0] if self.messages else {}
        return text_of(first) if first.get("role") in ("system", "developer") else ""

    @cached_property
    def task_index(self) -> int:
        """Where the first message of the user is; -1 when there is none. Later ones are remarks on the same task."""
        return next((index for index, message in enumerate(self.messages) if message["role"] == "user"), -1)

    @property
    def task(self) -> str:
        """The first message of the user."""
        return text_of(self.messages[self.task_index]) if self.task_index >= 0 else ""

    @cached_property
    def since_task(self) -> Sequence[Mapping[str, Any]]:
        return self.messages[self.task_index + 1 :]

    @property
    def step(self) -> int:
        """How many replies the model gave since its task."""
        return sum(message["role"] == "assistant" for message in self.since_task)

    @cached_property
    def exchanges(self) -> list[tuple[str, dict[str, Any], str]]:
        """(tool, arguments, result) of every call since the task whose arguments were a JSON object.

        A call that went out garbled is not among them: to the script it never happened. Results are paired with calls
        by position, since ids may repeat or be empty.
        """
        pairs: list[tuple[str, dict[str, Any], str]] = []
        pending: list[Mapping[str, Any]] = []
        for message in self.since_task:
            if message["role"] == "assistant":
                pending = list(message.get("tool_calls") or ())
            elif message["role"] == "tool" and pending:
                function = pending.pop(0)["function"]
                arguments = parsed_object(function["arguments"])
                if arguments is not None:
                    pairs.append((function["name"], arguments, text_of(message)))
        return pairs

    def results(self, tool: str) -> list[tuple[dict[str, Any], str]]:
        """(arguments, result) of every call of one tool."""
        return [(arguments, result) for name, arguments, result in self.exchanges if name == tool]


Script = Callable[[Turn], Reply]


def text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.get("text", "") for part in content)


def parsed_object(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def token_count(text: str) -> int:
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def token_ids(message: Mapping[str, Any]) -> list[int]:
    """Made-up token ids of one message; those of a conversation are the concatenation over its messages.

    They depend on what the message says, not on how a client writes it, so the ids of a turn's prompt and reply are the
    beginning of the next turn's prompt.
    """
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    rendered = orjson.dumps((message["role"], text_of(message), message.get("tool_call_id") or "", calls))
    return [
        zlib.crc32(rendered[start : start + BYTES_PER_TOKEN]) & 0x1FFFF
        for start in range(0, len(rendered), BYTES_PER_TOKEN)
    ]
