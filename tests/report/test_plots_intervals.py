"""Marks with intervals, axes that count things, and logarithmic compute."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perilune.report import Plot, Series, Threshold, render_svg, save_png


def texts(svg: str) -> list[str]:
    root = ElementTree.fromstring(svg)
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]


def plot(series: list[Series], **options) -> Plot:
    return Plot(title="t", x_label="x", y_label="y", series=series, **options)


def ticks(svg: str) -> list[float]:
    """The numbers on the axes."""
    found = []
    for text in texts(svg):
        try:
            found.append(float(text))
        except ValueError:
            continue
    return found


def test_named_places_stand_under_the_axis():
    series = [Series(name="", x=[place], y=[1.0 + place], joined=False) for place in range(3)]
    found = texts(render_svg(plot(series, x_names=["muon", "$x$", "<b>"])))
    assert {"muon", "$x$", "<b>"} <= set(found)


def test_an_interval_is_inside_the_axis():
    series = [Series(name="a", x=[1.0], y=[1.0], low=[0.2], high=[9.0], joined=False)]
    values = ticks(render_svg(plot(series)))
    assert max(values) > 5 and len(values) >= 3


@pytest.mark.parametrize("ends", [(math.nan, math.nan), (1.0, math.nan)])
def test_an_interval_that_is_not_known_is_not_drawn(ends: tuple[float, float]):
    known = Series(name="a", x=[1.0], y=[1.0], joined=False)
    unknown = Series(name="a", x=[1.0], y=[1.0], low=[ends[0]], high=[ends[1]], joined=False)
    assert render_svg(plot([known])) == render_svg(plot([unknown]))


def test_compute_over_decades_is_labelled():
    found = texts(render_svg(plot([Series(name="a", x=[1e15, 1e16, 3e16], y=[4, 3, 2])], log_x=True)))
    assert "1e15" in found and "1e16" in found
    one = texts(render_svg(plot([Series(name="a", x=[3e15], y=[4])], log_x=True)))
    assert "x" in one


def test_a_series_without_a_name_has_no_label():
    series = [Series(name="", x=[0, 1], y=[1, 2]), Series(name="b", x=[0, 1], y=[2, 2])]
    limits = [Threshold(value=1.5, name="limit")]
    found = texts(render_svg(plot(series, thresholds=limits)))
    assert "b" in found and "limit" in found and "" not in found


def test_marks_alone_have_no_line_and_rings_no_filling(tmp_path: Path):
    base = {"name": "a", "x": [0, 1, 2], "y": [1, 2, 3]}
    drawings = {
        render_svg(plot([Series(**base, **options)]))
        for options in ({}, {"joined": False}, {"joined": False, "hollow": True}, {"points": True})
    }
    assert len(drawings) == 4
    assert save_png(plot([Series(**base, joined=False, hollow=True)]), tmp_path / "a.png").stat().st_size > 1000
