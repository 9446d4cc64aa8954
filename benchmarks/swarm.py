"""The swarm's goals, measured against a scripted model server on this machine.

    python benchmarks/swarm.py                    all of it, some minutes on two cores
    python benchmarks/swarm.py wide kill          only these; `--list` names them

Every case runs in a process of its own; the model server is another process, so its time is not ours. The journal is
sealed and the live view runs in all of them. The peer of `wide` runs in the same process after us, when the package
`openai` is there. Rows of the cases that ran replace those in benchmarks/results/swarm.json.
"""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from perilune.swarm.budget import Limits
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.provider import Limits as CallLimits
from perilune.swarm.sandbox import open_sandbox
from perilune.swarm.scripted import Behaviour, Chaos, start_server
from perilune.swarm.settings import SwarmConfig
from perilune.swarm.swarm import JOURNAL, Swarm, SwarmResult
from perilune.swarm.tools.tool import Tool, ToolContext, tool
from perilune.swarm.view.server import View

RESULTS = Path(__file__).parent / "results"
KEY = bytes(range(32))
LATENCY = 0.2


@tool(effects="none")
def no_op() -> str:
    """Do nothing."""
    return "ok"


@tool(effects="none")
def list_items(count: int) -> str:
    """As many items, one on each line."""
    return "\n".join(f"number {number}" for number in range(count))


@dataclass(frozen=True, kw_only=True)
class Measured:
    metric: str
    unit: str
    ours: float
    bar: float | None = None
    """At most, or at least where `more_is_better`."""
    more_is_better: bool = False
    peer: float | None = None
    peer_name: str | None = None
    floor: float | None = None

    @property
    def is_met(self) -> bool | None:
        if self.bar is None:
            return None
        return self.ours >= self.bar if self.more_is_better else self.ours <= self.bar


# ---------------------------------------------------------------------------------------------------------------------
# Cases


async def wide(agents: int = 100, steps: int = 15) -> list[Measured]:
    """100 agents x 15 steps, 200 ms a call: one orchestrator turn gives out all of it."""
    with start_server("swarm", {"agents": agents, "steps": steps - 1}, Behaviour(latency=LATENCY)) as server:
        run = await _timed(server.base_url)
        peer_wall, peer_cpu, peer_stall = await _openai_loop(server.base_url, agents, steps)
    calls = run.result.spent["calls"]["spent"]
    ideal = LATENCY * run.result.parallelism.critical_steps
    peer = "a bare loop on the openai package, no journal"
    return [
        Measured(metric="wall", unit="s", ours=run.wall, bar=4.5, peer=peer_wall, peer_name=peer, floor=ideal),
        Measured(metric="CPU per step", unit="ms", ours=1000 * run.cpu / calls, bar=1.0, peer=peer_cpu, peer_name=peer),
        Measured(metric="longest stall", unit="ms", ours=1000 * run.stall, bar=50, peer=peer_stall, peer_name=peer),
        Measured(metric="against one after the other", unit="x", ours=LATENCY * calls / run.wall, more_is_better=True),
    ]


async def _openai_loop(base_url: str, agents: int, steps: int) -> tuple[float | None, float | None, float | None]:
    """The same conversations with the official client and nothing else: seconds, CPU ms per step, longest stall in ms.
    None where the package is not installed."""
    try:
        from openai import AsyncOpenAI
    except ImportError:
        return None, None, None
    declared: Any = [json.loads(no_op.declaration)]

    async def agent(client: AsyncOpenAI, number: int) -> None:
        task = f"subtask {number}: Do the task."
        messages: list[Any] = [{"role": "system", "content": "You work."}, {"role": "user", "content": task}]
        for _ in range(steps):
            reply = await client.chat.completions.create(model="scripted", messages=messages, tools=declared)
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})

    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=120) as client:
        wall, cpu = time.perf_counter(), time.process_time()
        async with _stalls() as stall:
            await asyncio.gather(*(agent(client, number) for number in range(agents)))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, 1000 * cpu / (agents * steps), 1000 * stall[0]


