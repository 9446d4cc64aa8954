"""A server that speaks the OpenAI wire format from a script, to try the page and the terminal against what goes wrong.

Each request takes the next `Script`: deltas to stream, or an answer that is not 200, or a stream that breaks.
"""

import asyncio
import json
import logging
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from perilune.serve.web import web_routes

SECONDS = 90.0
"""Longest wait for anything."""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One answer."""

    deltas: tuple[dict[str, Any], ...] = ()
    finish: str = "stop"
    ending: str = "whole"
    """whole; hang: nothing comes after the deltas; cut: the connection breaks; unfinished: it ends without [DONE];
    error: an error inside the stream; garbage: an event that is not JSON."""
    status: int = 200
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)


def text(*pieces: str, **options: Any) -> Script:
    return Script(deltas=tuple({"content": piece} for piece in pieces), **options)


@dataclass
class ScriptedChat:
    models: tuple[str, ...] = ("moon-1",)
    card: dict[str, Any] = field(default_factory=dict)
    """What else is said of each model."""
    key: str | None = None
    scripts: deque[Script] = field(default_factory=deque)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    abandoned: int = 0
    """Streams whose client left."""

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                *web_routes(),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/completions", self._chat, methods=["POST"]),
            ]
        )

    def _locked(self, request: Request) -> Response | None:
        if self.key is None or request.headers.get("authorization") == f"Bearer {self.key}":
            return None
        return _refusal(401, "the API key is wrong")

    async def _models(self, request: Request) -> Response:
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "perilune", **self.card} for name in self.models
        ]
        return self._locked(request) or JSONResponse({"object": "list", "data": listed})

    async def _chat(self, request: Request) -> Response:
        if refused := self._locked(request):
            return refused
        body = await request.json()
        self.bodies.append({"path": request.url.path, **body})
        script = self.scripts.popleft() if self.scripts else text("Yes.")
        if script.status != 200:
            return _refusal(script.status, script.message, script.headers)
        is_chat = request.url.path.endswith("chat/completions")
        if not body.get("stream"):
            words = "".join(delta.get("content", "") for delta in script.deltas)
            message = {"message": {"role": "assistant", "content": words}} if is_chat else {"text": words}
            usage = {"prompt_tokens": 1, "completion_tokens": len(script.deltas)}
            return JSONResponse({"choices": [{"index": 0, "finish_reason": script.finish, **message}], "usage": usage})
        return StreamingResponse(self._events(script, is_chat), media_type="text/event-stream")

    async def _events(self, script: Script, is_chat: bool) -> AsyncIterator[bytes]:
        try:
            for delta in script.deltas:
                part = {"delta": delta} if is_chat else {"text": delta.get("content", "")}
                yield _event(choices=[{"index": 0, "finish_reason": None, **part}])
                await asyncio.sleep(0.005)
            if script.ending == "hang":
                while True:
                    yield b": still here\n\n"
                    await asyncio.sleep(0.05)
            if script.ending == "cut":
                await asyncio.sleep(0.2)  # what was sent just before may be lost with the connection
                raise ConnectionResetError("as the script says")
            if script.ending == "unfinished":
                return
            if script.ending == "garbage":
                yield b'data: {"choices": [{\n\n'
                return
            if script.ending == "error":
                yield _event(error={"message": "the engine died", "code": 500})
                return
            end = {"delta": {}} if is_chat else {"text": ""}
            yield _event(choices=[{"index": 0, "finish_reason": script.finish, **end}])
            yield _event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": len(script.deltas)})
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.abandoned += 1
            raise


def _event(**content: Any) -> bytes:
    return b"data: " + json.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk", **content}).encode() + b"\n\n"


def _refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": {"message": message, "type": "scripted"}}, status_code=status, headers=headers)


@contextmanager
def serving(app: Any, *, port: int = 0) -> Iterator[str]:
    """An ASGI app on a free port of this machine, or on one that it had before; gives its address."""
    listener = socket.create_server(("127.0.0.1", port))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="auto", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    logging.getLogger("uvicorn.error").disabled = True  # a stream that breaks on purpose is no news
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join(SECONDS)
