"""Parity with transformers' kimi_k25 image and video processors: sizes, patches, normalised values, times.

Where nothing is scaled the pixels are the same bytes; the two orders of normalisation, (x/255 - 0.5)/0.5 and
(x - 127.5)/127.5, each round twice or three times at a magnitude of at most 1, so they agree to 4 * 2**-24.
Where a picture is scaled down, Pillow's bicubic filter, width first, and torchvision's differ by at most 2 steps of
255; the argument is in perilune/data/images.py. Pictures more than twice as high as wide are among the sizes on
purpose: one call of resize in Pillow 13 scales their height first.
"""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from perilune.data import video
from perilune.data.images import (
    DEFAULT_PROCESSOR,
    ProcessorConfig,
    image_media,
    normalized,
    num_patches,
    padded_size,
    scaled_size,
    video_media,
)
from perilune.data.media import video_tokens
from perilune.data.tokenizer import Tokenizer

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

from transformers.models.kimi_k25.image_processing_kimi_k25 import (
    Kimi_K25ImageProcessor,
    navit_resize,
)
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.models.kimi_k25.video_processing_kimi_k25 import Kimi_K25VideoProcessor
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

ROUNDING = 4 * 2.0**-24
STEP = 2 / 255  # one of 255 steps after normalisation

# (height, width): the first 20 fit the published budget, the others are scaled down
UNSCALED = [
    *((1, 1), (13, 29), (17, 3000), (3000, 17), (14, 14), (15, 14), (27, 28), (28, 28), (29, 28), (56, 84)),
    *((1, 500), (500, 1), (111, 113), (224, 224), (333, 71), (2, 7168), (640, 481), (97, 1009), (719, 405), (5, 5)),
]
SCALED = [
    *((1, 9000), (9000, 1), (17, 9001), (7169, 30), (8191, 41), (61, 20_011)),
    *((2000, 2000), (1801, 2603), (3001, 1203), (2600, 1300)),
]
SMALL = ProcessorConfig(max_patches=64, max_patches_per_side=16)


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Half smooth, half noise: a filter's weights show in both."""
    rng = np.random.default_rng([height, width, seed])
    y, x = np.mgrid[:height, :width].astype(np.float32)
    smooth = np.stack([127 + 127 * np.sin(x / 37 + y / 51), 255 * x / width, 127 + 127 * np.cos(y / 11)], axis=-1)
    noise = rng.integers(0, 256, (height, width, 3))
    return np.where((x < width / 2)[:, :, None], smooth, noise).round().astype(np.uint8)


def theirs(array: np.ndarray, config: ProcessorConfig = DEFAULT_PROCESSOR) -> tuple[np.ndarray, tuple[int, ...]]:
    side = config.max_patches_per_side
    processor = Kimi_K25ImageProcessor(max_patches=config.max_patches, size={"max_height": side, "max_width": side})
    output = processor(Image.fromarray(array), return_tensors="pt")
    return output["pixel_values"].numpy(), tuple(output["image_grid_thw"][0].tolist())


def assert_close(ours: np.ndarray, published: np.ndarray) -> None:
    """At most 2 steps apart, and apart at all in less than 1% of the values (100 values in small pictures)."""
    steps = np.abs(ours - published) / STEP
    assert steps.max() <= 2.01
    assert (steps > 0.5).sum() <= max(100, 0.01 * steps.size)


@pytest.mark.parametrize("height, width", UNSCALED)
def test_a_picture_that_fits_has_the_published_pixels(height: int, width: int) -> None:
    array = picture(height, width)
    media = image_media(array)
    values, grid = theirs(array)
    assert media.grid == grid
    assert np.abs(normalized(media.pixels) - values).max() <= ROUNDING


@pytest.mark.parametrize("height, width", SCALED)
def test_a_picture_over_the_budget_is_within_two_steps_of_the_published_pixels(height: int, width: int) -> None:
    array = picture(height, width)
    media = image_media(array)
    values, grid = theirs(array)
    assert media.grid == grid
    assert_close(normalized(media.pixels), values)


@pytest.mark.parametrize("height, width", [(113, 200), (300, 301), (1000, 60), (640, 480), (31, 999)])
def test_a_small_budget_scales_like_the_published_one(height: int, width: int) -> None:
    array = picture(height, width)
    media = image_media(array, SMALL)
    values, grid = theirs(array, SMALL)
    assert media.grid == grid
    assert_close(normalized(media.pixels), values)


