"""Rows of an embedding matrix in the dtype of the activations.

    x_n = W[token_n]        dW[v] = sum over the tokens n with token_n = v of dx_n, in the dtype of W

Paths: "dense" (plain torch, any device) and "triton" (CUDA: rows are cast while they are copied, and their gradients
summed without a float32 copy, in a fixed order).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.kernels.triton_support import why_not_triton

__all__ = ["embed"]


def embed(tokens: Tensor, weight_VD: Tensor, dtype: torch.dtype, *, backend: str | None = None) -> Tensor:
    """tokens [...] int32 or int64 -> [..., D] in `dtype`.

    A token outside of the vocabulary is an error where the host sees the tokens, and a row of NaN on CUDA.
    backend: "dense" or "triton"; None takes Triton on CUDA where it can run.
    """
    if backend not in (None, "dense", "triton"):
        raise ValueError(f"backend={backend!r} is unknown; expected None, 'dense' or 'triton'.")
    if tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"tokens are {tokens.dtype}, expected int32 or int64.")
    if weight_VD.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight_VD.shape)}, expected [vocabulary, width].")
    if backend == "triton" or (backend is None and weight_VD.is_cuda):
        obstacle = why_not_triton(weight_VD)
        if obstacle is None:
            from perilune.kernels.embedding.triton import triton_embed, why_not

            obstacle = why_not(tokens, weight_VD, dtype)
            if obstacle is None:
                return triton_embed(tokens, weight_VD, dtype)
        if backend == "triton":
            raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='dense'.")
    return F.embedding(tokens, weight_VD).to(dtype)
