"""Causal softmax attention over packed documents: the definition, dense, in any dtype.

    s_ij = scale * q_i . k_j                 for j <= i + (Tk - Tq), i and j in the same document
    o_i  = sum_j softmax_j(s_ij) v_j         (zero where query i may see no key)
    max_logit_h = max over batch, i, j of s_ij

Shapes: q [B, Tq, H, D], k [B, Tk, Hkv, D], v [B, Tk, Hkv, Dv]; query head h reads key head h // (H / Hkv).
Logits, softmax and sums are float32 (float64 for float64 inputs) whatever the input dtype.
Memory is O(Tq * Tk): this file says what is right, `tiled.py` says it fast. Only for non-finite inputs is this form too
blunt: a forbidden pair has weight zero, and zero times a NaN in v is NaN.
"""

import torch
from torch import Tensor


def allowed_pairs(num_queries: int, num_keys: int, cu_seqlens: Tensor | None, device: torch.device) -> Tensor:
    """Boolean [Tq, Tk]: query i may read key j. Queries are aligned with the last keys (decoding with a cache)."""
    query_positions = torch.arange(num_queries, device=device) + (num_keys - num_queries)
    key_positions = torch.arange(num_keys, device=device)
    allowed = key_positions[None, :] <= query_positions[:, None]
    if cu_seqlens is not None:
        document = torch.searchsorted(cu_seqlens.to(device)[1:].contiguous(), key_positions, right=True)
        allowed = allowed & (document[:, None] == document[None, :])
    return allowed


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o [B, Tq, H, Dv] in v's dtype and the detached max_logit [H]."""
    compute_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, num_queries, num_heads, _ = q.shape
    num_keys, num_kv_heads = k.shape[1], k.shape[2]
    group = num_heads // num_kv_heads
    q_BHTD = q.transpose(1, 2).to(compute_dtype)
    k_BHTD = k.transpose(1, 2).to(compute_dtype).repeat_interleave(group, dim=1)
    v_BHTV = v.transpose(1, 2).to(compute_dtype).repeat_interleave(group, dim=1)

    allowed = allowed_pairs(num_queries, num_keys, cu_seqlens, q.device)
    logits = (q_BHTD @ k_BHTD.transpose(-1, -2)) * scale
    if batch * num_queries * num_keys == 0:
        max_logit = logits.new_full((num_heads,), float("-inf"))
    else:
        max_logit = logits.detach().masked_fill(~allowed, float("-inf")).amax(dim=(0, 2, 3))
    # A row without any key has softmax 0/0: giving it finite logits and zeroing it afterwards keeps NaN out of both
    # the output and the gradient.
    sees_a_key = allowed.any(dim=-1, keepdim=True)
    weights = logits.masked_fill(~(allowed | ~sees_a_key), float("-inf")).softmax(dim=-1) * sees_a_key
    o_BTHV = (weights @ v_BHTV).transpose(1, 2)
    return o_BTHV.to(v.dtype), max_logit
