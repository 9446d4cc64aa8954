"""Models for tests: functions of the messages, in this process, with any latency."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence

from perilune.swarm.client import ModelReply, ModelRequest, Usage
from perilune.swarm.messages import Message, ToolCall

Behaviour = Callable[[ModelRequest], Message]


class FunctionModel:
    """A ModelClient whose reply is a function of the request."""

    def __init__(self, behaviour: Behaviour, *, seed: int | None = None, tokens: bool = False) -> None:
        self.behaviour = behaviour
        self.requests: list[ModelRequest] = []
        self.in_flight = 0
        self.peak = 0
        self._rng = None if seed is None else random.Random(seed)
        self._tokens = tokens

    async def complete(self, request: ModelRequest) -> ModelReply:
        if request.meter is not None:
            request.meter.begin(prompt_bound=sum(len(m.wire) for m in request.messages), max_tokens=request.max_tokens)
        self.requests.append(request)
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            if self._rng is None:
                await asyncio.sleep(0)
            else:
                await asyncio.sleep(self._rng.random() * 0.01)
            message = self.behaviour(request)
        except BaseException:
            if request.meter is not None:
                request.meter.end(None)
            raise
        finally:
            self.in_flight -= 1
        usage = Usage(prompt_tokens=len(request.messages), completion_tokens=1)
        if request.meter is not None:
            request.meter.end(usage)
        ids = (1, 2, 3) if self._tokens else None
        return ModelReply(message=message, usage=usage, model=request.model, token_ids=ids, prompt_token_ids=ids)

    async def close(self) -> None:
        pass


def say(text: str) -> Message:
    return Message("assistant", text)


def call(*calls: tuple[str, dict] | tuple[str, str], text: str | None = None) -> Message:
    """An assistant's message with calls: (name, arguments)."""
    made = [
        ToolCall(f"call_{at}", name, arguments if isinstance(arguments, str) else json.dumps(arguments))
        for at, (name, arguments) in enumerate(calls)
    ]
    return Message("assistant", text, tuple(made))


def turn(request: ModelRequest) -> int:
    """How many replies the agent has given before."""
    return sum(message.role == "assistant" for message in request.messages)


def results(request: ModelRequest) -> list[str]:
    """Texts of the last turn's tool results."""
    texts: list[str] = []
    for message in reversed(request.messages):
        if message.role != "tool":
            break
        texts.append(message.text)
    return texts[::-1]


def scripted(script: dict[str, Sequence[Message] | Behaviour], default: Behaviour | None = None) -> Behaviour:
    """Replies by the agent's id, or its beginning: a list in order of turns, or a function of the request."""

    def behave(request: ModelRequest) -> Message:
        for start in sorted(script, key=len, reverse=True):
            if request.agent == start or (start.endswith("*") and request.agent.startswith(start[:-1])):
                replies = script[start]
                return replies(request) if callable(replies) else replies[turn(request)]
        if default is None:
            raise AssertionError(f"nothing is scripted for {request.agent!r}")
        return default(request)

    return behave
