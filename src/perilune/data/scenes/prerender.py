"""Writes a file of pages with the pictures a browser made of them, for machines that have no browser.

    python -m perilune.data.scenes.prerender --out pages.jsonl.zst --count 2000
    perilune train RECIPE --data.vision.scenes.pages pages.jsonl.zst ...

What a line holds and how it is read: page_files.py. One page in HELD_OUT_IN is for testing.
"""

import argparse
import base64
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

from perilune.data.hostile import RendererMissing
from perilune.data.pictures import draw_html
from perilune.data.raster import encode_png, rasterize
from perilune.data.scenes.make import HELD_OUT_IN, make_sample
from perilune.data.scenes.record_files import zstandard_of
from perilune.data.scenes.sample import Sample, ScenesConfig, ScenesError


def picture_of(sample: Sample, *, browser: bool = True) -> tuple[np.ndarray, str]:
    """The pixels of a page and who drew them: Chromium where it is present, else resvg from the lowering."""
    if browser:
        try:
            return draw_html(sample.html, *sample.size), "chromium"
        except RendererMissing:
            pass
    return rasterize(sample.svg, *sample.size), "resvg"


def write_pages(place: Path, config: ScenesConfig, *, seed: int, count: int, browser: bool = True) -> str:
    """Writes `count` pages and says who drew them; the file appears when it is complete."""
    lines: list[str] = []
    renderer = ""
    for index in range(count):
        sample = make_sample(seed, index, config, held_out=index % HELD_OUT_IN == 0)
        pixels, renderer = picture_of(sample, browser=browser)
        record = {"html": sample.html, "svg": sample.svg, "width": sample.size[0], "height": sample.size[1]}
        record |= {"caption": sample.caption, "questions": list(map(asdict, sample.questions)), "renderer": renderer}
        lines.append(json.dumps({**record, "png": base64.b64encode(encode_png(pixels)).decode("ascii")}))
    content = ("\n".join(lines) + "\n").encode("utf-8")
    if place.suffix == ".zst":
        content = zstandard_of(place).ZstdCompressor(level=10).compress(content)
    unfinished = place.with_name(place.name + ".tmp")
    unfinished.write_bytes(content)
    unfinished.replace(place)
    return renderer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file to write: .jsonl or .jsonl.zst")
    parser.add_argument("--count", type=int, default=1000, help="pages to make (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, nargs=2, default=(112, 112), metavar=("WIDTH", "HEIGHT"))
    given = parser.parse_args(arguments)
    if given.count < 2:
        parser.error(f"--count is {given.count!r}: expected 2 or more, for training and for testing")
    if not given.out.parent.is_dir():
        parser.error(f"--out is {str(given.out)!r}: expected a file in a folder that exists")
    try:
        config = ScenesConfig(kinds=("html",), sizes=(tuple(given.size),))
        renderer = write_pages(given.out, config, seed=given.seed, count=given.count)
    except ScenesError as error:
        parser.error(str(error))
    print(f"{given.count} pages drawn by {renderer}: {given.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
