"""Taint: whether an agent has read something that a stranger may have written.

Results of tools that fetch from outside are untrusted. Who reads one is tainted, and stays so: instructions in it may
have changed what the agent does. Taint follows words from agent to agent: a task given by a tainted parent taints the
child, a result or message of a tainted agent taints its reader. `policy` then asks a person before the agent's calls
reach outside its workspace.
"""

from __future__ import annotations

SHOWN = 20
"""Sources that are kept; the first ones say how it began."""


class Taint:
    """Of one agent. `sources` says where it came from, oldest first."""

    def __init__(self, *sources: str) -> None:
        self._sources: dict[str, None] = {}
        for source in sources:
            self.add(source)

    @classmethod
    def inherited(cls, parent: Taint) -> Taint:
        """Of a new agent whose task its parent wrote."""
        return cls(*(f"task from a parent that read: {parent.sources[0]}",)) if parent.is_tainted else cls()

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._sources)

    @property
    def is_tainted(self) -> bool:
        return bool(self._sources)

    def add(self, source: str) -> None:
        if len(self._sources) < SHOWN:
            self._sources.setdefault(source)

    def read(self, other: Taint, what: str) -> None:
        """Something that another agent wrote: `what` names it."""
        if other.is_tainted:
            self.add(f"{what}, whose author read: {other.sources[0]}")

    def __repr__(self) -> str:
        return f"Taint({', '.join(map(repr, self._sources))})"


__all__ = ["Taint"]
