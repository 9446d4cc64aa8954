"""Attention of a run of queries at the end of longer keys: a prompt that goes on after cached tokens, for inference.

The meaning is that of `attention` with more keys than queries: the last query sits at the last key, and each sees what
is not behind it. On CUDA in half precision this is torch's flash attention (values are padded to the width of keys, as
it takes one width only), elsewhere the tiled path: the fast paths of `attention` take as many queries as keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from perilune.kernels.attention import attention
from perilune.kernels.precision import full_precision

HALF = (torch.bfloat16, torch.float16)


@torch.no_grad()
@full_precision
def continued_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, backend: str | None = None) -> Tensor:
    """q [B, Tq, H, D], k [B, Tk, H, D], v [B, Tk, H, Dv], Tq <= Tk -> [B, Tq, H, Dv] in v's dtype.

    backend: "flash" (torch chooses its kernel) or "tiled"; None takes flash where it is fast.
    """
    if backend not in (None, "flash", "tiled"):
        raise ValueError(f"backend={backend!r} is unknown; expected None, 'flash' or 'tiled'.")
    if q.dim() != 4 or k.dim() != 4 or not 0 < q.shape[1] <= k.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} do not fit: expected [B, T, H, D], at least one query and no "
            "more queries than keys"
        )
    if backend is None:
        same_length = q.shape[1] == k.shape[1]
        backend = "flash" if q.is_cuda and q.dtype in HALF and not same_length else None
    if backend == "flash":
        padded = F.pad(v, (0, q.shape[3] - v.shape[3])) if v.shape[3] < q.shape[3] else v
        heads_first = (x.transpose(1, 2) for x in (q, k, padded))
        mask = causal_lower_right(q.shape[1], k.shape[1])
        o = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=scale)
        return o.transpose(1, 2)[..., : v.shape[3]]
    o, _, _ = attention(q, k, v, scale=scale, clip_threshold=None, backend=backend)
    return o
