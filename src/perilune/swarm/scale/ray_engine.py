"""Agents in a pool of Ray workers: many agents to a worker, orders to the least loaded, again to another when one dies.

The orchestrator and the scheduler stay in the process that started the run. It announces each sub-agent in the journal,
sets its allotment aside and sends an order. A worker that is lost is replaced; its agents go to others, who take them
when their leases have expired and go on from the journal. The fencing token of the lease keeps a worker that was only
silent from writing after that.

Ray starts on this machine's loopback address, without dashboard and without usage statistics, unless the program that
uses Perilune has started or joined a cluster before (`ray.init`); then workers run there, and the run's folder and the
PostgreSQL server must be reachable from it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from perilune.swarm.agent import Agent, Answer, Letter, start_body
from perilune.swarm.budget import BudgetExceeded, Reservation
from perilune.swarm.journal.postgres import agent_of
from perilune.swarm.run import Engine, Run
from perilune.swarm.scale.leased import LeasedJournal, is_below, unfinished
from perilune.swarm.scale.local_ray import EngineError, import_ray, importable_places, start_ray
from perilune.swarm.scale.orders import (
    Plain,
    Plan,
    allotment,
    answer_of,
    letter_of,
    more_for,
    order_of,
    plain_answer,
    settle,
)
from perilune.swarm.scale.shared_results import SharedResults

MOST_LOSSES = 3
"""An agent whose workers died that often is given up: it may be the reason."""


@dataclass(eq=False)
class Post:
    """A worker as the run sees it."""

    name: str
    actor: Any
    pid: int = 0
    orders: set[str] = field(default_factory=set)
    listening: asyncio.Task[None] | None = None


@dataclass(kw_only=True)
class Sent:
    """An order until its outcome is there."""

    agent: Agent
    order: Plain
    reserved: list[tuple[Reservation, dict[str, float]]]
    post: Post | None = None
    losses: int = 0
    questions: set[asyncio.Task[None]] = field(default_factory=set)
    """Which of its questions somebody is thinking about."""


class RayEngine:
    """Made by `open_ray_engine`."""

    def __init__(self, run: Run, journal: LeasedJournal, plan: Plan, workers: int, ray: Any) -> None:
        self.run, self.journal, self.plan = run, journal, plan
        self.results = run.results = SharedResults.after(run.results)
        self.lost_workers = 0
        self.failure: str | None = None
        self._ray = ray
        self._workers = workers
        self._numbers = itertools.count()
        self._posts: list[Post] = []
        self._hiring: set[asyncio.Task[None]] = set()
        self._why = ""
        self._sent: dict[str, Sent] = {}
        self._letters: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._actor_class = _actor_class(ray)

    async def open(self) -> None:
        for _ in range(self._workers):
            self._hire(attempts=1)
        await asyncio.gather(*self._hiring)
        if len(self._posts) < self._workers:
            raise EngineError(f"a worker cannot start: {self._why}")

    async def close(self) -> None:
        for task in [*self._hiring, *self._tasks, *(post.listening for post in self._posts if post.listening)]:
            task.cancel()
        closing = [asyncio.ensure_future(_result(post.actor.close.remote())) for post in self._posts]
        if closing:
            await asyncio.wait(closing, timeout=5)
        for post in self._posts:
            self._ray.kill(post.actor, no_restart=True)
        self._posts.clear()

    def workers(self) -> dict[int, list[str]]:
        """Agents by process of the worker that has them."""
        return {post.pid: sorted(post.orders) for post in self._posts}

    # Engine ----------------------------------------------------------------------------------------------------------

    async def perform(self, agent: Agent, tasks: Sequence[str], *, many: bool) -> list[Answer]:
        """All tasks of an agent, in a worker."""
        is_new = self.run.chronicle.peek(agent.id) is None
        sent: Sent | None = None
        outcome: Plain | None = None
        try:
            await self.run.chronicle.record(agent.id, "started", start_body(agent, None if many else tasks[0]))
            self.run.chronicle.drop(lambda chain: is_below(agent_of(chain), agent.id))  # its worker reads them
            waiting = sum(not each.has_ended and each.id not in self._sent for each in self.run.agents.values())
            allotted = allotment(agent, max(0, waiting - 2))  # itself and the one that waits for it are not others
            reserved = [(agent.budget.reserve(**allotted), allotted)]
            order = order_of(agent, tasks, many=many, allotted=allotted, is_new=is_new)
            order["cancelled"] = [name for name in self.run.cancelled if is_below(name, agent.id)]
            sent = self._sent[agent.id] = Sent(agent=agent, order=order, reserved=reserved)
            outcome = await self._conclude(sent)
            agent.answers.extend(answer_of(each) for each in outcome["answers"])
            if outcome["ending"] == "cancelled":
                raise asyncio.CancelledError
            if outcome["ending"] == "failed":
                raise RuntimeError(outcome["error"])
            return agent.answers
        except BudgetExceeded as error:
            answer = Answer(status="budget", error=str(error))
            await self._close_records(agent, answer)
            return [answer]
        except asyncio.CancelledError:
            if outcome is None and not self.run.is_stopping:
                await asyncio.shield(self._close_records(agent, Answer(status="cancelled")))
            raise
        finally:
            if sent is not None:
                del self._sent[agent.id]
                for question in sent.questions:
                    question.cancel()
                settle(agent.budget, sent.reserved, outcome["spent"] if outcome else None)
            agent.has_ended = True
            agent.budget.close()

    def deliver(self, agent: Agent, letter: Letter) -> bool:
        sent = self._sent.get(agent.id)
        if sent is None:
            return False
        sent.order["letters"].append(asdict(letter))  # for the next worker, should this one be lost
        if sent.post is not None:
            learned = self.results.news_for(sent.post.name)
            self._start(_result(sent.post.actor.deliver.remote(agent.id, asdict(letter), learned)))
        return True

    # Orders ----------------------------------------------------------------------------------------------------------

    async def _conclude(self, sent: Sent) -> Plain:
        """Send the order until some worker has done it."""
        agent = sent.agent
        while True:
            post = await self._least_loaded()
            outcome = await self._try(sent, post)
            if outcome is not None and outcome["ending"] != "broken":
                break
            if outcome is not None:
                self._why = str(outcome["error"])
            self._lose(post)
            sent.losses += 1
            sent.order["is_new"] = False
            if sent.losses == MOST_LOSSES:
                error = f"its worker was lost {MOST_LOSSES} times: {self._why or 'the process died'}"
                answer = Answer(status="failed", error=error)
                await self._close_records(agent, answer)
                return {"ending": "done", "answers": [plain_answer(answer)], "spent": None}
        for source in outcome["taint"]:
            agent.taint.add(source)
        self.results.hear(outcome["learned"], pass_on=True)
        for letter in outcome["letters"]:
            self._hand_up(agent.parent, letter)
        return outcome

    async def _try(self, sent: Sent, post: Post) -> Plain | None:
        """The outcome, or None when the worker was lost. Cancelled: the worker ends the agent before this returns."""
        name = sent.agent.id
        post.orders.add(name)
        sent.post = post
        if "seconds" in sent.order["allotted"]:
            sent.order["allotted"]["seconds"] = sent.agent.budget.left("seconds")
        work = asyncio.ensure_future(
            _result(post.actor.perform.remote({**sent.order, "learned": self.results.news_for(post.name)}))
        )
        is_cancelled = False
        try:
            while not work.done():
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    if work.cancelled():
                        raise
                    if not is_cancelled:
                        self._start(_result(post.actor.cancel.remote(name, leave=self.run.is_stopping)))
                    is_cancelled = True
            outcome = work.result()
            if is_cancelled and outcome["ending"] == "broken":
                raise asyncio.CancelledError
            return outcome
        except self._ray.exceptions.RayActorError as error:
            self._why = str(error).partition("\n")[0]
            if is_cancelled:
                self._lose(post)
                raise asyncio.CancelledError from None
            return None
        finally:
            sent.post = None
            post.orders.discard(name)

    async def _close_records(self, agent: Agent, answer: Answer) -> None:
        """Write the end of an agent, and of those below it, that no worker writes any more."""
        past = await self.journal.take(agent.id, patience=10 * self.plan.lease_seconds)
        for name in reversed(unfinished(past)):
            body = {"status": answer.status, "result": None, "error": answer.error, "reads": []}
            await self.journal.append(name, "finished", body)

    def _hand_up(self, parent: Agent | None, plain: Plain) -> None:
        """A letter from an agent elsewhere; the same one may come more than once."""
        if parent is not None and plain["id"] not in self._letters:
            self._letters.add(plain["id"])
            self.run.deliver(parent, letter_of(plain))

    # Workers ---------------------------------------------------------------------------------------------------------

    def _hire(self, *, attempts: int = 3) -> None:
        task = asyncio.create_task(self._open_post(attempts))
        self._hiring.add(task)
        task.add_done_callback(self._hiring.discard)

    async def _open_post(self, attempts: int) -> None:
        for attempt in range(attempts):
            await asyncio.sleep(attempt)
            name = f"{self.journal.worker}-{next(self._numbers)}"
            post = Post(name, self._actor_class.remote(self.plan, name))
            try:
                post.pid = await post.actor.open.remote()
            except self._ray.exceptions.RayError as error:
                self._why = str(getattr(error, "cause", None) or error)
                self._ray.kill(post.actor, no_restart=True)
                continue
            self._posts.append(post)
            post.listening = asyncio.create_task(self._listen(post))
            return

    async def _least_loaded(self) -> Post:
        while not self._posts:
            if not self._hiring:
                self._stop_run()
                raise asyncio.CancelledError
            await asyncio.wait(set(self._hiring), return_when=asyncio.FIRST_COMPLETED)
        return min(self._posts, key=lambda post: len(post.orders))

    def _stop_run(self) -> None:
        """Without workers the run stops where it is, and can be resumed; its agents have not failed."""
        self.failure = f"no worker is left: {self._why}"
        self.run.is_stopping = True
        job = self.run.agents["main"].job
        if job is not None:
            self._start(self.run.scheduler.cancel(job))

    def _lose(self, post: Post) -> None:
        if post not in self._posts:
            return
        self.lost_workers += 1
        self._posts.remove(post)
        self._ray.kill(post.actor, no_restart=True)  # it may be silent and not dead
        if not self.run.is_stopping:
            self._hire()

    async def _listen(self, post: Post) -> None:
        while True:
            try:
                items = await post.actor.news.remote()
            except self._ray.exceptions.RayError:
                return self._lose(post)
            for item in items:
                sent = self._sent.get(item["agent"])
                if sent is None:
                    continue
                if item["kind"] == "letter":
                    self._hand_up(sent.agent.parent, item["letter"])
                elif item["kind"] == "need":
                    self._start(_result(post.actor.reply.remote(item["number"], self._grant(sent, item["need"]))))
                else:
                    task = asyncio.create_task(self._approve(post, item))
                    sent.questions.add(task)
                    task.add_done_callback(sent.questions.discard)

    async def _approve(self, post: Post, item: Plain) -> None:
        verdict = await self.run.desk.ask(
            agent=item["by"], call=item["call"], tool=item["tool"], arguments=item["arguments"], reason=item["reason"]
        )
        answer = {"is_allowed": verdict.is_allowed, "by": verdict.by, "reason": verdict.reason, "scope": verdict.scope}
        answer["is_recorded"] = verdict.is_recorded
        await _quietly(_result(post.actor.reply.remote(item["number"], answer)))

    def _grant(self, sent: Sent, need: dict[str, float]) -> dict[str, float]:
        amounts = more_for(sent.agent.budget, need, len(self._sent))
        if amounts:
            sent.reserved.append((sent.agent.budget.reserve(**amounts), amounts))
            for dimension, amount in amounts.items():
                sent.order["allotted"][dimension] += amount
        return amounts

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(_quietly(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _result(reference: Any) -> Any:
    return await reference


async def _quietly(work: Any) -> None:
    """A worker that cannot be told is lost, and that is noticed where its outcome is awaited."""
    with suppress(Exception):
        await work


# Ray -----------------------------------------------------------------------------------------------------------------


def open_ray_engine(
    plan: Plan, *, workers: int, on_open: Callable[[RayEngine], None] = lambda engine: None
) -> Callable[[Run], AbstractAsyncContextManager[Engine]]:
    """For `Swarm(..., open_engine=...)`."""
    if workers < 1:
        raise ValueError(f"workers is {workers!r}, expected 1 or more")

    @asynccontextmanager
    async def opened(run: Run) -> AsyncIterator[Engine]:
        journal = run.chronicle.journal
        if not isinstance(journal, LeasedJournal):
            raise EngineError("the Ray engine needs a journal in PostgreSQL: --journal postgresql://USER@HOST/DATABASE")
        ray = import_ray()
        was_there = ray.is_initialized()
        if not was_there:
            # In a thread: it takes seconds, and on the main thread it would replace the handler of SIGTERM.
            await asyncio.to_thread(start_ray)
        engine = RayEngine(run, journal, plan, workers, ray)
        try:
            await engine.open()
            on_open(engine)
            yield engine
        except Exception:
            if engine.failure is None:
                raise
            raise EngineError(engine.failure) from None
        finally:
            await engine.close()
            if not was_there:
                await asyncio.to_thread(ray.shutdown)

    return opened


def _actor_class(ray: Any) -> Any:
    from perilune.swarm.scale.worker import Worker

    # Agents wait for models most of the time: a worker takes no core for itself, and any number of calls.
    return ray.remote(Worker).options(
        num_cpus=0,
        max_concurrency=100_000,
        max_restarts=0,
        max_task_retries=0,
        runtime_env={"env_vars": importable_places()},
    )


__all__ = ["EngineError", "RayEngine", "import_ray", "open_ray_engine", "start_ray"]
