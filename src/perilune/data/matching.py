"""Pairing two sets so that the pairs are worth most together, and the F1 that follows from it.

    soft F1 = 2 * (sum of the pairs' similarities) / (number predicted + number true)

With similarities of 0 and 1 this is the ordinary F1. The best pairing is found by shortest augmenting paths with
potentials (the Hungarian method, O(n^2 m) for n <= m), so it does not depend on the order of either set.
"""

from collections.abc import Sequence

import numpy as np

Box = tuple[float, float, float, float]
"""left, top, right, bottom."""


def best_assignment(similarity: np.ndarray) -> list[tuple[int, int]]:
    """(row, column) pairs with the largest total similarity; as many as the shorter side has."""
    similarity = np.asarray(similarity, dtype=np.float64)
    if similarity.ndim != 2:
        raise ValueError(f"similarity has shape {similarity.shape}, expected two axes")
    if not np.isfinite(similarity).all():
        raise ValueError("similarity holds a value that is not finite")
    if similarity.shape[0] > similarity.shape[1]:
        return sorted((row, column) for column, row in best_assignment(similarity.T))
    num_rows, num_columns = similarity.shape
    cost = -similarity
    row_price, column_price = np.zeros(num_rows + 1), np.zeros(num_columns + 1)
    # Column 0 and row 0 are the start of every path; a column's row is 0 while it is free.
    row_of = np.zeros(num_columns + 1, dtype=np.int64)
    for row in range(1, num_rows + 1):
        row_of[0] = row
        column = 0
        nearest = np.full(num_columns + 1, np.inf)
        previous = np.zeros(num_columns + 1, dtype=np.int64)
        reached = np.zeros(num_columns + 1, dtype=bool)
        while row_of[column] != 0:
            reached[column] = True
            here = row_of[column]
            distance = np.full(num_columns + 1, np.inf)
            distance[1:] = cost[here - 1] - row_price[here] - column_price[1:]
            closer = ~reached & (distance < nearest)
            nearest[closer], previous[closer] = distance[closer], column
            following = int(np.argmin(np.where(reached, np.inf, nearest)))
            step = nearest[following]
            row_price[row_of[reached]] += step
            column_price[reached] -= step
            nearest[~reached] -= step
            column = following
        while column != 0:
            row_of[column] = row_of[previous[column]]
            column = int(previous[column])
    return sorted((int(row_of[column]) - 1, column - 1) for column in range(1, num_columns + 1) if row_of[column])


def soft_f1(similarity: np.ndarray) -> float:
    """F1 of the best pairing for similarities in [0, 1], predictions in rows; two empty sets agree completely."""
    num_predicted, num_true = similarity.shape
    if num_predicted + num_true == 0:
        return 1.0
    if num_predicted == 0 or num_true == 0:
        return 0.0
    total = sum(float(similarity[row, column]) for row, column in best_assignment(similarity))
    return min(1.0, 2 * total / (num_predicted + num_true))


def box_iou(first: Sequence[float], second: Sequence[float]) -> float:
    """Intersection over union of two boxes; equal boxes without area agree completely."""
    if tuple(first) == tuple(second):
        return 1.0
    across = min(first[2], second[2]) - max(first[0], second[0])
    down = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(across, 0.0) * max(down, 0.0)
    union = _area(first) + _area(second) - shared
    return shared / union if union > 0 else 0.0


def box_f1(predicted: Sequence[Sequence[float]], true: Sequence[Sequence[float]]) -> float:
    """F1 of boxes, each pair counting by its IoU."""
    similarity = np.array([[box_iou(one, other) for other in true] for one in predicted], dtype=np.float64)
    return soft_f1(similarity.reshape(len(predicted), len(true)))


def text_similarity(predicted: str, true: str) -> float:
    """1 - edit distance / length of the longer text; two empty texts agree completely."""
    longest = max(len(predicted), len(true))
    return 1.0 if longest == 0 else 1.0 - edit_distance(predicted, true) / longest


def edit_distance(first: str, second: str) -> int:
    """The fewest insertions, deletions and replacements that turn one text into the other."""
    codes = np.frombuffer(second.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    steps = np.arange(len(codes) + 1)
    row = steps.copy()
    for position, character in enumerate(first, start=1):
        following = np.empty_like(row)
        following[0] = position
        following[1:] = np.minimum(row[1:] + 1, row[:-1] + (codes != ord(character)))
        # Insertions run along the row: the smallest of everything to the left plus its distance.
        row = np.minimum.accumulate(following - steps) + steps
    return int(row[-1])


def _area(box: Sequence[float]) -> float:
    return max(box[2] - box[0], 0.0) * max(box[3] - box[1], 0.0)