async def wider() -> list[Measured]:
    """300 agents x 14 steps."""
    with start_server("swarm", {"agents": 300, "steps": 13}, Behaviour(latency=LATENCY)) as server:
        run = await _timed(server.base_url)
    return [
        Measured(
            metric="wall", unit="s", ours=run.wall, bar=5.0, floor=LATENCY * run.result.parallelism.critical_steps
        ),
        Measured(metric="CPU per step", unit="ms", ours=1000 * run.cpu / run.result.spent["calls"]["spent"]),
        Measured(metric="peak memory", unit="MB", ours=_peak_mb(), bar=200),
        Measured(metric="longest stall", unit="ms", ours=1000 * run.stall, bar=150),
    ]


async def history(agents: int = 20, steps: int = 101) -> list[Measured]:
    """What a step costs with 200 messages behind it, against 2: the CPU time of the first and of the last steps of 20
    agents that take 101 steps each."""
    ratios = []
    for _ in range(3):
        marks = [time.process_time()]
        replies = 0

        def count(batch: list[Any], marks: list[float] = marks) -> None:
            nonlocal replies
            for event in batch:
                if event.kind == "reply" and event.chain != "main":
                    replies += 1
                    if replies % (agents * 5) == 0:
                        marks.append(time.process_time())

        replies = 0
        with start_server("swarm", {"agents": agents, "steps": steps - 1}, Behaviour(latency=0.005)) as server:
            await _timed(server.base_url, subscriber=count, subagent_steps=None)
        ratios.append((marks[-1] - marks[-2]) / (marks[2] - marks[1]))
    return [Measured(metric="CPU of a step at 200 messages / at 10", unit="x", ours=sorted(ratios)[1], bar=2.0)]


async def kill(kills: int = 20) -> list[Measured]:
    """kill -9 at random points, then resume; calls are counted at the server."""
    rng = random.Random(0)
    agents, steps = 20, 6
    worst, most, same, resumes = -(10**9), 0, 0, []
    with start_server("swarm", {"agents": agents, "steps": steps - 1}, Behaviour(latency=0.02)) as server:
        needed = (await _timed(server.base_url)).result
        calls_needed = needed.spent["calls"]["spent"]
        for _ in range(kills):
            server.reset()
            with tempfile.TemporaryDirectory() as folder:
                child = subprocess.Popen([sys.executable, __file__, "--child", "run", server.base_url, folder])
                await asyncio.sleep(0.5)
                while server.counts()["calls"] == 0:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(rng.uniform(0.0, 0.35))
                child.send_signal(signal.SIGKILL)
                child.wait()
                with SQLiteReader(Path(folder) / "run" / JOURNAL) as reader:
                    known = sum(event.kind == "reply" for event in reader.events())
                in_flight = server.counts()["calls"] - known  # asked, and not in the journal
                most = max(most, in_flight)
                began = time.perf_counter()
                result = await _swarm(server.base_url).resume(Path(folder) / "run")
                resumes.append(time.perf_counter() - began)
                await asyncio.sleep(0.1)
                worst = max(worst, server.counts()["calls"] - calls_needed - in_flight)
                same += result.answer == needed.answer
    return [
        Measured(metric="calls beyond needed and in flight", unit="", ours=worst, bar=0),
        Measured(metric="most calls in flight at a kill", unit="of 20 agents", ours=most, bar=agents),
        Measured(metric="same answer", unit=f"of {kills}", ours=same, bar=kills, more_is_better=True),
        Measured(metric="slowest resume, rest of the run included", unit="s", ours=max(resumes), bar=2.0),
    ]


async def limited() -> list[Measured]:
    """The server takes 20 calls at a time and refuses more."""
    agents, steps = 100, 8
    behaviour = Behaviour(latency=0.1, max_concurrent=20, retry_after=0.1)
    with start_server("swarm", {"agents": agents, "steps": steps - 1}, behaviour) as server:
        run = await _timed(server.base_url)
        counts = server.counts()
    optimal = 0.1 * (3 + agents * steps / 20)
    failed = _statuses(run).count("failed")
    return [
        Measured(metric="calls refused", unit="%", ours=100 * counts["refused"] / counts["calls"], bar=3.0),
        Measured(metric="time against the optimum", unit="x", ours=run.wall / optimal, bar=1.2),
        Measured(metric="agents that failed", unit="", ours=failed, bar=0),
    ]


