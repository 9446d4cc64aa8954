"""Frames of a video: from a folder of pictures, an animated GIF or an animated WebP; which of them are kept, and when.

A video here is a list of frames of one size and the second at which each begins. Folders have no times: their frames
follow each other at `folder_fps`. Animations have their own.

Sampling follows the published processor: of N frames that last D seconds, n = max(1, floor(D * fps)) are kept, never
more than N, the k-th being the one shown at k * D / n. On frames of equal length that is index floor(k * N / n). Frames
of unequal length may name one frame twice; it is kept once.

Four sampled frames make a chunk, and a chunk begins with the time of its first frame as HH:MM:SS.mmm, milliseconds cut
off and hours counted modulo 24, as published.
"""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perilune.data.image_files import DEFAULT_LIMITS, Source, decode_frames, list_pictures, load_image, read_source
from perilune.data.image_headers import read_header
from perilune.data.image_limits import ImageError, ImageLimits

DEFAULT_FPS = 2.0
FRAME_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def load_frames(
    source: Source, limits: ImageLimits = DEFAULT_LIMITS, *, folder_fps: float = DEFAULT_FPS, name: str | None = None
) -> tuple[list[np.ndarray], list[float]]:
    """All frames, uint8 [height, width, 3] of one size, and the second at which each begins.

    source: a folder of PNG, JPEG or WebP files in natural order, an animated GIF or WebP, or such a file's bytes. A
    still picture is a video of one frame.
    """
    if not isinstance(source, bytes) and Path(source).is_dir():
        return _load_folder(os.fspath(source), limits, folder_fps)
    name, content = read_source(source, limits, name=name)
    header = read_header(content, name, limits)
    limits.check_video(name, header.num_frames, header.width, header.height)
    ends = np.cumsum([0, *header.delays[:-1]])
    return list(decode_frames(header, name)), [int(end) / 1000 for end in ends]


def _load_folder(folder: str, limits: ImageLimits, folder_fps: float) -> tuple[list[np.ndarray], list[float]]:
    if not (math.isfinite(folder_fps) and folder_fps > 0):
        raise ValueError(f"folder_fps={folder_fps!r} must be a number above 0")
    paths = list_pictures(folder, suffixes=FRAME_SUFFIXES)
    if not paths:
        raise ImageError(f"the folder {folder!r} has no frames; put PNG, JPEG or WebP files there", reason="missing")
    limits.check_frames(folder, len(paths))
    frames: list[np.ndarray] = []
    for path in paths:
        frame = load_image(path, limits)
        if not frames:
            height, width, _ = frame.shape
            limits.check_video(folder, len(paths), width, height)
        elif frame.shape != frames[0].shape:
            raise ImageError(
                f"frame {str(path)!r} is {_size(frame)} pixels, the first frame {_size(frames[0])}; give all one size",
                reason="frames of unequal size",
            )
        frames.append(frame)
    return frames, [index / folder_fps for index in range(len(frames))]


def _size(frame: np.ndarray) -> str:
    return f"{frame.shape[1]} x {frame.shape[0]}"


def sample_frames(times: Sequence[float], fps: float = DEFAULT_FPS) -> list[int]:
    """Which frames to keep for about `fps` frames a second; `times` are their beginnings in seconds, rising.

    The last frame is taken to last as long as the others do on average.
    """
    if not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"fps={fps!r} must be a number above 0")
    if not times:
        raise ValueError("times is empty: a video has at least one frame")
    begin = np.asarray(times, dtype=np.float64)
    if not np.isfinite(begin).all() or begin[0] < 0 or (np.diff(begin) <= 0).any():
        raise ValueError("times must rise from frame to frame and begin at 0 or later")
    if len(begin) == 1:
        return [0]
    duration = (begin[-1] - begin[0]) * len(begin) / (len(begin) - 1)
    slack = 1e-6  # 0.3 s + 0.1 s is a little more than 0.4 s in binary; a frame is never that short
    count = min(len(begin), max(1, math.floor(duration * fps + slack)))
    moments = begin[0] + np.arange(count) * duration / count + slack
    return sorted({int(index) for index in np.searchsorted(begin, moments, side="right") - 1})


def timestamp(seconds: float) -> str:
    """HH:MM:SS.mmm as the published processor writes it."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"seconds={seconds!r} must be a number of at least 0")
    return f"{time.strftime('%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}"
