"""How much one caller may ask for, and how much the server takes on at once.

`Limits` are the caps that a body is checked against and the times a connection may take. `Admission` is the door: it
counts requests under way, bytes of bodies and pictures in memory and, per caller, requests and tokens per minute.
Whoever does not fit is refused with 429 (or 503 while the server drains) and told when to come back; nobody waits
inside the door.

A rate is a bucket of tokens: it holds at most `burst`, refills at `rate` a second, and each request takes some out.
Tokens of text are known only afterwards, so a bucket may go below zero; the caller is refused until it is refilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from perilune.data.image_limits import ImageLimits
from perilune.serve.keys import Caller
from perilune.serve.refusals import Refusal

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Caps on one request (a larger one is refused and told the cap), on all of them, and on time. Seconds are floats.

    length: tokens of prompt and completion together; the engine's own bound is used where it is smaller.
    concurrent: sequences under way or waiting in the engine, counted over all callers.
    bodies_bytes: of all bodies in memory at once; picture_bytes: of the decoded pictures of all requests.
    write_seconds: how long a client may leave what was written to it unread before its connection is ended.
    """

    body_bytes: int = 32 * MIB
    bodies_bytes: int = 256 * MIB
    picture_bytes: int = 2048 * MIB
    n: int = 16
    prompts: int = 256
    sequences: int = 256
    max_tokens: int = 131_072
    length: int = 1 << 20
    top_logprobs: int = 20
    stop: int = 16
    stop_characters: int = 1024
    logit_bias: int = 1024
    messages: int = 8192
    tools: int = 256
    images: int = 32
    image: ImageLimits = field(default_factory=lambda: ImageLimits(max_bytes=16 * MIB, max_pixels=1 << 25))
    schema_bytes: int = 1 << 18
    concurrent: int = 1024
    connections: int = 2048
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    body_seconds: float = 30.0
    write_seconds: float = 30.0
    request_seconds: float = 3600.0
    heartbeat_seconds: float = 15.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in ("image",) or (value is None and each.name.endswith("_per_minute")):
                continue
            is_number = isinstance(value, int | float if each.name.endswith("_seconds") else int)
            if not is_number or isinstance(value, bool) or not value > 0:
                raise ValueError(f"{each.name}={value!r}: expected a number above 0")


@dataclass(kw_only=True)
class Bucket:
    """A rate with a burst; see the module."""

    rate: float
    burst: float
    clock: Callable[[], float] = time.monotonic
    level: float = field(init=False)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self._at = self.burst, self.clock()

    def wait(self, amount: float = 0.0) -> float:
        """Seconds until `amount` is there; 0 when it is."""
        now = self.clock()
        self.level = min(self.burst, self.level + (now - self._at) * self.rate)
        self._at = now
        # An amount above the burst could never be there; it may pass when the bucket is full.
        missing = min(amount, self.burst) - self.level
        return max(0.0, missing / self.rate)

    def take(self, amount: float) -> None:
        self.level -= amount


@dataclass(kw_only=True)
class _Rates:
    requests: Bucket | None
    tokens: Bucket | None


class Admission:
    """The door; see the module. Used from the event loop alone."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.is_draining = False
        self.sequences = 0
        self.body_bytes = 0
        self.picture_bytes = 0
        self._clock = clock
        self._rates: dict[str, _Rates] = {}
        self._seconds = 1.0
        """Moving average of how long a request takes: what a refused caller is told to wait."""

    def check_rate(self, caller: Caller) -> None:
        """Refuse a caller that has used up its minute. Takes one request out of its bucket."""
        if self.is_draining:
            raise Refusal("the server is shutting down", status=503, code="draining", retry_after=5)
        rates = self._rates_of(caller)
        for bucket, amount, name in ((rates.requests, 1.0, "requests"), (rates.tokens, 1.0, "tokens")):
            if bucket is not None and (wait := bucket.wait(amount)) > 0:
                limit = getattr(self.limits, f"{name}_per_minute")
                raise Refusal(
                    f"this key is limited to {limit:,} {name} per minute; try again in {wait:.1f} s",
                    status=429,
                    code="rate_limit_exceeded",
                    retry_after=wait,
                )
        if rates.requests is not None:
            rates.requests.take(1.0)

    def charge(self, caller: Caller, tokens: int) -> None:
        """Count tokens of prompt and completion against the caller's minute."""
        bucket = self._rates_of(caller).tokens
        if bucket is not None:
            bucket.wait()
            bucket.take(tokens)

    @contextmanager
    def room(self, sequences: int, picture_bytes: int = 0) -> Iterator[None]:
        """Take a place for each sequence of a request, and for its pictures, while it runs."""
        if picture_bytes > self.limits.picture_bytes:
            raise Refusal(
                f"the pictures take {picture_bytes:,} bytes, expected at most {self.limits.picture_bytes:,}",
                param="messages",
                code="image_too_large",
            )
        is_full = self.sequences + sequences > self.limits.concurrent
        if is_full or self.picture_bytes + picture_bytes > self.limits.picture_bytes:
            raise self.full()
        self.sequences += sequences
        self.picture_bytes += picture_bytes
        began = self._clock()
        try:
            yield
        finally:
            self.sequences -= sequences
            self.picture_bytes -= picture_bytes
            self._seconds += 0.1 * (self._clock() - began - self._seconds)

    def full(self) -> Refusal:
        """What a caller is told when the queue is full."""
        wait = min(60.0, max(1.0, self._seconds))
        return Refusal(f"the queue is full; try again in {wait:.0f} s", status=429, code="queue_full", retry_after=wait)

    def take_bytes(self, amount: int) -> None:
        if self.body_bytes + amount > self.limits.bodies_bytes:
            raise Refusal("too many large requests at once", status=429, code="queue_full", retry_after=1)
        self.body_bytes += amount

    def give_bytes(self, amount: int) -> None:
        self.body_bytes -= amount

    def _rates_of(self, caller: Caller) -> _Rates:
        found = self._rates.get(caller.name)  # one entry for each key: the table cannot grow
        if found is None:
            found = self._rates[caller.name] = _Rates(
                requests=self._bucket(self.limits.requests_per_minute),
                tokens=self._bucket(self.limits.tokens_per_minute),
            )
        return found

    def _bucket(self, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        return Bucket(rate=per_minute / 60, burst=float(per_minute), clock=self._clock)


__all__ = ["Admission", "Bucket", "Limits"]
