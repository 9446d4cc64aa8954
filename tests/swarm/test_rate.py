"""Adaptive limits, the circuit breaker and the fair queue, against simulated providers in virtual time."""

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm.rate import AdaptiveLimit, CircuitBreaker, Pace
from perilune.swarm.turnstile import CircuitOpen, Turnstile, WaitTooLong
from tests.swarm.virtual_time import run_virtually

FAR = 1e6


@dataclass
class SimulatedProvider:
    """Takes `capacity()` calls at a time for `seconds` each and refuses the rest after a round trip."""

    capacity: Callable[[float], float] = lambda now: math.inf
    seconds: float = 0.2
    round_trip: float = 0.002
    retry_after: float | None = 1.0
    noise: float = 0.0
    in_flight: int = 0
    refused: int = 0
    served: int = 0
    peak: int = 0
    chance: random.Random = field(default_factory=lambda: random.Random(0))

    async def ask(self, turnstile: Turnstile, agent: str, model: str = "m") -> bool:
        permit = await turnstile.enter(agent, model, deadline=FAR)
        try:
            permit.sent()
            await asyncio.sleep(self.round_trip / 2)
            is_noise = self.chance.random() < self.noise
            if self.in_flight >= self.capacity(turnstile.loop.time()) or is_noise:
                self.refused += 1
                await asyncio.sleep(self.round_trip / 2)
                permit.refuse(None if is_noise else self.retry_after)
                return False
            self.in_flight += 1
            self.peak = max(self.peak, self.in_flight)
            try:
                await asyncio.sleep(self.seconds)
            finally:
                self.in_flight -= 1
            await asyncio.sleep(self.round_trip / 2)
            self.served += 1
            permit.succeed(self.seconds)
            return True
        finally:
            permit.close()

    async def ask_until_served(self, turnstile: Turnstile, agent: str) -> None:
        while not await self.ask(turnstile, agent):
            if self.retry_after is None:
                await asyncio.sleep(0.05)


async def swarm(
    provider: SimulatedProvider, agents: int, steps: int, pace: Pace | None = None
) -> tuple[float, Turnstile]:
    """Seconds that `agents` need for `steps` calls each, one after the other."""
    turnstile = Turnstile(pace=pace)

    async def agent(number: int) -> None:
        for _ in range(steps):
            await provider.ask_until_served(turnstile, f"agent {number}")

    began = turnstile.loop.time()
    await asyncio.gather(*(agent(number) for number in range(agents)))
    return turnstile.loop.time() - began, turnstile


def is_idle(turnstile: Turnstile) -> bool:
    lanes = turnstile.lanes.values()
    return (
        turnstile.in_flight == 0
        and turnstile.waiting() == 0
        and all(lane.limit.in_flight == 0 and lane.unsent == 0 for lane in lanes)
        and not turnstile.breaker.is_trying
    )


# Learning a limit ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [3, 10, 20, 33, 70])
def test_a_provider_with_a_limit_refuses_few_and_loses_little_time(capacity: int) -> None:
    provider = SimulatedProvider(capacity=lambda now: capacity)
    seconds, turnstile = run_virtually(swarm(provider, agents=100, steps=15))
    best = 1500 * (0.2 + 0.002) / capacity
    assert provider.served == 1500
    assert provider.refused <= 0.03 * 1500
    # One refusal pauses the provider for the second it asked for; a run of ten seconds or more hardly feels it.
    assert seconds <= (1.2 * best if best > 10 else best + 2.2)
    assert is_idle(turnstile)


def test_without_refusals_hundreds_of_calls_go_out_at_once() -> None:
    provider = SimulatedProvider()
    seconds, turnstile = run_virtually(swarm(provider, agents=300, steps=1))
    assert provider.peak == 300 and provider.refused == 0
    assert seconds < 0.2 + 0.002 + 8 * 0.01 + 1e-6  # eight steps of the ramp: 16, 24, 36, ..., 410


def test_a_limit_is_remembered_after_the_provider_was_idle() -> None:
    provider = SimulatedProvider(capacity=lambda now: 20)

    async def scenario() -> int:
        _, turnstile = await swarm(provider, agents=100, steps=2)
        before = provider.refused
        await asyncio.sleep(600)
        await asyncio.gather(*(provider.ask_until_served(turnstile, f"later {n}") for n in range(100)))
        return provider.refused - before

    assert run_virtually(scenario()) <= 1  # one trial of a place more, as so much time has passed


