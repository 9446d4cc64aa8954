"""Rows of an embedding matrix and the sums of their gradients.

The backward sorts the tokens, equal ones in their order, so that the gradients of one row of W form a segment. A
segment is cut into chunks; a program sums one chunk. The sum of a segment of one chunk is a row of dW; those of longer
segments are added up by a second kernel. So a frequent token keeps many programs busy, the order of every sum is
fixed, and rows nobody read stay zero.

Where the sums of chunks are kept: a segment is long if it has more than CHUNK tokens. Among CHUNK neighbouring
positions there is at most one at which a long segment begins, and at most one at which a further chunk of one does; so
two slots for every CHUNK positions are enough.

Shape letters: N tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import device_of
from perilune.kernels.operator import operator

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK = 32
MAX_BLOCK = 1024
MOST_TOKENS = 2**30  # twice as many still fit into 32 bits, where the bisection adds two positions
MOST_ROWS = 2**31 - 1
TILE = 2048  # elements of a tile of the forward


@triton.jit(do_not_specialize=["num_tokens"])
def _gather_kernel(tokens, weight, x, num_tokens, vocabulary, width, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    token = tl.load(tokens + number, mask=number < num_tokens, other=-1).to(tl.int64)
    exists = (token >= 0) & (token < vocabulary) & (column < width)
    row = tl.load(weight + token * width + column, mask=exists, other=float("nan"))
    tl.store(x + number * width + column, row.to(x.dtype.element_ty), mask=(number < num_tokens) & (column < width))


@triton.jit
def _segment_start(tokens, position, token):
    """The first position of the segment that holds this position: bisection over the sorted tokens."""
    low = position * 0
    high = position
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(tokens + middle) < token
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def _sum_chunks_kernel(
    dx, tokens, order, d_weight, partials, num_tokens, vocabulary, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per sorted position, idle unless a chunk begins there."""
    position = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(tokens + position)
    start = position
    previous = tl.load(tokens + tl.maximum(position - 1, 0))
    if (position > 0) & (previous == token):
        start = _segment_start(tokens, position, token)
    if ((position - start) % CHUNK == 0) & (token >= 0) & (token < vocabulary):
        total = tl.zeros((BLOCK,), tl.float32)
        number = 0
        same = True
        while same:
            row = tl.load(order + position + number).to(tl.int64)
            total += tl.load(dx + row * width + column, mask=inside, other=0.0).to(tl.float32)
            number += 1
            same = (number < CHUNK) & (position + number < num_tokens)
            if same:
                same = tl.load(tokens + position + number) == token
        is_long = position > start
        if (position == start) & (position + CHUNK < num_tokens):
            is_long = tl.load(tokens + position + CHUNK) == token
        if is_long:
            slot = position // CHUNK * 2 + (position == start).to(tl.int32)
            tl.store(partials + slot.to(tl.int64) * width + column, total, mask=inside)
        else:
            place = d_weight + token.to(tl.int64) * width + column
            tl.store(place, total.to(d_weight.dtype.element_ty), mask=inside)


@triton.jit
def _add_chunks_kernel(
    tokens, d_weight, partials, num_tokens, vocabulary, width, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """One program per CHUNK positions, idle unless a long segment begins at one of them."""
    position = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    token = tl.load(tokens + position, mask=position < num_tokens, other=-1)
    previous = tl.load(tokens + position - 1, mask=(position > 0) & (position < num_tokens), other=-1)
    later = tl.load(tokens + position + CHUNK, mask=position + CHUNK < num_tokens, other=-1)
    begins = ((position == 0) | (previous != token)) & (later == token) & (token >= 0) & (token < vocabulary)
    first = tl.max(tl.where(begins, position, -1), axis=0)
    if first >= 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        of_segment = tl.load(tokens + first)
        total = tl.zeros((BLOCK,), tl.float32)
        at = first
        same = True
        while same:
            slot = at // CHUNK * 2 + (at == first).to(tl.int32)
            total += tl.load(partials + slot.to(tl.int64) * width + column, mask=inside, other=0.0)
            at += CHUNK
            same = at < num_tokens
            if same:
                same = tl.load(tokens + at) == of_segment
        place = d_weight + of_segment.to(tl.int64) * width + column
        tl.store(place, total.to(d_weight.dtype.element_ty), mask=inside)


def _blocks(width: int) -> tuple[int, int]:
    """(columns of a tile, tiles across)"""
    block = min(MAX_BLOCK, triton.next_power_of_2(width))
    return block, triton.cdiv(width, block)


def _forward(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    tokens, weight = tokens.contiguous(), weight.contiguous()
    vocabulary, width = weight.shape
    x = weight.new_empty(*tokens.shape, width, dtype=dtype)
    if x.numel():
        block, across = _blocks(width)
        rows = max(1, TILE // block)
        with device_of(tokens):
            _gather_kernel[(triton.cdiv(tokens.numel(), rows), across)](
                tokens, weight, x, tokens.numel(), vocabulary, width, TOKENS=rows, BLOCK=block, num_warps=4
            )
    return x


def _backward(dx: Tensor, tokens: Tensor, vocabulary: int, dtype: torch.dtype) -> Tensor:
    dx, width = dx.contiguous(), dx.shape[-1]
    d_weight = torch.zeros(vocabulary, width, dtype=dtype, device=dx.device)
    num_tokens = tokens.numel()
    if num_tokens and width:
        # Clamped, because the low half of a wide number that is no token may be one.
        in_order, order = torch.sort(tokens.flatten().clamp(-1, vocabulary).to(torch.int32), stable=True)
        block, across = _blocks(width)
        chunks = triton.cdiv(num_tokens, CHUNK)
        partials = torch.empty(2 * chunks, width, dtype=torch.float32, device=dx.device)
        sizes = (num_tokens, vocabulary, width)
        tiling = {"CHUNK": CHUNK, "BLOCK": block, "num_warps": max(1, block // 256)}
        with device_of(dx):
            _sum_chunks_kernel[(num_tokens, across)](dx, in_order, order, d_weight, partials, *sizes, **tiling)
            _add_chunks_kernel[(chunks, across)](in_order, d_weight, partials, *sizes, **tiling)
    return d_weight


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, weight, _ = inputs
    # Not the weight: it may change before the backward, and who keeps saved tensors elsewhere would copy all of it.
    ctx.save_for_backward(tokens)
    ctx.vocabulary, ctx.dtype = weight.shape[0], weight.dtype


def _gradients(ctx: Any, backward: Callable[..., Tensor], dx: Tensor) -> tuple[None, Tensor, None]:
    (tokens,) = ctx.saved_tensors
    return None, backward(dx, tokens, ctx.vocabulary, ctx.dtype), None


triton_embed = operator(
    "embed",
    forward=_forward,
    backward=_backward,
    fake_forward=lambda tokens, weight, dtype: weight.new_empty(*tokens.shape, weight.shape[1], dtype=dtype),
    fake_backward=lambda dx, tokens, vocabulary, dtype: dx.new_empty(vocabulary, dx.shape[-1], dtype=dtype),
    save=_save,
    gradients=_gradients,
)


def why_not(tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    """Why these inputs cannot take this path where Triton runs, or None."""
    if weight.dtype not in DTYPES or dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, got weight {weight.dtype} and dtype {dtype}"
    if tokens.device != weight.device:
        return f"tokens are on {tokens.device} and weight on {weight.device}"
    if tokens.numel() > MOST_TOKENS or weight.shape[0] > MOST_ROWS:
        return f"{tokens.numel():,} tokens and {weight.shape[0]:,} rows are more than 32 bits count"
    return None
