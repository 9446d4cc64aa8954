"""Causal attention of the queries of one rank's part of a row to keys that begin on earlier ranks.

Only the first document of a part can have keys before it: its queries are the last ones of that document so far, which
`attention` knows from decoding. The other documents lie inside the part and are packed as ever.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.attention import attention
from perilune.kernels.context import ContextPart


def context_attention(
    q: Tensor, k: Tensor, v: Tensor, *, part: ContextPart, scale: float, clip_threshold: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention`: q [B, T, H, D]; k, v [B, before + T, H, ...], the first document's on earlier ranks included."""
    options = {"scale": scale, "clip_threshold": clip_threshold}
    end, before = part.first_end, part.before
    if part.borders is None or part.is_one_document:
        return attention(q, k, v, **options)
    if before == 0:
        return attention(q, k, v, cu_seqlens=part.cu_seqlens(q), **options)
    first = attention(q[:, :end], k[:, : before + end], v[:, : before + end], **options)
    inner = torch.tensor([border - end for border in part.borders[1:]], dtype=torch.int32, device=q.device)
    rest = attention(q[:, end:], k[:, before + end :], v[:, before + end :], cu_seqlens=inner, **options)
    maxima = torch.fmax(first[1], rest[1])
    # The larger of an exact maximum and a bound is a bound where the bound is the larger one.
    is_bound = torch.where(first[1] >= rest[1], first[2], rest[2])
    return torch.cat([first[0], rest[0]], dim=1), maxima, is_bound
