"""Calling a tool the way an agent does: raw arguments, checked, with a context of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.swarm.sandbox.contract import Completed, Limits, Sandbox
from perilune.swarm.tools.tool import Tool, ToolContext, ToolResult


def context_in(workspace: Path, *, sandbox: Sandbox | None = None, agent: str = "main", **extras: Any) -> ToolContext:
    return ToolContext(agent=agent, step=1, index=0, workspace=workspace, sandbox=sandbox, extras=extras)


async def call(tool: Tool, context: ToolContext, /, **arguments: Any) -> ToolResult:
    checked = tool.validate(arguments) if tool.validate else arguments
    result = await tool.call(context, checked)
    return result if isinstance(result, ToolResult) else ToolResult(text=result)


@dataclass(kw_only=True)
class FakeSandbox:
    """Remembers what it was asked to run and answers with what it was given."""

    answer: Completed = field(
        default_factory=lambda: Completed(exit_code=0, stdout=b"", stderr=b"", truncated=False, stopped=None)
    )
    asked: list[dict[str, Any]] = field(default_factory=list)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/workspace",
        env: Mapping[str, str] = {},
        limits: Limits,
        network: bool = False,
    ) -> Completed:
        self.asked.append(
            {"argv": list(argv), "stdin": stdin, "cwd": cwd, "env": dict(env), "limits": limits, "network": network}
        )
        return self.answer

    async def close(self) -> None:
        """Nothing is open."""
