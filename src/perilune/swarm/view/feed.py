"""The stream of a run's state to any number of viewers, in frames of about 100 ms.

A frame is what changed since the one before, encoded once for all viewers. The last frames are kept: a viewer that
comes back with the id of the last frame it saw gets what it missed; one that is new or further behind gets a snapshot.
A viewer is only a position in the frames, so one that reads slowly or not at all costs no memory and delays nobody.
While nobody watches a live run nothing is projected.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.types import Receive, Scope, Send

from perilune.swarm.view.controls import Approvals
from perilune.swarm.view.projection import Projection
from perilune.swarm.view.state import encode

FRAME_SECONDS = 0.1
POLL_SECONDS = 0.5
"""Between two looks at a journal that somebody else writes."""
KEEP_FRAMES = 300
KEEP_BYTES = 4 << 20
MAX_VIEWERS = 32
BEAT_SECONDS = 10.0
STUCK_SECONDS = 30.0
"""A viewer that takes no byte for so long is let go."""


class Feed:
    def __init__(self, projection: Projection, approvals: Approvals, *, pushed: bool, about: dict[str, Any]) -> None:
        """`pushed`: the projection's inbox gets events; else the journal is polled. `about` goes into snapshots."""
        self.state = projection.state
        self.number = 0
        self.viewers = 0
        self._projection = projection
        self._approvals = approvals
        self._pushed = pushed
        self._about = about
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._fresh = asyncio.Event()
        self._wanted = asyncio.Event()
        self._closing = asyncio.get_running_loop().create_future()
        self._turn = asyncio.Lock()
        self._snapshot: tuple[int, bytes] = (-1, b"")

    async def run(self) -> None:
        """Follow the journal while somebody watches; until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            if not self.viewers:
                self._projection.inbox.sleep()
                self._wanted.clear()
                await self._wanted.wait()
                if self._pushed:
                    self._projection.inbox.wake()
            began = clock()
            await self.refresh()
            pause = FRAME_SECONDS if self._pushed else POLL_SECONDS
            await asyncio.sleep(max(pause / 4, pause - (clock() - began)))

    async def refresh(self) -> None:
        """Bring the state up to date and publish the change as one frame."""
        async with self._turn:
            for _ in self._projection.advance():
                await asyncio.sleep(0)
            self.state.set_approvals(self._approvals.waiting())
            if delta := self.state.take_delta():
                self._publish(encode(delta))

    def _publish(self, delta: bytes) -> None:
        self.number += 1
        frame = _event("frame", self.number, delta)
        self._frames.append(frame)
        self._bytes += len(frame)
        while len(self._frames) > KEEP_FRAMES or (self._bytes > KEEP_BYTES and len(self._frames) > 1):
            self._bytes -= len(self._frames.popleft())
        self._fresh.set()
        self._fresh = asyncio.Event()

    async def snapshot(self) -> tuple[int, bytes]:
        """The whole state as JSON and the number of the frame it includes."""
        async with self._turn:
            if self._snapshot[0] != self.number:
                self._snapshot = self.number, encode({**self._about, **self.state.snapshot()})
            return self._snapshot

    def missed(self, position: int) -> bytes | None:
        """The frames after `position`, or None where they are no longer kept (or the position is not of this feed)."""
        behind = self.number - position
        if not 0 <= behind <= len(self._frames):
            return None
        return b"".join(list(self._frames)[len(self._frames) - behind :]) if behind else b""

    async def close(self) -> None:
        """Show the last that happened and end all streams."""
        await self.refresh()
        if not self._closing.done():
            self._closing.set_result(None)

    # One viewer ------------------------------------------------------------------------------------------------------

    def response(self, position: int | None) -> Callable[[Scope, Receive, Send], Any]:
        """An ASGI answer that streams to one viewer, who has seen the frames up to `position`."""

        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            self.viewers += 1
            self._wanted.set()
            gone = asyncio.ensure_future(_until_gone(receive))
            try:
                headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                await self._stream(send, gone, position)
            finally:
                self.viewers -= 1
                gone.cancel()

        return stream

    async def _stream(self, send: Send, gone: asyncio.Future[None], position: int | None) -> None:
        if position is None or self.missed(position) is None:
            await self.refresh()
        over = (gone, self._closing)
        while not any(end.done() for end in over):
            chunk = None if position is None else self.missed(position)
            if chunk is None:
                position, snapshot = await self.snapshot()
                chunk = _event("snapshot", position, snapshot)
            elif not chunk:
                fresh = asyncio.ensure_future(self._fresh.wait())
                await asyncio.wait((fresh, *over), timeout=BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not fresh.done() and not any(end.done() for end in over):
                    chunk = b": still here\n\n"
                fresh.cancel()
            else:
                position = self.number
            if chunk:
                sending = asyncio.ensure_future(send(_body(chunk, more=True)))
                await asyncio.wait((sending, *over), timeout=STUCK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    sending.cancel()
                    return
        if not gone.done():
            last = self.missed(position) if position is not None else b""
            if last is None:
                last = _event("snapshot", self.number, (await self.snapshot())[1])
            await send(_body(last + _event("closed", self.number, b"{}"), more=False))


def _body(data: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _event(kind: str, number: int, data: bytes) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (number, kind.encode(), data)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
