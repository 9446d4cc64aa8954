"""The gateway: an OpenAI-compatible address of the policy for programs that know nothing of training.

    async with Gateway(engine, tokenizer) as gateway:
        async with gateway.episode(name="sums/7/0", seed=3, config=TalkConfig()) as opened:
            ...                                      an agent runs, with opened.access.base_url and .api_key
        opened.episode.branches(), .messages()       what it asked and what was sampled, with the engine's log-probs

It is the server of serve/ on 127.0.0.1, at a port of its own, in the process and on the event loop of the rollout; it
starts when the first episode asks for it. Every episode has its own key, and a request belongs to the episode whose key
it carries. Agents use /v1/chat/completions, streaming or not, with tools and pictures, under any model name.

What differs from an ordinary server, because what is sampled here is trained on:

    ignored    temperature, top_p, top_k, min_p, penalties, seed: replies are drawn from the policy itself, at the
               temperature of the run (1 in training, 0 in evaluation), with seeds that follow from the run's. The
               header X-Perilune-Ignored names those that were sent.
    refused    what would keep tokens from being sampled, since the log-probs would not be those of the choice made:
               response_format, structured_outputs, logit_bias, min_tokens, ignore_eos, tool_choice other than "auto".
               Also /v1/completions: conversations are what is recorded.
    shortened  max_tokens, to what the episode and the context have left.
    session    every request, whether or not the agent knows of sessions: a prompt begins with the ids that were served.

An engine whose queue is full makes an agent wait instead of refusing it.
"""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from perilune.data.images import DEFAULT_PROCESSOR, ProcessorConfig
from perilune.data.tokenizer import Tokenizer
from perilune.rl.environment import Access
from perilune.rl.gateway_episode import Call, Episode, Line, Sampled, over
from perilune.rl.talk import TalkConfig, TalkError
from perilune.serve.api import EngineLike, ServerConfig, build_app
from perilune.serve.async_engine import EngineDead, Health
from perilune.serve.bodies import ChatBody, CompletionBody
from perilune.serve.keys import Caller, Keys
from perilune.serve.limits import Limits
from perilune.serve.prompts import Prepared, Prompts
from perilune.serve.refusals import Refusal
from perilune.serve.replies import ChatReply
from perilune.serve.request import Output, QueueFull, Request
from perilune.serve.server import serving
from perilune.serve.sessions import SessionLimits

MODEL = "policy"
CANDIDATES = 8
"""Lines that are tried exactly before a request counts as one that begins its own."""
QUEUE_SECONDS = 0.05
LIMITS = Limits(
    concurrent=1 << 20, connections=1 << 16, bodies_bytes=4 << 30, picture_bytes=16 << 30, drain_seconds=0.5
)  # fmt: skip
"""Generous: agents of one run are not strangers, and their budgets bound them."""
SESSIONS = SessionLimits(max_sessions=1 << 20, max_bytes=8 << 30, max_idle_seconds=7 * 24 * 3600.0)
IGNORED = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "priority",
)  # fmt: skip
WHY_NOT = "it keeps tokens from being sampled, so the log-probs of a reply would not be those it is trained with"


class PolicyEngine(EngineLike, Protocol):
    """What is needed of an engine (serve/async_engine.py)."""

    @property
    def max_length(self) -> int | None: ...


