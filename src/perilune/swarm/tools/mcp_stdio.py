"""A transport to an MCP server that runs as a child process and speaks through its stdin and stdout.

The package's own transport lets the server inherit parts of the environment and reads a line of any length. This one
gives the child exactly the variables that it is told, bounds the length of a message and the number of messages that
nobody asked for, keeps the last of stderr for people, and leaves no process behind: the child leads a process group
that is killed at the end, and the kernel kills the child if this process dies first.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import mcp_types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

Streams = tuple[MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]]

MESSAGE_LIMIT = 8 << 20
UNASKED_LIMIT = 5_000
"""Notifications, requests, answers to nothing and lines that are no JSON, between two answers that were waited for."""
UNASKED_BYTES = 64 << 20
STDERR_KEPT = 4_000
GRACE_SECONDS = 1.0


@dataclass(kw_only=True)
class Ended:
    """How a connection ended, for whoever owns it."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""
    stderr: bytes = b""

    def because(self, reason: str) -> None:
        if not self.event.is_set():
            self.reason = reason
            self.event.set()


@asynccontextmanager
async def stdio_transport(
    argv: Sequence[str], *, environment: Mapping[str, str], folder: Path | None, ended: Ended
) -> AsyncIterator[Streams]:
    """Start the server and yield its streams; `ended` is told when the connection is over, and why."""
    process = await asyncio.create_subprocess_exec(
        *_dying_with_us(argv),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        cwd=folder,
        start_new_session=True,
        limit=MESSAGE_LIMIT,
    )
    received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    outgoing, to_send = anyio.create_memory_object_stream[SessionMessage](0)
    asked: set[str] = set()
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_read, process, received, asked, ended)
            tasks.start_soon(_write, process, to_send, asked, ended)
            tasks.start_soon(_keep_stderr, process, ended)
            try:
                yield incoming, outgoing
            finally:
                tasks.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(process, politely=not ended.event.is_set())
        for stream in (received, incoming, outgoing, to_send):
            stream.close()


def _dying_with_us(argv: Sequence[str]) -> list[str]:
    if sys.platform == "linux" and (setpriv := shutil.which("setpriv")):
        return [setpriv, "--pdeathsig", "KILL", "--", *argv]
    return list(argv)


async def _read(
    process: asyncio.subprocess.Process,
    received: MemoryObjectSendStream[SessionMessage | Exception],
    asked: set[str],
    ended: Ended,
) -> None:
    """`asked` holds the ids of requests that wait for an answer."""
    assert process.stdout is not None
    unasked = size = 0
    async with received:
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # asyncio's word for a line beyond the limit
                return ended.because(f"it sent a message of more than {MESSAGE_LIMIT} bytes")
            if not line:
                return ended.because("it closed its output")
            unasked += 1
            size += len(line)
            try:
                message = mcp_types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            except ValueError:
                message = None  # programs print greetings; a flood of them is counted below
            is_answer = isinstance(message, mcp_types.JSONRPCResponse | mcp_types.JSONRPCError)
            if is_answer and repr(message.id) in asked:
                asked.discard(repr(message.id))
                unasked = size = 0
            if unasked > UNASKED_LIMIT or size > UNASKED_BYTES:
                return ended.because(
                    f"it sent more than {UNASKED_LIMIT} messages or {UNASKED_BYTES} bytes that nobody asked for"
                )
            if message is not None:
                try:
                    await received.send(SessionMessage(message))
                except (anyio.ClosedResourceError, anyio.BrokenResourceError):
                    return None


async def _write(
    process: asyncio.subprocess.Process,
    to_send: MemoryObjectReceiveStream[SessionMessage],
    asked: set[str],
    ended: Ended,
) -> None:
    assert process.stdin is not None
    async with to_send:
        async for each in to_send:
            if isinstance(each.message, mcp_types.JSONRPCRequest):
                asked.add(repr(each.message.id))
            try:
                process.stdin.write(each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await process.stdin.drain()
            except (OSError, RuntimeError):
                return ended.because("it closed its input")


async def _keep_stderr(process: asyncio.subprocess.Process, ended: Ended) -> None:
    assert process.stderr is not None
    while chunk := await process.stderr.read(65_536):
        ended.stderr = (ended.stderr + chunk)[-STDERR_KEPT:]


async def _stop(process: asyncio.subprocess.Process, *, politely: bool) -> None:
    assert process.stdin is not None
    process.stdin.close()
    if politely:
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_SECONDS):
                # Not process.wait(): that also waits for pipes which a grandchild may hold open.
                while process.returncode is None:
                    await asyncio.sleep(0.01)
    # Also when the server is gone: what it started is in its group.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    transport = getattr(process, "_transport", None)  # nothing public closes our ends of the pipes
    if transport is not None:
        transport.close()
