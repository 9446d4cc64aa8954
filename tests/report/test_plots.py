"""Plots: thinning keeps extremes, numbers that are not numbers, and text that is not markup."""

import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.report.plots import (
    DARK,
    LIGHT,
    Plot,
    Series,
    Threshold,
    compact,
    downsample,
    render_svg,
    save_png,
    series_from_records,
    smoothed,
)

HOSTILE = '</svg><script>alert(1)</script> $x_1$ & "quoted" é'


def plot(y: list[float], **options) -> Plot:
    series = Series(name="train", x=list(range(len(y))), y=y)
    return Plot(title="Loss", x_label="step", y_label="nats", series=[series, series], **options)


def test_thinning_100k_points_keeps_ends_and_every_spike() -> None:
    y = np.sin(np.arange(100_000) / 5000.0)
    spikes = [17, 31_416, 99_998]
    y[spikes] = [50.0, -50.0, 70.0]
    x, thin = downsample(np.arange(100_000.0), y)
    assert len(x) <= 800
    assert (x[0], x[-1]) == (0, 99_999)
    assert set(spikes) <= set(x.astype(int))
    assert (np.diff(x) > 0).all()


@given(st.lists(st.floats(), min_size=1, max_size=60), st.integers(4, 20))
def test_thinning_keeps_points_of_the_series_in_order(y: list[float], max_points: int) -> None:
    x, thin = downsample(np.arange(float(len(y))), np.array(y), max_points)
    assert len(x) <= max(max_points, 1)
    assert np.array_equal(thin, np.array(y)[x.astype(int)], equal_nan=True)
    assert (np.diff(x) > 0).all()
    inner = [value for value in y if math.isfinite(value)]
    if inner and len(inner) == len(y):
        assert (thin.min(), thin.max()) == (min(y), max(y))


def test_mean_of_a_straight_line_is_the_line_up_to_the_cut_window() -> None:
    line = Series(name="a", x=list(range(200)), y=[0.5 * n for n in range(200)])
    # a centred window has no lag; it reaches 3 points (3% of 200, half to each side), so only the last 3 differ.
    # Sums of 200 numbers below 100 are exact to 200 * 100 * 2**-53.
    np.testing.assert_allclose(smoothed(line).y[:-3], line.y[:-3], atol=1e-11)
    assert smoothed(line).y[-1] == pytest.approx(np.mean(line.y[-4:]))


def test_mean_leaves_out_what_is_not_finite() -> None:
    values = [1.0] * 50 + [math.nan, math.inf] + [1.0] * 50
    np.testing.assert_allclose(smoothed(Series(name="a", x=list(range(102)), y=values), share=0.1).y, 1.0, atol=1e-12)


def test_series_skip_missing_null_and_odd_values() -> None:
    records = [
        {"step": 1, "loss": 2.0},
        {"step": 2},
        {"step": 3, "loss": None},
        {"step": 4, "loss": "NaN"},
        {"step": 5, "loss": [1]},
        {"step": 6, "loss": True},
        {"loss": 1.0},
        {"step": 7, "loss": 1},
    ]
    series = series_from_records(records, "loss", name="loss")
    assert list(series.x) == [1, 4, 7]
    assert series.y[0] == 2.0 and math.isnan(series.y[1]) and series.y[2] == 1.0


@pytest.mark.parametrize(
    "y",
    [
        [],
        [1.0],
        [math.nan, math.inf, -math.inf],
        [0.0, 0.0],
        [-1.0, 0.0, 5.0],
        [1e-30, 1e30],
        [1.0, math.nan, 3.0],
        [7.0, 7.0, 7.0],
        [1e300, -1e300, 1e99],
    ],
)
@pytest.mark.parametrize("log_y", [False, True])
def test_any_values_give_well_formed_svg(y: list[float], log_y: bool) -> None:
    svg = render_svg(plot(y, log_y=log_y, thresholds=[Threshold(value=2.0, name="limit")]))
    assert ElementTree.fromstring(svg).tag.endswith("svg")


def test_svg_uses_only_the_colours_of_the_page() -> None:
    svg = render_svg(plot([3.0, 2.0, 1.0], thresholds=[Threshold(value=2.0, name="limit")]))
    assert "var(--series-0)" in svg and "var(--alarm)" in svg and "var(--text)" not in svg
    assert "#01" not in svg
    assert not set(LIGHT.series) & set(svg.split())


def test_names_are_text_in_the_svg() -> None:
    series = [Series(name=HOSTILE, x=[0, 1], y=[1, 2]), Series(name="b", x=[0, 1], y=[2, 2])]
    svg = render_svg(Plot(title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE, series=series))
    root = ElementTree.fromstring(svg)
    texts = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]
    assert texts.count(HOSTILE) == 3  # the label of the line and both axes; the title is the page's
    assert not [element for element in root.iter() if element.tag.endswith("script")]


def test_drawing_twice_gives_the_same_svg() -> None:
    assert render_svg(plot([3.0, 2.0])) == render_svg(plot([3.0, 2.0]))


def test_labels_at_line_ends_do_not_overlap() -> None:
    series = [Series(name=f"layer {n}", x=[0, 1], y=[0, 1 + n * 1e-6]) for n in range(6)]
    root = ElementTree.fromstring(render_svg(Plot(title="t", x_label="x", y_label="y", series=series)))
    heights = sorted(
        float(element.attrib["y"])
        for element in root.iter()
        if element.tag.endswith("text") and "layer" in "".join(element.itertext())
    )
    assert len(heights) == 6
    assert min(np.diff(heights)) >= 10.0  # points; the letters are 8.5 high


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_png_is_written_whole(tmp_path: Path, theme) -> None:
    path = save_png(plot([3.0, 2.0, 1.0]), tmp_path / "loss.png", theme=theme)
    assert path.read_bytes().startswith(b"\x89PNG") and path.read_bytes().rstrip().endswith(b"IEND\xaeB`\x82")
    assert [entry.name for entry in tmp_path.iterdir()] == ["loss.png"]


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (0.0003, "3e-4"), (0.005, "0.005"), (12000, "12k"), (1.5e6, "1.5M"), (-2500, "-2.5k"), (1e15, "1e15")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert compact(value) == text


def contrast(one: str, two: str) -> float:
    """WCAG 2 contrast ratio."""

    def luminance(colour: str) -> float:
        channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_can_be_read(theme) -> None:
    for background in (theme.background, theme.surface):
        for colour in (theme.text, theme.muted, theme.alarm):
            assert contrast(colour, background) >= 4.5  # WCAG AA for text
    for colour in theme.series:  # also colours of the labels
        assert contrast(colour, theme.background) >= 4.5
