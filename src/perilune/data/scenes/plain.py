"""Plain scenes: a few shapes on a flat ground, every one of them to be seen.

A shape is kept only if it contrasts with everything it touches (MIN_CONTRAST), shows at least half of itself and at
least 20 pixels (a 200th of a larger picture), and leaves as much of the shapes below it. The order in the source is the
one free choice a picture does not show, so it is made canonical: reading order (top, then left), except that a shape
always comes after those it covers. A model that sees the picture can then know the source.
"""

import math
from dataclasses import replace

import numpy as np

from perilune.data.generated import SplitMix
from perilune.data.scenes.sample import Primitive, ScenesConfig, ScenesError
from perilune.data.scenes.shapes import MIN_CONTRAST, Shape, box, contrast, mask
from perilune.data.scenes.svg import Picture

VISIBLE_SHARE = 0.5
MIN_PIXELS = 20
MIN_FILLING = 0.3  # of its box, by a polygon: thinner triangles look like lines
_TRIES, _RESTARTS = 24, 60
_CORNERS = {"diamond": 4, "pentagon": 5, "hexagon": 6, "star": 5}

# Directions in steps of 5 degrees, in 1024ths: integers from here on, so that rounding is the same on every machine.
_DIRECTIONS = [
    (round(1024 * math.cos(math.radians(a))), round(1024 * math.sin(math.radians(a)))) for a in range(0, 360, 5)
]


def plain_scene(dice: SplitMix, config: ScenesConfig, size: tuple[int, int]) -> Picture:
    """A picture of config.min_shapes to config.max_shapes shapes."""
    count = dice.between(config.min_shapes, config.max_shapes)
    background = "white"
    if dice.below(1000) < round(1000 * config.background_share):
        background = dice.choose(("black", "silver", "cyan", "teal", "yellow", "pink"))
    for _ in range(_RESTARTS):
        shapes = _place(dice, config, size, count, background)
        if len(shapes) == count:
            return Picture(width=size[0], height=size[1], shapes=_canonical_order(shapes, size), background=background)
    raise ScenesError(
        f"{count} visible shapes do not fit on {size[0]} x {size[1]} pixels: lower max_shapes or raise sizes"
    )


