"""Largest logit of every head by Triton: a screen over the log-sum-exp, then exact maxima only where they can matter.

For row i of one head, with s_ij = scale * q_i . k_j over the keys j that the row may see,

    max_j s_ij <= lse_i = log sum_j exp(s_ij),

and a flash attention hands out lse for nothing. QK-Clip acts on heads above a threshold, so rows whose lse is not above
it need no exact maximum: their lse is an upper bound that says enough. One kernel does both. Each program looks at the
lse of a tile of queries; if none is above the threshold, the tile's bound is all it reports. Otherwise it multiplies
tiles of Q K^T, with no softmax and no V, and keeps the largest entry: half of a forward pass if no tile is spared.

The same inequality prunes above the threshold: a tile whose largest lse is not above a logit that was already found in
its head cannot hold a larger one. Which tiles are pruned depends on which program runs first; the maximum does not. All
decisions are made on the device: the host reads nothing.

lse comes from another kernel that sums in another order, so it is raised by MARGIN of its size before it is trusted.
NaN in lse counts as infinity, so that a broken row hides nothing; NaN among the logits is skipped.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.attention.machine import why_not_triton_on
from perilune.kernels.attention.triton_tiles import (
    PART,
    borders_on,
    described,
    document_of,
    load_parts,
    logits_of_parts,
)
from perilune.kernels.launch import device_of
from perilune.kernels.operator import is_traced

# A float32 sum of 256 products is off by at most 256 x 2^-23 of the sum of their magnitudes, and by a few 2^-23 of it
# in practice; the logits that decide are not much smaller than that sum.
MARGIN = 2.0**-12
MIN_WIDTH = 16
MAX_WIDTH = 256

# Rows and columns of a tile, warps, stages of the pipeline. On an H200 with 16 heads of 192 and 4,096 tokens, exact
# maxima of all heads cost 15% of forward and backward with these, bounds 0.4%. float32 is for Triton's interpreter.
TILING = {torch.bfloat16: (128, 64, 8, 3), torch.float16: (128, 64, 8, 3), torch.float32: (64, 32, 4, 2)}


def why_not(q: Tensor, k: Tensor) -> str | None:
    """Why these inputs cannot take this path, or None."""
    if obstacle := why_not_triton_on(q.device):
        return obstacle
    if q.dtype != k.dtype or q.dtype not in TILING:
        return f"it takes bfloat16, float16 or float32, the same for q and k, got {q.dtype} and {k.dtype}"
    if q.shape[1] != k.shape[1]:
        return f"it takes as many queries as keys, got {q.shape[1]} and {k.shape[1]}"
    width, size = q.shape[3], q.element_size()
    if not MIN_WIDTH <= width <= MAX_WIDTH or width * size % 16:
        return f"heads must be {MIN_WIDTH} to {MAX_WIDTH} wide and a multiple of 16 bytes, got {width} x {size} bytes"
    return None


@triton.jit
def _key_of(x):
    """float32 as uint32 in the same order. Every number is above 0, which stands for nothing."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 != 0, ~bits, bits | 0x80000000)


