"""Icons as sets of lines: one way to write each, and new drawings made of the lines of known ones.

An icon that is drawn by a pen looks the same in whatever order and direction its lines are drawn. Sets differ in that,
and nothing in a picture tells which was meant, so `in_order` writes every stroked icon in one way:

    an open line      begins at its upper end (of two at one height, at the left one)
    a closed line     begins at its uppermost corner and goes clockwise
    lines             come from top to bottom, then from left to right, by where they begin

`turned` gives the eight ways in which a square can be laid down, `mixed` some lines of one icon and some of another:
thousands of icons become enough to learn to look, where they alone would be learned by heart.
"""

import math
from collections.abc import Sequence

from perilune.data.generated import SplitMix
from perilune.data.scenes.paths import Point, Segment, flatten

Line = tuple[Segment, ...]
"""A move and what is drawn from there, up to the next move."""
WAYS = 8


def lines_of(segments: Sequence[Segment]) -> list[Line]:
    """The lines of a path, each with a move of its own; moves that draw nothing are left out."""
    found: list[list[Segment]] = []
    start: Point = (0.0, 0.0)
    for kind, numbers in segments:
        if kind == "M":
            start = (numbers[0], numbers[1])
            found.append([("M", start)])
            continue
        if found and found[-1][-1][0] == "Z":  # what follows a closed line goes on from its beginning
            found.append([("M", start)])
        found[-1].append((kind, numbers))
    return [tuple(line) for line in found if len(line) > 1]


def in_order(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same drawing under a pen, written in the one way of this module."""
    lines = [_directed(line) for line in lines_of(segments)]
    lines.sort(key=lambda line: (_height_first(_end(line[0])), len(line), line))
    return tuple(segment for line in lines for segment in line)


def turned(segments: Sequence[Segment], way: int, span: float) -> tuple[Segment, ...]:
    """Laid down in one of WAYS ways on its square of side `span`; 0 leaves it as it is."""
    swaps, flips_x, flips_y = way & 1, way & 2, way & 4
    mirrors = bool(swaps) ^ bool(flips_x) ^ bool(flips_y)

    def moved(x: float, y: float) -> Point:
        x, y = (y, x) if swaps else (x, y)
        return (span - x if flips_x else x), (span - y if flips_y else y)

    found: list[Segment] = []
    for kind, numbers in segments:
        if kind == "A":
            rx, ry, _, large, sweep, x, y = numbers  # what is turned is a circle, see icons.py
            radii = (ry, rx) if swaps else (rx, ry)
            found.append((kind, (*radii, 0.0, large, 1 - sweep if mirrors else sweep, *moved(x, y))))
        else:
            pairs = zip(numbers[::2], numbers[1::2])
            found.append((kind, tuple(value for x, y in pairs for value in moved(x, y))))
    return tuple(found)


def mixed(first: Sequence[Segment], second: Sequence[Segment], dice: SplitMix) -> tuple[Segment, ...]:
    """About half of the lines of each, at least one."""
    lines = [*lines_of(first), *lines_of(second)]
    kept = [line for line in lines if dice.below(2)] or [dice.choose(lines)]
    return tuple(segment for line in kept for segment in line)


# One line ------------------------------------------------------------------------------------------------------------


def _directed(line: Line) -> Line:
    start, closes = _end(line[0]), line[-1][0] == "Z"
    edges = list(line[1:-1] if closes else line[1:])
    if not edges:
        return line
    ends = [start, *(_end(edge) for edge in edges)]
    comes_back = _same(ends[-1], start)
    if closes and not comes_back:
        edges.append(("L", start))
        ends.append(start)
    if not closes and not comes_back:
        if _height_first(ends[-1]) < _height_first(start):
            ends, edges = _reversed(ends, edges)
        return (("M", ends[0]), *edges)
    if _goes_counterclockwise(line):
        ends, edges = _reversed(ends, edges)
    first = min(range(len(edges)), key=lambda number: _height_first(ends[number]))
    edges = edges[first:] + edges[:first]
    begin = ends[first]
    if closes and edges[-1][0] == "L" and len(edges) > 1:
        edges.pop()  # drawn by closing
    return (("M", begin), *edges, *([("Z", ())] if closes else []))


def _reversed(ends: Sequence[Point], edges: Sequence[Segment]) -> tuple[list[Point], list[Segment]]:
    found: list[Segment] = []
    for (kind, numbers), start in zip(reversed(edges), list(ends)[-2::-1]):
        if kind == "A":
            rx, ry, turn, large, sweep = numbers[:5]
            found.append((kind, (rx, ry, turn, large, 1 - sweep, *start)))
        else:
            controls = list(zip(numbers[:-2:2], numbers[1:-2:2]))[::-1]
            found.append((kind, tuple(value for point in (*controls, start) for value in point)))
    return list(ends)[::-1], found


def _goes_counterclockwise(line: Line) -> bool:
    """On a screen, where y grows downwards."""
    area = 0.0
    for points in flatten(line, steps=8):
        area += sum(x * below - right * y for (x, y), (right, below) in zip(points, [*points[1:], points[0]]))
    return area < -1e-9


def _end(segment: Segment) -> Point:
    return segment[1][-2], segment[1][-1]


def _same(first: Point, second: Point) -> bool:
    return math.dist(first, second) < 1e-6


def _height_first(point: Point) -> Point:
    return round(point[1], 3), round(point[0], 3)
