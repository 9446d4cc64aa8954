"""A view that serves an example, and a plain HTTP client that may lie about itself."""

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from perilune.swarm.view.controls import Approvals
from perilune.swarm.view.server import View
from tests.swarm.view.example_run import MemoryJournal, MemoryReader

SECONDS = 30.0
"""Longest wait for anything."""


@dataclass
class RecordingControls:
    approvals: Approvals
    done: list[tuple[str, ...]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    async def cancel(self, agent: str) -> None:
        self._record("cancel", agent)

    def steer(self, agent: str, text: str) -> None:
        if agent == "main/gone":
            raise RuntimeError("this agent has ended")
        self._record("steer", agent, text)

    def decide(self, request_id: str, decision: str) -> None:
        self._record("decide", request_id, decision)
        self.approvals.remove(request_id)

    def _record(self, *what: str) -> None:
        self.done.append(what)
        self.threads.add(threading.current_thread().name)


class LoopThread:
    """The swarm's event loop, in a thread so that a test can act beside it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="swarm", daemon=True)
        self._thread.start()

    def call(self, act: Callable[[], Any]) -> Any:
        async def on_the_loop() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(on_the_loop(), self.loop).result(SECONDS)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(SECONDS)
        self.loop.close()


@dataclass
class Live:
    view: View
    journal: MemoryJournal
    approvals: Approvals
    controls: RecordingControls
    swarm: LoopThread

    @property
    def url(self) -> str:
        return self.view.url

    @property
    def token(self) -> str:
        return self.view.url.partition("#token=")[2]

    def commit(self, *rows: tuple[str, str, dict[str, Any], dict[str, Any]]) -> None:
        """Write and publish events as the swarm would: on its own loop, one batch."""
        self.swarm.call(lambda: self.journal.publish([self.journal.add(*row) for row in rows]))

    def break_connections(self) -> None:
        server, loop = self.view._server, self.view._loop
        assert server is not None and loop is not None
        for connection in list(server.server_state.connections):
            loop.call_soon_threadsafe(connection.transport.abort)

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str | None) -> "Answer":
        sent = {"Host": f"127.0.0.1:{self.view.port}", "X-Perilune-Token": self.token}
        if body is not None:
            sent["Content-Type"] = "application/json"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.view.port, timeout=SECONDS)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
            for name, value in sent.items():
                if value is not None:
                    connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(data)))
            connection.endheaders(data or None)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())
        finally:
            connection.close()

    def feed(self, last: str | None = None, receive_buffer: int | None = None) -> "Stream":
        connection = http.client.HTTPConnection("127.0.0.1", self.view.port, timeout=SECONDS)
        if receive_buffer is not None:
            connection.sock = socket.socket()
            connection.sock.settimeout(SECONDS)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.sock.connect(("127.0.0.1", self.view.port))
        headers = {"X-Perilune-Token": self.token} | ({"Last-Event-ID": last} if last is not None else {})
        connection.request("GET", "/api/feed", headers=headers)
        return Stream(connection)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Stream:
    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self.response = connection.getresponse()

    def next(self) -> tuple[str, str, Any]:
        """Kind, id and data of the next event."""
        fields: dict[str, str] = {}
        while True:
            line = self.response.readline().decode().rstrip("\n")
            if not line and fields.get("data"):
                return fields["event"], fields["id"], json.loads(fields["data"])
            name, colon, value = line.partition(": ")
            if colon and name:
                fields[name] = value

    def close(self) -> None:
        self.response.close()
        self.connection.close()


@contextmanager
def live_view(journal: MemoryJournal) -> Iterator[Live]:
    swarm = LoopThread()
    approvals = Approvals()
    controls = RecordingControls(approvals)
    view = View(reader=MemoryReader(journal), journal=journal, controls=controls, approvals=approvals)
    try:
        swarm.call(view.start)
        yield Live(view, journal, approvals, controls, swarm)
    finally:
        swarm.call(view.stop)
        swarm.close()
