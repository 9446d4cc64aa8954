"""A stranger's function, asked from outside: one input at a time, one JSON answer each, in one confined process.

    answers = ask_function(source, "rotate", [["abc"], ["xy"]], ServerLimits())
    right = [same(expected, answer) for expected, answer in zip(outputs, answers.values)]

Two named pipes in the sandbox's workspace carry the exchange (code_server.py is the other end). Both are opened here,
for reading and writing, before the sandbox starts: what a program later does to their names changes nothing, and no
opening can block. The sandbox itself is as closed as ever: no descriptor is passed in, and stdin is empty.

What is promised:
  * An input leaves when the answer to the one before has come. Each carries a fresh random ticket that the answer has
    to name; whoever speaks out of turn is not asked again, and what was not answered is wrong.
  * Expected values never leave this side. They are compared with what was parsed from JSON, so with plain values whose
    equality nobody could redefine: True is not 1, and 1 is not 1.0.
  * Whatever the solution does, the result is an Answers. Only a machine without a sandbox raises (SandboxUnavailable).
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import math
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perilune.rl.environments import code_server
from perilune.swarm.sandbox import Completed, Limits, SandboxUnavailable, open_sandbox
from perilune.swarm.sandbox.interpreter import find_interpreter
from perilune.swarm.sandbox.process import starter

CHUNK = 1 << 16
UP = b'"up"'
CLOSENESS = 1e-9
"""Relative and absolute, where a task does not ask for exact numbers."""
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
_starting = threading.Lock()


class NotJson:
    """Stands for an answer that is no value; equal to nothing that can be expected."""


NOTHING = NotJson()


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """What one solution may use. Beyond them it is stopped, and the inputs that are left count as wrong."""

    input_seconds: float = 5.0
    """For loading, and for each input."""
    total_seconds: float = 30.0
    cpu_seconds: float = 10.0
    """Of all its processes: a busy machine does not make a solution slower by this clock."""
    memory_bytes: int = 256 << 20
    answer_bytes: int = 1 << 18
    source_bytes: int = 1 << 18
    processes: int = 8
    """Threads of one process count where the kernel does the counting."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"limits.{name} is {value!r}, expected a positive, finite number")

    def of_sandbox(self) -> Limits:
        return Limits(
            wall_seconds=self.total_seconds,
            cpu_seconds=self.cpu_seconds,
            memory_bytes=self.memory_bytes,
            processes=self.processes,
            disk_bytes=16 << 20,
            output_bytes=1 << 16,
        )


@dataclass(frozen=True, kw_only=True)
class Answers:
    loaded: bool
    """The solution was executed and has the function."""
    values: tuple[Any, ...]
    """One for each input; NOTHING where it failed or was not asked any more."""
    ended: str
    """Why it was not asked to the end; empty if it was."""

    @property
    def complete(self) -> bool:
        return self.loaded and NOTHING not in self.values


class _Ended(Exception):
    """There will be no further answer."""


def ask_function(source: str, function: str, inputs: Sequence[Sequence[Any]], limits: ServerLimits) -> Answers:
    """Call `function` of `source` with each of `inputs`, in a sandbox of its own; from any thread."""
    if len(source.encode(errors="surrogatepass")) > limits.source_bytes:
        return Answers(loaded=False, values=(NOTHING,) * len(inputs), ended="the source is too long")
    with _starting:
        starter()  # two threads that make it at once would lose one, and with it what it started
    work = _in_folder(source, function, inputs, limits)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:  # a loop runs here already
        return thread.submit(asyncio.run, work).result()


async def _in_folder(source: str, function: str, inputs: Sequence[Sequence[Any]], limits: ServerLimits) -> Answers:
    folder = Path(tempfile.mkdtemp(prefix="perilune-code-"))
    try:
        async with contextlib.AsyncExitStack() as cleanup:
            pipes: list[int] = []
            for name in (code_server.ASK, code_server.ANSWER):
                path = folder / os.path.basename(name)
                os.mkfifo(path, 0o600)
                pipes.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
                cleanup.callback(os.close, pipes[-1])
            argv = [find_interpreter().base_executable, "-s", "-S", "-P", "-c", _server()]
            sandbox = open_sandbox(folder)
            run = asyncio.create_task(sandbox.run(argv, env=ENVIRONMENT, limits=limits.of_sandbox()))
            try:
                answers = await _converse(_Line(pipes, run, limits), source, function, inputs, limits)
            finally:
                run.cancel()
                await asyncio.wait({run})
                run.cancelled() or run.exception()  # seen, so that nobody is warned about it
            return answers
    finally:
        await asyncio.to_thread(remove, folder)


