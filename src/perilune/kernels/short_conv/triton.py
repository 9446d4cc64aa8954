"""Causal depthwise convolution with fused SiLU in one pass over memory each way.

    pre_t  = sum_d weight[:, W-1-d] * x_{t-d}          y_t = silu(pre_t)
    dpre_t = dy_t * silu'(pre_t)                       recomputed from x: nothing but x is kept for the backward
    dx_t   = sum_d weight[:, W-1-d] * dpre_{t+d}       dweight[:, W-1-d] = sum_t dpre_t * x_{t-d}

A program walks down a run of tokens with a few hundred channels and keeps the last W-1 rows (and, in the backward, the
W-1 unfinished rows of dx) in registers, so every element is read once. In the middle of a document it has no borders to
check, and its loads run ahead of its work, through shared memory: kept in registers, the compiler would issue them too
late. dweight is summed per run and the runs are added up afterwards, in a fixed order.

The borders of packed documents are looked up on the device: the host never waits for them.

q, k and v of an attention layer are one x of three parts: y (and dy) are then three tensors, x and dx stay one.

Shape letters: B batch, T tokens, C channels, W width, N sequences (B, or the number of packed documents), P runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import device_of
from perilune.kernels.launch import launch as quick_launch
from perilune.kernels.norm.triton import add_shares
from perilune.kernels.operator import operator
from perilune.kernels.short_conv.states import final_state, state_gradient
from perilune.kernels.triton_activations import sigmoid

MAX_WIDTH = 8
MOST_SHARES = 2**31  # offsets that fit into 32 bits
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Launch:
    run: int
    """Rows one program walks over, the W-1 rows it shares with the next run in the backward included."""
    rows: int
    """Rows loaded together; divides `run`."""
    stages: int
    """Loads are this many such groups ahead, less one."""
    channels: int
    num_warps: int


# By direction and bytes per element. In half precision within 1% of the best of nine and of eight on an H200, 8 x 4,096
# tokens of 3 x 1,024 channels: 0.120 and 0.215 ms, where memory alone takes 0.094 and 0.141.
LAUNCHES = {
    ("forward", 2): Launch(run=32, rows=4, stages=3, channels=512, num_warps=4),
    ("forward", 4): Launch(run=64, rows=4, stages=3, channels=256, num_warps=2),
    ("backward", 2): Launch(run=64, rows=4, stages=3, channels=256, num_warps=2),
    ("backward", 4): Launch(run=64, rows=4, stages=3, channels=256, num_warps=2),
}


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@triton.jit(do_not_specialize=["num_tokens", "num_documents", "num_steps"])
def _origins_kernel(cu_seqlens, origins, num_tokens, num_documents, num_steps, BLOCK: tl.constexpr):
    """For every token the first token of its document, and the document's number: bisection over the borders."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros((BLOCK,), tl.int32)
    high = low + num_documents
    for _ in range(num_steps):
        middle = (low + high) // 2
        open_ = low < high
        ends_before = tl.load(cu_seqlens + middle + 1, mask=open_, other=0).to(tl.int32) <= token
        low = tl.where(open_ & ends_before, middle + 1, low)
        high = tl.where(open_ & (ends_before == 0), middle, high)
    document = tl.minimum(low, num_documents - 1)
    start = tl.load(cu_seqlens + document).to(tl.int32)
    inside = token < num_tokens
    tl.store(origins + token, start, mask=inside)
    tl.store(origins + num_tokens + token, document, mask=inside)


@triton.jit
def _origin(origins, token, batch, num_tokens, PACKED: tl.constexpr):
    """(first token, number) of the document that holds this token of this batch row."""
    if PACKED:
        at = tl.minimum(tl.maximum(token, 0), num_tokens - 1)
        return tl.load(origins + at), tl.load(origins + num_tokens + at)
    return tl.zeros((), tl.int32), batch


@triton.jit
def _place(blocks, PARTS: tl.constexpr):
    """(block of channels, part, piece of tokens) of this program; channels of the same tokens run side by side."""
    across = blocks * PARTS
    lane = tl.program_id(0) % across
    return lane % blocks, lane // blocks, tl.program_id(0) // across


