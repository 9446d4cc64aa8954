"""silu(gate) * up: the definition, in float32 at least."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def reference_swiglu(gate_up: Tensor) -> Tensor:
    wide = torch.float64 if gate_up.dtype == torch.float64 else torch.float32
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)
