"""The SVG dialect that models read and write: real SVG, one spelling for each picture, integers only.

    picture    = header [background] shape* "</svg>"
    header     = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 W H">`    see `header(W, H)`: a constant per size
    background = `<rect width="W" height="H" fill="COLOUR"/>`                    absent when white
    shape      = `<rect x="" y="" width="" height="" PAINT/>`
               | `<circle cx="" cy="" r="" PAINT/>`
               | `<ellipse cx="" cy="" rx="" ry="" PAINT/>`
               | `<polygon points="x,y x,y x,y" PAINT/>`
               | `<line x1="" y1="" x2="" y2="" stroke="COLOUR" stroke-width="N"/>`
               | `<path d="DATA" PAINT/>`                                        DATA: see paths.py
    PAINT      = `fill="COLOUR"` [`stroke="COLOUR" stroke-width="N"`]            COLOUR may be `none` for an outline

Attributes come in this order, one space before each; there is no other white space and no comment. An icon's header
also says `stroke-linecap="round" stroke-linejoin="round"`, as icon sets draw with a round pen (`Picture.round_pen`).

`parse_svg` reads the dialect without an XML library, in time linear in the source, and refuses everything else;
attributes may come in any order, because a model that swaps two has still drawn the picture. `write_svg(parse_svg(s))
== s` for every canonical s, and `parse_svg(write_svg(p)) == p` for every picture.
"""

import re
from dataclasses import dataclass
from typing import cast

from perilune.data.scenes.paths import PathError, check_path_data
from perilune.data.scenes.shapes import COLOURS, Kind, Shape

ROUND_PEN = ' stroke-linecap="round" stroke-linejoin="round"'

_GEOMETRY: dict[str, tuple[str, ...]] = {
    "rect": ("x", "y", "width", "height"),
    "circle": ("cx", "cy", "r"),
    "ellipse": ("cx", "cy", "rx", "ry"),
    "line": ("x1", "y1", "x2", "y2"),
    "polygon": ("points",),
    "path": ("d",),
}
_PAINT = ("fill", "stroke", "stroke-width")
_HEADER = re.compile(
    r'<svg xmlns="http://www\.w3\.org/2000/svg" viewBox="0 0 (\d{1,5}) (\d{1,5})"'
    r'( stroke-linecap="round" stroke-linejoin="round")?>'
)
_ATTRIBUTE = re.compile(r' ([A-Za-z][A-Za-z0-9-]*)="([^"<>]*)"')
_OPEN = re.compile(r"<([A-Za-z]+)")
_INTEGER = re.compile(r"-?\d{1,5}\Z")
_POINTS = re.compile(r"-?\d{1,5},-?\d{1,5}(?: -?\d{1,5},-?\d{1,5}){2,}\Z")


