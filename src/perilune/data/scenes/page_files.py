"""Pages with the pictures a browser made of them, from a file: for machines that have no browser.

`ScenesConfig.pages` names a file that `python -m perilune.data.scenes.prerender` wrote where Chromium is present; the
samples of kind "html" are then its pages with their pictures. One line a page:

    {"html": source, "svg": its lowering or "", "width": 112, "height": 112, "caption": "...", "renderer": "chromium",
     "questions": [{"prompt": "...", "answer": "...", "task": "count"}], "png": base64 of the picture}

Without such a file pages are made on the fly and drawn by resvg from their lowering, to the same pixels (pages.py). A
file can also hold pages that have no lowering. The hash of a page's source parts training from testing, as everywhere.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from perilune.data.generated import SplitMix
from perilune.data.raster import decode_png, png_size
from perilune.data.scenes.record_files import read_lines
from perilune.data.scenes.sample import Question, Sample, ScenesConfig, ScenesError, Task
from perilune.data.scenes.svg import parse_svg


@dataclass(frozen=True, kw_only=True, eq=False)
class PagePool:
    train: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    digest: str
    """Of sources and pictures."""


def read_pages(place: Path) -> Iterator[Sample]:
    """The pages of a file; ScenesError names a line that is not one."""
    if not place.is_file():
        raise ScenesError(
            f"pages is {str(place)!r}: there is no such file; make it with python -m perilune.data.scenes.prerender "
            "--out FILE"
        )
    for number, line in enumerate(read_lines(place, "pages"), 1):
        try:
            yield _page(json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ScenesError(
                f"pages {str(place)!r} line {number}: {error!r}; expected a page as prerender writes it"
            ) from None


def _page(record: dict[str, Any]) -> Sample:
    size = int(record["width"]), int(record["height"])
    png = base64.b64decode(record["png"], validate=True)
    if png_size(png) != size:  # the header first: a size that nobody asked for is not unpacked
        raise ValueError(f"picture of {png_size(png)} pixels")
    decode_png(png)
    svg, html = str(record["svg"]), str(record["html"])
    if not html:
        raise ValueError("the source is empty")
    questions = tuple(
        Question(prompt=str(asked["prompt"]), answer=str(asked["answer"]), task=asked["task"])
        for asked in record.get("questions", ())
    )
    if unknown := {question.task for question in questions} - set(get_args(Task)):
        raise ValueError(f"a question of an unknown task {min(map(str, unknown))!r}")
    return Sample(
        kind="html",
        size=size,
        shapes=parse_svg(svg).shapes if svg else (),
        svg=svg,
        html=html,
        caption=str(record["caption"]),
        questions=questions,
        origin=str(record["renderer"]),
        png=png,
    )


def page_pool(config: ScenesConfig) -> PagePool:
    """The pages of `config.pages` in the sizes of the config; read once per process."""
    path = Path(config.pages)
    return _pool(config.pages, path.stat().st_mtime_ns if path.exists() else 0, config.sizes)


@lru_cache(maxsize=4)
def _pool(place: str, stamp: int, sizes: tuple[tuple[int, int], ...]) -> PagePool:
    from perilune.data.scenes.make import is_held_out

    wanted = {tuple(size) for size in sizes}
    digest = hashlib.sha256()
    sides: tuple[list[Sample], list[Sample]] = [], []
    for page in read_pages(Path(place)):
        if page.size in wanted:
            sides[is_held_out(page.html)].append(page)
            digest.update(f"{page.html}\0{page.questions!r}\0".encode("utf-8", "surrogatepass") + page.png)
    if not all(sides):
        raise ScenesError(
            f"pages {place!r} give {len(sides[0])} for training and {len(sides[1])} for testing in sizes={sizes!r}: "
            "expected some of each"
        )
    return PagePool(train=tuple(sides[0]), held_out=tuple(sides[1]), digest=digest.hexdigest())


def page_sample(dice: SplitMix, config: ScenesConfig, *, held_out: bool, with_questions: bool) -> Sample:
    """One page of the file."""
    pool = page_pool(config)
    page = dice.choose(pool.held_out if held_out else pool.train)
    return replace(page, questions=page.questions[: config.max_questions] if with_questions else ())
