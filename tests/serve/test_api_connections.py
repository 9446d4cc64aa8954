"""Clients that leave, read slowly, send slowly or say nothing; and a server that is told to stop. Over real sockets."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from perilune.serve import server as server_module
from perilune.serve.limits import Limits
from perilune.serve.refusals import Refusal
from perilune.serve.request import Request, SamplingParams
from perilune.serve.sequences import MOST_WAITING, Sequences
from perilune.serve.server import Server, ServerConfig
from tests.serve.api_engine import MODEL, ScriptedEngine, app_of, call, chat, endless, tokenizer

PATH = "/v1/chat/completions"
ROOT = Path(__file__).parents[2]
PATIENCE = 30.0


@contextmanager
def served(engine: ScriptedEngine, **limits: Any) -> Iterator[tuple[str, int]]:
    config = ServerConfig(limits=Limits(**{"drain_seconds": 1.0} | limits))
    with Server(engine, tokenizer(), MODEL, config) as url:
        host, port = url.removeprefix("http://").split(":")
        yield host, int(port)


def request(body: Any, *, length: int | None = None) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(content)}\r\n\r\n".encode() + content


def until(true: Any) -> None:
    """Waits for a condition, with a limit that only a broken server reaches."""
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def answers(place: tuple[str, int]) -> bool:
    """Whether the next request is served."""
    with socket.create_connection(place, timeout=PATIENCE) as client:
        client.sendall(request(chat(max_tokens=2)))
        return client.recv(65536).startswith(b"HTTP/1.1 200")


def rest(client: socket.socket) -> bytes:
    """What a client still gets until its connection ends, in whatever way."""
    received = b""
    try:
        while piece := client.recv(65536):
            received += piece
    except ConnectionError:
        pass
    return received


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_sequences(stream):
    engine = ScriptedEngine(endless, pace=0.005)
    with served(engine) as place:
        client = socket.create_connection(place, timeout=PATIENCE)
        client.sendall(request(chat(stream=stream, n=3)))
        until(lambda: len(engine.running) == 3)
        client.close()
        until(lambda: not engine.running)
        assert len(engine.cancelled) == 3 and answers(place)


def test_a_client_that_leaves_before_the_engine_begins_is_noticed():
    engine = ScriptedEngine(endless, pace=0.005)
    app = app_of(engine)
    answer = asyncio.run(call(app, PATH, chat(), leave_after=0))
    assert answer.status == 0 and not engine.running
    assert app.state.parts.admission.sequences == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_let_go(stream):
    engine = ScriptedEngine(endless)
    server = Server(engine, tokenizer(), MODEL, ServerConfig(limits=Limits(drain_seconds=1.0, write_seconds=0.5)))
    with server as url:
        host, port = url.removeprefix("http://").split(":")
        place = host, int(port)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(place)
        # Some megabytes: more than the system keeps for a client, and few enough outputs to wait for it for ever.
        asked = chat(stream=stream, logprobs=True, top_logprobs=20, max_tokens=3000)
        client.sendall(request(asked))
        until(lambda: len(engine.seen) == 1)
        until(lambda: not server.connections())
        until(lambda: server.app.state.parts.admission.sequences == 0 and not engine.running)
        client.settimeout(PATIENCE)
        received = rest(client)
        assert b"[DONE]" not in received and not received.endswith(b"}"), "aborted: what it did not read is not kept"
        assert answers(place)
        client.close()


def test_a_slow_reader_does_not_slow_the_engine_and_is_given_up_when_too_far_behind():
    engine = ScriptedEngine(endless)
    params = SamplingParams(max_tokens=2 * MOST_WAITING)
    asked = Request(request_id="long", prompt=(1,), params=params)

    async def play() -> None:
        async with Sequences(engine, [asked]) as sequences:
            assert await sequences.next(seconds=PATIENCE)
            while engine.running:  # nobody reads
                await asyncio.sleep(0)
            with pytest.raises(Refusal, match="too slowly"):
                await sequences.next(seconds=PATIENCE)

    asyncio.run(play())
    assert engine.cancelled


def test_a_body_that_never_ends_is_answered_with_408():
    with served(ScriptedEngine(), body_seconds=0.3) as place:
        with socket.create_connection(place, timeout=PATIENCE) as client:
            client.sendall(request(chat(), length=5000))
            assert client.recv(65536).startswith(b"HTTP/1.1 408")
        assert answers(place)


def test_a_body_that_is_too_large_is_refused_before_it_is_read():
    with served(ScriptedEngine(), body_bytes=1000) as place:
        with socket.create_connection(place, timeout=PATIENCE) as client:
            client.sendall(request(chat(), length=10**12))
            assert client.recv(65536).startswith(b"HTTP/1.1 413")
        assert answers(place)


def test_more_connections_than_allowed_end_the_oldest_idle_one():
    with served(ScriptedEngine(), connections=8) as place:
        clients = [socket.create_connection(place, timeout=PATIENCE) for _ in range(20)]
        assert rest(clients[0]) == b"", "ended without an answer"
        assert answers(place)
        for client in clients:
            client.close()


def test_bytes_that_are_not_http_do_no_harm():
    with served(ScriptedEngine()) as place:
        for junk in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"POST / HTTP/9\r\n\r\n", b"\x00" * 70_000):
            with socket.create_connection(place, timeout=PATIENCE) as client:
                client.sendall(junk)
        assert answers(place)


def test_a_stopped_server_has_drained_and_closed_its_engine():
    engine = ScriptedEngine()
    server = Server(engine, tokenizer(), MODEL, ServerConfig(limits=Limits(drain_seconds=1.0)))
    with server as url:
        assert url.startswith("http://127.0.0.1:") and not server.app.state.parts.admission.is_draining
    assert server.app.state.parts.admission.is_draining and engine.is_closed
    with pytest.raises(ValueError, match="API key"):
        Server(engine, tokenizer(), MODEL, ServerConfig(host="0.0.0.0"))


# The end --------------------------------------------------------------------------------------------------------------


def start(drain_seconds: float) -> tuple[subprocess.Popen[str], tuple[str, int]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.api_process", str(drain_seconds)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    host, port = process.stdout.readline().strip().removeprefix("http://").split(":")
    return process, (host, int(port))


def test_sigterm_lets_what_is_under_way_finish_and_takes_nothing_new():
    process, place = start(drain_seconds=PATIENCE)
    with socket.create_connection(place, timeout=PATIENCE) as client:
        client.sendall(request(chat(stream=True, max_tokens=200)))
        received = client.recv(65536)
        process.send_signal(signal.SIGTERM)

        def is_refused() -> bool:
            try:
                socket.create_connection(place, timeout=PATIENCE).close()
            except OSError:
                return True
            return False

        until(is_refused)
        received += rest(client)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") and b'"finish_reason":"length"' in received
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and out.split() == ["closed", "0"]


@pytest.mark.parametrize("stream", [True, False])
def test_what_takes_longer_than_the_drain_ends_with_an_error(stream):
    process, place = start(drain_seconds=0.3)
    with socket.create_connection(place, timeout=PATIENCE) as client:
        client.sendall(request(chat(stream=stream)))
        received = client.recv(65536) if stream else b""
        time.sleep(0.3)  # the request is under way, however slow the machine is: if not, it is refused as draining too
        process.send_signal(signal.SIGTERM)
        received += rest(client)
    assert b'"code":"draining"' in received and b"[DONE]" not in received
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0 and out.split()[0] == "closed"


def test_a_connection_without_a_request_is_ended(monkeypatch):
    monkeypatch.setattr(server_module, "SILENT_SECONDS", 0.4)
    with served(ScriptedEngine(), body_seconds=0.4) as place:
        with socket.create_connection(place, timeout=PATIENCE) as client:
            client.sendall(b"POST /v1/chat")  # and never more
            assert rest(client) == b""
        with socket.create_connection(place, timeout=PATIENCE) as client:
            client.sendall(request(chat(max_tokens=2)))
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            rest(client)
        assert answers(place)
