"""Path data: any SVG path read into absolute segments, and one canonical spelling in integers.

    DATA = ("Mx y" segment*)+        each subpath starts at an absolute point, everything after is relative to the pen
    segment = "hDX" | "vDY" | "lDX DY" | "qDX DY DX DY" | "cDX DY DX DY DX DY" | "aRX RY 0 LARGE SWEEP DX DY" | "z"

A letter before every segment, one space between numbers, none before a minus. `write_path` rounds every absolute point
to the grid and then takes differences, so rounding errors do not add up along a path.
"""

import math
import re
from collections.abc import Sequence

Segment = tuple[str, tuple[float, ...]]  # letter of M L C Q A Z, and its absolute numbers as SVG orders them
Point = tuple[float, float]

_ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
_TOKEN = re.compile(r"[\s,]*(?:([MmLlHhVvCcSsQqTtAaZz])|([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?))")
_FLAG = re.compile(r"[\s,]*([01])")
_NUMBER = r"(?:-?\d{1,5})"
_PAIR = rf"{_NUMBER}(?: \d{{1,5}}|-\d{{1,5}})"
_NEXT = r"(?: \d{1,5}|-\d{1,5})"
_CANONICAL_SEGMENT = re.compile(
    rf"M{_PAIR}|[hv]{_NUMBER}|l{_PAIR}|q{_NUMBER}{_NEXT}{{3}}|c{_NUMBER}{_NEXT}{{5}}"
    rf"|a\d{{1,5}} \d{{1,5}} 0 [01] [01]{_NEXT}{{2}}|z"
)


class PathError(ValueError):
    """The path data cannot be read; the message says where."""


# Reading any path ----------------------------------------------------------------------------------------------------


def parse_path(data: str) -> list[Segment]:
    """Absolute segments of any SVG path; H, V, S and T become L, L, C and Q."""
    segments: list[Segment] = []
    x = y = start_x = start_y = 0.0
    control: Point | None = None  # the last control point, which S and T reflect
    letter, position = "", 0
    data = data.rstrip(" \t\r\n,")
    while position < len(data):
        match = _TOKEN.match(data, position)
        if match is None:
            raise PathError(
                f"path data {data[position : position + 20]!r} at {position}: expected a command or a number"
            )
        if match[1]:
            letter, position = match[1], match.end()
        elif not letter or letter in "Zz":
            raise PathError(f"path data {data[position : position + 20]!r} at {position}: expected a command")
        kind = letter.upper()
        numbers, position = _read_numbers(data, position, kind)
        base_x, base_y = (x, y) if letter.islower() else (0.0, 0.0)
        if kind == "Z":
            segments.append(("Z", ()))
            x, y, control = start_x, start_y, None
            continue
        if kind == "H":
            points = [base_x + numbers[0], y]
        elif kind == "V":
            points = [x, base_y + numbers[0]]
        elif kind == "A":
            points = [*numbers[:5], base_x + numbers[5], base_y + numbers[6]]
        else:
            points = [value + (base_y if i % 2 else base_x) for i, value in enumerate(numbers)]
        if kind in "ST":
            known = control is not None and segments[-1][0] == ("C" if kind == "S" else "Q")
            reflected = (2 * x - control[0], 2 * y - control[1]) if known and control is not None else (x, y)
            points = [*reflected, *points]
        control = (points[-4], points[-3]) if kind in "CSQT" else None
        name = {"H": "L", "V": "L", "S": "C", "T": "Q"}.get(kind, kind)
        segments.append((name, tuple(points)))
        x, y = points[-2], points[-1]
        if kind == "M":
            start_x, start_y = x, y
            letter = "L" if letter == "M" else "l"  # more pairs after a move are lines
    if segments and segments[0][0] != "M":
        raise PathError(f"path data {data[:20]!r}: expected it to start with M")
    return segments


def _read_numbers(data: str, position: int, kind: str) -> tuple[list[float], int]:
    numbers: list[float] = []
    for index in range(_ARGUMENTS[kind]):
        # The two flags of an arc may stand without anything between them: "a1 1 0 01.5.5".
        match = (_FLAG if kind == "A" and index in (3, 4) else _TOKEN).match(data, position)
        text = match[match.lastindex or 0] if match is not None else None
        if match is None or text is None or text.isalpha():
            raise PathError(f"path data {data[position : position + 20]!r} at {position}: expected number {index + 1}")
        numbers.append(float(text))
        position = match.end()
    return numbers, position


# Writing and checking the canonical form -----------------------------------------------------------------------------


def write_path(segments: Sequence[Segment]) -> str:
    """Canonical data, every point rounded to the nearest integer.

    Segments that vanish are left out; of a subpath that vanishes as a whole "h0" is left, a dot under a round pen.
    """
    parts: list[str] = []
    x = y = start_x = start_y = 0
    move: tuple[int, int] | None = None  # written when something is drawn from it
    drawn = dot = False
    for kind, numbers in [*segments, ("M", (0.0, 0.0))]:
        if dot and kind in "MZ":
            parts.append(f"M{_join((x, y))}h0")
            dot = False
            if kind == "Z":
                continue
        if kind == "Z":
            if drawn:
                parts.append("z")
            x, y, move, drawn = start_x, start_y, (start_x, start_y), False
            continue
        to_x, to_y = _nearest(numbers[-2]), _nearest(numbers[-1])
        if kind == "M":
            x, y = start_x, start_y = to_x, to_y
            move, drawn = (x, y), False
            continue
        text = _segment(kind, numbers, x, y, to_x, to_y)
        if text:
            if move is not None:
                parts.append("M" + _join(move))
                start_x, start_y = move
                move = None
            parts.append(text)
            drawn, dot = True, False
        elif not drawn and move is not None:
            dot = True
        x, y = to_x, to_y
    return "".join(parts)


