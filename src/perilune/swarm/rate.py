"""How many calls a provider takes at a time, learnt from how it answers; and when to leave it alone.

`AdaptiveLimit` is a function of what it is told (starts, successes, refusals, times); it knows no clock and no loop.

    ramp     Nothing known: `first` calls go out at once, and the limit grows by half after every quiet `ramp_seconds`
             since they were on the wire. Three hundred calls are out within a tenth of a second, yet a provider that
             takes twenty refuses a handful, not all.
    learn    Refusals say how many the provider does take: those that overlapped the refused call and were not refused.
             This is the limit from then on, and is remembered as `known`. A refusal now and then, below `noise` of all
             calls, is no sign of a limit.
    hold     At `known` the limit stays, with one more call tried after `probe_seconds`. A refused trial doubles the
             time to the next; a served one raises `known`, and the next step is twice as large.
    back off A refusal at a level that was served before means that the provider has less to give: the limit falls to
             `decrease` of itself, at most once per round trip, and rises again by one per round trip. So does a time to
             the first byte that grows far beyond its usual value.

Retry-After pauses all calls until then. `CircuitBreaker` opens after many failures in a row and lets single calls try.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How a limit is found. Times are in seconds."""

    max_concurrent: int | None = None
    """Never more calls than this at a time, to one model of a provider."""
    first: int = 16
    """Calls that go out at once while nothing is known."""
    ramp_seconds: float = 0.01
    ramp: float = 1.5
    """How many times more go out after each quiet while of `ramp_seconds`, until something is known."""
    probe_seconds: float = 30.0
    longest_probe_seconds: float = 240.0
    decrease: float = 0.7
    noise: float = 0.03
    """Share of calls that may be refused without a limit being behind it."""
    latency_factor: float | None = 6.0
    """First bytes this many times slower than usual mean overload; None: latency says nothing."""
    latency_floor: float = 2.0
    """First bytes faster than this never mean overload."""

    def __post_init__(self) -> None:
        if self.max_concurrent is not None and self.max_concurrent < 1:
            raise ValueError(f"max_concurrent {self.max_concurrent!r}: expected at least 1, or None for no limit")
        if self.first < 1:
            raise ValueError(f"first {self.first!r}: expected at least 1")
        if not 0 < self.decrease < 1:
            raise ValueError(f"decrease {self.decrease!r}: expected a number between 0 and 1")


@dataclass(slots=True)
class Flight:
    """One call on its way: what the limit has to remember of its start."""

    started: float
    level: int
    """Calls in flight when it started, itself included."""
    served_before: int
    """Successes of the limit when it started."""


