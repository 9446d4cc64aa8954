"""The report of a training run: report.html from config.json and metrics.jsonl of its folder.

It can be written at any time, also while the run goes on or after it was killed: an unfinished last line, fields a run
does not have and steps repeated after a resume are all fine. `environment.json` (commit, machine, versions, ...), when
the folder has one, is shown in the header.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perilune.report.page import Headline, Notes, Page, PictureRow, Plots, Sample, Samples, Section, Table, write_page
from perilune.report.pictures import picture_row, pictures_section, png_of
from perilune.report.plots import Plot, Series, Threshold, compact, number, save_png, series_from_records, smoothed

MAX_LABELLED_LAYERS = 6
MAX_SAMPLES = 12
_SMOOTHED_FROM = 60  # fewer points are shown as they are


class ReportError(ValueError):
    """A folder that holds no run."""


@dataclass(kw_only=True)
class RunRecords:
    """What a run's folder says. Lists are in order of steps; a step written twice counts as written last."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    train: list[dict[str, Any]] = field(default_factory=list)
    valid: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    """Of the last step that has any: what was shown, written and drawn."""
    picture_scores: dict[str, Any] = field(default_factory=dict)
    """Their means, with those against other pictures."""
    num_unreadable: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """The config with dotted names: optimizer.lr -> 0.02."""
        return dict(_flatten(self.config))

    @property
    def last_step(self) -> int:
        return int(max((number(record["step"]) or 0 for record in [*self.train, *self.valid]), default=0))

    @property
    def planned_steps(self) -> int | None:
        steps = number(self.settings.get("trainer.steps", self.config.get("steps")))
        return None if steps is None else int(steps)

    @property
    def tau(self) -> float | None:
        """The limit of QK-Clip, None when it is off."""
        for name, value in self.settings.items():
            if name.rsplit(".", 1)[-1] == "qk_clip_tau":
                tau = number(value)
                return tau if tau is not None and math.isfinite(tau) else None
        return None


def write_training_report(run_folder: str | Path, *, png: bool = False) -> Path:
    """Write report.html into a run's folder and return its path; with `png` also plots/*.png."""
    folder = Path(run_folder)
    records = read_run(folder)
    page = training_page(records)
    if png:
        (folder / "plots").mkdir(exist_ok=True)
        for section in page.sections:
            for plot in section.plots if isinstance(section, Plots) else ():
                if not plot.is_empty:
                    save_png(plot, folder / "plots" / f"{plot.title.lower().replace(' ', '_')}.png")
    return write_page(page, folder / "report.html")


