"""The OpenAI-compatible HTTP application: routes, and the life of one request from its first byte to its last.

    app = build_app(engine, tokenizer, "perilune-nano", ServerConfig(keys=Keys(api=(key,))))

    POST /v1/chat/completions   POST /v1/completions       a key of the API (none needed where none was set)
    GET  /v1/models             GET  /v1/models/{id}       the same
    GET  /health                                           open to all
    GET  /metrics               POST /admin/weights        the admin key

A request: who asks (401) -> its rate (429) -> its body within size and time (413, 408) -> checked (400) -> prompt ids
and pictures, in a thread -> a place in the queue (429) -> the engine -> the answer. From the body on, a client that
leaves ends all of it at once, whether it streams or not, and the engine's slot is free with the next step.

Errors have OpenAI's shape and name the parameter. Once a stream has begun, an error is its last event.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from perilune.data.chat import ChatTemplate
from perilune.data.images import DEFAULT_PROCESSOR, ProcessorConfig
from perilune.data.tokenizer import Tokenizer
from perilune.serve.async_engine import EngineDead, Health
from perilune.serve.attachments import Fetch
from perilune.serve.exchange import ClientGone, Guard, json_response, read_body, send_events, send_json, while_connected
from perilune.serve.fields import Fields, parsed
from perilune.serve.keys import Caller, Keys
from perilune.serve.limits import Admission, Limits
from perilune.serve.metrics import CONTENT_TYPE_LATEST, Metrics, Stopwatch
from perilune.serve.prompts import Prepared, Prompts
from perilune.serve.refusals import Refusal
from perilune.serve.request import Output, QueueFull, RequestError
from perilune.serve.sequences import Sequences, Streams
from perilune.serve.sessions import SessionLimits

logger = logging.getLogger("perilune.serve")
LoadWeights = Callable[[str, int | None], Awaitable[int]]
"""(path, version) -> the version now in use; raises ValueError or OSError with the reason it failed."""
INLINE_BYTES = 16_384
"""A longer body is parsed, rendered and encoded in a thread, so that other streams go on meanwhile. So is a shorter one
with pictures."""
Result = TypeVar("Result")


class EngineLike(Streams, Protocol):
    """What the server needs of an engine."""

    def stats(self) -> object:
        """A dataclass of numbers, for /metrics."""
        ...

    def health(self) -> Health: ...


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How a server behaves. `max_length` is what the engine can hold; `host` is where it listens.

    chat: whether the model was trained to answer; a base model is served all the same, and /v1/models says so.
    thinking: whether a chat thinks when the caller does not say.
    temperature, top_p: of a caller that does not say.
    takes_pictures: whether the model has a vision tower.
    fetch: reads image URLs that are not `data:`; None refuses them.
    load_weights: what POST /admin/weights does; None refuses it.
    share_prefixes: let callers with different keys share cached prefixes (they could then probe, by time, what others
    have asked).
    template: of the chat, when the model brings its own.
    prompts: what reads bodies and makes prompts of them, where it is not the usual (rl/gateway.py).
    routes: more routes, such as a page.
    """

    keys: Keys = field(default_factory=Keys)
    limits: Limits = field(default_factory=Limits)
    host: str = "127.0.0.1"
    max_length: int | None = None
    chat: bool = True
    thinking: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    takes_pictures: bool = False
    aliases: tuple[str, ...] = ()
    share_prefixes: bool = False
    template: ChatTemplate | None = None
    prompts: Prompts | None = None
    processor: ProcessorConfig = DEFAULT_PROCESSOR
    session_limits: SessionLimits = field(default_factory=SessionLimits)
    fetch: Fetch | None = None
    load_weights: LoadWeights | None = None
    routes: Sequence[BaseRoute] = ()


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the endpoints share."""

    engine: EngineLike
    config: ServerConfig
    admission: Admission
    metrics: Metrics
    prompts: Prompts
    threads: ThreadPoolExecutor
    models: tuple[str, ...]
    active: WeakSet[Sequences] = field(default_factory=WeakSet)
    created: int = field(default_factory=lambda: int(time.time()))
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, call: Callable[[], Result], threads: ThreadPoolExecutor | None) -> Result:
        """The result of a call, in a thread where it may take long."""
        if threads is None:
            return call()
        return await asyncio.get_running_loop().run_in_executor(threads, call)

    def begin_drain(self) -> None:
        """New requests are refused; those under way go on."""
        self.admission.is_draining = True

    def end_all(self) -> None:
        """End what is still under way, with an error that says why."""
        for sequences in list(self.active):
            sequences.fail(Refusal("the server is shutting down", status=503, code="draining", retry_after=5))


def build_app(engine: EngineLike, tokenizer: Tokenizer, model_name: str, config: ServerConfig) -> Starlette:
    """The application. `app.state.parts` has what a server needs to drain it."""
    admission = Admission(config.limits)
    parts = Parts(
        engine=engine,
        config=config,
        admission=admission,
        metrics=Metrics(engine.stats, sequences=lambda: admission.sequences),
        prompts=config.prompts or Prompts(tokenizer, config, model_name),
        threads=ThreadPoolExecutor(4, thread_name_prefix="perilune-bodies"),
        models=(model_name, *config.aliases),
    )

    def plain(path: str, answer: Callable[[Parts, HTTPRequest], Awaitable[Response]], method: str = "GET") -> Route:
        async def endpoint(request: HTTPRequest) -> Response:
            status = 500
            try:
                response = await answer(parts, request)
                status = response.status_code
                return response
            except Refusal as refusal:
                status = refusal.status
                return json_response(refusal.body(), status, refusal.headers())
            finally:
                parts.metrics.requests.labels(path, status).inc()

        return Route(path, endpoint, methods=[method])

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", Generation(parts, "/v1/chat/completions"), methods=["POST"]),
            Route("/v1/completions", Generation(parts, "/v1/completions"), methods=["POST"]),
            plain("/v1/models", _models),
            plain("/v1/models/{id:path}", _model),
            plain("/health", _health),
            plain("/metrics", _metrics),
            plain("/admin/weights", _weights, "POST"),
            *config.routes,
        ],
        exception_handlers={HTTPException: _unknown, Exception: _failed},
    )
    app.add_middleware(Guard, is_open=config.keys.is_open)
    app.state.parts = parts
    return app


# Text -----------------------------------------------------------------------------------------------------------------


class Generation:
    """ASGI application of one of the two endpoints that write text."""

    def __init__(self, parts: Parts, path: str) -> None:
        self._parts = parts
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = _Sent(send)
        try:
            await self._answer(scope, receive, sent)
        except ClientGone:
            sent.status = 499
            self._parts.metrics.gone.inc()
        except Exception as error:
            refusal = self._refusal(error)
            if not sent.has_begun:
                await send_json(sent, refusal.body(), refusal.status, refusal.headers())
            elif not sent.is_complete:
                sent.status = refusal.status
                await send_events(sent, [refusal.body()], more=False)
        finally:
            self._parts.metrics.requests.labels(self._path, sent.status).inc()

    async def _answer(self, scope: Scope, receive: Receive, send: _Sent) -> None:
        parts, headers = self._parts, Headers(scope=scope)
        caller = parts.config.keys.caller(headers.getlist("authorization"))
        parts.admission.check_rate(caller)
        async with read_body(headers, receive, parts.admission) as data:
            watch = Stopwatch(parts.metrics, self._path)
            prepared = await while_connected(receive, self._prepare(data, caller))
        del data
        await while_connected(receive, self._generate(prepared, caller, watch, send))

    async def _prepare(self, data: bytes, caller: Caller) -> Prepared:
        """Everything before the engine: checks, pictures, prompt ids."""
        parts, prompts = self._parts, self._parts.prompts
        threads = None if len(data) <= INLINE_BYTES else parts.threads
        read = prompts.read_chat if self._path.startswith("/v1/chat") else prompts.read_completion
        asked = await parts.run(lambda: read(parsed(data)), threads)
        if asked.common.model is not None and asked.common.model not in parts.models:
            raise _no_model(asked.common.model, parts.models)
        contents = await prompts.fetched(asked)
        if prompts.takes_long(asked):
            threads = parts.threads
        return await parts.run(lambda: prompts.prepare(asked, contents, caller), threads)

    async def _generate(self, prepared: Prepared, caller: Caller, watch: Stopwatch, send: _Sent) -> None:
        parts, reply = self._parts, prepared.reply
        with parts.admission.room(len(prepared.requests), prepared.picture_bytes):
            try:
                async with Sequences(parts.engine, prepared.requests) as sequences:
                    parts.active.add(sequences)
                    run = self._stream if reply.asked.stream else self._whole
                    await run(sequences, prepared, watch, send)
            except RequestError as error:
                raise self._refused(error, prepared) from None
            finally:
                usage = reply.usage()
                longest = max(len(choice.token_ids) for choice in reply.choices)
                watch.end(prompt=usage.prompt, cached=usage.cached, completion=usage.completion, longest=longest)
                parts.admission.charge(caller, usage.prompt + usage.completion)

    async def _whole(self, sequences: Sequences, prepared: Prepared, watch: Stopwatch, send: _Sent) -> None:
        limits = self._parts.config.limits
        end = time.monotonic() + limits.request_seconds
        while (batch := await sequences.next(seconds=limits.heartbeat_seconds)) is not None:
            for index, output in batch:
                watch.token()
                prepared.reply.add(index, _good(output))
            _check_time(end, limits)
        prepared.finish()
        await send_json(send, prepared.reply.whole(), 200, prepared.headers)

    async def _stream(self, sequences: Sequences, prepared: Prepared, watch: Stopwatch, send: _Sent) -> None:
        limits, reply = self._parts.config.limits, prepared.reply
        end = time.monotonic() + limits.request_seconds
        # What is refused by the engine is refused with a status: the stream begins with the first output, or when
        # there was none for a while.
        batch = await sequences.next(seconds=limits.heartbeat_seconds)
        chunks = reply.begin()
        while batch is not None:
            for index, output in batch:
                watch.token()
                chunks += reply.add(index, _good(output))
            await send_events(send, chunks, headers=prepared.headers)
            _check_time(end, limits)
            batch = await sequences.next(seconds=limits.heartbeat_seconds)
            chunks = []
        prepared.finish()
        await send_events(send, [*reply.end(), None], headers=prepared.headers, more=False)

    def _refused(self, error: RequestError, prepared: Prepared) -> Refusal:
        """What the engine will never run, by the name the caller knows it by."""
        names = {"prompt": "messages" if self._path.startswith("/v1/chat") else "prompt", "media": "messages"}
        if error.field == "grammar":
            param = prepared.format_path
            return Refusal(f"{param} cannot be used: {error}", param=param, code="invalid_schema")
        return Refusal(str(error), param=names.get(error.field, error.field), code="invalid_value")

    def _refusal(self, error: Exception) -> Refusal:
        if isinstance(error, Refusal):
            return error
        if isinstance(error, QueueFull):
            return self._parts.admission.full()
        if isinstance(error, EngineDead):
            return Refusal("the engine has stopped; the server's log says why", status=503, code="engine_dead")
        logger.exception("%s failed", self._path, exc_info=error)
        return Refusal("the server failed; its log says why", status=500, code="internal_error")


class _Sent:
    """`send` that remembers how far an answer has come."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 500
        self.has_begun = False
        self.is_complete = False

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
        elif not message.get("more_body"):
            self.is_complete = True
        await self._send(message)


