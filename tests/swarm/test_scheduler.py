"""Contracts of the scheduler: places, order, ownership, ends."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm.scheduler import Job, Scheduler


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_a_result_and_an_error_are_kept_with_the_job():
    async def scene():
        scheduler = Scheduler(2)

        async def good(job: Job) -> int:
            return 7

        async def bad(job: Job) -> None:
            raise KeyError("x")

        one, two = scheduler.start("one", good), scheduler.start("two", bad)
        assert await scheduler.wait([one, two], count=2) == (one, two)
        assert (one.state, one.result, two.state) == ("done", 7, "failed")
        assert isinstance(two.error, KeyError) and scheduler.jobs() == () and scheduler.active == 0

    run(scene())


def test_more_jobs_than_places_queue_and_none_is_refused():
    async def scene():
        scheduler, seen = Scheduler(3), []

        async def one(job: Job) -> None:
            seen.append(scheduler.active)
            await asyncio.sleep(0)

        jobs = [scheduler.start(str(number), one) for number in range(40)]
        await asyncio.sleep(0)
        assert scheduler.queued == 37
        await scheduler.wait(jobs, count=40)
        assert max(seen) == scheduler.peak == 3 and all(job.state == "done" for job in jobs)

    run(scene())


def test_a_parent_that_rests_lets_its_children_run_in_its_place():
    """With one place in all, a chain of parents waiting for children would otherwise never end."""

    async def scene():
        scheduler = Scheduler(1)

        async def level(job: Job, depth: int) -> int:
            if depth == 0:
                return 0
            child = scheduler.start(f"{job.name}/{depth}", lambda inner: level(inner, depth - 1), owner=job)
            async with scheduler.resting(job):
                assert job.state == "resting"
                await child.ended()
            assert job.state == "running"
            return child.result + 1

        top = scheduler.start("top", lambda job: level(job, 20))
        await top.ended()
        assert top.result == 20 and scheduler.peak == 1

    run(scene())


def test_several_calls_of_one_job_rest_in_one_place():
    async def scene():
        scheduler, gate = Scheduler(1), asyncio.Event()

        async def waiting(job: Job) -> None:
            async def one() -> None:
                async with scheduler.resting(job):
                    await gate.wait()

            await asyncio.gather(one(), one(), one())

        async def other(job: Job) -> None:
            gate.set()

        first, second = scheduler.start("waiting", waiting), scheduler.start("other", other)
        await scheduler.wait([first, second], count=2)
        assert scheduler.peak == 1 and scheduler.active == 0

    run(scene())


def test_who_comes_back_goes_before_who_is_new():
    async def scene():
        scheduler, order = Scheduler(1), []

        async def rests(job: Job) -> None:
            async with scheduler.resting(job):
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            order.append(job.name)

        async def short(job: Job) -> None:
            order.append(job.name)
            for _ in range(5):
                await asyncio.sleep(0)

        jobs = [scheduler.start("rests", rests), *(scheduler.start(name, short) for name in ("a", "b", "c"))]
        await scheduler.wait(jobs, count=4)
        assert order == ["a", "rests", "b", "c"]

    run(scene())


@pytest.mark.parametrize("how", ["returns", "raises", "cancelled"])
def test_no_job_outlives_its_owner(how):
    async def scene():
        scheduler, ended = Scheduler(100), []

        async def sleeper(job: Job, depth: int) -> None:
            try:
                if depth:
                    scheduler.start(f"{job.name}.", lambda inner: sleeper(inner, depth - 1), owner=job)
                await asyncio.Event().wait()
            finally:
                ended.append(job.name)

        async def owner(job: Job) -> None:
            for number in range(3):
                scheduler.start(f"child{number}", lambda inner: sleeper(inner, 3), owner=job)
            for _ in range(8):
                await asyncio.sleep(0)
            if how == "raises":
                raise ValueError
            if how == "cancelled":
                await asyncio.Event().wait()

        job = scheduler.start("owner", owner)
        if how == "cancelled":
            for _ in range(10):
                await asyncio.sleep(0)
            await scheduler.cancel(job)
        await job.ended()
        assert len(ended) == 12 and scheduler.jobs() == () and scheduler.active == 0

    run(scene())


def test_a_second_cancellation_leaves_nobody_behind():
    async def scene():
        scheduler = Scheduler(10)

        async def stubborn(job: Job) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0.01)

        async def owner(job: Job) -> None:
            scheduler.start("stubborn", stubborn, owner=job)
            await asyncio.Event().wait()

        job = scheduler.start("owner", owner)
        await asyncio.sleep(0)
        first = asyncio.create_task(scheduler.cancel(job))
        await asyncio.sleep(0.002)
        await asyncio.gather(first, scheduler.cancel(job))
        assert scheduler.jobs() == () and job.state == "cancelled"

    run(scene())


def test_waiting_for_some_returns_when_they_are_there_in_the_order_given():
    async def scene():
        scheduler, gates = Scheduler(10), [asyncio.Event() for _ in range(4)]
        jobs = [scheduler.start(str(n), lambda job, n=n: gates[n].wait()) for n in range(4)]
        gates[3].set()
        assert await scheduler.wait(jobs, count=1) == (jobs[3],)
        gates[1].set()
        assert await scheduler.wait(jobs, count=2) == (jobs[1], jobs[3])
        assert await scheduler.wait(jobs, count=3, seconds=0.01) == (jobs[1], jobs[3])
        assert await scheduler.wait(jobs, count=0) == (jobs[1], jobs[3])
        with pytest.raises(ValueError, match="5 of 4"):
            await scheduler.wait(jobs, count=5)
        await scheduler.close()
        assert [job.state for job in jobs] == ["cancelled", "done", "cancelled", "done"]

    run(scene())


def test_wrong_use_is_said_plainly():
    async def scene():
        with pytest.raises(ValueError, match="max_active is 0"):
            Scheduler(0)
        scheduler = Scheduler(1)
        job = scheduler.start("a", lambda job: asyncio.sleep(0))
        with pytest.raises(ValueError, match="'a' is already there"):
            scheduler.start("a", lambda job: asyncio.sleep(0))
        await job.ended()
        assert repr(job) == "Job('a', done)"
        with pytest.raises(ValueError, match="its owner 'a' has ended"):
            scheduler.start("b", lambda job: asyncio.sleep(0), owner=job)
        await scheduler.cancel(job)  # ended already: nothing to do

    run(scene())


@settings(max_examples=120, deadline=None)
@given(seed=st.integers(0, 2**32), places=st.integers(1, 5), cancels=st.integers(0, 12))
def test_random_trees_end_with_every_place_free(seed, places, cancels):
    """Jobs that start others, rest, fail and are cancelled at any await: places are never exceeded nor lost, ends reach
    everybody, and nothing waits for ever."""
    rng = random.Random(seed)

    async def scene():
        scheduler, everybody = Scheduler(places), []

        def check() -> None:
            assert 0 <= scheduler.active <= places
            assert scheduler.active == sum(job.state == "running" for job in scheduler.jobs())

        async def one(job: Job, depth: int) -> None:
            children = []
            for number in range(rng.randrange(6)):
                action = rng.randrange(5)
                if action == 0 and depth < 4:
                    child = scheduler.start(f"{job.name}/{number}", lambda j: one(j, depth + 1), owner=job)
                    children.append(child)
                    everybody.append(child)
                elif action == 1 and children:
                    async with scheduler.resting(job):
                        await scheduler.wait(children, count=rng.randint(1, len(children)))
                elif action == 2 and rng.random() < 0.1:
                    raise RuntimeError("fails")
                elif action == 3 and children:
                    await scheduler.cancel(rng.choice(children))
                else:
                    await asyncio.sleep(0)

        roots = [scheduler.start(str(number), lambda job: one(job, 0)) for number in range(4)]
        everybody.extend(roots)
        for _ in range(cancels):
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            living = scheduler.jobs()
            if living:
                rng.choice(living)._task.cancel()
            await asyncio.sleep(0)
        for root in roots:
            await root.ended()
        assert all(job.has_ended for job in everybody)
        assert scheduler.active == 0 and scheduler.queued == 0 and scheduler.jobs() == ()
        for job in everybody:
            assert job.owned() == ()

    run(scene())
