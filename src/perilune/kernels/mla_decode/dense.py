"""Absorbed MLA decoding in plain torch: the pages of all sequences gathered into one rectangle, two matrix products.

Any device and dtype; it copies the whole cache of the batch and reads past the shorter sequences, so it is the path for
a CPU and for small batches, not for long context on a GPU, where nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_mla_decode(
    q_BHD: Tensor, cache_PSD: Tensor, block_table_BM: Tensor, lengths_B: Tensor, *, latent_dim: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Same contract as `reference_mla_decode`."""
    dtype = torch.float64 if torch.float64 in (q_BHD.dtype, cache_PSD.dtype) else torch.float32
    num_heads, page_size = q_BHD.shape[1], cache_PSD.shape[1]
    capacity = block_table_BM.shape[1] * page_size
    if q_BHD.device.type == "cpu" and lengths_B.numel():
        capacity = min(capacity, int(lengths_B.max()))  # elsewhere the host would wait
    if capacity == 0:
        o = q_BHD.new_zeros(q_BHD.shape[0], num_heads, latent_dim)
        return o, torch.full(q_BHD.shape[:2], float("-inf"), dtype=dtype, device=q_BHD.device)
    # Entries of the table past the end of a sequence may hold anything, -1 for instance, and so may rows: in their
    # place the first row of the sequence is read, and weighs nothing.
    token_T = torch.arange(capacity, device=q_BHD.device)
    outside_BT = token_T >= lengths_B.unsqueeze(-1)
    token_BT = token_T.masked_fill(outside_BT, 0)
    pages_BT = block_table_BM.long().gather(1, token_BT // page_size).masked_fill_(lengths_B.unsqueeze(-1) == 0, 0)
    rows_BT = (pages_BT * page_size).add_(token_BT % page_size)
    rows_BTD = cache_PSD.flatten(0, 1).index_select(0, rows_BT.flatten()).to(dtype).unflatten(0, rows_BT.shape)
    logits_BHT = torch.bmm(q_BHD.to(dtype) * scale, rows_BTD.mT).masked_fill_(outside_BT.unsqueeze(1), float("-inf"))
    lse_BH = logits_BHT.logsumexp(dim=-1)
    weights = torch.exp(logits_BHT - lse_BH.clamp(min=torch.finfo(dtype).min).unsqueeze(-1))
    o = torch.bmm(weights, rows_BTD[..., :latent_dim])
    return o.masked_fill_((lengths_B == 0).view(-1, 1, 1), 0).to(q_BHD.dtype), lse_BH


def attend_rows(
    q_BHD: Tensor, rows_BTD: Tensor, outside_B1T: Tensor | None, *, latent_dim: int, scale: float
) -> Tensor:
    """o [B, H, latent_dim] over latents that are already gathered; `outside` is true at those that do not count."""
    dtype = torch.float64 if torch.float64 in (q_BHD.dtype, rows_BTD.dtype) else torch.float32
    rows_BTD = rows_BTD.to(dtype)
    logits_BHT = torch.bmm(q_BHD.to(dtype) * scale, rows_BTD.mT)
    if outside_B1T is not None:
        logits_BHT.masked_fill_(outside_B1T, float("-inf"))
    return torch.bmm(logits_BHT.softmax(dim=-1), rows_BTD[..., :latent_dim]).to(q_BHD.dtype)
