"""Points of a ladder that say nothing about scaling yet: where seeds lie far apart.

A short run of a small model may end inside its first fall, when it has just learnt to look back, or has not. Seeds then
differ by tenths of a nat, dozens of times more than on any other point, and least squares would bend the whole curve
towards such a point. It is left out for all arms, so that pairs stay pairs, and named in the notes; tables show it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from perilune.ladder.findings import Point

LIMIT = 0.05
"""Standard deviation over seeds in nats, from which on an arm is unsettled; settled points of small ladders have 0.002
to 0.03."""
_RUNGS_OF_A_CURVE = 3


def settled(points: Sequence[Point]) -> tuple[list[Point], list[str]]:
    """The points to fit, and what to say about the others; all of them where too few rungs for a curve would stay."""
    apart: dict[tuple[str, str], tuple[float, str]] = {}
    for rung, horizon, arm in sorted({(p.rung, p.horizon, p.arm) for p in points}):
        losses = [p.loss for p in points if (p.rung, p.horizon, p.arm) == (rung, horizon, arm)]
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        if spread > LIMIT:
            apart[rung, horizon] = max(apart.get((rung, horizon), (0.0, "")), (spread, arm))
    kept = [p for p in points if (p.rung, p.horizon) not in apart]
    said = [
        f"{rung} at {horizon} is not settled: seeds of {arm} have a standard deviation of {spread:.2f} nats, "
        f"above {LIMIT}"
        for (rung, horizon), (spread, arm) in apart.items()
    ]
    rungs: dict[tuple[str, str], set[str]] = {}
    for point in kept:
        rungs.setdefault((point.arm, point.horizon), set()).add(point.rung)
    if said and max(map(len, rungs.values()), default=0) < _RUNGS_OF_A_CURVE:
        return list(points), [f"{each}; it is fitted all the same, for want of rungs" for each in said]
    return kept, [f"{each}; it is left out of the fit" for each in said]
