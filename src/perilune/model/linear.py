"""Linear maps and RMSNorm with float32 parameters and activations of any dtype.

Parameters are always float32 (the master weights). A layer casts its weight to the dtype of the activation at use, so
the compute dtype of the whole model is decided in one place: where the embedding casts its output. No autocast.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.optim.matrices import Adam, Layout


class Linear(nn.Linear):
    """nn.Linear without bias by default, computed in the dtype of its input."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def at_least_float32(x: Tensor) -> Tensor:
    """Upcast half precision, leave float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, in float32, returned in the dtype of x."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(at_least_float32(x), self.weight.shape, self.weight, self.eps).to(x.dtype)

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"weight": Adam(weight_decay=True)}

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
