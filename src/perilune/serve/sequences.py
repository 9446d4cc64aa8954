"""Outputs of the sequences of one HTTP request, as they come, whoever reads them and however slowly.

    async with Sequences(engine, requests) as sequences:
        while batch := await sequences.next(seconds=15):
            for index, output in batch: ...

Each sequence is read by a task of its own as fast as the engine writes, so a slow reader never makes the engine wait.
What is not read yet is kept, at most `MOST_WAITING` outputs: a reader that is further behind is given up. Leaving the
block, for whatever reason, cancels in the engine what is not finished and returns when that is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Protocol, Self

from perilune.serve.refusals import Refusal
from perilune.serve.request import Output, Request

MOST_WAITING = 8192


class Streams(Protocol):
    """What is needed of the engine."""

    def stream(self, request: Request) -> AsyncGenerator[Output, None]:
        """Events of a request; closing the generator cancels it."""
        ...


class Sequences:
    def __init__(self, engine: Streams, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._requests = requests
        self._waiting: deque[tuple[int, Output]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._running = len(requests)
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._read(index, request), name=request.request_id)
            for index, request in enumerate(self._requests)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self, *, seconds: float) -> list[tuple[int, Output]] | None:
        """All outputs that wait, as (number of the sequence, output); [] after `seconds` without one; None at the end.

        Raises what the engine raised, or what `fail` was given.
        """
        if not self._waiting and self._failure is None and self._running:
            self._wake.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                return []
        if self._failure is not None:
            raise self._failure
        if not self._waiting:
            return None if not self._running else []
        batch = list(self._waiting)
        self._waiting.clear()
        return batch

    def fail(self, failure: Exception) -> None:
        """End it for the reader; the first failure is the one that is told."""
        if self._failure is None:
            self._failure = failure
        self._wake.set()

    async def _read(self, index: int, request: Request) -> None:
        try:
            async with aclosing(self._engine.stream(request)) as outputs:
                async for output in outputs:
                    self._waiting.append((index, output))
                    self._wake.set()
                    if len(self._waiting) > MOST_WAITING:
                        raise Refusal("the client reads too slowly", status=408, code="slow_client")
                    if output.finish_reason is not None:
                        break
        except Exception as error:
            self.fail(error)
        finally:
            self._running -= 1
            self._wake.set()


__all__ = ["Sequences", "Streams"]