def test_a_provider_that_takes_more_later_is_used_more() -> None:
    provider = SimulatedProvider(capacity=lambda now: 10 if now < 30 else 80)
    seconds, turnstile = run_virtually(swarm(provider, agents=100, steps=150))
    assert turnstile.lanes["m"].limit.known >= 70
    assert seconds < 30 + 90  # at ten places all the time it would be 300
    assert provider.refused <= 0.03 * provider.served


def test_a_provider_that_takes_less_later_is_used_less() -> None:
    provider = SimulatedProvider(capacity=lambda now: 60 if now < 5 else 12)
    _, turnstile = run_virtually(swarm(provider, agents=100, steps=40))
    assert 8 <= turnstile.lanes["m"].limit.known <= 13
    assert provider.refused <= 0.05 * provider.served


def test_a_rare_refusal_without_load_behind_it_does_not_lower_the_limit() -> None:
    provider = SimulatedProvider(noise=0.01, retry_after=None)
    seconds, turnstile = run_virtually(swarm(provider, agents=100, steps=15))
    assert turnstile.lanes["m"].limit.limit >= 100
    assert provider.refused > 0


def test_calls_that_are_not_on_the_wire_hold_the_ramp_back() -> None:
    async def scenario() -> int:
        turnstile = Turnstile()
        waiting = [asyncio.ensure_future(turnstile.enter(f"agent {n}", "m", deadline=FAR)) for n in range(100)]
        await asyncio.sleep(0.1)
        return sum(task.done() for task in waiting)

    assert run_virtually(scenario()) == Pace().first


def test_overload_that_shows_in_latency_alone_lowers_the_limit() -> None:
    limit = AdaptiveLimit(Pace())
    now = 0.0
    for seconds in [0.5] * 30 + [8.0] * 40:
        flights = [limit.start(now) for _ in range(16)]
        now += seconds
        for flight in flights:
            limit.succeed(flight, now, seconds, has_queue=True)
    assert limit.limit < 16
    steady = AdaptiveLimit(Pace(latency_factor=None))
    for seconds in (0.5, 80.0, 80.0, 80.0):
        steady.succeed(steady.start(0.0), seconds, seconds, has_queue=True)
    assert steady.limit == 16


def test_two_cuts_need_a_round_trip_between_them() -> None:
    limit = AdaptiveLimit(Pace())
    limit.known = limit.limit = 100
    flights = [limit.start(1.0) for _ in range(90)]
    for flight in flights[:30]:
        limit.refuse(flight, 2.0, None)
    assert limit.known == 60  # as many as are still served
    assert limit.limit >= 0.7 * 60


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["start", "succeed", "refuse", "leave", "grow"]), st.integers(0, 50), st.floats(0, 5)
        ),
        max_size=200,
    ),
    st.sampled_from([Pace(), Pace(max_concurrent=5), Pace(first=1, probe_seconds=0.5, noise=0.0)]),
)
def test_a_limit_never_leaves_its_bounds(events: list[tuple[str, int, float]], pace: Pace) -> None:
    limit, flights, now = AdaptiveLimit(pace), [], 0.0
    for kind, which, seconds in events:
        now += seconds
        if kind == "start" and limit.has_room(now):
            flights.append(limit.start(now))
        elif kind == "grow":
            limit.grow()
        elif flights and kind != "start":
            flight = flights.pop(which % len(flights))
            if kind == "succeed":
                limit.succeed(flight, now, seconds, has_queue=bool(which % 2))
            elif kind == "refuse":
                limit.refuse(flight, now, seconds if which % 2 else None)
            else:
                limit.leave()
        assert limit.in_flight == len(flights)
        assert limit.limit >= 1 and limit.known >= 1
        assert limit.in_flight <= (pace.max_concurrent or math.inf)
    # Whatever happened, an idle provider takes a call once its pause is over.
    for _ in flights:
        limit.leave()
    assert limit.has_room(max(now, limit.paused_until))


