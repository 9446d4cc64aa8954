"""The way to a provider: calls wait here instead of being refused, and agents take turns.

Waiting calls are taken round robin over agents and first come first served within one, so that an agent with a thousand
calls delays another agent's only call by one turn. Each model has its own adaptive limit (`rate`); a provider's limit
over all models and its circuit breaker stand above them.

    permit = await turnstile.enter("main/researcher-1", "kimi-k2", deadline=loop.time() + 60)
    try:
        ...
        permit.succeed(first_byte=0.3)         # or refuse(retry_after) or fail()
    finally:
        permit.close()                         # says nothing if the outcome was told; gives the place back otherwise

Cancelling a waiting or running call at any point gives its place back.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from perilune.swarm.rate import AdaptiveLimit, CircuitBreaker, Flight, Pace

MOST_POSTPONED = 20
"""Steps of the ramp that are put off because calls are not on the wire yet or the loop is busy."""


class CircuitOpen(RuntimeError):
    """The provider has not answered for long; waiting for it is given up."""


class WaitTooLong(RuntimeError):
    """The call's time is over, or the provider asked to wait for longer than the call has."""


class FairQueue:
    """Items by agent: round robin over agents, first in first out within one."""

    def __init__(self) -> None:
        self._by_agent: dict[str, deque[asyncio.Future[Permit]]] = {}
        self._turns: deque[str] = deque()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, agent: str, item: asyncio.Future[Permit], *, front: bool = False) -> None:
        """Add an item; `front`: before the agent's others."""
        waiting = self._by_agent.get(agent)
        if waiting is None:
            waiting = self._by_agent[agent] = deque()
            self._turns.append(agent)
        (waiting.appendleft if front else waiting.append)(item)
        self._size += 1

    def pop(self) -> asyncio.Future[Permit]:
        agent = self._turns.popleft()
        waiting = self._by_agent[agent]
        item = waiting.popleft()
        self._size -= 1
        if waiting:
            self._turns.append(agent)
        else:
            del self._by_agent[agent]
        return item

    def remove(self, agent: str, item: asyncio.Future[Permit]) -> bool:
        """Take an item out of the middle; whether it was there."""
        waiting = self._by_agent.get(agent)
        if waiting is None or item not in waiting:
            return False
        waiting.remove(item)
        self._size -= 1
        if not waiting:
            del self._by_agent[agent]
            self._turns.remove(agent)
        return True


@dataclass
class Lane:
    """Calls to one model of the provider."""

    limit: AdaptiveLimit
    queue: FairQueue = field(default_factory=FairQueue)
    grow_at: float | None = None
    """When the ramp may take its next step."""
    unsent: int = 0
    """Calls that have their place and are not on the wire yet."""
    postponed: int = 0
    """How often in a row that step was put off."""


class Permit:
    """A place in flight. Tell its outcome once; `close` without one gives it back."""

    __slots__ = ("_flight", "_is_open", "_is_sent", "_lane", "_tries", "_turnstile")

    def __init__(self, turnstile: Turnstile, lane: Lane, flight: Flight, tries: bool) -> None:
        self._turnstile, self._lane, self._flight, self._tries = turnstile, lane, flight, tries
        self._is_open = True
        self._is_sent = False
        lane.unsent += 1

    def sent(self) -> None:
        """The request is on the wire. Until then the provider cannot have refused it."""
        if not self._is_sent:
            self._is_sent = True
            self._lane.unsent -= 1

    @property
    def started(self) -> float:
        return self._flight.started

    def succeed(self, first_byte: float | None = None) -> None:
        """The provider served the call; seconds to the first byte, where they mean something."""
        if self._take():
            now = self._turnstile.loop.time()
            self._turnstile.breaker.succeed()
            self._lane.limit.succeed(self._flight, now, first_byte, has_queue=len(self._lane.queue) > 0)
            self._turnstile.freed()

    def refuse(self, retry_after: float | None) -> None:
        """Too many calls, says the provider."""
        if self._take():
            self._turnstile.breaker.succeed()
            self._lane.limit.refuse(self._flight, self._turnstile.loop.time(), retry_after)
            self._turnstile.freed()

    def answered(self) -> None:
        """The provider answered, but its answer says nothing of how busy it is."""
        if self._take():
            self._turnstile.breaker.succeed()
            self._lane.limit.leave()
            self._turnstile.freed()

    def fail(self) -> None:
        """Nothing sensible came back."""
        if self._take():
            self._lane.limit.leave()
            self._turnstile.breaker.fail(self._turnstile.loop.time(), was_trying=self._tries)
            self._turnstile.freed()

    def close(self) -> None:
        if self._take():
            self._lane.limit.leave()
            self._turnstile.breaker.leave(was_trying=self._tries)
            self._turnstile.freed()

    def _take(self) -> bool:
        is_open, self._is_open = self._is_open, False
        self.sent()
        return is_open


