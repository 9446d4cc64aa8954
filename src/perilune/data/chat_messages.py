"""Chat messages and tools as frozen values, checked from the plain dicts that OpenAI clients send.

    messages = parse_messages(body["messages"])
    tools = parse_tools(body["tools"])

What this module promises: every error is a `ChatError` whose `path` names the place, as `messages[2].content[0].type`,
and whose text names the value and what was expected; nothing is repaired; ids and arguments of tool calls stay as they
came, byte for byte. Fields this version does not know are left aside, unless they would carry content that is then
lost.

A picture is named by its address only. Whoever answers the request reads it and hands it to `chat.encode`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = ("system", "developer", "user", "assistant", "tool")
MAX_NAME_LENGTH = 256
MAX_DEPTH = 100
"""Of a tool's schema and of arguments that come as objects."""
TOOL_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
LOST_IF_IGNORED = ("function_call", "audio", "functions")


class ChatError(ValueError):
    """A message or tool that cannot be used; `path` says which field."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path} {problem}")
        self.path = path


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaPart:
    """A picture or a video in the place where it stands among the text."""

    kind: Literal["image", "video"]
    source: str
    """Where it comes from: a `data:` or other address, or a name the caller understands."""


Part = TextPart | MediaPart


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    id: str
    """`functions.NAME:INDEX` when a Kimi model wrote it; verbatim whatever it is."""
    name: str
    arguments: str
    """JSON as the model wrote it, perhaps not valid."""

    def plain(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    role: Role
    parts: tuple[Part, ...] = ()
    """What was said, in order; empty when nothing was."""
    name: str | None = None
    """Stands in the place of the role's name at the head of the turn."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))

    @property
    def media(self) -> tuple[MediaPart, ...]:
        return tuple(part for part in self.parts if isinstance(part, MediaPart))

    def plain(self) -> dict[str, Any]:
        """The dict that `parse_messages` reads back as this message."""
        plain: dict[str, Any] = {"role": self.role}
        if self.media:
            plain["content"] = [_plain_part(part) for part in self.parts]
        elif self.parts or not self.tool_calls:
            plain["content"] = self.text
        optional = {"name": self.name, "reasoning_content": self.reasoning, "tool_call_id": self.tool_call_id}
        plain |= {key: value for key, value in optional.items() if value is not None}
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    name: str
    description: str = ""
    parameters: Mapping[str, Any] | bool | None = None
    """JSON schema of the arguments."""

    def plain(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


# --- messages ---------------------------------------------------------------------------------------------------------


def parse_messages(plain: object, *, path: str = "messages") -> tuple[ChatMessage, ...]:
    """Checked messages; `path` is how the list is called in errors."""
    items = _list(plain, path, "a list of messages")
    if not items:
        raise ChatError(path, "is empty, expected at least one message")
    return tuple(parse_message(item, path=f"{path}[{index}]") for index, item in enumerate(items))


def parse_message(plain: object, *, path: str = "message") -> ChatMessage:
    message = _mapping(plain, path, "a message: an object with 'role' and 'content'")
    role = _choice(message.get("role"), f"{path}.role", ROLES)
    for field in LOST_IF_IGNORED:
        if message.get(field):
            raise ChatError(f"{path}.{field}", "is not supported; calls go in 'tool_calls', results in role 'tool'")
    if role == "assistant":
        return _assistant(message, path)
    for field in ("tool_calls", "reasoning_content"):
        if message.get(field):
            raise ChatError(f"{path}.{field}", f"is given for role {role!r}, expected only with role 'assistant'")
    name = _name(message, path)
    if "content" not in message or message["content"] is None:
        raise ChatError(f"{path}.content", "is missing, expected a text or a list of parts")
    parts = _parts(message["content"], f"{path}.content", media=role in ("user", "tool"))
    if role == "tool":
        call_id = _text(message.get("tool_call_id"), f"{path}.tool_call_id", "the id of the call it answers")
        return ChatMessage(role="tool", parts=parts, name=name, tool_call_id=call_id)
    return ChatMessage(role="user" if role == "user" else "system", parts=parts, name=name)


def _assistant(message: Mapping[str, Any], path: str) -> ChatMessage:
    content = message.get("content")
    parts = () if content is None else _parts(content, f"{path}.content", media=False)
    reasoning = None
    for field in ("reasoning_content", "reasoning"):
        if message.get(field) is not None:
            reasoning = _text(message[field], f"{path}.{field}", "a text") or None
            break
    calls = message.get("tool_calls")
    items = [] if calls is None else _list(calls, f"{path}.tool_calls", "a list of calls")
    return ChatMessage(
        role="assistant",
        parts=parts,
        name=_name(message, path),
        reasoning=reasoning,
        tool_calls=tuple(_call(item, f"{path}.tool_calls[{index}]") for index, item in enumerate(items)),
    )


def _call(plain: object, path: str) -> ToolCall:
    call = _mapping(plain, path, "a call: {'id', 'type': 'function', 'function': {'name', 'arguments'}}")
    if call.get("type") is not None:
        _choice(call["type"], f"{path}.type", ("function",))
    function = _mapping(call.get("function"), f"{path}.function", "an object with 'name' and 'arguments'")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):  # data sets hold them parsed; the model has to see them as it would write them
        arguments = _json(arguments, f"{path}.function.arguments")
    return ToolCall(
        id=_text(call.get("id"), f"{path}.id", "the id as the model wrote it"),
        name=_text(function.get("name"), f"{path}.function.name", "the name of a tool"),
        arguments=_text("" if arguments is None else arguments, f"{path}.function.arguments", "JSON as text"),
    )


