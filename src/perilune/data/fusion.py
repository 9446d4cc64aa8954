"""When pictures enter a run, and how many: row i of the run is text or vision by arithmetic alone.

With `share` = v of the rows after row `first_row` being vision, the vision rows before row i are

    V(i) = floor(v * max(0, i - first_row))

so they are spread evenly, vision row n is the n-th of its own sequence, and text row number i - V(i) is the one that a
run without pictures sees at that point: both runs read the same text in the same order.

Early, mid and late fusion (arXiv 2602.02276, table 1) spend the same number of vision rows: v * (1 - start) is constant
over (0, v), (0.5, 2 v) and (0.8, 5 v).
"""

import math
from dataclasses import dataclass
from fractions import Fraction

TIMINGS: dict[str, float] = {"early": 0.0, "mid": 0.5, "late": 0.8}
"""Name of a timing -> the part of the run after which pictures enter."""


@dataclass(frozen=True, kw_only=True)
class FusionConfig:
    share: float = 0.25
    """Of the rows after `start`, the part with pictures; 0: text alone, with the tokenizer of a run with pictures."""
    start: float = 0.0
    """Part of the run that is text only before pictures enter."""

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"fusion.share is {self.share!r}, expected a number in [0, 1]")
        if not 0 <= self.start < 1:
            raise ValueError(f"fusion.start is {self.start!r}, expected a number in [0, 1)")

    def at(self, timing: str) -> "FusionConfig":
        """The same number of vision rows entering at another time: "early", "mid" or "late"."""
        if timing not in TIMINGS:
            raise ValueError(f"timing is {timing!r}, expected one of {', '.join(TIMINGS)}")
        start = TIMINGS[timing]
        share = float(_exact(self.share) * (1 - _exact(self.start)) / (1 - _exact(start)))
        if share > 1:
            raise ValueError(
                f"fusion.share is {self.share!r}: {timing} fusion would need {share:.2f} of the rows after "
                f"{start:.0%} of the run; take a smaller share"
            )
        return FusionConfig(share=share, start=start)


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """The schedule of one run, in rows."""

    share: Fraction
    first_row: int
    """The first row that may hold pictures."""

    @classmethod
    def of(cls, config: FusionConfig, total_rows: int) -> "Fusion":
        return cls(share=_exact(config.share), first_row=math.ceil(_exact(config.start) * total_rows))

    @property
    def description(self) -> str:
        """What decides which row is which; part of a run's identity."""
        return f"{self.share} from row {self.first_row}"

    def vision_before(self, row: int) -> int:
        """How many of the rows 0 .. row - 1 hold pictures."""
        return math.floor(self.share * max(0, row - self.first_row))

    def text_before(self, row: int) -> int:
        return row - self.vision_before(row)

    def is_vision(self, row: int) -> bool:
        return self.vision_before(row + 1) > self.vision_before(row)


def _exact(number: float) -> Fraction:
    """0.1 as one tenth: a binary fraction next to it would place the borders by rounding."""
    return Fraction(number).limit_denominator(10**6)
