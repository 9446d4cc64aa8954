"""A connection to the view's server that cannot be kept for nothing.

Anybody on this machine may connect, also without the token, and every connection takes a descriptor from the swarm. So
there are at most `MOST` of them: one more ends the oldest that has no request under way, and whoever sends no whole
request for `SILENT_SECONDS` is let go.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST = 128
SILENT_SECONDS = 15.0


class BoundedConnection(H11Protocol):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._served: object = None
        self._look: asyncio.TimerHandle | None = None
        self.began = self.loop.time()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST:
            idle = [each for each in self.connections if isinstance(each, BoundedConnection) and each.is_idle]
            oldest = min(idle, key=lambda each: each.began)
            self.connections.discard(oldest)
            oldest.transport.abort()
        self._look = self.loop.call_later(SILENT_SECONDS, self._let_go_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def _let_go_if_silent(self) -> None:
        """At the second look that finds no request since the one before; a drop of one now and then is none."""
        if self.is_idle and self.cycle is self._served:
            self.transport.abort()
            return
        self._served = self.cycle if self.is_idle else self
        self._look = self.loop.call_later(SILENT_SECONDS, self._let_go_if_silent)