def read_run(folder: Path) -> RunRecords:
    try:
        lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    except OSError as error:
        raise ReportError(
            f"{str(folder)!r} has no readable metrics.jsonl ({error.strerror}); give the folder of a run, as runs/nano"
        ) from error
    records = RunRecords(
        name=folder.resolve().name,
        config=_read_object(folder / "config.json"),
        environment=_read_object(folder / "environment.json"),
    )
    train: dict[Any, dict[str, Any]] = {}
    valid: dict[Any, dict[str, Any]] = {}
    samples: dict[Any, dict[str, Any]] = {}
    pictures: dict[Any, dict[str, Any]] = {}
    for position, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind, step = record["kind"], int(record["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            # What follows the last line break is a record still being written.
            records.num_unreadable += position < len(lines) - 1
            continue
        if kind == "train":
            train[step] = record
        elif kind == "valid":
            valid[step] = record
        elif kind == "sample":
            samples[step, str(record.get("prompt"))] = record
        elif kind == "picture":
            pictures[step, str(record.get("number"))] = record
        elif kind == "pictures":
            records.picture_scores = record
    records.train = [train[step] for step in sorted(train)]
    records.valid = [valid[step] for step in sorted(valid)]
    records.samples = [samples[key] for key in sorted(samples)]
    last = max((step for step, _ in pictures), default=0)
    records.pictures = [record for (step, _), record in pictures.items() if step == last]
    return records


def training_page(records: RunRecords) -> Page:
    sections: list[Section] = []
    if notes := _notes(records):
        sections.append(Notes(title="Worth knowing", notes=notes))
    candidates = [
        Plots(title="Learning curves", plots=_loss_plots(records)),
        Plots(title="Optimisation", plots=_optimisation_plots(records)),
        Plots(title="Attention logits", plots=_logit_plots(records)),
        Plots(title="Throughput and memory", plots=_machine_plots(records)),
    ]
    for section in candidates:
        plots = [plot for plot in section.plots if not plot.is_empty]
        if plots:
            sections.append(Plots(title=section.title, plots=plots))
    if rows := _summary_rows(records):
        sections.append(Table(title="Summary", columns=("", "first", "last", "lowest", "median", "highest"), rows=rows))
    if rows := [row for record in records.pictures if (row := picture_of(record)) is not None]:
        sections.append(pictures_section("Held-out pictures", rows, text=_picture_text(records.picture_scores)))
    if records.samples:
        sections.append(_sample_section(records))
    if records.settings:
        rows = [(name, _shown(value)) for name, value in records.settings.items()]
        sections.append(Table(title="Configuration", columns=("field", "value"), rows=rows, folded=True))
    planned = records.planned_steps
    progress = f"{records.last_step:,} steps" if planned is None else f"{records.last_step:,} of {planned:,} steps"
    return Page(
        title=f"Training run {records.name}",
        subtitle=progress,
        headlines=_headlines(records),
        facts={name: _shown(value) for name, value in _flatten(records.environment)},
        sections=sections,
    )


def _headlines(records: RunRecords) -> list[Headline]:
    found: list[Headline] = []
    for key, label in (("bits_per_byte", "bits per byte"), ("loss", "loss")):
        for kind, group in (("validation", records.valid), ("training", records.train)):
            values = _values(group, key)
            if values:
                best = min(values)
                note = "" if best == values[-1] or kind == "training" else f"best {best:.4f}"
                found.append(Headline(label=f"{kind} {label}", value=f"{values[-1]:.4f}", note=note))
                break  # training only where there is no validation
    if (reward := number(records.picture_scores.get("reward"))) is not None:
        control = number(records.picture_scores.get("shuffled_reward"))
        note = "" if control is None else f"{control:.3f} against other pictures"
        found.append(Headline(label="picture score", value=f"{reward:.3f}", note=note))
    if tokens := _values(records.train, "tokens"):
        found.append(Headline(label="tokens", value=compact(tokens[-1], digits=3)))
    if rates := _rates(records):
        found.append(Headline(label="tokens per second", value=f"{statistics.median(rates):,.0f}", note="median"))
    if peaks := [peak for record in records.train if (peak := _peak_logit(record)) is not None]:
        tau = records.tau
        note = "QK-Clip off" if tau is None else f"limit {compact(tau)}"
        known = max(
            (peak for record in records.train if (peak := _peak_logit(record, exact=True)) is not None),
            default=-math.inf,
        )
        value = f"{max(peaks):.1f}" if known >= max(peaks) else f"at most {max(peaks):.1f}"
        found.append(Headline(label="highest attention logit", value=value, note=note))
    return found


def _notes(records: RunRecords) -> list[str]:
    notes: list[str] = []
    if not records.train and not records.valid:
        notes.append("The run has written no metrics yet.")
    planned = records.planned_steps
    if planned is not None and 0 < records.last_step < planned:
        notes.append(f"The run is at step {records.last_step:,} of {planned:,}: it is still training or was stopped.")
    if skipped := int(max(_values(records.train, "skipped"), default=0)):
        steps = [record["step"] for record in records.train if number(record.get("loss")) is None]
        where = f" (at {', '.join(map(str, steps[:10]))}{', ...' if len(steps) > 10 else ''})" if steps else ""
        what = "1 step{} was" if skipped == 1 else f"{skipped:,} steps{{}} were"
        notes.append(f"{what.format(where)} skipped: loss or gradient was not finite.")
    if records.num_unreadable:
        notes.append(f"{records.num_unreadable:,} lines of metrics.jsonl could not be read and are left out.")
    return notes


def _loss_plots(records: RunRecords) -> list[Plot]:
    plots = []
    for key, title, unit in (
        ("loss", "Loss", "nats per token"),
        ("bits_per_byte", "Bits per byte", "bits per byte of text"),
    ):
        series = _with_mean(series_from_records(records.train, key, name="train", colour=0))
        series.append(series_from_records(records.valid, key, name="validation", points=True, colour=1))
        plots.append(Plot(title=title, x_label="step", y_label=unit, series=series))
    if any("vision_loss" in record for record in [*records.train, *records.valid]):
        series = _with_mean(series_from_records(records.train, "vision_loss", name="train", colour=0))
        series.append(series_from_records(records.valid, "vision_loss", name="validation", points=True, colour=1))
        caption = "Answers about pictures; the loss of text does not count them."
        plots.append(
            Plot(title="Vision loss", x_label="step", y_label="nats per token", series=series, caption=caption)
        )
    return plots


def _optimisation_plots(records: RunRecords) -> list[Plot]:
    rate = series_from_records(records.train, "lr", name="lr")
    norm = _with_mean(series_from_records(records.train, "grad_norm", name="norm", colour=0))
    plots = [
        Plot(title="Learning rate", x_label="step", y_label="scheduled rate", series=[rate], from_zero=True),
        Plot(title="Gradient norm", x_label="step", y_label="norm before clipping (log)", series=norm, log_y=True),
    ]
    if any("moe_imbalance" in record for record in records.train):
        imbalance = _with_mean(series_from_records(records.train, "moe_imbalance", name="imbalance", colour=0))
        plots.append(
            Plot(
                title="Expert load imbalance",
                x_label="step",
                y_label="imbalance of expert load",
                series=imbalance,
                caption="As recorded by the run; lower is more even.",
            )
        )
    skipped = series_from_records(records.train, "skipped", name="skipped")
    if any(skipped.y):
        plots.append(
            Plot(title="Skipped steps", x_label="step", y_label="steps so far", series=[skipped], from_zero=True)
        )
    return plots


def _logit_plots(records: RunRecords) -> list[Plot]:
    layers = max((len(_logits(record)) for record in records.train), default=0)
    each = [
        series_from_records(
            records.train,
            lambda record, layer=layer: dict(enumerate(_logits(record))).get(layer),
            name=f"layer {layer + 1}",
            faint=layers > MAX_LABELLED_LAYERS,
            colour=layer if layers <= MAX_LABELLED_LAYERS else 7,
        )
        for layer in range(layers)
    ]
    if layers > MAX_LABELLED_LAYERS:
        each.append(series_from_records(records.train, _peak_logit, name="highest", colour=0))
    tau = records.tau
    limits = [] if tau is None else [Threshold(value=tau, name=f"limit {compact(tau)}")]
    caption = f"Attention layers counted from the input ({layers}); the highest logit of any head, before the clip."
    if any("max_logit_is_bound" in record for record in records.train):
        caption += " Some values" if tau is None else " Below the limit some values"
        caption += " are upper bounds (the log-sum-exp of a row), marked in metrics.jsonl."
    clipped = series_from_records(records.train, "clipped_heads", name="heads")
    return [
        Plot(
            title="Max attention logit",
            x_label="step",
            y_label="highest logit in the layer",
            series=each,
            thresholds=limits,
            caption=caption,
        ),
        Plot(
            title="Clipped heads", x_label="step", y_label="heads clipped in the step", series=[clipped], from_zero=True
        ),
    ]


def _machine_plots(records: RunRecords) -> list[Plot]:
    rate = series_from_records(records.train, _rate, name="rate")
    memory = series_from_records(
        records.train, lambda record: (number(record.get("peak_memory_bytes")) or math.nan) / 2**20, name="memory"
    )
    return [
        Plot(
            title="Tokens per second",
            x_label="step",
            y_label="over the last log intervals",
            series=[rate],
            from_zero=True,
        ),
        Plot(title="Peak memory", x_label="step", y_label="MiB, highest so far", series=[memory], from_zero=True),
    ]


def _summary_rows(records: RunRecords) -> list[list[str]]:
    wanted = [
        ("training loss", _values(records.train, "loss"), "{:.4f}"),
        ("training bits per byte", _values(records.train, "bits_per_byte"), "{:.4f}"),
        ("validation loss", _values(records.valid, "loss"), "{:.4f}"),
        ("validation bits per byte", _values(records.valid, "bits_per_byte"), "{:.4f}"),
        ("validation vision loss", _values(records.valid, "vision_loss"), "{:.4f}"),
        ("gradient norm", _values(records.train, "grad_norm"), "{:.3g}"),
        ("highest attention logit", [p for r in records.train if (p := _peak_logit(r)) is not None], "{:.4g}"),
        ("heads clipped in a step", _values(records.train, "clipped_heads"), "{:.4g}"),
        ("tokens per second", _rates(records), "{:,.0f}"),
        ("peak memory, MiB", [v / 2**20 for v in _values(records.train, "peak_memory_bytes")], "{:,.0f}"),
    ]
    return [
        [
            name,
            *(
                form.format(value)
                for value in (values[0], values[-1], min(values), statistics.median(values), max(values))
            ),
        ]
        for name, values, form in wanted
        if values
    ]


def _sample_section(records: RunRecords) -> Samples:
    latest = sorted(records.samples, key=lambda record: int(record["step"]), reverse=True)[:MAX_SAMPLES]
    samples = [
        Sample(
            heading=f"step {int(record['step']):,}",
            prompt=str(record.get("prompt") or ""),
            text=str(record.get("text") or ""),
        )
        for record in latest
    ]
    left_out = len(records.samples) - len(latest)
    text = "The prompt is in colour, the model's text follows."
    return Samples(
        title="Samples", samples=samples, text=f"{text} {left_out:,} older ones are left out." if left_out else text
    )


def picture_of(record: Mapping[str, Any]) -> PictureRow | None:
    """A record of what a model drew as a row of a page; None for one that holds no picture."""
    shown, drawn = png_of(record.get("image")), png_of(record.get("drawn"))
    if shown is None:
        return None
    scores = record.get("scores")
    known = {} if not isinstance(scores, dict) else {key: number(scores.get(key)) for key in ("pixel", "f1", "reward")}
    return picture_row(
        f"picture {int(number(record.get('number')) or 0) + 1}",
        shown=shown,
        source=str(record.get("text") or ""),
        drawn=drawn,
        problem=str(record.get("reason") or ""),
        score={key: value for key, value in known.items() if value is not None},
    )


def _picture_text(scores: Mapping[str, Any]) -> str:
    """What the numbers over all held-out pictures say."""
    found = {key: number(scores.get(key)) for key in ("count", "parses", "pixel", "f1", "reward", "shuffled_reward")}
    if any(value is None for value in found.values()):
        return "Left what the model was shown, then the source it wrote and what that source draws."
    return (
        "Left what the model was shown, then the source it wrote and what that source draws. Of {count:.0f} held-out "
        "pictures {parses:.0%} of the sources parse; mean pixel similarity {pixel:.3f}, {shapes}score {reward:.3f}. "
        "Held against other pictures the same answers score {shuffled_reward:.3f}: the difference is what looking adds."
    ).format(**found, shapes=f"shape F1 {found['f1']:.3f}, " if scores.get("task", "svg") == "svg" else "")


def _with_mean(raw: Series) -> list[Series]:
    """A noisy series as its running mean in front of the faint raw values; a short one as it is."""
    if len(raw.y) < _SMOOTHED_FROM:
        return [raw]
    return [Series(name=raw.name, x=raw.x, y=raw.y, faint=True, colour=raw.colour), smoothed(raw)]


def _values(records: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    found = (number(record.get(key)) for record in records)
    return [value for value in found if value is not None and math.isfinite(value)]


def _rate(record: Mapping[str, Any]) -> float | None:
    """Tokens per second; a run writes 0 before it has measured anything."""
    rate = number(record.get("tokens_per_s"))
    return rate if rate else None


def _rates(records: RunRecords) -> list[float]:
    return [rate for record in records.train if (rate := _rate(record)) is not None and math.isfinite(rate)]


def _logits(record: Mapping[str, Any]) -> list[float | None]:
    logits = record.get("max_logit")
    values = [number(logit) for logit in logits] if isinstance(logits, list) else [number(logits)]
    # -inf stands for a layer that saw no pair
    return [value if value is not None and math.isfinite(value) else None for value in values]


def _peak_logit(record: Mapping[str, Any], *, exact: bool = False) -> float | None:
    """The largest logit of any layer; with `exact`, of those that are not only upper bounds."""
    logits = _logits(record)
    bounds = record.get("max_logit_is_bound") if exact else None
    bounds = bounds if isinstance(bounds, list) and len(bounds) == len(logits) else [False] * len(logits)
    known = (logit for logit, bound in zip(logits, bounds, strict=True) if logit is not None and not bound)
    return max(known, default=None)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            flat += _flatten(value, f"{prefix}{name}.")
        else:
            flat.append((f"{prefix}{name}", value))
    return flat


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
