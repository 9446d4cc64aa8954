"""Pages: the lowering is what a browser paints."""

from pathlib import Path

import numpy as np
import pytest

from perilune.data.generated import SplitMix
from perilune.data.html_guard import clean_html
from perilune.data.raster import rasterize
from perilune.data.scenes import ScenesConfig, ScenesError, make_sample
from perilune.data.scenes import pages as scene_pages
from perilune.data.scenes.prerender import main, picture_of, read_pages, write_pages

PAGES = ScenesConfig(kinds=("html",), sizes=((112, 112), (168, 84)))


@pytest.mark.needs_tool("chromium")
def test_chromium_and_resvg_paint_the_same_pixels() -> None:
    for index in range(12):
        sample = make_sample(31, index, PAGES)
        pixels, renderer = picture_of(sample)
        assert renderer == "chromium"
        # Whole pixels and flat colours leave nothing to interpret: no pixel may differ.
        assert (pixels == rasterize(sample.svg, *sample.size)).all(), sample.html


def test_pages_pass_the_guard_for_generated_html() -> None:
    for index in range(60):
        sample = make_sample(32, index, PAGES)
        clean_html(sample.html, width=sample.size[0], height=sample.size[1])


def test_no_box_sticks_out_of_its_page() -> None:
    for index in range(150):
        sample = make_sample(33, index, PAGES)
        for shape in sample.shapes:
            x, y, width, height = shape.numbers
            assert x >= 0 and y >= 0 and width > 0 and height > 0, sample.html
            assert x + width <= sample.size[0] and y + height <= sample.size[1], sample.html


def test_the_smallest_pages_can_be_made() -> None:
    config = ScenesConfig(kinds=("html",), sizes=((84, 84),))
    for seed in range(600, 700):  # 639 has a box with a border and one inside it where nothing fits
        assert scene_pages.page(SplitMix(seed), config, (84, 84)).sample.size == (84, 84)


def test_counts_of_boxes_are_those_of_the_source() -> None:
    for index in range(100):
        sample = make_sample(34, index, PAGES)
        for question in sample.questions:
            if question.task == "count" and "boxes" in question.prompt:
                assert int(question.answer) == sample.html.count("<div")


@pytest.mark.parametrize("name", ["pages.jsonl", "pages.jsonl.zst"])
def test_prerendered_pages_are_read_back(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    assert write_pages(place, PAGES, seed=0, count=5, held_out=True, browser=False) == "resvg"
    pages = list(read_pages(place))
    assert [page.html for page in pages] == [make_sample(0, i, PAGES, held_out=True).html for i in range(5)]
    for index, page in enumerate(pages):
        sample = make_sample(0, index, PAGES, held_out=True)
        assert np.array_equal(page.pixels, rasterize(sample.svg, *sample.size))


def test_a_broken_file_of_pages_names_the_line(tmp_path: Path) -> None:
    place = tmp_path / "pages.jsonl"
    write_pages(place, PAGES, seed=0, count=2, held_out=False, browser=False)
    place.write_text(place.read_text() + '{"html": "x"}\n')
    with pytest.raises(ScenesError, match="line 3"):
        list(read_pages(place))
    with pytest.raises(ScenesError, match="is not a file"):
        list(read_pages(tmp_path / "none.jsonl"))


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (["--out", str(tmp_path / "no" / "a.jsonl")], "folder that exists"),
        (["--out", str(tmp_path / "a.jsonl"), "--count", "0"], "--count"),
        (["--out", str(tmp_path / "a.jsonl"), "--size", "100", "112"], "sizes"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
