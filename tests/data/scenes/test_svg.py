"""The dialect: one spelling per picture, read back without loss, everything else refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.raster import rasterize
from perilune.data.scenes import COLOURS, DialectError, Picture, Shape, header, parse_svg, write_svg
from perilune.data.scenes.paths import write_path

NUMBER = st.integers(-200, 400)
COLOUR = st.sampled_from(sorted(COLOURS))
LENGTHS = {"rect": 4, "circle": 3, "ellipse": 4}


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    kind = draw(st.sampled_from(["rect", "circle", "ellipse", "polygon", "line", "path"]))
    fill, stroke = draw(st.sampled_from([("red", "none"), ("none", "blue"), ("pink", "black")]))
    width = draw(st.integers(1, 20)) if stroke != "none" else 0
    paint = {"fill": fill, "stroke": stroke, "stroke_width": width}
    if kind == "line":
        numbers = tuple(draw(st.tuples(NUMBER, NUMBER, NUMBER, NUMBER)))
        return Shape(kind="line", numbers=numbers, stroke=draw(COLOUR), stroke_width=draw(st.integers(1, 20)))
    if kind == "polygon":
        points = draw(st.lists(st.tuples(NUMBER, NUMBER), min_size=3, max_size=8))
        return Shape(kind="polygon", numbers=tuple(n for point in points for n in point), **paint)
    if kind == "path":
        points = draw(st.lists(st.tuples(NUMBER, NUMBER), min_size=2, max_size=8))
        return Shape(kind="path", path=write_path([("L" if i else "M", p) for i, p in enumerate(points)]), **paint)
    numbers = tuple(draw(st.lists(NUMBER, min_size=LENGTHS[kind], max_size=LENGTHS[kind])))
    return Shape(kind=kind, numbers=numbers, **paint)


PICTURES = st.builds(
    Picture,
    width=st.integers(1, 20).map(lambda n: 28 * n),
    height=st.integers(1, 20).map(lambda n: 28 * n),
    shapes=st.lists(shapes(), max_size=6).map(tuple),
    background=COLOUR,
    round_pen=st.booleans(),
)


@given(PICTURES)
def test_every_picture_is_read_back_as_it_was_written(picture: Picture) -> None:
    source = write_svg(picture)
    assert parse_svg(source) == picture
    assert write_svg(parse_svg(source)) == source


@given(PICTURES, st.data())
def test_a_changed_character_is_refused_or_gives_a_picture_with_a_source(picture: Picture, data: st.DataObject) -> None:
    source = write_svg(picture)
    at = data.draw(st.integers(0, len(source) - 1))
    changed = source[:at] + data.draw(st.sampled_from('<>/" 0a=-&')) + source[at + 1 :]
    try:
        read = parse_svg(changed)
    except DialectError:
        return
    assert parse_svg(write_svg(read)) == read


def test_the_dialect_is_drawn_by_a_real_renderer_in_its_named_colours() -> None:
    for name, colour in COLOURS.items():
        shape = Shape(kind="rect", numbers=(10, 10, 20, 20), fill=name)
        pixels = rasterize(write_svg(Picture(width=56, height=28, shapes=(shape,))), 56, 28)
        assert tuple(pixels[20, 20]) == colour
        assert tuple(pixels[5, 5]) == (255, 255, 255)


def test_attributes_in_another_order_are_the_same_picture() -> None:
    swapped = header(112, 112) + '<circle fill="red" r="3" cy="2" cx="1"/></svg>'
    assert parse_svg(swapped).shapes == (Shape(kind="circle", numbers=(1, 2, 3), fill="red"),)


@pytest.mark.parametrize(
    "body, reason",
    [
        ('<circle cx="1" cy="2" fill="red"/>', "lacks attribute 'r'"),
        ('<circle cx="1" cy="2" r="1.5" fill="red"/>', "expected an integer"),
        ('<circle cx="1" cy="2" r="3" fill="mauve"/>', "fill='mauve'"),
        ('<circle cx="1" cy="2" r="3" fill="none"/>', "neither fill nor stroke"),
        ('<circle cx="1" cy="2" r="3" fill="red" onload="x"/>', "onload"),
        ('<image href="a.png"/>', "<image>"),
        ('<polygon points="1,2 3,4" fill="red"/>', "three or more"),
        ('<path d="m1 2h3" fill="red"/>', "expected M"),
        ('<path d="" fill="red"/>', "expected M"),
        ('<rect width="9" height="9" fill="red"/>', "expected 112 x 112"),
        ('<circle cx="1" cx="1" cy="2" r="3" fill="red"/>', "twice"),
        ('<circle cx="1" cy="2" r="3" fill="red"><a/></circle>', "inside"),
        ("hello", "expected an element"),
        ('<circle cx="1"', "expected an attribute"),
    ],
)
def test_what_is_not_in_the_dialect_is_refused_with_the_reason(body: str, reason: str) -> None:
    with pytest.raises(DialectError, match=reason.replace("(", r"\(")):
        parse_svg(header(112, 112) + body + "</svg>")


@pytest.mark.parametrize("source", ["", "<svg>", header(112, 112), header(112, 112) + "</svg> ", "<svg" * 50_000])
def test_a_source_without_header_or_end_is_refused(source: str) -> None:
    with pytest.raises(DialectError):
        parse_svg(source)
