"""Causal softmax attention over packed documents, with the exact maximum logit of every head as a by-product.

QK-Clip needs that maximum; ordinary fused attention does not hand it out. Paths: `reference.py` (dense, the
definition), `tiled.py` (O(T) memory, any device), `flex.py` (compiled FlexAttention, CUDA).
"""

from torch import Tensor

from perilune.kernels.attention import flex
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
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention inside documents; also the largest logit of every head.

    q [B, Tq, H, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv]; H is a multiple of Hkv, Dv may differ from D. With Tq != Tk
    the last query sits at the last key (decoding with a cache). A query that may see no key gives zeros.
    scale: factor on q.k, by default D ** -0.5.
    cu_seqlens: document borders [0, ..., T] of a packed row (B = 1, Tq = Tk); empty documents are allowed.
    backend: "reference", "tiled" or "flex"; None takes flex where it can run, else tiled.

    Returns o [B, Tq, H, Dv] in v's dtype, and max_logit [H], the maximum of scale * q.k over the batch and all allowed
    pairs, in float32 (float64 for float64 inputs), without gradient; -inf for a head without any pair.

    With the tiled path NaN or infinity in a token reaches no earlier token and no other document, in the output and in
    the gradients. The dense definition and flex multiply forbidden pairs by zero, so there it may.
    """
    _check(q, k, v, cu_seqlens)
    factor: float = q.shape[3] ** -0.5 if scale is None else scale
    obstacle = flex.why_not(q, k, v)
    if backend is None:
        backend = "tiled" if obstacle else "flex"
    if backend == "flex":
        if obstacle:
            raise ValueError(f"backend='flex' cannot run here: {obstacle}; use backend='tiled'")
        return flex.flex_attention_with_max(q, k, v, scale=factor, cu_seqlens=cu_seqlens)
    borders = None
    if cu_seqlens is not None:
        borders = document_borders(cu_seqlens, batch=q.shape[0], num_tokens=q.shape[1])
    if backend == "tiled":
        return tiled_attention(q, k, v, scale=factor, borders=borders)
    if backend == "reference":
        return reference_attention(q, k, v, scale=factor, cu_seqlens=cu_seqlens)
    raise ValueError(f"backend={backend!r} is unknown: expected 'reference', 'tiled', 'flex' or None to choose")
