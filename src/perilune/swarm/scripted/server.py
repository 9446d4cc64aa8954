"""A model server whose model is a script: OpenAI-compatible, deterministic, cheap, and faulty on request.

    async with ScriptedServer(worker(steps=3), Behaviour(latency=0.2)) as server:
        client = HTTPClient(base_url=server.base_url, api_key_env=None)

POST /v1/chat/completions, streaming and not; GET /v1/models; GET /_counts says what was asked so far, POST /_reset
begins the count again. The same messages get the same reply. Latency, a limit of calls at a time (429 beyond it) and
faults are settings of the server, never of the script.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import orjson

from perilune.swarm.scripted.chaos import TRANSPORTS, Chaos, Fault, Transport, spoil_answer, spoil_parts
from perilune.swarm.scripted.http_protocol import Connection, Request
from perilune.swarm.scripted.script import Script, Turn
from perilune.swarm.scripted.wire import Answer, body, events, make_answer

ERRORS: Mapping[Fault, tuple[int, str]] = {
    "server_error": (500, "scripted fault: internal error"),
    "overloaded": (503, "scripted fault: overloaded"),
    "rate_limit": (429, "scripted fault: too many requests"),
}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\nCache-Control: no-cache\r\n\r\n"


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    latency: float | tuple[float, float] = 0.0
    """Seconds before a response begins: fixed, or drawn evenly between two numbers."""
    seed: int = 0
    """Of random latencies."""
    max_concurrent: int | None = None
    """Calls at a time; one more is refused with 429."""
    retry_after: float | None = 1.0
    """Seconds in the Retry-After header of a refusal; None leaves the header out."""
    chaos: Chaos | None = None
    models: tuple[str, ...] = ("scripted",)
    """What /v1/models lists. Any model name is answered."""
    require_key: str | None = None
    """Refuse requests without this bearer token (for tests of keys; never a real one)."""


@dataclass
class Counts:
    """What the server was asked since the last reset."""

    calls: int = 0
    """Requests for a completion, also those refused or spoilt."""
    answered: int = 0
    """Responses that went out whole, spoilt or not."""
    refused: int = 0
    """429 because of max_concurrent."""
    faulty: int = 0
    abandoned: int = 0
    """The client went away first."""
    in_flight: int = 0
    peak: int = 0
    streamed: int = 0
    conversations: Counter[str] = field(default_factory=Counter)
    """Calls by conversation: a digest of the system prompt and the first user message, and the latter's beginning."""
    faults: Counter[str] = field(default_factory=Counter)

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "conversations": dict(self.conversations), "faults": dict(self.faults)}


