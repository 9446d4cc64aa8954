"""The seam between agents and models: messages and tools go in, one message comes out.

`ModelClient` is all that an agent knows of a model. `http_client.HTTPClient` talks to any OpenAI-compatible endpoint;
an engine in the same process can be another implementation. A client owns retries, queues and limits of its provider,
and asks the caller's `Meter` before every attempt, so that a budget counts retries too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from perilune.swarm.messages import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Meter(Protocol):
    """Asked before each attempt of a call, and told afterwards."""

    def begin(self, *, prompt_bound: int, max_tokens: int) -> None:
        """Reserve a call and at most that many tokens; raises `budget.BudgetExceeded`, and then nothing is sent."""

    def end(self, usage: Usage | None) -> None:
        """What the attempt used; None when it broke off and nobody knows: the reservation is kept as spent."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    agent: str
    """Who asks: calls of different agents share a provider fairly."""
    model: str
    messages: Sequence[Message]
    tools: bytes = b"[]"
    """JSON list of tool declarations in the wire's form, encoded once per set of tools."""
    max_tokens: int = 4096
    """Always sent."""
    temperature: float | None = None
    seed: int | None = None
    response_format: Mapping[str, Any] | None = None
    session: str | None = None
    """Turns of one conversation carry the same name (token-in, token-out endpoints use it)."""
    meter: Meter | None = None


@dataclass(frozen=True, kw_only=True)
class ModelReply:
    message: Message
    finish_reason: str = "stop"
    usage: Usage | None = None
    model: str = ""
    attempts: int = 1
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    weight_version: str | None = None


ModelErrorKind = Literal["refused", "rate_limit", "server", "network", "stalled", "malformed", "circuit_open", "time"]


class ModelError(RuntimeError):
    """A call that failed for good, after all retries. The text never holds a key or a header."""

    def __init__(self, message: str, *, kind: ModelErrorKind, status: int | None = None, attempts: int = 1) -> None:
        super().__init__(message)
        self.kind: ModelErrorKind = kind
        self.status = status
        self.attempts = attempts


class ModelClient(Protocol):
    async def complete(self, request: ModelRequest) -> ModelReply:
        """The model's reply; raises `ModelError` after the last retry, `BudgetExceeded` from the meter."""
        ...

    async def close(self) -> None: ...
