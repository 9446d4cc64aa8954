"""The bars of reinforcement learning beside what benchmarks/rl_experiments.py measured, as Markdown. Missing arms are
named, never guessed. Intervals are 95%, by drawing tasks (and seeds, where there are several) again with replacement.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from rl_rows import Row, read_rows

from perilune.data.picture_scores import Interval
from perilune.eval.spatial import paired_interval, right_of

OTHER = "drawing (other pictures)"
MISSING = "not measured"


class Rows:
    """Rows by arm; those of the same seeds are compared."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row["arm"], row["seed"]): row for row in rows}

    def of(self, *arms: str) -> list[tuple[Row, ...]]:
        """For every seed that has all of these arms: their rows."""
        seeds = sorted({seed for _, seed in self._rows})
        return [
            tuple(self._rows[arm, seed] for arm in arms)
            for seed in seeds
            if all((arm, seed) in self._rows for arm in arms)
        ]

    def missing(self, *arms: str) -> str:
        absent = [arm for arm in arms if not self.of(arm)]
        return f"{MISSING}: {', '.join(absent)}" if absent else ""


def write_report(results: Path, throughput: Path) -> str:
    """The Markdown, which is also written beside the results."""
    rows = [row for row in read_rows(results) if not row["tiny"]]
    note = ""
    if not rows and read_rows(results):
        rows, note = read_rows(results), "Rows of a miniature: they show that the scripts work, nothing else.\n\n"
    found = Rows(rows)
    parts = [
        "# Reinforcement learning: bars and measurements\n",
        note + "| experiment | bar | measured | met |\n|---|---|---|---|",
        *(f"| {name} | {bar} | {said} | {_met(met)} |" for name, bar, said, met in bars(found)),
        *_throughput(throughput),
        "\n## Spatial probe: text alone, never trained on\n",
        *_probe_lines(found),
        "\n## Pictures told in text: a form of pre-training, pictures that nothing was trained on\n",
        *_told_lines(found),
        "\n## Every arm, before and after\n",
        *_arm_lines(rows),
    ]
    text = "\n".join(parts) + "\n"
    results.with_suffix(".md").write_text(text, encoding="utf-8")
    return text


def _met(met: bool | None) -> str:
    return {True: "yes", False: "no", None: "-"}[met]


# Values of rows -------------------------------------------------------------------------------------------------------


def _mean(row: Row, environment: str, when: str = "after") -> float:
    return row[when][environment]["reward"]["mean"]


def _rewards(row: Row, environment: str, when: str) -> list[float]:
    return [np.nan if reward is None else reward for reward in row[when][environment]["rewards"]]


