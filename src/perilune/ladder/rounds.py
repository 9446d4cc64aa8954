"""Cutting a ladder into rounds: as many cells as surely fit into some minutes of a machine that starts bare each time.

How long a cell takes beside others is known once a cell of its rung has run so: the slowest of them, scaled by FLOPs.
Before that it is assumed: an H200 alone at the utilisation of cost.py, slowed down by those who share it (they fill
each other's gaps by half: n at a time take n / 1.5 times as long each). A margin comes on top, and every cell pays for
a process that starts.

A round begins with the largest cells, so that small ones fill what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from perilune.ladder import cost
from perilune.ladder.design import Cell, Ladder
from perilune.ladder.results import Result

# Imports, surveying the corpus (3.3 s for 100 MB), kernels; twelve cells at once on 16 cores, the first of which
# tokenizes 336 MB for all of them, took 60 s until the GPU had something to do.
START_SECONDS = 60.0
SHARED_GAIN = 1.5  # throughput of several processes on one card over that of one
MARGIN = 1.25  # on times measured once, or assumed

Estimate = Callable[[Cell], float]
"""Seconds of a cell beside others."""


@dataclass(frozen=True, kw_only=True)
class Round:
    cells: tuple[str, ...]
    seconds: float
    """Until the last of them ends."""


def estimator(ladder: Ladder, results: Sequence[Result], *, num_workers: int) -> Estimate:
    """Times from what has run beside others, or else assumed."""
    measured: dict[tuple[str, str, int], list[Result]] = {}
    for result in results:
        if not result.ran_alone and not result.borrowed_from:
            measured.setdefault((result.rung, result.arm, result.seed), []).append(result)
    rates: dict[str, float] = {}  # seconds for a FLOP, the slowest cell of a rung
    arms = {arm.name: arm for arm in ladder.arms}
    rungs = {rung.name: rung for rung in ladder.rungs}
    for (rung, name, _), found in measured.items():
        arm = arms.get(name.split(".lr")[0])  # a learning rate of a sweep takes no other time
        if rung in rungs and arm is not None and len(found) == len(ladder.horizons):
            rate = sum(result.seconds for result in found) / cost.cost(ladder, rungs[rung], arm).flops
            rates[rung] = max(rates.get(rung, 0.0), rate)
    slowdown = max(1.0, num_workers / SHARED_GAIN)

    def seconds(cell: Cell) -> float:
        spent = cost.cost(ladder, cell.rung, cell.arm)
        alone = spent.trained_tokens / cost.assumed_speed(cell.config())
        beside = rates[cell.rung.name] * spent.flops if cell.rung.name in rates else slowdown * alone
        return START_SECONDS + MARGIN * beside

    return seconds


def largest_first(cells: Sequence[Cell], estimate: Estimate) -> list[Cell]:
    """A stable order: of equal cells the ladder's own, so that pairs are finished together."""
    return sorted(cells, key=lambda cell: -estimate(cell))


def split(cells: Sequence[Cell], estimate: Estimate, *, seconds: float, num_workers: int) -> tuple[Round, ...]:
    """All cells as rounds of at most `seconds`, `num_workers` at a time; a cell that is longer is a round by itself."""
    waiting, found = largest_first(cells, estimate), list[Round]()
    while waiting:
        lanes = [0.0] * num_workers
        taken: list[Cell] = []
        for cell in waiting:
            lane = min(range(num_workers), key=lambda place: lanes[place])
            if lanes[lane] + estimate(cell) <= seconds:
                lanes[lane] += estimate(cell)
                taken.append(cell)
        if not taken:
            taken, lanes = [waiting[0]], [estimate(waiting[0])]
        waiting = [cell for cell in waiting if cell not in taken]
        found.append(Round(cells=tuple(cell.name for cell in taken), seconds=max(lanes)))
    return tuple(found)
