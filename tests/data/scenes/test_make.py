"""The stream of samples: pure, never repeating test in training, everything visible."""

import dataclasses

import numpy as np
import pytest

from perilune.data.raster import rasterize
from perilune.data.scenes import (
    Picture,
    ScenesConfig,
    ScenesError,
    Shape,
    box,
    is_held_out,
    make_sample,
    parse_svg,
    write_svg,
)
from perilune.data.scenes.plain import VISIBLE_SHARE
from perilune.data.scenes.shapes import COLOURS, MIN_CONTRAST, contrast
from perilune.data.scenes.statistics import main, statistics_table
from perilune.data.svg_guard import clean_svg

KINDS = ("scene", "text", "chart", "layout", "html", "animation")
EVERYTHING = ScenesConfig(kinds=KINDS)


def test_a_sample_is_a_pure_function_of_its_arguments() -> None:
    first = [make_sample(5, index, EVERYTHING) for index in range(40)]
    again = [make_sample(5, index, EVERYTHING) for index in reversed(range(40))]
    assert first == again[::-1]
    assert first != [make_sample(6, index, EVERYTHING) for index in range(40)]


def test_a_sample_without_its_questions_is_the_same_picture() -> None:
    for index in range(40):
        whole = make_sample(5, index, EVERYTHING)
        bare = make_sample(5, index, EVERYTHING, with_questions=False)
        assert bare.questions == () and dataclasses.replace(whole, questions=()) == bare
    assert whole.questions


def test_training_and_held_out_sources_never_meet() -> None:
    # Tiny scenes, so that a collision would be likely if only luck prevented it.
    tiny = ScenesConfig(sizes=((28, 28),), max_shapes=1, primitives=("circle",), colours=("red", "black", "blue"))
    train = {make_sample(0, index, tiny).source for index in range(3000)}
    test = {make_sample(seed, index, tiny, held_out=True).source for index in range(300) for seed in (0, 1)}
    assert len(train) < 3000 and len(test) > 50  # training repeats itself: the space is nearly exhausted
    assert not train & test
    train = {make_sample(0, index, EVERYTHING).source for index in range(600)}
    test = {make_sample(0, index, EVERYTHING, held_out=True).source for index in range(150)}
    assert not train & test
    assert not any(map(is_held_out, train)) and all(map(is_held_out, test))


def test_distinct_indices_give_distinct_samples() -> None:
    sources = [make_sample(0, index, EVERYTHING).source for index in range(600)]
    assert len(set(sources)) >= 598


@pytest.mark.parametrize("kind", KINDS)
def test_sources_of_every_kind_are_canonical_and_fit_their_canvas(kind: str) -> None:
    config = ScenesConfig(kinds=(kind,), sizes=((112, 112), (168, 112), (112, 140)))  # type: ignore[arg-type]
    sizes = set()
    for index in range(60):
        sample = make_sample(1, index, config)
        sizes.add(sample.size)
        assert sample.kind == kind and sample.caption and sample.questions
        assert len(set(sample.questions)) == len(sample.questions) <= config.max_questions
        clean_svg(sample.svg, width=sample.size[0], height=sample.size[1])  # what is taught may be answered
        if kind != "animation":
            assert write_svg(parse_svg(sample.svg)) == sample.svg
        picture = parse_svg(sample.svg) if kind != "animation" else None
        assert picture is None or ((picture.width, picture.height), picture.shapes) == (sample.size, sample.shapes)
        for text in sample.texts:
            left, top, right, bottom = text.box
            assert 0 <= left < right <= sample.size[0] and 0 <= top < bottom <= sample.size[1], (index, text)
    assert sizes == set(config.sizes)


def test_every_shape_of_a_scene_is_seen_in_the_picture() -> None:
    config = ScenesConfig(min_shapes=3, max_shapes=6, background_share=0.5)
    for index in range(40):
        sample = make_sample(2, index, config)
        assert 3 <= len(sample.shapes) <= 6
        # Distinct flat colours for shapes, whatever their own: who is seen where is then read off the pixels.
        names = [name for name in COLOURS if name not in ("white", "silver")][: len(sample.shapes)]
        shapes = tuple(
            dataclasses.replace(shape, **{"stroke" if shape.kind == "line" else "fill": name})
            for shape, name in zip(sample.shapes, names)
        )
        together = rasterize(write_svg(Picture(width=112, height=112, shapes=shapes)), 112, 112)
        for shape, name in zip(shapes, names):
            alone = rasterize(write_svg(Picture(width=112, height=112, shapes=(shape,))), 112, 112)
            whole = (alone == COLOURS[name]).all(axis=-1).sum()
            seen = (together == COLOURS[name]).all(axis=-1).sum()
            assert seen >= 0.8 * VISIBLE_SHARE * whole and seen > 20, (index, shape)
        assert all(contrast(shape.colour, sample.background) >= MIN_CONTRAST for shape in sample.shapes)