class AdaptiveLimit:
    UNKNOWN = math.inf
    RAMP_END = 4096
    STRIKES = 4
    """Refusals beyond the noise that make a limit."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.in_flight = 0
        self.paused_until = -math.inf
        self.limit: float = pace.first
        self.known: float = self.UNKNOWN
        """The most that were served together; infinite while nothing was refused."""
        self.refusals = 0
        self._served = 0
        self._strikes = 0.0
        self._last_cut = -math.inf
        self._probe_at = math.inf
        self._probe_wait = pace.probe_seconds
        self._probe_step = 1
        self._probing = False
        self._usual: float | None = None
        self._recent = 0.0

    @property
    def is_ramping(self) -> bool:
        return self.known == self.UNKNOWN and self.limit != math.inf

    def has_room(self, now: float) -> bool:
        if now < self.paused_until:
            return False
        most = self.pace.max_concurrent
        if most is not None and self.in_flight >= most:
            return False
        return self.in_flight + 1 <= self.limit or self._may_probe(now)

    def _may_probe(self, now: float) -> bool:
        """Whether it is time to try more than is known; if so, the limit is raised."""
        if now < self._probe_at or self._probing or self.limit < self.known:
            return False
        self._probing = True
        self.limit = self.known + self._probe_step
        return True

    def start(self, now: float) -> Flight:
        self.in_flight += 1
        return Flight(now, self.in_flight, self._served)

    def grow(self) -> None:
        """A quiet while has passed in the ramp."""
        if self.is_ramping:
            self.limit = max(self.limit + 1, self.limit * self.pace.ramp) if self.limit < self.RAMP_END else math.inf

    def leave(self) -> None:
        """A call ended in a way that says nothing of limits."""
        self.in_flight -= 1

    def succeed(self, flight: Flight, now: float, first_byte: float | None, *, has_queue: bool) -> None:
        self.in_flight -= 1
        self._served += 1
        self._strikes = max(0.0, self._strikes - self.pace.noise)
        if self.known != self.UNKNOWN:
            self._rise(flight, now, has_queue=has_queue)
        if first_byte is not None and self.pace.latency_factor is not None:
            self._watch_latency(flight, now, first_byte)

    def _rise(self, flight: Flight, now: float, *, has_queue: bool) -> None:
        if self.limit < self.known:
            if has_queue:
                self.limit = min(self.known, self.limit + 1 / max(self.limit, 1))
        elif self._probing and flight.level > self.known:
            self.known = flight.level
            if self.known >= self.limit:
                self._probing = False
                self._probe_step *= 2
                self._probe_wait = self.pace.probe_seconds
                self._probe_at = now

    def refuse(self, flight: Flight, now: float, retry_after: float | None) -> None:
        self.in_flight -= 1
        self.refusals += 1
        if retry_after is not None:
            self.paused_until = max(self.paused_until, now + retry_after)
        # Who overlapped the refused call and was not refused: those still here, and those served in the meantime; some
        # of the latter gave their place to others, so there were never more than the level it started at.
        overlapped = self.in_flight + self._served - flight.served_before
        served = max(1, min(overlapped, max(flight.level - 1, self.in_flight)))
        if self._probing:
            self._probe_wait = min(2 * self._probe_wait, self.pace.longest_probe_seconds)
            self.limit = self.known
            self._last_cut = now
            self._end_probe(now)
            return
        self._strikes += 1
        is_late = flight.started < self._last_cut
        if is_late:
            # Sent before the last cut: one more of the refusals that led to it, and a better count of who was served.
            self.known = min(self.known, served)
            self.limit = min(self.limit, self.known)
        elif self._strikes >= self.STRIKES:
            if flight.level <= self.known < self.UNKNOWN:
                # It was served at this level before: there is less to be had, or calls are counted by the minute.
                self._cut(served)
            else:
                self.known = min(self.known, served)
                self.limit = min(self.limit, self.known)
            self._strikes = 0.0
            self._last_cut = now
            self._end_probe(now)

    def _end_probe(self, now: float) -> None:
        self._probing = False
        self._probe_step = 1
        self._probe_at = now + self._probe_wait

    def _cut(self, level: float) -> None:
        """To a part of what was served at a time; from there it rises to the level again."""
        self.known = max(1.0, min(self.limit, level))
        self.limit = max(1.0, self.known * self.pace.decrease)

    def _watch_latency(self, flight: Flight, now: float, first_byte: float) -> None:
        factor = self.pace.latency_factor
        assert factor is not None
        if self._usual is None:
            self._usual = self._recent = first_byte
            return
        self._recent += 0.2 * (first_byte - self._recent)
        # The usual value falls quickly and rises slowly: what stays slow becomes usual in the end.
        self._usual += (0.3 if first_byte < self._usual else 0.01) * (first_byte - self._usual)
        is_slow = self._recent > max(self.pace.latency_floor, factor * self._usual)
        if is_slow and flight.level > 4 and flight.started >= self._last_cut:
            self._cut(flight.level)
            self._last_cut = now
            self._end_probe(now)
            self._recent = self._usual


class CircuitBreaker:
    """Opens after `threshold` failures in a row; then single calls try, at growing intervals, until one succeeds.

    `has_given_up` says that nothing was answered for `patience` seconds: waiting any longer is useless. A provider that
    never answered at all is given only `first_patience`.
    """

    def __init__(
        self,
        *,
        threshold: int = 10,
        wait: float = 0.5,
        longest_wait: float = 30.0,
        patience: float = 120.0,
        first_patience: float = 10.0,
    ) -> None:
        self.threshold = threshold
        self.first_wait, self.longest_wait = wait, longest_wait
        self.patience, self.first_patience = patience, first_patience
        self.opened_at: float | None = None
        self.retry_at = -math.inf
        self.is_trying = False
        """Whether the one call that may try is on its way."""
        self._wait = wait
        self._failures = 0
        self._failing_since: float | None = None
        self._ever_answered = False

    @property
    def is_open(self) -> bool:
        return self.opened_at is not None

    def lets_through(self, now: float) -> bool:
        return self.opened_at is None or (now >= self.retry_at and not self.is_trying)

    def start(self) -> bool:
        """A call starts; whether it is the one that tries."""
        if self.opened_at is None:
            return False
        self.is_trying = True
        return True

    def succeed(self) -> None:
        """The provider answered, be it with a refusal."""
        self._ever_answered = True
        self._failures = 0
        self._failing_since = self.opened_at = None
        self.is_trying = False
        self._wait = self.first_wait

    def fail(self, now: float, *, was_trying: bool) -> None:
        self._failures += 1
        if self._failing_since is None:
            self._failing_since = now
        if was_trying:
            self.is_trying = False
            self._wait = min(2 * self._wait, self.longest_wait)
            self.retry_at = now + self._wait
        elif self.opened_at is None and self._failures >= self.threshold:
            self.opened_at = now
            self.retry_at = now + self._wait

    def leave(self, *, was_trying: bool) -> None:
        """A call ended in a way that says nothing (it was cancelled)."""
        if was_trying:
            self.is_trying = False

    def has_given_up(self, now: float) -> bool:
        if self.opened_at is None or self._failing_since is None:
            return False
        patience = self.patience if self._ever_answered else min(self.patience, self.first_patience)
        return now - self._failing_since >= patience


__all__ = ["AdaptiveLimit", "CircuitBreaker", "Flight", "Pace"]
