"""Names the rank that others wait for, and ends the run, when a world of ranks stands still.

A rank that stops leaves all others waiting inside a collective operation, where they cannot speak. So each process has
a thread that hears of every phase of training. When it hears nothing for `timeout_s`, it meets the threads of the other
ranks by `monitored_barrier` on a gloo group of their own:

    some do not come       their processes are stopped or gone: they are named
    all come               each tells where its main thread is and what its flight recorder holds (flight_recorder.py);
                           guilty are those that have not come to the operation in which others wait, or, where the
                           recorder knows of none, those that are outside of torch.distributed

Then every process writes what was found to standard error and ends with EXIT_CODE, so that torchrun can start again. A
rank that moves on in the meantime calls the alarm off. Code that never lets go of the interpreter silences its thread:
such a process is named as one that does not come.
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from perilune.train import ranks
from perilune.train.background_save import THREAD
from perilune.train.flight_recorder import Operation, Recorded, recorded

EXIT_CODE = 75
"""EX_TEMPFAIL: trying again may help."""
JOIN_S = 2.0
WAITING = (os.path.join("torch", "distributed"), os.path.join("torch", "autograd"))
"""Where the main thread of a rank is that waits for others; collectives of a backward pass run inside autograd."""

OnPhase = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a rank says of itself when the world stands still."""

    rank: int
    moved: bool
    """It went on since the alarm."""
    phase: str
    """The last one that it reached."""
    waits: bool
    where: str
    recorded: Recorded = field(default_factory=lambda: Recorded(begun={}))


class Watchdog:
    """Context manager around training on many ranks; call it with every phase. One process needs none."""

    def __init__(self, on_phase: OnPhase, *, timeout_s: float, end: Callable[[int], None] = os._exit) -> None:
        self._on_phase = on_phase
        self._timeout_s = timeout_s
        self._end = end
        self._phases = 0
        self._phase = "start"
        self._main = threading.get_ident()
        self._done = threading.Event()
        self._group: Any = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if ranks.world_size() > 1:
            # Twice: the threads of two ranks raise their alarms up to one phase apart.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2 * self._timeout_s))
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(JOIN_S)  # one that ends while Python does could take the process down with it

    def stop(self) -> None:
        """Nobody waits for others any more."""
        self._done.set()

    def __call__(self, phase: str) -> None:
        self._phases, self._phase = self._phases + 1, phase
        self._on_phase(phase)

    def _watch(self) -> None:
        heard = self._phases
        while not self._done.wait(self._timeout_s):
            if self._phases != heard:
                heard = self._phases
                continue
            verdict = self._meet(heard)
            if verdict is not None and not self._done.is_set():
                print(f"perilune: {verdict}", file=sys.stderr, flush=True)
                self._end(EXIT_CODE)
                return

    def _meet(self, heard: int) -> str | None:
        """What the ranks found out together; None: a false alarm."""
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=2 * self._timeout_s), wait_all_ranks=True)
            standings: list[Standing | None] = [None] * ranks.world_size()
            dist.all_gather_object(standings, self._standing(heard), group=self._group)
        except RuntimeError as error:
            # Rank 0 hears who is missing; the others only that it did not let them pass.
            if self._phases != heard:
                return None
            within = _named(recorded().pending) or "no collective operation"
            return (
                f"rank {ranks.rank()}, in {within} after phase {self._phase!r}, waits for ranks that do not answer: "
                f"{error}"
            )
        return verdict_of([each for each in standings if each is not None], self._timeout_s)

    def _standing(self, heard: int) -> Standing:
        stack = self._stack()
        waits = any(part in frame.filename for frame in stack for part in WAITING)
        own = [frame for frame in stack if "perilune" in frame.filename] or list(stack)
        at = stack[-1] if not waits else own[-1]
        return Standing(
            rank=ranks.rank(),
            moved=self._phases != heard,
            phase=self._phase,
            waits=waits,
            where=f"{at.name} ({os.path.basename(at.filename)}:{at.lineno})",
            recorded=recorded(),
        )

    def _stack(self) -> traceback.StackSummary:
        """Of the main thread; of the one that saves, where the main thread waits for it."""
        frames = sys._current_frames()
        stack = traceback.extract_stack(frames[self._main])
        if any(frame.filename.endswith("background_save.py") and frame.name == "wait" for frame in stack):
            for thread in threading.enumerate():
                if thread.name == THREAD and thread.ident in frames:
                    return traceback.extract_stack(frames[thread.ident])
        return stack


def verdict_of(standings: list[Standing], timeout_s: float) -> str | None:
    """One sentence that names the guilty ranks and what the others wait in; None when any rank moved."""
    if any(each.moved for each in standings):
        return None
    waited_in = _operations(standings)
    guilty = [each for each in standings if any(_is_missing(each, operation) for operation in waited_in)]
    guilty = guilty or [each for each in standings if not each.waits]
    named = guilty or standings
    told = "; ".join(f"rank {each.rank} is in {each.where} after phase {each.phase!r}" for each in named)
    waiting = [each.rank for each in standings if each not in guilty]
    if guilty and waiting:
        told += f"; ranks {waiting} wait for it in {_named(waited_in) or 'a collective operation'}"
    elif waited_in:
        told += f"; all have come to {_named(waited_in)}, which does not end"
    return f"no rank has gone on for {timeout_s:g} s (trainer.hang_timeout_s): {told}"


def _operations(standings: Sequence[Standing]) -> list[Operation]:
    """Those in which somebody waits, each once."""
    found = {operation: None for each in standings for operation in each.recorded.pending}
    return list(found)


def _is_missing(standing: Standing, operation: Operation) -> bool:
    return standing.rank in operation.members and not standing.recorded.has_come_to(operation)


def _named(operations: Sequence[Operation]) -> str:
    return ", ".join(str(operation) for operation in operations)
