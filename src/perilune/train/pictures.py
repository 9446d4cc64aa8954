"""What a run draws after its last step: held-out pictures in, sources out, and how close their drawings come.

The control is the same answers held against other pictures: a model that writes likely drawings without looking scores
the same there. Two kinds of records go to metrics.jsonl:

    {"kind": "picture", "step", "number", "image", "truth", "text", "drawn", "reason", "scores"}    for a few of them
    {"kind": "pictures", "step", "task", "count", "parses", "pixel", "f1", "reward", "shuffled_pixel", ...}      means

`image` and `drawn` are PNG files in base64. What a model wrote is a stranger's input: it is drawn by a guarded worker
(data/pictures.py), and `reason` says why where it was not.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from perilune.data import Tokenizer, VisionRows
from perilune.data.hostile import PictureError, RendererMissing
from perilune.data.picture_scores import PictureScore, paired_scores, score_source
from perilune.data.pictures import draw_svg
from perilune.data.raster import encode_png, rasterize_png
from perilune.data.scenes import Sample
from perilune.data.vision_documents import PROMPTS, Exercise, question, still_png
from perilune.model import Decoder
from perilune.train.drawing import Answering, answers

SHOWN = 12
"""Pictures that are kept in full for the report."""
SCORES = ("parses", "pixel", "f1", "reward")


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawing:
    """What a model wrote when it was shown a picture."""

    exercise: Exercise
    text: str


def source_task(tasks: Sequence[str]) -> str | None:
    """The first of the tasks whose answer is a source that can be drawn."""
    return next((task for task in tasks if task in PROMPTS), None)


def draw_held_out(
    model: Decoder,
    tokenizer: Tokenizer,
    rows: VisionRows,
    *,
    count: int,
    max_new_tokens: int,
    task: str | None = None,
    answer: Answering = answers,
) -> list[Drawing]:
    """Greedy answers to the first `count` held-out pictures."""
    asked = rows.examples(count, task=task or source_task(rows.config.tasks))
    texts = answer(model, tokenizer, [question(tokenizer, each) for each in asked], max_new_tokens=max_new_tokens)
    return [Drawing(exercise=each, text=text) for each, text in zip(asked, texts, strict=True)]


def picture_records(drawings: Sequence[Drawing], *, step: int) -> Iterator[dict[str, Any]]:
    """The records of one round of drawing; where pages cannot be drawn here, only the pictures themselves."""
    own, others = _scores(drawings)
    for number, each in enumerate(drawings[:SHOWN]):
        drawn, reason = _drawn(each)
        record = {
            "kind": "picture",
            "step": step,
            "number": number,
            "image": _image(each.exercise.sample),
            "truth": each.exercise.answer,
            "text": each.text,
            "drawn": drawn,
            "reason": reason,
        }
        yield {**record, "scores": _plain(own[number], each.exercise.task)} if own else record
    if own:
        shuffled = {f"shuffled_{name}": value for name, value in _means(others).items() if name != "parses"}
        task = drawings[0].exercise.task
        yield {"kind": "pictures", "step": step, "task": task, "count": len(own), **_means(own), **shuffled}


def _scores(drawings: Sequence[Drawing]) -> tuple[list[PictureScore], list[PictureScore]]:
    """Of every answer on its own picture, and of the same answers on others."""
    texts, samples = [each.text for each in drawings], [each.exercise.sample for each in drawings]
    try:
        if len(drawings) < 2:
            return [score_source(text, sample) for text, sample in zip(texts, samples)], []
        return paired_scores(texts, samples, score=score_source)
    except RendererMissing:
        return [], []


def _means(scores: Sequence[PictureScore]) -> dict[str, float]:
    return {name: fmean(float(getattr(score, name)) for score in scores) for name in SCORES} if scores else {}


def _plain(score: PictureScore, task: str) -> dict[str, float]:
    names = SCORES if task == "svg" else [name for name in SCORES if name != "f1"]  # the shapes of others are not read
    return {name: float(getattr(score, name)) for name in names}


def _image(sample: Sample) -> str:
    png = rasterize_png(sample.frames[0], *sample.size) if sample.frames else still_png(sample)
    return base64.b64encode(png).decode()


def _drawn(drawing: Drawing) -> tuple[str | None, str | None]:
    """The drawing as PNG in base64, or the reason why there is none."""
    if drawing.exercise.task != "svg":
        # A page needs a browser, a video has many frames.
        return None, "not drawn here: `perilune view` draws pages and videos"
    try:
        pixels = draw_svg(drawing.text, *drawing.exercise.sample.size)
    except (PictureError, RendererMissing) as error:
        return None, str(error)
    return base64.b64encode(encode_png(pixels)).decode(), None
