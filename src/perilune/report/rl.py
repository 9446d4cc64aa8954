"""The report of a run of reinforcement learning: report.html from what lies in its folder.

It reads rl.json, environment.json, records.jsonl (an iteration a line) and evaluations.jsonl (an evaluation a line,
with the samples to show), at any time, also while the run goes on or after it was killed: an unfinished last line and
fields that a run does not have are fine.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.report.page import Headline, Notes, Page, PictureRow, Plots, Sample, Samples, Section, Table, write_page
from perilune.report.parl import swarm_notes, swarm_sections
from perilune.report.pictures import picture_row, pictures_section, png_of
from perilune.report.plots import Plot, Series, number, series_from_records, smoothed
from perilune.report.training import ReportError

SMOOTHED_FROM = 60
MOST_EXAMPLES = 12


@dataclass(kw_only=True)
class RLRecords:
    """What the folder of a run says, in order of iterations; one written twice counts as written last."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    iterations: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)

    @property
    def planned(self) -> int | None:
        planned = number(_get(self.config, "rl", "iterations"))
        return None if planned is None else int(planned)


def write_rl_report(folder: str | Path) -> Path:
    """Write report.html into a run's folder and return its path."""
    return write_page(rl_page(read_rl_run(Path(folder))), Path(folder) / "report.html")


def read_rl_run(folder: Path) -> RLRecords:
    if not (folder / "rl.json").exists():
        raise ReportError(f"{str(folder)!r} holds no run of reinforcement learning: it has no rl.json")
    return RLRecords(
        name=folder.resolve().name,
        config=_object(folder / "rl.json"),
        environment=_object(folder / "environment.json"),
        iterations=_lines(folder / "records.jsonl"),
        evaluations=_lines(folder / "evaluations.jsonl"),
    )


