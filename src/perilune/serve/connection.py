"""A connection that nobody can keep for nothing.

Three rules, looked after every few seconds by the connection itself:

    unread    whoever leaves bytes of ours unread for `write_seconds` is let go, whatever it was sent;
    silent    whoever has no request under way and sends no whole one for `silent_seconds` is let go;
    too many  of more than `most` connections the oldest without a request under way is ended.

A connection that is let go is aborted, not closed: closing would wait for a reader that does not read. The request
that it carried ends with it, and its slot in the engine is free.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def bounded(*, most: int, write_seconds: float, silent_seconds: float) -> type[H11Protocol]:
    """The connection class of a server with these bounds."""
    pause = min(write_seconds, silent_seconds) / 4

    class BoundedConnection(H11Protocol):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.began = self.loop.time()
            # Looks are counted, not seconds: a server that was busy for a while must not blame its clients.
            self._unread = self._silent = 0
            self._served: object = None
            self._look: asyncio.TimerHandle | None = None

        @property
        def is_idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # asyncio does this only for sockets that were made with the number of the protocol; without it, an answer
            # on a connection that is used again waits 40 ms for the client's acknowledgement.
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self.connections) > most:
                idle = [each for each in self.connections if isinstance(each, BoundedConnection) and each.is_idle]
                oldest = min(idle, key=lambda each: each.began)
                self.connections.discard(oldest)
                oldest.transport.abort()
            self._look = self.loop.call_later(pause, self._look_after)

        def connection_lost(self, exc: Exception | None) -> None:
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(exc)

        def _look_after(self) -> None:
            has_unread = self.transport.get_write_buffer_size() > 0
            is_silent = self.is_idle and self.cycle is self._served
            self._unread = self._unread + 1 if has_unread else 0
            self._silent = self._silent + 1 if is_silent else 0
            self._served = self.cycle if self.is_idle else self
            if self._unread * pause > write_seconds or self._silent * pause > silent_seconds:
                self.transport.abort()
                return
            self._look = self.loop.call_later(pause, self._look_after)

    return BoundedConnection


__all__ = ["bounded"]
