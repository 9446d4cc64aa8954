"""RMSNorm, alone and after a residual addition: the definition.

    total  = residual + x
    normed = weight * total / sqrt(mean(total^2) + eps)        over the last dimension

The total is rounded to the dtype of x first and normed is taken of the rounded one, in float32 (float64 for float64),
as two separate layers would do.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return F.rms_norm(wide, weight.shape, weight, eps).to(x.dtype)


def reference_add_rms_norm(residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + x
    return total, reference_rms_norm(total, weight, eps)
