"""The page of benchmarks/rl_experiments.py: bars, curves of every arm, answers before and after. No script of its own.

Curves are means over the seeds of an arm and the last ten iterations; rewards of training are those of sampled answers,
those of tables are greedy, on test tasks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rl_report import Rows, bars
from rl_rows import Row

from perilune.report.page import Page, Plots, Sample, Samples, Table, write_page
from perilune.report.pictures import picture_row, pictures_section, png_of
from perilune.report.plots import Plot, Series, save_png

SMOOTHED = 10
DRAWN = {
    "vision": "zero-vision SFT", "vision-kinds": "paid for kinds too", "vision-ptx": "with PTX",
    "vision-text-image": "text+image SFT",
    "vision-none": "SFT without pictures", "vision-mla": "zero-vision SFT, all MLA",
    "shuffled": "pictures of other tasks",
}  # fmt: skip
OWN = {"vision": "drawing", "words": "words", "sums": "sums", "sums-toggle": "sums", "tools": "tools"}
"""Arms whose answers are shown, and to what."""
SOLVED = {"sums": "word problems", "sums-toggle": "under Toggle", "sums-rigid": "under a rigid budget"}


def curves(rows: Sequence[Row], names: Mapping[str, str], value: str) -> list[Series]:
    found = []
    for arm, name in names.items():
        kept = [row["curves"][value] for row in rows if row["arm"] == arm and value in row["curves"]]
        if not kept:
            continue
        length = min(map(len, kept))
        mean = np.array([each[:length] for each in kept], dtype=np.float64).mean(0)
        y = [float(mean[max(0, end - SMOOTHED) : end].mean()) for end in range(1, length + 1)]
        found.append(Series(name=name, x=list(range(1, length + 1)), y=y))
    return found


def plots(rows: Sequence[Row]) -> list[Plot]:
    made = [
        ("Picture to SVG", "reward of samples", DRAWN, "reward"),
        ("Word problems", "reward of samples", SOLVED, "reward"),
        ("Length of answers to word problems", "tokens", SOLVED, "length"),
        ("Calculations with a calculator", "reward of samples", {"tools": "tool use"}, "reward"),
    ]
    found = [
        Plot(title=title, x_label="iteration", y_label=label, series=curves(rows, names, value), from_zero=True)
        for title, label, names, value in made
    ]
    return [plot for plot in found if not plot.is_empty]


def page_of(rows: Sequence[Row]) -> Page:
    found = Rows(rows)
    told = [[name, bar, said, {True: "yes", False: "no", None: "-"}[met]] for name, bar, said, met in bars(found)]
    seeds = sorted({row["seed"] for row in rows})
    first = rows[0]
    return Page(
        title="Reinforcement learning: what it buys, and what controls say",
        subtitle=f"{len(rows)} runs, seeds {', '.join(map(str, seeds))}; {first['tasks']} tasks x {first['samples']} "
        "samples an iteration, one model of 37M parameters for all arms of an attention",
        facts=first["environment"],
        sections=[
            Table(title="Bars", columns=["experiment", "bar", "measured", "met"], rows=told),
            Plots(title="Training", plots=plots(rows)),
            *_answers(rows),
        ],
    )


def _answers(rows: Sequence[Row]) -> list[Any]:
    """Of the first seed: drawings of the arm of pictures, texts of the others. The first test tasks, none is chosen."""
    drawings, texts = [], []
    for row in rows:
        if row["seed"] != min(each["seed"] for each in rows):
            continue
        for when in ("before", "after"):
            for sample in row["examples"][when]:
                heading = f"{row['arm']}, {sample['task']}, {when}"
                shown, drawn = (png_of(sample.get(name)) for name in ("image", "drawn"))
                own = OWN.get(row["arm"])
                if own != sample["environment"]:
                    continue
                if shown is not None:
                    drawings.append(
                        picture_row(heading, shown=shown, source=sample["text"], drawn=drawn,
                                    problem=sample.get("problem", ""), score={"reward": sample["reward"]})
                    )  # fmt: skip
                elif (
                    row["arm"] in ("sums", "sums-toggle", "tools") and sample["environment"] == row["arm"].split("-")[0]
                ):
                    texts.append(
                        Sample(heading=f"{heading}: reward {sample['reward']:g}", prompt=sample["prompt"],
                               text=sample["text"])
                    )  # fmt: skip
    sections: list[Any] = []
    if drawings:
        sections.append(pictures_section("Drawings before and after", drawings))
    if texts:
        sections.append(Samples(title="Answers before and after", samples=texts))
    return sections


def write_rl_page(rows: Sequence[Row], path: Path, png: Path | None) -> None:
    write_page(page_of(rows), path)
    if png is not None:
        save_png(plots(rows)[0], png)
