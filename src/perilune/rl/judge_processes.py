"""Judges that compute long, in processes of their own: they keep no thread of this one from running.

    facets = judged_apart(environment, task, messages, events, seconds=60.0)

Python runs one thread at a time, and a rollout has two that matter: the one that feeds the engine and the one that
plays episodes. A drawing takes milliseconds to judge, hundreds come at once, and a thread for each would take turns
with those two. So an environment that says `judged_apart = True` is judged by one of a few processes, started when they
are needed and used for all that follows. Its judge and all it is given can be pickled; a judge is a pure function
already.

What is promised: the same facets, bit by bit, as in this process. A judge that raises costs its own episode; one that
takes longer than `seconds`, or dies, costs its episode and its process, and the next one starts another. Those that
wait for a process wait as long as it takes: their time begins when they have one. When this
process ends, however it does, the pipes close and the others leave. They import no torch.
"""

import contextlib
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any

from perilune.rl.environment import Environment, Message, Task, judged

PIECE = 1 << 12
"""Bytes written at once: a pipe that is ready takes them."""
MOST = 16
"""Processes; fewer where there are fewer cores, or where this process may use few (taskset)."""


class JudgeFailed(RuntimeError):
    """A judge that raised or died; the text says what."""


def judged_apart(
    environment: Environment,
    task: Task,
    messages: Sequence[Message],
    events: Sequence[Mapping[str, Any]],
    *,
    seconds: float,
) -> dict[str, float]:
    """The facets of an episode, from another process where the environment asks for one. Blocks: call it in a thread.

    TimeoutError after `seconds` of a process.
    """
    if not is_judged_apart(environment):
        return judged(environment, task, messages, events)
    return judge_processes().judged(environment, task, messages, events, seconds=seconds)


def is_judged_apart(environment: Environment) -> bool:
    return bool(getattr(environment, "judged_apart", False))


@cache
def judge_processes() -> "JudgeProcesses":
    """Those of this process."""
    return JudgeProcesses(max(1, min(MOST, cores() - 1)))


def cores() -> int:
    """That this process may run on: runs side by side on one machine are given some each."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class JudgeProcesses:
    """At most `most` processes; from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._idle: list[_Judge] = []
        self._count = 0
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Processes that are running."""
        return self._count

    def judged(
        self,
        environment: Environment,
        task: Task,
        messages: Sequence[Message],
        events: Sequence[Mapping[str, Any]],
        *,
        seconds: float,
    ) -> dict[str, float]:
        judge = self._taken()
        try:
            end = time.monotonic() + seconds
            kind, answer = judge.ask((environment, task, tuple(messages), tuple(events)), end)
        except BaseException as problem:
            judge.kill()
            with self._changed:
                self._count -= 1
                self._changed.notify()
            if isinstance(problem, (OSError, EOFError)) and not isinstance(problem, TimeoutError):
                raise JudgeFailed("the process of the judge died") from problem
            raise
        with self._changed:
            self._idle.append(judge)
            self._changed.notify()
        if kind == "failed":
            raise JudgeFailed(answer)
        return answer

    def close(self) -> None:
        with self._changed:
            for judge in self._idle:
                judge.kill()
            self._count -= len(self._idle)
            self._idle.clear()

    def _taken(self) -> "_Judge":
        with self._changed:
            while not self._idle and self._count >= self._most:
                self._changed.wait()  # each of those before us gives its process back in time
            if self._idle:
                return self._idle.pop()
            self._count += 1
        try:
            return _Judge()
        except BaseException:
            with self._changed:
                self._count -= 1
                self._changed.notify()
            raise


class _Judge:
    """One process, which answers one question after the other."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from perilune.rl.judge_processes import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **single, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,  # Ctrl-C does not reach it: the run decides when it has enough
        )

        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a process that reads nothing must not hold us up

    def ask(self, question: object, end: float) -> tuple[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        content = pickle.dumps(question)
        rest = memoryview(len(content).to_bytes(8, "little") + content)
        while rest:
            _wait_for(self._process.stdin, select.POLLOUT, end)
            rest = rest[os.write(self._process.stdin.fileno(), rest[:PIECE]) :]
        _wait_for(self._process.stdout, select.POLLIN, end)
        # Answers are short and written at once: what has begun to come is there.
        return _read(self._process.stdout)

    def kill(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert pipe is not None
                pipe.close()
        self._process.wait()


def main() -> None:
    """The program of a process: questions from standard input, answers to what was standard output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a judge that prints must not write between them
    with contextlib.suppress(EOFError):
        while True:
            question = _read(sys.stdin.buffer)
            try:
                answer = ("judged", judged(*question))
            except (Exception, SystemExit) as problem:
                answer = ("failed", f"{type(problem).__name__}: {problem}")
            content = pickle.dumps(answer)
            answers.write(len(content).to_bytes(8, "little") + content)
            answers.flush()


def _wait_for(pipe: IO[bytes], what: int, end: float) -> None:
    waiting = select.poll()  # not select(), which knows no descriptor above 1023
    waiting.register(pipe, what)
    if not waiting.poll(1000 * max(0.0, end - time.monotonic())):
        raise TimeoutError


def _read(source: IO[bytes]) -> Any:
    """One message; EOFError when the other side is gone."""
    length = int.from_bytes(_exactly(source, 8), "little")
    return pickle.loads(_exactly(source, length))


def _exactly(source: IO[bytes], count: int) -> bytes:
    content = source.read(count)
    if len(content) < count:
        raise EOFError
    return content
