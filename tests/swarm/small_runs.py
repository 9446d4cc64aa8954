"""A small run written by hand, event by event, for projections of the journal."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson

from perilune.swarm.journal.sqlite import SQLiteJournal
from tests.swarm.journal.appending import open_journal


class Writer:
    """Appends events in the words of a run."""

    def __init__(self, journal: SQLiteJournal) -> None:
        self.journal = journal

    async def run_started(self) -> None:
        body = {"task": "write", "model": "small", "settings": {}, "tools": {}, "limits": {}, "seed": 1}
        await self.journal.append("run", "run_started", body)

    async def started(self, agent: str, task: str | None, *, depth: int = 0, call: str | None = None) -> None:
        parent = agent.rpartition("/")[0] or None
        name = agent.rpartition("/")[2]
        body = {"parent": parent, "call": call, "name": name, "depth": depth, "model": "small", "task": task}
        await self.journal.append(agent, "started", body | {"system_prompt": "be good", "tools": [], "tainted": False})

    async def reply(self, agent: str, step: int, content: str = "", *calls: tuple[str, str], **tokens: Any) -> None:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [
                {"id": f"{name}:{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
                for n, (name, arguments) in enumerate(calls)
            ]
        kept = (await self.journal.put(orjson.dumps(tokens))).plain() if tokens else None
        body = {"step": step, "message": message, "finish": "tool_calls" if calls else "stop", "reads": []}
        note = {"seconds": 0.5, "attempts": 1, "prompt_tokens": 7, "completion_tokens": 3, "model": "small-1"}
        await self.journal.append(agent, "reply", body | {"tokens": kept}, note | {"weight_version": "w1"})

    async def outcome(self, chain: str, tool: str, status: str = "ok", **fields: Any) -> None:
        body = {"tool": tool, "call_id": f"{tool}:0", "status": status, "text": "seen", "result": None}
        body |= {"spawned": [], "joined": [], "untrusted": False} | fields
        await self.journal.append(chain, "outcome", body, {"seconds": 0.25})

    async def call_started(self, chain: str, tool: str, sha256: str = "aa") -> None:
        await self.journal.append(chain, "call_started", {"tool": tool, "arguments_sha256": sha256})

    async def finished(self, agent: str, status: str = "done", text: str | None = "found") -> None:
        result = (await self.journal.put(text.encode())).plain() if text is not None else None
        error = None if status == "done" else "it broke"
        await self.journal.append(agent, "finished", {"status": status, "result": result, "error": error, "reads": []})


async def write_good_run(writer: Writer) -> None:
    """The root asks one agent, which searches; nothing to complain about."""
    await writer.run_started()
    await writer.started("main", "write")
    await writer.reply("main", 0, "", ("assign_task", '{"agent":"r","prompt":"find"}'))
    await writer.started("main/r-0.0", "find", depth=1, call="0.0")
    await writer.reply("main/r-0.0", 0, "", ("search", '{"query":"moon"}'))
    await writer.outcome("main/r-0.0#0.0", "search")
    await writer.reply("main/r-0.0", 1, "I searched and found it.")
    await writer.finished("main/r-0.0")
    await writer.outcome("main#0.0", "assign_task", spawned=["main/r-0.0"], joined=["main/r-0.0"])
    await writer.reply("main", 1, "done")
    await writer.finished("main")
    await writer.journal.append("run", "run_finished", {"status": "done", "answer": None, "error": None})


def written_run(folder: Path, write=write_good_run) -> Path:
    """The path of a journal that `write` filled."""

    async def fill() -> None:
        async with open_journal(folder) as journal:
            await write(Writer(journal))

    asyncio.run(fill())
    return folder / "journal.db"