def _parts(content: object, path: str, *, media: bool) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(text=_text(content, path, "a text")),) if content else ()
    items = _list(content, path, "a text or a list of parts")
    return tuple(_part(item, f"{path}[{index}]", media=media) for index, item in enumerate(items))


def _part(plain: object, path: str, *, media: bool) -> Part:
    part = _mapping(plain, path, "a part: an object with 'type'")
    kinds = ("text", "image_url", "image", "video_url", "video") if media else ("text",)
    kind = _choice(part.get("type"), f"{path}.type", kinds)
    if kind == "text":
        return TextPart(text=_text(part.get("text"), f"{path}.text", "a text"))
    source, place = part.get(kind), f"{path}.{kind}"
    if isinstance(source, Mapping):
        source, place = source.get("url"), f"{place}.url"
    source = _text(source, place, "an address")
    if not source:
        raise ChatError(place, "is empty, expected an address, such as data:image/png;base64,...")
    return MediaPart(kind="image" if kind.startswith("image") else "video", source=source)


def _plain_part(part: Part) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": f"{part.kind}_url", f"{part.kind}_url": {"url": part.source}}


def _name(message: Mapping[str, Any], path: str) -> str | None:
    name = message.get("name")
    if name is None:
        return None
    name = _text(name, f"{path}.name", "a name")
    if len(name) > MAX_NAME_LENGTH:
        raise ChatError(f"{path}.name", f"has {len(name)} characters, expected at most {MAX_NAME_LENGTH}")
    return name or None


# --- tools ------------------------------------------------------------------------------------------------------------


def parse_tools(plain: object, *, path: str = "tools") -> tuple[Tool, ...]:
    """Checked tools; None and an empty list are no tools."""
    items = [] if plain is None else _list(plain, path, "a list of tools")
    tools = tuple(_tool(item, f"{path}[{index}]") for index, item in enumerate(items))
    seen: dict[str, int] = {}
    for index, tool in enumerate(tools):
        if tool.name in seen:
            first = f"{path}[{seen[tool.name]}]"
            raise ChatError(f"{path}[{index}].function.name", f"is {tool.name!r}, which {first} is called already")
        seen[tool.name] = index
    return tools


def _tool(plain: object, path: str) -> Tool:
    tool = _mapping(plain, path, "a tool: {'type': 'function', 'function': {'name', 'description', 'parameters'}}")
    _choice(tool.get("type"), f"{path}.type", ("function",))
    function = _mapping(tool.get("function"), f"{path}.function", "an object with 'name'")
    name = _text(function.get("name"), f"{path}.function.name", "the name of a function")
    if not TOOL_NAME.fullmatch(name):
        expected = "1 to 128 letters, digits, '_', '-' or '.'"
        raise ChatError(f"{path}.function.name", f"is {_shown(name)}, expected {expected}")
    description = function.get("description")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, bool):
        _mapping(parameters, f"{path}.function.parameters", "a JSON schema")
    return Tool(
        name=name,
        description="" if description is None else _text(description, f"{path}.function.description", "a text"),
        parameters=None if parameters is None else json.loads(_json(parameters, f"{path}.function.parameters")),
    )


# --- checks -----------------------------------------------------------------------------------------------------------


def _text(value: object, path: str, expected: str) -> str:
    if value is None:
        raise ChatError(path, f"is missing, expected {expected}")
    if not isinstance(value, str):
        raise ChatError(path, f"is {_shown(value)}, expected {expected}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ChatError(
            path, f"holds half of a surrogate pair ({value[error.start]!r} at {error.start}), expected Unicode text"
        ) from None
    return value


def _json(value: object, path: str) -> str:
    # The depth is bounded here, far from the limits of whatever walks the value later.
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        deeper = [inner for item in level if isinstance(item, Mapping) for inner in item.values()]
        level = deeper + [inner for item in level if isinstance(item, list | tuple) for inner in item]
        if not level:
            break
    else:
        raise ChatError(path, f"is nested too deeply, expected at most {MAX_DEPTH} levels")
    try:
        return _text(json.dumps(value, ensure_ascii=False), path, "JSON")
    except (TypeError, ValueError) as error:
        if isinstance(error, ChatError):
            raise
        raise ChatError(path, f"cannot be written as JSON ({error})") from None


def _choice(value: object, path: str, allowed: Sequence[str]) -> str:
    if value is None:
        raise ChatError(path, f"is missing, expected one of {', '.join(map(repr, allowed))}")
    if not isinstance(value, str) or value not in allowed:
        raise ChatError(path, f"is {_shown(value)}, expected one of {', '.join(map(repr, allowed))}")
    return value


def _list(value: object, path: str, expected: str) -> Sequence[object]:
    if not isinstance(value, list | tuple):
        raise ChatError(path, f"is {_shown(value)}, expected {expected}")
    return value


def _mapping(value: object, path: str, expected: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ChatError(path, f"is {_shown(value)}, expected {expected}")
    return value


def _shown(value: object) -> str:
    """A value for an error: never long, and never an error itself."""
    if isinstance(value, str):
        return f"{value!a}" if len(value) <= 60 else f"{value[:57]!a}..."
    if isinstance(value, int) and value.bit_length() > 100:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    return f"of type {type(value).__name__}"
