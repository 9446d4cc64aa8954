"""Rotary positions (RoPE, arXiv 2104.09864) and YaRN (arXiv 2309.00071), as DeepSeek-V3 and Kimi K2 use them.

    angle_{t,i} = t * theta^(-2i/d);  each pair (x_{2i}, x_{2i+1}) is rotated by its angle

YaRN divides the slow frequencies by `factor`, keeps the fast ones, blends in between, and multiplies the softmax scale
by mscale^2. Kimi Linear uses no positions at all (NoPE): there the config is None.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    theta: float = 10_000.0
    interleaved: bool = True
    """Pairs are neighbours (x0, x1), (x2, x3), ... in the weights (DeepSeek); False: halves (x_i, x_{i + d/2})."""
    factor: float = 1.0
    """YaRN extension factor; 1 is plain RoPE."""
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ValueError(f"rope.factor must be >= 1 (1 means plain RoPE), got {self.factor!r}")


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale_factor(config: RopeConfig | None) -> float:
    """What YaRN multiplies the softmax scale with."""
    if config is None or config.factor == 1.0 or config.mscale_all_dim == 0.0:
        return 1.0
    return _magnitude(config.factor, config.mscale_all_dim) ** 2


def _cos_sin_factor(config: RopeConfig) -> float:
    if config.factor == 1.0:
        return 1.0
    if config.mscale and config.mscale_all_dim:
        return _magnitude(config.factor, config.mscale) / _magnitude(config.factor, config.mscale_all_dim)
    return _magnitude(config.factor, 1.0)


def inverse_frequencies(config: RopeConfig, dim: int, device: torch.device | None = None) -> Tensor:
    """[dim / 2] angular speeds, float32."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    frequencies = 1.0 / config.theta**exponent
    if config.factor == 1.0:
        return frequencies

    def pair_turning(rotations: float) -> float:
        """The (fractional) pair index that makes this many rotations over the original context."""
        context = config.original_max_position_embeddings
        return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low = max(math.floor(pair_turning(config.beta_fast)), 0)
    high = min(math.ceil(pair_turning(config.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / max(high - low, 0.001)
    slow = ramp.clamp(0.0, 1.0)
    return frequencies * (1.0 - slow) + frequencies / config.factor * slow


def rotation(config: RopeConfig, positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """positions [...] -> cos, sin [..., dim / 2], float32."""
    angle = positions[..., None].float() * inverse_frequencies(config, dim, positions.device)
    factor = _cos_sin_factor(config)
    return angle.cos() * factor, angle.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate x [..., heads, dim] by cos, sin [..., dim / 2]. Pairs leave as halves, in q and k alike.

    In at least float32, as the fused inputs of training do it, so that a server rounds no other way than a trainer.
    """
    dtype, wide = x.dtype, torch.promote_types(x.dtype, torch.float32)
    x, cos, sin = x.to(wide), cos[..., None, :].to(wide), sin[..., None, :].to(wide)
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(dtype)