def _place(dice: SplitMix, config: ScenesConfig, size: tuple[int, int], count: int, background: str) -> list[Shape]:
    width, height = size
    # Colours are numbered 1.. in `config.colours`; 0 is the background. `owner` tells which shape shows at a pixel.
    ground = np.zeros((height, width), dtype=np.int64)
    owner = np.full((height, width), -1, dtype=np.int64)
    names = (background, *config.colours)
    shapes: list[Shape] = []
    needed: list[float] = []
    min_area = max(MIN_PIXELS, width * height // 200)
    for _ in range(count * _TRIES):
        if len(shapes) == count:
            break
        shape = random_shape(dice, config, size)
        left, top, right, bottom = box(shape)
        if left < 0 or top < 0 or right > width or bottom > height:
            continue
        touched = ground[max(top - 1, 0) : bottom + 1, max(left - 1, 0) : right + 1]
        present = np.flatnonzero(np.bincount(touched.ravel(), minlength=len(names)))
        if any(contrast(shape.colour, names[number]) < MIN_CONTRAST for number in present):
            continue
        inside = mask(shape, width, height)
        area = int(inside.sum())
        sliver = shape.kind == "polygon" and area < MIN_FILLING * (right - left) * (bottom - top)
        if area < min_area or sliver:
            continue
        rest = np.bincount(owner[~inside] + 1, minlength=len(shapes) + 1)[1:]
        if any(left_over < need for left_over, need in zip(rest, needed)):
            continue
        ground[inside] = 1 + config.colours.index(shape.colour)
        owner[inside] = len(shapes)
        shapes.append(shape)
        needed.append(max(min_area, VISIBLE_SHARE * area))
    return shapes


def random_shape(dice: SplitMix, config: ScenesConfig, size: tuple[int, int]) -> Shape:
    """A shape that may stick out of the picture or be too small: the caller looks."""
    return snapped(make_shape(dice, dice.choose(config.primitives), dice.choose(config.colours), size), config.grid)


def snapped(shape: Shape, grid: int) -> Shape:
    """The shape with all its numbers at the nearest multiples of `grid`; it may have lost its area."""
    if grid == 1:
        return shape
    numbers = tuple((number + grid // 2) // grid * grid for number in shape.numbers)
    # One picture, one source: rounding may have made a circle of an ellipse or moved a polygon's first corner.
    if shape.kind == "ellipse" and numbers[2] == numbers[3]:
        return replace(shape, kind="circle", numbers=numbers[:3])
    if shape.kind == "polygon":
        numbers = canonical_polygon(list(zip(numbers[::2], numbers[1::2])))
    return replace(shape, numbers=numbers)


def make_shape(dice: SplitMix, primitive: Primitive, colour: str, size: tuple[int, int]) -> Shape:
    width, height = size
    unit = min(width, height)
    small, large = max(unit // 12, 3), unit // 4  # radii
    if primitive == "rect":
        w, h = dice.between(2 * small, 2 * large), dice.between(2 * small, 2 * large)
        if dice.below(4) == 0:
            h = w
        return Shape(kind="rect", numbers=(dice.below(width - w), dice.below(height - h), w, h), fill=colour)
    if primitive == "line":
        thickness = dice.between(2, max(3, unit // 20))
        ends = [(dice.between(2, width - 3), dice.between(2, height - 3)) for _ in range(2)]
        (x1, y1), (x2, y2) = sorted(ends)
        if math.dist(*ends) < unit / 4:
            x2, y2 = x1 + unit // 4, y1 if dice.below(2) else y2
        return Shape(kind="line", numbers=(x1, y1, x2, y2), stroke=colour, stroke_width=thickness)
    rx = dice.between(small, large)
    ry = rx
    if primitive == "ellipse":
        ry = dice.between(small, large)
        if abs(ry - rx) < max(2, rx // 4):  # nobody could tell it from a circle
            ry = rx // 2 if rx >= 2 * small else rx * 2
    x, y = dice.between(rx, width - rx), dice.between(ry, height - ry)
    if primitive == "circle":
        return Shape(kind="circle", numbers=(x, y, rx), fill=colour)
    if primitive == "ellipse":
        return Shape(kind="ellipse", numbers=(x, y, rx, ry), fill=colour)
    return Shape(kind="polygon", numbers=_corners(dice, primitive, x, y, rx, size), fill=colour)


def _corners(dice: SplitMix, primitive: str, x: int, y: int, radius: int, size: tuple[int, int]) -> tuple[int, ...]:
    if primitive == "diamond":
        other = max(3, radius * dice.between(60, 140) // 100)
        points = [(x, y - other), (x + radius, y), (x, y + other), (x - radius, y)]
    elif primitive == "triangle":
        points = [(x + dice.between(-radius, radius), y + dice.between(-radius, radius)) for _ in range(3)]
    else:
        corners = _CORNERS[primitive]
        turn = dice.below(72 // corners)
        points = []
        for corner in range(corners * 2 if primitive == "star" else corners):
            step = 36 // corners if primitive == "star" else 72 // corners
            reach = radius if primitive != "star" or corner % 2 == 0 else radius * 2 // 5
            cos, sin = _DIRECTIONS[(turn + corner * step) % 72]
            points.append((x + (reach * cos + 512 >> 10), y + (reach * sin + 512 >> 10)))
    return canonical_polygon(points)


def canonical_polygon(points: list[tuple[int, int]]) -> tuple[int, ...]:
    """The same polygon, clockwise on the screen, from its topmost (then leftmost) corner."""
    doubled_area = sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in zip(points, points[1:] + points[:1]))
    if doubled_area < 0:
        points = points[::-1]
    first = min(range(len(points)), key=lambda i: (points[i][1], points[i][0]))
    return tuple(number for point in points[first:] + points[:first] for number in point)


def _canonical_order(shapes: list[Shape], size: tuple[int, int]) -> tuple[Shape, ...]:
    """Reading order, but a shape after all those it covers."""
    masks = [mask(shape, *size) for shape in shapes]
    below = [[i for i in range(j) if (masks[i] & masks[j]).any()] for j in range(len(shapes))]
    keys = [(box(shape)[1], box(shape)[0]) for shape in shapes]
    done: list[int] = []
    while len(done) < len(shapes):
        ready = (j for j in range(len(shapes)) if j not in done and all(i in done for i in below[j]))
        done.append(min(ready, key=lambda j: (keys[j], j)))
    return tuple(shapes[j] for j in done)
