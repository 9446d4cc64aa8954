"""What tokens cost: prices per million tokens by model, and amounts of money as whole numbers.

Sums of floats depend on their order; a refund must be exact. So a ledger counts billionths of the currency, and the
conversion keeps order: a call that used no more than its bound never costs more than the bound did.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

BILLIONTHS = 1_000_000_000


def billionths(amount: float) -> int:
    return round(amount * BILLIONTHS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Money for a million tokens, in any currency."""

    prompt: float
    completion: float

    def __post_init__(self) -> None:
        for name in ("prompt", "completion"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not (0 <= value < math.inf):
                raise ValueError(f"price {name} is {value!r}, expected money per million tokens, 0 or more")

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True)
class Prices:
    """Prices by the model's name; the name "*" stands for every other model."""

    by_model: Mapping[str, Price] = field(default_factory=dict)

    def of(self, model: str) -> Price | None:
        return self.by_model.get(model) or self.by_model.get("*")

    def cost(self, model: str, prompt_tokens: int, completion_tokens: int) -> float:
        """0 where the model has no price: `budget.meter` refuses such a model under a limit of cost."""
        price = self.of(model)
        return price.cost(prompt_tokens, completion_tokens) if price else 0.0


__all__ = ["BILLIONTHS", "Price", "Prices", "billionths"]
