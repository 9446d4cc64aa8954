"""Icons as lines: one way to write each, and turned or mixed drawings that are what they say."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.generated import SplitMix
from perilune.data.raster import rasterize
from perilune.data.scenes import ScenesConfig, icon_pool, make_sample
from perilune.data.scenes.icon_parts import WAYS, in_order, lines_of, mixed, turned
from perilune.data.scenes.paths import parse_path, write_path

SPAN = 24.0
DRAWINGS = [
    "M4 4l16 16M20 4L4 20",
    "M3 12a9 9 0 1 0 18 0a9 9 0 1 0-18 0",
    "M12 3l9 17H3zM12 9v4",
    "M4 20c0-8 4-16 16-16",
    "M5 7q4-6 8 0t8 0",
    "M6 3h12a3 2 0 0 1 3 2v9zl-2 4",
    "M12 12h.01",
]
whole = st.integers(1, 23)
point = st.tuples(whole, whole).map(lambda each: f"{each[0]} {each[1]}")
edge = st.one_of(
    point.map("L{}".format),
    st.tuples(point, point).map(lambda each: "Q{} {}".format(*each)),
    st.tuples(point, point, point).map(lambda each: "C{} {} {}".format(*each)),
    st.tuples(st.integers(2, 9), st.booleans(), st.booleans(), point).map(
        lambda each: f"A{each[0]} {each[0]} 0 {int(each[1])} {int(each[2])} {each[3]}"
    ),
)
line = st.tuples(point, st.lists(edge, min_size=1, max_size=4), st.sampled_from(["", "Z"])).map(
    lambda each: f"M{each[0]}{''.join(each[1])}{each[2]}"
)
drawing = st.lists(line, min_size=1, max_size=4).map("".join)


def drawn(segments, *, factor: float = 4.0) -> np.ndarray:
    """bool [96, 96]: where a round pen leaves ink."""
    scaled = []
    for kind, numbers in segments:
        first = [factor * number for number in numbers]
        if kind == "A":
            first[2:5] = numbers[2:5]
        scaled.append(kind + " ".join(f"{number:.6g}" for number in first))
    pen = 'fill="none" stroke="black" stroke-width="6" stroke-linecap="round" stroke-linejoin="round"'
    size = 'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 96 96"'
    return rasterize(f'<svg {size}><path d="{"".join(scaled)}" {pen}/></svg>', 96, 96)[..., 0] < 128


def assert_same_ink(first: np.ndarray, second: np.ndarray) -> None:
    # Curves are cut into other chords from their other end: single pixels at the border of a line may differ.
    assert (first ^ second).sum() <= 0.05 * (first | second).sum() + 2


@settings(deadline=None, max_examples=60)
@given(drawing)
def test_one_order_draws_the_same_and_is_its_own_order(data: str) -> None:
    segments = parse_path(data)
    ordered = in_order(segments)
    assert_same_ink(drawn(ordered), drawn(segments))
    assert write_path(in_order(ordered)) == write_path(ordered)


@settings(deadline=None, max_examples=60)
@given(drawing, st.randoms(use_true_random=False))
def test_the_order_in_which_lines_came_does_not_matter(data: str, random) -> None:
    lines = lines_of(parse_path(data))
    moved = random.sample(lines, len(lines))
    assert in_order([s for each in moved for s in each]) == in_order([s for each in lines for s in each])


@pytest.mark.parametrize(
    "one, other",
    [
        ("M4 4l16 16", "M20 20l-16-16"),
        ("M12 3l9 17h-18z", "M21 20h-18l9-17z"),
        ("M12 3l9 17h-18z", "M3 20l9-17l9 17z"),
        ("M3 12a9 9 0 1 0 18 0a9 9 0 1 0-18 0", "M21 12a9 9 0 1 1-18 0a9 9 0 1 1 18 0"),
        ("M4 20c0-8 4-16 16-16", "M20 4c-12 0-16 8-16 16"),
        ("M4 4h3M9 9h3", "M9 9h3M7 4h-3"),
    ],
)
def test_the_same_drawing_from_another_end_is_written_the_same(one: str, other: str) -> None:
    assert write_path(in_order(parse_path(one))) == write_path(in_order(parse_path(other)))


@pytest.mark.parametrize("data", DRAWINGS)
def test_the_eight_ways_are_those_of_a_square(data: str) -> None:
    segments = parse_path(data)
    flat = drawn(segments)
    squares = [flat.T if way & 1 else flat for way in range(WAYS)]
    squares = [each[:, ::-1] if way & 2 else each for way, each in enumerate(squares)]
    squares = [each[::-1] if way & 4 else each for way, each in enumerate(squares)]
    for way, expected in enumerate(squares):
        assert_same_ink(drawn(turned(segments, way, SPAN)), expected)
    assert turned(segments, 0, SPAN) == tuple(segments)


def test_a_mixture_is_made_of_lines_of_both() -> None:
    first, second = parse_path("M1 1h5M1 3h5M1 5h5"), parse_path("M9 1v5M11 1v5")
    lines = {*lines_of(first), *lines_of(second)}
    found = [set(lines_of(mixed(first, second, SplitMix(seed)))) for seed in range(40)]
    assert all(each and each <= lines for each in found)
    assert any(each & set(lines_of(first)) and each & set(lines_of(second)) for each in found)


def _icons(tmp_path: Path) -> ScenesConfig:
    pen = 'viewBox="0 0 24 24" fill="none" stroke="black" stroke-width="2"'
    sets = {"known": ["M4 4h9v12", "M3 12h18M6 5l3 9", "M2 2l9 20"], "new": ["M20 20h-9v-12", "M5 5c9 0 9 9 14 14"]}
    records = [
        {
            "source": name,
            "licence": "",
            "name": str(i),
            "style": "outline",
            "svg": f'<svg {pen}><path d="{data}"/></svg>',
        }
        for name, drawings in sets.items()
        for i, data in enumerate(drawings)
    ]
    place = tmp_path / "icons.jsonl"
    place.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ScenesConfig(kinds=("icon",), icons=str(place), icon_sets=("known",), icon_held_out_sets=("new",))


def test_training_shows_no_turned_drawing_that_is_held_out_and_changed_icons_have_no_name(tmp_path: Path) -> None:
    """The first held-out icon is the first known one, upside down."""
    config = _icons(tmp_path)
    held_out = {icon.data(112) for icon in icon_pool(config).held_out}
    samples = [make_sample(0, index, config) for index in range(300)]
    shown = [sample.shapes[0].path for sample in samples]
    assert len(held_out) == 2 and not held_out & set(shown)
    assert len(set(shown)) > 3 * 8
    changed = ["changed" in sample.origin for sample in samples]
    assert math.isclose(sum(changed) / len(changed), 0.7, abs_tol=0.1)
    for sample, is_changed in zip(samples, changed):
        assert ("icon." in sample.caption) == is_changed
        assert [question.task for question in sample.questions] == ["caption", "colour"][is_changed:]
    assert all("changed" not in make_sample(0, index, config, held_out=True).origin for index in range(30))
