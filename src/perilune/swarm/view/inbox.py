"""Where committed events wait for a watcher on another thread, in bounded memory.

The swarm's thread only appends a reference; it never waits for a watcher. When a watcher falls so far behind that the
bound is reached, everything held is let go and the watcher is told of a gap: it reads what it missed from the journal,
by index. An inbox that is asleep holds nothing.
"""

from __future__ import annotations

import threading

from perilune.swarm.journal.event import Event


class Inbox:
    def __init__(self, *, max_events: int = 20_000, max_bytes: int = 16 << 20) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._bytes = 0
        self._gap = True  # whoever starts to listen has missed what came before
        self._asleep = True

    def receive(self, batch: list[Event]) -> None:
        """Called by the journal with each committed batch."""
        if self._asleep:
            return
        size = sum(len(event.body) + len(event.note) for event in batch)
        with self._lock:
            if self._asleep or self._gap:
                return
            if len(self._events) + len(batch) > self._max_events or self._bytes + size > self._max_bytes:
                self._events, self._bytes, self._gap = [], 0, True
                return
            self._events.extend(batch)
            self._bytes += size

    def wake(self) -> None:
        """Start to hold events; the next `drain` reports a gap."""
        with self._lock:
            self._asleep, self._gap = False, True

    def sleep(self) -> None:
        with self._lock:
            self._events, self._bytes, self._gap, self._asleep = [], 0, True, True

    def drain(self) -> tuple[list[Event], bool]:
        """What came since the last call, and whether something is missing that only the journal has.

        With a gap the inbox listens again before this returns: an event is in the journal by then, or comes later.
        """
        with self._lock:
            events, gap = self._events, self._gap
            self._events, self._bytes, self._gap = [], 0, self._asleep
        return events, gap

    @property
    def held(self) -> tuple[int, int]:
        """Events and bytes held now."""
        return len(self._events), self._bytes
