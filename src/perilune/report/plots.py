"""Line plots for reports: one description (`Plot`), drawn as SVG for a page or as PNG for everything else.

matplotlib draws both. In the SVG every colour becomes a CSS variable of the page, so the same drawing is right in light
and dark; the text stays text (searchable, in the page's font). Lines are labelled at their ends instead of in a legend.
Long series are thinned to what a screen can show, keeping the extremes of every interval, so a spike is never lost.
"""

import io
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

MAX_POINTS = 800
WIDTH, HEIGHT = 6.6, 3.1  # inches
LEFT = 0.075  # share of the width for the numbers of the y axis
LABEL_POINTS = 8.5  # font size of the labels at the ends of lines
_LABEL_DISTANCE = 11.0  # points between two such labels


@dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of a page and its plots."""

    background: str
    surface: str
    text: str
    muted: str
    grid: str
    alarm: str
    series: tuple[str, ...]

    def variables(self) -> dict[str, str]:
        """CSS variable -> colour."""
        named = {name: getattr(self, name) for name in ("background", "surface", "text", "muted", "grid", "alarm")}
        return named | {f"series-{n}": colour for n, colour in enumerate(self.series)}


# Series colours keep a contrast of at least 3:1 to their background and differ in lightness for colour-blind readers.
LIGHT = Theme(
    background="#ffffff",
    surface="#f6f7f9",
    text="#1b1f27",
    muted="#5d6675",
    grid="#dfe3e9",
    alarm="#b3261e",
    series=("#2456c7", "#c2570c", "#0f7b6c", "#8a3ab9", "#946200", "#0b7fab", "#b0305c", "#55606e"),
)
DARK = Theme(
    background="#12151b",
    surface="#1a1f27",
    text="#e4e8ee",
    muted="#98a3b3",
    grid="#2c343f",
    alarm="#ff8a80",
    series=("#7aa7ff", "#f59a52", "#4fc7b1", "#c792ea", "#e0b64a", "#5cc4ee", "#f27ba2", "#a7b1bf"),
)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line. Values that are not finite (or beyond 1e100) leave a gap. An empty name gives no label.

    faint: drawn thin and unlabelled behind the others (raw values behind their mean). points: a mark at each value.
    joined: whether a line runs through the values, or they are marks alone. hollow: marks are rings.
    low, high: ends of an interval about each value, drawn as a vertical line; values that are not finite have none.
    colour: number in the theme's palette; by default the next one in order.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    points: bool = False
    joined: bool = True
    hollow: bool = False
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    colour: int | None = None


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A horizontal line with a name, such as the limit of a clip."""

    value: float
    name: str