@pytest.mark.parametrize("height, width", [(300, 301), (600, 300), (31, 999)])
def test_scaling_equals_one_call_of_pillow_up_to_twice_as_high_as_wide(height: int, width: int) -> None:
    array = picture(height, width)
    scaled = scaled_size(height, width, SMALL.max_patches, SMALL.max_patches_per_side)
    resized = np.asarray(Image.fromarray(array).resize(scaled[::-1], resample=Image.Resampling.BICUBIC))
    padding = [(0, padded - size) for padded, size in zip(padded_size(*scaled), scaled)]
    padded = np.pad(resized, (*padding, (0, 0)))
    _, rows, columns = image_media(array, SMALL).grid
    tiles = padded.reshape(rows, 14, columns, 14, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 14, 14)
    assert (image_media(array, SMALL).pixels == tiles).all()


SIDES = st.one_of(st.integers(1, 200), st.integers(1, 65_535))


@given(SIDES, SIDES, st.sampled_from([4, 64, 4096, 16_384]), st.sampled_from([2, 16, 512]))
@example(2000, 2000, 16_384, 512)
def test_every_size_is_the_published_size(height: int, width: int, max_patches: int, max_side: int) -> None:
    scaled, padded = navit_resize(height, width, 14, 2, max_patches, max_side)
    assert scaled_size(height, width, max_patches, max_side) == scaled
    assert padded_size(*scaled) == padded


@given(SIDES, SIDES)
def test_the_number_of_patches_is_the_published_number(height: int, width: int) -> None:
    assert num_patches(height, width) == Kimi_K25ImageProcessor().get_number_of_image_patches(height, width)


@pytest.mark.parametrize("num_frames", [1, 3, 4, 7])
def test_video_chunks_have_the_published_pixels(num_frames: int) -> None:
    frames = [picture(61, 45, seed) for seed in range(num_frames)]
    ours = video_media(frames, [index / 2 for index in range(num_frames)])
    stacked = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    pixels, grids = [], []
    # Chunks of 4 and of fewer frames go in one at a time: grouping them together is broken in transformers 5.22.
    for start in range(0, num_frames, 4):
        output = Kimi_K25VideoProcessor()(stacked[start : start + 4], do_sample_frames=False, return_tensors="pt")
        pixels.append(output["pixel_values_videos"].numpy().reshape(-1, 3, 14, 14))
        grids += [tuple(grid) for grid in output["video_grid_thw"].tolist()]
    assert [media.grid for _, media in ours] == grids
    mine = np.concatenate([normalized(media.pixels) for _, media in ours])
    assert np.abs(mine - np.concatenate(pixels)).max() <= ROUNDING


@given(st.integers(1, 400), st.sampled_from([2, 4, 5, 8, 10, 12, 16, 20, 24, 25, 30, 50, 60]))
def test_sampling_picks_the_published_frames(num_frames: int, rate: int) -> None:
    indices = default_sample_indices_fn(VideoMetadata(total_num_frames=num_frames, fps=rate), fps=2)
    assert video.sample_frames([index / rate for index in range(num_frames)], fps=2.0) == indices.tolist()


class WithoutTokenizer(Kimi_K25Processor):
    """Only the text of a video; no tokenizer is needed for it."""

    def __init__(self) -> None:
        self.video_processor = Kimi_K25VideoProcessor()
        self.video_token = "<|media_pad|>"


@pytest.mark.parametrize("rate", [2, 7, 24])
def test_the_text_of_a_video_is_the_published_text(rate: int) -> None:
    tokenizer = Tokenizer.train(["00:00:01.500 video"], 300)
    frames = [np.zeros((56, 28, 3), dtype=np.uint8)] * (6 * rate)
    times = [index / rate for index in range(len(frames))]
    chunks = video_media(frames, times)
    metadata = VideoMetadata(total_num_frames=len(frames), fps=rate)
    metadata.frames_indices = default_sample_indices_fn(metadata, fps=2).tolist()
    inputs = {
        "num_chunks_per_video": [len(chunks)],
        "video_grid_thw": torch.tensor([media.grid for _, media in chunks]),
        "video_metadata": [metadata],
    }
    assert tokenizer.decode(video_tokens(tokenizer, chunks)) == WithoutTokenizer().replace_video_token(inputs, 0)


@given(st.floats(0, 200_000, allow_nan=False))
@example(2.3)
@example(86_399.9999)
def test_every_time_is_written_as_published(seconds: float) -> None:
    metadata = VideoMetadata(total_num_frames=1, fps=1.0)
    metadata.frames_indices = [seconds]
    inputs = {
        "num_chunks_per_video": [1],
        "video_grid_thw": torch.tensor([[1, 2, 2]]),
        "video_metadata": [metadata],
    }
    text = WithoutTokenizer().replace_video_token(inputs, 0)
    assert text.startswith(video.timestamp(seconds) + "<|media_begin|>")
