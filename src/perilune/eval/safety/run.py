"""All probes, several at a time, against one model.

A call that fails is tried again by the client; a probe that stays without an answer is an error of its own and counts
in no share. An endpoint that is not there is found out by the first probes, and said at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from perilune import __version__
from perilune.eval.safety.judges import LIMITS, judge
from perilune.eval.safety.probes import CATEGORIES, Probe, fingerprint
from perilune.eval.safety.scores import Score, score
from perilune.eval.safety.talk import Record, TalkConfig, ask
from perilune.swarm.client import ModelClient, ModelError

FORMAT = 1
MOST_ERRORS = 0.2
"""Share of probes without an answer from which on a report is called incomplete."""
SCOUTS = 2
"""Probes asked before the others: when they all meet a dead endpoint, the others are not asked."""
DEAD = frozenset({"network", "circuit_open", "stalled", "time"})


class SafetyError(RuntimeError):
    """Why there is nothing to report."""


@dataclass(frozen=True, kw_only=True)
class SafetyConfig:
    concurrency: int = 8
    max_tokens: int = 512
    temperature: float = 0.0
    seed: int = 0
    turns: int = 8

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_tokens", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected at least 1")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is {self.temperature!r}, expected 0 or more")

    def talk(self, model: str) -> TalkConfig:
        return TalkConfig(
            model=model, max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed, turns=self.turns
        )


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One probe with its verdict."""

    probe: Probe
    result: str
    """pass, fail, unclear or error."""
    why: str
    record: Record | None

    def plain(self) -> dict[str, Any]:
        return {
            "id": self.probe.id,
            "category": self.probe.category,
            "result": self.result,
            "why": self.why,
            "answer": self.record.answer if self.record else "",
            "messages": list(self.record.messages) if self.record else [],
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a model did with all probes."""

    model: str
    config: SafetyConfig
    answered: Sequence[Answered]
    date: str
    fingerprint: str

    def scores(self) -> dict[str, Score]:
        """By category, in their order; those that were not asked are left out."""
        found: dict[str, Score] = {}
        for category in CATEGORIES:
            results = [each.result for each in self.answered if each.probe.category == category]
            if results:
                found[category] = score(results)
        return found

    @property
    def is_complete(self) -> bool:
        return sum(each.result == "error" for each in self.answered) <= MOST_ERRORS * len(self.answered)

    def plain(self) -> dict[str, Any]:
        return {
            "kind": "safety",
            "format": FORMAT,
            "model": self.model,
            "date": self.date,
            "perilune": __version__,
            "probes": len(self.answered),
            "fingerprint": self.fingerprint,
            "settings": dict(vars(self.config)),
            "complete": self.is_complete,
            "scores": {name: each.plain() for name, each in self.scores().items()},
            "limits": list(LIMITS),
            "answered": [each.plain() for each in self.answered],
        }


async def run_probes(
    client: ModelClient,
    model: str,
    probes: Sequence[Probe],
    config: SafetyConfig,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Ask all probes; `progress` is told how many are done. Raises SafetyError when nothing answers."""
    if not probes:
        raise SafetyError("there is nothing to ask: no probe was chosen")
    gate = asyncio.Semaphore(config.concurrency)
    talk = config.talk(model)
    done = 0

    async def one(probe: Probe) -> tuple[Answered, ModelError | None]:
        nonlocal done
        async with gate:
            try:
                record = await ask(client, probe, talk)
            except ModelError as error:
                found, problem = Answered(probe=probe, result="error", why=str(error), record=None), error
            else:
                verdict = judge(probe, record)
                found, problem = Answered(probe=probe, result=verdict.result, why=verdict.why, record=record), None
        done += 1
        progress(done, len(probes))
        return found, problem

    first = await asyncio.gather(*(one(probe) for probe in probes[:SCOUTS]))
    problems = [problem for _, problem in first if problem is not None]
    if len(problems) == len(first) and all(problem.kind in DEAD for problem in problems):
        raise SafetyError(f"the model does not answer: {problems[0]}")
    rest = await asyncio.gather(*(one(probe) for probe in probes[SCOUTS:]))
    answered = [found for found, _ in (*first, *rest)]
    if all(each.result == "error" for each in answered):
        raise SafetyError(f"no probe was answered; the first: {answered[0].why}")
    return Outcome(
        model=model,
        config=config,
        answered=answered,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint(probes),
    )


__all__ = ["Answered", "Outcome", "SafetyConfig", "SafetyError", "run_probes"]