class Gateway:
    def __init__(
        self,
        engine: PolicyEngine,
        tokenizer: Tokenizer,
        *,
        thinking: bool = False,
        processor: ProcessorConfig = DEFAULT_PROCESSOR,
    ) -> None:
        """`thinking`: whether the policy thinks where an agent does not say. `processor`: budgets of pictures."""
        self._book = _Book()
        self._engine = _Recorded(engine, self._book)
        config = ServerConfig(
            keys=self._book.keys, limits=LIMITS, session_limits=SESSIONS, max_length=engine.max_length,
            thinking=thinking, processor=processor, takes_pictures=True, share_prefixes=True,
        )  # fmt: skip
        self._prompts = _AgentPrompts(tokenizer, config, self._book)
        self._config = replace(config, prompts=self._prompts)
        self._tokenizer = tokenizer
        self._starting = asyncio.Lock()
        self._serving = contextlib.AsyncExitStack()
        self._url: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._url = None
        await self._serving.aclose()

    @contextlib.asynccontextmanager
    async def episode(self, *, name: str, seed: int, config: TalkConfig) -> AsyncIterator["OpenEpisode"]:
        """An episode whose key is good while the block lasts; when it has ended, nothing is added any more."""
        url = await self._start()
        episode = Episode(name=name, seed=seed, config=config)
        key = secrets.token_urlsafe(24)
        self._book.open(key, episode)
        try:
            yield OpenEpisode(access=Access(base_url=f"{url}/v1", api_key=key), episode=episode)
        finally:
            try:
                await self._book.close(key, episode)
            finally:
                for line in episode.lines:
                    self._prompts.forget(owner=episode.name, session_id=line.session_id)
        if episode.failure is not None:
            raise episode.failure

    async def _start(self) -> str:
        async with self._starting:
            if self._url is None:
                app = build_app(self._engine, self._tokenizer, MODEL, self._config)
                self._url = await self._serving.enter_async_context(serving(app, self._config))
            return self._url


@dataclass(frozen=True, kw_only=True)
class OpenEpisode:
    access: Access
    episode: Episode


# --- who asks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _EpisodeKeys(Keys):
    """The keys of the episodes under way."""

    callers: dict[bytes, Caller] = field(default_factory=dict, repr=False)

    @property
    def is_open(self) -> bool:
        return False

    def _match(self, presented: str) -> Caller | None:
        return self.callers.get(_digest(presented))


class _Book:
    """Episodes by name, and the replies that the engine is about to be asked for."""

    def __init__(self) -> None:
        self.keys = _EpisodeKeys()
        self.episodes: dict[str, Episode] = {}
        self.waiting: dict[str, tuple[Episode, Sampled]] = {}
        """By the id of the engine's request."""

    def open(self, key: str, episode: Episode) -> None:
        if episode.name in self.episodes:
            raise ValueError(f"the episode {episode.name!r} is already played")
        self.episodes[episode.name] = episode
        self.keys.callers[_digest(key)] = Caller(name=episode.name)

    async def close(self, key: str, episode: Episode) -> None:
        """No further request is taken, and those under way end."""
        del self.keys.callers[_digest(key)]
        del self.episodes[episode.name]  # before anything is waited for: whoever waits may be cancelled
        try:
            await episode.close()
        finally:
            for name in [name for name, (owner, _) in self.waiting.items() if owner is episode]:
                del self.waiting[name]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


# --- what is asked ----------------------------------------------------------------------------------------------------


