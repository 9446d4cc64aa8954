"""Absorbed MLA decoding in plain torch: the pages of all sequences gathered into one rectangle, two matrix products.

Any device and dtype; it copies the whole cache of the batch and reads past the shorter sequences, so it is the path for
a CPU and for small batches, not for long context on a GPU. Nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_mla_decode(
    q_BHD: Tensor, cache_PSD: Tensor, block_table_BM: Tensor, lengths_B: Tensor, *, latent_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference_mla_decode`."""
    dtype = torch.float64 if torch.float64 in (q_BHD.dtype, cache_PSD.dtype) else torch.float32
    batch, max_blocks = block_table_BM.shape
    capacity = max_blocks * cache_PSD.shape[1]
    valid_BT = torch.arange(capacity, device=q_BHD.device) < lengths_B.unsqueeze(-1)
    if capacity == 0:
        o = torch.zeros(*q_BHD.shape[:2], latent_dim, dtype=q_BHD.dtype, device=q_BHD.device)
        return o, torch.full(q_BHD.shape[:2], float("-inf"), dtype=dtype, device=q_BHD.device)
    # Entries of the table past the end of a sequence may hold anything, -1 for instance.
    in_use = valid_BT[:, :: cache_PSD.shape[1]]
    pages = block_table_BM.long().masked_fill(~in_use, 0)
    rows_BTD = cache_PSD[pages].flatten(1, 2).to(dtype).masked_fill(~valid_BT.unsqueeze(-1), 0)
    logits_BHT = scale * (q_BHD.to(dtype) @ rows_BTD.mT)
    logits_BHT = logits_BHT.masked_fill(~valid_BT.unsqueeze(1), float("-inf"))
    lse_BH = logits_BHT.logsumexp(dim=-1)
    weights = torch.exp(logits_BHT - lse_BH.clamp(min=torch.finfo(dtype).min).unsqueeze(-1))
    return (weights @ rows_BTD[..., :latent_dim]).to(q_BHD.dtype), lse_BH
