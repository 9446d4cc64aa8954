"""Frames, their times, and which of them are kept."""

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from perilune.data.image_limits import ImageError, ImageLimits
from perilune.data.video import load_frames, sample_frames, timestamp

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9), (200, 200, 0)]


def still(colour: tuple[int, ...], size: tuple[int, int] = (8, 6)) -> Image.Image:
    return Image.new("RGB", size, colour)


def animation(kind: str, delays: list[int], **options: object) -> bytes:
    first, *others = [still(colour) for colour in COLOURS[: len(delays)]]
    buffer = io.BytesIO()
    first.save(buffer, format=kind, save_all=True, append_images=others, duration=delays, loop=0, **options)
    return buffer.getvalue()


def colours(frames: list[np.ndarray]) -> list[tuple[int, ...]]:
    return [tuple(int(value) for value in frame[3, 4]) for frame in frames]


@pytest.mark.parametrize("kind, options", [("GIF", {}), ("WEBP", {"lossless": True})])
def test_an_animation_gives_its_frames_at_its_own_times(kind: str, options: dict, tmp_path: Path) -> None:
    path = tmp_path / "moving"
    path.write_bytes(animation(kind, [500, 100, 1000, 250], **options))
    frames, times = load_frames(path)
    assert colours(frames) == COLOURS[:4] and all(frame.shape == (6, 8, 3) for frame in frames)
    assert times == [0.0, 0.5, 0.6, 1.6]


def test_a_frame_without_a_time_lasts_a_tenth_of_a_second_as_in_browsers() -> None:
    _, times = load_frames(animation("GIF", [0, 10, 20, 500]))
    assert times == [0.0, 0.1, 0.2, 0.22]


def test_transparent_frames_are_laid_over_white() -> None:
    layers = [Image.new("RGBA", (8, 6), (255, 0, 0, alpha)) for alpha in (255, 0)]
    buffer = io.BytesIO()
    layers[0].save(buffer, format="WEBP", save_all=True, append_images=layers[1:], duration=100, lossless=True)
    frames, _ = load_frames(buffer.getvalue())
    assert colours(frames) == [(255, 0, 0), (255, 255, 255)]


def test_a_folder_is_read_in_natural_order_at_the_rate_given(tmp_path: Path) -> None:
    for number, colour in zip((1, 2, 10, 11), COLOURS):
        still(colour).save(tmp_path / f"frame{number}.png")
    still((1, 1, 1)).save(tmp_path / "extra.gif")
    (tmp_path / "notes.txt").write_text("not a frame")
    frames, times = load_frames(tmp_path)
    assert colours(frames) == COLOURS[:4] and times == [0.0, 0.5, 1.0, 1.5]
    assert load_frames(tmp_path, folder_fps=4.0)[1] == [0.0, 0.25, 0.5, 0.75]
    with pytest.raises(ValueError, match="folder_fps=0"):
        load_frames(tmp_path, folder_fps=0)


def test_a_still_picture_is_a_video_of_one_frame(tmp_path: Path) -> None:
    still((1, 2, 3)).save(tmp_path / "one.png")
    frames, times = load_frames(tmp_path / "one.png")
    assert colours(frames) == [(1, 2, 3)] and times == [0.0]


def test_frames_of_unequal_size_are_an_error_that_names_the_frame(tmp_path: Path) -> None:
    still((1, 2, 3)).save(tmp_path / "1.png")
    still((1, 2, 3), (8, 7)).save(tmp_path / "2.png")
    with pytest.raises(ImageError, match=r"2\.png' is 8 x 7 pixels, the first frame 8 x 6"):
        load_frames(tmp_path)


def test_an_empty_folder_and_a_missing_one_are_clear_sentences(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="has no frames; put PNG, JPEG or WebP files there"):
        load_frames(tmp_path)
    with pytest.raises(ImageError, match="there is no file"):
        load_frames(tmp_path / "absent")


@pytest.mark.parametrize(
    "limits, words",
    [
        (ImageLimits(max_frames=3), "max_frames=3"),
        (ImageLimits(max_video_pixels=4 * 48 - 1), "4 frames of 8 x 6, together 192 pixels; the limit is"),
    ],
)
def test_folders_and_animations_obey_the_limits_of_a_video(tmp_path: Path, limits: ImageLimits, words: str) -> None:
    for number, colour in enumerate(COLOURS[:4]):
        still(colour).save(tmp_path / f"{number}.png")
    for source in (tmp_path, animation("GIF", [100] * 4), animation("WEBP", [100] * 4)):
        with pytest.raises(ImageError, match=words):
            load_frames(source, limits)
    assert len(load_frames(tmp_path, ImageLimits(max_frames=4, max_video_pixels=4 * 48))[0]) == 4


@given(st.lists(st.floats(0.001, 5), min_size=1, max_size=60), st.floats(0.1, 30))
def test_sampled_frames_rise_begin_with_the_first_and_keep_to_the_rate(gaps: list[float], fps: float) -> None:
    times = np.concatenate([[0.0], np.cumsum(gaps)]).tolist()
    kept = sample_frames(times, fps)
    assert kept[0] == 0 and kept == sorted(set(kept)) and kept[-1] < len(times)
    duration = times[-1] * len(times) / (len(times) - 1)
    assert len(kept) <= max(1, duration * fps + 1e-3)


def test_one_long_frame_is_kept_once() -> None:
    assert sample_frames([0.0, 0.1, 0.2, 9.0], fps=2.0) == [0, 2, 3]
    assert sample_frames([3.0], fps=2.0) == [0]


@pytest.mark.parametrize("times", [[], [0.0, 0.0], [1.0, 0.5], [-1.0, 0.0], [0.0, float("nan")]])
def test_times_that_do_not_rise_are_an_error(times: list[float]) -> None:
    with pytest.raises(ValueError, match="times"):
        sample_frames(times)


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "00:00:00.000"), (1.5, "00:00:01.500"), (61.0625, "00:01:01.062"), (3599.9999, "00:59:59.999")]
    + [(7325.25, "02:02:05.250"), (86_400.5, "00:00:00.500")],
)
def test_timestamps_are_hours_minutes_seconds_and_cut_milliseconds(seconds: float, text: str) -> None:
    assert timestamp(seconds) == text


@pytest.mark.parametrize("seconds", [-0.5, float("nan"), float("inf")])
def test_an_impossible_time_is_an_error(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds="):
        timestamp(seconds)
