"""What reports show of swarms: how often and how wide they work in parallel, by kind of task, before and after.

    swarm_sections(iterations, evaluations, parl) sections of a run's report (report/rl.py); [] for a run without swarms
    swarm_notes(iterations, kinds)                how a swarm has failed of late, in sentences; [] where it has not
    write_arms_page({"full": folder, ...}, path)  several runs beside each other

Records have `kinds` (rl/parl.py, by_kind) and `parl` (how much of the extra rewards is left); evaluations also have the
events of the episodes that are shown.
"""

import math
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
FEWEST_ITERATIONS = 5
"""Of a run, before anything is said of how its swarm works."""
COLLAPSED, OFTEN = 0.05, 0.2
"""Episodes with a worker, below which a swarm has collapsed, and from which on its workers are looked at."""
ALONE = 1.5
"""Workers side by side, below which they come one after another."""
MOST_UNUSED, LEAST_FINISHED = 0.2, 0.8


def swarm_sections(
    iterations: Records, evaluations: Records, parl: Mapping[str, Any] | None = None
) -> list[Section]:
    """Tables, curves and timelines; [] where nothing was played by a swarm. `parl`: the rewards, as a run's settings
    have them (rl/parl.py)."""
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
                text="Greedy episodes of the test split by kind of task, and how many. Spawn: episodes with a worker. "
                "Finished: of assigned tasks. Unused: workers of whose result nothing is in the final answer. Tokens: "
                "sampled by everybody in an episode, and by workers alone.",
            )
        )
    plots = [_curve(iterations, kinds, *each) for each in CURVES]
    plots.append(_fading(iterations))
    if shown := [plot for plot in plots if not plot.is_empty]:
        sections.append(Plots(title="The swarm in training", plots=shown, text=paid_text(parl or {})))
    if timelines := _timelines(evaluations):
        sections.append(Timelines(title="Episodes as timelines", plots=timelines, text=LEGEND))
    return sections


def swarm_notes(iterations: Records, kinds: Sequence[str] = ()) -> list[str]:
    """What went wrong in the last fifth, on tasks that are to be worked on in parallel (empty: all kinds): nobody
    delegates, workers come one after another, or for show."""
    if len(iterations) < FEWEST_ITERATIONS:
        return []
    last, notes = iterations[-max(1, len(iterations) // 5) :], []
    for kind in kinds or _kinds(last):
        found = {key: _mean([_reader(kind, key)(record) for record in last]) for key in COLUMNS}
        spawn, width, unused, finished = (found[key] for key in ("spawn", "width", "unused", "finished"))
        if spawn is None:
            continue
        most = max(filter(None, map(number, map(_reader(kind, "spawn"), iterations))), default=0.0)
        if not most:
            notes.append(f"No episode on {kind} tasks had a worker.")
        elif spawn < COLLAPSED:
            had = f"of late {spawn:.0%} of the episodes have a worker, {most:.0%} once had"
            notes.append(f"Serial collapse on {kind} tasks: {had}.")
        if spawn < OFTEN:
            continue
        if width is not None and width / spawn < ALONE:
            notes.append(
                f"One worker after another on {kind} tasks: {spawn:.0%} of the episodes have workers, "
                f"{width / spawn:.1f} at a time. That is serial work with more steps, though the spawn rate is high."
            )
        if unused is not None and unused > MOST_UNUSED:
            notes.append(f"Workers for show on {kind} tasks: {unused:.0%} of them left nothing in the final answer.")
        if finished is not None and finished < LEAST_FINISHED:
            notes.append(f"Lost work on {kind} tasks: {finished:.0%} of the assigned tasks end with a result.")
    return notes


def paid_text(parl: Mapping[str, Any]) -> str:
    """What a run pays for, and who its workers are; nothing without settings of these names."""
    weights = {name: number(parl.get(name)) for name in ("parallel", "finish", "outcome", "economy")}
    if parl.get("form") not in ("report", "blog") or weights["outcome"] is None:
        return ""
    if parl["form"] == "blog":
        weights["finish"] = 0.0  # which that form does not have
    names = {"parallel": "workers that are started", "finish": "tasks that end with a result"}
    extra = [f"{weight:g} for {names[name]}" for name in names if (weight := weights[name])]
    told = [f"{weights['outcome']:g} for the outcome"]
    if weights["economy"]:
        told.append(f"{weights['economy']:g} for few steps of everybody")
    text = f"Paid: {', '.join(told)}"
    if extra:
        kinds = parl.get("kinds")
        where = f"{', '.join(map(str, kinds))} tasks" if isinstance(kinds, list) and kinds else "all tasks"
        over, rate, start = parl.get("over"), number(parl.get("finish_rate")), parl.get("start")
        when = {
            "finish": f"; fading over {over} iterations, once {rate or 0:.0%} of enough tasks end with a result",
            "clock": f"; fading over {over} iterations from iteration {start} on",
        }.get(str(parl.get("anneal")), "")
        text += f"; on {where} also {' and '.join(extra)}{when}"
    if parl["form"] == "blog":
        text += "; in the blog's form, where the outcome counts for the rest of 1"
    workers = {"frozen": "Workers are frozen.", "joint": "Workers are the policy itself."}.get(str(parl.get("workers")))
    return f"{text}. {workers or ''}".strip()


def _kinds(iterations: Records) -> list[str]:
    return sorted({kind for each in iterations for kind in each.get("kinds") or ()})


def _curve(iterations: Records, kinds: Sequence[str], key: str, title: str, y_label: str, caption: str) -> Plot:
    series = [_with_gaps(iterations, kind, key, colour) for colour, kind in enumerate(kinds)]
    return Plot(title=title, x_label="iteration", y_label=y_label, series=series, from_zero=True, caption=caption)


def _with_gaps(iterations: Records, kind: str, key: str, colour: int) -> Series:
    """No line where an iteration says nothing, since it had no such task or no worker; marks where that is often."""
    values = [number(_reader(kind, key)(record)) for record in iterations]
    known = [value is not None for value in values]
    lonely = any(here and not before and not after
                 for before, here, after in zip([False, *known], known, [*known[1:], False]))  # fmt: skip
    y = [math.nan if value is None else value for value in values]
    return Series(name=kind, x=[record["iteration"] for record in iterations], y=y, points=lonely, colour=colour)


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
        for found, when in ((first, "before"), (last, f"after {evaluation.get('iteration')}"))[: len(tested)]:
            count = number((found.get(kind) or {}).get("episodes"))
            played = "" if count is None else f" ({count:.0f})"
            rows.append([f"{kind}{played}, {when}", *_cells(found.get(kind) or {})])
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
