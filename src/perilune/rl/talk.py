"""A conversation with the policy, in an engine of this process: token in, token out.

    talk = EngineTalk(engine, sessions, tokenizer, TalkConfig(), name="drawing/7/0", seed=3)
    talk.add({"role": "user", "content": "2 + 2 = ?"})
    message = await talk.ask()
    talk.recording.branches        what was served: ids, log-probs, versions of the weights

Each prompt is the previous prompt and completion, as ids, and only the new messages rendered (serve/sessions.py). Log-
probs are the engine's, at temperature 1: training samples there.

An episode that has used up its share of an iteration is parked: `ask` raises EpisodeParked, and `turns` hold everything
the policy said so far, the last perhaps unfinished. A talk that is given these turns answers with them again, without
the engine, and samples on where they end. So an episode can be continued in a later iteration, by other weights, or
after a restart. An environment has to be a function of its task and of what the policy says; one that is not is found
out here, since its next prompt differs from the one that was served.

    worker = talk.aside("main/reader-1.0")      another conversation of the same episode, with the workers' weights

Frozen workers sample from their own engine, and nothing they say is recorded for training. Trained jointly they sample
from the policy, and their branches follow those of the policy. A parked episode keeps what its workers said too.
"""

import asyncio
import base64
import binascii
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from perilune.data.chat import Attachment, parse_message, parse_tools
from perilune.data.chat_messages import ChatError, ChatMessage, Tool
from perilune.data.chat_parser import ChatParser, Parsed
from perilune.data.images import DEFAULT_PROCESSOR, ProcessorConfig, image_media, load_image
from perilune.data.media import Media
from perilune.data.tokenizer import Tokenizer
from perilune.rl.environment import Access, EpisodeOver, Message
from perilune.rl.trajectory import Branch, Recording, plain_routes, routes_of
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.request import MAX_SEED, Picture, Request, SamplingParams
from perilune.serve.sessions import SessionPrompt, Sessions
from perilune.serve.text_stream import whole_text

if TYPE_CHECKING:
    from perilune.rl.gateway import Gateway


class EpisodeParked(EpisodeOver):
    """The episode has used up its share of this iteration: it is to be continued later."""


class TalkError(RuntimeError):
    """The engine failed, or an environment said something else than the last time."""


