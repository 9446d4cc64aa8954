"""Rewards that look at length: k1.5's length reward, and Toggle, which buys short answers without forgetting long ones.

Length reward (arXiv 2501.12599), over one group of answers to one prompt:

    lambda_i = 0.5 - (length_i - shortest) / (longest - shortest)
    added to the reward: lambda_i of a right answer, min(0, lambda_i) of a wrong one

It is switched on after a warm-up, since it slows down learning at first.

Toggle (Kimi K2.5) alternates every `period` iterations between two phases:

    budgeted    reward counts only where the prompt is not solved well enough yet (mean accuracy < threshold) or the
                answer keeps its prompt's budget
    free        reward as it is

It may begin later (`after`): budgets are for a policy that has learnt to work things out.

    budget(prompt) = the given percentile of the lengths of right answers, estimated once, when first enough are there

Fixed budgets alone overfit to the length; the free phase keeps the use of more tokens where they help.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def length_rewards(lengths: Sequence[int], right: Sequence[bool]) -> list[float]:
    """What is added to the reward of each answer of a group. All of one length: nothing."""
    if len(lengths) != len(right):
        raise ValueError(f"{len(lengths)} lengths for {len(right)} answers of a group: expected one each")
    if not lengths or min(lengths) == max(lengths):
        return [0.0] * len(lengths)
    shortest, longest = min(lengths), max(lengths)
    shares = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [share if is_right else min(0.0, share) for share, is_right in zip(shares, right)]


@dataclass(frozen=True, kw_only=True)
class ToggleConfig:
    period: int = 10
    """Iterations of a phase."""
    threshold: float = 0.8
    """Mean accuracy on a prompt from which on its budget counts."""
    percentile: float = 50.0
    """Of the lengths of right answers: the budget."""
    min_answers: int = 4
    """Right answers to a prompt before its budget is estimated."""
    after: int = 0
    """Iterations before it begins, free and without a look at lengths. A policy that still answers at once, and is
    right by luck, would set budgets that nothing worked out can keep."""

    def __post_init__(self) -> None:
        if self.period < 1 or self.min_answers < 1:
            raise ValueError(
                f"toggle.period={self.period!r} and min_answers={self.min_answers!r}: expected at least 1 for both"
            )
        if self.after < 0:
            raise ValueError(f"toggle.after is {self.after!r}, expected 0 or more iterations")
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"toggle.threshold is {self.threshold!r}, expected a share in [0, 1]")
        if not 0 <= self.percentile <= 100:
            raise ValueError(f"toggle.percentile is {self.percentile!r}, expected 0 to 100")


@dataclass
class Toggle:
    """The budgets found so far, and the phase of an iteration. `state` goes into a checkpoint."""

    config: ToggleConfig
    budgets: dict[str, int] = field(default_factory=dict)
    seen: dict[str, list[int]] = field(default_factory=dict)
    """Lengths of right answers to prompts that have no budget yet."""

    def is_budgeted(self, iteration: int) -> bool:
        """Phases alternate, the budgeted one first, once it has begun."""
        since = iteration - self.config.after
        return since >= 0 and (since // self.config.period) % 2 == 0

    def rewards(
        self, prompt: str, rewards: Sequence[float], lengths: Sequence[int], right: Sequence[bool], *, iteration: int
    ) -> list[float]:
        """The rewards of one group as the phase counts them; right answers teach the budget first."""
        if not len(rewards) == len(lengths) == len(right):
            raise ValueError(
                f"a group has {len(rewards)} rewards, {len(lengths)} lengths and {len(right)} verdicts: "
                "expected as many of each"
            )
        if iteration >= self.config.after:
            self._learn(prompt, [length for length, is_right in zip(lengths, right) if is_right])
        budget = self.budgets.get(prompt)
        accuracy = sum(right) / len(right) if right else 0.0
        if not self.is_budgeted(iteration) or budget is None or accuracy < self.config.threshold:
            return list(rewards)
        return [reward if length <= budget else 0.0 for reward, length in zip(rewards, lengths)]

    def _learn(self, prompt: str, lengths: list[int]) -> None:
        if prompt in self.budgets or not lengths:
            return
        seen = self.seen.setdefault(prompt, [])
        seen += lengths
        if len(seen) >= self.config.min_answers:
            self.budgets[prompt] = percentile(seen, self.config.percentile)
            del self.seen[prompt]

    def state(self) -> dict[str, Any]:
        return {"budgets": dict(self.budgets), "seen": {prompt: list(lengths) for prompt, lengths in self.seen.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.budgets = {str(prompt): int(budget) for prompt, budget in state["budgets"].items()}
        self.seen = {str(prompt): [int(each) for each in lengths] for prompt, lengths in state["seen"].items()}


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest of `values` that at least `share` percent of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]