def test_the_order_of_shapes_can_be_told_from_the_picture() -> None:
    """Reading order where nothing overlaps: two scenes with the same picture have the same source."""
    for index in range(60):
        sample = make_sample(3, index, ScenesConfig(min_shapes=2, max_shapes=3))
        pixels = rasterize(sample.svg, 112, 112)
        shapes = sample.shapes
        for i in range(len(shapes) - 1):
            swapped = (*shapes[:i], shapes[i + 1], shapes[i], *shapes[i + 2 :])
            picture = Picture(width=112, height=112, shapes=swapped, background=sample.background)
            if (rasterize(write_svg(picture), 112, 112) == pixels).all():
                boxes = [_top_left(shape) for shape in (shapes[i], shapes[i + 1])]
                assert boxes == sorted(boxes), index


def _top_left(shape: Shape) -> tuple[int, int]:
    left, top, _, _ = box(shape)
    return top, left


def test_a_coarse_grid_holds_every_number_and_keeps_one_source_per_picture() -> None:
    for index in range(150):
        for shape in make_sample(4, index, ScenesConfig(grid=7, max_shapes=2)).shapes:
            assert all(number % 7 == 0 for number in shape.numbers)
            assert shape.kind != "ellipse" or shape.numbers[2] != shape.numbers[3]
            corners = list(zip(shape.numbers[::2], shape.numbers[1::2]))
            assert shape.kind != "polygon" or corners[0] == min(corners, key=lambda point: point[::-1])


def test_shares_of_kinds_follow_the_weights() -> None:
    config = ScenesConfig(kinds=("scene", "html"), weights=(1.0, 3.0))
    kinds = [make_sample(0, index, config).kind for index in range(400)]
    assert abs(kinds.count("html") - 300) < 40  # 4.6 standard deviations


@pytest.mark.parametrize(
    "change, names",
    [
        ({"sizes": ((100, 112),)}, "sizes"),
        ({"sizes": ()}, "sizes"),
        ({"kinds": ("movie",)}, "kinds"),
        ({"kinds": ("chart",), "sizes": ((56, 112),)}, "chart"),
        ({"weights": (1.0, 2.0)}, "weights"),
        ({"min_shapes": 3, "max_shapes": 2}, "max_shapes"),
        ({"min_frames": 2}, "min_frames"),
        ({"min_frames": 5, "max_frames": 5}, "even"),
        ({"colours": ("red", "mauve", "blue")}, "colours"),
        ({"primitives": ("cube",)}, "primitives"),
        ({"background_share": 2.0}, "background_share"),
        ({"kinds": ("icon",)}, "icons"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused_by_name(change: dict, names: str) -> None:
    with pytest.raises(ScenesError, match=names):
        ScenesConfig(**change)


def test_too_many_shapes_for_the_canvas_say_so() -> None:
    with pytest.raises(ScenesError, match="do not fit"):
        make_sample(0, 0, ScenesConfig(sizes=((28, 28),), min_shapes=20, max_shapes=20))


def test_the_table_counts_kinds_shapes_and_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    samples = [make_sample(0, index, EVERYTHING) for index in range(60)]
    table = statistics_table(samples)
    assert all(kind in table for kind in KINDS)
    longest = max(len(sample.source) for sample in samples)
    assert f"/ {longest}" in table
    assert main(["--count", "20", "--kinds", "scene"]) == 0
    assert "100.0%" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--kinds", "icon"])
    assert "icons is ''" in capsys.readouterr().err


def test_answers_to_yes_or_no_are_not_one_sided() -> None:
    config = ScenesConfig(min_shapes=2)
    answers = [q.answer for i in range(300) for q in make_sample(0, i, config).questions if q.task == "spatial"]
    assert len(answers) > 60
    assert 0.25 < np.mean([answer == "yes" for answer in answers]) < 0.75
