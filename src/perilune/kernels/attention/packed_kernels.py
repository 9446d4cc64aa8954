"""The kernels of `packed.py`: forward, and the two halves of the backward.

Forward, one program per tile of queries, over tiles of keys:

    s = q k^T,  m' = max(m, rowmax s),  p = exp2(c s - c m'),  l' = l exp2(c (m - m')) + rowsum p,
    acc' = acc exp2(c (m - m')) + p v;      at the end o = acc / l,  lse = scale m + log l,      c = scale log2(e)

Backward, with p = exp(scale s - lse), delta = rowsum(do * o) and ds = p (do v^T - delta):

    dv = p^T do,  dk = scale ds^T q    (one program per tile of keys, over queries),
    dq = scale ds k                    (one program per tile of queries, over keys).
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.attention.triton_tiles import document_of, load_parts, logits_of_parts, products


@triton.jit
def _attend(
    acc,
    total,
    highest,
    q0,
    q1,
    q2,
    q3,
    k,
    v,
    batch,
    first,
    head,
    factor,
    row_start,
    row_end,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE: tl.constexpr,
    MASKED: tl.constexpr,
    HOW: tl.constexpr,
):
    """The online softmax over one more tile of keys: unscaled output, sum of weights, largest product of each row."""
    s = logits_of_parts(q0, q1, q2, q3, k, batch, first, head, COLUMNS, PART, PARTS, HOW)
    values = v.load([batch, head, first, 0]).reshape(COLUMNS, VALUE)
    if MASKED:
        column = first + tl.arange(0, COLUMNS)
        allowed = (column[None, :] >= row_start[:, None]) & (column[None, :] <= row_end[:, None])
        s = tl.where(allowed, s, float("-inf"))
    higher = tl.maximum(highest, tl.max(s, axis=1))
    pivot = higher * factor
    if MASKED:  # a row that has seen no key yet: -inf minus -inf would be NaN
        pivot = tl.where(higher == float("-inf"), 0.0, pivot)
    weights = tl.exp2(s * factor - pivot[:, None])
    shrink = tl.exp2(highest * factor - pivot)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=HOW)
    return acc, total, higher


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    cu_seqlens,
    o,
    lse,
    tile_max,
    group,
    length,
    num_documents,
    search_steps,
    scale,
    value_width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE: tl.constexpr,
    PACKED: tl.constexpr,
    HOW: tl.constexpr,
):
    """One program per (query tile, head, batch row), the longest rows first."""
    num_tiles = tl.num_programs(0)
    num_heads = tl.num_programs(1)
    tile = num_tiles - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    key_head = head // group
    factor = tl.maximum(scale * 1.4426950408889634, 1e-30)  # of exponents to base 2; 0 would spoil -inf
    first_row = tile * ROWS
    row = first_row + tl.arange(0, ROWS)
    q0, q1, q2, q3 = load_parts(q, batch, first_row, head, ROWS, PART, PARTS)

    # Rows see the keys [row_start, row_end]: those from common_key to the diagonal in full, the others by a mask.
    row_end = tl.minimum(row, length - 1)
    row_start = tl.zeros((ROWS,), tl.int32)
    lowest_key = 0
    common_key = 0
    diagonal = first_row // COLUMNS * COLUMNS
    if PACKED:
        row_start, _ = document_of(row_end, cu_seqlens, num_documents, search_steps)
        lowest_key = tl.maximum(tl.min(row_start, axis=0), 0) // COLUMNS * COLUMNS
        common_key = tl.minimum((tl.max(row_start, axis=0) + COLUMNS - 1) // COLUMNS * COLUMNS, diagonal)

    acc = tl.zeros((ROWS, VALUE), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    if PACKED:
        for first in range(lowest_key, common_key, COLUMNS):
            acc, total, highest = _attend(
                acc, total, highest, q0, q1, q2, q3, k, v, batch, first, key_head, factor, row_start, row_end,
                COLUMNS, PART, PARTS, VALUE, True, HOW,
            )  # fmt: skip
    for first in range(common_key, diagonal, COLUMNS):
        acc, total, highest = _attend(
            acc, total, highest, q0, q1, q2, q3, k, v, batch, first, key_head, factor, row_start, row_end,
            COLUMNS, PART, PARTS, VALUE, False, HOW,
        )  # fmt: skip
    for first in range(diagonal, tl.minimum(first_row + ROWS, length), COLUMNS):
        acc, total, highest = _attend(
            acc, total, highest, q0, q1, q2, q3, k, v, batch, first, key_head, factor, row_start, row_end,
            COLUMNS, PART, PARTS, VALUE, True, HOW,
        )  # fmt: skip

    inside = row < length
    channel = tl.arange(0, VALUE)
    token = (batch.to(tl.int64) * length + row) * num_heads + head
    result = (acc / total[:, None]).to(o.dtype.element_ty)
    tl.store(
        o + token[:, None] * value_width + channel[None, :],
        result,
        mask=inside[:, None] & (channel[None, :] < value_width),
    )
    of_head = batch.to(tl.int64) * num_heads + head
    tl.store(lse + of_head * length + row, highest * scale + tl.log(total), mask=inside)
    largest = tl.max(tl.where(inside, highest, float("-inf")), axis=0)
    tl.store(tile_max + of_head * num_tiles + tile, largest * scale)


@triton.jit
def delta_kernel(grad_o, o, delta, length, num_heads, num_rows, value_width, ROWS: tl.constexpr, VALUE: tl.constexpr):
    """delta = sum over channels of grad_o * o, from [B, T, H, V] to [B, H, T]."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, VALUE)
    at = row[:, None] * value_width + channel[None, :]
    inside = (row[:, None] < num_rows) & (channel[None, :] < value_width)
    x = tl.load(grad_o + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    head, token, batch = row % num_heads, row // num_heads % length, row // num_heads // length
    tl.store(delta + (batch * num_heads + head) * length + token, tl.sum(x * y, axis=1), mask=row < num_rows)


@triton.jit
def _query_step(
    dq0,
    dq1,
    dq2,
    dq3,
    q0,
    q1,
    q2,
    q3,
    grad_o,
    k,
    v,
    lse2,
    delta,
    batch,
    first,
    head,
    factor,
    row_start,
    row_end,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE: tl.constexpr,
    MASKED: tl.constexpr,
    HOW: tl.constexpr,
):
    """dq of one tile of queries, over one more tile of keys."""
    k0, k1, k2, k3 = load_parts(k, batch, first, head, COLUMNS, PART, PARTS)
    values = v.load([batch, head, first, 0]).reshape(COLUMNS, VALUE)
    s = products(q0, q1, q2, q3, k0, k1, k2, k3, PARTS, HOW)
    dp = tl.dot(grad_o, values.T, input_precision=HOW)
    weights = tl.exp2(s * factor - lse2[:, None])
    if MASKED:
        column = first + tl.arange(0, COLUMNS)
        allowed = (column[None, :] >= row_start[:, None]) & (column[None, :] <= row_end[:, None])
        weights = tl.where(allowed, weights, 0.0)
    ds = (weights * (dp - delta[:, None])).to(k0.dtype)
    dq0 = tl.dot(ds, k0, dq0, input_precision=HOW)
    if PARTS > 1:
        dq1 = tl.dot(ds, k1, dq1, input_precision=HOW)
    if PARTS > 2:
        dq2 = tl.dot(ds, k2, dq2, input_precision=HOW)
    if PARTS > 3:
        dq3 = tl.dot(ds, k3, dq3, input_precision=HOW)
    return dq0, dq1, dq2, dq3


@triton.jit
def _store_part(x, part, tile, row, head, batch, length, num_heads, width, scale, PART: tl.constexpr):
    channel = part * PART + tl.arange(0, PART)
    at = ((batch.to(tl.int64) * length + row) * num_heads + head)[:, None] * width + channel[None, :]
    inside = (row[:, None] < length) & (channel[None, :] < width)
    tl.store(x + at, (tile * scale).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _store_parts(
    x, x0, x1, x2, x3, row, head, batch, length, num_heads, width, scale, PART: tl.constexpr, PARTS: tl.constexpr
):
    """The parts of a tile into a contiguous [B, T, H, D]."""
    _store_part(x, 0, x0, row, head, batch, length, num_heads, width, scale, PART)
    if PARTS > 1:
        _store_part(x, 1, x1, row, head, batch, length, num_heads, width, scale, PART)
    if PARTS > 2:
        _store_part(x, 2, x2, row, head, batch, length, num_heads, width, scale, PART)
    if PARTS > 3:
        _store_part(x, 3, x3, row, head, batch, length, num_heads, width, scale, PART)


@triton.jit
def queries_kernel(
    q,
    k,
    v,
    grad_o,
    cu_seqlens,
    lse,
    delta,
    dq,
    group,
    length,
    num_documents,
    search_steps,
    scale,
    width,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE: tl.constexpr,
    PACKED: tl.constexpr,
    HOW: tl.constexpr,
):
    """dq: one program per (query tile, head, batch row), the longest rows first. Ranges as in the forward."""
    num_heads = tl.num_programs(1)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    key_head = head // group
    factor = tl.maximum(scale * 1.4426950408889634, 1e-30)
    first_row = tile * ROWS
    row = first_row + tl.arange(0, ROWS)
    q0, q1, q2, q3 = load_parts(q, batch, first_row, head, ROWS, PART, PARTS)
    do = grad_o.load([batch, head, first_row, 0]).reshape(ROWS, VALUE)
    at = (batch.to(tl.int64) * num_heads + head) * length + row
    lse2 = tl.load(lse + at, mask=row < length, other=float("inf")) * 1.4426950408889634
    d = tl.load(delta + at, mask=row < length, other=0.0)

    row_end = tl.minimum(row, length - 1)
    row_start = tl.zeros((ROWS,), tl.int32)
    lowest_key = 0
    common_key = 0
    diagonal = first_row // COLUMNS * COLUMNS
    if PACKED:
        row_start, _ = document_of(row_end, cu_seqlens, num_documents, search_steps)
        lowest_key = tl.maximum(tl.min(row_start, axis=0), 0) // COLUMNS * COLUMNS
        common_key = tl.minimum((tl.max(row_start, axis=0) + COLUMNS - 1) // COLUMNS * COLUMNS, diagonal)

    dq0 = tl.zeros((ROWS, PART), tl.float32)
    dq1, dq2, dq3 = dq0, dq0, dq0
    if PACKED:
        for first in range(lowest_key, common_key, COLUMNS):
            dq0, dq1, dq2, dq3 = _query_step(
                dq0, dq1, dq2, dq3, q0, q1, q2, q3, do, k, v, lse2, d, batch, first, key_head, factor,
                row_start, row_end, COLUMNS, PART, PARTS, VALUE, True, HOW,
            )  # fmt: skip
    for first in range(common_key, diagonal, COLUMNS):
        dq0, dq1, dq2, dq3 = _query_step(
            dq0, dq1, dq2, dq3, q0, q1, q2, q3, do, k, v, lse2, d, batch, first, key_head, factor,
            row_start, row_end, COLUMNS, PART, PARTS, VALUE, False, HOW,
        )  # fmt: skip
    for first in range(diagonal, tl.minimum(first_row + ROWS, length), COLUMNS):
        dq0, dq1, dq2, dq3 = _query_step(
            dq0, dq1, dq2, dq3, q0, q1, q2, q3, do, k, v, lse2, d, batch, first, key_head, factor,
            row_start, row_end, COLUMNS, PART, PARTS, VALUE, True, HOW,
        )  # fmt: skip
    _store_parts(dq, dq0, dq1, dq2, dq3, row, head, batch, length, num_heads, width, scale, PART, PARTS)


@triton.jit
def _key_step(
    dk0,
    dk1,
    dk2,
    dk3,
    dv,
    k0,
    k1,
    k2,
    k3,
    values,
    q,
    grad_o,
    lse,
    delta,
    batch,
    first,
    head,
    factor,
    length,
    column,
    column_end,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE: tl.constexpr,
    HOW: tl.constexpr,
):
    """dk and dv of one tile of keys, over one more tile of queries. Everything is transposed: keys are the rows."""
    row = first + tl.arange(0, ROWS)
    q0, q1, q2, q3 = load_parts(q, batch, first, head, ROWS, PART, PARTS)
    do = grad_o.load([batch, head, first, 0]).reshape(ROWS, VALUE)
    lse2 = tl.load(lse + row, mask=row < length, other=float("inf")) * 1.4426950408889634
    s = products(k0, k1, k2, k3, q0, q1, q2, q3, PARTS, HOW)
    weights = tl.exp2(s * factor - lse2[None, :])
    allowed = (row[None, :] >= column[:, None]) & (row[None, :] < column_end[:, None])
    weights = tl.where(allowed, weights, 0.0)
    dv = tl.dot(weights.to(do.dtype), do, dv, input_precision=HOW)
    dp = tl.dot(values, do.T, input_precision=HOW)
    d = tl.load(delta + row, mask=row < length, other=0.0)
    ds = (weights * (dp - d[None, :])).to(q0.dtype)
    dk0 = tl.dot(ds, q0, dk0, input_precision=HOW)
    if PARTS > 1:
        dk1 = tl.dot(ds, q1, dk1, input_precision=HOW)
    if PARTS > 2:
        dk2 = tl.dot(ds, q2, dk2, input_precision=HOW)
    if PARTS > 3:
        dk3 = tl.dot(ds, q3, dk3, input_precision=HOW)
    return dk0, dk1, dk2, dk3, dv


@triton.jit
def keys_kernel(
    q,
    k,
    v,
    grad_o,
    cu_seqlens,
    lse,
    delta,
    dk,
    dv,
    length,
    num_documents,
    search_steps,
    scale,
    width,
    value_width,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    VALUE: tl.constexpr,
    PACKED: tl.constexpr,
    HOW: tl.constexpr,
):
    """dk and dv: one program per (key tile, key head, batch row), over all query heads that share the keys."""
    key_head = tl.program_id(1)
    num_key_heads = tl.num_programs(1)
    batch = tl.program_id(2)
    factor = tl.maximum(scale * 1.4426950408889634, 1e-30)
    first_column = tl.program_id(0) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    k0, k1, k2, k3 = load_parts(k, batch, first_column, key_head, COLUMNS, PART, PARTS)
    values = v.load([batch, key_head, first_column, 0]).reshape(COLUMNS, VALUE)

    # Keys are seen by the rows [column, column_end).
    column_end = tl.zeros((COLUMNS,), tl.int32) + length
    last_row = length
    if PACKED:
        _, column_end = document_of(tl.minimum(column, length - 1), cu_seqlens, num_documents, search_steps)
        last_row = tl.minimum(tl.max(column_end, axis=0), length)
    first_row = first_column // ROWS * ROWS
    steps = (last_row - first_row + ROWS - 1) // ROWS

    dk0 = tl.zeros((COLUMNS, PART), tl.float32)
    dk1, dk2, dk3 = dk0, dk0, dk0
    dv_tile = tl.zeros((COLUMNS, VALUE), tl.float32)
    # One loop over rows and heads, masked throughout: with more loops the sums no longer fit into the registers.
    for step in range(steps * GROUP):
        head = key_head * GROUP
        first = first_row + step * ROWS
        if GROUP > 1:
            head += step // steps
            first = first_row + step % steps * ROWS
        of_head = (batch.to(tl.int64) * num_key_heads * GROUP + head) * length
        dk0, dk1, dk2, dk3, dv_tile = _key_step(
            dk0, dk1, dk2, dk3, dv_tile, k0, k1, k2, k3, values, q, grad_o, lse + of_head, delta + of_head,
            batch, first, head, factor, length, column, column_end, ROWS, PART, PARTS, VALUE, HOW,
        )  # fmt: skip
    _store_parts(dk, dk0, dk1, dk2, dk3, column, key_head, batch, length, num_key_heads, width, scale, PART, PARTS)
    _store_part(dv, 0, dv_tile, column, key_head, batch, length, num_key_heads, value_width, 1.0, VALUE)