class _AgentPrompts(Prompts):
    """Prompts of agents: in lines, within budgets, sampled as training needs it."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig, book: _Book) -> None:
        super().__init__(tokenizer, config, MODEL)
        self._book = book

    def forget(self, *, owner: str, session_id: str) -> None:
        self._sessions.forget(owner=owner, session_id=session_id)

    def read_chat(self, value: dict[str, Any]) -> ChatBody:
        body = super().read_chat(value)
        _refuse_masks(body)
        common = body.common
        neutral = replace(
            common.sampling, top_p=None, top_k=None, min_p=None, presence_penalty=0.0, frequency_penalty=0.0,
            repetition_penalty=1.0, seed=None,
        )  # fmt: skip
        ignored = [name for name in IGNORED if value.get(name) is not None]
        # Whatever an agent calls the model, it is the policy.
        common = replace(common, model=None, priority=0, sampling=neutral, ignored=(*common.ignored, *ignored))
        return replace(body, common=common)

    def read_completion(self, value: dict[str, Any]) -> CompletionBody:
        raise Refusal("conversations are recorded here: use /v1/chat/completions", code="unsupported_endpoint")

    def prepare(self, body: ChatBody | CompletionBody, contents: dict[str, bytes], caller: Caller) -> Prepared:
        assert isinstance(body, ChatBody)
        episode = self._book.episodes.get(caller.name)
        if episode is None:
            raise over()
        left = episode.check_budget(body.common.n)
        asked = body.common.sampling.max_tokens
        sampling = replace(body.common.sampling, max_tokens=None, temperature=episode.config.temperature)
        body = replace(body, common=replace(body.common, sampling=sampling))
        prepared, line = self._in_line(episode, body, contents, caller)
        most = left if asked is None else min(left, asked)
        replies = tuple(Sampled(request=_own(request, episode, most)) for request in prepared.requests)
        assert isinstance(prepared.reply, ChatReply)
        episode.begin(Call(line=line, messages=body.messages, replies=replies, reply=prepared.reply))
        self._book.waiting |= {sampled.request.request_id: (episode, sampled) for sampled in replies}

        def finish() -> None:
            prepared.finish()
            line.messages = body.messages

        return replace(prepared, requests=[sampled.request for sampled in replies], finish=finish)

    def _in_line(
        self, episode: Episode, body: ChatBody, contents: dict[str, bytes], caller: Caller
    ) -> tuple[Prepared, Line]:
        """The prompt, and the line it belongs to."""
        for line in episode.candidates(body.messages)[:CANDIDATES]:
            prepared = super().prepare(replace(body, session_id=line.session_id), contents, caller)
            if prepared.headers.get("X-Perilune-Session") == "continued":
                return prepared, line
        with episode.lock:
            line = Line(session_id=f"{episode.name}#{len(episode.lines)}")
            episode.lines.append(line)
        return super().prepare(replace(body, session_id=line.session_id), contents, caller), line


def _own(request: Request, episode: Episode, most: int) -> Request:
    """The request as an episode needs it: its log-probs, its seed, within its budget."""
    params = request.params
    params = replace(
        params,
        max_tokens=min(params.max_tokens, most),
        logprobs=params.logprobs or 0,
        seed=episode.seed(request.prompt),
        routes=0 if episode.config.record_routes else None,
    )
    return replace(request, params=params)


def _refuse_masks(body: ChatBody) -> None:
    sampling, constraint = body.common.sampling, body.common.constraint
    given: Mapping[str, object] = {
        "response_format" if constraint is None else constraint.path.partition(".")[0]: constraint,
        "logit_bias": sampling.logit_bias,
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "tool_choice": body.tools and body.tool_choice.mode != "auto",
    }
    for name, value in given.items():
        if value:
            hint = "leave it out, and ask for it in words"
            raise Refusal(
                f"{name} is not taken in training: {WHY_NOT}; {hint}", param=name, code="unsupported_parameter"
            )


# --- what is answered -------------------------------------------------------------------------------------------------


class _Recorded:
    """The engine, with everything it samples for an agent written down."""

    def __init__(self, engine: PolicyEngine, book: _Book) -> None:
        self._engine, self._book = engine, book

    def stats(self) -> object:
        return self._engine.stats()

    def health(self) -> Health:
        return self._engine.health()

    async def stream(self, request: Request) -> AsyncGenerator[Output, None]:
        episode, sampled = self._book.waiting.pop(request.request_id, (None, None))
        if episode is None or sampled is None:
            raise over()
        with episode.running():
            try:
                async with contextlib.aclosing(self._queued(request)) as outputs:
                    async for output in outputs:
                        sampled.add(output)
                        if output.error is not None:
                            episode.failure = TalkError(f"{episode.name}: the engine failed: {output.error}")
                        if episode.count(len(output.token_ids)) and not output.finished:
                            output, sampled.finish = replace(output, finish_reason="length"), "length"
                        yield output
                        if output.finished:
                            return
            except EngineDead as error:
                episode.failure = error
                raise

    async def _queued(self, request: Request) -> AsyncGenerator[Output, None]:
        """The engine's outputs, waiting for a place in its queue first."""
        while True:
            try:
                async with contextlib.aclosing(self._engine.stream(request)) as outputs:
                    async for output in outputs:
                        yield output
                return
            except QueueFull:
                await asyncio.sleep(QUEUE_SECONDS)
