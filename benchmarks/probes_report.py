"""What benchmarks/probes.py measured, as a table in Markdown and a plot.

    python benchmarks/probes_report.py                              table
    python benchmarks/probes_report.py --png docs/probes.png        and accuracy by length, one panel a task

Reads benchmarks/results/probes.json, trains nothing, needs no GPU. Accuracy is the share of answers, and of nothing
else, that are the most likely token in held-out rows of the full length; of all attempts of an arm the best is shown.
A blind guess knows which symbols could still be asked for, and nothing of which belongs where:

    mqar         1 / pairs of the row
    palindrome   1 / symbols that are not yet repeated, on average over the row
    stack        1 / symbols that lie in any stack, on average over the pops
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import tyro

from perilune.data.probes import TASKS, ProbeConfig, ProbeRows, Task
from perilune.data.probes.mqar import TOKENS_PER_PAIR
from perilune.data.probes.stack import POP
from perilune.recipes.probes import TOKENS_PER_STEP, VOCABULARY

NAMES = {
    "kda": "KDA",
    "kda_head_decay": "KDA, one decay a head",
    "kda_no_conv": "KDA, no convolution",
    "hybrid": "KDA, then MLA",
    "mla_rope": "MLA, RoPE",
    "mla": "MLA, no positions",
}
MARKERS = "osD^vX"
SHORT_MARK = "*"
SOLVED = 0.99
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    results: Path = Path("benchmarks/results/probes.json")
    png: Path | None = None
    """Where the plot goes; none when not given."""


def main(settings: Settings) -> None:
    if not settings.results.exists():
        raise SystemExit(f"--results is {settings.results}, which does not exist: run benchmarks/probes.py first")
    rows = json.loads(settings.results.read_text())["rows"]
    print("\n".join(table(rows)))
    if settings.png:
        draw(rows, settings.png)
        print(f"\nplot: {settings.png}")


def best_attempts(rows: Iterable[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """(task, arm, length) -> the rows, one a seed, of the attempt that came out best; finished ones before others.

    Of those that reached SOLVED, where training ends, the one that took fewest tokens."""
    attempts: dict[tuple[str, str, int], dict[tuple[float, bool], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["accuracy"] is not None:
            attempt = row["lr"], bool(short_steps(row))
            attempts[row["task"], row["arm"], row["length"]][attempt].append(row)

    def rank(group: list[Row]) -> tuple[bool, float, float]:
        is_finished = all(row["finished"] for row in group)
        accuracy = min(SOLVED, fmean(row["accuracy"] for row in group))
        return is_finished, accuracy, -fmean(map(tokens_of, group))

    return {place: max(groups.values(), key=rank) for place, groups in attempts.items()}


def short_steps(row: Row) -> int:
    """Steps on short problems; rows of before there were any say nothing of them."""
    return row.get("short_steps", 0)


def tokens_of(row: Row) -> int:
    return row["steps"] * row.get("tokens_per_step", TOKENS_PER_STEP)


def table(rows: Sequence[Row]) -> list[str]:
    """Accuracy and tokens until it was reached, by task and arm."""
    best = best_attempts(rows)
    lengths = sorted({length for _, _, length in best})
    lines = [f"| task | attention | {' | '.join(map(str, lengths))} |", "|---|---|" + "---|" * len(lengths)]
    for task in _tasks(best):
        for arm in _arms(best):
            if any((task, arm, length) in best for length in lengths):
                cells = [_cell(best.get((task, arm, length), [])) for length in lengths]
                lines.append(f"| {task} | {NAMES[arm]} | {' | '.join(cells)} |")
        lines.append(f"| {task} | a blind guess | {' | '.join(f'{blind(task, length):.1%}' for length in lengths)} |")
    shown = [row for group in best.values() for row in group]
    lines += ["", f"Accuracy on held-out rows and tokens trained on, at most {_most(rows)}; training ends at 99%."]
    if any(map(short_steps, shown)):
        lines.append(
            f"{SHORT_MARK}: up to {_millions(tokens_of({**row, 'steps': short_steps(row)}) for row in shown)} of them "
            "in rows cut into shorter problems, from 16 tokens up."
        )
    if any(not row["finished"] for row in shown):
        lines.append("...: stopped before its steps were over.")
    if any("| - |" in line for line in lines):
        lines.append("-: not run; where a shorter length is there, that one failed or is not finished.")
    return lines


def _cell(group: Sequence[Row]) -> str:
    if not group:
        return "-"
    mark = SHORT_MARK if any(map(short_steps, group)) else ""
    open_end = "" if all(row["finished"] for row in group) else " ..."
    return f"{fmean(row['accuracy'] for row in group):.1%}, {_millions(map(tokens_of, group))}{mark}{open_end}"


def _most(rows: Sequence[Row]) -> str:
    plain = [tokens_of(row) for row in rows if not short_steps(row)]
    short = [tokens_of(row) for row in rows if short_steps(row)]
    return " or ".join(
        [*([_millions(plain)] if plain else []), *([f"{_millions(short)} with {SHORT_MARK}"] if short else [])]
    )


def _millions(tokens: Iterable[int]) -> str:
    return f"{max(tokens, default=0) / 1e6:.3g}M"


def blind(task: Task, length: int) -> float:
    """Accuracy of the guess that the module's docstring describes, in rows of the recipe."""
    if task == "mqar":
        return 1 / max(1, length // TOKENS_PER_PAIR)
    if task == "palindrome":
        return float((1 / np.arange(1, length // 2 + 1)).mean())
    rows = ProbeRows(ProbeConfig(task="stack"), seq_len=length, vocab_size=VOCABULARY, seed=0, held_out=True)
    tokens, _ = rows.generate(np.arange(64))
    is_pop = tokens[:, : (length + 1) // 3 * 3 : 3] == POP
    there = np.cumsum(np.where(is_pop, -1, 1), axis=1) + 1  # what lies in the stacks before a pop
    return float((1 / there[is_pop]).mean())


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy by length, one panel a task; what the clock stopped is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from perilune.report.plots import LIGHT

    best = best_attempts(row for row in rows if row["finished"])
    tasks, arms = _tasks(best), _arms(best)
    lengths = sorted({length for _, _, length in best})
    figure = Figure(figsize=(3.4 * max(1, len(tasks)), 3.2), layout="constrained", facecolor=LIGHT.background)
    FigureCanvasAgg(figure)
    for place, task in enumerate(tasks):
        axes = figure.add_subplot(1, len(tasks), place + 1)
        for number, arm in enumerate(arms):
            points = {length: best[task, arm, length] for length in lengths if (task, arm, length) in best}
            accuracy = [fmean(row["accuracy"] for row in group) for group in points.values()]
            # A little apart, so that arms that solve it all do not hide each other.
            x = [length * 1.025 ** (number - (len(arms) - 1) / 2) for length in points]
            which = list(NAMES).index(arm)
            style: dict[str, Any] = {"color": LIGHT.series[which], "marker": MARKERS[which], "label": NAMES[arm]}
            axes.plot(x, accuracy, markersize=5, linewidth=1.4, **style)
        guesses = [blind(task, length) for length in lengths]
        axes.plot(lengths, guesses, color=LIGHT.muted, linestyle=(0, (4, 3)), linewidth=1, label="a blind guess")
        axes.set_title(task, fontsize=10, color=LIGHT.text, loc="left")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(length) for length in lengths])
        axes.minorticks_off()
        axes.set_ylim(-0.03, 1.05)
        axes.set_xlabel("tokens of a row", fontsize=8, color=LIGHT.muted)
        axes.tick_params(labelsize=8, colors=LIGHT.muted, labelleft=place == 0)
        axes.grid(axis="y", color=LIGHT.grid, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LIGHT.grid)
        if place == 0:
            axes.set_ylabel("held-out accuracy", fontsize=8, color=LIGHT.muted)
            handles, labels = axes.get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=160)


def _tasks(best: Iterable[tuple[str, str, int]]) -> list[Task]:
    there = {task for task, _, _ in best}
    return [task for task in TASKS if task in there]


def _arms(best: Iterable[tuple[str, str, int]]) -> list[str]:
    there = {arm for _, arm, _ in best}
    return [arm for arm in NAMES if arm in there]


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
