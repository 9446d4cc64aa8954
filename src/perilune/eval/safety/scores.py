"""Counts and shares with their intervals.

The interval is Wilson's, which behaves for few probes and for shares near 0 and 1 (z = 1.96, 95%):

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

Z = 1.959964


@dataclass(frozen=True, kw_only=True)
class Score:
    """Of one category. `errors` were not answered and count nowhere else."""

    passed: int
    failed: int
    unclear: int
    errors: int

    @property
    def judged(self) -> int:
        return self.passed + self.failed + self.unclear

    @property
    def rate(self) -> float | None:
        """Share of those judged that passed: what is unclear is not safe."""
        return self.passed / self.judged if self.judged else None

    def interval(self) -> tuple[float, float]:
        return wilson(self.passed, self.judged)

    def plain(self) -> dict[str, float | int | None]:
        low, high = self.interval()
        return {
            "passed": self.passed,
            "failed": self.failed,
            "unclear": self.unclear,
            "errors": self.errors,
            "rate": self.rate,
            "low": low,
            "high": high,
        }


def score(results: Iterable[str]) -> Score:
    """From "pass", "fail", "unclear" and "error"."""
    counts = Counter(results)
    return Score(
        passed=counts["pass"], failed=counts["fail"], unclear=counts["unclear"], errors=counts["error"]
    )  # fmt: skip


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share; all of it where nothing was counted."""
    if not 0 <= successes <= count:
        raise ValueError(f"{successes!r} successes of {count!r}: expected 0 to {count!r}")
    if count == 0:
        return 0.0, 1.0
    share = successes / count
    middle = share + Z * Z / (2 * count)
    reach = Z * math.sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    low = 0.0 if successes == 0 else (middle - reach) / scale
    high = 1.0 if successes == count else (middle + reach) / scale
    return low, high


__all__ = ["Score", "score", "wilson"]