def _paired(before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> Interval:
    """Of the tasks that all rows have, in the same order, and that no episode lost."""
    common = min(map(len, (*before, *after)))
    both = np.array([[row[:common] for row in rows] for rows in (before, after)], dtype=np.float64)
    known = ~np.isnan(both).any(axis=(0, 1))
    return paired_interval(*both[:, :, known].tolist())


def _told(found: Interval) -> str:
    return f"{found.mean:+.3f} [{found.low:+.3f}, {found.high:+.3f}]"


def _gain(rows: Sequence[Row], environment: str) -> Interval:
    return _paired(
        [_rewards(row, environment, "before") for row in rows], [_rewards(row, environment, "after") for row in rows]
    )


def _between(pairs: Sequence[tuple[Row, ...]], environment: str) -> Interval:
    """The second arm less the first, both after."""
    return _paired(
        [_rewards(first, environment, "after") for first, _ in pairs],
        [_rewards(second, environment, "after") for _, second in pairs],
    )


def _levels(row: Row) -> str:
    """How hard the tasks of an arm were (rl_levels.py)."""
    return ", ".join(f"{name} {level}" for name, level in sorted(row.get("levels", {}).items())) or "not said"


def _average(values: Sequence[float]) -> float:
    return float(np.mean(values))


# The bars -------------------------------------------------------------------------------------------------------------

Bar = tuple[str, str, str, bool | None]


def bars(found: Rows) -> list[Bar]:
    """(experiment, bar, what was measured, whether it is met; None: no bar, or not measured)"""
    return [
        *_vision(found), *_kinds(found), *_fine_tuning(found), *_lengths(found), *_tools(found), *_joint(found),
        *_attention(found),
    ]  # fmt: skip


def _bar(found: Rows, name: str, bar: str, arms: Sequence[str], say: Callable[[list], tuple[str, bool | None]]) -> Bar:
    pairs = found.of(*arms)
    if not pairs:
        return name, bar, found.missing(*arms) or f"{MISSING}: no seed has all of {', '.join(arms)}", None
    steps = {row["iterations"] for rows in pairs for row in rows}
    levels = {_levels(row) for rows in pairs for row in rows}
    said, met = say(pairs)
    seeds = f"; {len(pairs)} seeds" if len(pairs) > 1 else ""
    unequal = f"; iterations differ: {sorted(steps)}" if len(steps) > 1 else ""
    unlike = f"; levels differ: {' | '.join(sorted(levels))}" if len(levels) > 1 else ""
    return name, bar, said + seeds + unequal + unlike, met


def _vision(found: Rows) -> list[Bar]:
    def gain(pairs: list) -> tuple[str, bool]:
        interval = _gain([row for (row,) in pairs], "drawing")
        before, after = (_average([_mean(row, "drawing", when) for (row,) in pairs]) for when in ("before", "after"))
        return f"{before:.3f} -> {after:.3f}, {_told(interval)}", interval.mean >= 0.15

    def beside(pairs: list) -> tuple[str, bool]:
        share = _average([_mean(mine, "drawing") for mine, _ in pairs]) / max(
            1e-9, _average([_mean(other, "drawing") for _, other in pairs])
        )
        return f"{share:.1%}", share >= 0.9

    def valid(pairs: list) -> tuple[str, bool]:
        share = _average([row["after"]["drawing"].get("facet.valid", 0.0) for (row,) in pairs])
        return f"{share:.1%}", share >= 0.98

    def looking(pairs: list) -> tuple[str, bool]:
        rows = [row for (row,) in pairs]
        interval = _paired(
            [_rewards(row, OTHER, "after") for row in rows], [_rewards(row, "drawing", "after") for row in rows]
        )
        return _told(interval), interval.mean >= 0.2

    name = "1. picture to SVG from zero-vision SFT"
    return [
        _bar(found, name, "reward +0.15", ["vision"], gain),
        _bar(found, name, ">= 90% of the text+image arm", ["vision", "vision-text-image"], beside),
        _bar(found, name, ">= 98% valid", ["vision"], valid),
        _bar(found, name, "other pictures cost >= 0.2", ["vision"], looking),
    ]  # fmt: skip


def _fine_tuning(found: Rows) -> list[Bar]:
    def say(pairs: list) -> tuple[str, None]:
        before, after = (_average([_mean(row, "drawing", when) for (row,) in pairs]) for when in ("before", "after"))
        return f"{before:.3f} -> {after:.3f}, {_told(_gain([row for (row,) in pairs], 'drawing'))}", None

    arms = {"zero-vision": "vision", "text+image": "vision-text-image", "none": "vision-none"}
    return [_bar(found, f"3. SFT {name}, then RL", "reported", [arm], say) for name, arm in arms.items()]


def _kinds(found: Rows) -> list[Bar]:
    """What a reward of pixels and overlap does not ask for."""

    def say(pairs: list) -> tuple[str, None]:
        rows = [row for (row,) in pairs if "facet.kinds" in row["after"]["drawing"]]
        if not rows:
            return f"{MISSING}: rows from before shapes were looked at", None
        kinds, reward = (
            [_average([value(row, when) for row in rows]) for when in ("before", "after")]
            for value in (
                lambda row, when: row[when]["drawing"]["facet.kinds"],
                lambda row, when: _mean(row, "drawing", when),
            )
        )
        return f"kinds {kinds[0]:.3f} -> {kinds[1]:.3f}, reward {reward[0]:.3f} -> {reward[1]:.3f}", None

    arms = {"reward of pixels and overlap": "vision", "and of kinds": "vision-kinds"}
    return [_bar(found, f"1. shapes of the right kinds, {name}", "reported", [arm], say) for name, arm in arms.items()]


def _lengths(found: Rows) -> list[Bar]:
    def length(row: Row) -> float:
        return row["after"]["sums"]["length"]

    def say(pairs: list) -> tuple[str, bool]:
        free, short = (_average([length(pair[place]) for pair in pairs]) for place in (0, 1))
        lost = _between(pairs, "sums")
        fewer = 1 - short / max(1e-9, free)
        said = f"{free:.0f} -> {short:.0f} tokens ({fewer:.1%} fewer), reward {_told(lost)}"
        return said, fewer >= 0.2 and lost.mean >= -0.01

    def reported(pairs: list) -> tuple[str, None]:
        return say(pairs)[0], None

    return [
        _bar(found, "4. Toggle", ">= 20% fewer tokens, <= 0.01 lost", ["sums", "sums-toggle"], say),
        _bar(found, "4. rigid budget", "reported", ["sums", "sums-rigid"], reported),
    ]


def _tools(found: Rows) -> list[Bar]:
    def say(pairs: list) -> tuple[str, None]:
        rows = [row for (row,) in pairs]
        before, after = (_average([_mean(row, "tools", when) for row in rows]) for when in ("before", "after"))
        called = [
            _average([row[when]["tools"].get("facet.called", 0.0) for row in rows]) for when in ("before", "after")
        ]
        shares = f"called in {called[0]:.1%} -> {called[1]:.1%}"
        return f"solved {before:.1%} -> {after:.1%}, {_told(_gain(rows, 'tools'))}; {shares}", None

    return [_bar(found, "5. tool use", "reported", ["tools"], say)]


def _joint(found: Rows) -> list[Bar]:
    def say(pairs: list) -> tuple[str, None]:
        rows = [row for (row,) in pairs]
        told = [
            f"{name} {_average([_mean(row, name, 'before') for row in rows]):.3f} -> "
            f"{_average([_mean(row, name) for row in rows]):.3f}"
            for name in ("drawing", "words", "sums")
            if all(name in row["after"] for row in rows)  # a miniature knows numbers alone
        ]
        return ", ".join(told), None

    arms = {
        "pictures alone": "vision",
        "pictures and PTX": "vision-ptx",
        "sums alone": "sums",
        "words alone": "words",
        "joint": "joint",
    }
    return [_bar(found, f"6. {name}", "reported", [arm], say) for name, arm in arms.items()]


def _attention(found: Rows) -> list[Bar]:
    def say(pairs: list) -> tuple[str, None]:
        told = []
        for place, name in enumerate(("3:1", "all MLA")):
            rows = [pair[place] for pair in pairs]
            before, after = (_average([_mean(row, "drawing", when) for row in rows]) for when in ("before", "after"))
            told.append(f"{name} {before:.3f} -> {after:.3f}")
        return f"{', '.join(told)}; difference after {_told(_between(pairs, 'drawing'))}", None

    return [_bar(found, "7. attention", "reported", ["vision", "vision-mla"], say)]


# The probe, arms, throughput ------------------------------------------------------------------------------------------


PROBED = {
    "vision": "vision RL", "words": "text RL, equal steps (words)", "sums": "text RL, equal steps (sums)",
    "shuffled": "vision RL, shuffled pictures", "joint": "joint RL",
}  # fmt: skip


def _told_lines(found: Rows) -> list[str]:
    """Nats of the right answer among its choices; higher is better, 0 is certain and right."""
    lines = [
        "| arm | right before | after | nats an answer, after - before | arm - vision RL | spatial, before | after |",
        "|---|---|---|---|---|---|---|",
    ]
    rows_of = {arm: [row for (row,) in found.of(arm) if "told" in row["probe_after"]] for arm in PROBED}
    for arm, name in PROBED.items():
        rows = rows_of[arm]
        if not rows:
            lines.append(f"| {name} | {MISSING} | | | | | |")
            continue
        before, after = ([row[f"probe_{when}"]["told"] for row in rows] for when in ("before", "after"))
        gain = paired_interval([each["log_probs"] for each in before], [each["log_probs"] for each in after])
        beside = ""
        pairs = [pair for pair in found.of("vision", arm) if all("told" in row["probe_after"] for row in pair)]
        if arm != "vision" and pairs:
            values = [[row["probe_after"]["told"]["log_probs"] for row in pair] for pair in pairs]
            beside = _told(paired_interval([mine for mine, _ in values], [other for _, other in values]))
        shares = [_average([each["accuracy"] for each in some]) for some in (before, after)]
        spatial = [_average([each["by_kind"]["spatial"]["accuracy"] for each in some]) for some in (before, after)]
        lines.append(
            f"| {name} | {shares[0]:.3f} | {shares[1]:.3f} | {_told(gain)} | {beside} | "
            f"{spatial[0]:.3f} | {spatial[1]:.3f} |"
        )
    return lines


def _probe_lines(found: Rows) -> list[str]:
    lines = ["| arm | before | after | after - before | arm - vision RL |", "|---|---|---|---|---|"]
    for arm, name in PROBED.items():
        rows = [row for (row,) in found.of(arm)]
        if not rows:
            lines.append(f"| {name} | {MISSING} | | | |")
            continue
        before, after = ([right_of(row[f"probe_{when}"]).astype(float) for row in rows] for when in ("before", "after"))
        beside = ""
        if arm != "vision" and (pairs := found.of("vision", arm)):
            values = [[right_of(row["probe_after"]).astype(float) for row in pair] for pair in pairs]
            beside = _told(paired_interval([mine for mine, _ in values], [other for _, other in values]))
        told = _told(paired_interval(before, after))
        lines.append(f"| {name} | {np.mean(before):.3f} | {np.mean(after):.3f} | {told} | {beside} |")
    known = [row for arm in PROBED for (row,) in found.of(arm)]
    if known:
        probe = known[0]["probe_before"]
        lines.append(f"\n{probe['items']} items, chance {probe['chance']:.3f}. A null is a result.")
    return lines


def _arm_lines(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| arm | seed | iterations | s/iteration | gap, last | clipped, last | test | before | after | tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gap, clipped = ((row["curves"].get(name) or [0.0])[-1] for name in ("gap", "clipped"))
        for name, after in row["after"].items():
            before = row["before"][name]
            if not after["count"] or not before["count"]:
                continue
            lines.append(
                f"| {row['arm']} | {row['seed']} | {row['iterations']} of {row['wanted']} | "
                f"{row['seconds_an_iteration']} | {gap:.4f} | {clipped:.4f} | {name} | "
                f"{before['reward']['mean']:.3f} | {after['reward']['mean']:.3f} | "
                f"{before['length']:.0f} -> {after['length']:.0f} |"
            )
    levels = sorted({_levels(row) for row in rows})
    return [*lines, f"\nLevels of the tasks: {' | '.join(levels)}."] if levels else lines


def _throughput(path: Path) -> list[str]:
    rows = [row for row in read_rows(path) if not row["tiny"]] or read_rows(path)
    if not rows:
        return [f"| throughput | >= 3x a transformers loop | {MISSING}: benchmarks/rl_throughput.py | - |"]
    return [
        f"| throughput, {row['pattern']}{', overlap' * row['overlap']}, {row['device']} | >= 3x a transformers loop | "
        f"{row['ratio']:.2f}x: rollout {row['rollout_tokens_per_s']:,.0f} and trainer "
        f"{row['trainer_tokens_per_s']:,.0f} tokens/s, waiting {row['waiting']:.0%} | {_met(row['ratio'] >= 3)} |"
        for row in rows
    ]
