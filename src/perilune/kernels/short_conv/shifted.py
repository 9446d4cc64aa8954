"""Causal depthwise convolution as W shifted multiply-adds, with a hand-written backward.

The bulk is computed as if all tokens were one document, block by block so that the partial sums stay in cache. The
first W-1 rows of every document would then see the document before; these border rows are few, and are computed
separately from explicitly gathered windows (initial state or zero where a document has not begun). In the backward
their gradient is taken out of the bulk before it is shifted, so no value ever crosses a border.

Shape letters: T all tokens of the batch in one row, C channels, W width, N documents, R border rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.precision import full_precision

BLOCK_BYTES = {"cpu": 1 << 20}
DEFAULT_BLOCK_BYTES = 1 << 30  # on an accelerator launches cost more than memory


@dataclass(frozen=True, kw_only=True)
class _Borders:
    """Which rows need an explicit window, and where each of its taps (oldest first) comes from."""

    rows: Tensor  # [R]
    window_rows: Tensor  # [R, W] row of x; 0 where outside
    outside: Tensor  # [R, W, 1] true where the tap lies before the document
    window_states: Tensor  # [R, W] row of the states flattened to [N * (W-1)]; 0 where inside
    state_rows: Tensor  # [N * (W-1)] row of x that the final state holds; 0 where it comes from the initial state
    state_outside: Tensor  # [N * (W-1), 1]
    state_states: Tensor  # [N * (W-1)]


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a cached inference tensor could never be used in training
def _find_borders(borders: tuple[int, ...], width: int, device: torch.device) -> _Borders:
    begin, end = torch.tensor(borders[:-1]).view(-1, 1), torch.tensor(borders[1:]).view(-1, 1)
    document = torch.arange(len(begin)).view(-1, 1)
    early = begin + torch.arange(width - 1)
    is_row = early < end
    rows, row_begin, row_document = (x.expand(early.shape)[is_row].unsqueeze(-1) for x in (early, begin, document))

    def locate(tap: Tensor, start: Tensor, owner: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        outside = tap < start
        in_state = owner * (width - 1) + (tap - start + width - 1)
        return (
            torch.where(outside, 0, tap).to(device),
            outside.unsqueeze(-1).to(device),
            (in_state * outside).to(device),
        )

    window_rows, outside, window_states = locate(rows - torch.arange(width - 1, -1, -1), row_begin, row_document)
    state_rows, state_outside, state_states = locate(end - torch.arange(width - 1, 0, -1), begin, document)
    return _Borders(
        rows=rows.flatten().to(device),
        window_rows=window_rows,
        outside=outside,
        window_states=window_states,
        state_rows=state_rows.flatten(),
        state_outside=state_outside.flatten(0, 1),
        state_states=state_states.flatten(),
    )


def shifted_short_conv(x_BTC: Tensor, weight_CW: Tensor, *, initial_state_NCW: Tensor | None, borders: list[int],
                       activation: str | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Same contract as `reference_short_conv`."""
    num_channels, width = weight_CW.shape
    num_documents = len(borders) - 1
    found = _find_borders(tuple(borders), width, x_BTC.device)
    state_rows = None
    if initial_state_NCW is not None:
        state_rows = initial_state_NCW.to(dtype).mT.reshape(num_documents * (width - 1), num_channels)
    x_TC = x_BTC.reshape(-1, num_channels)
    y = x_BTC
    if x_BTC.numel():
        y = _ShiftedConv.apply(x_TC, weight_CW, state_rows, found, activation == "silu", dtype).view(x_BTC.shape)
    final = x_TC.new_zeros(num_documents * (width - 1), num_channels, dtype=dtype) if state_rows is None else state_rows
    if x_BTC.numel() and final.numel():
        inside = x_TC.index_select(0, found.state_rows).to(dtype).masked_fill(found.state_outside, 0)
        outside = final.index_select(0, found.state_states).masked_fill(~found.state_outside, 0)
        final = inside + outside
    return y, final.view(num_documents, width - 1, num_channels).mT


