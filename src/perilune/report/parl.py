"""What reports show of swarms: how often and how wide they work in parallel, by kind of task, before and after.

    swarm_sections(iterations, evaluations)       sections of a run's report (report/rl.py); [] for a run without swarms
    write_arms_page({"full": folder, ...}, path)  several runs beside each other

Records have `kinds` (rl/parl.py, by_kind) and `parl` (how much of the extra rewards is left); evaluations also have the
events of the episodes that are shown.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perilune.report.lanes import LEGEND, Timeline, Timelines, shortened, timeline
from perilune.report.page import Headline, Page, Plots, Section, Table, write_page
from perilune.report.plots import Plot, Series, Threshold, number, series_from_records
from perilune.report.training import ReportError

Records = Sequence[Mapping[str, Any]]
CURVES = (
    ("spawn", "Spawn rate", "share of episodes with a worker", "Episodes in which at least one worker was started."),
    ("outcome", "Outcome", "mean item-F1", ""),
    ("critical_steps", "Critical steps", "steps on the longest path", ""),
    ("width", "Width", "workers at the same time", "Most workers of one stage, mean over episodes."),
    ("finished", "Finished tasks", "share of assigned tasks", "Assigned tasks that ended with a result."),
    ("unused", "Unused workers", "share of workers", "Workers of whose result nothing is in the final answer."),
    ("total_steps", "Total steps", "steps of everybody", "What parallel work costs, beside what it saves."),
)
COLUMNS = (
    "spawn",
    "outcome",
    "width",
    "critical_steps",
    "total_steps",
    "finished",
    "unused",
    "tokens",
    "worker_tokens",
)
SHARES = ("spawn", "finished", "unused")


def swarm_sections(iterations: Records, evaluations: Records) -> list[Section]:
    """Tables, curves and timelines; [] where nothing was played by a swarm."""
    kinds = _kinds(iterations)
    tested = [(each, found) for each in evaluations if (found := _tested_kinds(each))]
    if not kinds and not tested:
        return []
    sections: list[Section] = []
    if rows := _rows(tested):
        sections.append(
            Table(
                title="The swarm before and after",
                columns=("tasks", *(name.replace("_", " ") for name in COLUMNS)),
                rows=rows,
                text="Greedy episodes of the test split by kind of task. Spawn: episodes with a worker. Finished: of "
                "assigned tasks. Unused: workers of whose result nothing is in the final answer. Tokens: sampled by "
                "everybody in an episode, and by workers alone.",
            )
        )
    plots = [_curve(iterations, kinds, *each) for each in CURVES]
    plots.append(_fading(iterations))
    if shown := [plot for plot in plots if not plot.is_empty]:
        sections.append(Plots(title="The swarm in training", plots=shown))
    if timelines := _timelines(evaluations):
        sections.append(Timelines(title="Episodes as timelines", plots=timelines, text=LEGEND))
    return sections


def _kinds(iterations: Records) -> list[str]:
    return sorted({kind for each in iterations for kind in each.get("kinds") or ()})


def _curve(iterations: Records, kinds: Sequence[str], key: str, title: str, y_label: str, caption: str) -> Plot:
    series = [
        series_from_records(iterations, _reader(kind, key), name=kind, x="iteration", colour=colour)
        for colour, kind in enumerate(kinds)
    ]
    return Plot(title=title, x_label="iteration", y_label=y_label, series=series, from_zero=True, caption=caption)


def _reader(kind: str, key: str) -> Any:
    return lambda record: ((record.get("kinds") or {}).get(kind) or {}).get(key)


def _fading(iterations: Records) -> Plot:
    series = series_from_records(
        iterations, lambda record: (record.get("parl") or {}).get("share"), name="left", x="iteration"
    )
    rate = series_from_records(
        iterations, lambda record: (record.get("parl") or {}).get("finish_rate"), name="finish rate", x="iteration"
    )
    caption = "What is left of the rewards for instantiation and finish, and the running finish rate that starts it."
    return Plot(title="Fading rewards", x_label="iteration", y_label="share", series=[series, rate], from_zero=True,
                caption=caption)  # fmt: skip


def _tested_kinds(evaluation: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for numbers in (evaluation.get("environments") or {}).values():
        found |= numbers.get("kinds") or {}
    return found


def _rows(tested: Sequence[tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]]) -> list[list[str]]:
    if not tested:
        return []
    (_, first), (evaluation, last) = tested[0], tested[-1]
    rows = []
    for kind in sorted({*first, *last}):
        rows.append([f"{kind}, before", *_cells(first.get(kind) or {})])
        if len(tested) > 1:
            rows.append([f"{kind}, after {evaluation.get('iteration')}", *_cells(last.get(kind) or {})])
    return rows


def _cells(numbers: Mapping[str, Any]) -> list[str]:
    cells = []
    for name in COLUMNS:
        value = number(numbers.get(name))
        cells.append("-" if value is None else f"{value:.0%}" if name in SHARES else _plain(value))
    return cells


def _plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _timelines(evaluations: Records) -> list[Timeline]:
    """The same tasks before and after; of each kind of task the first."""
    if not evaluations:
        return []
    times = [(evaluations[0], "before")]
    if len(evaluations) > 1:
        times.append((evaluations[-1], f"after {evaluations[-1].get('iteration')} iterations"))
    found: list[Timeline] = []
    tasks = [sample for sample in evaluations[0].get("samples") or () if sample.get("events")]
    chosen = {str(sample.get("kind")): str(sample.get("task")) for sample in reversed(tasks)}
    for kind, task in sorted(chosen.items(), key=lambda pair: pair[0] != "wide"):
        for evaluation, when in times:
            for sample in evaluation.get("samples") or ():
                if str(sample.get("task")) == task and sample.get("events"):
                    outcome = number((sample.get("facets") or {}).get("outcome"))
                    worth = "" if outcome is None else f"outcome {outcome:.2f}. "
                    found.append(timeline(f"{kind}, {when}", sample["events"], caption=worth + shortened(task, 160)))
    return [each for each in found if not each.is_empty]


# ---------------------------------------------------------------------------------------------------------------------
# Several runs


def write_arms_page(runs: Mapping[str, Path], path: Path, *, kind: str = "wide") -> Path:
    """Runs beside each other, by the name of their arm: curves for one kind of task, and a table of the last fifth."""
    from perilune.report.rl import read_rl_run  # which shows sections of this file

    records = {name: read_rl_run(folder) for name, folder in runs.items()}
    known = sorted({found for each in records.values() for found in _kinds(each.iterations)})
    if kind not in known:
        there = f"there are {', '.join(known)}" if known else "no run of these has episodes of a swarm"
        raise ReportError(f"there are no tasks of the kind {kind!r} to show: {there}")
    plots = []
    for key, title, y_label, caption in CURVES:
        series: list[Series] = [
            series_from_records(each.iterations, _reader(kind, key), name=name, x="iteration", colour=colour)
            for colour, (name, each) in enumerate(records.items())
        ]
        marks = [Threshold(value=0.05, name="collapse")] if key == "spawn" else []
        plots.append(Plot(title=title, x_label="iteration", y_label=y_label, series=series, from_zero=True,
                          caption=caption, thresholds=marks))  # fmt: skip
    rows = []
    for name, each in records.items():
        last = each.iterations[-max(1, len(each.iterations) // 5) :]
        for found in _kinds(last):
            means = {key: _mean([_reader(found, key)(record) for record in last]) for key in COLUMNS}
            rows.append([f"{name}, {found}", str(len(each.iterations)), *_cells(means)])
    sections: list[Section] = [
        Table(
            title="The last fifth of training",
            columns=("run and tasks", "iterations", *(column.replace("_", " ") for column in COLUMNS)),
            rows=rows,
            text="Means over the last fifth of the iterations, sampled at temperature 1.",
        ),
        Plots(title=f"Curves on {kind} tasks", plots=[plot for plot in plots if not plot.is_empty]),
    ]
    headlines = [
        Headline(label=f"{row[0]}: spawn rate", value=row[2], note=f"outcome {row[3]}")
        for row in rows
        if row[0].endswith(f", {kind}")
    ]
    title = "Arms beside each other"
    return write_page(Page(title=title, subtitle=", ".join(runs), headlines=headlines[:6], sections=sections), path)


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for each in values if (value := number(each)) is not None]
    return sum(known) / len(known) if known else None
