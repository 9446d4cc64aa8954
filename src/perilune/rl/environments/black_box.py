"""Agents that are programs: any process that speaks to an OpenAI-compatible server, unchanged, as an environment.

    BlackBox(command=("python", "my_agent.py"), arithmetic=Arithmetic())

For every episode the command is started anew, with OPENAI_BASE_URL and OPENAI_API_KEY in its environment, which lead to
the policy (gateway.py), and one JSON object on stdin:

    {"prompt": "23 + 58 = ?", "messages": [{"role": "user", "content": "23 + 58 = ?"}], "tools": []}

That is what the policy would be asked without an agent; the answer that is expected is not in it. What the program
writes to stdout is its answer, and becomes the last message of the transcript. Tasks and judge are those of another
environment, so any verifier that reads a transcript judges an agent, now and when it is replayed.

How it ends: the program exits, or `seconds` are over. It is then killed with every process of its group, and a program
that was killed has no answer. One that exits with an error is judged by what it wrote, unless it never asked the
policy anything: that is a fault of the program, and costs the episode. Facets beside those of the verifier: ended (1 if
it exited by itself and without an error) and calls.

An environment with tasks of its own calls `play_program` in its episode. Programs run with the rights of this process:
use ones you trust.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from perilune.rl.environment import Environment, EpisodeOver, Message, Serves, Split, Talk, Task, judged
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.environments.copying import Copying
from perilune.rl.environments.logic import Logic
from perilune.rl.environments.word_problems import WordProblems

LONGEST_ANSWER = 1 << 16
"""Bytes of stdout that are kept: the last ones."""
SHOWN_ERROR = 400
"""Characters of stderr that an error shows: the last ones."""
CHUNK = 1 << 16
LEFT_SECONDS = 1.0
"""For what a process outside the group still writes."""
LOOK_SECONDS = 0.1
PLAIN_AGENT = (sys.executable, "-m", "perilune.rl.environments.plain_agent")


class AgentFailed(RuntimeError):
    """The program could not do anything; the message has the end of what it wrote to stderr."""


@dataclass(frozen=True, kw_only=True)
class BlackBox:
    """One of the environments below gives tasks and judge."""

    name: str = "black_box"
    command: tuple[str, ...] = ()
    """The program and its arguments; empty: the plain agent that comes with Perilune, which asks once."""
    seconds: float = 300.0
    """For one episode."""
    copying: Copying | None = None
    arithmetic: Arithmetic | None = None
    word_problems: WordProblems | None = None
    logic: Logic | None = None

    def __post_init__(self) -> None:
        if isinstance(self.command, str) or not all(isinstance(each, str) and each for each in self.command):
            raise ValueError(
                f"black_box.command is {self.command!r}, expected a program and its arguments, each a text of its own"
            )
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"black_box.seconds is {self.seconds!r}, expected more than 0")
        chosen = [name for name in _questions() if getattr(self, name) is not None]
        if len(chosen) != 1:
            raise ValueError(
                f"black_box has {len(chosen)} kinds of tasks ({', '.join(chosen) or 'none'}), expected one of "
                f"{', '.join(_questions())}: --set 'environments.black_box.arithmetic={{}}'"
            )

    @property
    def questions(self) -> Environment:
        """The environment that gives tasks and judge."""
        return next(found for name in _questions() if (found := getattr(self, name)) is not None)

    def task(self, number: int, split: Split) -> Task:
        return self.questions.task(number, split)

    async def episode(self, task: Task, talk: Talk) -> None:
        await play_program(self.command or PLAIN_AGENT, await opening(self.questions, task), talk, seconds=self.seconds)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        return judged(self.questions, task, messages, ())

    def judge_events(
        self, task: Task, messages: Sequence[Message], events: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, float]:
        facets = dict(judged(self.questions, task, messages, events))
        for event in events:
            if event.get("kind") == "program":
                facets |= {"ended": float(event["exit"] == 0), "calls": float(event["calls"])}
        return facets


def _questions() -> list[str]:
    return [each.name for each in fields(BlackBox) if each.name not in ("name", "command", "seconds")]


# --- what an agent is given -------------------------------------------------------------------------------------------


class _Opening:
    """A talk that ends where the policy would be asked for the first time, and remembers with what."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.tools: list[Mapping[str, Any]] = []

    def add(self, *messages: Message) -> None:
        self.messages += messages

    async def ask(
        self, *, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Message:
        self.tools += tools
        raise EpisodeOver


async def opening(environment: Environment, task: Task) -> dict[str, Any]:
    """What the policy would be asked first, as JSON for a program."""
    talk = _Opening()
    with contextlib.suppress(EpisodeOver):
        await environment.episode(task, talk)  # pyrefly: ignore[bad-argument-type]  it has what is used before an answer
    texts = [message["content"] for message in talk.messages if isinstance(message.get("content"), str)]
    return {"prompt": "\n".join(texts), "messages": talk.messages, "tools": talk.tools}


# --- the program ------------------------------------------------------------------------------------------------------


async def play_program(command: Sequence[str], given: Mapping[str, Any], talk: Talk, *, seconds: float) -> str:
    """Run a program against the policy; its answer is returned, and added to the talk as the last message."""
    if not isinstance(talk, Serves):
        raise AgentFailed("this talk serves no programs: play it in a run")
    asked = len(talk.messages)
    async with talk.served() as access:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_KEY": access.api_key,
            "NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1"))),
        }
        ended = await run_program(command, json.dumps(given).encode(), environment, seconds=seconds)
    calls = sum(message.get("role") == "assistant" for message in talk.messages[asked:])
    if not calls and ended.exit_code not in (0, None):
        told = ended.errors.strip()[-SHOWN_ERROR:]
        raise AgentFailed(
            f"{command[0]!r} exited with {ended.exit_code} before it asked the policy anything: {told or 'no message'}"
        )
    answer = "" if ended.exit_code is None else ended.output.strip()
    talk.note({"kind": "program", "exit": ended.exit_code, "calls": calls})
    talk.add({"role": "assistant", "content": answer})
    return answer


