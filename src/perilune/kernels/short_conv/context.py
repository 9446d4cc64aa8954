"""The short convolution over a row whose parts are on different ranks: each part is given the last rows before it."""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.collectives import exchanged
from perilune.kernels.context import ContextPart
from perilune.kernels.short_conv import short_conv


def context_short_conv(x: Tensor, weight: Tensor, *, part: ContextPart, activation: str | None = "silu") -> Tensor:
    """`short_conv` of this rank's part x [B, T, C], differentiable across ranks."""
    batch, num_tokens, num_channels = x.shape
    halo = weight.shape[1] - 1
    if num_tokens < halo:
        raise ValueError(
            f"x has {num_tokens} tokens a rank, fewer than the {halo} a convolution of width {halo + 1} looks back: "
            "use fewer context ranks or longer rows"
        )
    ranks = part.group.size()
    send = [batch * halo if rank == part.rank + 1 else 0 for rank in range(ranks)]
    receive = [batch * halo if rank == part.rank - 1 else 0 for rank in range(ranks)]
    last = x[:, num_tokens - halo :].flatten(0, 1)
    received = exchanged(last[: sum(send)], send=send, receive=receive, group=part.group)
    # Concatenated also where nothing comes, so that the gradient takes the way back on every rank.
    missing = x.new_zeros(batch * halo - sum(receive), num_channels)
    before = torch.cat([missing, received]).view(batch, halo, num_channels)
    known = torch.arange(halo, device=x.device) >= halo - part.before
    state = (before * known[:, None].to(before.dtype)).mT
    if part.borders is not None:
        state = torch.cat([state, state.new_zeros(len(part.borders) - 2, *state.shape[1:])])
    y, _ = short_conv(x, weight, cu_seqlens=part.cu_seqlens(x), initial_state=state, activation=activation)
    return y
