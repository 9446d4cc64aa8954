"""What a scene is made of: shapes with integer geometry, named colours, boxes and masks.

A `Shape` holds what its SVG element says and nothing else, so that `parse(write(shape)) == shape`:

    kind       numbers                              drawn as
    rect       x y width height                     fill, or outline
    circle     cx cy r                              fill, or outline
    ellipse    cx cy rx ry                          fill, or outline
    polygon    x1 y1 x2 y2 ... (3 points or more)   fill, or outline
    line       x1 y1 x2 y2                          stroke with square ends
    path       the data of its `d` attribute        stroke (text, icons) or fill (slices of a pie)

`box` is exact for the filled shape (a stroke adds half its width), `mask` is true at pixels whose centre is inside.
Both need integers only, so they are equal on every machine.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from perilune.data.scenes.paths import path_box

Kind = Literal["rect", "circle", "ellipse", "polygon", "line", "path"]
Box = tuple[int, int, int, int]  # left, top, right, bottom, in pixels; right and bottom are the first pixel outside

# The names are those of CSS, so the source says what a person says.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (255, 0, 0),
    "orange": (255, 165, 0),
    "yellow": (255, 255, 0),
    "green": (0, 128, 0),
    "cyan": (0, 255, 255),
    "blue": (0, 0, 255),
    "purple": (128, 0, 128),
    "pink": (255, 192, 203),
    "brown": (165, 42, 42),
    "gray": (128, 128, 128),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "silver": (192, 192, 192),
    "navy": (0, 0, 128),
    "teal": (0, 128, 128),
}
MIN_CONTRAST = 80  # Euclidean distance in RGB: pink on white (82) can be seen, teal on gray (128) easily

POLYGON_NAMES = {3: "triangle", 4: "diamond", 5: "pentagon", 6: "hexagon", 10: "star"}


@dataclass(frozen=True, kw_only=True)
class Shape:
    kind: Kind
    numbers: tuple[int, ...] = ()
    path: str = ""  # for kind "path": canonical path data (see paths.py)
    fill: str = "none"
    stroke: str = "none"
    stroke_width: int = 0

    @property
    def colour(self) -> str:
        """The one colour a person would name: that of the fill, or of the stroke where there is no fill."""
        return self.fill if self.fill != "none" else self.stroke

    @property
    def name(self) -> str:
        """The word for it: rectangle, square, circle, ellipse, triangle, ..., line, drawing."""
        if self.kind == "rect":
            return "square" if self.numbers[2] == self.numbers[3] else "rectangle"
        if self.kind == "polygon":
            return POLYGON_NAMES.get(len(self.numbers) // 2, "polygon")
        return "drawing" if self.kind == "path" else self.kind


def contrast(first: str, second: str) -> float:
    return math.dist(COLOURS[first], COLOURS[second])


def luma(colour: str) -> float:
    """ITU-R BT.601: how bright a colour looks, 0 to 255."""
    red, green, blue = COLOURS[colour]
    return 0.299 * red + 0.587 * green + 0.114 * blue


def box(shape: Shape) -> Box:
    """The smallest box of whole pixels that holds the shape."""
    n = shape.numbers
    reach = (shape.stroke_width + 1) // 2 if shape.stroke != "none" else 0
    if shape.kind == "rect":
        left, top, right, bottom = n[0], n[1], n[0] + n[2], n[1] + n[3]
    elif shape.kind == "circle":
        left, top, right, bottom = n[0] - n[2], n[1] - n[2], n[0] + n[2], n[1] + n[2]
    elif shape.kind == "ellipse":
        left, top, right, bottom = n[0] - n[2], n[1] - n[3], n[0] + n[2], n[1] + n[3]
    elif shape.kind == "polygon":
        left, top, right, bottom = min(n[::2]), min(n[1::2]), max(n[::2]), max(n[1::2])
    elif shape.kind == "line":
        return _line_box(shape)
    else:
        left, top, right, bottom = path_box(shape.path)
    return left - reach, top - reach, right + reach, bottom + reach


def _line_box(shape: Shape) -> Box:
    """Square ends: the four corners are the ends shifted by half the width at right angles to the line."""
    x1, y1, x2, y2 = shape.numbers
    length = math.hypot(x2 - x1, y2 - y1) or 1.0
    half = shape.stroke_width / 2
    across_x, across_y = half * abs(y2 - y1) / length, half * abs(x2 - x1) / length
    # A corner less than a hundredth of a pixel beyond the border colours nothing there.
    slack = 0.01
    return (
        math.floor(min(x1, x2) - across_x + slack),
        math.floor(min(y1, y2) - across_y + slack),
        math.ceil(max(x1, x2) + across_x - slack),
        math.ceil(max(y1, y2) + across_y - slack),
    )


def mask(shape: Shape, width: int, height: int) -> np.ndarray:
    """bool [height, width]: the pixels whose centre lies in the shape (filled kinds and lines, not paths)."""
    left, top, right, bottom = box(shape)
    left, top, right, bottom = max(left, 0), max(top, 0), min(right, width), min(bottom, height)
    result = np.zeros((height, width), dtype=bool)
    if left < right and top < bottom:
        result[top:bottom, left:right] = _crop_mask(shape, left, top, right, bottom)
    return result


def _crop_mask(shape: Shape, left: int, top: int, right: int, bottom: int) -> np.ndarray:
    # Twice the coordinates of pixel centres: odd integers, which no corner of a shape can equal.
    x = np.arange(2 * left + 1, 2 * right, 2)[None, :]
    y = np.arange(2 * top + 1, 2 * bottom, 2)[:, None]
    n = tuple(2 * number for number in shape.numbers)
    if shape.kind == "rect":
        return np.ones((y.size, x.size), dtype=bool)
    if shape.kind == "circle":
        return (x - n[0]) ** 2 + (y - n[1]) ** 2 <= n[2] * n[2]
    if shape.kind == "ellipse":
        return ((x - n[0]) * n[3]) ** 2 + ((y - n[1]) * n[2]) ** 2 <= (n[2] * n[3]) ** 2
    if shape.kind == "polygon":
        inside = np.zeros((y.size, x.size), dtype=bool)
        points = list(zip(n[::2], n[1::2]))
        for (x1, y1), (x2, y2) in zip(points, points[1:] + points[:1]):
            if y1 == y2:
                continue
            if y1 > y2:
                x1, y1, x2, y2 = x2, y2, x1, y1
            # Even-odd rule: a ray to the right crosses this edge.
            inside ^= (y > y1) & (y < y2) & ((x - x1) * (y2 - y1) < (y - y1) * (x2 - x1))
        return inside
    if shape.kind == "line":
        along_x, along_y = n[2] - n[0], n[3] - n[1]
        along = (x - n[0]) * along_x + (y - n[1]) * along_y
        across = (x - n[0]) * along_y - (y - n[1]) * along_x
        length_squared = along_x * along_x + along_y * along_y
        return (along >= 0) & (along <= length_squared) & (across**2 <= shape.stroke_width**2 * length_squared)
    raise ValueError(f"kind is {shape.kind!r}: a mask is drawn for rect, circle, ellipse, polygon and line alone")
