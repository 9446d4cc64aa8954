"""Cross entropy of a linear head straight from hidden states: the logits of all tokens never exist at once.

    loss = sum_t  logsumexp(W h_t) - (W h_t)[target_t]        over targets != IGNORED

Chunks of tokens are multiplied with the head, turned into losses and, in place, into the gradient of their logits,
which becomes dh and dW at once, in the forward pass. Paths: "dense" (plain torch, any device and dtype) and "triton"
(CUDA: one kernel between the matrix products of a chunk).
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.cross_entropy.dense import IGNORED, dense_cross_entropy_sum
from perilune.kernels.precision import full_precision
from perilune.kernels.triton_support import why_not_triton

__all__ = ["IGNORED", "linear_cross_entropy_sum"]


@full_precision
def linear_cross_entropy_sum(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    chunk_elements: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Sum of -log p(target) over valid targets, a float32 scalar (float64 for float64 inputs).

    The products are computed in the dtype of `hidden`, the softmax in float32; dW is summed in float32.
    chunk_elements: logits held at a time; None is what suits the path.
    backend: "dense" or "triton"; None takes Triton on CUDA where it can run.
    """
    needs_grad = torch.is_grad_enabled() and (hidden_ND.requires_grad or weight_VD.requires_grad)
    if backend not in (None, "dense", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; expected None, 'dense' or 'triton'.")
    if backend == "triton" or (backend is None and hidden_ND.is_cuda):
        obstacle = why_not_triton(hidden_ND)
        if obstacle is None:
            from perilune.kernels.cross_entropy.triton import triton_cross_entropy_sum, why_not

            obstacle = why_not(hidden_ND, weight_VD, targets_N)
            if obstacle is None:
                return triton_cross_entropy_sum(hidden_ND, weight_VD, targets_N, needs_grad, chunk_elements)
        if backend == "triton":
            raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='dense'.")
    return dense_cross_entropy_sum(hidden_ND, weight_VD, targets_N, needs_grad, chunk_elements)
