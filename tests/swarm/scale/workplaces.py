"""Where workers of the tests work: a scripted model over HTTP, and tools that can be counted, asked for, or die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from perilune.swarm.http_client import HTTPClient
from perilune.swarm.policy import Policy, Rule
from perilune.swarm.scale.orders import Workplace
from perilune.swarm.tools.tool import Tool, ToolContext, tool


def tools(trace: str) -> list[Tool]:
    @tool(effects="none")
    def no_op(context: ToolContext) -> str:
        """Do nothing."""
        return f"nothing, {context.agent}"

    @tool(effects="outside")
    async def leave_trace(context: ToolContext) -> str:
        """Write a line that can be counted."""
        with open(trace, "ab") as file:
            file.write(f"{context.agent}#{context.step}.{context.index}\n".encode())
        await asyncio.sleep(0.05)
        return "left"

    @tool(effects="outside")
    def ask_first() -> str:
        """Something that a person must approve."""
        return "done"

    @tool(effects="none")
    def die() -> str:
        """End the process."""
        os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    return [no_op, leave_trace, ask_first, die]


def traces(trace: str | Path) -> list[str]:
    return Path(trace).read_text().split() if os.path.exists(trace) else []


@asynccontextmanager
async def workplace(base_url: str, trace: str) -> AsyncIterator[Workplace]:
    client = HTTPClient(base_url=base_url, api_key_env=None)
    try:
        yield Workplace(client=client, tools=tools(trace), policy=policy())
    finally:
        await client.close()


def policy() -> Policy:
    return Policy((Rule(tool="leave_trace", decision="allow"),))