class DialectError(ValueError):
    """The source is not in the dialect; the message says where and why."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """What one SVG source shows, bottom shape first."""

    width: int
    height: int
    shapes: tuple[Shape, ...]
    background: str = "white"
    round_pen: bool = False


@dataclass(frozen=True, kw_only=True)
class Element:
    """A tag as written: name, attributes, and the elements inside it (animations have some, shapes none)."""

    tag: str
    attributes: dict[str, str]
    children: "tuple[Element, ...]" = ()
    position: int = 0


# Writing -------------------------------------------------------------------------------------------------------------


def header(width: int, height: int, *, round_pen: bool = False) -> str:
    pen = ROUND_PEN if round_pen else ""
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"{pen}>'


def write_svg(picture: Picture) -> str:
    """The canonical source of a picture."""
    return opening(picture) + "".join(map(write_shape, picture.shapes)) + "</svg>"


def opening(picture: Picture) -> str:
    """Header and background."""
    start = header(picture.width, picture.height, round_pen=picture.round_pen)
    if picture.background != "white":
        start += f'<rect width="{picture.width}" height="{picture.height}" fill="{picture.background}"/>'
    return start


def write_shape(shape: Shape, children: str = "") -> str:
    n = shape.numbers
    if shape.kind == "polygon":
        geometry = ' points="' + " ".join(f"{x},{y}" for x, y in zip(n[::2], n[1::2])) + '"'
    elif shape.kind == "path":
        geometry = f' d="{shape.path}"'
    else:
        geometry = "".join(f' {name}="{value}"' for name, value in zip(_GEOMETRY[shape.kind], n))
    fill = f' fill="{shape.fill}"' if shape.kind != "line" else ""
    stroke = f' stroke="{shape.stroke}" stroke-width="{shape.stroke_width}"' if shape.stroke != "none" else ""
    ending = f">{children}</{shape.kind}>" if children else "/>"
    return f"<{shape.kind}{geometry}{fill}{stroke}{ending}"


# Reading -------------------------------------------------------------------------------------------------------------


def parse_svg(source: str) -> Picture:
    """The picture a source of the dialect describes, or DialectError."""
    width, height, round_pen, elements = read_elements(source)
    background = "white"
    if elements and elements[0].tag == "rect" and "x" not in elements[0].attributes:
        background = _read_background(elements[0], width, height)
        elements = elements[1:]
    return Picture(
        width=width,
        height=height,
        shapes=tuple(map(read_shape, elements)),
        background=background,
        round_pen=round_pen,
    )


def read_elements(source: str) -> tuple[int, int, bool, tuple[Element, ...]]:
    """Width, height, whether the pen is round, and the elements of a source, tags and attributes not yet understood."""
    match = _HEADER.match(source)
    if match is None:
        raise DialectError(f"source starts with {source[:60]!r}: expected {header(112, 112)!r} with its own size")
    width, height = int(match[1]), int(match[2])
    # Depth is two at most (a shape and its animations), so a stack of lists suffices and nothing recurses.
    stack: list[tuple[str, dict[str, str], list[Element], int]] = [("svg", {}, [], 0)]
    position = match.end()
    while stack:
        closing = f"</{stack[-1][0]}>"
        if source.startswith(closing, position):
            tag, attributes, children, start = stack.pop()
            position += len(closing)
            element = Element(tag=tag, attributes=attributes, children=tuple(children), position=start)
            if not stack:
                if position != len(source):
                    raise DialectError(f"{source[position : position + 20]!r} at {position}: nothing may follow </svg>")
                return width, height, match[3] is not None, element.children
            stack[-1][2].append(element)
            continue
        opened = _OPEN.match(source, position)
        if opened is None:
            raise DialectError(f"{source[position : position + 20]!r} at {position}: expected an element or {closing}")
        start, position = position, opened.end()
        attributes: dict[str, str] = {}
        while attribute := _ATTRIBUTE.match(source, position):
            if attribute[1] in attributes:
                raise DialectError(f"attribute {attribute[1]!r} at {position} occurs twice: give it once")
            attributes[attribute[1]] = attribute[2]
            position = attribute.end()
        if source.startswith("/>", position):
            stack[-1][2].append(Element(tag=opened[1], attributes=attributes, position=start))
            position += 2
        elif source.startswith(">", position) and len(stack) < 3:
            stack.append((opened[1], attributes, [], start))
            position += 1
        else:
            raise DialectError(f"{source[position : position + 20]!r} at {position}: expected an attribute or '/>'")
    raise AssertionError("the loop returns at </svg>")


def read_shape(element: Element) -> Shape:
    """The shape of an element that has no children."""
    where = f"<{element.tag}> at {element.position}"
    if element.tag not in _GEOMETRY:
        raise DialectError(f"{where}: expected one of {', '.join(_GEOMETRY)}")
    if element.children:
        raise DialectError(f"{where} has elements inside: a shape of a still picture has none")
    names, given = _GEOMETRY[element.tag], element.attributes
    for name in given:
        if name not in names and name not in _PAINT:
            raise DialectError(f"{where} has attribute {name!r}: expected {', '.join(names + _PAINT)}")
    for name in names:
        if name not in given:
            raise DialectError(f"{where} lacks attribute {name!r}")
    fill = "none" if element.tag == "line" else _colour(given.get("fill"), where, "fill")
    stroke, stroke_width = "none", 0
    if "stroke" in given:
        stroke = _colour(given["stroke"], where, "stroke")
        stroke_width = _integer(given.get("stroke-width", ""), where, "stroke-width")
    if fill == "none" and stroke == "none":
        raise DialectError(f"{where} has neither fill nor stroke: it would not be seen")
    numbers: tuple[int, ...] = ()
    path = ""
    if element.tag == "polygon":
        if not _POINTS.match(given["points"]):
            raise DialectError(f"{where} has points={given['points'][:40]!r}: expected three or more 'x,y' pairs")
        numbers = tuple(int(number) for pair in given["points"].split(" ") for number in pair.split(","))
    elif element.tag == "path":
        try:
            path = check_path_data(given["d"])
        except PathError as error:
            raise DialectError(f"{where} has {error}") from None
    else:
        numbers = tuple(_integer(given[name], where, name) for name in names)
    kind = cast(Kind, element.tag)
    return Shape(kind=kind, numbers=numbers, path=path, fill=fill, stroke=stroke, stroke_width=stroke_width)


def _read_background(element: Element, width: int, height: int) -> str:
    given = element.attributes
    where = f"background at {element.position}"
    if set(given) != {"width", "height", "fill"} or element.children:
        raise DialectError(f"{where} has attributes {sorted(given)}: expected width, height and fill")
    if (given["width"], given["height"]) != (str(width), str(height)):
        raise DialectError(f"{where} is {given['width']} x {given['height']}: expected {width} x {height}")
    return _colour(given["fill"], where, "fill")


def _colour(value: str | None, where: str, name: str) -> str:
    if value is None or (value not in COLOURS and value != "none"):
        raise DialectError(f"{where} has {name}={value!r}: expected none, {', '.join(COLOURS)}")
    return value


def _integer(value: str, where: str, name: str) -> int:
    if not _INTEGER.match(value):
        raise DialectError(f"{where} has {name}={value[:20]!r}: expected an integer")
    return int(value)
