"""Ctrl-C and SIGTERM as a request to finish the step, save and leave; a second Ctrl-C stops at once."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class Interrupted(SystemExit):
    """The run was asked to stop, and saved. Leaves the process with 130 (SIGINT) or 143 (SIGTERM), as shells expect."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number


class StopRequest:
    """Context manager: within it, `signal_number` is the first of SIGINT and SIGTERM that arrived, or None."""

    def __init__(self, on_first: Callable[[str], None]) -> None:
        self.signal_number: int | None = None
        self._on_first = on_first
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        # Python delivers signals to the main thread only; a trainer run in another one is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # pyrefly: ignore

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal_number is None:
            self.signal_number = number
            self._on_first(signal.Signals(number).name)
