"""How well generated source draws the picture it was asked for. numpy and the renderers; no torch in this file.

    score = score_svg(prediction, sample)                   # PictureScore(parses, pixel, f1, count, reward)

    pixel  = 1 - MSE(prediction, target) / MSE(white, target), clipped to [0, 1]
    f1     = 2 * sum of matched similarities / (shapes drawn + shapes there), similarity = IoU x colour match
    count  = max(0, 1 - |shapes drawn - shapes there| / shapes there)
    reward = 0.6 pixel + 0.3 f1 + 0.1 count, and 0 for a source that cannot be drawn

The prediction is hostile input: it goes through the guard and the worker, and whatever it says the answer is a score. A
source that draws but leaves the scenes' dialect has pixels and no shapes. IoU is that of the shapes' filled outlines;
for free paths that of their boxes.

Whether a model looks at its picture is measured against `shuffled`: the same predictions scored on other pictures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from perilune.data.hostile import PictureError
from perilune.data.matching import box_iou, soft_f1
from perilune.data.pictures import draw_clean_svg, draw_html, frames_of
from perilune.data.raster import decode_png, rasterize
from perilune.data.scenes.shapes import COLOURS, Shape, box, mask
from perilune.data.scenes.svg import DialectError, parse_svg
from perilune.data.svg_guard import clean_svg

PIXEL_SHARE, F1_SHARE, COUNT_SHARE = 0.6, 0.3, 0.1
MAX_SHAPES = 128
"""Shapes beyond these are counted as unmatched."""
_LARGEST_DISTANCE = float(np.sqrt(3) * 255)


class PictureSample(Protocol):
    """What scoring needs of a sample."""

    @property
    def svg(self) -> str: ...
    @property
    def shapes(self) -> Sequence[Shape]: ...
    @property
    def size(self) -> tuple[int, int]: ...


@dataclass(frozen=True, kw_only=True)
class PictureScore:
    parses: bool
    pixel: float = 0.0
    f1: float = 0.0
    count: float = 0.0
    reward: float = 0.0
    problem: str = ""
    """Why it does not parse, or why it has no shapes."""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean with the bounds of its 95% interval."""

    mean: float
    low: float
    high: float


def score_svg(prediction: str, sample: PictureSample) -> PictureScore:
    """The score of one predicted source against the sample it should draw."""
    width, height = sample.size
    try:
        drawn = draw_clean_svg(clean_svg(prediction, width=width, height=height))
    except PictureError as error:
        return PictureScore(parses=False, problem=str(error))
    pixel = pixel_similarity(drawn, rasterize(sample.svg, width, height))
    try:
        shapes: Sequence[Shape] = parse_svg(prediction).shapes
        problem = ""
    except DialectError as error:
        shapes, problem = (), str(error)
    if problem:
        return PictureScore(parses=True, pixel=pixel, reward=PIXEL_SHARE * pixel, problem=problem)
    f1 = shape_f1(shapes, sample.shapes, size=sample.size)
    count = count_score(len(shapes), len(sample.shapes))
    return PictureScore(
        parses=True,
        pixel=pixel,
        f1=f1,
        count=count,
        reward=min(1.0, PIXEL_SHARE * pixel + F1_SHARE * f1 + COUNT_SHARE * count),
    )


def score_html(prediction: str, sample: Any) -> PictureScore:
    """Pixels alone: a page has no list of shapes. Chromium draws the prediction, and the true page unless its picture
    came with it or it is known as SVG."""
    width, height = sample.size
    if sample.png:
        target = decode_png(sample.png)
    else:
        target = rasterize(sample.svg, width, height) if sample.svg else draw_html(sample.html, width, height)
    try:
        pixel = pixel_similarity(draw_html(prediction, width, height), target)
    except PictureError as error:
        return PictureScore(parses=False, problem=str(error))
    return PictureScore(parses=True, pixel=pixel, reward=pixel)


def score_animation(prediction: str, sample: Any) -> list[PictureScore]:
    """One score per true frame of an animated source; a source that is refused scores nothing on any of them."""
    width, height = sample.size
    try:
        predicted = frames_of(prediction, width, height)
    except (PictureError, DialectError) as error:
        return [PictureScore(parses=False, problem=str(error)) for _ in sample.frames]
    return score_frames(predicted, sample.frames, sample.size)


def score_source(prediction: str, sample: Any) -> PictureScore:
    """The score of what a model wrote about a sample, by the sample's kind; of an animation, the mean over its frames.

    So frames in the wrong order, too few of them or none cost what they are worth.
    """
    if not sample.frames:
        return score_html(prediction, sample) if sample.html else score_svg(prediction, sample)
    scores = score_animation(prediction, sample)
    pixel = sum(score.pixel for score in scores) / len(scores)
    parses = any(score.parses for score in scores)
    return PictureScore(parses=parses, pixel=pixel, reward=pixel, problem=scores[0].problem)


def score_frames(predicted: Sequence[str], true: Sequence[str], size: tuple[int, int]) -> list[PictureScore]:
    """One score for each true frame, by pixels; a frame that is missing or cannot be drawn scores nothing."""
    width, height = size
    scores: list[PictureScore] = []
    for index, frame in enumerate(true):
        if index >= len(predicted):
            scores.append(PictureScore(parses=False, problem=f"frame {index} of {len(true)} is missing"))
            continue
        try:
            drawn = draw_clean_svg(clean_svg(predicted[index], width=width, height=height))
        except PictureError as error:
            scores.append(PictureScore(parses=False, problem=str(error)))
            continue
        pixel = pixel_similarity(drawn, rasterize(frame, width, height))
        scores.append(PictureScore(parses=True, pixel=pixel, reward=pixel))
    return scores