class ScriptedServer:
    """Runs in the loop that starts it. `start_server` in `launch` gives it a process of its own."""

    def __init__(self, script: Script, behaviour: Behaviour | None = None, *, host: str = "127.0.0.1", port: int = 0):
        self.script = script
        self.behaviour = behaviour or Behaviour()
        self.counts = Counts()
        self._place = (host, port)
        self._connections: set[Connection] = set()
        self._attempts: Counter[bytes] = Counter()
        self._random = random.Random(self.behaviour.seed)
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        host, port = self._place
        self._server = await self._loop.create_server(
            lambda: Connection(self._answer, self._connections), host, port, backlog=1024
        )
        self._place = self._server.sockets[0].getsockname()[:2]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for connection in list(self._connections):
            connection.abort()
        await self._server.wait_closed()

    @property
    def base_url(self) -> str:
        host, port = self._place
        return f"http://{host}:{port}/v1"

    def reset(self) -> None:
        """Forget counts and attempts; calls in flight stay counted as in flight."""
        self.counts = Counts(in_flight=self.counts.in_flight, peak=self.counts.in_flight)
        self._attempts.clear()
        self._random = random.Random(self.behaviour.seed)

    # Requests --------------------------------------------------------------------------------------------------------

    def _answer(self, connection: Connection, request: Request) -> None:
        route = (request.method, request.path)
        if route == ("POST", "/v1/chat/completions"):
            return self._complete(connection, request)
        if route == ("GET", "/v1/models"):
            listed = [{"id": name, "object": "model", "created": 0, "owned_by": "perilune"} for name in self._models()]
            return connection.respond(200, orjson.dumps({"object": "list", "data": listed}))
        if route == ("GET", "/_counts"):
            return connection.respond(200, orjson.dumps(self.counts.plain()))
        if route == ("POST", "/_reset"):
            self.reset()
            return connection.respond(200, b"{}")
        return connection.respond(404, _error(f"no {request.method} {request.path} here"))

    def _models(self) -> tuple[str, ...]:
        return self.behaviour.models

    def _complete(self, connection: Connection, request: Request) -> None:
        counts, behaviour = self.counts, self.behaviour
        counts.calls += 1
        key = behaviour.require_key
        if key is not None and request.header(b"authorization") != b"bearer " + key.lower().encode():
            return connection.respond(401, _error(f"wrong key {request.header(b'authorization')!r}"))
        try:
            asked = orjson.loads(request.body)
            messages = asked["messages"]
            turn = Turn(messages, asked.get("tools") or (), asked.get("model", ""), asked.get("seed"))
            digest = _digest(messages, asked.get("model", ""))
            counts.conversations[_conversation(turn)] += 1
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            return connection.respond(400, _error(f"not a chat request: {type(error).__name__}: {error}"))
        if behaviour.max_concurrent is not None and counts.in_flight >= behaviour.max_concurrent:
            counts.refused += 1
            return connection.respond(429, _error("too many calls at a time"), headers=self._retry_after())
        attempt = self._attempts[digest]
        self._attempts[digest] += 1
        fault = behaviour.chaos.draw(digest, attempt) if behaviour.chaos else None
        counts.in_flight += 1
        counts.peak = max(counts.peak, counts.in_flight)
        assert self._loop is not None
        timer = self._loop.call_later(
            self._latency(), self._respond, connection, asked, turn, digest, len(request.body), fault
        )
        connection.on_lost = lambda: self._abandon(timer)

    def _abandon(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self.counts.in_flight -= 1
        self.counts.abandoned += 1

    def _latency(self) -> float:
        latency = self.behaviour.latency
        return self._random.uniform(*latency) if isinstance(latency, tuple) else latency

    def _retry_after(self) -> bytes:
        seconds = self.behaviour.retry_after
        return b"" if seconds is None else b"Retry-After: %s\r\n" % f"{seconds:g}".encode()

    # Responses -------------------------------------------------------------------------------------------------------

    def _respond(
        self,
        connection: Connection,
        asked: Mapping[str, Any],
        turn: Turn,
        digest: bytes,
        size: int,
        fault: Fault | None,
    ) -> None:
        counts = self.counts
        if fault is not None:
            counts.faulty += 1
            counts.faults[fault] += 1
        if fault == "reset":
            return connection.abort()
        transport = TRANSPORTS.get(fault, Transport()) if fault else Transport()
        if transport.end != "stalled":  # a stalled call is in flight until the client gives it up
            # Before the bytes go out: whoever has the answer may send its next call.
            connection.on_lost = None
            counts.in_flight -= 1
            counts.answered += 1
        if fault in ERRORS:
            status, text = ERRORS[fault]
            return connection.respond(status, _error(text))
        if fault == "wrong_type":
            return connection.respond(200, b"<html><body>Bad gateway</body></html>", kind="text/html")
        try:
            reply = self.script(turn)
        except Exception as error:  # a broken script must show at the client, not hang it
            return connection.respond(422, _error(f"the script failed: {type(error).__name__}: {error}"))
        stream = bool(asked.get("stream"))
        answer = make_answer(
            turn,
            reply,
            id=f"chatcmpl-{digest.hex()[:24]}",
            request_bytes=size,
            max_tokens=asked.get("max_completion_tokens") or asked.get("max_tokens"),
            want_tokens=bool(asked.get("return_token_ids")),
        )
        if fault is not None:
            answer = spoil_answer(answer, fault, stream=stream)
        if stream:
            counts.streamed += 1
            options = asked.get("stream_options") or {}
            self._send_events(connection, answer, fault, transport, include_usage=bool(options.get("include_usage")))
        else:
            self._send_body(connection, answer, transport)

    def _send_events(
        self, connection: Connection, answer: Answer, fault: Fault | None, transport: Transport, *, include_usage: bool
    ) -> None:
        parts = spoil_parts(answer, fault) if fault in ("dropped_calls", "empty_deltas") else None
        written = events(answer, include_usage=include_usage, parts=parts)
        if fault == "bad_event":
            written[len(written) // 2] = b'data: {"choices": [{"index": 0, "del\n\n'
        if fault == "error_in_stream":
            written[len(written) // 2 :] = [b'data: {"error":{"message":"scripted fault: engine died","code":500}}\n\n']
        head = STREAM_HEAD % b"text/event-stream"
        if transport.end == "whole":
            whole = b"".join(written)
            connection.write_raw(b"%s%x\r\n%s\r\n0\r\n\r\n" % (head, len(whole), whole))
            return connection.finish()
        half = b"".join(written[: max(1, len(written) // 2)])
        if transport.end == "unfinished":
            connection.write_raw(b"%s%x\r\n%s\r\n0\r\n\r\n" % (head, len(half), half))
            return connection.finish()
        half = half[:-7]  # in the middle of an event
        connection.write_raw(b"%s%x\r\n%s\r\n" % (head, len(half), half))
        if transport.end == "cut":
            connection.close()

    def _send_body(self, connection: Connection, answer: Answer, transport: Transport) -> None:
        whole = body(answer)
        if transport.end == "whole":
            return connection.respond(200, whole)
        half = whole[: len(whole) // 2]
        if transport.end == "unfinished":
            return connection.respond(200, half)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(whole)
        connection.write_raw(head + half)
        if transport.end == "cut":
            connection.close()


def _error(text: str) -> bytes:
    return orjson.dumps({"error": {"message": text, "type": "scripted"}})


def _digest(messages: list[dict[str, Any]], model: str) -> bytes:
    """Of the conversation's beginning, length and end: enough to tell requests apart without hashing all of it."""
    ends = orjson.dumps((model, len(messages), messages[:2], messages[-3:]))
    return hashlib.blake2b(ends, digest_size=16).digest()


def _conversation(turn: Turn) -> str:
    beginning = orjson.dumps((turn.system, turn.task))
    return f"{hashlib.blake2b(beginning, digest_size=4).hexdigest()} {turn.task[:60]}"


__all__ = ["Behaviour", "Counts", "ScriptedServer"]
