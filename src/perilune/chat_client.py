"""A chat with any OpenAI-compatible server: one conversation, streamed, with the standard library alone.

    endpoint = Endpoint.at("http://127.0.0.1:8000", key=None)
    conversation = Conversation(endpoint, model="nano")
    for part in conversation.ask("Which moons have an ocean?"):
        print(part.text, end="")

A part is a piece of the answer, of the reasoning before it, or of a tool call. Leaving the loop ends the request, and
what had arrived stays in the conversation. A request that failed leaves the conversation as it was.
"""

import base64
import http.client
import ipaddress
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

MOST_PICTURE_BYTES = 16 << 20
MOST_LINE_BYTES = 16 << 20
SIGNATURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF87a": "gif", b"GIF89a": "gif", b"RIFF": "webp"}


class ChatError(RuntimeError):
    """Why there is no answer, or why it ends early; the message is for the person."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the server is, up to and including /v1."""

    url: str
    key: str | None = field(default=None, repr=False)
    seconds: float = 600.0
    """Longest silence."""

    @staticmethod
    def at(address: str, *, key: str | None = None) -> "Endpoint":
        """From what a person types: the address of a server with or without /v1."""
        parts = urllib.parse.urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ChatError(f"{address!r} is not the address of a server, expected one such as http://127.0.0.1:8000")
        if parts.username is not None or parts.password is not None:
            raise ChatError("the address holds a name or password: put the key into an environment variable instead")
        try:
            _ = parts.port
        except ValueError:
            raise ChatError(f"{address!r} has a port that is none, expected 1 to 65535") from None
        path = parts.path.rstrip("/") or "/v1"
        return Endpoint(url=f"{parts.scheme}://{parts.netloc}{path}", key=key)

    def models(self) -> list[dict[str, Any]]:
        """What the server says about its models."""
        with self._open("/models", None) as response:
            try:
                listed = json.loads(response.read(MOST_LINE_BYTES))["data"]
                return [dict(each) for each in listed if isinstance(each["id"], str)]
            except (ValueError, KeyError, TypeError):
                raise ChatError(f"{self.url}/models did not answer in the OpenAI format: is this an API?") from None

    def events(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer up to [DONE]; ends the connection when it is left."""
        with self._open(path, body) as response:
            while True:
                try:
                    line = response.readline(MOST_LINE_BYTES)
                except (OSError, http.client.HTTPException) as error:
                    raise ChatError(f"the connection broke before the answer was complete ({_why(error)})") from None
                if not line:
                    raise ChatError("the answer ended before it was complete")
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                try:
                    event = json.loads(data)
                    problem = event.get("error")
                except (ValueError, AttributeError):
                    raise ChatError(f"the server sent something that is not the OpenAI format: {data[:80]!r}") from None
                if problem:
                    told = problem.get("message") if isinstance(problem, dict) else problem
                    raise ChatError(f"the server stopped: {told}")
                yield event

    def _open(self, path: str, body: Mapping[str, Any] | None) -> IO[bytes]:
        headers = {"Accept": "application/json" if body is None else "text/event-stream"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        if body is not None:
            headers["Content-Type"] = "application/json"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        proxies = urllib.request.ProxyHandler({}) if _is_here(request.host) else urllib.request.ProxyHandler()
        try:
            return urllib.request.build_opener(proxies, _NoRedirects()).open(request, timeout=self.seconds)
        except urllib.error.HTTPError as error:
            raise ChatError(self._refusal(error)) from None
        except (OSError, http.client.HTTPException) as error:
            raise ChatError(f"no server answers at {self.url} ({_why(error)})") from None

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        told = _told(error.read(MOST_LINE_BYTES)) or f"{error.code} {error.reason}".strip()
        if error.code in (401, 403):
            return f"the server {'did not accept the key' if self.key else 'asks for a key'}: {told}"
        if error.code in (429, 503):
            wait = error.headers.get("Retry-After", "")
            return f"the server is busy{f', it asks to wait {wait} s' if wait.isdecimal() else ''}: {told}"
        if error.code == 404:
            return f"{self.url} is not an OpenAI-compatible API, or has no such model: {told}"
        return f"the server answered {error.code}: {told}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A key goes to the server it was meant for and to no other."""

    def redirect_request(self, *arguments: Any, **named: Any) -> None:
        return None


def _is_here(host: str) -> bool:
    name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or error
    return str(getattr(reason, "strerror", None) or reason or type(error).__name__).lower()


def _told(body: bytes) -> str:
    """The reason inside an error of the OpenAI format; "" for anything else."""
    try:
        error = json.loads(body)["error"]
        return " ".join(str(error["message"] if isinstance(error, dict) else error).split())[:1000]
    except (ValueError, KeyError, TypeError):
        return ""


# ---------------------------------------------------------------------------------------------------------------------
# The conversation


@dataclass(frozen=True, kw_only=True)
class Part:
    """What arrived: a piece of text, and what it is a piece of."""

    kind: Literal["reasoning", "answer", "call"]
    text: str
    """For a call: its name when it begins, then pieces of its arguments."""
    begins: bool = False
    """Whether a call begins here."""


@dataclass(kw_only=True)
class Answer:
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)
    finish_reason: str | None = None
    """None when the answer did not come to its end."""
    usage: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Conversation:
    endpoint: Endpoint
    model: str
    system: str = ""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Further fields of the request: temperature, max_tokens, seed, ..."""
    raw: bool = False
    """Continue each text on its own instead of answering: for models that were not trained to chat."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: Answer = field(default_factory=Answer)

    def ask(self, text: str, pictures: Sequence[str] = ()) -> Iterator[Part]:
        """Stream the answer to one message; `pictures` are data: addresses."""
        question = {"role": "user", "content": _content(text, pictures)}
        self.last = answer = Answer()
        arrived = False
        try:
            for event in self.endpoint.events(*self._request(text, question)):
                for part in _take(answer, event):
                    arrived = True
                    yield part
            arrived = True
        finally:
            if arrived:
                self.messages += [question, {"role": "assistant", "content": answer.text}]

    def forget_last(self) -> dict[str, Any] | None:
        """Take back the last question and its answer; returns the question."""
        if not self.messages:
            return None
        question = self.messages[-2]
        del self.messages[-2:]
        return question

    def _request(self, text: str, question: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        common = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }
        if self.raw:
            return "/completions", {**common, "prompt": text}
        system = [{"role": "system", "content": self.system}] if self.system else []
        # An answer that was stopped before its first word is no message.
        said = [each for each in self.messages if each["role"] == "user" or each["content"]]
        return "/chat/completions", {**common, "messages": [*system, *said, question]}


