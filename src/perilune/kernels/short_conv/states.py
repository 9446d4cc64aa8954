"""Decode states of the convolution in plain torch, with document borders that stay on the device.

The state of a document is a window of W-1 rows over [initial state | its rows]; before the first row it is the initial
state, after the last one it is what the next token will see. Both ends are a few rows per document.

Shape letters: B batch, T tokens, C channels, W width, N sequences (B, or the number of packed documents).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def final_state(x_BTC: Tensor, initial_state_NCW: Tensor | None, cu_seqlens: Tensor | None, width: int) -> Tensor:
    """The last W-1 rows of every document, [N, C, W-1] in float32; differentiable."""
    begin, end, x_TC = _documents(x_BTC, cu_seqlens)
    rows = end - torch.arange(width - 1, 0, -1, device=x_TC.device)
    inside = _gather(x_TC, rows, rows >= begin)
    if initial_state_NCW is None:
        return inside
    slots = (rows - begin + width - 1).clamp(0, max(width - 2, 0))
    before = initial_state_NCW.float().gather(2, slots.unsqueeze(1).expand(-1, x_TC.shape[1], -1))
    return torch.where((rows >= begin).unsqueeze(1), inside, before)


def state_gradient(dy_BTC: Tensor, x_BTC: Tensor, weight_CW: Tensor, cu_seqlens: Tensor | None,
                   initial_state_NCW: Tensor, silu: bool) -> Tensor:  # fmt: skip
    """Gradient of the initial states: only the first W-1 rows of a document see them."""
    width = weight_CW.shape[1]
    begin, end, x_TC = _documents(x_BTC, cu_seqlens)
    rows = begin + torch.arange(width - 1, device=x_TC.device)
    weight = weight_CW.float()
    head = torch.cat((initial_state_NCW.float(), _gather(x_TC, rows, rows < end)), dim=-1)
    d_total = _gather(dy_BTC.reshape(x_TC.shape), rows, rows < end)
    if silu:
        total = (head.unfold(-1, width, 1) * weight.unsqueeze(1)).sum(-1) if width > 1 else head
        d_total = torch.ops.aten.silu_backward(d_total, total)
    d_state = torch.zeros_like(head[..., : width - 1])
    for i in range(width - 1):
        d_state[..., i:] += d_total[..., i : i + 1] * weight[:, : width - 1 - i]
    return d_state.to(initial_state_NCW.dtype)


def _documents(x_BTC: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(first rows [N, 1], rows after the last [N, 1], all rows [B * T, C])"""
    batch, num_tokens, num_channels = x_BTC.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, device=x_BTC.device) * num_tokens
    borders = cu_seqlens.to(torch.int64).unsqueeze(1)
    return borders[:-1], borders[1:], x_BTC.reshape(batch * num_tokens, num_channels)


def _gather(x_TC: Tensor, rows_NR: Tensor, valid_NR: Tensor) -> Tensor:
    """[N, C, R] in float32, zero where not valid."""
    x_TC = F.pad(x_TC, (0, 0, 0, 1)) if x_TC.shape[0] == 0 else x_TC  # a row to point at
    rows = x_TC[torch.where(valid_NR, rows_NR, 0)].float()
    return rows.masked_fill(~valid_NR.unsqueeze(-1), 0.0).transpose(1, 2)
