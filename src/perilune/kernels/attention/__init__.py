"""Causal softmax attention over packed documents, with the maximum logit of every head as a by-product.

QK-Clip needs that maximum; ordinary fused attention does not hand it out. Paths: `reference.py` (dense, the
definition), `tiled.py` (O(T) memory, any device), and on CUDA `cudnn.py` (no packed documents), `packed.py` (Triton,
with exact maxima) and `flex.py` (compiled FlexAttention, for shapes the others do not take). cuDNN and FlexAttention
hand out the log-sum-exp of every row, from which `triton.py` finds the maxima that matter.
"""

import math

import torch
from torch import Tensor

from perilune.kernels.attention import cudnn, flex
from perilune.kernels.attention.machine import why_not_triton_on
from perilune.kernels.attention.reference import reference_attention
from perilune.kernels.attention.tiled import tiled_attention
from perilune.kernels.documents import document_borders
from perilune.kernels.precision import full_precision

__all__ = ["attention"]


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not x.is_floating_point():
            raise ValueError(f"{name} must be float [batch, tokens, heads, width], got {x.dtype} {tuple(x.shape)}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit: expected q [B, Tq, H, D], "
            "k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv]"
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"q has {q.shape[2]} heads and k has {k.shape[2]}: the first must be a multiple of the second")
    if cu_seqlens is not None and (q.shape[0] != 1 or q.shape[1] != k.shape[1]):
        raise ValueError(
            "cu_seqlens packs documents into one row: expected batch 1 and as many queries as keys, "
            f"got batch {q.shape[0]}, {q.shape[1]} queries, {k.shape[1]} keys"
        )


@full_precision
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    clip_threshold: float | None = -math.inf,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Causal attention inside documents; also the largest logit of every head.

    q [B, Tq, H, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv]; H is a multiple of Hkv, Dv may differ from D. With Tq != Tk
    the last query sits at the last key (decoding with a cache). A query that may see no key gives zeros.
    scale: factor on q.k, by default D ** -0.5.
    cu_seqlens: document borders [0, ..., T] of a packed row (B = 1, Tq = Tk); empty documents are allowed.
    clip_threshold: the logit above which a head's maximum must be exact; by default all are. For the other heads a path
        may return an upper bound that is not above the threshold. None: nobody asks, any bound will do.
    backend: "reference", "tiled", "triton", "cudnn" or "flex"; None takes the fastest that can run.

    Returns o [B, Tq, H, Dv] in v's dtype; max_logit [H], the maximum of scale * q.k over the batch and all allowed
    pairs, in float32 (float64 for float64 inputs), without gradient, -inf for a head without any pair; and is_bound
    [H], true where max_logit is an upper bound instead.

    With the tiled path NaN or infinity in a token reaches no earlier token and no other document, in the output and in
    the gradients. The other paths multiply forbidden pairs by zero, so there it may.
    """
    _check(q, k, v, cu_seqlens)
    factor: float = q.shape[3] ** -0.5 if scale is None else scale
    if backend is None:
        backend = _fastest(q, k, v, cu_seqlens, clip_threshold)
    if backend == "cudnn":
        if obstacle := cudnn.why_not(q, k, v, cu_seqlens):
            raise ValueError(f"backend='cudnn' cannot run here: {obstacle}; use backend=None to choose one that can")
        o, lse_BHT = cudnn.cudnn_attention(q, k, v, scale=factor)
        return o, *_screened(q, k, lse_BHT, factor, cu_seqlens, clip_threshold)
    if backend == "triton":
        if obstacle := _why_not_packed(q, k, v):
            raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='tiled'")
        from perilune.kernels.attention.packed import packed_attention

        return _exact(*packed_attention(q, k, v, scale=factor, cu_seqlens=cu_seqlens))
    if backend == "flex":
        if obstacle := flex.why_not(q, k, v):
            raise ValueError(f"backend='flex' cannot run here: {obstacle}; use backend='tiled'")
        if clip_threshold is None or _why_not_screened(q, k) is None:
            o, lse_BHT = flex.flex_attention_with_lse(q, k, v, scale=factor, cu_seqlens=cu_seqlens)
            return o, *_screened(q, k, lse_BHT, factor, cu_seqlens, clip_threshold)
        return _exact(*flex.flex_attention_with_max(q, k, v, scale=factor, cu_seqlens=cu_seqlens))
    if backend == "tiled":
        borders = None
        if cu_seqlens is not None:
            borders = document_borders(cu_seqlens, batch=q.shape[0], num_tokens=q.shape[1])
        return _exact(*tiled_attention(q, k, v, scale=factor, borders=borders))
    if backend == "reference":
        if cu_seqlens is not None:
            document_borders(cu_seqlens, batch=q.shape[0], num_tokens=q.shape[1])
        return _exact(*reference_attention(q, k, v, scale=factor, cu_seqlens=cu_seqlens))
    raise ValueError(
        f"backend={backend!r} is unknown: expected 'reference', 'tiled', 'triton', 'cudnn', 'flex' or None to choose"
    )


def _fastest(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, clip_threshold: float | None) -> str:
    has_maxima = clip_threshold is None or _why_not_screened(q, k) is None
    if has_maxima and cudnn.why_not(q, k, v, cu_seqlens) is None:
        return "cudnn"
    if q.device.type == "cuda" and q.dtype != torch.float32 and _why_not_packed(q, k, v) is None:
        return "triton"
    return "tiled" if flex.why_not(q, k, v) else "flex"


def _why_not_packed(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if obstacle := why_not_triton_on(q.device):
        return obstacle
    from perilune.kernels.attention import packed

    return packed.why_not(q, k, v)


def _why_not_screened(q: Tensor, k: Tensor) -> str | None:
    """Why the maxima of these inputs cannot be found from the log-sum-exp, or None."""
    if obstacle := why_not_triton_on(q.device):  # before the import: Triton may not be installed
        return obstacle
    if q.dtype == torch.float32:
        return "float32 tiles of two operands do not fit the tensor cores; the path's own maximum is exact"
    from perilune.kernels.attention import triton

    return triton.why_not(q, k)


def _screened(
    q: Tensor, k: Tensor, lse_BHT: Tensor, scale: float, cu_seqlens: Tensor | None, clip_threshold: float | None
) -> tuple[Tensor, Tensor]:
    if clip_threshold is None:
        # Infinity is a bound on everything.
        return lse_BHT.new_full((q.shape[2],), math.inf), lse_BHT.new_ones(q.shape[2], dtype=torch.bool)
    from perilune.kernels.attention.triton import max_logits

    return max_logits(q, k, lse_BHT, scale=scale, threshold=clip_threshold, cu_seqlens=cu_seqlens)


def _exact(o: Tensor, max_logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return o, max_logit, torch.zeros_like(max_logit, dtype=torch.bool)
