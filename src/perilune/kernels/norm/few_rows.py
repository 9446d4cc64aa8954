"""RMSNorm and its kin for a few rows on a CPU, where an operator costs more to start than to run.

    y = weight * x / sqrt(mean(x^2) + eps)        the definition is in reference.py; the last bits may differ

torch's own is made of twice as many operators. For inference: no gradients, and in the dtype of x.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def inverse_norm(x: Tensor, eps: float, share: float = 1.0) -> Tensor:
    """1 / sqrt(share * sum of x^2 + eps) over the last dimension, which stays with size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(_constant(eps, x.dtype, x.device), norm, norm, value=share).rsqrt_()


def norm_few_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.mul(inverse_norm(x, eps, 1 / x.shape[-1])).mul_(weight)


@lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(value, dtype=dtype, device=device)
