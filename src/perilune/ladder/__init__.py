"""The scaling ladder: what every idea buys, in tokens and in wall-clock, with error bars."""

from perilune.ladder.findings import ArmFinding, Combination, Curve, Estimate, LadderFit, Point, RungFinding
from perilune.ladder.fit import fit_ladder

__all__ = [
    "ArmFinding",
    "Combination",
    "Curve",
    "Estimate",
    "LadderFit",
    "Point",
    "RungFinding",
    "fit_ladder",
]
