"""Where a patch is: a learned grid resized to the picture, a fixed table for time, and two-dimensional rotary angles.

The learned grid G [H, W, d] is resized to (h, w) as `interpolate(mode="bicubic", align_corners=False)` would. That is
linear in G and separable: R_h G R_w^T with one small matrix for each axis, so its gradient is two matrix products and
the same in every run, which the interpolation kernel of CUDA does not promise.

    R_n[i, j] = sum over taps k of 4 with clamp(floor(s) + k, 0, N - 1) = j of K(s - floor(s) - k),
    s = (i + 1/2) N / n - 1/2,   K the cubic convolution kernel with a = -3/4

Rotary angles: head_dim / 4 frequencies 10000^(-4i / head_dim); the adjacent pairs of a head turn by
column * f_0, row * f_0, column * f_1, row * f_1, ... The same for every frame.

Time: sin(t f_i), then cos(t f_i) with f_i = 10000^(-2i / d); for items of more than one frame only.

What does not depend on weights is computed once for a shape and device and kept.
"""

from functools import lru_cache

import torch
from torch import Tensor

BASE = 10_000.0
CUBIC = -0.75


def resized(grid_HWd: Tensor, height: int, width: int) -> Tensor:
    """The learned grid at another size, [height * width, d]."""
    full_height, full_width, dim = grid_HWd.shape
    if (height, width) == (full_height, full_width):
        return grid_HWd.reshape(-1, dim)
    rows = resize_matrix(full_height, height, grid_HWd.device, grid_HWd.dtype)
    columns = resize_matrix(full_width, width, grid_HWd.device, grid_HWd.dtype)
    tall = (rows @ grid_HWd.flatten(1)).view(height, full_width, dim)
    return (columns @ tall).reshape(-1, dim)


@lru_cache(maxsize=256)
def resize_matrix(full: int, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """R [size, full]: bicubic resize of one axis."""
    with torch.inference_mode(False), torch.no_grad():  # may be kept and used in training later
        index = torch.arange(size, device=device, dtype=torch.float64)
        source = (index + 0.5) * full / size - 0.5
        left = source.floor()
        fraction = source - left
        matrix = torch.zeros(size, full, device=device, dtype=torch.float64)
        for tap in (-1, 0, 1, 2):
            column = (left + tap).clamp(0, full - 1).long()
            matrix.scatter_add_(1, column[:, None], _cubic((fraction - tap).abs())[:, None])
        return matrix.to(dtype)


def _cubic(distance: Tensor) -> Tensor:
    near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
    far = CUBIC * (((distance - 5) * distance + 8) * distance - 4)
    return torch.where(distance <= 1, near, torch.where(distance < 2, far, 0.0))


@lru_cache(maxsize=32)
def time_table(frames: int, dim: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[frames, dim]"""
    with torch.inference_mode(False), torch.no_grad():
        angle = torch.outer(
            torch.arange(frames, device=device, dtype=torch.float64),
            BASE ** (-torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim),
        )
        return torch.cat([angle.sin(), angle.cos()], dim=1).to(dtype)


@lru_cache(maxsize=256)
def rotary_tables(
    height: int, width: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles of one frame, each [height * width, head_dim / 2]."""
    with torch.inference_mode(False), torch.no_grad():
        frequency = BASE ** (-torch.arange(0, head_dim, 4, device=device, dtype=torch.float64) / head_dim)
        column = torch.arange(width, device=device, dtype=torch.float64)[None, :, None] * frequency
        row = torch.arange(height, device=device, dtype=torch.float64)[:, None, None] * frequency
        shape = (height, width, len(frequency))
        angle = torch.stack([column.expand(shape), row.expand(shape)], dim=-1).reshape(height * width, -1)
        return angle.cos().to(dtype), angle.sin().to(dtype)