@triton.jit
def _taps(weight, column, columns, WIDTH: tl.constexpr):
    """(weight of the current token, of the one before, ...), float32."""
    taps = ()
    for d in tl.static_range(WIDTH):
        place = weight + column * WIDTH + (WIDTH - 1 - d)
        taps = taps + (tl.load(place, mask=column < columns, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _load_row(pointer, token, num_tokens, stride, column, columns):
    """A row of `columns` channels, zeros outside the sequence."""
    present = tl.where((token >= 0) & (token < num_tokens), columns, 0)
    return tl.load(pointer + token.to(tl.int64) * stride + column, mask=column < present, other=0.0)


@triton.jit
def _load_rows(pointer, stride, column, columns, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """ROWS rows that are known to lie inside the sequence; WHOLE: the block has no column too many."""
    rows = ()
    for i in tl.static_range(ROWS):
        if WHOLE:
            rows = rows + (tl.load(pointer + i * stride + column),)
        else:
            rows = rows + (tl.load(pointer + i * stride + column, mask=column < columns, other=0.0),)
    return rows


@triton.jit
def _store_row(pointer, value, column, columns, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer + column, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + column, value.to(pointer.dtype.element_ty), mask=column < columns)


@triton.jit
def _seen(window, token, start, document, state, state_stride, column, columns, WIDTH: tl.constexpr,
          HAS_STATE: tl.constexpr):  # fmt: skip
    """The W-1 rows before `token` as its document sees them: nothing, or its initial state, before its first row."""
    seen = ()
    for d in tl.static_range(1, WIDTH):
        value = tl.where(token - d >= start, window[d - 1], 0.0)
        if HAS_STATE:
            slot = token - d - start + WIDTH - 1
            present = tl.where((slot >= 0) & (slot < WIDTH - 1), columns, 0)
            place = state + document.to(tl.int64) * state_stride + column * (WIDTH - 1) + slot
            value += tl.load(place, mask=column < present, other=0.0).to(tl.float32)
        seen = seen + (value,)
    return seen


@triton.jit
def _total(row, seen, taps, WIDTH: tl.constexpr):
    total = row * taps[0]
    for d in tl.static_range(1, WIDTH):
        total += seen[d - 1] * taps[d]
    return total


@triton.jit
def _window_before(x, first, num_tokens, stride, column, columns, WIDTH: tl.constexpr):
    """The W-1 rows before row `first`, nearest first; zeros before the sequence."""
    window = ()
    for d in tl.static_range(1, WIDTH):
        window = window + (_load_row(x, first - d, num_tokens, stride, column, columns).to(tl.float32),)
    return window


@triton.jit
def _moved(window, row, WIDTH: tl.constexpr):
    """The window one row further on."""
    if WIDTH > 1:
        return (row,) + window[: WIDTH - 2]
    return window


@triton.jit
def _forward_inside(x, window, taps, y, first, x_stride, y_stride, column, columns, WIDTH: tl.constexpr,
                    RUN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, SILU: tl.constexpr,
                    WHOLE: tl.constexpr):  # fmt: skip
    """A run in the middle of a document."""
    x += first.to(tl.int64) * x_stride
    y += first.to(tl.int64) * y_stride
    for _ in tl.range(RUN // ROWS, num_stages=STAGES):
        rows = _load_rows(x, x_stride, column, columns, ROWS, WHOLE)
        for i in tl.static_range(ROWS):
            row = rows[i].to(tl.float32)
            total = _total(row, window, taps, WIDTH)
            if SILU:
                total *= sigmoid(total)
            _store_row(y + i * y_stride, total, column, columns, WHOLE)
            window = _moved(window, row, WIDTH)
        x += ROWS * x_stride
        y += ROWS * y_stride


@triton.jit
def _forward_at_borders(x, window, taps, y, origins, state, batch, first, num_tokens, x_stride, y_stride, state_stride,
                        column, columns, WIDTH: tl.constexpr, RUN: tl.constexpr, SILU: tl.constexpr,
                        PACKED: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    """A run that meets the first or last row of a document: row by row, with every check."""
    for step in range(tl.minimum(RUN, num_tokens - first)):
        token = first + step
        start, document = _origin(origins, token, batch, num_tokens, PACKED)
        seen = _seen(window, token, start, document, state, state_stride, column, columns, WIDTH, HAS_STATE)
        row = _load_row(x, token, num_tokens, x_stride, column, columns).to(tl.float32)
        total = _total(row, seen, taps, WIDTH)
        if SILU:
            total *= sigmoid(total)
        _store_row(y + token.to(tl.int64) * y_stride, total, column, columns, False)
        window = _moved(window, row, WIDTH)


@triton.jit(do_not_specialize=["num_tokens", "runs"])
def _forward_kernel(x, weight, y0, y1, y2, origins, state, num_tokens, columns, blocks, runs, x_batch, x_stride,
                    y_batch, y_stride, PARTS: tl.constexpr, WIDTH: tl.constexpr, RUN: tl.constexpr,
                    ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
                    SILU: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr):  # fmt: skip
    block, part, piece = _place(blocks, PARTS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    batch, first = piece // runs, (piece % runs) * RUN
    x += batch.to(tl.int64) * x_batch + part * columns
    y = y0
    if PARTS == 3:
        y = y0 if part == 0 else (y1 if part == 1 else y2)
    y += batch.to(tl.int64) * y_batch
    taps = _taps(weight + part * columns * WIDTH, column, columns, WIDTH)
    window = _window_before(x, first, num_tokens, x_stride, column, columns, WIDTH)
    # No row of the run sees a border when its last row's document begins before the first row its window reaches.
    last_start, _ = _origin(origins, first + RUN - 1, batch, num_tokens, PACKED)
    if (last_start <= first - (WIDTH - 1)) & (first + RUN <= num_tokens):
        _forward_inside(x, window, taps, y, first, x_stride, y_stride, column, columns, WIDTH, RUN, ROWS, STAGES, SILU,
                        WHOLE)  # fmt: skip
    else:
        state += part * columns * (WIDTH - 1)
        state_stride = PARTS * columns * (WIDTH - 1)
        _forward_at_borders(x, window, taps, y, origins, state, batch, first, num_tokens, x_stride, y_stride,
                            state_stride, column, columns, WIDTH, RUN, SILU, PACKED, HAS_STATE)  # fmt: skip


@triton.jit
def _d_total(dy, row, seen, taps, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """Gradient of the sum before the activation."""
    gradient = dy.to(tl.float32)
    if SILU:
        total = _total(row, seen, taps, WIDTH)
        chance = sigmoid(total)
        gradient *= chance * (1.0 + total * (1.0 - chance))
    return gradient


@triton.jit
def _d_taps(sums, gradient, row, seen, WIDTH: tl.constexpr):
    added = (sums[0] + gradient * row,)
    for d in tl.static_range(1, WIDTH):
        added = added + (sums[d] + gradient * seen[d - 1],)
    return added


@triton.jit
def _zeros(like, COUNT: tl.constexpr):
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = zeros + (like * 0.0,)
    return zeros


@triton.jit
def _store_sums(partials, stride, sums, column, columns, WIDTH: tl.constexpr):
    for d in tl.static_range(WIDTH):
        _store_row(partials + (WIDTH - 1 - d) * stride, sums[d], column, columns, False)


@triton.jit
def _backward_inside(dy, x, window, taps, dx, partials, first, dy_stride, x_stride, dx_stride, partial_stride, column,
                     columns, WIDTH: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                     SILU: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    x += first.to(tl.int64) * x_stride
    dy += first.to(tl.int64) * dy_stride
    dx += (first - (WIDTH - 1)).to(tl.int64) * dx_stride
    unfinished = _zeros(taps[0], WIDTH - 1)
    sums = _zeros(taps[0], WIDTH)
    for step in tl.range(RUN // ROWS, num_stages=STAGES):
        rows = _load_rows(x, x_stride, column, columns, ROWS, WHOLE)
        gradients = _load_rows(dy, dy_stride, column, columns, ROWS, WHOLE)
        for i in tl.static_range(ROWS):
            row = rows[i].to(tl.float32)
            gradient = _d_total(gradients[i], row, window, taps, WIDTH, SILU)
            counted = gradient
            if i + WIDTH > ROWS:  # the last W-1 rows of the run are the next run's to count
                counted = tl.where(step * ROWS + i < RUN - (WIDTH - 1), gradient, 0.0)
            sums = _d_taps(sums, counted, row, window, WIDTH)
            done = gradient * taps[0]
            if WIDTH > 1:  # dx of the row d rows up gains taps[d] * gradient; the furthest is complete
                moved = (done,)
                for d in tl.static_range(1, WIDTH):
                    moved = moved + (unfinished[d - 1] + gradient * taps[d],)
                done = moved[WIDTH - 1]
                unfinished = moved[: WIDTH - 1]
            if i >= WIDTH - 1:
                _store_row(dx + i * dx_stride, done, column, columns, WHOLE)
            else:  # a row of the run before, unless this is past the beginning
                present = tl.where(step * ROWS + i >= WIDTH - 1, columns, 0)
                _store_row(dx + i * dx_stride, done, column, present, False)
            window = _moved(window, row, WIDTH)
        x += ROWS * x_stride
        dy += ROWS * dy_stride
        dx += ROWS * dx_stride
    _store_sums(partials, partial_stride, sums, column, columns, WIDTH)


@triton.jit
def _backward_at_borders(dy, x, window, taps, dx, partials, origins, state, batch, first, num_tokens, dy_stride,
                         x_stride, dx_stride, state_stride, partial_stride, column, columns, WIDTH: tl.constexpr,
                         RUN: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
                         HAS_STATE: tl.constexpr):  # fmt: skip
    unfinished = _zeros(taps[0], WIDTH - 1)
    sums = _zeros(taps[0], WIDTH)
    for step in range(tl.minimum(RUN, num_tokens + WIDTH - 1 - first)):
        token = first + step
        start, document = _origin(origins, token, batch, num_tokens, PACKED)
        seen = _seen(window, token, start, document, state, state_stride, column, columns, WIDTH, HAS_STATE)
        row = _load_row(x, token, num_tokens, x_stride, column, columns).to(tl.float32)
        d_row = _load_row(dy, token, num_tokens, dy_stride, column, columns)
        gradient = _d_total(d_row, row, seen, taps, WIDTH, SILU)
        counted = tl.where(step < RUN - (WIDTH - 1), gradient, 0.0)
        sums = _d_taps(sums, counted, row, seen, WIDTH)
        done = gradient * taps[0]
        if WIDTH > 1:
            moved = (done,)
            for d in tl.static_range(1, WIDTH):
                gain = tl.where(token - d >= start, gradient * taps[d], 0.0)
                moved = moved + (unfinished[d - 1] + gain,)
            done = moved[WIDTH - 1]
            unfinished = moved[: WIDTH - 1]
        finished = token - (WIDTH - 1)
        present = tl.where((finished >= first) & (finished < num_tokens), columns, 0)
        _store_row(dx + finished.to(tl.int64) * dx_stride, done, column, present, False)
        window = _moved(window, row, WIDTH)
    _store_sums(partials, partial_stride, sums, column, columns, WIDTH)


@triton.jit
def _backward_kernel(dy0, dy1, dy2, x, weight, dx, partials, origins, state, num_tokens, columns, blocks, runs,
                     dy_batch, dy_stride, x_batch, x_stride, dx_batch, dx_stride, PARTS: tl.constexpr,
                     WIDTH: tl.constexpr, RUN: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
                     BLOCK: tl.constexpr,
                     WHOLE: tl.constexpr, SILU: tl.constexpr, PACKED: tl.constexpr,
                     HAS_STATE: tl.constexpr):  # fmt: skip
    block, part, piece = _place(blocks, PARTS)
    column = block * BLOCK + tl.arange(0, BLOCK)
    batch, first = piece // runs, (piece % runs) * (RUN - WIDTH + 1)
    x += batch.to(tl.int64) * x_batch + part * columns
    dx += batch.to(tl.int64) * dx_batch + part * columns
    dy = dy0
    if PARTS == 3:
        dy = dy0 if part == 0 else (dy1 if part == 1 else dy2)
    dy += batch.to(tl.int64) * dy_batch
    partial_stride = PARTS * columns
    partials += piece.to(tl.int64) * partial_stride * WIDTH + part * columns
    taps = _taps(weight + part * columns * WIDTH, column, columns, WIDTH)
    window = _window_before(x, first, num_tokens, x_stride, column, columns, WIDTH)
    last_start, _ = _origin(origins, first + RUN - 1, batch, num_tokens, PACKED)
    if (last_start <= first - (WIDTH - 1)) & (first + RUN <= num_tokens):
        _backward_inside(dy, x, window, taps, dx, partials, first, dy_stride, x_stride, dx_stride, partial_stride,
                         column, columns, WIDTH, RUN, ROWS, STAGES, SILU, WHOLE)  # fmt: skip
    else:
        state += part * columns * (WIDTH - 1)
        state_stride = PARTS * columns * (WIDTH - 1)
        _backward_at_borders(dy, x, window, taps, dx, partials, origins, state, batch, first, num_tokens, dy_stride,
                             x_stride, dx_stride, state_stride, partial_stride, column, columns, WIDTH, RUN, SILU,
                             PACKED, HAS_STATE)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Launching


def document_origins(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[2, T] int32: the first token of every token's document, and the document's number. No wait for the device."""
    origins = torch.empty(2, num_tokens, dtype=torch.int32, device=cu_seqlens.device)
    num_documents = cu_seqlens.numel() - 1
    if num_tokens:
        grid = (triton.cdiv(num_tokens, 256),)
        steps = num_documents.bit_length()
        with device_of(cu_seqlens):
            _origins_kernel[grid](
                cu_seqlens.contiguous(), origins, num_tokens, num_documents, steps, BLOCK=256, num_warps=4
            )
    return origins


def forward_parts(x_BTC: Tensor, weight_CW: Tensor, *, parts: int, origins: Tensor | None, state: Tensor | None,
                  silu: bool, launch: Launch | None = None) -> list[Tensor]:  # fmt: skip
    """y in `parts` (1 or 3) tensors [B, T, C / parts]. x needs unit stride over channels, and may have any others.

    Strides that are multiples of 16 are read in whole vectors; others cost about twice the time.
    """
    batch, num_tokens, num_channels = x_BTC.shape
    part_channels = num_channels // parts
    outputs = [x_BTC.new_empty(batch, num_tokens, part_channels) for _ in range(parts)]
    if x_BTC.numel() == 0:
        return outputs
    launch = launch or LAUNCHES["forward", x_BTC.element_size()]
    block = min(launch.channels, triton.next_power_of_2(part_channels))
    blocks, runs = triton.cdiv(part_channels, block), triton.cdiv(num_tokens, launch.run)
    constants = {
        "PARTS": parts, "WIDTH": weight_CW.shape[1], "RUN": launch.run, "ROWS": launch.rows, "STAGES": launch.stages,
        "BLOCK": block, "WHOLE": part_channels % block == 0, "SILU": silu, "PACKED": origins is not None,
        "HAS_STATE": state is not None, "num_warps": launch.num_warps,
    }  # fmt: skip
    quick_launch(
        _forward_kernel, blocks * parts * runs * batch,
        (
            x_BTC, weight_CW.contiguous(), outputs[0], outputs[parts // 2], outputs[-1],
            x_BTC if origins is None else origins, x_BTC if state is None else state.contiguous(),
            num_tokens, part_channels, blocks, runs, x_BTC.stride(0), x_BTC.stride(1), num_tokens * part_channels,
            part_channels,
        ),
        ("short_conv", *constants.values()), constants,
    )  # fmt: skip
    return outputs


def backward_parts(dy_parts: list[Tensor], x_BTC: Tensor, weight_CW: Tensor, *, dx_BTC: Tensor, origins: Tensor | None,
                   state: Tensor | None, silu: bool, launch: Launch | None = None) -> Tensor:  # fmt: skip
    """Writes dx_BTC (unit stride over channels) and returns dweight [C, W] in float32."""
    batch, num_tokens, num_channels = x_BTC.shape
    width = weight_CW.shape[1]
    if x_BTC.numel() == 0:
        return torch.zeros(weight_CW.shape, dtype=torch.float32, device=x_BTC.device)
    parts = len(dy_parts)
    part_channels = num_channels // parts
    strides = {(dy.stride(0), dy.stride(1), dy.stride(2)) for dy in dy_parts}
    if len(strides) > 1 or dy_parts[0].stride(2) != 1:
        dy_parts = [dy.contiguous() for dy in dy_parts]
    launch = launch or LAUNCHES["backward", x_BTC.element_size()]
    block = min(launch.channels, triton.next_power_of_2(part_channels))
    blocks, runs = triton.cdiv(part_channels, block), triton.cdiv(num_tokens, launch.run - width + 1)
    partials = torch.empty(runs * batch, width, num_channels, dtype=torch.float32, device=x_BTC.device)
    with device_of(dy_parts[0]):
        _backward_kernel[(blocks * parts * runs * batch,)](
            dy_parts[0], dy_parts[parts // 2], dy_parts[-1], x_BTC, weight_CW.contiguous(), dx_BTC, partials,
            x_BTC if origins is None else origins, x_BTC if state is None else state.contiguous(),
            num_tokens, part_channels, blocks, runs, dy_parts[0].stride(0), dy_parts[0].stride(1), x_BTC.stride(0),
            x_BTC.stride(1), dx_BTC.stride(0), dx_BTC.stride(1),
            PARTS=parts, WIDTH=width, RUN=launch.run, ROWS=launch.rows, STAGES=launch.stages, BLOCK=block,
            WHOLE=part_channels % block == 0, SILU=silu, PACKED=origins is not None, HAS_STATE=state is not None,
            num_warps=launch.num_warps,
        )  # fmt: skip
    return (add_shares(partials) if partials.numel() < MOST_SHARES else partials.sum(0)).T


def rows_with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# The operator


def _forward(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None, silu: bool) -> Tensor:
    origins = None if cu_seqlens is None else document_origins(cu_seqlens, x.shape[1])
    x = rows_with_unit_stride(x)
    (y,) = forward_parts(x, weight, parts=1, origins=origins, state=initial_state, silu=silu)
    return y


def _backward(dy: Tensor, x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None,
                         silu: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    origins = None if cu_seqlens is None else document_origins(cu_seqlens, x.shape[1])
    x = rows_with_unit_stride(x)
    dx = x.new_empty(x.shape)
    dweight = backward_parts([dy], x, weight, dx_BTC=dx, origins=origins, state=initial_state, silu=silu)
    return dx, dweight.to(weight.dtype).contiguous()


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cu_seqlens, initial_state, ctx.silu = inputs
    ctx.save_for_backward(x, weight, cu_seqlens, initial_state)
    ctx.wants_state_gradient = initial_state is not None and initial_state.requires_grad


def _gradients(ctx: Any, backward: Callable[..., tuple[Tensor, Tensor]], dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cu_seqlens, initial_state = ctx.saved_tensors
    dx, dweight = backward(dy, x, weight, cu_seqlens, initial_state, ctx.silu)
    d_state = None
    if ctx.wants_state_gradient:
        d_state = state_gradient(dy, x, weight, cu_seqlens, initial_state, ctx.silu)
    return dx, dweight, None, d_state, None


_short_conv = operator(
    "short_conv",
    forward=_forward,
    backward=_backward,
    fake_forward=lambda x, weight, cu_seqlens, initial_state, silu: x.new_empty(x.shape),
    fake_backward=lambda dy, x, weight, *_: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    save=_save,
    gradients=_gradients,
)


def why_not(x: Tensor, weight: Tensor, initial_state: Tensor | None) -> str | None:
    """Why these inputs cannot take this path where Triton runs, or None."""
    if any(y is not None and y.dtype not in DTYPES for y in (x, weight, initial_state)):
        return f"it takes float32, bfloat16 and float16, got x {x.dtype} and weight {weight.dtype}"
    if weight.shape[1] > MAX_WIDTH:
        return f"width {weight.shape[1]} is more than {MAX_WIDTH}"
    return None


def triton_short_conv(x_BTC: Tensor, weight_CW: Tensor, *, initial_state_NCW: Tensor | None, cu_seqlens: Tensor | None,
                      activation: str | None, output_final_state: bool) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Same contract as `reference_short_conv`, with the borders on the device: they are not checked."""
    others = {"weight": weight_CW, "initial_state": initial_state_NCW, "cu_seqlens": cu_seqlens}
    for name, other in others.items():
        if other is not None and other.device != x_BTC.device:
            raise ValueError(f"{name} is on {other.device!r} but x is on {x_BTC.device!r}; move them to one device.")
    if cu_seqlens is not None and cu_seqlens.numel() < 2 and x_BTC.shape[1] > 0:
        raise ValueError(f"cu_seqlens has no documents, expected borders [N + 1] from 0 to T={x_BTC.shape[1]!r}.")
    y = _short_conv(x_BTC, weight_CW, cu_seqlens, initial_state_NCW, activation == "silu")
    state = None
    if output_final_state:
        state = final_state(x_BTC, initial_state_NCW, cu_seqlens, weight_CW.shape[1])
    return y, state
