"""The best pairing against brute force, boxes, and the distance of texts."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.matching import best_assignment, box_f1, box_iou, edit_distance, soft_f1, text_similarity

MATRICES = st.tuples(st.integers(1, 5), st.integers(1, 5)).flatmap(
    lambda shape: st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0],
        max_size=shape[0],
    ).map(np.array)
)
BOXES = st.lists(st.tuples(*[st.integers(0, 20)] * 2, *[st.integers(21, 40)] * 2), max_size=5)


def brute_force(similarity: np.ndarray) -> float:
    rows, columns = similarity.shape
    if rows > columns:
        return brute_force(similarity.T)
    return max(
        sum(similarity[row, column] for row, column in enumerate(choice))
        for choice in itertools.permutations(range(columns), rows)
    )


@given(MATRICES)
def test_assignment_is_as_good_as_brute_force(similarity: np.ndarray) -> None:
    pairs = best_assignment(similarity)
    assert len(pairs) == min(similarity.shape)
    assert len({row for row, _ in pairs}) == len({column for _, column in pairs}) == len(pairs)
    assert sum(similarity[pair] for pair in pairs) == pytest.approx(brute_force(similarity))


def test_assignment_refuses_what_has_no_order() -> None:
    with pytest.raises(ValueError, match="finite"):
        best_assignment(np.array([[np.nan]]))


@given(MATRICES, st.randoms(use_true_random=False))
def test_f1_is_within_bounds_and_does_not_depend_on_order(similarity: np.ndarray, random) -> None:
    rows, columns = list(range(similarity.shape[0])), list(range(similarity.shape[1]))
    random.shuffle(rows)
    random.shuffle(columns)
    assert 0 <= soft_f1(similarity) <= 1
    assert soft_f1(similarity[rows][:, columns]) == pytest.approx(soft_f1(similarity))


def test_f1_of_empty_sets() -> None:
    assert soft_f1(np.zeros((0, 0))) == 1
    assert soft_f1(np.zeros((0, 3))) == soft_f1(np.zeros((3, 0))) == 0


def test_f1_with_one_match_of_two_against_three() -> None:
    assert soft_f1(np.array([[1.0, 0, 0], [0, 0, 0]])) == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    "first,second,expected",
    [
        ((0, 0, 10, 10), (0, 0, 10, 10), 1),
        ((0, 0, 10, 10), (5, 0, 15, 10), 50 / 150),
        ((0, 0, 10, 10), (10, 0, 20, 10), 0),
        ((0, 0, 0, 0), (0, 0, 0, 0), 1),
        ((0, 0, 0, 0), (1, 1, 1, 1), 0),
        ((5, 5, 0, 0), (0, 0, 5, 5), 0),
    ],
)
def test_iou_of_boxes(first: tuple, second: tuple, expected: float) -> None:
    assert box_iou(first, second) == pytest.approx(expected) == box_iou(second, first)


@given(BOXES, BOXES)
def test_boxes_agree_with_themselves_and_stay_within_bounds(first: list, second: list) -> None:
    assert box_f1(first, list(reversed(first))) == pytest.approx(1)
    assert 0 <= box_f1(first, second) <= 1
    assert box_f1(first, second) == pytest.approx(box_f1(second, first))


def naive_distance(first: str, second: str) -> int:
    if not first or not second:
        return len(first) + len(second)
    return min(
        naive_distance(first[1:], second) + 1,
        naive_distance(first, second[1:]) + 1,
        naive_distance(first[1:], second[1:]) + (first[0] != second[0]),
    )


@given(st.text("abé", max_size=5), st.text("abé", max_size=5))
def test_edit_distance_equals_the_definition(first: str, second: str) -> None:
    assert edit_distance(first, second) == naive_distance(first, second)


def test_text_similarity() -> None:
    assert text_similarity("", "") == 1
    assert text_similarity("SALE", "") == 0
    assert text_similarity("SALE", "SAFE") == 0.75
    assert text_similarity("\ud800", "a") == 0
