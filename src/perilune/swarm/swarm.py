"""A swarm: one task, an orchestrator, as many sub-agents as it creates, and a journal that knows all of it.

    result = await Swarm(model="kimi-k2.5", base_url="https://.../v1").run("Compare ...")

`run` starts in a folder of its own, `resume` takes up a run whose process ended, however it ended: what the journal
holds is not done again. `Live` is the handle on a run while it lasts: watch it, steer it, cancel parts of it, approve
calls.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perilune.swarm import compose, orchestrator
from perilune.swarm.agent import Agent, Answer, Letter, end_left_open, work
from perilune.swarm.approvals import ApprovalDesk
from perilune.swarm.budget import Budget, Prices
from perilune.swarm.chronicle import Chronicle, artefact_of
from perilune.swarm.client import ModelClient
from perilune.swarm.critical_path import critical_path
from perilune.swarm.http_client import HTTPClient
from perilune.swarm.journal.event import Event, Journal, JournalError
from perilune.swarm.journal.sqlite import SQLiteJournal
from perilune.swarm.messages import clean
from perilune.swarm.place import JOURNAL
from perilune.swarm.policy import Policy
from perilune.swarm.results import Results
from perilune.swarm.rights import ANY, Rights
from perilune.swarm.run import Engine, Run
from perilune.swarm.sandbox import Sandbox
from perilune.swarm.scheduler import Job, Scheduler
from perilune.swarm.secrets import Secrets
from perilune.swarm.serial_collapse import serial_collapses
from perilune.swarm.settings import AgentSpec, SwarmConfig
from perilune.swarm.taint import Taint
from perilune.swarm.tools.tool import Tool


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How wide a run was: see `critical_path`."""

    total_steps: int
    critical_steps: int
    speed_up: float
    width: int
    efficiency: float
    warnings: tuple[str, ...]
    """Serial collapse: work that was done one after the other and need not have been."""


@dataclass(frozen=True, kw_only=True)
class SwarmResult:
    status: str
    answer: str
    """All of it, references filled in."""
    error: str | None
    folder: Path
    agents: int
    spent: Mapping[str, Any]
    """Budget of the run: limit, spent, reserved and excess by dimension."""
    parallelism: Parallelism
    """Steps, critical steps, width."""


class SwarmError(RuntimeError):
    """A run that cannot start or go on."""


class Swarm:
    """`model` alone suffices with a `client`; otherwise `base_url` names an OpenAI-compatible endpoint."""

    def __init__(
        self,
        config: SwarmConfig | None = None,
        *,
        model: str | None = None,
        base_url: str | None = None,
        api_key_env: str | None = "OPENAI_API_KEY",
        client: ModelClient | None = None,
        tools: Iterable[Tool] = (),
        policy: Policy | None = None,
        secrets: Secrets | None = None,
        prices: Prices | None = None,
        open_sandbox: Callable[[Path], Sandbox] | None = None,
        extras: Mapping[str, Any] | None = None,
        key: bytes | None = None,
        heads: Path | None = None,
        open_journal: Callable[[], Awaitable[Journal]] | None = None,
        open_engine: Callable[[Run], AbstractAsyncContextManager[Engine]] | None = None,
    ) -> None:
        """`key` seals the journal and `heads` keeps its last seal outside: see `journal.seal`. `open_journal` opens
        another journal than the one in the run's folder, `open_engine` another place for sub-agents than this loop."""
        if config is None:
            if model is None:
                raise SwarmError("a swarm needs a model: Swarm(model=..., base_url=...)")
            config = SwarmConfig(model=model)
        if client is None and base_url is None:
            raise SwarmError("a swarm needs an endpoint: base_url=..., or a client of its own")
        self.config = config if model is None else replace(config, model=model)
        self._base_url, self._api_key_env, self._client = base_url, api_key_env, client
        self._tools = {**orchestrator.TOOLS, **compose.TOOLS}
        for each in tools:
            if each.name in self._tools:
                raise SwarmError(f"two tools are called {each.name!r}")
            self._tools[each.name] = each
        self._policy = policy or Policy()
        self._secrets = Secrets.from_environment(os.environ) if secrets is None else secrets
        self._prices = prices or Prices()
        self._open_sandbox = open_sandbox
        self._extras = dict(extras or {})
        self._key, self._heads = key, heads
        self._open_journal, self._open_engine = open_journal, open_engine

    async def run(self, task: str, *, folder: Path | str) -> SwarmResult:
        """Do the task in a new folder, and wait for its end."""
        async with self.start(task, folder=folder) as live:
            return await live.finish()

    async def resume(self, folder: Path | str) -> SwarmResult:
        """Go on with the run in this folder, or tell how it ended."""
        async with self.start(None, folder=folder) as live:
            return await live.finish()

    @asynccontextmanager
    async def start(self, task: str | None, *, folder: Path | str) -> AsyncIterator[Live]:
        """A run to watch. `task` None resumes. Leaving the block before its end stops it; it can be resumed."""
        folder = Path(folder)
        if task is not None and not task.strip():
            raise SwarmError("the task is empty")
        async with AsyncExitStack() as stack:
            journal = await self._journal(task, folder)
            stack.push_async_callback(journal.close)
            client = self._client
            if client is None:
                client = HTTPClient(base_url=str(self._base_url), api_key_env=self._api_key_env)
                stack.push_async_callback(client.close)
            live = Live(self, journal, client, folder, task)
            if self._open_engine is not None and live._over is None:
                live.run.engine = await stack.enter_async_context(self._open_engine(live.run))
            stack.push_async_callback(live.stop)
            yield live

    async def _journal(self, task: str | None, folder: Path) -> Journal:
        """The journal of a new run (there must be none yet), or of one that goes on."""
        path = folder / JOURNAL
        if self._open_journal is None:
            if task is not None and path.exists():
                raise SwarmError(f"{folder} holds a run already: resume it, or choose another folder")
            if task is None and not path.exists():
                raise SwarmError(f"{folder} holds no run: there is no {JOURNAL}")
            folder.mkdir(parents=True, exist_ok=True)
            return SQLiteJournal.open(path, key=self._key, heads=self._heads)
        folder.mkdir(parents=True, exist_ok=True)
        journal = await self._open_journal()
        if (task is None) == bool(journal.chains()):
            return journal
        await journal.close()
        raise SwarmError(
            "the journal holds no run of this name" if task is None else "the journal holds a run of this name already"
        )


