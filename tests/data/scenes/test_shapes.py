"""Boxes and masks follow from geometry; resvg is the judge."""

import numpy as np
import pytest

from perilune.data.generated import SplitMix
from perilune.data.raster import rasterize
from perilune.data.scenes import Picture, Shape, box, mask, write_svg
from perilune.data.scenes.plain import make_shape

SIZE = (140, 112)
PRIMITIVES = ["rect", "circle", "ellipse", "line", "triangle", "diamond", "pentagon", "hexagon", "star"]


def _coverage(shape: Shape) -> np.ndarray:
    """How much of each pixel is covered, from the grey of black on white."""
    return 1 - rasterize(write_svg(Picture(width=140, height=112, shapes=(shape,))), *SIZE)[..., 0] / 255


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_masks_and_boxes_agree_with_the_renderer(primitive: str) -> None:
    dice = SplitMix(3, PRIMITIVES.index(primitive))
    seen = 0
    while seen < 25:
        shape = make_shape(dice, primitive, "black", SIZE)  # type: ignore[arg-type]
        left, top, right, bottom = box(shape)
        if left < 0 or top < 0 or right > SIZE[0] or bottom > SIZE[1]:
            continue
        seen += 1
        covered = _coverage(shape)
        inside = mask(shape, *SIZE)
        # The centre of a pixel decides: a pixel that is off lies on the outline, and about half of it is covered.
        assert not (inside & (covered < 0.2)).any() and not (~inside & (covered > 0.8)).any(), shape
        drawn = covered > 0.02
        rows, columns = np.flatnonzero(drawn.any(axis=1)), np.flatnonzero(drawn.any(axis=0))
        extent = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        # Tips that cover less than a fiftieth of a pixel do not show: one pixel of slack, inwards alone.
        assert left <= extent[0] <= left + 1 and top <= extent[1] <= top + 1, shape
        assert right - 1 <= extent[2] <= right and bottom - 1 <= extent[3] <= bottom, shape


def test_a_shape_beyond_the_border_is_cut_off() -> None:
    shape = Shape(kind="circle", numbers=(0, 0, 10), fill="red")
    assert mask(shape, 20, 20).sum() == mask(Shape(kind="circle", numbers=(10, 10, 10), fill="red"), 20, 20).sum() // 4


def test_names_are_the_words_people_use() -> None:
    assert Shape(kind="rect", numbers=(0, 0, 5, 5), fill="red").name == "square"
    assert Shape(kind="rect", numbers=(0, 0, 5, 6), fill="red").name == "rectangle"
    assert Shape(kind="polygon", numbers=(0, 0, 5, 6, 1, 7), fill="red").name == "triangle"
    assert Shape(kind="line", numbers=(0, 0, 5, 6), stroke="blue", stroke_width=2).colour == "blue"