def rl_page(records: RLRecords) -> Page:
    done, planned = len(records.iterations), records.planned
    sections: list[Section] = []
    if notes := _notes(records):
        sections.append(Notes(title="Worth knowing", notes=notes))
    if rows := _before_after(records):
        sections.append(
            Table(
                title="Test tasks before and after",
                columns=("environment", "tasks", "before", "after", "gain", "finished", "length"),
                rows=rows,
                text="Mean reward, greedy, on tasks of the test split, with 95% intervals in brackets (bootstrap over "
                "tasks). The gain is over the same tasks."
                + (
                    " Other pictures: each task with the picture of another one, which is what can be had without "
                    "looking."
                    if any("looking" in numbers for numbers in _tested(records.evaluations[-1]).values())
                    else ""
                ),
            )
        )
    parl = _get(records.config, "rl", "parl")
    sections += swarm_sections(records.iterations, records.evaluations, parl if isinstance(parl, dict) else None)
    groups = (
        ("Reward", [_reward_plot(records), _facet_plot(records), _evaluation_plot(records)]),
        ("Episodes", _episode_plots(records)),
        ("Learning", _learning_plots(records)),
        ("Time", _time_plots(records)),
    )
    for title, plots in groups:
        if shown := [plot for plot in plots if not plot.is_empty]:
            sections.append(Plots(title=title, plots=shown))
    sections += _sample_sections(records)
    if rows := _failure_rows(records):
        sections.append(
            Table(
                title="Episodes lost", columns=("kind", "episodes", "first example"), rows=rows,
                text="An episode that fails costs itself and nothing else.",
            )
        )  # fmt: skip
    settings = [[name, _plain(value)] for name, value in _flat(records.config)]
    if settings:
        sections.append(Table(title="Settings", columns=("field", "value"), rows=settings, folded=True))
    going = "" if planned is None or done >= planned else f" of {planned:,}"
    start = _get(records.config, "start_from")
    begun = f", from {Path(start).name}" if isinstance(start, str) and start else ""
    return Page(
        title=f"Reinforcement learning: {records.name}",
        subtitle=f"{done:,}{going} iterations in {', '.join(_environments(records)) or 'no environment'}{begun}",
        headlines=_headlines(records),
        facts={str(key): _fact(key, value) for key, value in records.environment.items()},
        sections=sections,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


def _headlines(records: RLRecords) -> list[Headline]:
    found = []
    rewards = [value for each in records.iterations if (value := number(each.get("reward"))) is not None]
    if rewards:
        tail = rewards[-min(10, len(rewards)) :]
        found.append(
            Headline(
                label="training reward", value=f"{sum(tail) / len(tail):.3f}",
                note=f"mean of the last {len(tail)}; the first was {rewards[0]:.3f}"
                + (", with rewards that have faded since" if _fades(records) else ""),
            )
        )  # fmt: skip
    if records.evaluations:
        for name, numbers in list(_tested(records.evaluations[-1]).items())[:2]:
            if isinstance(numbers.get("reward"), dict):
                note = f"greedy, after {records.evaluations[-1].get('iteration')} iterations"
                found.append(Headline(label=f"{name}, test", value=f"{numbers['reward']['mean']:.3f}", note=note))
    if records.iterations:
        gaps = [gap for each in records.iterations if (gap := number(each.get("largest_gap"))) is not None]
        if gaps:
            means = [gap for each in records.iterations if (gap := number(each.get("gap"))) is not None]
            mean = f"; the mean is {sum(means) / len(means):.1e}" if means else ""
            note = f"of one token's log-probs, trainer to engine{mean}"
            found.append(Headline(label="largest gap", value=f"{max(gaps):.1e}", note=note))
        seconds = sum(number(each.get("seconds")) or 0.0 for each in records.iterations)
        episodes = sum(int(number(each.get("episodes")) or 0) for each in records.iterations)
        found.append(Headline(label="episodes", value=f"{episodes:,}", note=f"in {seconds:,.0f} s"))
    return found


def _fades(records: RLRecords) -> bool:
    """Whether a part of the reward has lost weight meanwhile: rewards of different iterations are no scale then."""
    extra = any(number(_get(records.config, "rl", "parl", name)) for name in ("parallel", "finish"))
    shares = {number(_get(each, "parl", "share")) for each in records.iterations}
    return extra and len(shares - {None}) > 1


def swarm_notes_of(records: RLRecords) -> list[str]:
    """How the swarm of a run has failed of late, on the tasks on which parallel work is paid for."""
    kinds = _get(records.config, "rl", "parl", "kinds")
    return swarm_notes(records.iterations, kinds if isinstance(kinds, list) else ())


def _notes(records: RLRecords) -> list[str]:
    notes = swarm_notes_of(records)
    lost = sum(_failures(records.iterations).values())
    episodes = sum(int(number(each.get("episodes")) or 0) for each in records.iterations)
    if lost:
        notes.append(f"Episodes lost: {lost:,} of {lost + episodes:,}; the table below says why.")
    if empty := sum(int(number(each.get("empty")) or 0) for each in records.iterations):
        notes.append(f"Episodes in which the policy said nothing: {empty:,}. They are judged as what they are.")
    equal = sum(int(_get(each, "dropped", "groups with equal rewards") or 0) for each in records.iterations)
    if equal:
        size = number(_get(records.config, "rl", "rollout", "group_size"))
        of = f" of about {round((lost + episodes) / size):,}" if size else ""
        notes.append(f"Groups with equal rewards, which taught nothing: {equal:,}{of}.")
    if skipped := sum(int(number(each.get("skipped")) or 0) for each in records.iterations):
        notes.append(f"Updates that moved nothing (nothing to learn, or a gradient that is not finite): {skipped:,}.")
    return notes


def _before_after(records: RLRecords) -> list[list[str]]:
    if not records.evaluations:
        return []
    first, last = _tested(records.evaluations[0]), _tested(records.evaluations[-1])
    one = len(records.evaluations) == 1
    rows = []
    for name, after in last.items():
        before = first.get(name, {})
        rows.append(
            [
                name,
                str(after.get("count", 0)),
                _interval(before.get("reward")),
                "-" if one else _interval(after.get("reward")),
                "-" if one else _interval(after.get("gain"), signed=True),
                "-" if (share := number(after.get("finished"))) is None else f"{share:.0%}",
                "-" if (length := number(after.get("length"))) is None else f"{length:.1f}",
            ]
        )
        if isinstance(after.get("looking"), dict):
            looked = [_interval(each.get("looking"), signed=True) for each in (before, after)]
            rows.append([f"{name}: by looking", "", looked[0], "-" if one else looked[1], "", "", ""])
    return rows


def _interval(value: Any, *, signed: bool = False) -> str:
    if not isinstance(value, dict):
        return "-"
    form = "{:+.3f}" if signed else "{:.3f}"
    mean, low, high = (form.format(float(value[key])) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _failures(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in lines:
        for kind, count in (line.get("failures") or {}).items():
            found[kind] = found.get(kind, 0) + int(count)
    return found


def _failure_rows(records: RLRecords) -> list[list[str]]:
    lines = [*records.iterations, *records.evaluations]
    examples: dict[str, str] = {}
    for line in lines:
        for example in line.get("examples") or ():
            kind, _, told = str(example).removeprefix("[").partition("] ")
            examples.setdefault(kind, told)
    counts = sorted(_failures(lines).items(), key=lambda pair: -pair[1])
    rows = [[kind, f"{count:,}", examples.get(kind, "")[:400]] for kind, count in counts]
    return rows[:MOST_EXAMPLES]


# ---------------------------------------------------------------------------------------------------------------------
# Plots


def _curve(records: RLRecords, key: str, name: str, *, colour: int = 0) -> list[Series]:
    raw = series_from_records(records.iterations, key, name=name, x="iteration", colour=colour)
    if len(raw.y) < SMOOTHED_FROM:
        return [raw]
    return [Series(name=name, x=raw.x, y=raw.y, faint=True, colour=colour), smoothed(raw)]


def _plot(title: str, y_label: str, series: Sequence[Series], **more: Any) -> Plot:
    return Plot(title=title, x_label="iteration", y_label=y_label, series=series, **more)


def _reward_plot(records: RLRecords) -> Plot:
    caption = "Mean over the episodes of an iteration, sampled at temperature 1, before any shaping."
    if _fades(records):
        caption += " Rewards for parallel work fade during the run: the outcome alone compares early with late."
    return _plot("Reward", "mean reward in training", _curve(records, "reward", "reward", colour=0), caption=caption)


def _facet_plot(records: RLRecords) -> Plot:
    names = sorted({key for each in records.iterations for key in each if key.startswith("facet.")})
    if any("kinds" in each for each in records.iterations):  # counts of a swarm have plots of their own
        names = [f"facet.{name}" for name in ("finish", "outcome", "parallel", "success") if f"facet.{name}" in names]
    series = [
        each
        for place, key in enumerate(names[:8])
        for each in _curve(records, key, key.removeprefix("facet."), colour=place)
    ]
    return _plot("Facets of the reward", "mean in training", series)


def _evaluation_plot(records: RLRecords) -> Plot:
    names = list(dict.fromkeys(name for each in records.evaluations for name in _tested(each)))
    series = []
    for place, name in enumerate(names[:8]):
        found = [
            (float(each["iteration"]), numbers["reward"])
            for each in records.evaluations
            if isinstance((numbers := _tested(each).get(name, {})).get("reward"), dict)
        ]
        series.append(
            Series(
                name=name,
                x=[iteration for iteration, _ in found],
                y=[reward["mean"] for _, reward in found],
                low=[reward["low"] for _, reward in found],
                high=[reward["high"] for _, reward in found],
                points=True,
                colour=place,
            )
        )
    return _plot("Reward on test tasks", "mean reward, greedy", series, caption="Bars are 95% intervals.")


def _episode_plots(records: RLRecords) -> list[Plot]:
    return [
        _plot("Length", "sampled tokens an episode", _curve(records, "length", "length"), from_zero=True),
        _plot("Finished", "share that ended by itself", _curve(records, "finished", "finished"), from_zero=True),
    ]


def _learning_plots(records: RLRecords) -> list[Plot]:
    gap = [*_curve(records, "largest_gap", "largest", colour=1), *_curve(records, "gap", "mean", colour=0)]
    plots = [
        _plot("Gap between trainer and engine", "|difference of log-probs|", gap, from_zero=True,
              caption="Of trained tokens in an iteration's updates. It grows where weights moved since sampling."),
        _plot("Clipped", "share of tokens", _curve(records, "clipped", "clipped"), from_zero=True,
              caption="Tokens without a policy gradient, since their ratio has left the band."),
        _plot("Gradient norm", "largest in the iteration", _curve(records, "grad_norm", "norm"), from_zero=True),
        _plot("Supervised loss", "nats a token", _curve(records, "ptx_loss", "PTX")),
    ]  # fmt: skip
    if any(number(each.get("staleness")) for each in records.iterations):
        plots.append(_plot("Staleness", "versions, at most", _curve(records, "staleness", "staleness"), from_zero=True))
    return plots


def _time_plots(records: RLRecords) -> list[Plot]:
    def share(key: str) -> Any:
        return lambda record: (number(record.get(key)) or 0.0) / max(1e-9, number(record.get("seconds")) or 1e-9)

    parts = [
        series_from_records(records.iterations, share(key), name=name, x="iteration", colour=colour)
        for colour, (key, name) in enumerate((("rollout_seconds", "playing"), ("learn_seconds", "learning")))
    ]
    rates = [
        *_curve(records, "rollout_tokens_per_s", "played", colour=0),
        *_curve(records, "learn_tokens_per_s", "learnt", colour=1),
    ]
    waiting = "Learner idle while episodes are played"
    return [
        _plot("Shares of an iteration", "share of its time", parts, from_zero=True,
              caption="With overlap both run at once, and the shares add up to more than 1."),
        _plot("Waiting", "share of its time", _curve(records, "waiting", "learner"), from_zero=True, caption=waiting),
        _plot("Tokens per second", "sampled tokens", rates, from_zero=True),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Samples


def _sample_sections(records: RLRecords) -> list[Section]:
    """The same tasks before and after, one below the other."""
    if not records.evaluations:
        return []
    first, last = records.evaluations[0], records.evaluations[-1]
    times = [(first, "before")] if first is last else [(first, "before"), (last, f"after {last.get('iteration')}")]
    by_task: dict[tuple[str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for evaluation, when in times:
        for sample in evaluation.get("samples") or ():
            key = str(sample.get("environment")), str(sample.get("task"))
            by_task.setdefault(key, []).append((when, sample))
    texts, pictures = [], []
    for (environment, task), versions in by_task.items():
        for when, sample in versions:
            reward = number(sample.get("reward"))
            worth = "" if reward is None else f"reward {reward:.3f}"
            cut = ", cut for its length" if sample.get("finish") == "length" else ""
            if (row := _picture(f"{task}, {when}{cut}", sample)) is not None:
                pictures.append(row)
            else:
                kind = f", {sample['kind']}" if sample.get("kind") else ""
                heading = f"{environment}{kind}, {when}: {worth}{cut}"
                prompt, text = str(sample.get("prompt") or ""), str(sample.get("text") or "")
                texts.append(Sample(heading=heading, prompt=f"{prompt}\n", text=text))
    sections: list[Section] = []
    if pictures:
        text = (
            "Left the picture that is wanted, then the source that was written and what it draws. Sources are drawn "
            "behind the guard; one that it refuses is not drawn."
        )
        sections.append(pictures_section("Drawings before and after", pictures, text=text))
    if texts:
        text = "Greedy episodes of test tasks. What was asked is in colour."
        sections.append(Samples(title="Episodes before and after", samples=texts, text=text))
    return sections


def _picture(heading: str, sample: Mapping[str, Any]) -> PictureRow | None:
    image, drawn = png_of(sample.get("image")), png_of(sample.get("drawn"))
    if image is None:
        return None
    found = {"reward": number(sample.get("reward"))} | {
        key: number(_get(sample, "facets", key)) for key in ("pixel", "f1", "count")
    }
    return picture_row(
        heading,
        shown=image,
        source=str(sample.get("text") or ""),
        drawn=drawn,
        problem=str(sample.get("problem") or ""),
        score={key: value for key, value in found.items() if value is not None},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Files


def _lines(path: Path) -> list[dict[str, Any]]:
    """Lines by iteration; what is no line of ours is left out."""
    found: dict[int, dict[str, Any]] = {}
    try:
        content = path.read_bytes().split(b"\n")
    except OSError:
        return []
    for line in content:
        try:
            record = json.loads(line)
            found[int(record["iteration"])] = _whole(record)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return [found[iteration] for iteration in sorted(found)]


def _whole(record: dict[str, Any]) -> dict[str, Any]:
    """Without what is of another form than ours: it would stop the rest of a page."""
    objects = ("kinds", "parl", "dropped", "failures", "environments")
    kept = {name: value for name, value in record.items() if name not in objects or isinstance(value, dict)}
    if "kinds" in kept:
        kept["kinds"] = {kind: each for kind, each in kept["kinds"].items() if isinstance(each, dict)}
    return kept


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _tested(evaluation: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found = evaluation.get("environments")
    return {name: each for name, each in found.items() if isinstance(each, dict)} if isinstance(found, dict) else {}


def _environments(records: RLRecords) -> list[str]:
    found = records.config.get("environments")
    return [name for name, value in found.items() if value is not None] if isinstance(found, dict) else []


def _get(value: Any, *path: str) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        flat += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) and value else [(prefix + name, value)]
    return flat


def _fact(key: str, value: Any) -> str:
    return str(value)[:12] if key == "commit" else str(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