class Live:
    """One run while its process lives."""

    def __init__(self, swarm: Swarm, journal: Journal, client: ModelClient, folder: Path, task: str | None) -> None:
        past = list(journal.events()) if task is None else []
        chronicle = Chronicle(journal, past)
        config = swarm.config
        self.journal = journal
        self.run = Run(
            config=config,
            client=client,
            chronicle=chronicle,
            results=Results(journal),
            scheduler=Scheduler(config.max_active + 1),
            tools=swarm._tools,
            policy=swarm._policy,
            desk=ApprovalDesk(),
            secrets=swarm._secrets,
            prices=swarm._prices,
            folder=folder,
            open_sandbox=swarm._open_sandbox,
            extras=swarm._extras,
        )
        if past:
            for artefact in journal.artefacts():
                self.run.results.learn(artefact)
        self.budget = Budget.root(config.limits)
        self._numbers = itertools.count()
        self._task = _recorded_task(past) if task is None else clean(task)
        self._lives = 0
        """How many processes worked on the run before this one."""
        self._over = self._read_run_chain(past)
        self._job: Job | None = None

    @property
    def main(self) -> Agent:
        return self.run.agents["main"]

    async def finish(self) -> SwarmResult:
        """Begin, wait for the end, and tell of it."""
        if self._over is None:
            await self.begin()
            await self.ended()
        return await self._result()

    async def begin(self) -> None:
        """Start the orchestrator."""
        run = self.run
        await run.chronicle.record("run", "run_started", self._start_body())
        while run.chronicle.peek("run") is not None:  # read at the start
            run.chronicle.take("run", "approval", "control", "run_resumed")
        if self._lives:
            await run.chronicle.append("run", "run_resumed", {"life": self._lives})
        config = run.config
        models = frozenset({config.model, *config.models})
        # Hosts and folders are bounded by the tools that were given; a child's share of them by its parent's.
        rights = Rights(tools=frozenset(run.tools), models=models, network=ANY, depth=config.max_depth)
        self._main = Agent(
            id="main",
            spec=AgentSpec(name="main", system_prompt=config.system_prompt),
            parent=None,
            call=None,
            depth=0,
            model=config.model,
            rights=rights,
            budget=self.budget,
            tools=run.tools_for(rights),
            taint=Taint(),
            max_steps=config.main_steps,
        )
        run.add(self._main)

        async def one(job: Job) -> list[Answer]:
            self._main.job = job
            return await work(run, self._main, [self._task])

        self._job = run.scheduler.start("main", one)

    async def ended(self) -> None:
        """Wait for the orchestrator's end and write it down."""
        if self._job is None:
            raise SwarmError("the run has not begun")
        await self._job.ended()
        if self.run.is_stopping:
            return
        if self._job.error is not None and self._job.state == "failed":
            raise self._job.error
        await end_left_open(self.run, self.main)
        answer: Answer = self._job.result[0] if self._job.result else Answer(status="cancelled")
        result = answer.artefact.plain() if answer.artefact else None
        body = {"status": answer.status, "answer": result, "error": answer.error}
        self._over = await self.run.chronicle.append("run", "run_finished", body)

    async def stop(self) -> None:
        """End the process's part in the run; nothing is written down as cancelled."""
        self.run.is_stopping = True
        await self.run.scheduler.close()
        await self.run.close_places()

    # What a person does --------------------------------------------------------------------------------------------

    async def steer(self, agent: str, text: str) -> None:
        """Put a message before the agent's next step."""
        target = self._living(agent)
        event = await self._control("steer", agent, text)
        self.run.deliver(target, _letter(event))

    async def cancel(self, agent: str) -> None:
        """End an agent and all below it."""
        target = self._living(agent)
        await self._control("cancel", agent, "")
        self.run.cancelled.add(agent)  # in case it has yet to begin
        if target.job is not None:
            await self.run.scheduler.cancel(target.job)

    async def _control(self, action: str, agent: str, text: str) -> Event:
        text = self.run.secrets.mask(clean(text))
        body = {"action": action, "agent": agent, "text": text, "id": f"control-{next(self._numbers)}"}
        return await self.run.chronicle.append("run", "control", body)

    def _living(self, agent: str) -> Agent:
        found = self.run.agents.get(agent)
        if found is None or found.has_ended:
            raise SwarmError(f"no agent {agent!r} is at work")
        return found

    # Records -------------------------------------------------------------------------------------------------------

    def _read_run_chain(self, past: Iterable[Event]) -> Event | None:
        """Letters of a person to be read again, time that has passed, and the end if there is one."""
        over, seconds, began, last = None, 0.0, None, 0.0
        for event in past:
            if began is None or event.kind == "run_resumed":  # nobody worked between the lives of a run
                self._lives += 1
                seconds += 0.0 if began is None else max(0.0, last - began)
                began = event.time
            last = event.time
            if event.chain != "run":
                continue
            if event.kind == "run_finished":
                over = event
            elif event.kind == "approval":
                self.run.desk.restore(event.read())
            elif event.kind == "control":
                next(self._numbers)
                body = event.read()
                if body["action"] == "steer":
                    self.run.letters.setdefault(body["agent"], []).append(_letter(event))
                else:
                    self.run.cancelled.add(body["agent"])
        if began is not None:
            self.budget.restore(seconds=seconds + max(0.0, last - began))
        return over

    def _start_body(self) -> dict[str, Any]:
        config = asdict(self.run.config)
        limits = config.pop("limits")
        return {
            "task": self._task,
            "model": config["model"],
            "settings": config,
            "tools": {n: hashlib.sha256(t.declaration).hexdigest() for n, t in sorted(self.run.tools.items())},
            "limits": limits,
            "seed": config["seed"],
        }

    async def _result(self) -> SwarmResult:
        if self._over is None:
            raise SwarmError("the run was stopped before its end: resume it")
        body = self._over.read()
        artefact = artefact_of(body["answer"])
        answer = await self.journal.get(artefact.sha256) if artefact else b""
        events = list(self.journal.events())
        return SwarmResult(
            status=body["status"],
            answer=answer.decode("utf-8", "replace"),
            error=body["error"],
            folder=self.run.folder,
            agents=sum(event.kind == "started" for event in events),
            spent=self.budget.snapshot(),
            parallelism=parallelism(events),
        )


def parallelism(events: Iterable[Event]) -> Parallelism:
    events = list(events)
    path = critical_path(events)
    return Parallelism(
        total_steps=path.total_steps,
        critical_steps=path.critical_steps,
        speed_up=path.speed_up,
        width=path.width,
        efficiency=path.efficiency,
        warnings=tuple(str(each) for each in serial_collapses(events)),
    )


def _recorded_task(past: list[Event]) -> str:
    if not past or past[0].kind != "run_started":
        raise JournalError("the journal does not begin with a run: it was stopped before its first event; start anew")
    return past[0].read()["task"]


def _letter(event: Event) -> Letter:
    body = event.read()
    return Letter(id=body["id"], sender="user", step=None, text=body["text"])
