"""Answers against what can be measured in the picture: every shape drawn alone, or in a flat colour of its own."""

import dataclasses
import re
from collections import Counter

import numpy as np

from perilune.data.raster import rasterize
from perilune.data.scenes import COLOURS, Picture, Sample, ScenesConfig, Shape, make_sample, write_svg

SCENES = ScenesConfig(min_shapes=1, max_shapes=5, max_questions=6)
SAMPLES = [make_sample(11, index, SCENES) for index in range(150)]


def _alone(sample: Sample, shape: Shape) -> np.ndarray:
    """bool: the pixels that this shape covers for the most part, in a picture without the others."""
    painted = dataclasses.replace(shape, **{"stroke" if shape.kind == "line" else "fill": "black"})
    picture = Picture(width=sample.size[0], height=sample.size[1], shapes=(painted,))
    return rasterize(write_svg(picture), *sample.size)[..., 0] < 128


def _extent(pixels: np.ndarray) -> np.ndarray:
    rows, columns = np.flatnonzero(pixels.any(axis=1)), np.flatnonzero(pixels.any(axis=0))
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])


def _asked(task: str) -> list[tuple[Sample, str, str]]:
    return [(s, q.prompt, q.answer) for s in SAMPLES for q in s.questions if q.task == task]


def _named(sample: Sample, words: str) -> Shape:
    """The one shape of that colour and name."""
    found = [shape for shape in sample.shapes if f"{shape.colour} {shape.name}" == words]
    assert len(found) == 1, (words, sample.svg)
    return found[0]


def test_counts_are_those_of_distinct_colours_in_the_picture() -> None:
    names = [name for name in COLOURS if name != "white"]
    asked = _asked("count")
    assert len(asked) > 80
    for sample, prompt, answer in asked:
        counted = [shape for shape in sample.shapes if _belongs(shape, prompt)]
        recoloured = tuple(
            dataclasses.replace(shape, **{"stroke" if shape.kind == "line" else "fill": name})
            for shape, name in zip(sample.shapes, names)
        )
        pixels = rasterize(write_svg(Picture(width=112, height=112, shapes=recoloured)), 112, 112)
        seen = [shape for shape, name in zip(sample.shapes, names) if (pixels == COLOURS[name]).all(axis=-1).sum() > 10]
        assert int(answer) == sum(shape in seen for shape in counted), (prompt, sample.svg)


def _belongs(shape: Shape, prompt: str) -> bool:
    words = set(re.findall(r"[a-z]+", prompt.lower()))
    if words & set(COLOURS):
        return shape.colour in words
    return True if "shapes" in words else f"{shape.name}s" in words


def test_boxes_hold_what_is_drawn() -> None:
    asked = _asked("box")
    assert len(asked) > 80
    for sample, prompt, answer in asked:
        words = re.search(r"the (\w+ \w+)[?.]? ?(?:Answer|as|$)", prompt)
        assert words is not None, prompt
        given = np.array([int(number) for number in re.findall(r"-?\d+", answer)])
        drawn = _extent(_alone(sample, _named(sample, words[1])))
        # A corner or the rim of a circle covers less than half of its last pixels.
        assert np.abs(given - drawn).max() <= 3, (prompt, answer, sample.svg)
        assert np.abs(given - drawn).mean() <= 1.5


def test_spatial_answers_are_what_pixels_say() -> None:
    asked = _asked("spatial")
    assert len(asked) > 60
    relations = Counter()
    for sample, prompt, answer in asked:
        names = re.findall(rf"the ((?:{'|'.join(COLOURS)}) \w+)", prompt)
        first, second = (_alone(sample, _named(sample, name)) for name in names)
        one, other = _extent(first), _extent(second)
        if "left" in prompt:
            relation, truth = "left", one[2] <= other[0] + 1
        elif "above" in prompt:
            relation, truth = "above", one[3] <= other[1] + 1
        elif "inside" in prompt:
            relation, truth = "inside", (first & second).sum() > 0.9 * first.sum()
        elif "larger" in prompt or "area" in prompt:
            relation, truth = "larger", first.sum() > second.sum()
        else:
            relation, truth = "overlap", bool((first & second).any())
        relations[relation] += 1
        assert answer == ("yes" if truth else "no"), (prompt, sample.svg)
    assert set(relations) == {"left", "above", "inside", "larger", "overlap"}


def test_colours_are_those_of_the_pixels() -> None:
    asked = _asked("colour")
    assert len(asked) > 40
    for sample, prompt, answer in asked:
        (shape,) = [shape for shape in sample.shapes if re.search(rf"\b{shape.name}\b", prompt)]
        pixels = rasterize(sample.svg, 112, 112)[_alone(sample, shape)]
        assert (pixels == COLOURS[answer]).all(axis=-1).mean() > 0.3, (prompt, sample.svg)


def test_captions_name_every_shape_once() -> None:
    words = {"two": 2, "three": 3, "four": 4, "five": 5}
    for sample in SAMPLES:
        parts = re.split(r", | and ", sample.caption.removesuffix(f" on a {sample.background} background.").lower())
        total = sum(words.get(part.split()[0], 1) for part in parts)
        assert total == len(sample.shapes), sample.caption


def test_wording_varies() -> None:
    assert len({re.sub("|".join(COLOURS), "", prompt) for _, prompt, _ in _asked("box")}) > 10
    assert len({prompt for _, prompt, _ in _asked("caption")}) == 3
