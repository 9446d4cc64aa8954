"""What benchmarks/vision.py measured, as tables in Markdown and a plot of text while pictures enter.

    python benchmarks/vision_report.py                             tables
    python benchmarks/vision_report.py --png docs/fusion.png       and the plot

Reads benchmarks/results/vision.json, trains nothing, needs no GPU. Of the arms that draw a table has the scores of one
run with intervals over its pictures. Of the fusion arms it has means over seeds, and the difference of each arm to
another one of the same seeds, which share their text, with the interval of Student's t for paired seeds (95%).
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import tyro

from perilune.ladder.student import two_sided_quantile

Row = dict[str, Any]
DRAWING = ("scenes", "icons", "html", "video")
FUSION = {"fusion-early": "early", "fusion-mid": "mid", "fusion-late": "late", "text-only": "no pictures"}
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class Settings:
    results: Path = Path("benchmarks/results/vision.json")
    png: Path | None = None
    """Where the plot goes; none when not given."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    mean: float
    low: float
    high: float
    seeds: int


def difference(rows: Sequence[Row], arm: str, other: str, value: Callable[[Row], float]) -> Difference | None:
    """Of `arm` over `other`, seed by seed; None with fewer than two seeds that both have."""
    found = {each: {row["seed"]: value(row) for row in _of(rows, each, value)} for each in (arm, other)}
    paired = [found[arm][seed] - found[other][seed] for seed in sorted(found[arm].keys() & found[other].keys())]
    if len(paired) < 2:
        return None
    mean = fmean(paired)
    half = two_sided_quantile(CONFIDENCE, len(paired) - 1) * stdev(paired) / math.sqrt(len(paired))
    return Difference(mean=mean, low=mean - half, high=mean + half, seeds=len(paired))


def _of(rows: Sequence[Row], arm: str, value: Callable[[Row], float]) -> list[Row]:
    """Its rows that have such a value; drawings that nothing could score have none."""
    return [row for row in rows if row["arm"] == arm and (value is not reward or row.get("own"))]


def reward(row: Row) -> float:
    return row["own"]["reward"][0]


def text(row: Row) -> float:
    return row["text_bits_per_byte"]


# Tables ---------------------------------------------------------------------------------------------------------------


def drawing_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| arm | seed | parses | pixels | shapes (F1) | score | against other pictures | frames mixed up | steps |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    drawn = [row for row in rows if row["arm"] in DRAWING]
    for row in sorted(drawn, key=lambda row: (DRAWING.index(row["arm"]), row["seed"])):
        own = row.get("own") or {}
        cells = [
            row["arm"],
            str(row["seed"]),
            f"{row['parses']:.1%}",
            _interval(own.get("pixel")),
            _interval(own.get("f1")),
            _interval(own.get("reward")),
            _interval((row.get("shuffled") or {}).get("reward")),
            _interval((row.get("mixed_frames") or {}).get("reward")),
            f"{row['steps']:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _interval(found: Sequence[float] | None) -> str:
    return "-" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


def frames_line(rows: Sequence[Row]) -> list[str]:
    """Similarity of videos by frame."""
    found = [row for row in rows if row.get("pixel_by_frame")]
    return [
        f"Similarity by frame, seed {row['seed']}: " + ", ".join(f"{value:.2f}" for _, value in row["pixel_by_frame"])
        + f"; {row['pixel_by_frame'][0][0]} videos have the first, {row['pixel_by_frame'][-1][0]} the last"
        for row in found
    ]  # fmt: skip


def fusion_table(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| pictures enter | seeds | score | text, bits a byte | text when they entered, before -> worst after |",
        "|---|---|---|---|---|",
    ]
    for arm, name in FUSION.items():
        found = [row for row in rows if row["arm"] == arm]
        if found:
            drew = [reward(row) for row in found if row.get("own")]
            dips = [row for row in found if "dip" in row]
            cells = [
                name, str(len(found)),
                f"{fmean(drew):.3f}" if drew else "-",
                f"{fmean(map(text, found)):.4f}",
                f"{fmean(row['before_entry'] for row in dips):.4f} -> {fmean(row['after_entry'] for row in dips):.4f}, "
                f"{fmean(row['dip'] for row in dips):+.1%}" if dips else "-",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def difference_table(rows: Sequence[Row]) -> list[str]:
    asked: list[tuple[str, str, str, Callable[[Row], float]]] = [
        ("score", "fusion-mid", "fusion-early", reward),
        ("score", "fusion-late", "fusion-early", reward),
        ("text", "fusion-early", "text-only", text),
        ("text", "fusion-mid", "text-only", text),
        ("text", "fusion-late", "text-only", text),
    ]
    lines = ["| difference | mean | 95% | shown |", "|---|---|---|---|"]
    for what, arm, other, value in asked:
        found = difference(rows, arm, other, value)
        if found is not None:
            shown = "yes" if found.low > 0 or found.high < 0 else "no"
            name = f"{what}, {FUSION[arm]} over {FUSION[other]}"
            lines.append(f"| {name} | {found.mean:+.4f} | [{found.low:+.4f}, {found.high:+.4f}] | {shown} |")
    return lines


# Plot -----------------------------------------------------------------------------------------------------------------


def plot(rows: Sequence[Row], path: Path) -> None:
    """Text over the run, as a ratio to the run without pictures of the same seed; each seed is a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from perilune.report.plots import LIGHT

    figure = Figure(figsize=(8, 3.4), layout="constrained", facecolor=LIGHT.background)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    control = {row["seed"]: dict(row["text_curve"]) for row in rows if row["arm"] == "text-only"}
    for number, (arm, name) in enumerate(list(FUSION.items())[:-1]):
        for place, row in enumerate(row for row in rows if row["arm"] == arm and row["seed"] in control):
            points = [(step, value / control[row["seed"]][step] - 1) for step, value in row["text_curve"]]
            # The later one lies below: until pictures enter, mid and late are the same run.
            style = {"color": LIGHT.series[number], "linewidth": 1.2, "zorder": 4 - number}
            axes.plot(*zip(*points), label="" if place else name, **style)
    axes.axhline(0, color=LIGHT.muted, linewidth=1)
    axes.set_ylim(-0.06, 0.07)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:+.0%}")
    axes.set_xlabel("step", fontsize=8, color=LIGHT.muted)
    axes.set_ylabel("bits a byte of text, over no pictures", fontsize=8, color=LIGHT.muted)
    axes.tick_params(labelsize=8, colors=LIGHT.muted)
    axes.grid(axis="y", color=LIGHT.grid, linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT.grid)
    axes.legend(title="pictures enter", fontsize=8, title_fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def main(settings: Settings) -> None:
    if not settings.results.exists():
        raise SystemExit(f"{settings.results} is not there: python benchmarks/vision.py ARM writes it")
    rows = [row for row in json.loads(settings.results.read_text()) if not row["tiny"]]
    tables = (drawing_table(rows), frames_line(rows), fusion_table(rows), difference_table(rows))
    print("\n\n".join("\n".join(lines) for lines in tables if lines))
    if settings.png is not None:
        plot(rows, settings.png)
        print(f"\nplot: {settings.png}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
