"""What the journal costs: CPU per event with 100 agents appending at once, and the time to verify a million events.

python benchmarks/journal.py [--events 1000000] [--agents 100]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import tempfile
import time
from pathlib import Path

from perilune.swarm.journal.sqlite import SQLiteJournal
from perilune.swarm.journal.verify import verify

KEY = bytes(32)


async def write(folder: Path, events: int, agents: int) -> dict[str, float]:
    """Every agent appends replies of a usual size, each after the one before was committed."""
    journal = SQLiteJournal.open(folder / "journal.db", key=KEY, heads=folder / "heads")
    body = {"step": 7, "finish": "tool_calls", "reads": ["ab" * 32], "tokens": None, "message": {"content": "x" * 300}}
    commits, stall = [0], 0.0
    journal.subscribe(lambda batch: commits.__setitem__(0, commits[0] + 1))

    async def agent(name: str) -> None:
        for _ in range(events // agents):
            await journal.append(name, "reply", body, {"seconds": 0.2, "attempts": 1, "prompt_tokens": 812})

    async def watch() -> None:
        nonlocal stall
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            stall = max(stall, time.perf_counter() - begun - 0.001)

    watcher = asyncio.create_task(watch())
    wall, processor = time.perf_counter(), time.process_time()
    await asyncio.gather(*(agent(f"main/agent-{number}") for number in range(agents)))
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    watcher.cancel()
    await journal.close()
    written = events // agents * agents
    return {
        "events": written,
        "events_per_second": round(written / wall),
        "cpu_ms_per_event": round(processor / written * 1e3, 4),
        "events_per_commit": round(written / commits[0], 1),
        "longest_stall_ms": round(stall * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--agents", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the result there")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        result: dict[str, object] = dict(asyncio.run(write(folder, chosen.events, chosen.agents)))
        begun, processor = time.perf_counter(), time.process_time()
        report = verify(folder / "journal.db", KEY, heads=folder / "heads")
        result |= {
            "verify_seconds": round(time.perf_counter() - begun, 2),
            "verify_cpu_seconds": round(time.process_time() - processor, 2),
            "intact": report.intact,
            "megabytes": round((folder / "journal.db").stat().st_size / 1e6),
            "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()},
            "sqlite": sqlite3.sqlite_version,
        }
    for field, value in result.items():
        print(f"{field:20} {value}")
    if chosen.json:
        chosen.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
