"""Path data: any spelling in, one spelling out, the same drawing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.raster import rasterize
from perilune.data.scenes import Picture, Shape, box, header, write_svg
from perilune.data.scenes.paths import PathError, Segment, check_path_data, parse_path, write_path

POINT = st.tuples(st.integers(10, 100), st.integers(10, 100))


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    result: list[Segment] = []
    for _ in range(draw(st.integers(1, 3))):
        result.append(("M", draw(POINT)))
        for kind in draw(st.lists(st.sampled_from("LLCQA"), min_size=1, max_size=4)):
            points = [draw(POINT) for _ in range({"L": 1, "C": 3, "Q": 2, "A": 1}[kind])]
            numbers = tuple(float(n) for point in points for n in point)
            if kind == "A":
                flags = float(draw(st.integers(0, 1))), float(draw(st.integers(0, 1)))
                radius = float(draw(st.integers(5, 40)))
                numbers = (radius, radius, 0.0, *flags, *numbers)
            result.append((kind, numbers))
        if draw(st.booleans()):
            result.append(("Z", ()))
    return result


def _draw(data: str) -> np.ndarray:
    source = f'<path d="{data}" fill="none" stroke="black" stroke-width="3"/></svg>'
    return rasterize(header(112, 112) + source, 112, 112).astype(int)


@given(segment_lists())
def test_the_canonical_form_is_stable(segments: list[Segment]) -> None:
    data = write_path(segments)
    assert check_path_data(data) == data
    assert write_path(parse_path(data)) == data


@settings(max_examples=40)
@given(segment_lists())
def test_the_canonical_form_draws_what_absolute_data_draw(segments: list[Segment]) -> None:
    absolute = "".join(kind + " ".join(f"{n:g}" for n in numbers) for kind, numbers in segments)
    # A line of length zero is left out of a longer path, which moves nothing but the join at it.
    assert (np.abs(_draw(absolute) - _draw(write_path(segments))) > 64).sum() <= 12


@pytest.mark.parametrize(
    "data, canonical",
    [
        ("M10 20 30 40", "M10 20l20 20"),
        ("m10,20 5-6H40V0Z", "M10 20l5-6h25v-14z"),
        ("M10 10c0 5 5 5 5 0s5-5 5 0", "M10 10c0 5 5 5 5 0c0-5 5-5 5 0"),
        ("M10 10q5 5 10 0t10 0", "M10 10q5 5 10 0q5-5 10 0"),
        ("M1 1a5 5 0 015 5", "M1 1a5 5 0 0 1 5 5"),
        ("M1.4 1.6l.2.2", "M1 2h1"),
        ("M12 12h.01", "M12 12h0"),
        ("M1e1 10h1.e1", "M10 10h10"),
    ],
)
def test_every_spelling_of_svg_is_understood(data: str, canonical: str) -> None:
    assert write_path(parse_path(data)) == canonical


@pytest.mark.parametrize("data", ["L1 2", "M1", "M1 2L", "M1 2x", "1 2", "M1 2a1 1 0 2 0 3 3", "M1 2z3 4"])
def test_broken_data_are_refused(data: str) -> None:
    with pytest.raises(PathError, match="path data"):
        parse_path(data)


@settings(max_examples=40)
@given(segment_lists())
def test_the_box_of_a_path_holds_its_drawing_and_is_tight(segments: list[Segment]) -> None:
    segments = [segment for segment in segments if segment[0] != "A" and segment[0] != "Z"]
    shape = Shape(kind="path", path=write_path(segments), stroke="black", stroke_width=2)
    if not shape.path or "h0" in shape.path:
        return
    picture = Picture(width=112, height=112, shapes=(shape,), round_pen=True)
    dark = rasterize(write_svg(picture), 112, 112)[..., 0] < 200
    rows, columns = np.flatnonzero(dark.any(axis=1)), np.flatnonzero(dark.any(axis=0))
    drawn = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
    assert np.abs(drawn - np.array(box(shape))).max() <= 1