def _segment(kind: str, numbers: tuple[float, ...], x: int, y: int, to_x: int, to_y: int) -> str:
    if kind == "A":
        rx, ry = _nearest(abs(numbers[0])), _nearest(abs(numbers[1]))
        if rx == 0 or ry == 0 or (to_x, to_y) == (x, y):
            kind = "L"
        else:
            return f"a{rx} {ry} 0 {int(numbers[3])} {int(numbers[4])}" + _join((to_x - x, to_y - y), first=False)
    if kind == "L":
        if (to_x, to_y) == (x, y):
            return ""
        if to_y == y:
            return f"h{to_x - x}"
        return f"v{to_y - y}" if to_x == x else "l" + _join((to_x - x, to_y - y))
    offsets = [_nearest(value) - (y if i % 2 else x) for i, value in enumerate(numbers)]
    return kind.lower() + _join(offsets) if any(offsets) else ""


def _nearest(value: float) -> int:
    return math.floor(value + 0.5)


def _join(numbers: Sequence[int], *, first: bool = True) -> str:
    text = "".join(str(number) if number < 0 else f" {number}" for number in numbers)
    return text.removeprefix(" ") if first else text


def check_path_data(data: str) -> str:
    """The data itself where it is canonical, else PathError."""
    position = 0
    while position < len(data) or not data:
        match = _CANONICAL_SEGMENT.match(data, position)
        if match is None or (position == 0 and not data.startswith("M")):
            raise PathError(f"d={data[position : position + 20]!r} at {position}: expected M, then h v l q c a z")
        position = match.end()
    return data


# Geometry ------------------------------------------------------------------------------------------------------------


def flatten(segments: Sequence[Segment], *, steps: int = 12) -> list[list[Point]]:
    """The subpaths as polylines; a curve or an arc becomes `steps` chords."""
    lines: list[list[Point]] = []
    for kind, numbers in segments:
        if kind == "M":
            lines.append([(numbers[0], numbers[1])])
            continue
        line = lines[-1]
        if kind == "Z":
            line.append(line[0])
            lines.append([line[0]])
        elif kind == "L":
            line.append((numbers[0], numbers[1]))
        elif kind == "A":
            line.extend(_arc_points(line[-1], numbers, steps))
        else:
            controls = [line[-1], *zip(numbers[::2], numbers[1::2])]
            line.extend(_bezier(controls, step / steps) for step in range(1, steps + 1))
    return [line for line in lines if len(line) > 1]


def _bezier(controls: Sequence[Point], t: float) -> Point:
    points = list(controls)
    while len(points) > 1:
        points = [(a + (c - a) * t, b + (d - b) * t) for (a, b), (c, d) in zip(points, points[1:])]
    return points[0]


def _arc_points(start: Point, numbers: tuple[float, ...], steps: int) -> list[Point]:
    """Points of an elliptical arc by the endpoint-to-centre conversion of the SVG specification, section F.6."""
    rx, ry, turn, large, sweep, end_x, end_y = numbers
    if rx == 0 or ry == 0 or start == (end_x, end_y):
        return [(end_x, end_y)]
    cos, sin = math.cos(math.radians(turn)), math.sin(math.radians(turn))
    half_x, half_y = (start[0] - end_x) / 2, (start[1] - end_y) / 2
    px, py = cos * half_x + sin * half_y, -sin * half_x + cos * half_y
    grow = math.sqrt(max(1.0, (px / rx) ** 2 + (py / ry) ** 2))
    rx, ry = abs(rx) * grow, abs(ry) * grow
    apart = (rx * py) ** 2 + (ry * px) ** 2
    if apart == 0:  # ends so near to each other that the squares vanish
        return [(end_x, end_y)]
    rest = max(0.0, (rx * ry) ** 2 / apart - 1)
    factor = math.sqrt(rest) * (-1 if bool(large) == bool(sweep) else 1)
    qx, qy = factor * rx * py / ry, -factor * ry * px / rx
    centre_x = cos * qx - sin * qy + (start[0] + end_x) / 2
    centre_y = sin * qx + cos * qy + (start[1] + end_y) / 2
    first = math.atan2((py - qy) / ry, (px - qx) / rx)
    span = math.atan2((-py - qy) / ry, (-px - qx) / rx) - first
    if sweep and span < 0:
        span += 2 * math.pi
    elif not sweep and span > 0:
        span -= 2 * math.pi
    angles = (first + span * step / steps for step in range(1, steps + 1))
    return [
        (
            centre_x + rx * math.cos(a) * cos - ry * math.sin(a) * sin,
            centre_y + rx * math.cos(a) * sin + ry * math.sin(a) * cos,
        )
        for a in angles
    ]


def path_box(data: str) -> tuple[int, int, int, int]:
    """The smallest box of whole pixels around the path's line, without the stroke's width."""
    points = [point for line in flatten(parse_path(data), steps=32) for point in line]
    if not points:
        return 0, 0, 0, 0
    slack = 0.01  # chords of an arc that touches the grid from inside
    xs, ys = [point[0] for point in points], [point[1] for point in points]
    return (
        math.floor(min(xs) + slack),
        math.floor(min(ys) + slack),
        math.ceil(max(xs) - slack),
        math.ceil(max(ys) - slack),
    )
