"""Runs of a scripted team on the Ray engine, and the same on this loop to compare with."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.swarm.http_client import HTTPClient
from perilune.swarm.journal.event import Event
from perilune.swarm.journal.postgres_reader import PostgresReader
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.scale.leased import open_run
from perilune.swarm.scale.orders import Plan
from perilune.swarm.scale.ray_engine import RayEngine, open_ray_engine
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.swarm import JOURNAL, Live, Swarm, SwarmResult
from tests.swarm.journal.appending import KEY
from tests.swarm.scale.workplaces import policy, tools

TASK = "Do all parts."


@dataclass(kw_only=True)
class Scaled:
    """One run in PostgreSQL: begun, resumed, read."""

    dsn: str
    base_url: str
    folder: Path
    config: SwarmConfig
    name: str
    workers: int = 2
    lease_seconds: float = 6.0
    workplace: str = "tests.swarm.scale.workplaces:workplace"

    @property
    def trace(self) -> Path:
        return self.folder / "trace"

    @asynccontextmanager
    async def start(self, task: str | None = TASK) -> AsyncIterator[tuple[Live, RayEngine]]:
        engines: list[RayEngine] = []
        options = {"base_url": self.base_url, "trace": str(self.trace)}
        plan = Plan(
            dsn=self.dsn,
            run=self.name,
            key=KEY,
            config=self.config,
            folder=str(self.folder),
            workplace=self.workplace,
            options=options,
            lease_seconds=self.lease_seconds,
        )
        client = HTTPClient(base_url=self.base_url, api_key_env=None)
        swarm = Swarm(
            self.config,
            client=client,
            tools=tools(str(self.trace)),
            policy=policy(),
            open_journal=lambda: open_run(self.dsn, run=self.name, key=KEY, seconds=self.lease_seconds),
            open_engine=open_ray_engine(plan, workers=self.workers, on_open=engines.append),
        )
        try:
            async with swarm.start(task, folder=self.folder) as live:
                yield live, engines[0]
        finally:
            await client.close()

    def run(self, meanwhile: Callable[[Live, RayEngine], Any] | None = None, task: str | None = TASK) -> SwarmResult:
        """The whole run; `meanwhile` is a coroutine function that acts on it."""

        async def all_of_it() -> SwarmResult:
            async with self.start(task) as (live, engine):
                acting = asyncio.ensure_future(meanwhile(live, engine)) if meanwhile else None
                result = await live.finish()
                if acting is not None:
                    await acting
                return result

        return asyncio.run(asyncio.wait_for(all_of_it(), 120))

    def events(self) -> list[Event]:
        with PostgresReader(self.dsn, self.name) as reader:
            return list(reader.events())

    def heads(self) -> dict[str, bytes]:
        return {event.chain: event.hash for event in self.events()}


def scaled(dsn: str, base_url: str, folder: Path, *, workers: int = 2, lease_seconds: float = 6.0, **config) -> Scaled:
    return Scaled(
        dsn=dsn,
        base_url=base_url,
        folder=folder,
        config=SwarmConfig(model="scripted", **config),
        name=uuid.uuid4().hex,
        workers=workers,
        lease_seconds=lease_seconds,
    )


def run_here(base_url: str, folder: Path, config: SwarmConfig) -> tuple[SwarmResult, dict[str, bytes]]:
    """The same team on this loop, with its journal in a file: the result and the head of every chain."""
    swarm = Swarm(
        config, base_url=base_url, api_key_env=None, tools=tools(str(folder / "trace")), policy=policy(), key=KEY
    )
    result = asyncio.run(asyncio.wait_for(swarm.run(TASK, folder=folder), 120))
    with SQLiteReader(folder / JOURNAL) as reader:
        return result, {event.chain: event.hash for event in reader.events()}
