"""Rotary positions in place: channels of queries or keys that nobody else has read yet are turned where they lie.

    forward    (a, b) -> (a cos - b sin, b cos + a sin)        pairs leave as halves, as model/rope.py has them
    inverse    (a, b) -> (a cos + b sin, b cos - a sin)        halves become the pairs they were: the gradient's way

One pass over the channels that turn, in float32; the others are not touched.

Shape letters: N tokens, H heads, W width of a head, C pairs of channels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import launch

TILE, WARPS = 1024, 4


@triton.jit
def _rotate_kernel(
    x, cos, sin, num_rows, heads, token_stride, head_stride, first, pairs,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    mask = (row < num_rows) & (pair < pairs)
    token = row // heads
    start = x + token * token_stride + (row % heads) * head_stride + first
    if INTERLEAVED:
        as_pairs, to_second = start + 2 * pair, 1
    else:
        as_pairs, to_second = start + pair, pairs
    as_halves = start + pair
    if INVERSE:
        a = tl.load(as_halves, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(as_halves + pairs, mask=mask, other=0.0).to(tl.float32)
    else:
        a = tl.load(as_pairs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(as_pairs + to_second, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token * pairs + pair, mask=mask, other=0.0)
    s = tl.load(sin + token * pairs + pair, mask=mask, other=0.0)
    tl.debug_barrier()  # all is read before anything is written
    if INVERSE:
        tl.store(as_pairs, (a * c + b * s).to(x.dtype.element_ty), mask=mask)
        tl.store(as_pairs + to_second, (b * c - a * s).to(x.dtype.element_ty), mask=mask)
    else:
        tl.store(as_halves, (a * c - b * s).to(x.dtype.element_ty), mask=mask)
        tl.store(as_halves + pairs, (b * c + a * s).to(x.dtype.element_ty), mask=mask)


def rotate_in_place(
    x_NHW: Tensor, cos_NC: Tensor, sin_NC: Tensor, *, first: int, interleaved: bool, inverse: bool = False
) -> None:
    """Turn the channels [first, first + 2 C) of every head; cos, sin: float32, contiguous. x has unit stride over W."""
    num_tokens, heads, _ = x_NHW.shape
    pairs = cos_NC.shape[1]
    num_rows = num_tokens * heads
    if num_rows == 0 or pairs == 0:
        return
    block = triton.next_power_of_2(pairs)
    rows = max(1, TILE // block)
    launch(
        _rotate_kernel, triton.cdiv(num_rows, rows),
        (x_NHW, cos_NC, sin_NC, num_rows, heads, x_NHW.stride(0), x_NHW.stride(1), first, pairs),
        ("rotate", interleaved, inverse, block),
        {"INTERLEAVED": interleaved, "INVERSE": inverse, "ROWS": rows, "PAIRS": block, "num_warps": WARPS},
    )  # fmt: skip
