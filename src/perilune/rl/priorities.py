"""Which task comes next: those that are solved rarely come more often (k1.5, arXiv 2501.12599: as 1 - success rate).

The weight of a task is 1 - its success rate, never below `floor`, so that nothing is forgotten for good. A task that
was never tried has the weight 1. A task that was tried `hopeless_after` times without one success rests: it has the
weight `floor`, since a group of equal rewards teaches nothing.

Draws are a function of seed and iteration alone: a resumed run draws the same tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class PriorityConfig:
    floor: float = 0.05
    hopeless_after: int = 64
    """Attempts without a success."""
    memory: float = 0.9
    """What an earlier group counts for in the success rate, beside the newest."""

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ValueError(f"priorities.floor is {self.floor!r}, expected above 0 and at most 1")
        if self.hopeless_after < 1:
            raise ValueError(f"priorities.hopeless_after is {self.hopeless_after!r}, expected at least 1")
        if not 0 <= self.memory < 1:
            raise ValueError(f"priorities.memory is {self.memory!r}, expected at least 0 and below 1")


@dataclass
class Priorities:
    """Success rates by task. `state` goes into a checkpoint."""

    config: PriorityConfig
    rates: dict[str, float] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)

    def record(self, task: str, successes: Sequence[float]) -> None:
        """How often, or how far, one group solved a task: numbers in [0, 1]."""
        if not successes:
            return
        if not all(0 <= success <= 1 for success in successes):
            raise ValueError(f"successes of {task!r} are {list(successes)!r}, expected numbers in [0, 1]")
        rate, memory = sum(successes) / len(successes), self.config.memory
        known = self.rates.get(task)
        self.rates[task] = rate if known is None else memory * known + (1 - memory) * rate
        self.attempts[task] = self.attempts.get(task, 0) + len(successes)

    def weight(self, task: str) -> float:
        rate = self.rates.get(task)
        if rate is None:
            return 1.0
        if rate == 0.0 and self.attempts[task] >= self.config.hopeless_after:
            return self.config.floor
        return max(self.config.floor, 1.0 - rate)

    def draw(self, tasks: Sequence[str], count: int, *, seed: int, iteration: int) -> list[int]:
        """Indices of `count` tasks, each at most once where there are enough."""
        if not tasks:
            raise ValueError("there is no task to draw from")
        weights = np.array([self.weight(task) for task in tasks])
        generator = np.random.default_rng((seed, iteration))
        chosen: list[int] = []
        while len(chosen) < count:
            size = min(count - len(chosen), len(tasks))
            chosen += generator.choice(len(tasks), size=size, replace=False, p=weights / weights.sum()).tolist()
        return chosen

    def state(self) -> dict[str, Any]:
        return {"rates": dict(self.rates), "attempts": dict(self.attempts)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.rates = {str(task): float(rate) for task, rate in state["rates"].items()}
        self.attempts = {str(task): int(count) for task, count in state["attempts"].items()}
