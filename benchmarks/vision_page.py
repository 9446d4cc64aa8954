"""What a model of benchmarks/vision.py drew, to be looked at: a sheet (PNG) and a page with the sources (HTML).

    python benchmarks/vision_page.py benchmarks/results/vision-scenes-0.json

Takes the answers that an arm kept and writes two files beside them. The first pictures are shown as they come, none is
chosen: left what the model was shown, right what its answer draws, below the score. Of a video the sheet has the first,
the middle and the last frame. Pages are drawn where there is a browser.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from PIL import Image, ImageDraw

from perilune.data import Tokenizer, VisionRows
from perilune.data.hostile import PictureError
from perilune.data.picture_scores import score_source
from perilune.data.pictures import draw_html, draw_svg, frames_of
from perilune.data.raster import decode_png, encode_png, rasterize
from perilune.data.scenes import Sample
from perilune.data.scenes.svg import DialectError
from perilune.data.vision_documents import Exercise, still_png
from perilune.report.page import write_page
from perilune.report.pictures import picture_row, pictures_page
from perilune.train import RunConfig
from perilune.train.config_file import from_plain

GAP, LINE = 8, 16
EDGE, GROUND, INK = (205, 205, 205), (255, 255, 255), (60, 60, 60)


@dataclass(frozen=True, kw_only=True)
class Settings:
    answers: tyro.conf.Positional[Path]
    count: int = 24
    """Pictures on the sheet and on the page."""
    columns: int = 6
    """Of the sheet; fewer are better for videos."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pair:
    """Frames of [H, W, 3]: one of a still picture, as many of `drawn`, or none."""

    text: str
    shown: list[np.ndarray]
    drawn: list[np.ndarray]
    problem: str
    reward: float


def pairs_of(answers: Path, count: int) -> list[Pair]:
    """The first pictures that were asked about, with what was answered."""
    kept = json.loads(answers.read_text())
    config = from_plain(RunConfig, kept["config"])
    vision = config.data.vision
    assert vision is not None
    # Which pictures were asked about depends on the scenes and the seed, not on the tokenizer.
    rows = VisionRows(vision, Tokenizer.train([], 512), seq_len=config.data.seq_len, seed=config.seed, held_out=True)
    texts = kept["texts"][:count]
    return [pair(text, asked) for text, asked in zip(texts, rows.examples(len(texts), task=vision.tasks[0]))]


def pair(text: str, asked: Exercise) -> Pair:
    sample = asked.sample
    shown = [rasterize(still, *sample.size) for still in _chosen(sample.frames)] if sample.frames else []
    shown = shown or [decode_png(still_png(sample))]
    try:
        drawn, problem = _drawn(text, sample), ""
    except (PictureError, DialectError) as error:
        drawn, problem = [], str(error)
    return Pair(text=text, shown=shown, drawn=drawn, problem=problem, reward=score_source(text, sample).reward)


def _drawn(text: str, sample: Sample) -> list[np.ndarray]:
    if sample.html:
        return [draw_html(text, *sample.size)]
    sources = _chosen(frames_of(text, *sample.size)) if sample.frames else [text]
    return [draw_svg(source, *sample.size) for source in sources]


def _chosen(frames: Sequence[str]) -> list[str]:
    return [frames[0], frames[len(frames) // 2], frames[-1]]


def sheet(pairs: Sequence[Pair], columns: int) -> Image.Image:
    """All pairs in rows; a missing drawing is an empty frame."""
    height, width = pairs[0].shown[0].shape[:2]
    frames = max(len(each.shown) for each in pairs)
    wide, high = 2 * frames * (width + 2) + 3 * GAP, height + 2 + LINE + GAP
    rows = -(-len(pairs) // columns)
    picture = Image.new("RGB", (columns * wide - 2 * GAP, rows * high - GAP), GROUND)
    pen = ImageDraw.Draw(picture)
    for number, each in enumerate(pairs):
        left, top = number % columns * wide, number // columns * high
        for side, drawings in enumerate((each.shown, each.drawn)):
            for place in range(frames):
                x = left + side * (frames * (width + 2) + 2) + place * (width + 2)
                pen.rectangle((x, top, x + width + 1, top + height + 1), outline=EDGE)
                if place < len(drawings):
                    picture.paste(Image.fromarray(drawings[place]), (x + 1, top + 1))
        pen.text((left, top + height + 4), f"{each.reward:.2f}", fill=INK)
    return picture


def main(settings: Settings) -> None:
    if not settings.answers.is_file():
        raise SystemExit(f"{settings.answers} is not there: expected the answers that an arm of vision.py kept")
    pairs = pairs_of(settings.answers, settings.count)
    if not pairs:
        raise SystemExit(f"{settings.answers} holds no answers: the text-only arm draws nothing")
    place = settings.answers.with_suffix(".png")
    sheet(pairs, min(settings.columns, len(pairs))).quantize(128).save(place, optimize=True)
    rows = [
        picture_row(
            f"picture {number}", shown=[encode_png(each) for each in found.shown], source=found.text,
            drawn=[encode_png(each) for each in found.drawn] or None, problem=found.problem,
            score={"score": found.reward},
        )
        for number, found in enumerate(pairs)
    ]  # fmt: skip
    page = write_page(pictures_page(settings.answers.stem, rows), settings.answers.with_suffix(".html"))
    for written in (place, page):
        print(f"{written}: {written.stat().st_size / 1000:,.0f} kB")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
