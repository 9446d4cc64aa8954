"""What a call of a model costs the runtime, without agents and journal: the HTTP client alone.

    python benchmarks/swarm_client.py            about half a minute
    python benchmarks/swarm_client.py --quick    without the slow one, the limited server

A scripted server runs in a process of its own; times are those of this process. Rows:

    raw          100 agents x 15 calls of 200 ms, streamed and not; ideal 3.0 s
    wide         300 agents x 14 calls of 200 ms; ideal 2.8 s
    history      CPU of a call with 2 and with 200 messages behind it
    limited      100 agents x 15 calls of 200 ms at a server that takes 20 at a time, else 429; ideal 15 s
    chaos        100 agents x 15 calls of 20 ms, 10 % of them faulty
    server       requests per second of CPU time that the scripted server answers
"""

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from perilune.swarm.client import ModelRequest
from perilune.swarm.http_client import HTTPClient, Limits
from perilune.swarm.messages import Message
from perilune.swarm.scripted import Behaviour, Chaos, ServerProcess, start_server

TOOLS = b'[{"type":"function","function":{"name":"no_op","description":"Nothing.","parameters":{"type":"object"}}}]'


@dataclass(frozen=True, kw_only=True)
class Settings:
    quick: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    calls: int
    wall: float
    cpu_ms_per_call: float
    refused: int = 0
    failed: int = 0
    note: str = ""


async def agent(client: HTTPClient, number: int, steps: int, history: Sequence[Message]) -> str:
    messages = [Message("system", "You are a worker."), Message("user", f"subtask {number}"), *history]
    text = ""
    for _ in range(steps):
        request = ModelRequest(agent=f"agent {number}", model="m", messages=messages, tools=TOOLS)
        reply = await client.complete(request)
        messages.append(reply.message)
        messages += [Message("tool", "ok", (), call.id) for call in reply.message.tool_calls]
        text = reply.message.text
    return text


def history_of(length: int) -> list[Message]:
    pairs = [
        (Message("assistant", f"thought {n} " * 10), Message("user", f"go on {n} " * 10)) for n in range(length // 2)
    ]
    return [message for pair in pairs for message in pair]


def measure(
    name: str,
    behaviour: Behaviour,
    *,
    agents: int,
    steps: int,
    stream: bool = True,
    history: int = 0,
    limits: Limits | None = None,
) -> tuple[Row, float]:
    """The row, and requests per second of the server's CPU time."""

    async def run(server: ServerProcess) -> Row:
        async with HTTPClient(base_url=server.base_url, api_key_env=None, stream=stream, limits=limits) as client:
            past = history_of(history)
            began, cpu = time.perf_counter(), time.process_time()
            work = [agent(client, number, steps, past) for number in range(agents)]
            answers = await asyncio.gather(*work, return_exceptions=True)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            failed = sum(not isinstance(answer, str) for answer in answers)
            refused = sum(state["refused"] for state in client.state())
            calls = agents * steps
            return Row(
                name=name, calls=calls, wall=wall, cpu_ms_per_call=1000 * cpu / calls, refused=refused, failed=failed
            )

    with start_server("worker", {"steps": steps - 1}, behaviour) as server:
        row = asyncio.run(run(server))
        asked = server.counts()["calls"]
        used = cpu_seconds(server.process.pid)
    return row, asked / used if used else 0.0


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; 0 where /proc is not there."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / 100


def main(settings: Settings) -> None:
    """Print the table."""
    rows: list[Row] = []
    slow = Behaviour(latency=0.2)
    row, per_second = measure("raw, streamed", slow, agents=100, steps=15)
    rows.append(row)
    rows.append(measure("raw, whole bodies", slow, agents=100, steps=15, stream=False)[0])
    rows.append(measure("wide, streamed", slow, agents=300, steps=14)[0])
    for length in (2, 200):
        rows.append(measure(f"history of {length}", Behaviour(), agents=20, steps=20, history=length)[0])
    if not settings.quick:
        limited, _ = measure("limited to 20", dataclasses.replace(slow, max_concurrent=20), agents=100, steps=15)
        note = f"{limited.wall / 15:.2f}x ideal, {100 * limited.refused / limited.calls:.1f} % refused"
        rows.append(dataclasses.replace(limited, note=note))
    chaos = Behaviour(latency=0.02, chaos=Chaos(share=0.1))
    limits = Limits(idle_seconds=1.0, first_pause=0.1)
    rows.append(measure("chaos, 10 %", chaos, agents=100, steps=15, limits=limits)[0])
    table = Table("", "calls", "wall s", "CPU ms per call", "refused", "failed agents", "")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.calls:,}",
            f"{row.wall:.2f}",
            f"{row.cpu_ms_per_call:.3f}",
            str(row.refused),
            str(row.failed),
            row.note,
        )
    console = Console()
    console.print(table)
    console.print(f"scripted server: {per_second:,.0f} requests per second of CPU time, cheap ones, start included")


if __name__ == "__main__":
    main(tyro.cli(Settings))
