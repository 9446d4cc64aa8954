"""A stranger's SVG or HTML to pixels: guard, then worker. The only road on which generated sources are drawn.

drawn = draw_svg(source, 112, 112)                      # uint8 [112, 112, 3], or PictureError
first = draw_frames(animated, 112, 112)                 # a list of such, or PictureError or DialectError
for result in draw_svgs(sources, 112, 112): ...         # a batch: pixels or the PictureError, never raised
"""

import atexit
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np

from perilune.data.hostile import PictureError, RenderFailed
from perilune.data.html_guard import clean_html
from perilune.data.raster import RasterError, decode_png, png_size
from perilune.data.render_worker import WALL_SECONDS, RenderWorker
from perilune.data.scenes.animations import frames, parse_animation
from perilune.data.svg_guard import CleanSvg, clean_svg

FRAMES_DRAWN = 16
"""Of an animation: as many as those of the scenes have. A source may ask for 120."""
HTML_PROGRAM = Path(__file__).with_name("html_process.py")
ANSWER_SECONDS = 5.0
"""What the process of the browser has beyond its own limits to say that one was passed."""


def draw_svg(source: str | bytes, width: int, height: int) -> np.ndarray:
    """The pixels of a source that nobody vouches for; HostileInput or RenderFailed when there are none."""
    return draw_clean_svg(clean_svg(source, width=width, height=height))


def draw_clean_svg(clean: CleanSvg) -> np.ndarray:
    png = svg_worker().render({"svg": clean.source, "width": clean.width, "height": clean.height})
    return _pixels(png, clean.width, clean.height)


def draw_svgs(sources: Iterable[str | bytes], width: int, height: int) -> list[np.ndarray | PictureError]:
    """One result per source, in order; what went wrong with one source is its result and leaves the others alone."""
    results: list[np.ndarray | PictureError] = []
    for source in sources:
        try:
            results.append(draw_svg(source, width, height))
        except PictureError as error:
            results.append(error)
    return results


def frames_of(source: str, width: int, height: int) -> tuple[str, ...]:
    """The still SVG of every frame of an animation of the scenes' dialect, or DialectError; HostileInput before that.

    Each frame is a stranger's source still: `draw_svg` draws it.
    """
    clean_svg(source, width=width, height=height)  # the dialect's parser is for what passed the guard
    return frames(parse_animation(source))


def draw_frames(source: str, width: int, height: int, *, most: int = FRAMES_DRAWN) -> list[np.ndarray]:
    """The pixels of the first `most` frames."""
    return [draw_svg(frame, width, height) for frame in frames_of(source, width, height)[:most]]


@cache
def svg_worker() -> RenderWorker:
    """The one worker of this process; it starts with the first picture and ends with the process."""
    worker = RenderWorker()
    atexit.register(worker.close)
    return worker


def draw_html(source: str | bytes, width: int, height: int) -> np.ndarray:
    """The pixels of a page that nobody vouches for, drawn by Chromium in a window of this size."""
    clean = clean_html(source, width=width, height=height)
    return _pixels(html_worker().render({"html": clean.source, "width": width, "height": height}), width, height)


@cache
def html_worker() -> RenderWorker:
    """The one browser of this process. RendererMissing says what to install where there is none."""
    worker = RenderWorker(
        program=HTML_PROGRAM,
        wall_seconds=WALL_SECONDS + ANSWER_SECONDS,
        arguments=(str(WALL_SECONDS),),
        environment={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
        own_folder=True,
    )
    atexit.register(worker.close)
    return worker


def _pixels(png: bytes, width: int, height: int) -> np.ndarray:
    try:
        # The header first: a size that nobody asked for is not unpacked.
        if png_size(png) != (width, height):
            raise RenderFailed(f"the renderer drew {png_size(png)} pixels where {(width, height)} were asked for")
        return decode_png(png)
    except RasterError as error:
        raise RenderFailed(str(error)) from None
