"""Just enough of an HTTP/1.1 server for a scripted model, as an asyncio protocol without tasks.

One request at a time per connection, bodies with Content-Length, keep-alive. It is written by hand because a model's
test double has to break the rules of HTTP on purpose (cut a body, reset a connection), and because it must cost far
less than the runtime that it measures. It is made for loopback, not for the open network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncio import Transport

LARGEST_BODY = 256 << 20
LARGEST_HEAD = 64 << 10
REASONS = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: bytes
    """Raw, in lower case."""
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """Value of a header by its lower-case name."""
        start = self.headers.find(b"\r\n" + name + b":")
        if start < 0:
            return None
        start += len(name) + 3
        end = self.headers.find(b"\r\n", start)
        return self.headers[start : end if end >= 0 else None].strip()


class Connection(asyncio.Protocol):
    """One connection; `answer(connection, request)` must lead to `respond`, `write_raw` + `close`, or `abort`."""

    def __init__(self, answer: Callable[[Connection, Request], None], connections: set[Connection]) -> None:
        self._answer = answer
        self._connections = connections
        self._buffer = bytearray()
        self._head_end = -1
        self._length = 0
        self._is_busy = False
        self.transport: Transport | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when the client goes away before it has its response."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # pyrefly: ignore[bad-assignment]
        self._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self._connections.discard(self)
        self._lose()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_busy:
            self._read_request()

    def respond(self, status: int, body: bytes, *, kind: str = "application/json", headers: bytes = b"") -> None:
        """A whole response; the connection stays open."""
        head = b"HTTP/1.1 %d %s\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n" % (
            status,
            REASONS[status].encode(),
            kind.encode(),
            len(body),
            headers,
        )
        self.write_raw(head + body)
        self.finish()

    def write_raw(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def finish(self) -> None:
        """The response is complete: read the next request."""
        self._is_busy = False
        self.on_lost = None
        if self._buffer:
            self._read_request()

    def close(self) -> None:
        """Close after what was written, in the middle of a response."""
        if self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Reset the connection."""
        if self.transport is not None:
            self.transport.abort()

    def _lose(self) -> None:
        lost, self.on_lost = self.on_lost, None
        if lost is not None:
            lost()

    def _read_request(self) -> None:
        if self._head_end < 0:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > LARGEST_HEAD:
                    self._refuse(431, "the head of the request is too large")
                return
            self._head_end = end
            headers = bytes(self._buffer[:end]).lower()
            start = headers.find(b"\r\ncontent-length:")
            if start < 0:
                if b"\r\ntransfer-encoding:" in headers:
                    return self._refuse(411, "a body needs Content-Length")
                self._length = 0
            else:
                stop = headers.find(b"\r\n", start + 2)
                number = headers[start + 17 : stop if stop >= 0 else None].strip()
                if not number.isdigit() or int(number) > LARGEST_BODY:
                    return self._refuse(413, f"Content-Length {number!r}: expected at most {LARGEST_BODY}")
                self._length = int(number)
        start = self._head_end + 4
        if len(self._buffer) < start + self._length:
            return
        head, body = bytes(self._buffer[: self._head_end]), bytes(self._buffer[start : start + self._length])
        del self._buffer[: start + self._length]
        self._head_end = -1
        line, _, rest = head.partition(b"\r\n")
        parts = line.split(b" ")
        if len(parts) != 3:
            return self._refuse(400, "expected METHOD PATH VERSION")
        self._is_busy = True
        path = parts[1].partition(b"?")[0]
        self._answer(self, Request(parts[0].decode(), path.decode(), b"\r\n" + rest.lower(), body))

    def _refuse(self, status: int, why: str) -> None:
        self._buffer.clear()
        self._is_busy = True
        self.respond(status, b'{"error":{"message":"%s"}}' % why.replace('"', "'").encode())
        self.close()
