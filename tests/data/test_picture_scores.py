"""Scores of generated pictures: 1 for the true source, less for every change, in [0, 1], never an exception."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.picture_scores import (
    Interval,
    PictureScore,
    bootstrap_interval,
    count_score,
    derangement,
    paint_match,
    paired_scores,
    pixel_similarity,
    score_animation,
    score_frames,
    score_html,
    score_svg,
    shape_f1,
    shuffled,
)
from perilune.data.scenes import ScenesConfig, make_sample
from perilune.data.scenes.shapes import COLOURS, Shape
from perilune.data.scenes.svg import Picture, write_svg

SIZE = (56, 56)
COLOUR = st.sampled_from([name for name in COLOURS if name != "white"])
SMALL = st.integers(4, 20)
PLACE = st.integers(10, 36)
SHAPES = st.one_of(
    st.builds(
        lambda x, y, w, h, c: Shape(kind="rect", numbers=(x, y, w, h), fill=c), PLACE, PLACE, SMALL, SMALL, COLOUR
    ),
    st.builds(lambda x, y, r, c: Shape(kind="circle", numbers=(x, y, r), fill=c), PLACE, PLACE, SMALL, COLOUR),
    st.builds(
        lambda x, y, r, c: Shape(kind="ellipse", numbers=(x, y, r, r + 2), fill="none", stroke=c, stroke_width=2),
        PLACE,
        PLACE,
        SMALL,
        COLOUR,
    ),
    st.builds(
        lambda x, y, s, c: Shape(kind="line", numbers=(x, y, x + s, y + s), stroke=c, stroke_width=3),
        PLACE,
        PLACE,
        SMALL,
        COLOUR,
    ),
)
PICTURES = st.lists(SHAPES, min_size=1, max_size=5)


def sample(*shapes: Shape) -> Any:
    source = write_svg(Picture(width=SIZE[0], height=SIZE[1], shapes=tuple(shapes)))
    return SimpleNamespace(svg=source, shapes=tuple(shapes), size=SIZE)


RED = Shape(kind="rect", numbers=(5, 5, 20, 20), fill="red")
BLUE = Shape(kind="circle", numbers=(40, 40, 10), fill="blue")


@given(PICTURES)
@settings(max_examples=40)
def test_true_source_scores_one(shapes: list[Shape]) -> None:
    true = sample(*shapes)
    assert score_svg(true.svg, true) == PictureScore(parses=True, pixel=1, f1=1, count=1, reward=pytest.approx(1))


@given(PICTURES, PICTURES)
@settings(max_examples=40)
def test_scores_are_within_bounds_and_the_reward_is_their_mixture(first: list[Shape], second: list[Shape]) -> None:
    score = score_svg(sample(*first).svg, sample(*second))
    assert score.parses
    assert all(0 <= value <= 1 for value in (score.pixel, score.f1, score.count, score.reward))
    assert score.reward == pytest.approx(0.6 * score.pixel + 0.3 * score.f1 + 0.1 * score.count)


@given(PICTURES, PICTURES, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_shape_f1_does_not_depend_on_order_and_is_symmetric(first: list, second: list, random) -> None:
    expected = shape_f1(first, second, size=SIZE)
    assert shape_f1(second, first, size=SIZE) == pytest.approx(expected)
    random.shuffle(first)
    assert shape_f1(first, second, size=SIZE) == pytest.approx(expected)


@pytest.mark.parametrize(
    "changed",
    [
        (Shape(kind="rect", numbers=(9, 5, 20, 20), fill="red"), BLUE),
        (Shape(kind="rect", numbers=(5, 5, 20, 20), fill="orange"), BLUE),
        (Shape(kind="rect", numbers=(5, 5, 20, 20), fill="none", stroke="red", stroke_width=2), BLUE),
        (Shape(kind="circle", numbers=(15, 15, 10), fill="red"), BLUE),
        (RED,),
        (RED, BLUE, Shape(kind="rect", numbers=(30, 2, 9, 9), fill="green")),
    ],
    ids=["moved", "other colour", "outline only", "other kind", "one missing", "one too many"],
)
def test_every_change_costs(changed: tuple[Shape, ...]) -> None:
    score = score_svg(sample(*changed).svg, sample(RED, BLUE))
    assert score.pixel < 1 and score.f1 < 1 and 0 < score.reward < 0.99


def test_farther_is_worse() -> None:
    rewards = [
        score_svg(sample(Shape(kind="rect", numbers=(5 + step, 5, 20, 20), fill="red")).svg, sample(RED)).reward
        for step in (0, 2, 5, 10, 19)
    ]
    assert rewards == sorted(rewards, reverse=True) and len(set(rewards)) == len(rewards)


def test_opposite_diagonals_are_not_the_same_line() -> None:
    down = Shape(kind="line", numbers=(5, 5, 45, 45), stroke="red", stroke_width=3)
    up = Shape(kind="line", numbers=(5, 45, 45, 5), stroke="red", stroke_width=3)
    assert shape_f1([down], [up], size=SIZE) < 0.1


@pytest.mark.parametrize("prediction", ["", "<svg", "\0", "<script/>", "a" * 100_000, '<svg onload="x"/>'])
def test_source_that_cannot_be_drawn_scores_nothing(prediction: str) -> None:
    score = score_svg(prediction, sample(RED))
    assert score.problem and score == PictureScore(parses=False, problem=score.problem)


def test_clean_source_outside_the_dialect_has_pixels_and_no_shapes() -> None:
    source = sample(RED).svg.replace('fill="red"', 'fill="#ff0000"')
    score = score_svg(source, sample(RED))
    assert (score.parses, score.pixel, score.f1, score.count) == (True, 1, 0, 0)
    assert score.problem and score.reward == pytest.approx(0.6)


def test_empty_canvas_scores_nothing_but_parses() -> None:
    score = score_svg(sample().svg, sample(RED))
    assert score == PictureScore(parses=True)


def test_pixels_of_blank_targets_and_other_sizes() -> None:
    white = np.full((4, 4, 3), 255, dtype=np.uint8)
    black = np.zeros_like(white)
    assert pixel_similarity(white, white) == 1
    assert pixel_similarity(black, white) == 0
    assert pixel_similarity(white, black) == 0
    assert pixel_similarity(np.full_like(white, 128), black) == pytest.approx(1 - (128 / 255) ** 2)
    with pytest.raises(ValueError, match="one size"):
        pixel_similarity(white[:2], black)


def test_count_and_paint() -> None:
    assert [count_score(n, 2) for n in range(6)] == [0, 0.5, 1, 0.5, 0, 0]
    assert (count_score(0, 0), count_score(1, 0)) == (1, 0)
    black, white = (Shape(kind="rect", numbers=(0, 0, 9, 9), fill=name) for name in ("black", "white"))
    assert paint_match(black, black) == 1
    assert paint_match(black, white) == pytest.approx(0)


def test_many_shapes_are_cut_and_still_cost() -> None:
    score = shape_f1([RED] * 400, [RED], size=SIZE)
    assert 0 < score <= 2 / 401 + 1e-9


def test_frames_are_scored_one_by_one() -> None:
    true = [sample(Shape(kind="rect", numbers=(step, 5, 20, 20), fill="red")).svg for step in (0, 4, 8)]
    scores = score_frames([true[0], "nonsense"], true, SIZE)
    assert [score.parses for score in scores] == [True, False, False]
    assert scores[0].pixel == 1 and scores[1].pixel == 0 and "missing" in scores[2].problem
    assert all(score.pixel < 1 for score in score_frames(list(reversed(true)), true, SIZE)[::2])


def test_animation_is_scored_frame_by_frame() -> None:
    true = make_sample(0, 1, ScenesConfig(kinds=("animation",)))
    scores = score_animation(true.svg, true)
    assert len(scores) == len(true.frames) >= 4
    assert all(score.pixel == pytest.approx(1) for score in scores)
    refused = score_animation(true.svg.replace("<rect", '<rect onload="x"', 1).replace("<svg", "<svg id='x'", 1), true)
    assert [score.parses for score in refused] == [False] * len(true.frames)


@pytest.mark.parametrize("kind", ["scene", "text", "chart", "layout"])
def test_every_kind_of_sample_passes_the_guard_and_scores_one(kind: Any) -> None:
    for index in range(5):
        true = make_sample(0, index, ScenesConfig(kinds=(kind,)))
        assert score_svg(true.svg, true).reward == pytest.approx(1)


@pytest.mark.needs_tool("chromium")
def test_page_of_the_corpus_looks_the_same_in_the_browser_as_in_svg() -> None:
    true = make_sample(0, 0, ScenesConfig(kinds=("html",)))
    assert score_html(true.html, true).pixel == pytest.approx(1, abs=1e-3)


@pytest.mark.needs_tool("chromium")
def test_pages_are_scored_by_their_pixels() -> None:
    page = '<div style="width:30px;height:20px;background:red"></div>'
    true = SimpleNamespace(html=page, svg="", png=b"", size=SIZE)
    assert score_html(page, true).pixel == 1
    assert score_html(page.replace("30px", "15px"), true).pixel < 0.8
    assert not score_html("<script>x</script>", true).parses


# Over many samples ---------------------------------------------------------------------------------------------------


def test_interval_holds_the_mean_and_narrows_with_more_samples() -> None:
    values = np.random.default_rng(3).normal(0.5, 0.1, 400).tolist()
    few, many = bootstrap_interval(values[:20]), bootstrap_interval(values)
    assert few.low < few.mean < few.high and many.low < many.mean < many.high
    assert many.high - many.low < few.high - few.low
    assert many.high - many.low == pytest.approx(2 * 1.96 * 0.1 / 20, rel=0.2)
    assert bootstrap_interval([0.25] * 5) == Interval(mean=0.25, low=0.25, high=0.25)
    assert bootstrap_interval(values) == many
    with pytest.raises(ValueError, match="empty"):
        bootstrap_interval([])


@given(st.integers(2, 60), st.integers(0, 5))
def test_derangement_moves_everything_and_loses_nothing(count: int, seed: int) -> None:
    order = derangement(count, seed=seed)
    assert sorted(order) == list(range(count))
    assert all(index != place for place, index in enumerate(order))
    assert order == derangement(count, seed=seed)


def test_one_sample_cannot_be_shuffled() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        shuffled([1])


def test_shuffled_pictures_score_lower_for_predictions_that_looked() -> None:
    samples = [sample(Shape(kind="rect", numbers=(2 + 10 * n, 5, 9, 9), fill="red")) for n in range(5)]
    own, others = paired_scores([one.svg for one in samples], samples)
    assert all(score.reward == pytest.approx(1) for score in own)
    assert max(score.reward for score in others) < 0.5
    with pytest.raises(ValueError, match="1 predictions for 5"):
        paired_scores(["x"], samples)
