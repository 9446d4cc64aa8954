"""The server process: uvicorn around the application, bounded connections, and a drain on SIGTERM.

    serve(engine, tokenizer, "perilune-nano", ServerConfig(), port=8000)          # until SIGTERM or Ctrl-C

    server = Server(engine, tokenizer, "perilune-nano", ServerConfig())           # in a thread, for tests and notebooks
    url = server.start(); ...; server.stop()

    async with serving(build_app(...), ServerConfig()) as url: ...                # beside others on this event loop

It listens on 127.0.0.1. Another address is refused unless there is an API key.

SIGTERM (or Ctrl-C): no new connection is accepted, what is under way goes on for at most `drain_seconds`, what is left
then ends with an error that says so, and the engine is closed. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette

from perilune.data.tokenizer import Tokenizer
from perilune.serve.api import EngineLike, Parts, ServerConfig, build_app
from perilune.serve.connection import bounded
from perilune.serve.keys import check_address

START_SECONDS = 60.0
END_SECONDS = 5.0
"""After the drain: time for the last errors to be written."""
SILENT_SECONDS = 60.0
KEEP_ALIVE_SECONDS = 30
KERNEL_BUFFER = 1 << 18
"""Bytes that the system may hold for one client; more would hide how far behind it is."""


class ClosableEngine(EngineLike, Protocol):
    async def close(self, drain_seconds: float) -> None: ...


class _Uvicorn(uvicorn.Server):
    """Drains the application before it gives up on its connections."""

    def __init__(self, config: uvicorn.Config, parts: Parts) -> None:
        super().__init__(config)
        self.parts = parts
        self.on_started: Callable[[], None] = lambda: None
        self.takes_signals = True

    def capture_signals(self) -> AbstractContextManager[None]:
        return super().capture_signals() if self.takes_signals else nullcontext()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would raise the signal again at the end, before the engine is closed.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.parts.begin_drain()
        ending = asyncio.get_running_loop().call_later(self.parts.config.limits.drain_seconds, self.parts.end_all)
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.create_server((host, port), family=family, backlog=1024)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BUFFER)
    return found


def _uvicorn(app: Starlette, config: ServerConfig) -> _Uvicorn:
    limits = config.limits
    connection = bounded(
        most=limits.connections,
        write_seconds=limits.write_seconds,
        silent_seconds=max(SILENT_SECONDS, limits.body_seconds),
    )
    settings = uvicorn.Config(
        app,
        http=connection,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=65_536,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(limits.drain_seconds + END_SECONDS) + 1,
    )
    return _Uvicorn(settings, app.state.parts)


def serve(
    engine: ClosableEngine,
    tokenizer: Tokenizer,
    model_name: str,
    config: ServerConfig,
    *,
    port: int,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve in this thread, the main one, until a signal says to stop. `on_ready` is told the address."""
    check_address(config.host, config.keys)
    app = build_app(engine, tokenizer, model_name, config)
    with listener(config.host, port) as socket_:
        server = _uvicorn(app, config)
        if on_ready is not None:
            server.on_started = lambda: on_ready(address(socket_))
        asyncio.run(_run(server, engine, socket_))


async def _run(server: _Uvicorn, engine: ClosableEngine, socket_: socket.socket) -> None:
    # A full collection goes through all that torch has made, a tenth of a second in which nobody gets a token. What is
    # here now stays.
    gc.collect()
    gc.freeze()
    try:
        await server.serve(sockets=[socket_])
    finally:
        gc.unfreeze()
        await engine.close(drain_seconds=0)
        server.parts.threads.shutdown(wait=False, cancel_futures=True)


@asynccontextmanager
async def serving(app: Starlette, config: ServerConfig, *, port: int = 0) -> AsyncIterator[str]:
    """The address of an application that is served on this event loop while the block lasts. Signals and the engine are
    left to whoever has them."""
    check_address(config.host, config.keys)
    with listener(config.host, port) as socket_:
        server = _uvicorn(app, config)
        server.takes_signals = False
        started = asyncio.Event()
        server.on_started = started.set
        running = asyncio.create_task(server.serve(sockets=[socket_]))
        starting = asyncio.create_task(started.wait())
        try:
            await asyncio.wait((running, starting), return_when=asyncio.FIRST_COMPLETED)
            if not started.is_set():
                running.result()  # raises what was in the way
                raise RuntimeError("the server could not start")
            yield address(socket_)
        finally:
            starting.cancel()
            server.should_exit = True
            await running
            server.parts.threads.shutdown(wait=False, cancel_futures=True)


def address(socket_: socket.socket) -> str:
    host, port = socket_.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """A server in a thread with an event loop of its own. `stop` drains it as SIGTERM would."""

    def __init__(
        self, engine: ClosableEngine, tokenizer: Tokenizer, model_name: str, config: ServerConfig, *, port: int = 0
    ) -> None:
        check_address(config.host, config.keys)
        self.app = build_app(engine, tokenizer, model_name, config)
        self.config = config
        self._engine = engine
        self._port = port
        self._server: _Uvicorn | None = None
        self._thread: threading.Thread | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> str:
        """Begin to serve; returns the address."""
        socket_ = listener(self.config.host, self._port)
        url = address(socket_)
        self._thread = threading.Thread(target=self._main, args=(socket_,), name="perilune-server", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or self._failure is not None:
            raise RuntimeError(f"the server could not start: {self._failure or 'no answer from its thread'}")
        return url

    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections) if self._server is not None else 0

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(self.config.limits.drain_seconds + 4 * END_SECONDS)

    def _main(self, socket_: socket.socket) -> None:
        try:
            server = self._server = _uvicorn(self.app, self.config)
            server.on_started = self._ready.set
            asyncio.run(_run(server, self._engine, socket_))
        except BaseException as error:
            self._failure = error
        finally:
            socket_.close()
            self._ready.set()

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, *error: Any) -> None:
        self.stop()


__all__ = ["Server", "address", "listener", "serve", "serving"]
