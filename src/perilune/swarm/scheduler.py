"""Jobs in a tree: who runs, who waits, who ends when its owner ends.

A job is a coroutine with a name and an owner. At most `max_active` jobs run at a time; the others queue and are never
refused. A job that waits for others rests: it gives its place back meanwhile, so that parents waiting for children
cannot fill all places, and is first in line when it goes on. A job that ends, for whatever reason, ends what it owns:
no job outlives its owner.

The scheduler knows nothing of agents or models. One event loop, no locks: every change happens between two awaits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

JobState = Literal["queued", "running", "resting", "done", "failed", "cancelled"]
ENDED: frozenset[JobState] = frozenset({"done", "failed", "cancelled"})


class Job:
    """One piece of work. `result` is what it returned, `error` what it raised."""

    def __init__(self, name: str, owner: Job | None) -> None:
        self.name = name
        self.owner = owner
        self.state: JobState = "queued"
        self.result: Any = None
        self.error: BaseException | None = None
        self._owned: dict[str, Job] = {}
        self._when_ended: list[Callable[[], None]] = []
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._rests = 0

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    def owned(self) -> tuple[Job, ...]:
        return tuple(self._owned.values())

    async def ended(self) -> None:
        await self._ended.wait()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call it once the job has ended, for whatever reason; at once when it has."""
        if self.has_ended:
            call()
        else:
            self._when_ended.append(call)

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.state})"


class Scheduler:
    def __init__(self, max_active: int) -> None:
        if max_active < 1:
            raise ValueError(f"max_active is {max_active}, expected 1 or more")
        self.max_active = max_active
        self.active = 0
        self.peak = 0
        self._fresh: deque[asyncio.Future[None]] = deque()
        self._returning: deque[asyncio.Future[None]] = deque()
        self._jobs: dict[str, Job] = {}

    @property
    def queued(self) -> int:
        return sum(not place.done() for line in (self._fresh, self._returning) for place in line)

    def jobs(self) -> tuple[Job, ...]:
        """All that have not ended."""
        return tuple(self._jobs.values())

    def start(self, name: str, work: Callable[[Job], Awaitable[Any]], *, owner: Job | None = None) -> Job:
        """Queue `work`, which is called with its job once there is a place for it."""
        if name in self._jobs:
            raise ValueError(f"a job named {name!r} is already there")
        if owner is not None and owner.has_ended:
            raise ValueError(f"job {name!r} cannot start: its owner {owner.name!r} has ended")
        job = Job(name, owner)
        self._jobs[name] = job
        if owner is not None:
            owner._owned[name] = job
        job._task = asyncio.create_task(self._run(job, work), name=name)
        # A task that is cancelled before its first step never runs a line of its coroutine.
        job._task.add_done_callback(lambda _: self._finish(job, "cancelled"))
        return job

    async def wait(self, jobs: Sequence[Job], *, count: int, seconds: float | None = None) -> tuple[Job, ...]:
        """Until `count` of the jobs have ended or the time is over; those that have ended, in the order given."""
        if count > len(jobs):
            raise ValueError(f"cannot wait for {count} of {len(jobs)} jobs")
        left = count
        enough = asyncio.Event()

        def one_more() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                enough.set()

        for job in jobs:
            job.when_ended(one_more)
        try:
            async with asyncio.timeout(seconds):
                if left > 0:
                    await enough.wait()
        except TimeoutError:
            pass
        return tuple(job for job in jobs if job.has_ended)

    @asynccontextmanager
    async def resting(self, job: Job) -> AsyncIterator[None]:
        """Give the job's place to others while the body waits. Several calls of one job may rest at the same time:
        the place is given back by the first and taken again by the last."""
        job._rests += 1
        if job.state == "running":
            job.state = "resting"
            self._leave()
        try:
            yield
        except asyncio.CancelledError:
            job._rests -= 1
            raise  # it ends: who waits for its end may hold the last place
        except BaseException:
            await self._return(job)
            raise
        await self._return(job)

    async def _return(self, job: Job) -> None:
        job._rests -= 1
        if job._rests == 0:
            await self._enter(self._returning)
            job.state = "running"

    async def cancel(self, job: Job) -> None:
        """End the job and all it owns; returns when they have ended."""
        if job._task is not None and not job.has_ended:
            job._task.cancel()
        await job.ended()

    async def close(self) -> None:
        """End everything."""
        for job in [job for job in self._jobs.values() if job.owner is None]:
            await self.cancel(job)

    async def _run(self, job: Job, work: Callable[[Job], Awaitable[Any]]) -> None:
        try:
            await self._enter(self._fresh)
            job.state = "running"
            job.result = await work(job)
            state: JobState = "done"
        except asyncio.CancelledError as error:
            state, job.error = "cancelled", error
        except Exception as error:
            state, job.error = "failed", error
        if job.state == "running":
            self._leave()
        await self._end_owned(job)
        self._finish(job, state)

    def _finish(self, job: Job, state: JobState) -> None:
        if job.has_ended:
            return
        job.state = state
        self._jobs.pop(job.name, None)
        if job.owner is not None:
            job.owner._owned.pop(job.name, None)
        job._ended.set()
        for call in job._when_ended:
            call()
        job._when_ended.clear()

    async def _end_owned(self, job: Job) -> None:
        """A second cancellation must not leave anybody behind."""
        while job._owned:
            for child in job.owned():
                if child._task is not None:
                    child._task.cancel()
            try:
                await asyncio.gather(*(child.ended() for child in job.owned()))
            except asyncio.CancelledError:
                continue

    async def _enter(self, line: deque[asyncio.Future[None]]) -> None:
        if self.active < self.max_active and not self._returning and (line is self._returning or not self._fresh):
            self._take()
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave()  # the place came at the same time as the end
            elif place in line:
                line.remove(place)
            raise

    def _take(self) -> None:
        self.active += 1
        self.peak = max(self.peak, self.active)

    def _leave(self) -> None:
        self.active -= 1
        for line in (self._returning, self._fresh):
            while line and self.active < self.max_active:
                place = line.popleft()
                if not place.done():
                    self._take()
                    place.set_result(None)
