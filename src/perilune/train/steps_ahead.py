"""What the next step needs, made ready while the device computes this one.

    loop      [ step 0 ][ step 1 ][ step 2 ]
    thread    [ rows 1 ][ rows 2 ][ rows 3 ]

Rows of a run are a function of their number, so it does not matter which thread packs them, nor when: the loop asks for
a number, and gets what it would have made itself. Only numbers it asked for count as consumed; what was made ready in
vain is thrown away. An error of the thread is raised where the loop asks for what failed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Generic, TypeVar

Made = TypeVar("Made")
THREAD = "batches"


class StepsAhead(Generic[Made]):
    """Context manager around `make(number)`. Leaving it waits for the thread, which holds what the caller closes next.

    `in_background` False makes everything when it is asked for, in the thread that asks.
    """

    def __init__(self, make: Callable[[int], Made], *, in_background: bool = True) -> None:
        self._make = make
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=THREAD) if in_background else None
        self._begun: tuple[int, Future[Made]] | None = None

    def __enter__(self) -> StepsAhead[Made]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def take(self, number: int, *, then: int | None = None) -> Made:
        """What `make(number)` gives; begins with number `then`."""
        begun, self._begun = self._begun, None
        if begun is None:
            made = self._make(number)
        elif begun[0] == number:
            made = begun[1].result()
        else:
            wait([begun[1]])  # never in two threads at once
            made = self._make(number)
        if self._thread is not None and then is not None:
            self._begun = then, self._thread.submit(self._make, then)
        return made
