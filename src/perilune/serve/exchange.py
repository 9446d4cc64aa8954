"""The bytes of one HTTP exchange: reading a body within bounds, writing JSON or events, noticing that a client left.

Nothing here knows what a body means. A body is counted while it arrives, so that neither one nor all together pass
their limits, and must be whole within `body_seconds`. `while_connected` runs something only as long as the client is
there. `Guard` keeps pages of other sites away from a server that has no key.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.serve.keys import is_loopback
from perilune.serve.limits import Admission
from perilune.serve.refusals import Refusal, shown

Result = TypeVar("Result")
Headed = Mapping[str, str]


class ClientGone(Exception):
    """The client has left; there is nobody to answer."""


# Reading --------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def read_body(headers: Headers, receive: Receive, admission: Admission) -> AsyncIterator[bytes]:
    """The whole body. Its bytes count as in memory until the block is left."""
    limits, taken = admission.limits, 0
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(f"the content type is {shown(kind)}, expected application/json", status=415)
    declared = headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limits.body_bytes:
        raise _too_large(limits.body_bytes)
    pieces: list[bytes] = []
    try:
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    admission.take_bytes(len(piece))
                    taken += len(piece)
                    if taken > limits.body_bytes:
                        raise _too_large(limits.body_bytes)
                    pieces.append(piece)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Refusal(f"the body was not there within {limits.body_seconds:g} s", status=408) from None
        body = b"".join(pieces)
        pieces.clear()
        yield body
    finally:
        admission.give_bytes(taken)


def _too_large(limit: int) -> Refusal:
    return Refusal(f"the body has more than {limit:,} bytes", status=413, code="body_too_large")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled, and waited for, when the client leaves: then `ClientGone`."""
    task, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Writing --------------------------------------------------------------------------------------------------------------


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def json_response(value: Any, status: int = 200, headers: Headed | None = None) -> Response:
    return Response(encoded(value), status, headers=dict(headers or {}), media_type="application/json")


async def send_json(send: Any, value: Any, status: int, headers: Headed) -> None:
    body = encoded(value)
    await send(_start(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}))
    await send({"type": "http.response.body", "body": body})


async def send_events(
    send: Any, events: Sequence[Mapping[str, Any] | None], *, headers: Headed | None = None, more: bool = True
) -> None:
    """Server-sent events in one write; None is [DONE]. Without any event, a comment keeps the connection alive."""
    if not send.has_begun:
        fixed = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
        await send(_start(200, fixed | dict(headers or {})))
    body = b"".join(b"data: %s\n\n" % (b"[DONE]" if event is None else encoded(event)) for event in events)
    await send({"type": "http.response.body", "body": body or b": waiting\n\n", "more_body": more})


def _start(status: int, headers: Headed) -> Message:
    rows = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": rows}


# Who may talk to a server without a key -------------------------------------------------------------------------------


class Guard:
    """ASGI middleware. A server without a key, which is one on this machine, answers only to names of this machine (a
    site whose name was made to point here is not one), and takes no request that a page of another site has sent."""

    def __init__(self, app: ASGIApp, *, is_open: bool) -> None:
        self._app = app
        self._is_open = is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                more = {b"x-content-type-options": b"nosniff", b"cache-control": b"no-store"}
                message = {
                    **message,
                    "headers": [*message["headers"], *((k, v) for k, v in more.items() if k not in names)],
                }
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        if refusal is None:
            await self._app(scope, receive, send_guarded)
        else:
            await json_response(refusal.body(), refusal.status)(scope, receive, send_guarded)

    def _refusal(self, headers: Headers) -> Refusal | None:
        if not self._is_open:
            return None
        if not is_loopback(_name(headers.get("host", ""))):
            return Refusal("a server without a key answers to 127.0.0.1 and localhost only", status=421)
        origin = headers.get("origin")
        if origin is not None and not is_loopback(_origin_name(origin)):
            return Refusal("requests from pages of other sites are refused", status=403)
        return None


def _name(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def _origin_name(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


__all__ = [
    "ClientGone",
    "Guard",
    "encoded",
    "json_response",
    "read_body",
    "send_events",
    "send_json",
    "while_connected",
]
