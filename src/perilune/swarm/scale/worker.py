"""A worker: runs the agents it is ordered to run, many at a time, on its own loop. It knows nothing of Ray.

An order is done in four steps: take the agent by lease and read its past, build it as its parent did, let it work (what
the past holds is not done again), and return the outcome. Agents that an agent creates run in the same worker.

The model is asked through `_Purse`, which keeps the account between run and worker:

    too little left      more is asked of the run before the request goes out
    agent taken over     a request that the lost worker may have sent is paid before it is sent again; earlier attempts
                         of that same request are not known
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from perilune.swarm import compose, orchestrator
from perilune.swarm.agent import Agent, Answer, Letter, work
from perilune.swarm.approvals import ApprovalDesk, ApprovalRequest, Verdict
from perilune.swarm.budget import ACCOUNTS
from perilune.swarm.chronicle import Chronicle
from perilune.swarm.client import ModelClient, ModelReply, ModelRequest
from perilune.swarm.journal.event import Event, JournalError
from perilune.swarm.run import Run
from perilune.swarm.scale.leased import LeasedJournal, is_below, unfinished
from perilune.swarm.scale.orders import Plain, Plan, Workplace, agent_of_order, left_of, letter_of, plain_answer
from perilune.swarm.scale.shared_results import SharedResults
from perilune.swarm.scheduler import Job, Scheduler
from perilune.swarm.tools.tool import Tool

SPARE_CALLS = 4
"""Attempts that a request should find in the account."""


@dataclass(kw_only=True)
class Place:
    """One order while it is worked on."""

    order: Plain
    agent: Agent | None = None
    run: Run | None = None
    job: Job | None = None
    taken_over: set[str] = field(default_factory=set)
    """Agents that somebody else worked on before, until they ask their model for the first time."""
    letters: list[Letter] = field(default_factory=list)
    """To the parent."""
    is_cancelled: bool = False
    is_leaving: bool = False


class Worker:
    """One per process; all methods run on one loop."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan, self.name = plan, name
        self._stack = AsyncExitStack()
        self._places: dict[str, Place] = {}
        self._news: asyncio.Queue[Plain] = asyncio.Queue()
        self._questions: dict[int, asyncio.Future[Plain]] = {}
        self._numbers = itertools.count()
        self._endings: set[asyncio.Future[None]] = set()

    async def open(self) -> int:
        """Join the run; returns the process."""
        plan = self.plan
        self._workplace = await self._stack.enter_async_context(plan.open_workplace())
        self._tools: dict[str, Tool] = {**orchestrator.TOOLS, **compose.TOOLS}
        self._tools |= {each.name: each for each in self._workplace.tools}
        self._journal = await LeasedJournal.join(
            plan.dsn, run=plan.run, key=plan.key, worker=self.name, seconds=plan.lease_seconds
        )
        self._stack.push_async_callback(self._journal.close)
        self._journal.on_lost = self._lost
        self._results = SharedResults(self._journal)
        self._scheduler = Scheduler(plan.config.max_active + 1)
        return os.getpid()

    async def close(self) -> None:
        for place in list(self._places.values()):
            await self._end(place, leave=True)
        await self._stack.aclose()

    # What the run asks -----------------------------------------------------------------------------------------------

    async def perform(self, order: Plain) -> Plain:
        """All tasks of an agent. The outcome's `ending` is "done", "failed", "cancelled", or "broken" where this worker
        cannot write any more, and another one may."""
        place = Place(order=order)
        self._places[order["id"]] = place
        self._results.hear(order["learned"], pass_on=False)
        try:
            await self._start(place)
            if place.job is not None:
                await place.job.ended()
        except JournalError as error:
            return self._outcome(place, "failed", error)
        finally:
            del self._places[order["id"]]
            if place.run is not None:
                await place.run.close_places()
        if place.is_leaving:
            await self._journal.let_go(order["id"])
        if place.job is None:
            return self._outcome(place, "cancelled", None)
        return self._outcome(place, place.job.state, place.job.error)

    async def deliver(self, agent: str, letter: Plain, learned: list[Plain]) -> None:
        self._results.hear(learned, pass_on=False)
        place = self._places.get(agent)
        if place is not None and place.agent is not None:
            place.agent.inbox.append(letter_of(letter))
        elif place is not None:
            place.order["letters"].append(letter)

    async def cancel(self, agent: str, *, leave: bool) -> None:
        """End an order. `leave`: the run goes on another time, so nothing is written down."""
        place = self._places.get(agent)
        if place is not None:
            await self._end(place, leave=leave)

    async def news(self) -> list[Plain]:
        """What the run must hear of, as soon as there is something: letters to parents, and questions: for budget, for
        an approval."""
        items = [await self._news.get()]
        while not self._news.empty():
            items.append(self._news.get_nowait())
        return items

    async def reply(self, number: int, answer: Plain) -> None:
        """To a question."""
        waiting = self._questions.get(number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    # Orders ----------------------------------------------------------------------------------------------------------

    async def _start(self, place: Place) -> None:
        order = place.order
        past = await self._journal.take(order["id"], patience=10 * self.plan.lease_seconds)
        for artefact in await self._journal.newly_stored():
            self._results.learn(artefact)
        run = place.run = self._new_run(place, past)
        if not order["is_new"]:
            place.taken_over = set(unfinished(past))
            for event in await self._journal.read("run"):
                if event.kind == "approval" and is_below(event.read()["agent"], order["id"]):
                    run.desk.restore(event.read())
        agent = place.agent = agent_of_order(order, run)
        if agent.parent is not None:
            agent.parent.inbox = _Outbox(self, place)
        known = {event.read()["id"] for event in past if event.kind == "message" and event.chain == agent.id}
        agent.inbox.extend(letter_of(each) for each in order["letters"] if each["id"] not in known)
        run.add(agent)
        if place.is_cancelled:
            if not place.is_leaving and unfinished(past):
                body = {"status": "cancelled", "result": None, "error": None, "reads": []}
                await self._journal.append(agent.id, "finished", body)
            return

        async def one(job: Job) -> list[Answer]:
            agent.job = job
            return await work(run, agent, order["tasks"], many=order["many"])

        place.job = self._scheduler.start(agent.id, one)

    def _new_run(self, place: Place, past: list[Event]) -> Run:
        at: Workplace = self._workplace
        return Run(
            config=self.plan.config,
            client=_Purse(at.client, self, place),
            chronicle=Chronicle(self._journal, past),
            results=self._results,
            scheduler=self._scheduler,
            tools=self._tools,
            policy=at.policy,
            desk=_DistantDesk(self, place),
            secrets=at.secrets,
            prices=at.prices,
            folder=Path(self.plan.folder),
            open_sandbox=at.open_sandbox,
            extras=dict(at.extras),
            cancelled=set(place.order["cancelled"]),
        )

    async def _end(self, place: Place, *, leave: bool) -> None:
        place.is_cancelled, place.is_leaving = True, leave
        if place.run is not None:
            place.run.is_stopping = leave
        if place.job is not None:
            await self._scheduler.cancel(place.job)

    def _lost(self, agent: str) -> None:
        """Another worker has it: stop, and write nothing."""
        for place in list(self._places.values()):
            if is_below(agent, place.order["id"]):
                ending = asyncio.ensure_future(self._end(place, leave=True))
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)

    def _outcome(self, place: Place, ending: str, error: BaseException | None) -> Plain:
        agent = place.agent
        lines = agent.budget.snapshot() if agent is not None else {}
        return {
            "ending": "broken" if isinstance(error, JournalError) and self._journal.is_broken else ending,
            "error": None if error is None else str(error) or type(error).__name__,
            "answers": [plain_answer(each) for each in agent.answers] if agent is not None else [],
            "spent": {name: lines[name]["spent"] for name in ACCOUNTS if name in lines},
            "taint": list(agent.taint.sources) if agent is not None else [],
            "letters": [asdict(letter) for letter in place.letters],
            "learned": self._results.news_for("run"),
        }

    def tell(self, item: Plain) -> None:
        self._news.put_nowait(item)

    async def ask(self, kind: str, order: str, **question: Any) -> Plain:
        """A question to the run, on behalf of an order."""
        number = next(self._numbers)
        self._questions[number] = asyncio.get_running_loop().create_future()
        self.tell({"kind": kind, "agent": order, "number": number, **question})
        try:
            return await self._questions[number]
        finally:
            del self._questions[number]

    def has_written(self, agent: str) -> bool:
        return self._journal.has_written(agent)