class _ShiftedConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_CW: Tensor, state_rows: Tensor | None, found: _Borders, silu: bool,
                dtype: torch.dtype) -> Tensor:  # fmt: skip
        taps = weight_CW.to(dtype).T.contiguous()
        y = torch.empty_like(x_TC)
        for first, stop in _blocks(x_TC, dtype):
            y[first:stop] = _activate(_bulk(x_TC, taps, first, stop, dtype), silu)
        window = _windows(x_TC, state_rows, found, dtype)
        y[found.rows] = _activate((window * taps).sum(1), silu).to(y.dtype)
        ctx.save_for_backward(x_TC, weight_CW, state_rows)
        ctx.found, ctx.silu, ctx.dtype = found, silu, dtype
        return y

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, dy_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_CW, state_rows = ctx.saved_tensors
        found, silu, dtype = ctx.found, ctx.silu, ctx.dtype
        num_tokens, num_channels = x_TC.shape
        width = weight_CW.shape[1]
        taps = weight_CW.to(dtype).T.contiguous()

        window = _windows(x_TC, state_rows, found, dtype)
        d_border = dy_TC[found.rows].to(dtype)
        if silu:
            d_border = torch.ops.aten.silu_backward(d_border, (window * taps).sum(1))
        is_border = torch.zeros(num_tokens, 1, dtype=torch.bool, device=x_TC.device)
        is_border[found.rows] = True

        dx = torch.empty_like(x_TC)
        d_taps = (window * d_border.unsqueeze(1)).sum(0)
        halo = x_TC.new_zeros(width - 1, num_channels, dtype=dtype)
        for first, stop in reversed(_blocks(x_TC, dtype)):
            size = stop - first
            d_sum = x_TC.new_empty(size + width - 1, num_channels, dtype=dtype)
            d_sum[size:] = halo
            if silu:
                pre = _bulk(x_TC, taps, first, stop, dtype)
                d_sum[:size] = torch.ops.aten.silu_backward(dy_TC[first:stop].to(dtype), pre)
            else:
                d_sum[:size] = dy_TC[first:stop]
            d_sum[:size].masked_fill_(is_border[first:stop], 0)
            dx_block = d_sum[:size] * taps[-1]
            for shift in range(1, width):
                dx_block.addcmul_(d_sum[shift : size + shift], taps[-1 - shift])
            dx[first:stop] = dx_block
            for shift in range(width):
                begin = max(first, shift)
                if begin < stop:
                    source = x_TC[begin - shift : stop - shift].to(dtype)
                    d_taps[-1 - shift] += (source * d_sum[begin - first : size]).sum(0)
            halo = d_sum[: width - 1].clone()

        d_window = d_border.unsqueeze(1) * taps
        dx_border = d_window.masked_fill(found.outside, 0).flatten(0, 1)
        dx.index_add_(0, found.window_rows.flatten(), dx_border.to(dx.dtype))
        d_state = None
        if state_rows is not None:
            d_state = torch.zeros_like(state_rows)
            d_state.index_add_(0, found.window_states.flatten(), d_window.masked_fill(~found.outside, 0).flatten(0, 1))
        return dx, d_taps.T.to(weight_CW.dtype), d_state, None, None, None


def _blocks(x_TC: Tensor, dtype: torch.dtype) -> list[tuple[int, int]]:
    num_tokens, num_channels = x_TC.shape
    block_bytes = BLOCK_BYTES.get(x_TC.device.type, DEFAULT_BLOCK_BYTES)
    size = max(16, block_bytes // (num_channels * dtype.itemsize))
    return [(first, min(first + size, num_tokens)) for first in range(0, num_tokens, size)]


def _bulk(x_TC: Tensor, taps_WC: Tensor, first: int, stop: int, dtype: torch.dtype) -> Tensor:
    """The sum over taps for rows first..stop, as if all tokens were one document."""
    width = taps_WC.shape[0]
    total = x_TC[first:stop].to(dtype) * taps_WC[-1]
    for shift in range(1, width):
        begin = max(first, shift)
        if begin < stop:
            total[begin - first :].addcmul_(x_TC[begin - shift : stop - shift].to(dtype), taps_WC[-1 - shift])
    return total


def _windows(x_TC: Tensor, state_rows: Tensor | None, found: _Borders, dtype: torch.dtype) -> Tensor:
    """[R, W, C]: what each border row convolves."""
    window = x_TC[found.window_rows].to(dtype).masked_fill_(found.outside, 0)
    if state_rows is not None:
        window += state_rows[found.window_states].masked_fill_(~found.outside, 0)
    return window


def _activate(x: Tensor, silu: bool) -> Tensor:
    return F.silu(x, inplace=True) if silu else x