@dataclass(frozen=True, kw_only=True)
class TalkConfig:
    max_tokens: int = 1024
    """Sampled in one episode, all turns together."""
    max_turns: int = 16
    temperature: float = 1.0
    """Only for evaluation: what is trained on is sampled at 1."""
    thinking: bool = False
    processor: ProcessorConfig = DEFAULT_PROCESSOR
    record_routes: bool = False
    """Keep the experts that every token met, for learner.routing_replay, which sets this."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"talk.{name} is {getattr(self, name)!r}, expected at least 1")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One reply of the policy; JSON but for its tuples."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    is_over: bool
    """False: it was cut to be continued."""
    finish: str = "stop"
    routes: Mapping[str, Any] | None = None
    """Of its last tokens but the very last: those that no turn before it has. As trajectory.plain_routes."""

    def plain(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "Turn":
        lists = {name: tuple(plain[name]) for name in ("prompt", "tokens", "logprobs", "versions")}
        return Turn(**lists, is_over=plain["is_over"], finish=plain["finish"], routes=plain.get("routes"))


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Who plays the asides of episodes."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    config: TalkConfig
    """Of one worker in one episode."""
    trained: bool = False
    """They are the policy, and are trained with it."""


class EngineTalk:
    """Implements `environment.Talk` and `Serves`."""

    def __init__(
        self,
        engine: AsyncEngine,
        sessions: Sessions,
        tokenizer: Tokenizer,
        config: TalkConfig,
        *,
        name: str,
        seed: int,
        turns: Sequence[Turn] = (),
        allowance: int | None = None,
        workers: Workers | None = None,
        asides: Mapping[str, Sequence[Turn]] | None = None,
        gateway: "Callable[[], Gateway] | None" = None,
        is_trained: bool = True,
    ) -> None:
        """`allowance`: tokens it may sample before it is parked; None: no limit but the config's. `workers` play its
        asides, and `asides` is what they have said already. `gateway` gives the one that programs are served by.
        `is_trained`: what it samples is recorded in branches, for training."""
        self._engine, self._sessions, self._tokenizer, self._config = engine, sessions, tokenizer, config
        self._name, self._seed = name, seed
        self._known = list(turns)
        self._allowance = allowance
        self._messages: list[Message] = []
        self._parsed: list[ChatMessage] = []
        self._attachments: list[Attachment] = []
        self._ends = frozenset({tokenizer.eos_id, tokenizer.special_ids["<|im_end|>"]})
        self.turns: list[Turn] = []
        self.recording = Recording()
        self.events: list[Mapping[str, Any]] = []
        self._workers, self._known_asides = workers, dict(asides or {})
        self._asides: dict[str, EngineTalk] = {}
        self._gateway = gateway
        self._was_refused = False
        self._is_closed = False
        self.is_parked = False
        """It was told to stop here for this iteration."""
        self._is_trained = is_trained
        self._asked: SessionPrompt | None = None
        """The prompt of the last turn."""

    @property
    def messages(self) -> Sequence[Message]:
        return tuple(self._messages)

    @property
    def branches(self) -> tuple[Branch, ...]:
        """What is trained on: the policy's, then those of workers that are trained with it, by their names."""
        trained = self._workers is not None and self._workers.trained
        others = [self._asides[name].branches for name in sorted(self._asides)] if trained else []
        return (*self.recording.branches, *(branch for branches in others for branch in branches))

    @property
    def aside_turns(self) -> dict[str, tuple[Turn, ...]]:
        return {name: tuple(aside.turns) for name, aside in self._asides.items()}

    @property
    def num_sampled(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def finish(self) -> str:
        """ "length" when a reply was cut for good, or refused to a program, else "stop"."""
        cut = self._was_refused or any(turn.finish == "length" for turn in self.turns)
        return "length" if cut else "stop"

    def add(self, *messages: Message) -> None:
        for message in messages:
            parsed = parse_message(message, path=f"messages[{len(self._messages)}]")
            where = f"messages[{len(self._messages)}]"
            self._attachments += [
                attachment(part.kind, part.source, self._config.processor, where) for part in parsed.media
            ]
            self._messages.append(message)
            self._parsed.append(parsed)

    def aside(self, name: str) -> "EngineTalk":
        if self._workers is None:
            raise TalkError(f"{self._name}: there is nobody to play {name!r}: the run has no workers")
        if name not in self._asides:
            workers = self._workers
            records = self._config.record_routes and workers.trained
            config = replace(workers.config, record_routes=records)
            self._asides[name] = EngineTalk(
                workers.engine, Sessions(workers.tokenizer), workers.tokenizer, config,
                name=f"{self._name}@{name}", seed=self._seed, turns=self._known_asides.get(name, ()),
                is_trained=workers.trained,
            )  # fmt: skip
        return self._asides[name]

    def note(self, *events: Mapping[str, Any]) -> None:
        # As they will be read from a file: whoever judges them sees the same now and then.
        self.events += json.loads(json.dumps(events, allow_nan=False))

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[Access]:
        """As `Serves` has it. A program cannot be parked: its episode is played to the end, whatever the allowance."""
        if self._gateway is None:
            raise TalkError(f"{self._name}: this talk has no gateway for programs")
        opened = None
        try:
            async with self._gateway().episode(name=self._name, seed=self._seed, config=self._config) as opened:
                yield opened.access
        finally:
            if opened is not None:
                self.turns += opened.episode.turns()
                self.recording.branches += opened.episode.branches()
                self._messages += opened.episode.messages()
                self._was_refused = self._was_refused or bool(opened.episode.num_refused)

    async def ask(
        self, *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Message:
        if self.is_parked:  # an environment that goes on all the same is not answered
            raise EpisodeParked
        if self._is_closed:
            raise EpisodeOver
        number = len(self.turns)
        room = self._config.max_tokens - self.num_sampled
        if number >= self._config.max_turns or room < 1:
            raise EpisodeOver
        prompt = self._sessions.prompt(
            messages=self._parsed,
            tools=_tools_of(tools),
            attachments=self._attachments,
            thinking=self._config.thinking,
            session_id=self._name,
            after=self._asked,
        )
        self._asked = prompt
        turn = self._known[number] if number < len(self._known) else None
        if turn is not None and list(turn.prompt) != prompt.tokens:
            raise TalkError(
                f"{self._name}: the prompt of turn {number} is not the one that was served: the environment did not do "
                "the same again"
            )
        if turn is None or not turn.is_over:
            limit = room if max_tokens is None else min(room, max_tokens)
            turn = await self._sampled(prompt, turn, number, limit, tuple(stop))
        self.turns.append(turn)
        if self._is_trained:
            self.recording.add(
                turn.prompt, turn.tokens, turn.logprobs, turn.versions, media=prompt.media, starts=prompt.starts,
                routes=None if turn.routes is None else routes_of(turn.routes),
            )  # fmt: skip
        if not turn.is_over:
            self.is_parked = True
            raise EpisodeParked
        parsed = self._read(turn, tuple(stop))
        self._sessions.record(prompt, turn.tokens, parsed)
        plain = parsed.message.plain()
        self._messages.append(plain)
        self._parsed.append(parsed.message)
        return plain

    def close(self) -> None:
        """Forget the session. Whoever still asks is not answered."""
        self._is_closed = True
        self._sessions.forget(owner="", session_id=self._name)

    async def _sampled(
        self, prompt: SessionPrompt, begun: Turn | None, number: int, limit: int, stop: tuple[str, ...]
    ) -> Turn:
        """The reply, begun anew or continued where it was cut, as far as the allowance goes."""
        tokens = list(begun.tokens) if begun is not None else []
        logprobs = list(begun.logprobs) if begun is not None else []
        versions = list(begun.versions) if begun is not None else []
        routes = [] if begun is None or begun.routes is None else [routes_of(begun.routes)]
        first_route = None
        if self._config.record_routes:  # from the first token on whose routes are not known yet
            known = self.recording.known_routes(prompt.tokens)
            first_route = len(prompt.tokens) + len(tokens) - 1 if routes else known
        room = limit - len(tokens)
        allowed = room if self._allowance is None else min(room, self._allowance)
        finish = "length"
        if allowed > 0:
            pictures = tuple(picture(item, start) for item, start in zip(prompt.media, prompt.starts, strict=True))
            request = Request(
                request_id=f"{self._name}#{number}.{len(tokens)}",
                prompt=(*prompt.tokens, *tokens),
                params=SamplingParams(
                    max_tokens=allowed,
                    temperature=self._config.temperature,
                    seed=seed_of(self._seed, self._name, number, len(tokens)),
                    stop_ids=self._ends,
                    stop=stop,
                    logprobs=0,
                    routes=first_route,
                ),
                media=pictures,
            )
            # Episodes that begin together all get here before the first of them asks: the engine is given their prompts
            # at once, and does not decode a few sequences while the others are still being written.
            await asyncio.sleep(0)
            async for output in self._engine.stream(request, whole=True):
                if output.error is not None:
                    raise TalkError(f"{self._name}: the engine failed: {output.error}")
                tokens += output.token_ids
                logprobs += [each.logprob for each in output.logprobs]
                versions += [output.weight_version] * len(output.token_ids)
                finish = output.finish_reason or finish
                routes += [] if output.routes is None else [output.routes]
        if self._allowance is not None:
            self._allowance -= len(tokens) - (0 if begun is None else len(begun.tokens))
        return Turn(
            prompt=tuple(prompt.tokens),
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            is_over=finish != "length" or len(tokens) >= limit,
            finish=finish,
            routes=plain_routes(np.concatenate(routes)) if routes else None,
        )

    def _read(self, turn: Turn, stop: tuple[str, ...]) -> Parsed:
        parser = ChatParser(thinking=self._config.thinking)
        over = next((place for place, token in enumerate(turn.tokens) if token in self._ends), len(turn.tokens))
        for piece in whole_text(self._tokenizer, turn.tokens[:over], stop):
            parser.push(piece)
        parsed = parser.finish()
        is_ended = bool(turn.tokens) and turn.tokens[-1] == self._tokenizer.special_ids["<|im_end|>"]
        # The end of the turn was left out above: it is no text.
        return Parsed(message=parsed.message, is_ended=is_ended, closing=() if is_ended else parsed.closing)


def _tools_of(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    try:
        declared = json.dumps(list(tools))
    except TypeError:  # a mapping that is no dict, or a value for `parse_tools` to refuse by name
        return parse_tools(list(tools))
    return _declared_tools(declared)


@lru_cache(maxsize=64)
def _declared_tools(declared: str) -> tuple[Tool, ...]:
    """Read once: all turns of all episodes show the same few."""
    return parse_tools(json.loads(declared))


@lru_cache(maxsize=256)
def attachment(kind: str, source: str, processor: ProcessorConfig, where: str = "messages") -> Attachment:
    """The patches of a picture in a message; ChatError for anything but an image in a data: URL."""
    if kind != "image" or source[:5].lower() != "data:":
        raise ChatError(where, "holds a picture that is no data: URL")
    try:
        content = base64.b64decode(source.partition(",")[2], validate=True)
    except binascii.Error as error:
        raise ChatError(where, f"holds a picture that is not base64: {error}") from error
    return image_media(load_image(content), processor)


@lru_cache(maxsize=64)
def picture(media: Media, start: int) -> Picture:
    """Hashed once for all samples of a task: `attachment` gives them the same object."""
    return Picture.of(media, start)


def seed_of(seed: int, *names: str | int) -> int:
    """A seed for one reply: a function of the run's seed and of which reply it is."""
    digest = hashlib.sha256("/".join(map(str, (seed, *names))).encode()).digest()
    return int.from_bytes(digest[:8], "big") % MAX_SEED
