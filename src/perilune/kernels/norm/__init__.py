"""RMSNorm (arXiv 1910.07467), alone or fused with the residual addition before it.

`reference.py` defines both; `triton.py` runs them in one pass on CUDA, forward and backward.
"""

import torch
from torch import Tensor

from perilune.kernels.norm.reference import reference_add_rms_norm, reference_rms_norm
from perilune.kernels.triton_support import INTERPRETED, why_not_triton

__all__ = ["add_rms_norm", "rms_norm", "takes_triton"]

FAST_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def takes_triton(x: Tensor, backend: str | None = None) -> bool:
    """Whether the Triton path serves this call."""
    if backend not in (None, "triton", "reference"):
        raise ValueError(f"backend={backend!r} is unknown: expected 'triton', 'reference' or None to choose")
    if backend == "reference" or (backend is None and (INTERPRETED or not x.is_cuda)):
        return False
    reason = why_not_triton(x)
    if reason is None and x.dtype not in FAST_DTYPES:
        reason = f"x is {x.dtype}, the Triton kernels take bfloat16, float16 and float32"
    if reason is not None and backend == "triton":
        raise ValueError(f"backend='triton' cannot run: {reason}")
    return reason is None


def _check(x: Tensor, weight: Tensor) -> None:
    if x.dim() < 1 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({x.shape[-1:].numel()},), the width of x")


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """normed [..., d] = weight [d] * x / sqrt(mean(x^2) + eps), in float32, returned in the dtype of x."""
    _check(x, weight)
    if not takes_triton(x, backend):
        return reference_rms_norm(x, weight, eps)
    from perilune.kernels.norm.triton import triton_rms_norm

    return triton_rms_norm(x, weight, eps)


def add_rms_norm(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(total, normed), both [..., d]: total = residual + x, normed = rms_norm(total, weight, eps)."""
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
        raise ValueError(
            f"residual is {residual.dtype} {tuple(residual.shape)} on {residual.device}, "
            f"x is {x.dtype} {tuple(x.shape)} on {x.device}: expected the same"
        )
    if not takes_triton(x, backend):
        return reference_add_rms_norm(residual, x, weight, eps)
    from perilune.kernels.norm.triton import triton_add_rms_norm

    return triton_add_rms_norm(residual, x, weight, eps)
