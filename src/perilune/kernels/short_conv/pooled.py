"""The short convolution of chunks whose windows are kept in a pool: read where they are, and moved on in place.

A window is the last W - 1 raw inputs of a sequence, oldest first, as in states.py; the pool [slots, C, W - 1] holds one
per slot. Two launches: the convolution, which looks for the window of a token's document in its slot, and one that
writes what the next token of every chunk will see. For inference: no gradients. The borders are not checked.

Shape letters: T tokens, C channels, W width, N chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import launch
from perilune.kernels.short_conv.triton import forward_parts

BLOCK = 256


@triton.jit
def _move_windows_kernel(
    x, pool, cu_seqlens, slots, x_stride, columns,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of channels, chunks."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1)
    inside = column < columns
    begin = tl.load(cu_seqlens + chunk).to(tl.int64)
    end = tl.load(cu_seqlens + chunk + 1).to(tl.int64)
    window = pool + (tl.load(slots + chunk).to(tl.int64) * columns + column) * (WIDTH - 1)
    moved = ()
    for i in tl.static_range(WIDTH - 1):
        row = end - (WIDTH - 1) + i
        present = tl.where(row >= begin, columns, 0)
        new = tl.load(x + row * x_stride + column, mask=column < present, other=0.0).to(tl.float32)
        place = end - begin + i  # of a row that the chunk is too short for, in the window so far
        old = tl.load(window + place, mask=column < columns - present, other=0.0).to(tl.float32)
        moved = moved + (new + old,)
    tl.debug_barrier()  # all is read before anything is written
    for i in tl.static_range(WIDTH - 1):
        tl.store(window + i, moved[i].to(pool.dtype.element_ty), mask=inside)


@torch.no_grad()
def conv_at_slots(
    x_TC: Tensor, weight_CW: Tensor, pool: Tensor, *, cu_seqlens: Tensor, slots: Tensor, origins: Tensor, parts: int
) -> list[Tensor]:
    """silu(conv(x)) in `parts` (1 or 3) tensors [1, T, C / parts]; the windows of `slots` [N] move on.

    origins [2, T] int32: the first token of every token's chunk, and the chunk's slot. x has unit stride over channels.
    pool is contiguous.
    """
    outputs = forward_parts(x_TC.unsqueeze(0), weight_CW, parts=parts, origins=origins, state=pool, silu=True)
    columns, width = weight_CW.shape
    if width > 1:
        launch(
            _move_windows_kernel, (triton.cdiv(columns, BLOCK), slots.shape[0]),
            (x_TC, pool, cu_seqlens, slots, x_TC.stride(0), columns),
            ("move_windows", width),
            {"WIDTH": width, "BLOCK": BLOCK, "num_warps": 4},
        )  # fmt: skip
    return outputs
