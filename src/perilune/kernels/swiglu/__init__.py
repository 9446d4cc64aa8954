"""The elementwise half of a SwiGLU (arXiv 2002.05202): silu(gate) * up, from one tensor that holds both.

    h = silu(x[..., :I]) * x[..., I:]

Gate and up side by side is what one matrix product with stacked weights writes, and what it wants back as gradient.
Paths: "reference" (plain torch, any device) and "triton" (one pass over memory each way, CUDA).
"""

from __future__ import annotations

from torch import Tensor

from perilune.kernels.precision import full_precision
from perilune.kernels.swiglu.reference import reference_swiglu
from perilune.kernels.triton_support import why_not_triton

__all__ = ["swiglu"]


@full_precision
def swiglu(gate_up: Tensor, *, backend: str | None = None) -> Tensor:
    """gate_up [..., 2 I] -> [..., I] in its dtype, computed in float32; differentiable.

    backend: "reference" or "triton"; None takes Triton on CUDA where it can run.
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}, expected [..., 2 I]: gate, then up.")
    if backend not in (None, "reference", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; expected None, 'reference' or 'triton'.")
    if backend == "triton" or (backend is None and gate_up.is_cuda):
        obstacle = why_not_triton(gate_up)
        if obstacle is None:
            from perilune.kernels.swiglu.triton import triton_swiglu, why_not

            obstacle = why_not(gate_up)
            if obstacle is None:
                return triton_swiglu(gate_up)
        if backend == "triton":
            raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='reference'.")
    return reference_swiglu(gate_up)
