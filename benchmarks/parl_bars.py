"""Every bar of the experiment with PARL, and what the rows of benchmarks/parl.py say to it.

A bar that was not measured says so, and one that was not met is not left out. `product` is the claim that a better
recipe and a swarm multiply: F1 of {plain, full recipe} x {single agent, swarm}, with the interaction on the scale of
logarithms, F1(full, swarm) F1(plain, single) / (F1(full, single) F1(plain, swarm)): 1 means that gains multiply.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
SEEDS = 3


def bars_text(rows: Sequence[Row], *, tiny: bool = False) -> str:
    """A table in Markdown, and the claim below it."""
    kept = [row for row in rows if bool(row.get("tiny")) == tiny]
    lines = ["| goal | bar | measured | met |", "|---|---|---|---|"]
    for goal, bar, measured, is_met in bars(kept):
        told = "not measured" if is_met is None else "yes" if is_met else "NO"
        lines.append(f"| {goal} | {bar} | {measured} | {told} |")
    return "\n".join([*lines, "", product_text(kept)])


def bars(rows: Sequence[Row]) -> list[tuple[str, str, str, bool | None]]:
    """(goal, bar, what was measured, whether it was met; None: not measured)"""
    return [
        _worker(rows),
        _collapse(rows),
        _prevented(rows),
        _quality(rows),
        _latency(rows),
        _hollow(rows),
        _cost(rows),
        _joint(rows),
        _audit(rows),
    ]


def _of(
    rows: Sequence[Row], row: str, arm: str | None = None, *, cap: float | None = None, recipe: str = "full"
) -> list[Row]:
    """By seed. Those of arms that were not trained to their end do not count."""
    found = [
        each for each in rows
        if each.get("row") == row and each.get("recipe", "full") == recipe
        and each.get("iterations", 0) >= each.get("wanted", 0)
        and (arm is None or each.get("arm") == arm) and (cap is None or each.get("cap") == cap)
    ]  # fmt: skip
    return sorted(found, key=lambda each: each.get("seed", 0))


def _last(row: Row, kind: str, name: str) -> float | None:
    return ((row.get("last_fifth") or {}).get(kind) or {}).get(name)


def _each(values: Sequence[float | None], form: str = ".2f") -> str:
    return ", ".join("-" if value is None else f"{value:{form}}" for value in values) or "nothing"


def _worker(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    found = [row["right"] for row in _of(rows, "worker")]
    met = None if not found else all(value >= 0.9 for value in found)
    return "frozen worker", "90% of single lookups in 8 steps", _each(found), met


def _collapse(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    found = [_last(row, "wide", "spawn") for row in _of(rows, "train", "outcome")]
    met = None if not found else all(value is not None and value < 0.05 for value in found) and len(found) >= SEEDS
    return "serial collapse shown", f"outcome only: spawn < 5% over the last fifth, {SEEDS} seeds", _each(found), met


def _prevented(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    trained = _of(rows, "train", "full")
    found = {kind: [_last(row, kind, "spawn") for row in trained] for kind in ("wide", "narrow", "chain")}
    told = "; ".join(f"{kind} {_each(values)}" for kind, values in found.items())
    wide = all(value is not None and value >= 0.8 for value in found["wide"])
    others = all(value is None or value <= 0.2 for kind in ("narrow", "chain") for value in found[kind])
    met = None if not trained else wide and others and len(trained) >= SEEDS
    return "prevented", f"full: spawn >= 80% on wide, <= 20% on narrow and chain, {SEEDS} seeds", told, met


def _quality(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    gains = []
    for cap in (0.5, 1.0, 2.0):
        pairs = _paired(_of(rows, "test", "full", cap=cap), _of(rows, "test", "serial", cap=cap))
        gains.append((cap, [100 * (_f1(swarm) - _f1(single)) for swarm, single in pairs]))
    told = "; ".join(f"{cap:g}x cap {_each(values, '+.1f')}" for cap, values in gains if values)
    at_cap = gains[1][1]
    met = None if not at_cap else all(gain >= 20 for gain in at_cap)
    return "quality at equal cap", "item-F1 >= +20 points over the serial-trained agent", told or "nothing", met


def _f1(row: Row) -> float:
    return (row.get("wide_f1") or {}).get("mean", 0.0)


def _paired(first: Sequence[Row], second: Sequence[Row]) -> list[tuple[Row, Row]]:
    by_seed = {row["seed"]: row for row in second}
    return [(row, by_seed[row["seed"]]) for row in first if row["seed"] in by_seed]


def _latency(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    """Critical steps of the serial agent at the swarm's F1, between its caps; where it never gets there, at least its
    most steps."""
    ratios, told = [], []
    for swarm in _of(rows, "test", "full", cap=1.0):
        curve = sorted(
            ((_f1(row), row["kinds"]["wide"]["critical_steps"]) for row in _of(rows, "test", "serial")
             if row["seed"] == swarm["seed"] and "wide" in row["kinds"]), key=lambda pair: pair[1],
        )  # fmt: skip
        steps = (swarm["kinds"].get("wide") or {}).get("critical_steps")
        if not curve or not steps:
            continue
        needed, reached = _steps_at(curve, _f1(swarm))
        ratios.append(needed / steps)
        wall = f", {swarm['play_seconds']:.0f} s for all episodes in a batch"
        told.append(f"{'' if reached else 'more than '}{needed / steps:.1f}x ({steps:.1f} steps{wall})")
    met = None if not ratios else all(ratio >= 3 for ratio in ratios)
    return "latency", "critical steps at equal F1 >= 3x lower", "; ".join(told) or "nothing", met


def _steps_at(curve: Sequence[tuple[float, float]], wanted: float) -> tuple[float, bool]:
    before = (0.0, 0.0)
    for f1, steps in curve:
        if f1 >= wanted:
            share = (wanted - before[0]) / (f1 - before[0]) if f1 > before[0] else 1.0
            return before[1] + share * (steps - before[1]), True
        before = (f1, steps) if f1 >= before[0] else before
    return max(steps for _, steps in curve), False


def _hollow(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    trained = _of(rows, "train", "full")
    finished = [_last(row, "wide", "finished") for row in trained]
    unused = [_last(row, "wide", "unused") for row in trained]
    contrast = [_last(row, "wide", "unused") for row in _of(rows, "train", "instantiation")]
    told = f"finish {_each(finished)}; unused {_each(unused)}; paid for instantiation alone: unused {_each(contrast)}"
    is_good = all(value is not None and value >= 0.9 for value in finished)
    is_good = is_good and all(value is not None and value <= 0.1 for value in unused)
    return "no hollow work", "finish >= 0.9; unused workers <= 10%", told, is_good if trained else None


def _cost(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    found = _of(rows, "best-of")
    told = []
    for row in found:
        told.append(
            f"best of {row['samples_each']} serial samples {_f1(row):.2f} against {row['swarm_f1']['mean']:.2f} at "
            f"{row['swarm_tokens']:,.0f} tokens"
        )
    for row in _of(rows, "test", "full", cap=1.0):
        if "wide" in row["kinds"]:
            told.append(f"{row['kinds']['wide']['total_steps']:.1f} steps of everybody an episode")
    return "honest cost", "total steps and tokens; equal-token best-of-N serial", "; ".join(told) or "nothing", (
        True if found else None
    )  # fmt: skip


def _joint(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    pairs = _paired(_of(rows, "test", "full", cap=1.0), _of(rows, "test", "joint", cap=1.0))
    told = "; ".join(f"frozen {_f1(frozen):.2f}, joint {_f1(joint):.2f}" for frozen, joint in pairs)
    return "freeze or not", "frozen against jointly trained", told or "nothing", True if pairs else None


def _audit(rows: Sequence[Row]) -> tuple[str, str, str, bool | None]:
    trained = _of(rows, "train")
    episodes, equal = (sum(row[name] for row in trained) for name in ("episodes", "replayed_equal"))
    told = f"{equal:,} of {episodes:,} episodes of {len(trained)} runs"
    return "audit", "100% of training episodes replay with the identical reward", told, (
        equal == episodes if trained else None
    )  # fmt: skip


# The claim of a product -----------------------------------------------------------------------------------------------


def product_text(rows: Sequence[Row]) -> str:
    lines = ["| recipe | agent | F1 on wide tasks, by seed | seconds of a batch |", "|---|---|---|---|"]
    found: dict[tuple[str, str], list[Row]] = {}
    for recipe in ("plain", "full"):
        for arm, told in (("serial", "single"), ("full", "swarm")):
            found[recipe, told] = _of(rows, "test", arm, cap=1.0, recipe=recipe)
            values, seconds = (
                _each([_f1(row) for row in found[recipe, told]]),
                _each([row["play_seconds"] for row in found[recipe, told]], ".0f"),
            )
            lines.append(f"| {recipe} | {told} | {values} | {seconds} |")
    seeds = set.intersection(*({row["seed"] for row in each} for each in found.values()))
    ratios = []
    for seed in sorted(seeds):
        f1 = {key: next(_f1(row) for row in each if row["seed"] == seed) for key, each in found.items()}
        below = f1["full", "single"] * f1["plain", "swarm"]
        if below > 0 and f1["full", "swarm"] * f1["plain", "single"] > 0:
            ratios.append(math.log(f1["full", "swarm"] * f1["plain", "single"] / below))
    if not ratios:
        return "\n".join([*lines, "", "The interaction was not measured: all four cells of one seed are needed."])
    mean = sum(ratios) / len(ratios)
    if len(ratios) < 2:
        told = f"{math.exp(mean):.2f} (one seed: no interval)"
    else:
        spread = math.sqrt(sum((each - mean) ** 2 for each in ratios) / (len(ratios) - 1) / len(ratios))
        reach = {2: 12.71, 3: 4.30}.get(len(ratios), 3.18) * spread
        told = f"{math.exp(mean):.2f} [{math.exp(mean - reach):.2f}, {math.exp(mean + reach):.2f}], 95%, t over seeds"
    return "\n".join([*lines, "", f"Interaction (1: gains multiply): {told}."])
