"""RMSNorm of each head with a sigmoid gate on its output, as Kimi Delta Attention ends (arXiv 2510.26692, section 4).

    y = weight * x / sqrt(mean(x^2) + eps) * sigmoid(gate)          mean over the last dimension, in float32

Paths: "reference" (plain torch, any device) and "triton" (one pass over memory each way, CUDA).
"""

from __future__ import annotations

from torch import Tensor

from perilune.kernels.gated_norm.reference import reference_gated_rms_norm
from perilune.kernels.precision import full_precision
from perilune.kernels.triton_support import why_not_triton

__all__ = ["gated_rms_norm"]


@full_precision
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, backend: str | None = None) -> Tensor:
    """x, gate [..., D], weight [D] -> y [..., D] in x's dtype; differentiable in all three.

    backend: "reference" or "triton"; None takes Triton on CUDA where it can run.
    """
    if x.shape != gate.shape or weight.shape != x.shape[-1:]:
        raise ValueError(
            f"x {tuple(x.shape)}, gate {tuple(gate.shape)} and weight {tuple(weight.shape)} do not fit: "
            "expected x and gate [..., D] and weight [D]."
        )
    if backend not in (None, "reference", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; expected None, 'reference' or 'triton'.")
    if backend == "triton" or (backend is None and x.is_cuda):
        obstacle = why_not_triton(x)
        if obstacle is None:
            from perilune.kernels.gated_norm.triton import triton_gated_rms_norm, why_not

            obstacle = why_not(x, gate, weight)
            if obstacle is None:
                return triton_gated_rms_norm(x, gate, weight, eps)
        if backend == "triton":
            raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='reference'.")
    return reference_gated_rms_norm(x, gate, weight, eps)
