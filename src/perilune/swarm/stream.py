"""From what an endpoint sends to one message: server-sent events or a JSON body -> `Parsed`.

Nothing is repaired. Ids and arguments stay as they came; pieces of a stream are joined by the index of their call. What
cannot be a faithful reply raises `MalformedReply`, and the caller asks again, without streaming: stream parsers of real
servers drop or garble tool calls under load that they deliver whole in one body (vllm-project/vllm#54701).

A stream is malformed when
    it ends before its finish reason, or an event is not JSON;
    it says that calls were made and none arrived, or a call has no name;
    arguments are not a JSON object, unless the length limit cut them;
    two calls share an index, or the marks of a call are left in the text;
    it says nothing at all.
A body is malformed when it is not a chat completion. Arguments in a body are the model's own writing, valid or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from perilune.swarm.client import Usage
from perilune.swarm.messages import Message, ToolCall

LEFT_MARKS = ("<|tool_call", "<tool_call>")
"""How a call begins in the text of common chat templates; a parser that lost track leaves it in the content."""


VERSION_PLACES = frozenset(("weight_version", "metadata", "meta_info"))


class MalformedReply(ValueError):
    """What came is not a faithful reply. Says what was wrong, never the content."""


class ErrorInReply(RuntimeError):
    """The endpoint reported an error inside a response that began well."""

    def __init__(self, message: str, code: int | None) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    message: Message
    finish_reason: str
    usage: Usage | None
    model: str
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    weight_version: str | None = None


# Server-sent events --------------------------------------------------------------------------------------------------


class EventLines:
    """Bytes in any pieces -> the data of each event. A line may end in LF, CR LF or CR."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self.size = 0

    def feed(self, piece: bytes) -> Iterator[bytes]:
        self.size += len(piece)
        text = self._rest + piece if self._rest else piece
        if text.endswith(b"\n"):
            self._rest = b""
        else:
            # A trailing CR may be half of CR LF: it waits for what follows.
            end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)) + 1
            self._rest = text[end:]
            text = text[:end]
        for line in text.splitlines():
            if not line:
                if self._data:
                    yield self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                    self._data.clear()
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line.startswith(b"\xef\xbb\xbfdata:"):
                self._data.append(line[8:].removeprefix(b" "))

    def end(self) -> Iterator[bytes]:
        """The last event, where the endpoint forgot the blank line after it."""
        yield from self.feed(b"\n\n")


@dataclass(slots=True)
class _Call:
    id: Any = None
    name: str = ""
    arguments: list[str] | None = None