class Turnstile:
    """One per provider and event loop."""

    def __init__(
        self,
        *,
        pace: Pace | None = None,
        max_concurrent: int | None = None,
        model_paces: dict[str, Pace] | None = None,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.pace = pace or Pace()
        self.max_concurrent = max_concurrent
        self.model_paces = model_paces or {}
        self.breaker = breaker or CircuitBreaker()
        self.lanes: dict[str, Lane] = {}
        self.in_flight = 0
        self._turns: deque[Lane] = deque()
        self._timer: asyncio.TimerHandle | None = None

    async def enter(self, agent: str, model: str, *, deadline: float, front: bool = False) -> Permit:
        """Wait for a place; raises `CircuitOpen` or `WaitTooLong`. `front`: a call that had a place before."""
        lane = self.lanes.get(model) or self._open_lane(model)
        now = self.loop.time()
        if not lane.queue and self._has_room(lane, now):
            return self._grant(lane, now)
        if self.breaker.has_given_up(now) and not self.breaker.lets_through(now):
            raise CircuitOpen
        if max(lane.limit.paused_until, now) >= deadline:
            raise WaitTooLong
        place: asyncio.Future[Permit] = self.loop.create_future()
        lane.queue.push(agent, place, front=front)
        timer = self.loop.call_at(deadline, _give_up, place)
        self._dispatch()
        try:
            return await place
        except BaseException:
            if place.done() and not place.cancelled() and place.exception() is None:
                place.result().close()  # the place was given just when the caller went away
            else:
                lane.queue.remove(agent, place)
            raise
        finally:
            timer.cancel()

    def freed(self) -> None:
        self.in_flight -= 1
        self._dispatch()

    def waiting(self) -> int:
        return sum(len(lane.queue) for lane in self.lanes.values())

    def _open_lane(self, model: str) -> Lane:
        lane = self.lanes[model] = Lane(AdaptiveLimit(self.model_paces.get(model, self.pace)))
        self._turns.append(lane)
        return lane

    def _has_room(self, lane: Lane, now: float) -> bool:
        return (
            (self.max_concurrent is None or self.in_flight < self.max_concurrent)
            and self.breaker.lets_through(now)
            and lane.limit.has_room(now)
        )

    def _grant(self, lane: Lane, now: float) -> Permit:
        self.in_flight += 1
        return Permit(self, lane, lane.limit.start(now), self.breaker.start())

    def _dispatch(self) -> None:
        """Give every free place to whose turn it is, and see to it that the next one is not missed."""
        if not any(lane.queue for lane in self._turns):
            return
        now = self.loop.time()
        if self.breaker.has_given_up(now) and not self.breaker.lets_through(now) and not self.breaker.is_trying:
            return self._refuse_all()
        some_went = True
        while some_went:
            some_went = False
            for _ in range(len(self._turns)):
                lane = self._turns[0]
                self._turns.rotate(-1)
                if lane.queue and self._has_room(lane, now):
                    place = lane.queue.pop()
                    if not place.done():
                        place.set_result(self._grant(lane, now))
                    some_went = True
        self._set_timer(now)

    def _refuse_all(self) -> None:
        for lane in self.lanes.values():
            while lane.queue:
                place = lane.queue.pop()
                if not place.done():
                    place.set_exception(CircuitOpen())

    def _set_timer(self, now: float) -> None:
        """Wake up when a pause ends, the breaker lets a call try, or the ramp may take its next step."""
        wake = math.inf
        for lane in self._turns:
            limit = lane.limit
            if not lane.queue or not (limit.is_ramping and limit.in_flight + 1 > limit.limit):
                lane.grow_at = None
            elif lane.grow_at is None:
                lane.grow_at = now + limit.pace.ramp_seconds
            if lane.queue and now < limit.paused_until:
                wake = min(wake, limit.paused_until)
            elif lane.grow_at is not None:
                wake = min(wake, lane.grow_at)
        if self.breaker.is_open and not self.breaker.is_trying:
            wake = min(wake, self.breaker.retry_at)
        if self._timer is not None:
            if self._timer.when() == wake:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(wake, self._wake) if wake != math.inf else None

    def _wake(self) -> None:
        self._timer = None
        now = self.loop.time()
        for lane in self._turns:
            if lane.grow_at is not None and now >= lane.grow_at:
                # What is not sent or not read yet may still be refused: such a while was not a quiet one.
                is_late = now - lane.grow_at > lane.limit.pace.ramp_seconds / 2
                lane.grow_at = None
                lane.postponed += 1
                if not (lane.unsent or is_late) or lane.postponed > MOST_POSTPONED:
                    lane.postponed = 0
                    lane.limit.grow()
        self._dispatch()


def _give_up(place: asyncio.Future[Permit]) -> None:
    if not place.done():
        place.set_exception(WaitTooLong())


__all__ = ["CircuitOpen", "FairQueue", "Lane", "Permit", "Turnstile", "WaitTooLong"]
