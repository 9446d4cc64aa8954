"""One of two Ray workers is killed: how long its agents wait for another, and whether anything was done twice.

    python benchmarks/swarm_ray.py [KILLS]

Starts its own PostgreSQL server on a Unix socket, as an ordinary user when run by root. A tool of the agents writes a
line for every call, so that a call that ran twice is seen; calls of the model are counted at the server.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from perilune.swarm.http_client import HTTPClient
from perilune.swarm.journal.event import Event
from perilune.swarm.journal.postgres import agent_of, verify_run
from perilune.swarm.policy import Policy, Rule
from perilune.swarm.scale.leased import open_run
from perilune.swarm.scale.orders import Plan, Workplace
from perilune.swarm.scale.ray_engine import RayEngine, open_ray_engine, start_ray
from perilune.swarm.scripted import Behaviour, ServerProcess, start_server
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.swarm import Live, Swarm
from perilune.swarm.tools.tool import Tool, ToolContext, tool

KEY = bytes(range(32))
AGENTS, STEPS = 20, 6
POLICY = Policy((Rule(tool="leave_trace", decision="allow"),))


@dataclass(kw_only=True)
class Lost:
    """Over all kills."""

    kills: int = 0
    slowest_reclaim: float = 0.0
    """Seconds from the kill until the last of the agents wrote again."""
    tools_run_twice: int = 0
    calls_too_many: int = -(10**9)
    """Of the model, beyond those needed and those in flight at a kill; the worst kill."""
    same_answers: int = 0
    intact_journals: int = 0


def tools(trace: str) -> list[Tool]:
    @tool(effects="outside")
    async def leave_trace(context: ToolContext) -> str:
        """Write a line that can be counted."""
        with open(trace, "ab") as file:
            file.write(f"{context.agent}#{context.step}.{context.index}\n".encode())
        return "left"

    return [leave_trace]


@asynccontextmanager
async def workplace(base_url: str, trace: str) -> AsyncIterator[Workplace]:
    client = HTTPClient(base_url=base_url, api_key_env=None)
    try:
        yield Workplace(client=client, tools=tools(trace), policy=POLICY)
    finally:
        await client.close()


async def lose_workers(kills: int = 5) -> Lost:
    """As many runs on two workers, in each of which one worker is killed at a random time."""
    rng = random.Random(0)
    lost = Lost()
    options = {"agents": AGENTS, "steps": STEPS - 1, "tool": "leave_trace"}
    ray = start_ray()
    try:
        with postgres_server() as dsn, start_server("swarm", options, Behaviour(latency=0.2)) as server:
            for _ in range(kills):
                with tempfile.TemporaryDirectory() as folder:
                    await _lose_one(lost, dsn, server, Path(folder), after=rng.uniform(0.1, 1.2))
    finally:
        ray.shutdown()
    return lost


async def _lose_one(lost: Lost, dsn: str, server: ServerProcess, folder: Path, *, after: float) -> None:
    server.reset()
    trace, run = str(folder / "trace"), uuid.uuid4().hex
    config = SwarmConfig(model="scripted")
    plan = Plan(
        dsn=dsn,
        run=run,
        key=KEY,
        config=config,
        folder=str(folder),
        workplace="swarm_ray:workplace",
        options={"base_url": server.base_url, "trace": trace},
    )
    engines: list[RayEngine] = []
    swarm = Swarm(
        config,
        base_url=server.base_url,
        api_key_env=None,
        tools=tools(trace),
        policy=POLICY,
        open_journal=lambda: open_run(dsn, run=run, key=KEY),
        open_engine=open_ray_engine(plan, workers=2, on_open=engines.append),
    )
    async with swarm.start("Do the task.", folder=folder / "run") as live:
        killing = asyncio.ensure_future(_kill(live, engines[0], server, after))
        result = await live.finish()
        killed_at, agents, in_flight = await killing
        events = await live.journal.read()
    lost.kills += 1
    lost.slowest_reclaim = max(lost.slowest_reclaim, _reclaimed(events, agents, killed_at))
    lost.tools_run_twice += sum(count - 1 for count in Counter(Path(trace).read_text().split()).values())
    needed = 3 + AGENTS * STEPS
    lost.calls_too_many = max(lost.calls_too_many, server.counts()["calls"] - needed - in_flight)
    lost.same_answers += result.answer == f"all {AGENTS} parts are done"
    lost.intact_journals += (await asyncio.to_thread(verify_run, dsn, run, KEY)).intact


async def _kill(live: Live, engine: RayEngine, server: ServerProcess, after: float) -> tuple[float, list[str], int]:
    """Kill a worker; when, which agents it had, and how many calls of the model were in flight there."""
    while sum(map(len, engine.workers().values())) < AGENTS:
        await asyncio.sleep(0.01)
    await asyncio.sleep(after)
    pid, agents = max(engine.workers().items(), key=lambda each: len(each[1]))
    os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    replies = Counter(agent_of(event.chain) for event in await live.journal.read() if event.kind == "reply")
    asked = sum(server.counts()["conversations"].values())
    return killed_at, agents, min(len(agents), max(0, asked - sum(replies.values())))


def _reclaimed(events: list[Event], agents: list[str], killed_at: float) -> float:
    """Seconds until each of the agents that had not finished wrote again."""
    first: dict[str, float] = {}
    finished = {event.chain for event in events if event.kind == "finished" and event.time <= killed_at}
    for event in events:
        agent = agent_of(event.chain)
        if event.time > killed_at and agent in agents and agent not in finished:
            first.setdefault(agent, event.time - killed_at)
    return max(first.values(), default=0.0)


@contextmanager
def postgres_server() -> Iterator[str]:
    """The address of a server of one's own."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    path = os.pathsep.join([os.environ.get("PATH", ""), *(str(each) for each in reversed(places))])
    initdb, postgres = shutil.which("initdb", path=path), shutil.which("postgres", path=path)
    if initdb is None or postgres is None:
        raise SystemExit("needs PostgreSQL's initdb and postgres (make system-deps)")
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    options: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    try:
        subprocess.run([initdb, "-D", "data", "-U", "postgres", "-A", "trust", "--no-sync"], check=True, **options)
        server = subprocess.Popen([postgres, "-D", "data", "-k", str(folder), "-c", "listen_addresses="], **options)
        try:
            while not (folder / ".s.PGSQL.5432").exists():
                if server.poll() is not None:
                    raise SystemExit("PostgreSQL did not start")
                time.sleep(0.1)
            time.sleep(0.5)
            yield f"postgresql://postgres@/postgres?host={folder}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for name, value in asdict(asyncio.run(lose_workers(int(sys.argv[1]) if len(sys.argv) > 1 else 5))).items():
        print(f"{name:<20} {value:g}")