class StreamedReply:
    """Joins the chunks of one stream. `add` each event's data, then `finish`."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._finish: str | None = None
        self._usage: Usage | None = None
        self._model = ""
        self._prompt_token_ids: tuple[int, ...] | None = None
        self._token_ids: list[int] | None = None
        self._logprobs: list[float] | None = None
        self._weight_version: str | None = None
        self.is_done = False
        """Whether [DONE] came."""

    def add(self, data: bytes) -> None:
        if data == b"[DONE]" or data.strip() == b"[DONE]":
            self.is_done = True
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise MalformedReply("an event of the stream is not JSON") from None
        if not isinstance(chunk, dict):
            raise MalformedReply("an event of the stream is not a JSON object")
        try:
            self._add_chunk(chunk)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise MalformedReply(f"an event of the stream is not a chat chunk ({type(error).__name__})") from None

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        if chunk.get("error"):
            raise _error(chunk["error"])
        if not self._model:
            self._model = _text(chunk.get("model"))
        if chunk.get("usage"):
            self._usage = _usage(chunk["usage"])
        if chunk.get("prompt_token_ids") is not None:
            self._prompt_token_ids = tuple(chunk["prompt_token_ids"])
        if not VERSION_PLACES.isdisjoint(chunk):
            self._weight_version = _weight_version(chunk) or self._weight_version
        for choice in chunk.get("choices") or ():
            if choice.get("index") or 0:
                continue
            self._add_delta(choice.get("delta") or {})
            if choice.get("finish_reason"):
                self._finish = _text(choice["finish_reason"])
            if choice.get("token_ids") is not None:
                self._token_ids = (self._token_ids or []) + list(choice["token_ids"])
            if choice.get("prompt_token_ids") is not None:
                self._prompt_token_ids = tuple(choice["prompt_token_ids"])
            if choice.get("logprobs"):
                self._logprobs = (self._logprobs or []) + _logprobs(choice["logprobs"])

    def _add_delta(self, delta: dict[str, Any]) -> None:
        if content := delta.get("content"):
            self._content.append(content)
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            self._reasoning.append(reasoning)
        for part in delta.get("tool_calls") or ():
            self._add_call(part)

    def _add_call(self, part: dict[str, Any]) -> None:
        function = part.get("function") or {}
        name, arguments, id = _text(function.get("name")), function.get("arguments"), part.get("id")
        index = part.get("index")
        if not isinstance(index, int):  # some endpoints leave it out: a name begins a call
            index = len(self._calls) if name else max(len(self._calls) - 1, 0)
        if not (name or arguments or id is not None) and index not in self._calls:
            return
        call = self._calls.setdefault(index, _Call())
        if id is not None:
            if call.id and id and id != call.id:
                raise MalformedReply(f"two tool calls of the stream share the index {index}")
            call.id = call.id or id
        # Some endpoints repeat the name in every piece.
        if name and name != call.name:
            call.name += name
        if arguments:
            if not isinstance(arguments, str):
                raise MalformedReply("arguments in the stream are not a text")
            if call.arguments is None:
                call.arguments = []
            call.arguments.append(arguments)

    def finish(self, position: int) -> Parsed:
        """The whole; `position` is the number of messages before it, for calls that came without an id."""
        if self._finish is None:
            raise MalformedReply("the stream ended before its finish reason")
        try:
            content = "".join(self._content) or None
            reasoning = "".join(self._reasoning) or None
        except TypeError:
            raise MalformedReply("a piece of text in the stream is not a text") from None
        calls = tuple(
            ToolCall(_call_id(call.id, position, number), call.name, "".join(call.arguments or ()))
            for number, (_, call) in enumerate(sorted(self._calls.items()))
        )
        self._check(content, reasoning, calls)
        return Parsed(
            message=Message("assistant", content, calls, None, reasoning),
            finish_reason=self._finish,
            usage=self._usage,
            model=self._model,
            prompt_token_ids=self._prompt_token_ids,
            token_ids=None if self._token_ids is None else tuple(self._token_ids),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            weight_version=self._weight_version,
        )

    def _check(self, content: str | None, reasoning: str | None, calls: Sequence[ToolCall]) -> None:
        if self._finish == "length":
            return
        if not calls:
            if self._finish in ("tool_calls", "function_call"):
                raise MalformedReply("the stream says that tools were called, and no call arrived")
            if content is None and reasoning is None:
                raise MalformedReply("the stream says nothing")
        if content is not None and any(mark in content for mark in LEFT_MARKS):
            raise MalformedReply("marks of a tool call are left in the text of the stream")
        for call in calls:
            if not call.name:
                raise MalformedReply("a tool call of the stream has no name")
            if not is_object(call.arguments):
                raise MalformedReply("arguments of a tool call in the stream are not a JSON object")


# One body ------------------------------------------------------------------------------------------------------------


def parse_body(data: bytes, position: int) -> Parsed:
    """A chat completion in one piece. `position` as in `StreamedReply.finish`."""
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise MalformedReply(f"the body of {len(data)} bytes is not JSON") from None
    try:
        if body.get("error"):
            raise _error(body["error"])
        choice = body["choices"][0]
        said = choice["message"]
        calls = tuple(
            ToolCall(_call_id(call.get("id"), position, number), *_function(call["function"]))
            for number, call in enumerate(said.get("tool_calls") or ())
        )
        content = said.get("content")
        if content is not None and not isinstance(content, str):
            content = tuple({**part, "text": _text(part.get("text"))} if "text" in part else part for part in content)
        reasoning = _text(said.get("reasoning_content") or said.get("reasoning"))
        message = Message("assistant", content or None, calls, None, reasoning or None)
        token_ids = choice.get("token_ids")
        prompt_token_ids = body.get("prompt_token_ids") or choice.get("prompt_token_ids")
        return Parsed(
            message=message,
            finish_reason=_text(choice.get("finish_reason")) or "stop",
            usage=_usage(body["usage"]) if body.get("usage") else None,
            model=_text(body.get("model")),
            prompt_token_ids=None if prompt_token_ids is None else tuple(prompt_token_ids),
            token_ids=None if token_ids is None else tuple(token_ids),
            logprobs=tuple(_logprobs(choice["logprobs"])) if choice.get("logprobs") else None,
            weight_version=_weight_version(body),
        )
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise MalformedReply(f"the body is not a chat completion ({type(error).__name__}: {error})") from None


def parse_events(data: bytes, position: int) -> Parsed:
    """A whole stream that was read as one piece."""
    lines, reply = EventLines(), StreamedReply()
    for event in (*lines.feed(data), *lines.end()):
        reply.add(event)
    return reply.finish(position)


# Parts of both -------------------------------------------------------------------------------------------------------


def is_object(arguments: str) -> bool:
    """Whether a text is a JSON object, exactly as it stands."""
    if arguments == "{}":
        return True
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


def _text(value: Any) -> str:
    """A text, or nothing; anything else is not what the format says."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in place of a text")
    return value


def _call_id(id: Any, position: int, number: int) -> str:
    """The id as it came; an absent one is named after its place, so that the same history gets the same name."""
    if id is None:
        return f"call_{position}_{number}"
    return id if isinstance(id, str) else str(id)


def _function(function: Mapping[str, Any]) -> tuple[str, str]:
    name, arguments = function["name"], function.get("arguments")
    if not isinstance(name, str) or not name:
        raise MalformedReply("a tool call has no name")
    if isinstance(arguments, str):
        return name, arguments
    return name, "" if arguments is None else orjson.dumps(arguments).decode()


def _usage(usage: Mapping[str, Any]) -> Usage | None:
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens") or 0
    if not (isinstance(prompt, int) and isinstance(completion, int) and min(prompt, completion) >= 0):
        return None  # nobody knows what was used
    return Usage(prompt_tokens=prompt, completion_tokens=completion)


def _logprobs(logprobs: Mapping[str, Any]) -> list[float]:
    values = [each["logprob"] for each in logprobs.get("content") or ()]
    if not all(isinstance(value, int | float) for value in values):
        raise TypeError("logprob")
    return values


def _weight_version(body: Mapping[str, Any]) -> str | None:
    version = body.get("weight_version")
    if version is None:
        for place in ("metadata", "meta_info"):
            version = version or (body.get(place) or {}).get("weight_version")
    return None if version is None else str(version)


def _error(error: Any) -> ErrorInReply:
    if isinstance(error, dict):
        code = error.get("code")
        return ErrorInReply(str(error.get("message") or "no message"), code if isinstance(code, int) else None)
    return ErrorInReply(str(error), None)


__all__ = [
    "ErrorInReply",
    "EventLines",
    "MalformedReply",
    "Parsed",
    "StreamedReply",
    "is_object",
    "parse_body",
    "parse_events",
]