def _good(output: Output) -> Output:
    """The output, unless it says that the engine gave up."""
    if output.finish_reason == "error":
        logger.error("the engine failed request %s: %s", output.request_id, output.error)
        raise Refusal("the engine failed on this request; the server's log says why", status=500, code="engine_error")
    if output.finish_reason == "cancelled":
        raise Refusal("the request was cancelled by the server", status=503, code="cancelled", retry_after=5)
    return output


def _check_time(end: float, limits: Limits) -> None:
    if time.monotonic() > end:
        raise Refusal(f"the request took longer than {limits.request_seconds:g} s", status=504, code="timeout")


# Everything else ------------------------------------------------------------------------------------------------------


def _no_model(name: str, models: Sequence[str]) -> Refusal:
    served = ", ".join(models)
    return Refusal(
        f"there is no model {name[:200]!r} here; this server has {served}",
        status=404,
        param="model",
        code="model_not_found",
    )


def _model_card(parts: Parts, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": parts.created,
        "owned_by": "perilune",
        "max_model_len": parts.prompts.max_length,
        "chat": parts.config.chat,
        "image_input": parts.config.takes_pictures,
    }


async def _models(parts: Parts, request: HTTPRequest) -> Response:
    parts.config.keys.caller(request.headers.getlist("authorization"))
    return json_response({"object": "list", "data": [_model_card(parts, name) for name in parts.models]})