def _content(text: str, pictures: Sequence[str]) -> str | list[dict[str, Any]]:
    if not pictures:
        return text
    shown: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in pictures]
    return shown + ([{"type": "text", "text": text}] if text else [])


def _take(answer: Answer, event: dict[str, Any]) -> Iterator[Part]:
    """Add what one event brings to the answer, and say what it was."""
    try:
        answer.usage = dict(event.get("usage") or answer.usage)
        for choice in (event.get("choices") or [])[:1]:
            delta = choice.get("delta") or {}
            reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
            text = delta.get("content") or choice.get("text") or ""
            answer.reasoning += reasoning
            answer.text += text
            if reasoning:
                yield Part(kind="reasoning", text=reasoning)
            if text:
                yield Part(kind="answer", text=text)
            for piece in delta.get("tool_calls") or ():
                yield from _take_call(answer, piece)
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    except (AttributeError, TypeError, KeyError, IndexError, ValueError):
        raise ChatError("the server sent something that is not the OpenAI format") from None


def _take_call(answer: Answer, piece: dict[str, Any]) -> Iterator[Part]:
    function = piece.get("function") or {}
    index = piece.get("index", len(answer.calls))
    if not 0 <= index <= len(answer.calls):
        raise IndexError(index)
    if index == len(answer.calls):
        answer.calls.append({"id": str(piece.get("id") or ""), "name": "", "arguments": ""})
        yield Part(kind="call", text=str(function.get("name") or ""), begins=True)
    call = answer.calls[index]
    call["name"] += function.get("name") or ""
    if arguments := function.get("arguments") or "":
        call["arguments"] += arguments
        yield Part(kind="call", text=arguments)


def picture_url(path: str | Path) -> str:
    """A picture file as the data: address that travels in a message."""
    path = Path(path).expanduser()
    try:
        size = path.stat().st_size
        content = path.read_bytes() if size <= MOST_PICTURE_BYTES else b""
    except OSError as error:
        raise ChatError(f"{str(path)!r} cannot be read: {error.strerror or error}") from None
    if size > MOST_PICTURE_BYTES:
        raise ChatError(f"{str(path)!r} has {size:,} bytes, expected at most {MOST_PICTURE_BYTES:,}")
    kind = next((kind for signature, kind in SIGNATURES.items() if content.startswith(signature)), None)
    if kind is None or (kind == "webp" and content[8:12] != b"WEBP"):
        raise ChatError(f"{str(path)!r} is not a PNG, JPEG, WebP or GIF picture")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
