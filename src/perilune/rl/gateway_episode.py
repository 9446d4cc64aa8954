"""What one agent asked through the gateway and what the policy answered: an episode as it grows, token by token.

Requests of an agent form lines. One that continues a conversation (the messages before are those it sent last time, and
the reply among them is one it got) stays in its line, and its prompt begins with the ids that were served there. Any
other, such as a compacted history or a sub-task, begins a line of its own. Each line is one branch of the recording, or
more where the agent asked for another reply to the same messages.

Budgets are those of any episode (`TalkConfig`): tokens over all requests, and replies. A reply ends where the tokens
do; a request after that is refused. Replies under way at once may pass the limit by what the engine gives in one event.

A reply whose reader left is kept as far as it was sampled: the agent may have left because of what it read.
"""

import asyncio
import contextlib
import hashlib
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from perilune.data.chat_messages import ChatMessage
from perilune.data.media import Media
from perilune.rl.environment import Message
from perilune.rl.talk import TalkConfig, Turn, seed_of
from perilune.rl.trajectory import Branch, Recording, plain_routes
from perilune.serve.refusals import Refusal
from perilune.serve.replies import ChatReply
from perilune.serve.request import Output, Request


@dataclass(eq=False, kw_only=True)
class Line:
    """One conversation of an agent."""

    session_id: str
    messages: tuple[ChatMessage, ...] = ()
    """Of the last request that was answered to its end."""

    def may_continue(self, messages: Sequence[ChatMessage]) -> bool:
        """Whether `messages` begin with those of the last request as far as texts tell; sessions know exactly."""
        return 0 < len(self.messages) <= len(messages) and all(
            old.role == new.role and old.text == new.text for old, new in zip(self.messages, messages)
        )


@dataclass(eq=False, kw_only=True)
class Sampled:
    """One reply while the engine writes it."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routes: np.ndarray | None = None
    finish: str = "cancelled"

    def add(self, output: Output) -> None:
        self.tokens += output.token_ids
        self.logprobs += [each.logprob for each in output.logprobs]
        self.versions += [output.weight_version] * len(output.token_ids)
        self.routes = output.routes if self.routes is None else self.routes
        self.finish = output.finish_reason or self.finish

    def turn(self) -> Turn:
        return Turn(
            prompt=self.request.prompt,
            tokens=tuple(self.tokens),
            logprobs=tuple(self.logprobs),
            versions=tuple(self.versions),
            is_over=True,
            finish=self.finish,
            routes=None if self.routes is None else plain_routes(self.routes),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Call:
    """One request of an agent."""

    line: Line
    messages: tuple[ChatMessage, ...]
    replies: tuple[Sampled, ...]
    reply: ChatReply
    """As the agent reads it."""


class Episode:
    """Requests may be taken in by several threads; the rest happens on one event loop."""

    def __init__(self, *, name: str, seed: int, config: TalkConfig) -> None:
        self.name, self.config = name, config
        self.lock = threading.Lock()
        self.lines: list[Line] = []
        self.calls: list[Call] = []
        self.num_sampled = 0
        self.num_replies = 0
        self.num_refused = 0
        """Requests that found the budget spent."""
        self.is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.failure: Exception | None = None
        """What the engine died of, while this episode needed it."""
        self._running: set[asyncio.Task[Any]] = set()
        self._seed = seed
        self._asked: Counter[bytes] = Counter()

    # --- while it is played -------------------------------------------------------------------------------------------

    def check_budget(self, count: int) -> int:
        """Tokens that are left, where so many more replies may be asked for. 403 when all is spent: a client that knows
        OpenAI's errors does not try that again."""
        config = self.config
        if self.is_closed:
            raise over()
        left = config.max_tokens - self.num_sampled
        if left < 1 or self.num_replies + count > config.max_turns:
            self.num_refused += 1
            raise Refusal(
                f"this episode has spent its budget: {self.num_sampled} of {config.max_tokens} tokens, "
                f"{self.num_replies} of {config.max_turns} replies",
                status=403,
                code="budget_exhausted",
            )
        return left

    def begin(self, call: Call) -> None:
        """Take in a request that is about to be answered."""
        with self.lock:
            self.check_budget(len(call.replies))
            self.num_replies += len(call.replies)
            self.calls.append(call)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While the engine writes a reply, in a task that `close` cancels."""
        task = asyncio.current_task()
        assert task is not None
        if self.is_closed:
            raise over()
        self._running.add(task)
        self._idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if self.is_closed:
                raise over() from None  # for a client that is still there
            raise
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    async def close(self) -> None:
        """End what is under way; nothing is added after this."""
        self.is_closed = True
        for task in self._running:
            task.cancel()
        await self._idle.wait()

    def count(self, num_tokens: int) -> bool:
        """Count sampled tokens; whether there are none left."""
        with self.lock:
            self.num_sampled += num_tokens
            return self.num_sampled >= self.config.max_tokens

    def seed(self, prompt: Sequence[int]) -> int:
        """For the next reply to these ids: a function of the ids and of how often they were answered, not of when."""
        digest = hashlib.sha256(array("q", prompt).tobytes()).digest()
        with self.lock:
            number = self._asked[digest]
            self._asked[digest] += 1
        return seed_of(self._seed, self.name, digest.hex(), number)

    def candidates(self, messages: Sequence[ChatMessage]) -> list[Line]:
        """Lines that a request may continue, the longest first, and of equal ones the newest."""
        found = [line for line in reversed(self.lines) if line.may_continue(messages)]
        return sorted(found, key=lambda line: -len(line.messages))

    # --- when it is over ----------------------------------------------------------------------------------------------

    def turns(self) -> list[Turn]:
        return [sampled.turn() for call in self.calls for sampled in call.replies if sampled.tokens]

    def branches(self) -> list[Branch]:
        """Line by line, in the order in which they began."""
        recordings = {id(line): Recording() for line in self.lines}
        needs_routes = self.config.record_routes
        for call in self.calls:
            for sampled in call.replies:
                # The engine tells routes at the end: a reply without an end cannot be replayed.
                if sampled.tokens and not (needs_routes and sampled.routes is None):
                    request = sampled.request
                    recordings[id(call.line)].add(
                        request.prompt, sampled.tokens, sampled.logprobs, sampled.versions,
                        media=[Media(pixels=picture.pixels, grid=picture.grid) for picture in request.media],
                        starts=[picture.start for picture in request.media],
                        routes=sampled.routes,
                    )  # fmt: skip
        return [branch for recording in recordings.values() for branch in recording.branches]

    def messages(self) -> list[Message]:
        """What was said, request by request: of each what is new in its line, then the replies."""
        found: list[Message] = []
        known: dict[int, int] = {}
        for call in self.calls:
            answered = [(each, parser) for each, parser in zip(call.replies, call.reply.parsers) if each.tokens]
            if answered:
                found += [message.plain() for message in call.messages[known.get(id(call.line), 0) :]]
                found += [parser.finish().message.plain() for _, parser in answered]
                known[id(call.line)] = len(call.messages) + 1  # the reply it goes on from
        return found

    @property
    def finish(self) -> str:
        """ "length" when a reply was cut for good, or one was refused."""
        cut = any(sampled.finish == "length" for call in self.calls for sampled in call.replies)
        return "length" if cut or self.num_refused else "stop"


def over() -> Refusal:
    return Refusal("this episode is over", status=403, code="episode_over")
