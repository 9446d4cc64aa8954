"""Animations: read back as written, and every frame is what a browser shows at that time."""

import os
from collections.abc import Callable

import numpy as np
import pytest

from perilune.data.raster import decode_png, rasterize
from perilune.data.scenes import (
    DialectError,
    ScenesConfig,
    frames,
    header,
    make_sample,
    parse_animation,
    write_animation,
)
from perilune.data.scenes.animations import FRAMES_PER_SECOND
from perilune.data.svg_guard import clean_svg

MOVING = ScenesConfig(kinds=("animation",))
SAMPLES = [make_sample(41, index, MOVING) for index in range(80)]


def test_every_animation_is_read_back_as_it_was_written() -> None:
    for sample in SAMPLES:
        animation = parse_animation(sample.svg)
        assert write_animation(animation) == sample.svg
        if "dur=" in sample.svg:  # colours alone do not say how long it lasts
            assert frames(animation) == sample.frames


def test_frames_are_4_to_16_and_something_changes() -> None:
    for sample in SAMPLES:
        assert 4 <= len(sample.frames) <= 16
        assert len(set(sample.frames)) > 1
    assert len({len(sample.frames) for sample in SAMPLES}) > 3


def test_shapes_stay_in_the_picture_and_visible() -> None:
    for sample in SAMPLES[:30]:
        for frame in (sample.frames[0], sample.frames[-1]):
            pixels = rasterize(frame, *sample.size)
            assert np.ptp(pixels, axis=(0, 1)).max() > 60


def test_animations_pass_the_guard_for_generated_svg() -> None:
    for sample in SAMPLES:
        clean_svg(sample.svg, width=sample.size[0], height=sample.size[1])


def test_answers_about_motion_are_seen_in_the_frames() -> None:
    seen = 0
    for sample in SAMPLES:
        if len(sample.shapes) > 1:
            continue
        for question in sample.questions:
            if question.task != "motion" or not question.answer.startswith("it "):
                continue
            first, last = (_ink(sample.frames[i], sample.background) for i in (0, -1))
            before, after = _centre(first), _centre(last)
            moved = after - before
            seen += 1
            for word, holds in (
                ("moves", np.abs(moved).max() > 2),
                ("right", moved[0] > 2),
                ("left", moved[0] < -2),
                ("down", moved[1] > 2),
                ("up", moved[1] < -2),
                ("grows", last.sum() > 1.05 * first.sum()),
                ("shrinks", last.sum() < 0.95 * first.sum()),
            ):
                assert holds or word not in question.answer.split(), (question, sample.svg)
    assert seen > 8


def _ink(frame: str, background: str) -> np.ndarray:
    pixels = rasterize(frame, 112, 112).astype(int)
    return np.abs(pixels - pixels[0, 0]).max(axis=-1) > 40


def _centre(ink: np.ndarray) -> np.ndarray:
    rows, columns = np.nonzero(ink)
    return np.array([columns.mean(), rows.mean()])


@pytest.mark.parametrize(
    "child",
    [
        '<animate attributeName="x" to="90" dur="4s"/>',
        '<animate attributeName="cx" to="9.5" dur="4s"/>',
        '<animate attributeName="cx" to="90" dur="400ms"/>',
        '<animate attributeName="cx" to="90" dur="0s"/>',
        '<animate attributeName="cx" to="999999999" dur="4s"/>',
        '<animate attributeName="cx" from="1" to="90" dur="4s"/>',
        '<animateTransform attributeName="transform" type="scale" from="1" to="2" dur="4s"/>',
        '<animateTransform attributeName="transform" type="rotate" from="0 1 1" to="9 2 2" dur="4s"/>',
        '<set attributeName="fill" to="mauve" begin="1s"/>',
        '<set attributeName="onload" to="red" begin="1s"/>',
        "<script/>",
    ],
)
def test_what_is_not_in_the_dialect_is_refused(child: str) -> None:
    source = header(112, 112) + f'<circle cx="10" cy="20" r="5" fill="red">{child}</circle></svg>'
    with pytest.raises(DialectError):
        parse_animation(source)


def test_two_lengths_in_one_animation_are_refused() -> None:
    move = '<animate attributeName="{}" to="90" dur="{}s"/>'
    body = f'<circle cx="10" cy="20" r="5" fill="red">{move.format("cx", 2)}{move.format("cy", 3)}</circle>'
    with pytest.raises(DialectError, match="dur"):
        parse_animation(header(112, 112) + body + "</svg>")


@pytest.mark.needs_tool("chromium")
def test_frames_are_what_chromium_shows_at_their_times(tool_path: Callable[[str], str]) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    changes = set()
    with sync_api.sync_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=tool_path("chromium"), args=sandbox)
        page = browser.new_page(viewport={"width": 112, "height": 112})
        for sample in SAMPLES[:10]:
            all_changes = [change for group in parse_animation(sample.svg).changes for change in group]
            changes |= {change.attribute for change in all_changes}
            turning_points = {FRAMES_PER_SECOND * change.begin for change in all_changes}
            page.set_content(
                f"<style>body{{margin:0}}svg{{display:block;width:112px;height:112px}}</style>{sample.svg}"
            )
            page.evaluate("document.querySelector('svg').pauseAnimations()")
            for index in {0, 1, len(sample.frames) // 2, len(sample.frames) - 1} | turning_points:
                page.evaluate("t => document.querySelector('svg').setCurrentTime(t)", index / FRAMES_PER_SECOND)
                shown = decode_png(page.screenshot()).astype(int)
                drawn = rasterize(sample.frames[index], 112, 112).astype(int)
                # The renderers smooth edges differently: a fraction of the outline's pixels, none in the inside.
                different = np.abs(shown - drawn).max(axis=-1)
                assert (different > 96).mean() < 0.002, (index, sample.svg)
                assert different.mean() < 1.5, (index, sample.svg)
        browser.close()
    assert {"colour", "rotate"} <= changes and changes & {"cx", "x"} and changes & {"r", "rx", "width"}
