"""What the view answers: the page, its files, the state, the feed, transcripts, artefacts; and commands by POST.

Nothing an agent wrote is ever served as something a browser would run: JSON, or plain text as an attachment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from perilune.swarm.journal.event import JournalError
from perilune.swarm.view.controls import Approvals, Controls, plain
from perilune.swarm.view.feed import MAX_VIEWERS, Feed
from perilune.swarm.view.projection import Reader
from perilune.swarm.view.replay import Replay
from perilune.swarm.view.state import encode
from perilune.swarm.view.transcript import MAX_PAGE, page

STATIC = Path(__file__).parent / "static"
MAX_COMMAND = 1 << 16
MAX_ARTEFACT = 1 << 20
COMMAND_SECONDS = 10.0


class Refused(Exception):
    """An answer that is not 200, with the sentence the person reads."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the answers are made from."""

    feed: Feed
    replay: Replay
    reader: Reader
    approvals: Approvals
    controls: Controls | None
    swarm_loop: asyncio.AbstractEventLoop | None
    """Where commands are carried out."""


def build(parts: Parts) -> Starlette:
    def route(
        path: str, answer: Callable[[Parts, Request], Awaitable[Any]], methods: Sequence[str] = ("GET",)
    ) -> Route:
        async def endpoint(request: Request) -> Any:
            try:
                return await answer(parts, request)
            except Refused as refused:
                return _json({"error": str(refused)}, refused.status)
            except JournalError as error:
                return _json({"error": str(error)}, 404)

        return Route(path, endpoint, methods=list(methods))

    return Starlette(
        routes=[
            Route("/", _index),
            Mount("/static", StaticFiles(directory=STATIC)),
            route("/api/state", _state),
            route("/api/feed", _feed),
            route("/api/agent/{id:path}", _agent),
            route("/api/artefact/{sha256}", _artefact),
            route("/api/approval/{id:path}", _approval),
            route("/api/cancel", _cancel, ["POST"]),
            route("/api/steer", _steer, ["POST"]),
            route("/api/approve", _approve, ["POST"]),
        ]
    )


async def _index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


async def _state(parts: Parts, request: Request) -> Response:
    if "until" in request.query_params:
        state = await parts.replay.at(_number(request, "until", 0))
        return Response(encode(state.snapshot(bars=False)), media_type="application/json")
    await parts.feed.refresh()
    return Response((await parts.feed.snapshot())[1], media_type="application/json")


async def _feed(parts: Parts, request: Request) -> Any:
    if parts.feed.viewers >= MAX_VIEWERS:
        raise Refused(503, f"there are {MAX_VIEWERS} viewers already: close one")
    last = request.headers.get("last-event-id", "")
    return parts.feed.response(int(last) if last.isdecimal() and len(last) < 16 else None)


async def _agent(parts: Parts, request: Request) -> Response:
    state = parts.feed.state
    id = request.path_params["id"]
    if id not in state.by_id:
        await parts.feed.refresh()
    agent = state.by_id.get(id)
    if agent is None:
        raise Refused(404, f"there is no agent {id[:200]!r} in this run")
    start = _number(request, "start", 0)
    end = _number(request, "end", start + MAX_PAGE)
    entries = page(parts.reader.events, id, start=start, end=end, began=state.began or 0.0)
    return _json({"agent": agent.details(), "start": start, "entries": entries})


async def _artefact(parts: Parts, request: Request) -> Response:
    sha256 = request.path_params["sha256"]
    start = _number(request, "start", 0)
    end = min(_number(request, "end", start + MAX_ARTEFACT), start + MAX_ARTEFACT)
    data = parts.reader.get(sha256, start, end)
    # The reader accepted the name, so it is 64 hexadecimal digits.
    headers = {"Content-Disposition": f'attachment; filename="{sha256}.txt"'}
    return Response(data, media_type="text/plain", headers=headers)


async def _approval(parts: Parts, request: Request) -> Response:
    waiting = parts.approvals.get(request.path_params["id"])
    if waiting is None:
        raise Refused(404, "nobody waits for this approval any more")
    return _json(plain(waiting))


async def _cancel(parts: Parts, request: Request) -> Response:
    body = await _command(request, "agent")
    return await _carry_out(parts, lambda controls: controls.cancel(body["agent"]))


async def _steer(parts: Parts, request: Request) -> Response:
    body = await _command(request, "agent", "text")
    if not body["text"].strip():
        raise Refused(400, "text is empty: write what the agent should do")
    return await _carry_out(parts, lambda controls: controls.steer(body["agent"], body["text"]))


async def _approve(parts: Parts, request: Request) -> Response:
    body = await _command(request, "id", "decision", "arguments_sha256")
    if body["decision"] not in ("allow", "deny"):
        raise Refused(400, f"decision is {body['decision'][:40]!r}, expected 'allow' or 'deny'")
    waiting = parts.approvals.get(body["id"])
    if waiting is None:
        raise Refused(404, "nobody waits for this approval any more")
    if waiting.arguments_sha256 != body["arguments_sha256"]:
        raise Refused(409, "the arguments are not the ones that were shown: look at them again")
    return await _carry_out(parts, lambda controls: controls.decide(body["id"], body["decision"]))


async def _carry_out(parts: Parts, act: Callable[[Controls], Awaitable[None] | None]) -> Response:
    """Do something on the swarm's loop and wait until it is done."""
    controls, loop = parts.controls, parts.swarm_loop
    if controls is None or loop is None or loop.is_closed():
        raise Refused(409, "this run takes no commands: it is not running here")

    async def on_the_loop() -> None:
        result = act(controls)
        if result is not None:
            await result

    done = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(on_the_loop(), loop))
    try:
        await asyncio.wait_for(done, COMMAND_SECONDS)
    except TimeoutError:
        raise Refused(504, f"the swarm did not answer within {COMMAND_SECONDS:g} seconds") from None
    except Exception as error:  # the person who gave the command reads why it failed
        raise Refused(409, str(error) or type(error).__name__) from None
    return _json({"ok": True})


async def _command(request: Request, *names: str) -> dict[str, str]:
    """The body of a command: a JSON object whose named fields are texts."""
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_COMMAND:
            raise Refused(413, f"the command is longer than {MAX_COMMAND} bytes")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise Refused(400, "the command is not JSON") from None
    for name in names:
        if not isinstance(body, dict) or not isinstance(body.get(name), str):
            raise Refused(400, f"the command needs the field {name!r}, a text")
    return body


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdecimal() or len(text) > 15:
        raise Refused(400, f"{name} is {text[:40]!r}, expected a number from 0 on")
    return int(text)


def _json(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")