async def _model(parts: Parts, request: HTTPRequest) -> Response:
    parts.config.keys.caller(request.headers.getlist("authorization"))
    name = request.path_params["id"]
    if name not in parts.models:
        raise _no_model(name, parts.models)
    return json_response(_model_card(parts, name))


async def _health(parts: Parts, request: HTTPRequest) -> Response:
    if parts.admission.is_draining:
        return json_response({"status": "draining"}, 503, {"Retry-After": "5"})
    if not parts.engine.health().alive:
        return json_response({"status": "failed"}, 503)
    return json_response({"status": "ok"})


async def _metrics(parts: Parts, request: HTTPRequest) -> Response:
    parts.config.keys.admin_caller(request.headers.getlist("authorization"))
    return Response(parts.metrics.text(), media_type=CONTENT_TYPE_LATEST)


async def _weights(parts: Parts, request: HTTPRequest) -> Response:
    """{"path": "runs/r/step_200", "version": 3} -> {"weight_version": 3}. Requests under way go on with them."""
    parts.config.keys.admin_caller(request.headers.getlist("authorization"))
    if parts.config.load_weights is None:
        raise Refusal("this server was started without a place to load weights from", status=403)
    async with read_body(request.headers, request.receive, parts.admission) as data:
        body = Fields(parsed(data), "")
    path = body.text("path", longest=4096, empty=False)
    if path is None:
        body.fail("path", "the folder or file of the weights")
    version = body.integer("version", low=0, high=1 << 53)
    if parts.loading.locked():
        raise Refusal("other weights are being loaded", status=409, code="loading")
    async with parts.loading:
        if version is not None and version == getattr(parts.engine.stats(), "weight_version", None):
            raise Refusal(
                f"version is {version}, and the weights in use have it: give another, or none for the next one. "
                "Answers with the same version come from the same weights",
                status=409,
                param="version",
                code="version_in_use",
            )
        try:
            loaded = await parts.config.load_weights(path, version)
        except (ValueError, OSError, KeyError) as error:
            raise Refusal(f"the weights could not be loaded: {error}", param="path", code="invalid_weights") from None
    return json_response({"weight_version": loaded})


async def _unknown(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    text = {404: f"there is no {request.url.path[:200]}", 405: f"{request.url.path[:200]} takes no {request.method}"}
    refusal = Refusal(text.get(status, error.detail), status=status)
    return json_response(refusal.body(), status, dict(error.headers or {}))


async def _failed(request: HTTPRequest, error: Exception) -> Response:
    refusal = Refusal("the server failed; its log says why", status=500, code="internal_error")
    return json_response(refusal.body(), 500)


__all__ = ["EngineLike", "LoadWeights", "Parts", "ServerConfig", "build_app"]