def pixel_similarity(predicted: np.ndarray, target: np.ndarray) -> float:
    """1 for equal pictures, 0 for those no nearer than a white canvas; of a white target, 1 if equal and 0 if not."""
    if predicted.shape != target.shape:
        raise ValueError(f"pictures have shapes {predicted.shape} and {target.shape}; draw both in one size")
    wanted = target.astype(np.float32)
    error = float(np.square(predicted.astype(np.float32) - wanted).mean())
    blank = float(np.square(255 - wanted).mean())
    if blank == 0:
        return float(error == 0)
    return min(1.0, max(0.0, 1 - error / blank))


def shape_f1(predicted: Sequence[Shape], true: Sequence[Shape], *, size: tuple[int, int]) -> float:
    """Soft F1 of two pictures' shapes under the best pairing."""
    kept = predicted[:MAX_SHAPES], true[:MAX_SHAPES]
    overlap = _overlaps(kept[0], kept[1], size)
    paint = np.array([[paint_match(one, other) for other in kept[1]] for one in kept[0]], dtype=np.float64)
    f1 = soft_f1(overlap * paint.reshape(overlap.shape))
    num_all, num_kept = len(predicted) + len(true), len(kept[0]) + len(kept[1])
    return f1 if num_all == num_kept else f1 * num_kept / num_all


def count_score(num_predicted: int, num_true: int) -> float:
    if num_true == 0:
        return float(num_predicted == 0)
    return max(0.0, 1 - abs(num_predicted - num_true) / num_true)


def paint_match(first: Shape, second: Shape) -> float:
    """How alike two shapes are painted, fill and stroke alike; paint that only one of them has counts 0."""
    matches = [
        _colour_match(one, other)
        for one, other in ((first.fill, second.fill), (first.stroke, second.stroke))
        if one != "none" or other != "none"
    ]
    return sum(matches) / len(matches) if matches else 1.0


def _colour_match(first: str, second: str) -> float:
    if "none" in (first, second):
        return 0.0
    difference = np.subtract(COLOURS[first], COLOURS[second], dtype=np.float64)
    return 1.0 - float(np.sqrt(np.square(difference).sum())) / _LARGEST_DISTANCE


def _overlaps(predicted: Sequence[Shape], true: Sequence[Shape], size: tuple[int, int]) -> np.ndarray:
    """IoU of every pair, float64 [predicted, true]."""
    overlaps = np.zeros((len(predicted), len(true)))
    if not predicted or not true:
        return overlaps
    first, second = _masks(predicted, size), _masks(true, size)
    shared = (first @ second.T).astype(np.float64)
    union = first.sum(1)[:, None] + second.sum(1)[None, :] - shared
    np.divide(shared, union, out=overlaps, where=union > 0)
    for row, one in enumerate(predicted):
        for column, other in enumerate(true):
            if one == other:
                overlaps[row, column] = 1.0  # also where nothing of it lies on the canvas
            elif "path" in (one.kind, other.kind):
                overlaps[row, column] = box_iou(box(one), box(other))
    return overlaps


def _masks(shapes: Sequence[Shape], size: tuple[int, int]) -> np.ndarray:
    empty = np.zeros(size[0] * size[1], dtype=np.float32)
    return np.stack(
        [empty if shape.kind == "path" else mask(shape, *size).ravel().astype(np.float32) for shape in shapes]
    )


# Over many samples ---------------------------------------------------------------------------------------------------


def bootstrap_interval(values: Sequence[float], *, seed: int = 0, rounds: int = 2000) -> Interval:
    """Mean and 95% interval by drawing the samples again with replacement."""
    found = np.asarray(values, dtype=np.float64)
    if found.size == 0:
        raise ValueError("values is empty: there is nothing to average")
    generator = np.random.default_rng(seed)
    # In slices, so that many samples do not need rounds x samples numbers at once.
    slice_rounds = max(1, min(rounds, 1_000_000 // found.size))
    means = [
        found[generator.integers(0, found.size, (min(slice_rounds, rounds - done), found.size))].mean(1)
        for done in range(0, rounds, slice_rounds)
    ]
    low, high = np.quantile(np.concatenate(means), (0.025, 0.975))
    return Interval(mean=float(found.mean()), low=float(low), high=float(high))


def derangement(count: int, *, seed: int = 0) -> list[int]:
    """A permutation of range(count) that leaves nothing in its place: one random cycle through all."""
    if count < 2:
        raise ValueError(f"count={count!r}: at least 2 samples are needed to give each another one's picture")
    order = np.random.default_rng(seed).permutation(count)
    result = [0] * count
    for here, there in zip(order, np.roll(order, -1)):
        result[int(here)] = int(there)
    return result


def shuffled(samples: Sequence[Any], *, seed: int = 0) -> list[Any]:
    """Every sample once, none at its own place: pictures for the control of a model that should look."""
    return [samples[index] for index in derangement(len(samples), seed=seed)]


def paired_scores(
    predictions: Sequence[str],
    samples: Sequence[Any],
    *,
    score: Callable[[str, Any], PictureScore] = score_svg,
    seed: int = 0,
) -> tuple[list[PictureScore], list[PictureScore]]:
    """The predictions' scores on their own pictures and, as the control, on others of the same set."""
    if len(predictions) != len(samples):
        raise ValueError(f"{len(predictions)} predictions for {len(samples)} samples")
    own = [score(prediction, sample) for prediction, sample in zip(predictions, samples)]
    others = [score(prediction, sample) for prediction, sample in zip(predictions, shuffled(samples, seed=seed))]
    return own, others
