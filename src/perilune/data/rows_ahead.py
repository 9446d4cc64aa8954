"""Work of a run that is done ahead of it, in processes of their own.

`Ahead` asks `make(number)` for number = 0, 1, 2, ... of worker processes and keeps a few answers waiting. `make` is a
pure function, so who computes what, and when, changes nothing but the time. Workers are processes that run `main`, fed
through a pipe: when the run ends, also by SIGKILL, the pipe closes and they leave. They import no torch, and Ctrl-C
does not reach them: the run decides when it has enough.
"""

import contextlib
import fcntl
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

Answer = TypeVar("Answer")

_LATEST_MESSAGES = 2000  # characters of a worker's complaint that are repeated to the person
_PIPE_BYTES = 1 << 20  # pictures are megabytes, and every piece of them wakes a thread that the run has to wait for


class WorkerError(RuntimeError):
    """A worker ended without an answer."""


class Ahead(Generic[Answer]):
    """`ahead.get(number)` is `make(number)`, computed before it is asked for when numbers come in order.

    `make` must be picklable. With `num_workers` 0 it is called here, when asked. Close it, or use it in a `with`.
    """

    def __init__(self, make: Callable[[int], Answer], *, num_workers: int, depth: int = 2) -> None:
        self._make = make
        self._num_workers = num_workers
        self._depth = max(1, depth) * max(1, num_workers)
        self._workers: list[_Worker] = []
        self._waiting: dict[int, _Worker] = {}
        self._asked_up_to = 0

    def __enter__(self) -> "Ahead[Answer]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_waiting(self) -> int:
        """Numbers that were asked of workers and not yet taken."""
        return len(self._waiting)

    def get(self, number: int) -> Answer:
        if self._num_workers == 0:
            return self._make(number)
        if not self._workers:
            self._workers = [_Worker(self._make) for _ in range(self._num_workers)]
        # What was asked for before and jumped over is of no use, and would stay in memory.
        self._forget([each for each in self._waiting if each < number or number not in self._waiting])
        if number not in self._waiting:
            self._asked_up_to = number
        while self._asked_up_to < number + self._depth:
            worker = min(self._workers, key=lambda worker: worker.num_open)
            worker.ask(self._asked_up_to)
            self._waiting[self._asked_up_to] = worker
            self._asked_up_to += 1
        return self._waiting.pop(number).answer(number)

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._waiting.pop(number).answer(number)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers, self._waiting = [], {}


class _Worker:
    """One process, and a thread that keeps its pipe empty. Answers come in the order of the questions."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        package_parent = str(Path(__file__).resolve().parents[2])
        paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
        single = dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            # Not -m: the package imports this module too, and Python would warn of that in every complaint.
            [sys.executable, "-c", "from perilune.data.rows_ahead import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **single, "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,
        )
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, AttributeError):  # only Linux has it, and a machine may allow less
            fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._answers: queue.Queue[tuple[int, Any, str | None]] = queue.Queue()
        self._complaints = b""
        self._early: dict[int, Any] = {}
        self.num_open = 0
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._listen, daemon=True).start()
        self._send(make)

    def ask(self, number: int) -> None:
        self.num_open += 1
        self._send(number)

    def answer(self, number: int) -> Any:
        while number not in self._early:
            got, value, failure = self._answers.get()
            if failure is not None:
                self._answers.put((got, value, failure))  # there is no other answer to whoever asks again
                status = self._process.wait()
                said = self._complaints.decode("utf-8", "replace").strip()[-_LATEST_MESSAGES:]
                if status < 0:  # by a signal: what it said before is not why
                    said = (
                        "something killed it, perhaps for want of memory; fewer data.vision.workers need less, and "
                        f"--resume goes on from the last checkpoint{said and f'; it last said: {said}'}"
                    )
                raise WorkerError(f"a process that prepares rows failed (exit status {status}): {said or failure}")
            self._early[got] = value
        self.num_open -= 1
        return self._early.pop(number)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()

    def _send(self, value: Any) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # A worker that is gone is told by the reader, with its reason.
        with contextlib.suppress(BrokenPipeError):
            pickle.dump(value, pipe)
            pipe.flush()

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        try:
            while True:
                number, value = pickle.load(pipe)
                self._answers.put((number, value, None))
        except Exception as error:  # an answer cut off anywhere: whoever waits for it must be told
            if not isinstance(error, EOFError):  # it lives on, and would be waited for
                self._process.kill()
            self._answers.put((-1, None, repr(error)))

    def _listen(self) -> None:
        pipe = self._process.stderr
        assert pipe is not None
        with contextlib.suppress(OSError, ValueError):
            while piece := pipe.read1(4096):  # pyrefly: ignore
                self._complaints = (self._complaints + piece)[-_LATEST_MESSAGES:]


def serve(questions: IO[bytes], answers: IO[bytes]) -> None:
    """A worker's life: a function, then numbers, until the pipe closes."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        make = pickle.load(questions)
        while True:
            number = pickle.load(questions)
            pickle.dump((number, make(number)), answers, protocol=pickle.HIGHEST_PROTOCOL)
            answers.flush()


def main() -> None:
    # Whatever prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)
