"""Gates of Kimi Delta Attention: from a raw gate input x to the log decay g <= 0 of each key channel.

    softplus (arXiv 2510.26692):   g = -exp(A_log[h]) * softplus(x + dt_bias[h, d])
    bounded:                       g = lower_bound * sigmoid(exp(A_log[h]) * (x + dt_bias[h, d]))

A gate is handed to `kda(..., gate=...)`, which then reads its `g` argument as x and returns the gradients of x, A_log
and dt_bias. The formulas are plain functions of already broadcast parameters, so that the chunked path can apply them,
and their derivatives, to tensors in its own layout. Everything is computed in float32, or float64 when x is float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SoftplusGate:
    """The unbounded gate of Kimi-Linear-48B. A_log is [H], dt_bias is [H, K] or [H * K]."""

    A_log: Tensor
    dt_bias: Tensor

    def log_decay(self, x: Tensor) -> Tensor:
        """x [..., H, K] -> g of the same shape."""
        x, log_rate, bias = _aligned(x, self.A_log, self.dt_bias)
        assert log_rate is not None
        return -log_rate.exp() * F.softplus(x + bias)

    def forward(self, x: Tensor, log_rate: Tensor | None, bias: Tensor) -> Tensor:
        assert log_rate is not None
        return F.softplus(x + bias).mul_(-log_rate.exp())

    def backward(self, x: Tensor, log_rate: Tensor | None, bias: Tensor, dg: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of x and, not yet summed over tokens, of log_rate."""
        assert log_rate is not None
        shifted = x + bias
        rate = -log_rate.exp()
        d_log_rate = F.softplus(shifted).mul_(rate).mul_(dg)
        return shifted.sigmoid_().mul_(rate).mul_(dg), d_log_rate


@dataclass(frozen=True, eq=False)
class BoundedGate:
    """The lower-bounded gate of Kimi-K3 and FlashKDA: g stays in [lower_bound, 0]. Without A_log its rate is 1."""

    dt_bias: Tensor
    A_log: Tensor | None = None
    lower_bound: float = -5.0

    def __post_init__(self) -> None:
        if not self.lower_bound < 0:
            raise ValueError(
                f"lower_bound={self.lower_bound!r} must be negative: it is the smallest log decay per token."
            )

    def log_decay(self, x: Tensor) -> Tensor:
        """x [..., H, K] -> g of the same shape."""
        x, log_rate, bias = _aligned(x, self.A_log, self.dt_bias)
        shifted = x + bias
        return self.lower_bound * torch.sigmoid(shifted if log_rate is None else log_rate.exp() * shifted)

    def forward(self, x: Tensor, log_rate: Tensor | None, bias: Tensor) -> Tensor:
        shifted = x + bias
        if log_rate is not None:
            shifted.mul_(log_rate.exp())
        return shifted.sigmoid_().mul_(self.lower_bound)

    def backward(self, x: Tensor, log_rate: Tensor | None, bias: Tensor, dg: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gradients of x and, not yet summed over tokens, of log_rate."""
        scaled = x + bias
        if log_rate is not None:
            scaled.mul_(log_rate.exp())
        sigmoid = scaled.sigmoid()
        d_scaled = torch.rsub(sigmoid, 1).mul_(sigmoid).mul_(dg).mul_(self.lower_bound)
        if log_rate is None:
            return d_scaled, None
        return d_scaled * log_rate.exp(), scaled.mul_(d_scaled)


Gate = SoftplusGate | BoundedGate


def _aligned(x: Tensor, A_log: Tensor | None, dt_bias: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Cast to the compute dtype and give the parameters the shapes [H, 1] and [H, K] that broadcast against x."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    num_heads, key_dim = x.shape[-2:]
    log_rate = None if A_log is None else A_log.to(dtype).view(num_heads, 1)
    return x.to(dtype), log_rate, dt_bias.to(dtype).view(num_heads, key_dim)
