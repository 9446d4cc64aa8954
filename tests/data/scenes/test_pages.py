"""Pages: the lowering is what a browser paints; a file of them is read, parted and shown with its pictures."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perilune.data.generated import SplitMix
from perilune.data.html_guard import clean_html
from perilune.data.picture_scores import score_html
from perilune.data.raster import decode_png, encode_png, rasterize
from perilune.data.scenes import ScenesConfig, ScenesError, is_held_out, make_sample, page_pool
from perilune.data.scenes import pages as scene_pages
from perilune.data.scenes.page_files import read_pages
from perilune.data.scenes.prerender import main, picture_of, write_pages
from perilune.data.tokenizer import Tokenizer
from perilune.data.vision_documents import VisionDataConfig, dialect_fingerprint, pictures
from perilune.data.vision_rows import VisionRows

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


def _written(place: Path, count: int = 24) -> ScenesConfig:
    write_pages(place, PAGES, seed=0, count=count, browser=False)
    return replace(PAGES, pages=str(place))


@pytest.mark.parametrize("name", ["pages.jsonl", "pages.jsonl.zst"])
def test_prerendered_pages_are_read_back(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    assert write_pages(place, PAGES, seed=0, count=9, browser=False) == "resvg"
    for index, page in enumerate(read_pages(place)):
        sample = make_sample(0, index, PAGES, held_out=index in (0, 8))
        assert (page.html, page.svg, page.shapes, page.questions) == (
            *(sample.html, sample.svg, sample.shapes, sample.questions),
        )
        assert np.array_equal(decode_png(page.png), rasterize(sample.svg, *sample.size))


def test_a_file_of_pages_gives_the_samples_of_kind_html_and_keeps_the_sides_apart(tmp_path: Path) -> None:
    config = _written(tmp_path / "pages.jsonl")
    pool = page_pool(config)
    assert (len(pool.train), len(pool.held_out)) == (21, 3)
    for held_out, side in ((False, pool.train), (True, pool.held_out)):
        seen = {make_sample(5, index, config, held_out=held_out).html for index in range(200)}
        assert seen == {page.html for page in side} and {is_held_out(html) for html in seen} == {held_out}
    assert make_sample(5, 1, config) == make_sample(5, 1, config)
    assert make_sample(5, 1, config).questions and not make_sample(5, 1, config, with_questions=False).questions


def test_a_page_of_a_file_is_shown_as_the_picture_that_came_with_it(tmp_path: Path) -> None:
    config = _written(tmp_path / "pages.jsonl")
    records = [json.loads(line) for line in (tmp_path / "pages.jsonl").read_text().splitlines()]
    for number, record in enumerate(records):  # as a page that has no lowering
        colours = np.full((record["height"], record["width"], 3), number, dtype=np.uint8)
        record |= {"svg": "", "png": base64.b64encode(encode_png(colours)).decode()}
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(record) + "\n" for record in records))
    vision = VisionDataConfig(scenes=replace(config, pages=str(other)), tasks=("html",), workers=0)
    numbers = {record["html"]: number for number, record in enumerate(records)}
    tokenizer = Tokenizer.train([], 512)
    rows = VisionRows(vision, tokenizer, seq_len=2048, seed=0)
    for each in rows.examples(10):
        (media,), _ = pictures(each.sample)
        assert (media.pixels == numbers[each.answer]).all()
    assert rows.batch(0, 1).pixels is not None
    score = score_html("<script>", rows.examples(1)[0].sample)
    assert not score.parses  # refused before a browser is needed, beside a target that needs none
    kinds = [replace(vision, scenes=scenes) for scenes in (PAGES, config, replace(config, pages=str(other)))]
    assert len({VisionRows(each, tokenizer, seq_len=2048, seed=0).fingerprint for each in kinds}) == 3
    assert len({dialect_fingerprint(each) for each in kinds}) == 3


def test_rows_without_a_file_of_pages_are_what_they_were_before() -> None:
    assert "pages" not in repr(PAGES)


def test_a_broken_file_of_pages_names_the_line(tmp_path: Path) -> None:
    place = tmp_path / "pages.jsonl"
    write_pages(place, PAGES, seed=0, count=2, browser=False)
    good = json.loads(place.read_text().splitlines()[0])
    cut = base64.b64encode(base64.b64decode(good["png"])[:60]).decode()
    for bad in (
        {"html": "x"}, {**good, "width": 28}, {**good, "png": cut}, {**good, "png": "?"}, {**good, "svg": "<svg"},
        {**good, "html": ""}, {**good, "questions": [{"prompt": "a", "answer": "b", "task": "c"}]}, [1], None,
    ):  # fmt: skip
        place.write_text(f"{json.dumps(good)}\n{json.dumps(good)}\n{json.dumps(bad)}\n")
        with pytest.raises(ScenesError, match="line 3"):
            list(read_pages(place))
    with pytest.raises(ScenesError, match="there is no such file"):
        list(read_pages(tmp_path / "none.jsonl"))
    with pytest.raises(ScenesError, match="expected some of each"):
        page_pool(replace(_written(place), sizes=((112, 140),)))
    with pytest.raises(ScenesError, match="kind 'html'"):
        ScenesConfig(pages="pages.jsonl")


def test_the_command_refuses_what_it_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (
        (["--out", str(tmp_path / "no" / "a.jsonl")], "folder that exists"),
        (["--out", str(tmp_path / "a.jsonl"), "--count", "1"], "--count"),
        (["--out", str(tmp_path / "a.jsonl"), "--size", "100", "112"], "sizes"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
