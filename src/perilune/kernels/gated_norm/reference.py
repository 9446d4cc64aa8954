"""RMSNorm with a sigmoid gate: the definition, in float32 at least."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = torch.float64 if torch.float64 in (x.dtype, gate.dtype) else torch.float32
    normed = F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)
    return (normed * torch.sigmoid(gate.to(wide))).to(x.dtype)
