"""Messages between agents and models, each encoded for the wire exactly once.

A history is a tuple or list of `Message`, never changed in place: a step appends. `Message.wire` is the message as the
OpenAI chat format writes it, made when the message is; a request joins these bytes, so that a step with two hundred
messages behind it costs little more than a step with two. Ids and arguments of tool calls stay as the model wrote
them, byte for byte: a cleaned id breaks the calls that follow (exo-explore/exo#2281).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import orjson

Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON as the model wrote it, perhaps not valid."""

    def plain(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Message:
    role: Role
    content: str | tuple[Mapping[str, Any], ...] | None = None
    """Text, or parts in the wire's form (text and images)."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None
    """What the model thought before it answered, where the endpoint tells (`reasoning_content`)."""

    def plain(self) -> dict[str, Any]:
        """The message in the wire's form."""
        plain: dict[str, Any] = {"role": self.role}
        content = self.content if self.content is None or isinstance(self.content, str) else list(self.content)
        if content is not None or not self.tool_calls:
            plain["content"] = content if content is not None else ""
        if self.reasoning is not None:
            plain["reasoning_content"] = self.reasoning
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain

    @cached_property
    def wire(self) -> bytes:
        return orjson.dumps(self.plain())

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(str(part.get("text") or "") for part in self.content)


def clean(text: str) -> str:
    """The text as UTF-8 can hold it: half of a surrogate pair becomes a question mark."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def message_from_plain(plain: Mapping[str, Any]) -> Message:
    """The inverse of `Message.plain`."""
    content = plain.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = tuple(content)
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in plain.get("tool_calls") or ()
    )
    if content == "" and not calls and plain["role"] == "assistant":
        content = None
    return Message(plain["role"], content, calls, plain.get("tool_call_id"), plain.get("reasoning_content"))
