"""What benchmarks/long_context.py measured, as tables in Markdown and a plot.

    python benchmarks/long_context_report.py                                 tables
    python benchmarks/long_context_report.py --png docs/long_context.png     and loss by position as a picture

Reads benchmarks/results/long_context.json, trains nothing, needs no GPU.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from perilune.report.plots import Plot, Series, save_png

NAMES = {"hybrid": "KDA and MLA 3:1", "mla_rope": "MLA, RoPE + YaRN", "mla": "MLA, no positions", "kda": "all KDA"}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    results: Path = Path("benchmarks/results/long_context.json")
    png: Path | None = None
    """Where the plot goes; none when not given."""
    beyond: int = 1024
    """Positions that are shown: earlier ones differ little between arms and a lot between texts."""


def main(settings: Settings) -> None:
    rows = [row for row in json.loads(settings.results.read_text()) if not row["tiny"]]
    rows.sort(key=lambda row: (row["extended"] or 0, list(NAMES).index(row["arm"]), row["seed"]))
    print("\n".join(loss_table(rows, settings.beyond)), "\n", *needle_table(rows), sep="\n")
    if settings.png:
        print(f"\nplot: {save_png(loss_plot(rows, settings.beyond), settings.png)}")


def loss_table(rows: list[Row], beyond: int) -> list[str]:
    """Nats by position; every row of one length has the same positions."""
    ends = [place["to"] for place in rows[0]["positions"] if place["to"] > beyond]
    lines = _head("nats at tokens up to", [f"{end:,}" for end in ends])
    for row in rows:
        lines.append(_line(row, [f"{place['nats']:.3f}" for place in row["positions"] if place["to"] in ends]))
    return lines


def needle_table(rows: list[Row]) -> list[str]:
    """Share of values that are the likeliest of all tokens: one key / several in one text."""
    lengths = sorted({needle["length"] for row in rows for needle in row["needles"]})
    counts = sorted({needle["needles"] for row in rows for needle in row["needles"]})
    lines = _head(f"found, {' / '.join(str(count) for count in counts)} in a text of", [f"{n:,}" for n in lengths])
    for row in rows:
        found = {(needle["length"], needle["needles"]): needle for needle in row["needles"]}
        cells = [" / ".join(_share(found.get((length, count))) for count in counts) for length in lengths]
        lines.append(_line(row, cells))
    return lines


def loss_plot(rows: list[Row], beyond: int) -> Plot:
    """One colour an arm: after the extension with its name, before it as rings."""
    series = []
    for row in rows:
        places = [place for place in row["positions"] if place["to"] > beyond]
        is_extended = row["extended"] is not None
        series.append(
            Series(
                name=NAMES[row["arm"]] if is_extended else "",
                x=[place["to"] for place in places],
                y=[place["nats"] for place in places],
                points=True,
                hollow=not is_extended,
                joined=is_extended,
                colour=list(NAMES).index(row["arm"]),
            )
        )
    extended = max(row["extended"] or 0 for row in rows)
    return Plot(
        title=f"Loss by position, trained at 4K (rings) and extended to {extended // 1024}K (lines)",
        x_label="tokens up to",
        y_label="nats a token",
        series=series,
        log_x=True,
        log_y=True,
    )


def _head(first: str, names: Iterable[str]) -> list[str]:
    columns = [f"attention; {first}", *names]
    return [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]


def _line(row: Row, cells: list[str]) -> str:
    length = f"extended to {row['extended']:,}" if row["extended"] else "as trained"
    return f"| {NAMES[row['arm']]}, {length} | {' | '.join(cells)} |"


def _share(needle: Row | None) -> str:
    if needle is None:
        return "-"
    return "memory" if "error" in needle else f"{needle['exact']:.0%}"


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
