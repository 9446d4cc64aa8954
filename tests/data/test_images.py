"""The processor: sizes, patches, tokens."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from perilune.data.images import (
    ProcessorConfig,
    image_media,
    normalized,
    num_patches,
    num_tokens,
    padded_size,
    scaled_size,
    video_media,
)

SMALL = ProcessorConfig(max_patches=64, max_patches_per_frame=16, max_patches_per_side=16)
SIDES = st.one_of(st.integers(1, 100), st.integers(1, 65_535))


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


@given(SIDES, SIDES, st.sampled_from([4, 64, 4096, 16_384]), st.sampled_from([2, 16, 512]))
@example(1, 1, 16_384, 512)
@example(1, 65_535, 16_384, 512)
def test_a_picture_is_never_enlarged_and_no_side_passes_its_limit(
    height: int, width: int, max_patches: int, max_side: int
) -> None:
    scaled = scaled_size(height, width, max_patches, max_side)
    assert 1 <= scaled[0] <= height and 1 <= scaled[1] <= width
    for before, after in zip(scaled, padded_size(*scaled)):
        assert after % 28 == 0 and before <= after < before + 28
        assert after <= 14 * max_side


@given(SIDES, SIDES)
@example(2000, 2000)
@example(1413, 2813)
def test_the_budget_is_kept_up_to_rounding_and_padding(height: int, width: int) -> None:
    # Published: whole patches are counted (h / 14 < whole + 1) and padding adds less than two patches a side. Where the
    # budget binds, each side has at least 16,384 / 512 = 32 patches.
    assert num_patches(height, width) <= 16_384 * (1 + 3 / 32) * (1 + 3 / 512)


@given(SIDES, SIDES)
def test_a_picture_within_the_budget_is_not_scaled(height: int, width: int) -> None:
    fits = (height // 14 or 1) * (width // 14 or 1) <= 16_384 and max(height, width) <= 512 * 14
    assert (scaled_size(height, width, 16_384, 512) == (height, width)) is fits


@given(SIDES, SIDES, st.sampled_from([SMALL, ProcessorConfig()]))
def test_proportions_are_kept_to_a_pixel(height: int, width: int, config: ProcessorConfig) -> None:
    new_height, new_width = scaled_size(height, width, config.max_patches, config.max_patches_per_side)
    if min(new_height, new_width) > 1:
        scale = min((new_height + 1) / height, (new_width + 1) / width)
        assert new_height <= scale * height and new_width <= scale * width


@given(st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=60)
def test_tokens_follow_the_published_formula(height: int, width: int) -> None:
    media = image_media(noise(height, width))
    assert media.num_tokens == num_tokens(height, width) == math.ceil(height / 28) * math.ceil(width / 28)
    assert media.grid == (1, 2 * math.ceil(height / 28), 2 * math.ceil(width / 28))


@given(st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=60)
def test_counts_made_from_a_size_are_those_of_the_picture(height: int, width: int) -> None:
    media = image_media(noise(height, width), SMALL)
    assert len(media.pixels) == num_patches(height, width, SMALL)
    assert media.num_tokens == num_tokens(height, width, SMALL)


def test_patches_are_rows_of_tiles_and_the_rest_is_black() -> None:
    picture = noise(33, 50)
    media = image_media(picture)
    assert media.grid == (1, 4, 4)
    padded = np.zeros((56, 56, 3), dtype=np.uint8)
    padded[:33, :50] = picture
    for row in range(4):
        for column in range(4):
            tile = padded[14 * row : 14 * row + 14, 14 * column : 14 * column + 14]
            assert (media.pixels[4 * row + column] == tile.transpose(2, 0, 1)).all()


def test_scaling_a_flat_picture_keeps_its_colour() -> None:
    picture = np.broadcast_to(np.array([10, 200, 255], dtype=np.uint8), (500, 700, 3))
    media = image_media(picture, SMALL)
    height, width = scaled_size(500, 700, 64, 16)
    inside = media.pixels[0]
    assert height >= 14 and width >= 14 and (inside == np.array([10, 200, 255])[:, None, None]).all()


def test_the_same_picture_gives_the_same_bytes_and_is_not_changed() -> None:
    picture = noise(301, 499)
    before = picture.tobytes()
    assert image_media(picture, SMALL).pixels.tobytes() == image_media(picture, SMALL).pixels.tobytes()
    assert picture.tobytes() == before


def test_views_of_an_array_are_read_like_copies() -> None:
    picture = noise(400, 400)[::2, ::-1]
    assert (image_media(picture, SMALL).pixels == image_media(picture.copy(), SMALL).pixels).all()


def test_normalisation_maps_black_to_minus_one_and_white_to_one() -> None:
    values = normalized(np.array([0, 255], dtype=np.uint8))
    assert values.dtype == np.float32 and values.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize(
    "picture",
    [
        np.zeros((4, 4, 3)),
        np.zeros((4, 4), dtype=np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_an_array_that_is_no_picture_is_an_error_that_shows_it(picture: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"give uint8 \[height, width, 3\]"):
        image_media(picture)


@pytest.mark.parametrize(
    "options",
    [{"max_patches": 1}, {"max_patches_per_frame": 0}, {"max_patches_per_side": 15}, {"fps": 0.0}, {"fps": math.nan}],
)
def test_impossible_budgets_are_errors_that_name_the_field(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ProcessorConfig(**options)


@pytest.mark.parametrize("num_frames", range(1, 10))
def test_chunks_hold_one_to_four_frames_in_order(num_frames: int) -> None:
    frames = [np.full((30, 30, 3), 10 * index, dtype=np.uint8) for index in range(num_frames)]
    chunks = video_media(frames, [index / 2 for index in range(num_frames)])
    sizes = [4] * (num_frames // 4) + [num_frames % 4] * (num_frames % 4 > 0)
    assert [media.grid for _, media in chunks] == [(size, 4, 4) for size in sizes]
    assert [time for time, _ in chunks] == [f"00:00:{2 * index:02d}.000" for index in range(len(sizes))]
    seen = [media.pixels.reshape(-1, 16, 3, 14, 14)[:, 0, 0, 0, 0] for _, media in chunks]
    assert np.concatenate(seen).tolist() == [10 * index for index in range(num_frames)]


def test_a_frame_of_a_video_is_the_picture_at_the_smaller_budget() -> None:
    frames = [noise(200, 300, seed) for seed in range(3)]
    ((_, chunk),) = video_media(frames, [0.0, 0.5, 1.0], SMALL)
    alone = ProcessorConfig(max_patches=SMALL.max_patches_per_frame, max_patches_per_side=16)
    separate = [image_media(frame, alone) for frame in frames]
    assert chunk.grid == (3, *separate[0].grid[1:])
    assert (chunk.pixels == np.concatenate([media.pixels for media in separate])).all()


@pytest.mark.parametrize("num_frames, fps", [(48, 24), (49, 24), (25, 12.5), (60, 30)])
def test_a_fast_video_is_thinned_to_two_frames_a_second(num_frames: int, fps: float) -> None:
    frames = [np.full((28, 28, 3), index, dtype=np.uint8) for index in range(num_frames)]
    chunks = video_media(frames, [index / fps for index in range(num_frames)])
    shown = np.concatenate([media.pixels.reshape(-1, 4, 3, 14, 14)[:, 0, 0, 0, 0] for _, media in chunks])
    assert len(shown) == int(num_frames / fps * 2) and shown[0] == 0


def test_frames_and_times_must_fit_together() -> None:
    frames = [noise(28, 28), noise(28, 28)]
    with pytest.raises(ValueError, match="2 frames and 1 times"):
        video_media(frames, [0.0])
    with pytest.raises(ValueError, match="frame 1 is"):
        video_media([frames[0], noise(28, 29)], [0.0, 0.5])
    with pytest.raises(ValueError, match="times must rise"):
        video_media(frames, [0.5, 0.5])
    with pytest.raises(ValueError, match="at least one frame"):
        video_media([], [])


def test_pictures_need_no_torch() -> None:
    program = "import sys, perilune.data.images; sys.exit('torch' in sys.modules or 'torchvision' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