async def budget() -> list[Measured]:
    """100 agents spend from one budget that is too small for them."""
    with start_server("swarm", {"agents": 100, "steps": 14}, Behaviour(latency=0.01)) as server:
        await _timed(server.base_url, limits=Limits(calls=500, tokens=2_000_000_000))
        counts = server.counts()
    return [
        Measured(metric="calls beyond 500, counted at the server", unit="", ours=max(0, counts["calls"] - 500), bar=0),
        Measured(metric="calls made", unit="", ours=counts["calls"]),
    ]  # fmt: skip


async def faults(runs: int = 4) -> list[Measured]:
    """10% of all calls are faulty: bad JSON, cut and stalled streams, odd ids, 5xx."""
    good = total = 0
    for seed in range(runs):
        chaos = Chaos(share=0.1, seed=seed)
        with start_server("swarm", {"agents": 100, "steps": 5}, Behaviour(latency=0.02, chaos=chaos)) as server:
            run = await _timed(server.base_url, client={"limits": CallLimits(idle_seconds=2.0, attempts=10)})
        answers = [text for agent, text in _answers(run) if agent != "main"]
        good += sum(text.startswith("answer to: subtask") for text in answers)
        total += 100
    return [
        Measured(
            metric="agents with the scripted answer", unit="%", ours=100 * good / total, bar=99.5, more_is_better=True
        )
    ]


async def items() -> list[Measured]:
    """10,000 items mapped over 100 agents, then merged under the context's limit."""
    with start_server("swarm_scripts:mapping", {}, Behaviour()) as server:
        run = await _timed(server.base_url, tools=(list_items,), limits=Limits(), context_tokens=32_000)
    return [
        Measured(
            metric="items answered", unit="", ours=run.result.answer.count("done"), bar=10_000, more_is_better=True
        ),
        Measured(metric="peak memory", unit="MB", ours=_peak_mb(), bar=200),
        Measured(metric="wall", unit="s", ours=run.wall),
    ]


async def same() -> list[Measured]:
    """The same script with random latencies: every chain of every agent ends in the same hash."""
    heads: list[dict[str, bytes]] = []
    for seed in range(50):
        with start_server("swarm", {"agents": 10, "steps": 4}, Behaviour(latency=(0.0, 0.02), seed=seed)) as server:
            run = await _timed(server.base_url, keep=True)
        with SQLiteReader(run.folder / JOURNAL) as reader:
            heads.append({chain: head for chain, (_, head) in reader.heads().items()})
        shutil.rmtree(run.folder)
    equal = sum(each == heads[0] for each in heads)
    return [Measured(metric="runs with equal heads", unit="of 50", ours=equal, bar=50, more_is_better=True)]


async def cancel() -> list[Measured]:
    """100 agents, each with a shell and its grandchild in the sandbox: cancelled, and killed with the runtime."""
    mark = f"29{os.getpid()}"
    left = []
    for how in ("cancel", "kill"):
        with start_server("swarm", {"agents": 100, "steps": 1, "tool": "sleeper"}, Behaviour()) as server:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--child", how, server.base_url, folder, mark]
                child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                assert child.stdout is not None
                child.stdout.readline()  # all of them sleep
                assert _processes(mark) >= 100, "the sleepers did not start"
                if how == "kill":
                    child.send_signal(signal.SIGKILL)
                else:
                    child.send_signal(signal.SIGUSR1)
                    child.stdout.readline()
                await asyncio.sleep(2.0)
                left.append(_processes(mark))
                child.kill()
                child.wait()
    return [
        Measured(metric="processes left 2 s after cancelling", unit="", ours=left[0], bar=0),
        Measured(metric="processes left 2 s after kill -9", unit="", ours=left[1], bar=0),
    ]


async def screen() -> list[Measured]:
    """100 agents write 5,000 events a second into a journal; Chromium shows them."""
    from perilune.swarm.view.measure import measure_view

    found = await asyncio.to_thread(measure_view, agents=100, events_per_second=5000, seconds=5)
    return [
        Measured(metric="event to screen, 95th percentile", unit="ms", ours=found["latency_p95"], bar=500),
        Measured(metric="CPU of the view", unit="%", ours=found["view_cpu_percent"], bar=10),
        Measured(metric="lateness of the swarm's loop, 95th percentile", unit="ms", ours=found["loop_late_p95"],
                 floor=found["loop_late_p95_without_view"]),
    ]  # fmt: skip