@triton.jit
def _number_of(key):
    bits = tl.where(key >> 31 != 0, key ^ 0x80000000, ~key)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _largest(
    q,
    k,
    cu_seqlens,
    batch,
    head,
    key_head,
    first_row,
    length,
    num_documents,
    search_steps,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    HOW: tl.constexpr,
):
    """The largest scale * q . k of one tile of queries."""
    row = first_row + tl.arange(0, ROWS)
    q0, q1, q2, q3 = load_parts(q, batch, first_row, head, ROWS, PART, PARTS)
    # max(scale * s) = |scale| * max(sign(scale) * s). A product also keeps q in registers, where the tensor cores read
    # it without taking bandwidth from the keys in shared memory.
    sign = tl.where(scale < 0, -1.0, 1.0)
    q0, q1 = (q0 * sign).to(q0.dtype), (q1 * sign).to(q0.dtype)
    q2, q3 = (q2 * sign).to(q0.dtype), (q3 * sign).to(q0.dtype)
    # Rows see the keys [row_start, row_end]; rows beyond the end see none. All rows see the keys from where the tile's
    # last document begins up to the diagonal; a mask on both sides of them.
    row_end = tl.where(row < length, row, -1)
    row_start = tl.zeros((ROWS,), tl.int32)
    lowest_key = 0
    common_key = 0
    diagonal = first_row // COLUMNS * COLUMNS
    if PACKED:
        row_start, _ = document_of(tl.minimum(row, length - 1), cu_seqlens, num_documents, search_steps)
        lowest_key = tl.maximum(tl.min(row_start, axis=0), 0) // COLUMNS * COLUMNS
        common_key = tl.minimum((tl.max(row_start, axis=0) + COLUMNS - 1) // COLUMNS * COLUMNS, diagonal)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    if PACKED:
        for first in range(lowest_key, common_key, COLUMNS):
            s = logits_of_parts(q0, q1, q2, q3, k, batch, first, key_head, COLUMNS, PART, PARTS, HOW)
            column = first + tl.arange(0, COLUMNS)
            s = tl.where(column[None, :] >= row_start[:, None], s, float("-inf"))
            highest = tl.maximum(highest, tl.max(s, axis=1))
    for first in range(common_key, diagonal, COLUMNS):
        s = logits_of_parts(q0, q1, q2, q3, k, batch, first, key_head, COLUMNS, PART, PARTS, HOW)
        highest = tl.maximum(highest, tl.max(s, axis=1))
    for first in range(diagonal, tl.minimum(first_row + ROWS, length), COLUMNS):
        s = logits_of_parts(q0, q1, q2, q3, k, batch, first, key_head, COLUMNS, PART, PARTS, HOW)
        column = first + tl.arange(0, COLUMNS)
        allowed = (column[None, :] >= row_start[:, None]) & (column[None, :] <= row_end[:, None])
        highest = tl.maximum(highest, tl.max(tl.where(allowed, s, float("-inf")), axis=1))
    return tl.max(tl.where(row < length, highest, float("-inf")), axis=0) * tl.abs(scale)


@triton.jit
def _max_kernel(
    q,
    k,
    lse,
    cu_seqlens,
    state,
    max_logit,
    is_bound,
    lse_stride_batch,
    lse_stride_head,
    lse_stride_token,
    group,
    length,
    num_documents,
    search_steps,
    scale,
    threshold,
    margin,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
    HOW: tl.constexpr,
):
    """One program per (query tile, head, batch row), the longest rows first; the last of a head writes its answer.

    state [3, heads] starts at 0: keys of the largest logit found and of the largest bound that was enough, and how many
    programs of the head are done.
    """
    num_tiles = tl.num_programs(0)
    first_row = (num_tiles - 1 - tl.program_id(0)) * ROWS
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    batch = tl.program_id(2)
    row = first_row + tl.arange(0, ROWS)
    source = lse + batch.to(tl.int64) * lse_stride_batch + head.to(tl.int64) * lse_stride_head
    x = tl.load(source + row.to(tl.int64) * lse_stride_token, mask=row < length, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    bound = tl.max(tl.maximum(x * (1.0 + margin), x * (1.0 - margin)), axis=0)
    if bound <= threshold:
        tl.atomic_max(state + num_heads + head, _key_of(bound), sem="relaxed")
    # An atomic read, because others write: it gives all threads one value, and with it one way to go. A plain load may
    # give each of them another, and half a program waits for ever.
    elif _key_of(bound) > tl.atomic_max(state + head, 0, sem="relaxed"):
        largest = _largest(
            q, k, cu_seqlens, batch, head, head // group, first_row, length, num_documents, search_steps, scale,
            ROWS, COLUMNS, PART, PARTS, PACKED, HOW,
        )  # fmt: skip
        tl.atomic_max(state + head, _key_of(largest), sem="relaxed")

    done = tl.atomic_add(state + 2 * num_heads + head, 1, sem="acq_rel")
    if done == num_tiles * tl.num_programs(2) - 1:
        found = tl.load(state + head, volatile=True)
        enough = tl.load(state + num_heads + head, volatile=True)
        tl.store(max_logit + head, _number_of(tl.maximum(found, enough)))
        # Minus infinity is no bound but the answer: the head has no pair.
        tl.store(is_bound + head, ((enough > found) & (_number_of(enough) > float("-inf"))).to(tl.int8))


def _launch(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens: Tensor | None, scale: float, threshold: float
) -> tuple[Tensor, Tensor]:
    batch, length, num_heads, width = q.shape
    max_logit = torch.empty(num_heads, dtype=torch.float32, device=q.device)
    is_bound = torch.empty(num_heads, dtype=torch.bool, device=q.device)
    if q.numel() == 0:
        return max_logit.fill_(float("-inf")), is_bound.fill_(False)
    rows, columns, warps, stages = TILING[q.dtype]
    part = min(PART, triton.next_power_of_2(width))
    num_documents = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    with device_of(q):
        _max_kernel[(triton.cdiv(length, rows), num_heads, batch)](
            described(q, rows, part),
            described(k, columns, part),
            lse,
            lse if cu_seqlens is None else cu_seqlens,
            torch.zeros(3, num_heads, dtype=torch.int32, device=q.device).view(torch.uint32),
            max_logit,
            is_bound.view(torch.int8),
            *lse.stride(),
            num_heads // k.shape[2],
            length,
            num_documents,
            num_documents.bit_length(),
            scale,
            threshold,
            MARGIN,
            ROWS=rows,
            COLUMNS=columns,
            PART=part,
            PARTS=triton.cdiv(width, part),
            PACKED=cu_seqlens is not None,
            HOW="ieee",
            num_warps=warps,
            num_stages=stages,
        )
    return max_logit, is_bound


_max_logits = torch.library.custom_op("perilune::max_logits", mutates_args=())(_launch)


@_max_logits.register_fake
def _(q: Tensor, k: Tensor, lse: Tensor, cu_seqlens: Tensor | None, scale: float, threshold: float):
    return q.new_empty(q.shape[2], dtype=torch.float32), q.new_empty(q.shape[2], dtype=torch.bool)


@torch.no_grad()
def max_logits(
    q: Tensor, k: Tensor, lse_BHT: Tensor, *, scale: float, threshold: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return max_logit [H] (float32) and is_bound [H] (bool), without gradient and without waiting for the device.

    q [B, T, H, D], k [B, T, Hkv, D]; lse_BHT is the log-sum-exp of the causal attention over them, natural logarithm,
    inside the documents of cu_seqlens if given. Heads whose maximum is above `threshold` get it exactly; for the others
    the answer may be an upper bound that is not above it. -inf asks for exact maxima only, inf for bounds only.
    """
    if obstacle := why_not(q, k):
        raise ValueError(f"max_logits cannot run here: {obstacle}")
    if lse_BHT.shape != (q.shape[0], q.shape[2], q.shape[1]) or lse_BHT.dtype != torch.float32:
        raise ValueError(
            f"lse is {lse_BHT.dtype} {tuple(lse_BHT.shape)}, expected float32 [batch, heads, tokens] for "
            f"q {tuple(q.shape)}"
        )
    cu_seqlens = borders_on(q.device, cu_seqlens)
    # The operator is for whoever traces: to call it costs the host more than the kernel costs the device.
    find = _max_logits if is_traced(q, k) else _launch
    return find(q.detach(), k.detach(), lse_BHT.detach(), cu_seqlens, scale, threshold)
