"""Pages with the pictures a browser made of them, in one file, for machines that have no browser.

    python -m perilune.data.scenes.prerender --out pages.jsonl.zst --count 2000

One line a page: {"html": source, "svg": its lowering, "width": 112, "height": 112, "caption": "...", "renderer":
"chromium", "png": base64 of the picture}. The lowering of a page gives the same picture in resvg (pages.py), so a model
can be trained without this file; it is the proof, and the way to add pages that the subset cannot say.
"""

import argparse
import base64
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from perilune.data.hostile import RendererMissing
from perilune.data.pictures import draw_html
from perilune.data.raster import decode_png, encode_png, rasterize
from perilune.data.scenes.make import make_sample
from perilune.data.scenes.sample import Sample, ScenesConfig, ScenesError


@dataclass(frozen=True, kw_only=True, eq=False)
class PrerenderedPage:
    html: str
    svg: str
    caption: str
    renderer: str  # "chromium" or "resvg"
    pixels: np.ndarray  # uint8 [height, width, 3]


def picture_of(sample: Sample, *, browser: bool = True) -> tuple[np.ndarray, str]:
    """The pixels of a page and who drew them: Chromium where it is present, else resvg from the lowering."""
    if browser:
        try:
            return draw_html(sample.html, *sample.size), "chromium"
        except RendererMissing:
            pass
    return rasterize(sample.svg, *sample.size), "resvg"


def write_pages(
    place: Path, config: ScenesConfig, *, seed: int, count: int, held_out: bool, browser: bool = True
) -> str:
    """Writes `count` pages and says who drew them; the file appears when it is complete."""
    lines: list[str] = []
    renderer = ""
    for index in range(count):
        sample = make_sample(seed, index, config, held_out=held_out)
        pixels, renderer = picture_of(sample, browser=browser)
        record = {"html": sample.html, "svg": sample.svg, "width": sample.size[0], "height": sample.size[1]}
        picture = base64.b64encode(encode_png(pixels)).decode("ascii")
        lines.append(json.dumps({**record, "caption": sample.caption, "renderer": renderer, "png": picture}))
    content = ("\n".join(lines) + "\n").encode("utf-8")
    if place.suffix == ".zst":
        content = _zstandard(place).ZstdCompressor(level=10).compress(content)
    unfinished = place.with_name(place.name + ".tmp")
    unfinished.write_bytes(content)
    unfinished.replace(place)
    return renderer


def read_pages(place: Path) -> Iterator[PrerenderedPage]:
    """The pages of a file that `write_pages` wrote; ScenesError names a line that is not one."""
    if not place.is_file():
        raise ScenesError(
            f"{str(place)!r} is not a file: make it with python -m perilune.data.scenes.prerender --out FILE"
        )
    content = place.read_bytes()
    if place.suffix == ".zst":
        content = _zstandard(place).ZstdDecompressor().decompressobj().decompress(content)
    for number, line in enumerate(content.decode("utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            pixels = decode_png(base64.b64decode(record["png"]))
            if pixels.shape != (record["height"], record["width"], 3):
                raise ValueError(f"picture of {pixels.shape[1]} x {pixels.shape[0]} pixels")
            texts = {name: str(record[name]) for name in ("html", "svg", "caption", "renderer")}
        except (ValueError, KeyError, TypeError) as error:
            raise ScenesError(
                f"{str(place)!r} line {number}: {error!r}; expected a page as prerender writes it"
            ) from None
        yield PrerenderedPage(**texts, pixels=pixels)


def _zstandard(place: Path) -> Any:
    try:
        import zstandard
    except ImportError:
        raise ScenesError(
            f"{str(place)!r} needs zstandard (pip install 'perilune[train]'), or a name in .jsonl"
        ) from None
    return zstandard


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write: .jsonl or .jsonl.zst")
    parser.add_argument("--count", type=int, default=1000, help="pages to make (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, nargs=2, default=(112, 112), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--held-out", action="store_true", help="make pages for testing")
    given = parser.parse_args(arguments)
    if given.count < 1:
        parser.error(f"--count is {given.count!r}: expected 1 or more")
    if not given.out.parent.is_dir():
        parser.error(f"--out is {str(given.out)!r}: expected a file in a folder that exists")
    try:
        config = ScenesConfig(kinds=("html",), sizes=(tuple(given.size),))
        renderer = write_pages(given.out, config, seed=given.seed, count=given.count, held_out=given.held_out)
    except ScenesError as error:
        parser.error(str(error))
    print(f"{given.count} pages drawn by {renderer}: {given.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
