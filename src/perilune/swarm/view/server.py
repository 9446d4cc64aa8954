"""The view's server: a thread with an event loop of its own, on a free port of 127.0.0.1.

    view = View(reader=SQLiteReader(path), journal=journal, controls=controls)
    print(view.start())          # http://127.0.0.1:41235/#token=...
    ...
    view.stop()

The swarm's loop only hands over references to committed events; everything else happens on the view's thread. Without
`journal` the reader's journal is polled: that shows a finished run, or one that another process writes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable

import uvicorn

from perilune.swarm.journal.event import Journal
from perilune.swarm.view.app import Parts, build
from perilune.swarm.view.connection import BoundedConnection
from perilune.swarm.view.controls import Approvals, Controls
from perilune.swarm.view.feed import Feed
from perilune.swarm.view.guard import Guard
from perilune.swarm.view.inbox import Inbox
from perilune.swarm.view.projection import Projection, Reader
from perilune.swarm.view.replay import Replay
from perilune.swarm.view.state import Cost, RunState

START_SECONDS = 20.0
STOP_SECONDS = 5.0


class View:
    def __init__(
        self,
        *,
        reader: Reader,
        journal: Journal | None = None,
        controls: Controls | None = None,
        approvals: Approvals | None = None,
        cost: Cost | None = None,
        port: int = 0,
    ) -> None:
        """The reader is the view's alone from here on, and closed with it. Port 0: any that is free."""
        self.approvals = approvals or Approvals()
        self._reader = reader
        self._journal = journal
        self._controls = controls
        self._cost = cost
        self._wanted_port = port
        self._token = secrets.token_urlsafe(32)
        self._inbox = Inbox()
        self._unsubscribe: Callable[[], None] | None = None
        self._swarm_loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._feed: Feed | None = None
        self.problems: deque[logging.LogRecord] = deque(maxlen=20)
        """What the server would have logged."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """With the token in the fragment, which a browser keeps to itself."""
        return f"http://127.0.0.1:{self.port}/#token={self._token}"

    def start(self) -> str:
        """Begin to serve; returns the address. On the swarm's loop where there is a journal to follow."""
        if self._thread is not None:
            raise RuntimeError("this view was started before: make a new one")
        listener = socket.create_server(("127.0.0.1", self._wanted_port))
        # What the kernel holds for one viewer; who takes nothing is given a snapshot later, not all that happened.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 18)
        # asyncio sets it only for sockets made with the number of the protocol; connections inherit it from here.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.port = listener.getsockname()[1]
        if self._journal is not None:
            self._swarm_loop = asyncio.get_running_loop()
            self._unsubscribe = self._journal.subscribe(self._inbox.receive)
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="perilune-view", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or self._failure is not None:
            self.stop()
            raise RuntimeError(f"the view could not start: {self._failure or 'no answer from its thread'}")
        return self.url

    def stop(self) -> None:
        """End all streams and the thread. From any thread but the view's; on the swarm's where there is a journal."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        if self._thread is None:
            return
        if self._loop is not None and self._thread.is_alive():
            ending = self._end()
            try:
                asyncio.run_coroutine_threadsafe(ending, self._loop)
            except RuntimeError:  # its loop has ended by itself
                ending.close()
        self._thread.join(STOP_SECONDS)

    async def _end(self) -> None:
        try:
            if self._feed is not None:
                await self._feed.close()
        finally:
            if self._server is not None:
                self._server.should_exit = True

    def _serve(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._main(listener))
        except BaseException as error:
            self._failure = error
        finally:
            listener.close()
            self._reader.close()
            self._ready.set()

    async def _main(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        is_live = self._journal is not None
        about = {"live": is_live, "controls": self._controls is not None}
        projection = Projection(self._reader, self._inbox, RunState(self._cost))
        feed = self._feed = Feed(projection, self.approvals, pushed=is_live, about=about)
        parts = Parts(
            feed=feed,
            replay=Replay(self._reader, lambda: RunState(self._cost)),
            reader=self._reader,
            approvals=self.approvals,
            controls=self._controls,
            swarm_loop=self._swarm_loop,
        )
        config = uvicorn.Config(
            Guard(build(parts), port=self.port, token=self._token),
            http=BoundedConnection,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        pump = asyncio.create_task(feed.run())
        self._loop.call_soon(self._ready.set)
        log = logging.getLogger("uvicorn.error")
        log.addFilter(self._keep_quiet)
        try:
            await self._server.serve(sockets=[listener])
        finally:
            log.removeFilter(self._keep_quiet)
            pump.cancel()

    def _keep_quiet(self, record: logging.LogRecord) -> bool:
        """A viewer's broken connection must not write into the terminal of the run."""
        is_ours = threading.current_thread() is self._thread
        if is_ours and record.levelno > logging.INFO:
            self.problems.append(record)
        return not is_ours