class _Outbox(deque[Letter]):
    """The inbox of a parent in another process: what is put in goes there."""

    def __init__(self, worker: Worker, place: Place) -> None:
        super().__init__()
        self._worker, self._place = worker, place

    def append(self, letter: Letter) -> None:
        self._place.letters.append(letter)
        self._worker.tell({"kind": "letter", "agent": self._place.order["id"], "letter": asdict(letter)})


class _DistantDesk(ApprovalDesk):
    """Nobody is here to approve anything: the run is asked, where somebody may be."""

    def __init__(self, worker: Worker, place: Place) -> None:
        super().__init__()
        self._worker, self._place = worker, place
        self.attach("the run")

    async def _wait(self, request: ApprovalRequest) -> Verdict:
        asked = {"by": request.agent, "call": request.call, "tool": request.tool, "reason": request.reason}
        arguments = orjson.loads(request.arguments)
        verdict = await self._worker.ask("approval", self._place.order["id"], arguments=arguments, **asked)
        return Verdict(request=request, **verdict)


class _Purse:
    """A client that looks after the account of an order."""

    def __init__(self, client: ModelClient, worker: Worker, place: Place) -> None:
        self._client, self._worker, self._place = client, worker, place

    async def complete(self, request: ModelRequest) -> ModelReply:
        bound = sum(len(message.wire) + 1 for message in request.messages) + len(request.tools) + 2
        await self._see_to(request, bound)
        if request.agent in self._place.taken_over:
            self._place.taken_over.discard(request.agent)
            if request.meter is not None and not self._worker.has_written(request.agent):
                request.meter.begin(prompt_bound=bound, max_tokens=request.max_tokens)
                request.meter.end(None)
                await self._see_to(request, bound)
        return await self._client.complete(request)

    async def _see_to(self, request: ModelRequest, bound: int) -> None:
        run, root = self._place.run, self._place.agent
        if run is None or root is None:
            return
        need: dict[str, float] = {"calls": SPARE_CALLS, "steps": len(run.agents), "tokens": bound + request.max_tokens}
        price = run.prices.of(request.model)
        if price is not None:
            need["cost"] = price.cost(bound, request.max_tokens)
        allotted = self._place.order["allotted"]
        short = {
            name: amount - left
            for name, amount in need.items()
            if name in allotted and (left := left_of(root.budget, name)) < amount
        }
        if short:
            root.budget.grow(**await self._worker.ask("need", root.id, need=short))

    async def close(self) -> None:
        """The client belongs to the workplace."""


__all__ = ["Worker"]