@dataclass(frozen=True, kw_only=True)
class Ended:
    exit_code: int | None
    """None: it was killed because its time was over."""
    output: str
    errors: str


async def run_program(
    command: Sequence[str], given: bytes, environment: Mapping[str, str], *, seconds: float
) -> Ended:  # fmt: skip
    """Start a program in a process group of its own, and kill all of the group when it ends or its time is over."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise AgentFailed(f"{command[0]!r} cannot be started: {error}") from error
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output, errors = bytearray(), bytearray()
    streams = [
        asyncio.ensure_future(_write(process.stdin, given)),
        asyncio.ensure_future(_read(process.stdout, output)),
        asyncio.ensure_future(_read(process.stderr, errors)),
    ]
    is_late = False
    try:
        async with asyncio.timeout(seconds):
            await _exited(process)
    except TimeoutError:
        is_late = process.returncode is None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await _exited(process)
        # Nobody writes any more, unless a process has left the group: that one is not waited for.
        await asyncio.wait(streams, timeout=LEFT_SECONDS)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        process._transport.close()  # pyrefly: ignore[missing-attribute]  there is no other way to close its pipes
    code = None if is_late else process.returncode
    return Ended(exit_code=code, output=output.decode("utf-8", "replace"), errors=errors.decode("utf-8", "replace"))


async def _exited(process: asyncio.subprocess.Process) -> None:
    """Until the process has exited; `process.wait` of Python 3.11 also waits for whoever else holds its pipes."""
    waiting = asyncio.ensure_future(process.wait())
    try:
        while process.returncode is None and not waiting.done():
            await asyncio.wait([waiting], timeout=LOOK_SECONDS)
    finally:
        waiting.cancel()


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # it reads no further
        stream.write(data)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader, kept: bytearray) -> None:
    """All of it, so that the program never waits for a reader; the last bytes are kept."""
    while data := await stream.read(CHUNK):
        kept += data
        del kept[:-LONGEST_ANSWER]
