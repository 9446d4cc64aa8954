"""Programs that an agent runs: `shell` and `python`, in the sandbox and nowhere else.

Without a sandbox a call is refused with the reason; there is no other path to the machine. Inside there is no network,
no environment but the one given here, and nothing of the machine but its programs and the agent's own /workspace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from perilune.swarm.sandbox.contract import WORKSPACE, Completed, Limits, SandboxUnavailable
from perilune.swarm.sandbox.interpreter import python_argv
from perilune.swarm.tools.shown import OUTPUT_LIMIT, clipped, decoded
from perilune.swarm.tools.tool import ToolContext, ToolError, ToolResult, tool

ENVIRONMENT = {
    "HOME": WORKSPACE,
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
    "TERM": "dumb",
}
Seconds = Annotated[float, Field(gt=0, le=600, description="Stop it after this long.")]


@tool(effects="workspace", untrusted=True)
async def shell(
    context: ToolContext,
    command: Annotated[str, Field(min_length=1, max_length=100_000, description="For bash; pipes and && are fine.")],
    seconds: Seconds = 60,
) -> ToolResult:
    """Run a shell command in /workspace, your own folder, in a sandbox without network. Only files there stay."""
    if "\0" in command:
        raise ToolError("command holds a NUL character; no shell can run it")
    program = "bash" if Path("/bin/bash").exists() else "sh"
    return await run_program(context, [program, "-c", command], seconds=seconds)


@tool(effects="workspace", untrusted=True)
async def python(
    context: ToolContext,
    code: Annotated[
        str, Field(min_length=1, max_length=1_000_000, description="A whole program; print what you need.")
    ],
    seconds: Seconds = 60,
) -> ToolResult:
    """Run a Python program in /workspace, your own folder, in a sandbox without network. Only files there stay."""
    # The program comes through stdin: an argument could not hold a long one.
    source = code.encode("utf-8", "replace")
    return await run_program(context, [*python_argv(), "-"], seconds=seconds, stdin=source)


async def run_program(context: ToolContext, argv: list[str], *, seconds: float, stdin: bytes = b"") -> ToolResult:
    if context.sandbox is None:
        raise ToolError(f"there is no sandbox, and nothing runs outside of one: {missing_sandbox(context)}")
    try:
        done = await context.sandbox.run(argv, stdin=stdin, env=ENVIRONMENT, limits=Limits(wall_seconds=seconds))
    except SandboxUnavailable as error:
        raise ToolError(f"the sandbox cannot start, and nothing runs outside of one: {error}") from None
    return ToolResult(text=report(done), is_error=done.exit_code != 0 or done.stopped is not None)


def missing_sandbox(context: ToolContext) -> str:
    """Why this run has no sandbox, as whoever set it up said."""
    return str(context.extras.get("sandbox_missing", "this run was started without one"))


def report(done: Completed) -> str:
    """What the model sees: how it ended, then both streams, each with head and tail."""
    ended = f"stopped: {done.stopped}" if done.stopped else f"exit code {done.exit_code}"
    lines = [f"[{ended}{'; output was cut' if done.truncated else ''}]"]
    half = OUTPUT_LIMIT // 2
    if done.stdout:
        lines.append(clipped(decoded(done.stdout), half if done.stderr else OUTPUT_LIMIT - 100).rstrip("\n"))
    if done.stderr:
        lines += ["[stderr]", clipped(decoded(done.stderr), half - 100).rstrip("\n")]
    return "\n".join(lines)