async def workers() -> list[Measured]:
    """Two Ray workers and PostgreSQL, one of them killed."""
    from swarm_ray import lose_workers

    lost = await lose_workers()
    return [
        Measured(metric="slowest reclaim", unit="s", ours=lost.slowest_reclaim, bar=10),
        Measured(metric="calls of tools made twice", unit="", ours=lost.tools_run_twice, bar=0),
        Measured(metric="model calls beyond needed and in flight", unit="", ours=lost.calls_too_many, bar=0),
        Measured(metric="same answer", unit=f"of {lost.kills}", ours=lost.same_answers, bar=lost.kills,
                 more_is_better=True),
    ]  # fmt: skip


CASES: dict[str, Callable[[], Awaitable[list[Measured]]]] = {
    each.__name__: each
    for each in (wide, wider, history, kill, limited, budget, faults, items, same, cancel, screen, workers)
}


# ---------------------------------------------------------------------------------------------------------------------
# Running one


@dataclass(kw_only=True)
class Timed:
    result: SwarmResult
    wall: float
    cpu: float
    stall: float
    folder: Path
    events: list[Any]
    artefacts: dict[str, bytes]


def _swarm(
    base_url: str, *, tools: tuple[Tool, ...] = (no_op,), client: dict[str, Any] | None = None, **changes: Any
) -> Swarm:
    from perilune.swarm.http_client import HTTPClient

    config = SwarmConfig(model="scripted", **changes)
    http = HTTPClient(base_url=base_url, api_key_env=None, **client) if client else None
    return Swarm(config, base_url=base_url, api_key_env=None, client=http, tools=tools, key=KEY, open_sandbox=None)


async def _timed(
    base_url: str, *, keep: bool = False, subscriber: Callable[[list[Any]], None] | None = None, **changes: Any
) -> Timed:
    folder = Path(tempfile.mkdtemp(prefix="perilune-bench-"))
    try:
        async with _swarm(base_url, **changes).start("Do the task.", folder=folder) as live:
            view = View(reader=SQLiteReader(folder / JOURNAL), journal=live.journal)
            view.start()
            if subscriber is not None:
                live.journal.subscribe(subscriber)
            wall, cpu = time.perf_counter(), time.process_time()
            async with _stalls() as stall:
                await live.begin()
                await live.ended()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            result = await live.finish()
            view.stop()
            await live.run.client.close()
        with SQLiteReader(folder / JOURNAL) as reader:
            events = list(reader.events())
            artefacts = {
                event.chain: reader.get(body["result"]["sha256"])
                for event in events
                if event.kind == "finished" and (body := event.read())["result"]
            }
        return Timed(
            result=result, wall=wall, cpu=cpu, stall=stall[0], folder=folder, events=events, artefacts=artefacts
        )
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def _stalls():
    worst = [0.0]

    async def watch() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            worst[0] = max(worst[0], time.perf_counter() - began - 0.005)

    task = asyncio.create_task(watch())
    try:
        yield worst
    finally:
        task.cancel()


def _statuses(run: Timed) -> list[str]:
    return [event.read()["status"] for event in run.events if event.kind == "finished"]


def _answers(run: Timed) -> list[tuple[str, str]]:
    return [(agent, data.decode("utf-8", "replace")) for agent, data in run.artefacts.items()]


