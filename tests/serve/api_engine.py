"""An engine that says what a test tells it to, and a caller that speaks ASGI without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from starlette.applications import Starlette

from perilune.data.tokenizer import Tokenizer
from perilune.serve.api import ServerConfig, build_app
from perilune.serve.async_engine import Health
from perilune.serve.grammar import GrammarCompiler
from perilune.serve.request import Output, QueueFull, Request, TokenLogprob
from perilune.serve.text_stream import TextStream

MODEL = "perilune-test"
Script = Callable[[Request], Sequence[int]]


@cache
def tokenizer() -> Tokenizer:
    """Without torch, so that a server process starts at once."""
    texts = (
        "The moon turns around the earth.\n",
        '{"name": "search", "arguments": {"query": "how far"}}\n',
        "über 🌒\n",
    )
    return Tokenizer.train(texts, 300)


@cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


def ids(*parts: str, known: Tokenizer | None = None) -> list[int]:
    """Token ids of texts; a part that is the name of a special token becomes that token."""
    known = known or tokenizer()
    found: list[int] = []
    for part in parts:
        found += [known.special_ids[part]] if part in known.special_ids else known.encode(part)
    return found


def says(*parts: str) -> Script:
    """Answers every request with these parts."""
    return lambda request: ids(*parts)


def endless(request: Request) -> Sequence[int]:
    return ids("moon ") * 20_000


@dataclass(frozen=True, kw_only=True)
class Stats:
    queue: int = 0
    running: int = 0
    weight_version: int = 0


@dataclass
class ScriptedEngine:
    """Runs `script` one token an event. `pace` is the pause after each; `version_of` stamps the n-th with a version."""

    script: Script = lambda request: ids("The moon.", "</think>", "Hello, world!", "<|im_end|>")
    pace: float = 0.0
    capacity: int = 10_000
    version_of: Callable[[int], int] = lambda number: 0
    failure: Exception | None = None
    gives_up: str | None = None
    """The finish_reason (error or cancelled) with which the third event ends every request."""
    seen: list[Request] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    cancelled: list[str] = field(default_factory=list)
    is_closed: bool = False
    is_dead: bool = False
    weight_version: int = 0

    def stats(self) -> Stats:
        return Stats(running=len(self.running), weight_version=self.weight_version)

    def health(self) -> Health:
        return Health(alive=not self.is_dead)

    async def close(self, drain_seconds: float) -> None:
        self.is_closed = True

    async def stream(self, request: Request) -> AsyncGenerator[Output, None]:
        await asyncio.sleep(0)
        if self.failure is not None:
            raise self.failure
        if request.params.grammar is not None:
            await asyncio.to_thread(grammars().compile, request.params.grammar)
        if len(self.running) >= self.capacity:
            raise QueueFull("full")
        self.seen.append(request)
        self.running.add(request.request_id)
        is_whole = False
        try:
            for output in self._outputs(request):
                is_whole = output.finished
                self.running.discard(request.request_id) if is_whole else None
                yield output
                await asyncio.sleep(self.pace)
        finally:
            self.running.discard(request.request_id)
            if not is_whole:
                self.cancelled.append(request.request_id)

    def _outputs(self, request: Request):
        params = request.params
        text = TextStream(tokenizer(), params.stop, params.include_stop)
        prompt_logprobs = None
        if params.prompt_logprobs is not None:
            rows = [_logprob(token_id, params.prompt_logprobs) for token_id in request.prompt[1:]]
            prompt_logprobs = (None, *rows)
        common: dict[str, Any] = {"request_id": request.request_id, "seed": params.seed or 0, "num_cached": 1}
        tokens = list(self.script(request))
        if not params.max_tokens:
            yield Output(**common, prompt_logprobs=prompt_logprobs, finish_reason="length")
            return
        for number, token_id in enumerate(tokens):
            if self.gives_up and number == 2:
                yield Output(**common, finish_reason=self.gives_up, error="secret detail")
                return
            is_stop = token_id in params.stop_ids
            pieces = [] if is_stop else text.push(token_id)
            reason = None
            if is_stop or text.matched is not None:
                reason = "stop"
            elif number + 1 == params.max_tokens or number + 1 == len(tokens):
                reason = "length"
            if reason is not None:
                pieces += text.finish()
            yield Output(
                **common,
                token_ids=(token_id,),
                pieces=tuple(pieces),
                logprobs=() if params.logprobs is None else (_logprob(token_id, params.logprobs),),
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                stop_match=token_id if is_stop else text.matched,
                weight_version=self.version_of(number),
            )
            prompt_logprobs = None
            if reason is not None:
                return


def _logprob(token_id: int, top: int) -> TokenLogprob:
    """Made up, and different for every token; others are always more likely than the chosen one."""
    rows = tuple(((token_id + 1 + n) % 256, (1 - token_id) / 1000 - n / 10_000) for n in range(top))
    return TokenLogprob(token_id=token_id, logprob=-token_id / 1000, top=rows)


def app_of(engine: ScriptedEngine | None = None, **config: Any) -> Starlette:
    return build_app(engine or ScriptedEngine(), tokenizer(), MODEL, ServerConfig(**config))


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Mapping[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The JSON of every event; the last must be [DONE] or an error."""
        rows = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line.startswith("data: ")]
        if rows[-1] == "[DONE]":
            rows.pop()
        else:
            assert "error" in json.loads(rows[-1]), rows[-1]
        return [json.loads(row) for row in rows]


async def call(
    app: Any,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    leave_after: int | None = None,
) -> Answer:
    """One exchange. `body` is bytes or becomes JSON; after `leave_after` bytes of the answer the client is gone."""
    content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"host": "127.0.0.1:1", "content-type": "application/json"} | dict(headers or {})
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method or ("GET" if body is None else "POST"),
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": ("127.0.0.1", 2),
        "server": ("127.0.0.1", 1),
    }
    gone = asyncio.Event()
    waiting = [{"type": "http.request", "body": content, "more_body": False}]
    start: dict[str, Any] = {}
    received: list[bytes] = []

    async def receive() -> Any:
        if waiting:
            return waiting.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            return
        received.append(message.get("body", b""))
        if not message.get("more_body") or (leave_after is not None and sum(map(len, received)) >= leave_after):
            gone.set()

    if leave_after == 0:
        gone.set()
    await app(scope, receive, send)
    pairs = {name.decode(): value.decode("latin-1") for name, value in start.get("headers", ())}
    return Answer(status=start.get("status", 0), headers=pairs, body=b"".join(received))


def ask(app: Any, path: str, body: Any = None, **options: Any) -> Answer:
    return asyncio.run(call(app, path, body, **options))


def chat(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