@pytest.mark.parametrize("wrong", [{"max_concurrent": 0}, {"first": 0}, {"decrease": 1.0}])
def test_a_senseless_pace_is_refused_with_its_field(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Pace(**wrong)  # pyrefly: ignore[bad-argument-type]


# Pauses --------------------------------------------------------------------------------------------------------------


def test_retry_after_pauses_everybody() -> None:
    async def scenario() -> list[float]:
        turnstile = Turnstile()
        permit = await turnstile.enter("a", "m", deadline=FAR)
        permit.refuse(7.0)
        times = []
        for agent in ("b", "c"):
            (await turnstile.enter(agent, "m", deadline=FAR)).succeed()
            times.append(turnstile.loop.time())
        (await turnstile.enter("d", "another model", deadline=FAR)).succeed()
        return times

    assert run_virtually(scenario()) == [7.0, 7.0]


def test_a_pause_longer_than_the_call_has_time_fails_at_once() -> None:
    async def scenario() -> float:
        turnstile = Turnstile()
        (await turnstile.enter("a", "m", deadline=FAR)).refuse(3600.0)
        with pytest.raises(WaitTooLong):
            await turnstile.enter("b", "m", deadline=60.0)
        return turnstile.loop.time()

    assert run_virtually(scenario()) == 0.0


def test_waiting_ends_with_the_deadline_and_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        turnstile = Turnstile(max_concurrent=1)
        permit = await turnstile.enter("a", "m", deadline=FAR)
        with pytest.raises(WaitTooLong):
            await turnstile.enter("b", "m", deadline=5.0)
        assert turnstile.loop.time() == 5.0
        permit.succeed()
        assert is_idle(turnstile)

    run_virtually(scenario())


# Fair share ----------------------------------------------------------------------------------------------------------


def test_an_agent_with_many_calls_does_not_starve_others() -> None:
    async def scenario() -> list[str]:
        turnstile = Turnstile(max_concurrent=1)
        order: list[str] = []

        async def call(agent: str) -> None:
            permit = await turnstile.enter(agent, "m", deadline=FAR)
            order.append(agent)
            await asyncio.sleep(0.1)
            permit.succeed()

        greedy = [asyncio.create_task(call("greedy")) for _ in range(50)]
        await asyncio.sleep(0.25)
        modest = [asyncio.create_task(call(f"modest {n}")) for n in range(3)]
        await asyncio.gather(*greedy, *modest)
        return order

    order = run_virtually(scenario())
    assert len(order) == 53
    # Three calls of the greedy one went before the others came; after that everybody has one turn in four.
    assert set(order[3:7]) == {"greedy", "modest 0", "modest 1", "modest 2"}


def test_calls_of_one_agent_keep_their_order_and_a_repeated_one_goes_first() -> None:
    async def scenario() -> list[int]:
        turnstile = Turnstile(max_concurrent=1)
        first = await turnstile.enter("a", "m", deadline=FAR)
        order: list[int] = []

        async def call(number: int, *, front: bool = False) -> None:
            permit = await turnstile.enter("a", "m", deadline=FAR, front=front)
            order.append(number)
            permit.succeed()

        tasks = [asyncio.create_task(call(number)) for number in range(5)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(call(99, front=True)))
        await asyncio.sleep(0)
        first.succeed()
        await asyncio.gather(*tasks)
        return order

    assert run_virtually(scenario()) == [99, 0, 1, 2, 3, 4]


def test_models_have_limits_of_their_own_below_that_of_the_provider() -> None:
    async def scenario() -> Counter[str]:
        turnstile = Turnstile(max_concurrent=6, model_paces={"small": Pace(max_concurrent=2)})
        in_flight: Counter[str] = Counter()
        peak: Counter[str] = Counter()

        async def call(agent: str, model: str) -> None:
            permit = await turnstile.enter(agent, model, deadline=FAR)
            for key in (model, "all"):
                in_flight[key] += 1
                peak[key] = max(peak[key], in_flight[key])
            await asyncio.sleep(0.1)
            in_flight.subtract((model, "all"))
            permit.succeed()

        await asyncio.gather(*(call(f"{model} {n}", model) for n in range(20) for model in ("small", "large")))
        assert is_idle(turnstile)
        return peak

    assert run_virtually(scenario()) == {"small": 2, "large": 4, "all": 6}


# The circuit breaker -------------------------------------------------------------------------------------------------


def test_many_failures_in_a_row_stop_all_calls_but_single_ones() -> None:
    async def scenario() -> None:
        turnstile = Turnstile(breaker=CircuitBreaker(threshold=5, wait=1.0, patience=1000, first_patience=1000))
        permits = [await turnstile.enter(f"a{n}", "m", deadline=FAR) for n in range(5)]
        for permit in permits:
            permit.fail()
        waiting = [asyncio.create_task(turnstile.enter(f"b{n}", "m", deadline=FAR)) for n in range(10)]
        await asyncio.sleep(0.9)
        assert sum(task.done() for task in waiting) == 0
        await asyncio.sleep(0.2)
        [tried] = [task for task in waiting if task.done()]
        (await tried).fail()
        await asyncio.sleep(1.9)
        assert sum(task.done() for task in waiting) == 1
        await asyncio.sleep(0.2)
        [tried] = [task for task in waiting if task.done() and task is not tried]
        (await tried).succeed()
        await asyncio.sleep(0)
        assert all(task.done() for task in waiting)
        for task in waiting:
            (await task).close()
        assert is_idle(turnstile)

    run_virtually(scenario())


def test_a_provider_that_never_answers_is_given_up_early() -> None:
    async def scenario(answered_before: bool) -> float:
        turnstile = Turnstile(breaker=CircuitBreaker(threshold=3, patience=100, first_patience=5))
        if answered_before:
            (await turnstile.enter("a", "m", deadline=FAR)).succeed()

        async def call(agent: str) -> None:
            while True:
                permit = await turnstile.enter(agent, "m", deadline=FAR)
                await asyncio.sleep(0.01)
                permit.fail()

        results = await asyncio.gather(*(call(f"a{n}") for n in range(20)), return_exceptions=True)
        assert all(isinstance(result, CircuitOpen) for result in results)
        assert is_idle(turnstile)
        return turnstile.loop.time()

    assert 5 <= run_virtually(scenario(False)) < 20
    assert 100 <= run_virtually(scenario(True)) < 140


def test_a_cancelled_trial_lets_another_call_try() -> None:
    async def scenario() -> None:
        turnstile = Turnstile(breaker=CircuitBreaker(threshold=1, wait=1.0))
        (await turnstile.enter("a", "m", deadline=FAR)).fail()
        trial = await turnstile.enter("b", "m", deadline=FAR)
        other = asyncio.create_task(turnstile.enter("c", "m", deadline=FAR))
        await asyncio.sleep(0.5)
        assert not other.done()
        trial.close()
        (await other).succeed()
        assert is_idle(turnstile)

    run_virtually(scenario())


# Cancellation --------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([None, 3]), st.booleans())
def test_all_places_return_whatever_is_cancelled(seed: int, capacity: int, most: int | None, fails: bool) -> None:
    chance = random.Random(seed)
    provider = SimulatedProvider(capacity=lambda now: capacity, retry_after=chance.choice([None, 0.3]))

    async def scenario() -> None:
        turnstile = Turnstile(max_concurrent=most, pace=Pace(first=4), breaker=CircuitBreaker(threshold=4))

        async def call(agent: str) -> None:
            await asyncio.sleep(chance.uniform(0, 0.5))
            if fails and chance.random() < 0.3:
                permit = await turnstile.enter(agent, "m", deadline=FAR)
                permit.fail()
            else:
                await provider.ask_until_served(turnstile, agent)

        tasks = [asyncio.create_task(call(f"agent {n % 5}")) for n in range(40)]
        for _ in range(15):
            await asyncio.sleep(chance.uniform(0, 0.2))
            chance.choice(tasks).cancel()
            if chance.random() < 0.5:  # in the same turn of the loop as a release
                for task in chance.sample(tasks, 3):
                    task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(result is None or isinstance(result, asyncio.CancelledError | CircuitOpen) for result in results)
        assert is_idle(turnstile)
        # And the way is free for the next.
        await asyncio.sleep(60)
        await provider.ask_until_served(turnstile, "last")

    run_virtually(scenario())
