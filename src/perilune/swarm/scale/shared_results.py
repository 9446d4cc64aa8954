"""Handles that several processes know: what one learns of an artefact, and of its taint, it can tell the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perilune.swarm.journal.event import Artefact, Journal
from perilune.swarm.results import Results


class SharedResults(Results):
    """Keeps a list of what it learned, in order, and gives each reader what is new to it."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(journal)
        self._learned: list[dict[str, Any]] = []
        self._told: dict[str, int] = {}

    @classmethod
    def after(cls, results: Results) -> SharedResults:
        """With all that the other one knows."""
        made = cls(results.journal)
        for artefact, tainted in results._known.values():
            made.learn(artefact, tainted=tainted)
        return made

    def learn(self, artefact: Artefact, *, tainted: bool | None = None) -> str:
        before = self._known.get(f"art:{artefact.sha256[:16]}")
        handle = super().learn(artefact, tainted=tainted)
        if self._known[handle] != before:
            self._learned.append({**artefact.plain(), "tainted": self._known[handle][1]})
        return handle

    def news_for(self, reader: str) -> list[dict[str, Any]]:
        """What was learned since this reader was last told."""
        since = self._told.get(reader, 0)
        self._told[reader] = len(self._learned)
        return self._learned[since:]

    def hear(self, told: Iterable[dict[str, Any]], *, pass_on: bool) -> None:
        """What another process learned. `pass_on`: readers here are told of it in their turn."""
        learn = self.learn if pass_on else super().learn
        for each in told:
            learn(Artefact(each["sha256"], each["size"]), tainted=each["tainted"])


__all__ = ["SharedResults"]
