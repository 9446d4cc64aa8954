"""The published Kimi K2.5 processor: a picture or video into patches for the vision tower. numpy and Pillow, no torch.

A picture of H x W pixels is never enlarged. With h = max(1, H // 14) and w = max(1, W // 14) whole patches, a budget of
B patches and S patches a side, it is scaled by

    scale = min(1, sqrt(B / (h * w)), 14 * S / H, 14 * S / W)

rounded down, bicubic, then padded at the bottom and right with black to multiples of 28: ceil(H' / 28) * ceil(W' / 28)
tokens. B is 16,384 for a picture and 4,096 for each frame of a video, S is 512. Because h and w are rounded down and
padding rounds up, a padded grid can be larger than B: 2000 x 2000 pixels become 130 x 130 = 16,900 patches. That is how
it is published, so it is how it is here; `num_patches` says the true number.

Normalisation, (x / 255 - 0.5) / 0.5, is left to the device; `normalized` is its definition.

Two processors are published. The one released with the weights resizes with Pillow, the one in transformers with
torchvision. Both agree with this one exactly where nothing is resized. Where a picture is scaled down, the order of the
two passes matters, because each rounds and clips to uint8: on noise the two orders differ by up to 23 of 255 steps.
torchvision scales the width first, and so does one call of `resize` in Pillow 11 and 12; Pillow 13 scales the height
first when a picture is more than twice as high as wide. So here the passes are two calls, width first: the bytes are
those of Pillow 11 and 12 in every version.

Against torchvision this leaves at most 2 steps, in less than 1% of the values: Pillow's weights have 22 bits and
torch's 16. After the first pass a value differs by at most one step; the weights of a bicubic filter sum to at most
1.27 in absolute value, so before the second rounding the difference is below 1.5 and after it at most 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from perilune.data.image_files import list_pictures, load_image
from perilune.data.image_limits import ImageError, ImageLimits
from perilune.data.media import FRAMES_PER_CHUNK, MERGE_SIZE, PATCH_SIZE, Media
from perilune.data.video import DEFAULT_FPS, load_frames, sample_frames, timestamp

__all__ = [
    "DEFAULT_PROCESSOR",
    "ImageError",
    "ImageLimits",
    "ProcessorConfig",
    "image_media",
    "list_pictures",
    "load_frames",
    "load_image",
    "normalized",
    "num_patches",
    "num_tokens",
    "padded_size",
    "scaled_size",
    "video_media",
]

CELL = PATCH_SIZE * MERGE_SIZE  # pixels per side of a token


@dataclass(frozen=True, kw_only=True)
class ProcessorConfig:
    """Budgets of the processor; the defaults are the published ones.

    max_patches: of a picture; max_patches_per_frame: of a video frame; max_patches_per_side: of either.
    fps: how many frames of a video are kept for each second of it.
    """

    max_patches: int = 16_384
    max_patches_per_frame: int = 4_096
    max_patches_per_side: int = 512
    fps: float = DEFAULT_FPS

    def __post_init__(self) -> None:
        for name in ("max_patches", "max_patches_per_frame", "max_patches_per_side"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < MERGE_SIZE:
                raise ValueError(f"{name}={value!r} must be an integer of at least {MERGE_SIZE}")
        if self.max_patches_per_side % MERGE_SIZE:
            raise ValueError(
                f"max_patches_per_side={self.max_patches_per_side!r} must be even: padding to 28 pixels would pass it"
            )
        if not (math.isfinite(self.fps) and self.fps > 0):
            raise ValueError(f"fps={self.fps!r} must be a number above 0")


DEFAULT_PROCESSOR = ProcessorConfig()


def scaled_size(height: int, width: int, max_patches: int, max_patches_per_side: int) -> tuple[int, int]:
    """(height, width) in pixels after scaling down and before padding."""
    if height < 1 or width < 1:
        raise ValueError(f"height={height!r}, width={width!r}: a picture has at least one pixel")
    whole_patches = max(1, height // PATCH_SIZE) * max(1, width // PATCH_SIZE)
    longest = max_patches_per_side * PATCH_SIZE
    scale = min(1.0, math.sqrt(max_patches / whole_patches), longest / height, longest / width)
    return min(longest, max(1, int(height * scale))), min(longest, max(1, int(width * scale)))


def padded_size(height: int, width: int) -> tuple[int, int]:
    """The next multiples of 28."""
    return -(-height // CELL) * CELL, -(-width // CELL) * CELL


def num_patches(height: int, width: int, config: ProcessorConfig = DEFAULT_PROCESSOR) -> int:
    """How many patches a picture of this size gives."""
    scaled = scaled_size(height, width, config.max_patches, config.max_patches_per_side)
    padded_height, padded_width = padded_size(*scaled)
    return (padded_height // PATCH_SIZE) * (padded_width // PATCH_SIZE)


def num_tokens(height: int, width: int, config: ProcessorConfig = DEFAULT_PROCESSOR) -> int:
    """How many tokens a picture of this size costs: ceil(H / 28) * ceil(W / 28) after scaling."""
    return num_patches(height, width, config) // MERGE_SIZE**2


def image_media(picture: np.ndarray, config: ProcessorConfig = DEFAULT_PROCESSOR) -> Media:
    """Patches of a picture, uint8 [height, width, 3]."""
    _check_picture(picture, "picture")
    return _patches([picture], config.max_patches, config)


def video_media(
    frames: Sequence[np.ndarray], times: Sequence[float], config: ProcessorConfig = DEFAULT_PROCESSOR
) -> list[tuple[str, Media]]:
    """Chunks of at most four sampled frames, each with the time of its first frame as text.

    frames: uint8 [height, width, 3], all of one size; times: the second at which each begins.
    """
    if len(frames) != len(times):
        raise ValueError(f"{len(frames)} frames and {len(times)} times; give one time for each frame")
    for index, frame in enumerate(frames):
        _check_picture(frame, f"frame {index}")
        if frame.shape != frames[0].shape:
            raise ValueError(f"frame {index} is {frame.shape}, frame 0 {frames[0].shape}; give all one size")
    kept = sample_frames(times, config.fps)
    chunks = [kept[start : start + FRAMES_PER_CHUNK] for start in range(0, len(kept), FRAMES_PER_CHUNK)]
    return [
        (timestamp(times[chunk[0]]), _patches([frames[i] for i in chunk], config.max_patches_per_frame, config))
        for chunk in chunks
    ]


def normalized(pixels: np.ndarray) -> np.ndarray:
    """float32 (x / 255 - 0.5) / 0.5 of uint8 pixels: black is -1, white is 1."""
    return (pixels.astype(np.float32) / np.float32(255) - np.float32(0.5)) / np.float32(0.5)


def _check_picture(picture: np.ndarray, name: str) -> None:
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
        raise ValueError(f"{name} is {picture.dtype} {list(picture.shape)}; give uint8 [height, width, 3]")


def _patches(frames: Sequence[np.ndarray], max_patches: int, config: ProcessorConfig) -> Media:
    """Scale, pad and cut frames of one size; every frame's patches row by row."""
    height, width, _ = frames[0].shape
    scaled_height, scaled_width = scaled_size(height, width, max_patches, config.max_patches_per_side)
    padded_height, padded_width = padded_size(scaled_height, scaled_width)
    rows, columns = padded_height // PATCH_SIZE, padded_width // PATCH_SIZE
    canvas = np.zeros((len(frames), padded_height, padded_width, 3), dtype=np.uint8)
    for index, frame in enumerate(frames):
        canvas[index, :scaled_height, :scaled_width] = _scaled(frame, scaled_height, scaled_width)
    tiles = canvas.reshape(len(frames), rows, PATCH_SIZE, columns, PATCH_SIZE, 3).transpose(0, 1, 3, 5, 2, 4)
    pixels = np.ascontiguousarray(tiles).reshape(-1, 3, PATCH_SIZE, PATCH_SIZE)
    return Media(pixels=pixels, grid=(len(frames), rows, columns))


def _scaled(frame: np.ndarray, height: int, width: int) -> np.ndarray:
    if frame.shape[:2] == (height, width):
        return frame
    image = Image.fromarray(np.ascontiguousarray(frame))
    image = image.resize((width, image.height), Image.Resampling.BICUBIC)  # width first: see the module's docstring
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