@dataclass(frozen=True, kw_only=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_y: bool = False
    log_x: bool = False
    x_names: Sequence[str] = ()
    """Names for x = 0, 1, ...: the axis counts things instead of measuring."""
    from_zero: bool = False
    thresholds: Sequence[Threshold] = field(default=())
    caption: str = ""

    @property
    def is_empty(self) -> bool:
        return not any(np.isfinite(np.asarray(series.y, dtype=float)).any() for series in self.series)


def series_from_records(
    records: Iterable[Mapping[str, Any]],
    key: str | Callable[[Mapping[str, Any]], Any],
    *,
    name: str,
    x: str = "step",
    **options: Any,
) -> Series:
    """A series from metric records; records without the key (or with null) are left out."""
    get = key if callable(key) else lambda record: record.get(key)
    pairs = [(number(record.get(x)), number(get(record))) for record in records]
    kept = [(a, b) for a, b in pairs if a is not None and b is not None]
    return Series(name=name, x=[a for a, _ in kept], y=[b for _, b in kept], **options)


def number(value: Any) -> float | None:
    """A float from a metric value; NaN and infinities come as numbers or, from strict JSON, as strings."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def smoothed(series: Series, *, share: float = 0.03) -> Series:
    """The mean of a series over a window of about `share` of its length, centred on each point, so it does not lag.

    The window grows from the first point, so that a steep start stays steep, and is cut off at the last one, so that
    the end is not a single noisy value. Values that are not finite are left out.
    """
    values = np.asarray(series.y, dtype=float)
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    places = np.arange(len(values))
    reach = np.minimum(max(1, round(share * len(values) / 2)), places)
    low, high = places - reach, np.minimum(places + reach + 1, len(values))
    weight = counts[high] - counts[low]
    mean = np.divide(sums[high] - sums[low], weight, out=np.full(len(values), np.nan), where=weight > 0)
    return Series(name=series.name, x=series.x, y=mean.tolist(), colour=series.colour)


def downsample(x: np.ndarray, y: np.ndarray, max_points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """At most `max_points` points: first, last, and the lowest and highest of every interval, in their order."""
    if len(x) <= max_points:
        return x, y
    edges = np.linspace(1, len(x) - 1, (max_points - 2) // 2 + 1).astype(int)
    chosen = [0, len(x) - 1]
    for start, end in zip(edges[:-1], edges[1:], strict=True):
        part = y[start:end]
        if np.isfinite(part).any():
            chosen += [start + int(np.nanargmin(part)), start + int(np.nanargmax(part))]
        elif end > start:
            chosen.append(start)  # keeps the gap
    kept = np.unique(chosen)
    return x[kept], y[kept]


def compact(value: float, digits: int = 4) -> str:
    """A number as short as a label needs: 0.0003 -> 3e-4, 12000 -> 12k, 1500000 -> 1.5M."""
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-3 or size >= 1e12:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit:
            return f"{value / unit:.{digits}g}{suffix}"
    return f"{value:.{digits}g}"


def render_svg(plot: Plot) -> str:
    """An <svg> element for a page that defines the variables of `Theme.variables`."""
    variables = list(LIGHT.variables())
    # Stand-ins that no real colour uses; matplotlib writes them as #rrggbb and they are replaced in its text.
    stand_ins = {name: f"#01{n:02x}fe" for n, name in enumerate(variables)}
    theme = Theme(
        **{name: stand_ins[name] for name in ("background", "surface", "text", "muted", "grid", "alarm")},
        series=tuple(stand_ins[f"series-{n}"] for n in range(len(LIGHT.series))),
    )
    buffer = io.StringIO()
    # A fixed salt makes the file a function of its content; per-title, because ids must differ within a page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.title}):
        figure = _draw(plot, theme)
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img" aria-hidden="true"', svg, count=1)
    for name, colour in stand_ins.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def save_png(plot: Plot, path: str | Path, *, theme: Theme = LIGHT, dots_per_inch: int = 160) -> Path:
    """The plot as a PNG file, which appears complete or not at all."""
    path = Path(path)
    figure = _draw(plot, theme)
    figure.patch.set_alpha(1.0)
    figure.set_facecolor(theme.background)
    # A page has its own heading; a picture alone needs one.
    figure.text(0.0, 1.05, plot.title, color=theme.text, fontsize=11.5, fontweight="bold", parse_math=False)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("wb") as stream:
            FigureCanvasAgg(figure)
            figure.savefig(stream, format="png", dpi=dots_per_inch, bbox_inches="tight", pad_inches=0.2)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _draw(plot: Plot, theme: Theme) -> Figure:
    figure = Figure(figsize=(WIDTH, HEIGHT))
    figure.patch.set_alpha(0.0)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.patch.set_alpha(0.0)
    lines = _draw_series(axes, plot, theme)
    _set_scale(axes, plot)
    _set_style(axes, plot, theme)
    # One line alone is what the axis says: it needs no name.
    labels = lines if len(lines) > 1 or plot.thresholds else []
    for threshold in plot.thresholds:
        axes.axhline(threshold.value, color=theme.alarm, linewidth=1.1, linestyle=(0, (5, 3)), zorder=2)
        labels.append((threshold.value, threshold.name, theme.alarm))
    _place(axes, labels)
    figure.text(0.0, 0.985, plot.y_label, color=theme.muted, fontsize=9, va="top", parse_math=False)
    _label_lines(figure, axes, labels)
    return figure


def _draw_series(axes: Axes, plot: Plot, theme: Theme) -> list[tuple[float, str, str]]:
    """Draw all lines; return (last value, name, colour) of those that get a label."""
    labels: list[tuple[float, str, str]] = []
    next_colour = 0
    for series in plot.series:
        x, y = np.asarray(series.x, dtype=float), np.asarray(series.y, dtype=float)
        # Near the largest float the margins of an axis overflow; such a value is a gap like infinity.
        drawable = (np.abs(y) < 1e100) & ((y > 0) | (not plot.log_y))
        y = np.where(drawable, y, np.nan)
        colour_number = next_colour if series.colour is None else series.colour
        if series.colour is None:
            next_colour += 1
        colour = theme.series[colour_number % len(theme.series)]
        finite = y[np.isfinite(y)]
        if not len(finite):
            continue
        x, y = downsample(x, y)
        style: dict[str, Any] = {"linewidth": 1.7, "zorder": 4}
        if series.faint:
            style = {"linewidth": 0.8, "alpha": 0.35, "zorder": 3}
        if series.points or not series.joined or len(finite) == 1:
            style |= {"marker": "o", "markersize": 4.0 if len(x) <= 60 else 2.5}
        if not series.joined:
            style |= {"linestyle": "none", "markersize": 3.0 if series.faint else 5.0}
        if series.hollow:
            style |= {"markerfacecolor": "none", "markersize": 8.0}
        axes.plot(x, y, color=colour, solid_joinstyle="round", solid_capstyle="round", **style)
        for place, low, high in zip(series.x, series.low, series.high):
            if math.isfinite(low) and math.isfinite(high):
                axes.plot([place, place], [low, high], color=colour, linewidth=1.5, marker="_", markersize=7, zorder=4)
        if not series.faint and series.name:
            labels.append((float(finite[-1]), series.name, colour))
    return labels


def _set_scale(axes: Axes, plot: Plot) -> None:
    low, high = axes.get_ylim()
    values = [v for line in axes.lines for v in np.asarray(line.get_ydata(), dtype=float) if math.isfinite(v)]
    values += [threshold.value for threshold in plot.thresholds]
    # Below a factor of three a logarithmic axis would have no labelled tick.
    if plot.log_y and values and max(values) > 3 * min(values) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if max(values) < 1e3 * min(values) else (1.0,)))
        axes.yaxis.set_minor_locator(LogLocator(subs=()))
        axes.set_ylim(min(values) / 1.15, max(values) * 1.15)
        return
    counts = bool(values) and all(value == int(value) for value in values)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, min_n_ticks=1 if counts else 3, integer=counts))
    if values:
        low, high = min(values), max(values)
        margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5
        axes.set_ylim(0 if plot.from_zero and low >= 0 else low - margin, high + margin)


def _set_style(axes: Axes, plot: Plot, theme: Theme) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.margins(x=0.01)
    if plot.log_x:
        values = [x for series in plot.series for x in series.x if math.isfinite(x) and x > 0]
        axes.set_xscale("log")
        wide = bool(values) and max(values) > 100 * min(values)
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(LogLocator(subs=()))
        if values:
            axes.set_xlim(min(values) / 1.15, max(values) * 1.15)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if plot.x_names:
        axes.set_xticks(range(len(plot.x_names)), plot.x_names, parse_math=False)
        axes.set_xlim(-0.5, len(plot.x_names) - 0.5)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(theme.muted)
    axes.spines["bottom"].set_linewidth(0.8)
    axes.tick_params(axis="x", colors=theme.muted, labelsize=8.5, length=3, width=0.8)
    axes.tick_params(axis="y", colors=theme.muted, labelsize=8.5, length=0)
    axes.set_xlabel(plot.x_label, color=theme.muted, fontsize=9, parse_math=False)


def _place(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Axes as wide as the numbers on the left and the labels on the right allow."""
    longest = max((len(name) for _, name, _ in labels), default=0)
    # 0.6 em is about the mean width of a bold letter; the page's font is not known here, so nothing can be measured.
    right = 0.025 + longest * LABEL_POINTS * 0.6 / (72 * WIDTH)
    axes.set_position((LEFT, 0.165, 1 - LEFT - min(right, 0.4), 0.70))


def _label_lines(figure: Figure, axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Names at the right edge, next to the last value, pushed apart where they would overlap."""
    points_per_pixel = 72.0 / figure.dpi
    bottom, top = (axes.transAxes.transform((0, level))[1] * points_per_pixel for level in (0, 1))
    wanted = sorted(
        (float(axes.transData.transform((0, value))[1]) * points_per_pixel, name, colour)
        for value, name, colour in labels
    )
    placed: list[float] = []
    for height, _, _ in wanted:
        placed.append(max(min(max(height, bottom), top), placed[-1] + _LABEL_DISTANCE if placed else bottom))
    overflow = placed[-1] - top if placed else 0.0
    for n in range(len(placed) - 1, -1, -1):  # push back down what left the top
        ceiling = top if n == len(placed) - 1 else placed[n + 1] - _LABEL_DISTANCE
        if overflow > 0:
            placed[n] = min(placed[n], ceiling)
    for height, (_, name, colour) in zip(placed, wanted, strict=True):
        axes.annotate(
            name,
            xy=(1.0, (height - bottom) / (top - bottom)),
            xycoords="axes fraction",
            xytext=(6, 0),
            textcoords="offset points",
            color=colour,
            fontsize=LABEL_POINTS,
            fontweight="bold",
            va="center",
            ha="left",
            annotation_clip=False,
            parse_math=False,
        )
