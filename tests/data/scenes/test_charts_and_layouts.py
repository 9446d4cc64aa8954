"""Charts whose values can be measured, layouts whose widgets lie where they say, texts that are drawn."""

import re

import numpy as np

from perilune.data.raster import rasterize
from perilune.data.scenes import COLOURS, Sample, ScenesConfig, make_sample, parse_svg

SIZES = ((112, 112), (168, 112))


def _samples(kind: str, count: int) -> list[Sample]:
    config = ScenesConfig(kinds=(kind,), sizes=SIZES, max_questions=6)  # type: ignore[arg-type]
    return [make_sample(21, index, config) for index in range(count)]


def test_bars_are_as_high_as_their_values() -> None:
    seen = 0
    for sample in _samples("chart", 60):
        if not sample.caption.startswith("A bar"):
            continue
        seen += 1
        pixels = rasterize(sample.svg, *sample.size)[: sample.size[1] - 17, 24:]  # without the labels
        colour = next(shape.fill for shape in sample.shapes if shape.kind == "rect")
        columns = (pixels == COLOURS[colour]).all(axis=-1).sum(axis=0)
        heights = [int(run.max()) for run in np.split(columns, np.flatnonzero(np.diff(columns > 0)) + 1) if run[0]]
        # Bars stand on an axis whose stroke covers one pixel row of them; pixels per unit follow from the axis.
        lines = sorted(shape.numbers[1] for shape in sample.shapes if shape.kind == "line" and shape.stroke == "silver")
        top = max(int(text.text) for text in sample.texts if text.text.isdigit())
        per_unit = (sample.size[1] - 17 - lines[0]) / top
        assert [round((height + 1) / per_unit) for height in heights] == [value for _, value in sample.values]
    assert seen > 10


def test_slices_cover_their_shares() -> None:
    seen = 0
    for sample in _samples("chart", 60):
        if not sample.caption.startswith("A pie"):
            continue
        seen += 1
        pixels = rasterize(sample.svg, *sample.size)[:, : sample.size[0] - 34]
        counts = {name: int((pixels == COLOURS[name]).all(axis=-1).sum()) for name, _ in sample.values}
        total = sum(counts.values())
        for name, share in sample.values:
            assert abs(100 * counts[name] / total - share) < 2.5, (name, share)
        assert sum(share for _, share in sample.values) == 100
    assert seen > 10


def test_answers_about_charts_follow_from_the_values() -> None:
    seen = 0
    for sample in _samples("chart", 80):
        values = dict(sample.values)
        for question in sample.questions:
            if question.task == "count":
                assert int(question.answer) == len(values)
                continue
            seen += 1
            named = [name for name in re.findall(r"\w+", question.prompt) if name in values]
            number = int(question.answer.rstrip("%")) if question.answer.rstrip("%").isdigit() else None
            if number is not None:
                assert number == sum(values[name] for name in named)
            elif question.answer in ("yes", "no"):
                assert (question.answer == "yes") == (values[named[0]] > values[named[1]])
            else:
                extreme = min if re.search("low|small", question.prompt) else max
                assert values[question.answer] == extreme(values.values())
                assert list(values.values()).count(values[question.answer]) == 1
    assert seen > 150


def test_texts_of_every_kind_are_drawn_in_their_boxes() -> None:
    for kind in ("text", "chart", "layout"):
        for sample in _samples(kind, 15):
            with_text = rasterize(sample.svg, *sample.size).astype(int)
            for text in sample.texts:
                left, top, right, bottom = text.box
                crop = with_text[top:bottom, left:right]
                # Strokes and ground: two colours far apart inside every box.
                assert np.ptp(crop, axis=(0, 1)).max() > 60, (kind, text)


def test_boxes_of_widgets_are_borders_of_colour() -> None:
    seen = 0
    for sample in _samples("layout", 60):
        shapes = [shape for shape in parse_svg(sample.svg).shapes if shape.kind == "rect"]
        drawn = {
            (n[0] - e, n[1] - e, n[0] + n[2] + e, n[1] + n[3] + e)
            for s in shapes
            for n, e in [(s.numbers, int(s.stroke_width > 0))]
        }
        for question in sample.questions:
            if question.task == "box" and "item" not in question.prompt:
                seen += 1
                assert tuple(int(number) for number in re.findall(r"\d+", question.answer)) in drawn, question
    assert seen > 15


def test_what_is_read_stands_in_the_picture() -> None:
    for kind in ("text", "layout"):
        for sample in _samples(kind, 60):
            written = {text.text for text in sample.texts}
            for question in sample.questions:
                if question.task == "ocr":
                    assert set(question.answer.split(" / ")) <= written, question
