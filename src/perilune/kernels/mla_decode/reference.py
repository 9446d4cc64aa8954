"""Absorbed MLA decoding over a paged cache, sequence by sequence: the definition (arXiv 2405.04434, section 2.1.2).

    s_hj = scale * q_h . c_j            over the first lengths[b] cached rows c_j of sequence b
    o_h  = sum_j softmax_j(s_h) c_j[:latent_dim]            lse_h = log sum_j exp(s_hj)

Row j of sequence b is cache[block_table[b, j // block_size], j % block_size]. A sequence of length 0 gives zeros and
an lse of -inf. Computed in float32, or float64 when an input is; every other path is tested against this one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reference_mla_decode(
    q_BHD: Tensor, cache_PSD: Tensor, block_table_BM: Tensor, lengths_B: Tensor, *, latent_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """o [B, H, latent_dim] in q's dtype and lse [B, H] in the compute dtype."""
    dtype = torch.float64 if torch.float64 in (q_BHD.dtype, cache_PSD.dtype) else torch.float32
    batch, num_heads, _ = q_BHD.shape
    o = torch.zeros(batch, num_heads, latent_dim, dtype=dtype, device=q_BHD.device)
    lse = torch.full((batch, num_heads), float("-inf"), dtype=dtype, device=q_BHD.device)
    for sequence, length in enumerate(lengths_B.tolist()):
        num_blocks = -(-length // cache_PSD.shape[1])
        rows_SD = cache_PSD[block_table_BM[sequence, :num_blocks].long()].flatten(0, 1)[:length].to(dtype)
        if length > 0:
            logits_HS = scale * (q_BHD[sequence].to(dtype) @ rows_SD.T)
            o[sequence] = logits_HS.softmax(dim=-1) @ rows_SD[:, :latent_dim]
            lse[sequence] = logits_HS.logsumexp(dim=-1)
    return o.to(q_BHD.dtype), lse