async def _converse(
    line: "_Line", source: str, function: str, inputs: Sequence[Sequence[Any]], limits: ServerLimits
) -> Answers:
    loaded, values, ended = False, [], ""
    await line.begin()
    try:
        async with asyncio.timeout(limits.input_seconds):
            loaded = await line.ask({"source": source, "function": function}) is True
        for arguments in inputs if loaded else ():
            async with asyncio.timeout(limits.input_seconds):
                values.append(await line.ask({"arguments": list(arguments)}))
    except _Ended as reason:
        ended = str(reason)
    except TimeoutError:
        ended = f"no answer within {limits.input_seconds:g} seconds"
    return Answers(loaded=loaded, values=(*values, *[NOTHING] * (len(inputs) - len(values))), ended=ended)


class _Line:
    """The two pipes on the event loop. The end of the run is the end of the line."""

    def __init__(self, pipes: Sequence[int], run: asyncio.Task[Completed], limits: ServerLimits) -> None:
        (self._ask, self._answer), self._run = pipes, run
        self._most = limits.answer_bytes
        self._held = b""

    async def begin(self) -> None:
        """Until the server is up. Nothing foreign has run yet, so what goes wrong here is not the solution's fault."""
        try:
            first = await self.read()
        except _Ended:
            first = b""
        if first != UP:
            done = await self._run  # raises what kept the sandbox from starting
            complaint = done.stderr.decode(errors="replace").strip()[-300:]
            raise SandboxUnavailable(f"the function server did not start: {done.stopped or complaint or 'no word'}")

    async def ask(self, question: dict[str, Any]) -> Any:
        """The value that was answered, NOTHING if the function failed."""
        if self._held or _some(self._answer):
            raise _Ended("it spoke before it was asked")
        ticket = secrets.token_hex(8)
        await self._write(json.dumps({"to": ticket, **question}).encode() + b"\n")
        reply = value_of(await self.read())
        if type(reply) is not dict or reply.get("to") != ticket:
            raise _Ended("its answer is not one to what it was asked")
        return reply.get("answer", NOTHING)

    async def read(self) -> bytes:
        while b"\n" not in self._held:
            if len(self._held) > self._most:
                raise _Ended(f"an answer is longer than {self._most} bytes")
            is_over = self._run.done()  # looked at first: what it wrote before its end counts
            if data := _some(self._answer):
                self._held += data
            elif is_over:
                raise _Ended("it ended before it answered")
            else:
                await self._ready(self._answer, writing=False)
        found, _, self._held = self._held.partition(b"\n")
        return found

    async def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._ask, rest[:CHUNK]) :]
            except BlockingIOError:
                if self._run.done():
                    raise _Ended("it ended before it was asked") from None
                await self._ready(self._ask, writing=True)

    async def _ready(self, descriptor: int, *, writing: bool) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        watch, unwatch = (
            (loop.add_writer, loop.remove_writer) if writing else (loop.add_reader, loop.remove_reader)
        )  # fmt: skip
        watch(descriptor, lambda: ready.done() or ready.set_result(None))
        try:
            await asyncio.wait({ready, self._run}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            unwatch(descriptor)


def _some(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, CHUNK)
    except BlockingIOError:
        return b""


@functools.cache
def _server() -> str:
    return Path(code_server.__file__).read_text(encoding="utf-8")


def remove(folder: Path) -> None:
    """Also what a program made hard to remove: deep folders, folders without rights."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", str(folder)], check=False, capture_output=True)


# Comparing -----------------------------------------------------------------------------------------------------------


def value_of(line: bytes) -> Any:
    """The value of one line of JSON; NOTHING for what is none, or holds NaN or a number too long to read."""
    try:
        return json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return NOTHING


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def same(expected: Any, given: Any, *, exact: bool = True) -> bool:
    """Equal values of equal types, all the way down. Not exact: a float is equal to a number that is close."""
    if not exact and float in (type(expected), type(given)) and _is_number(expected) and _is_number(given):
        try:
            return math.isclose(expected, given, rel_tol=CLOSENESS, abs_tol=CLOSENESS)
        except OverflowError:
            return expected == given
    if type(expected) is not type(given):
        return False
    if isinstance(expected, list):
        return len(expected) == len(given) and all(
            same(one, other, exact=exact) for one, other in zip(expected, given)
        )  # fmt: skip
    if isinstance(expected, dict):
        return expected.keys() == given.keys() and all(same(expected[key], given[key], exact=exact) for key in expected)
    return expected == given


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