def _peak_mb() -> float:
    """Of this process since its program began; ru_maxrss would count what the one that started it had."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def _processes(mark: str) -> int:
    """Processes on this machine with `sleep MARK` as their command."""
    found = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found += (entry / "cmdline").read_bytes().split(b"\0")[:2] == [b"sleep", mark.encode()]
            except OSError:
                continue
    return found


async def _child(what: str, base_url: str, folder: str, mark: str = "") -> None:
    """The part of a case that is killed from outside."""
    if what == "run":
        await _swarm(base_url).run("Do the task.", folder=Path(folder) / "run")
        return
    from perilune.swarm.sandbox import Limits as SandboxLimits

    asleep = asyncio.Event()
    count = 0

    @tool(effects="none")
    async def sleeper(context: ToolContext) -> str:
        """Sleep in the sandbox."""
        nonlocal count
        assert context.sandbox is not None
        running = asyncio.ensure_future(
            context.sandbox.run(
                ["sh", "-c", f"sh -c 'sleep {mark}; true'; true"], limits=SandboxLimits(wall_seconds=600)
            )
        )
        try:
            while _processes(mark) <= count and not running.done():
                await asyncio.sleep(0.2)
            count += 1
            if count >= 100 or _processes(mark) >= 100:
                asleep.set()
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        return "woke"

    config = SwarmConfig(model="scripted", tool_seconds=600)
    swarm = Swarm(config, base_url=base_url, api_key_env=None, tools=[sleeper], key=KEY, open_sandbox=open_sandbox)
    async with swarm.start("Do the task.", folder=Path(folder) / "run") as live:
        await live.begin()
        await asleep.wait()
        while _processes(mark) < 100:
            await asyncio.sleep(0.05)
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
        print("asleep", flush=True)
        await told.wait()
        await live.cancel("main")
        print("cancelled", flush=True)
        await asyncio.sleep(600)


# ---------------------------------------------------------------------------------------------------------------------
# All of it


async def _measure(case: Callable[[], Awaitable[list[Measured]]]) -> list[Measured]:
    return await case()


def main(arguments: list[str]) -> None:
    if arguments[:1] == ["--child"]:
        asyncio.run(_child(*arguments[1:]))
        return
    if arguments[:1] == ["--one"]:
        measured = asyncio.run(_measure(CASES[arguments[1]]))
        print("RESULT " + json.dumps([each.__dict__ for each in measured]), flush=True)
        return
    if arguments == ["--list"]:
        print("\n".join(f"{name:<10} {case.__doc__}" for name, case in CASES.items()))
        return
    unknown = [name for name in arguments if name not in CASES]
    if unknown:
        raise SystemExit(f"unknown case {unknown[0]!r}; expected some of {', '.join(CASES)}")
    from perilune.bench.rows import read_rows, write_rows  # imports torch: not in the measured processes

    rows = []
    for name in arguments or CASES:
        print(f"{name}: {CASES[name].__doc__}", flush=True)
        done = subprocess.run([sys.executable, __file__, "--one", name], stdout=subprocess.PIPE, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        if not lines:
            print(f"  failed (exit code {done.returncode})")
            continue
        for each in map(lambda plain: Measured(**plain), json.loads(lines[-1][7:])):
            verdict = "" if each.is_met is None else ("  met" if each.is_met else "  MISSED")
            bar = "" if each.bar is None else f"  (bar {'>=' if each.more_is_better else '<='} {each.bar:g})"
            row = _row(name, each)
            beside = (
                ""
                if each.peer is None
                else f"  {each.peer_name}: {each.peer:.3g}, {0 if row.ratio is None else row.ratio:.1f}x"
            )
            print(f"  {each.metric:<46} {each.ours:10.3f} {each.unit}{bar}{verdict}{beside}", flush=True)
            rows.append(row)
    path = RESULTS / "swarm.json"
    measured = {row.case for row in rows}
    kept = [row for row in read_rows(path) if row.case not in measured] if path.exists() else []
    write_rows([*kept, *rows], path)
    print(f"wrote {path}")


def _row(case: str, each: Measured) -> Any:
    from perilune.bench.rows import Row, ratio_of

    return Row(
        case=f"{case}: {CASES[case].__doc__}",
        metric=each.metric,
        unit=each.unit,
        ours=each.ours,
        peer=each.peer,
        peer_name=each.peer_name,
        ratio=ratio_of(each.ours, each.peer, lower_is_better=not each.more_is_better),
        floor=each.floor,
        device=f"{os.cpu_count()} CPU cores",
        versions={name: metadata.version(name) for name in ("aiohttp", "orjson")} | {"python": sys.version.split()[0]},
        commit=_commit(),
        date=datetime.now(UTC).date().isoformat(),
    )


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main(sys.argv[1:])
