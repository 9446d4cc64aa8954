"""Absorbed MLA decoding on an H100 or H200: the loop of triton.py with loads, buffers and layouts placed by hand.

Two tiles of 64 cached rows live in shared memory. The copy of the next tile is issued before the current one is waited
for, so memory works through a whole iteration of arithmetic; Triton's own pipelining issues it after, and needs a third
tile, for which there is no room. A tile is read from device memory once and from shared memory twice: as keys, and
transposed by the tensor cores' descriptors as values. Where pages hold whole tiles the copy engine fetches them (TMA),
else every thread copies its part (cp.async).

    33 to 64 heads:  S = Q C^T, O = P C        heads are the 64 rows of wgmma
    up to 32 heads:  S^T = C Q^T, O^T = C^T P^T        tokens and channels are its rows, heads its narrow columns

Written in Gluon, Triton's lower level (experimental: names differ between 3.6 and 3.9, see below). It cannot run in the
interpreter, so the tests on a GPU are its only tests.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.dependent_launch import overlapping

BLOCK_N = gl.constexpr(64)
NUM_WARPS = {16: 4, 32: 8, 64: 8}
# Both functions were renamed after Triton 3.6.
_copy_async: Any = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
_fetch: Any = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _rows(table, tile, length, PAGE: gl.constexpr, layout: gl.constexpr):
    """Rows of the cache that hold the tokens of a tile."""
    token = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=layout)
    return gl.load(table + token // PAGE, mask=token < length, other=0) * PAGE + token % PAGE


@gluon.jit
def _copy_tile(cache, rows, tile, length, target, FIRST: gl.constexpr, WIDTH: gl.constexpr, STRIDE: gl.constexpr,
               layout: gl.constexpr):  # fmt: skip
    """Start copying WIDTH columns of a tile. Rows past the end become zero: what a page holds there may be NaN."""
    token = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    source = cache + (rows.to(gl.int64) * STRIDE)[:, None] + column[None, :]
    _copy_async(target, source, mask=(token < length)[:, None])


@gluon.jit
def _copy_queries(q, first_head, target, H: gl.constexpr, FIRST: gl.constexpr, BLOCK_H: gl.constexpr,
                  WIDTH: gl.constexpr, STRIDE: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(1, layout))
    column = FIRST + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    _copy_async(target, q + (head * STRIDE)[:, None] + column[None, :], mask=(head < H)[:, None])


@gluon.jit
def _first_row(table, tile, last, PAGE: gl.constexpr):
    """Row of the cache where a tile begins, for pages that hold whole tiles."""
    first_token = tile * BLOCK_N
    return gl.load(table + first_token // PAGE, mask=tile < last, other=0) * PAGE + first_token % PAGE


@gluon.jit
def _fetch_tile(latent_source, rope_source, row, latent_target, rope_target, barrier, is_wanted, L: gl.constexpr,
                BYTES: gl.constexpr):  # fmt: skip
    """Let the copy engine fetch a tile; it arrives at the barrier."""
    mbarrier.expect(barrier, BYTES, pred=is_wanted)
    _fetch(latent_source, [row, 0], barrier, latent_target, pred=is_wanted)
    _fetch(rope_source, [row, L], barrier, rope_target, pred=is_wanted)


@gluon.jit
def _clear_rows(latents, first_token, length, L: gl.constexpr, layout: gl.constexpr):
    """Zero the rows past the end: what a page holds there may be NaN, and a weight of 0 does not silence it."""
    valid = first_token + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout)) < length
    for part in gl.static_range(L // 64):
        columns = latents.slice(part * 64, 64, dim=1)
        columns.store(gl.where(valid[:, None], columns.load(layout), 0.0))
    fence_async_shared()


@gluon.jit(do_not_specialize=["num_splits"])
def _partial_kernel(
    q, cache, latent_source, rope_source, block_table, lengths, out, lse, scale_log2, table_stride, num_splits,
    H: gl.constexpr, L: gl.constexpr, R: gl.constexpr, PAGE: gl.constexpr, BLOCK_H: gl.constexpr,
    USE_TMA: gl.constexpr, WARPS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    HEADS_ARE_ROWS: gl.constexpr = BLOCK_H == 64
    GROUPS: gl.constexpr = WARPS // 4
    split = gl.program_id(0)
    first_head = gl.program_id(1) * BLOCK_H
    sequence = gl.program_id(2).to(gl.int64)
    length = gl.load(lengths + sequence)
    num_tiles = gl.cdiv(length, BLOCK_N)
    per_split = num_tiles // num_splits
    rest = num_tiles % num_splits
    first = split * per_split + gl.minimum(split, rest)
    last = first + per_split + (split < rest).to(gl.int32)

    dtype: gl.constexpr = cache.dtype.element_ty
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    wide_row: gl.constexpr = gl.SliceLayout(1, wide)
    narrow_row: gl.constexpr = gl.SliceLayout(1, narrow)
    latent_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, L], dtype)
    rope_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, R], dtype)
    # AXIS is the dim of tokens in the logits, of channels in the output; heads are the other one.
    if HEADS_ARE_ROWS:
        AXIS: gl.constexpr = 1
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_N // GROUPS, 16])
        o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, 256, 16])
        logits_zero = gl.zeros([BLOCK_H, BLOCK_N], gl.float32, layout=s_layout)
        o = gl.zeros([BLOCK_H, L], gl.float32, layout=o_layout)
        partial_total = gl.sum(gl.reshape(logits_zero, [BLOCK_H, GROUPS, 4, BLOCK_N // 4 // GROUPS]), 2)
    else:
        AXIS: gl.constexpr = 0
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, GROUPS], [16, BLOCK_H // GROUPS, 16])
        o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_H, 16])
        logits_zero = gl.zeros([BLOCK_N, BLOCK_H], gl.float32, layout=s_layout)
        o = gl.zeros([L, BLOCK_H], gl.float32, layout=o_layout)
        partial_total = gl.sum(gl.reshape(logits_zero, [4, 2, 8, BLOCK_H]), 1)
        weights_shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_H], dtype)
        p = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_H], weights_shared)
    total_layout: gl.constexpr = partial_total.type.layout
    top = gl.full([BLOCK_H], float("-inf"), gl.float32, layout=gl.SliceLayout(AXIS, s_layout))

    q_latent = gl.allocate_shared_memory(dtype, [BLOCK_H, L], latent_shared)
    q_rope = gl.allocate_shared_memory(dtype, [BLOCK_H, R], rope_shared)
    latents = gl.allocate_shared_memory(dtype, [2, BLOCK_N, L], latent_shared)
    ropes = gl.allocate_shared_memory(dtype, [2, BLOCK_N, R], rope_shared)

    q_sequence = q + sequence * (H * (L + R))
    _copy_queries(q_sequence, first_head, q_latent, H, 0, BLOCK_H, L, L + R, wide)
    _copy_queries(q_sequence, first_head, q_rope, H, L, BLOCK_H, R, L + R, narrow)
    table = block_table + sequence * table_stride
    # The rows of a tile are looked up one iteration before they are copied.
    if USE_TMA:
        TILE_BYTES: gl.constexpr = BLOCK_N * (L + R) * dtype.primitive_bitwidth // 8
        barriers = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        mbarrier.init(barriers.index(0), count=1)
        mbarrier.init(barriers.index(1), count=1)
        fence_async_shared()
        row = _first_row(table, first, last, PAGE)
        _fetch_tile(latent_source, rope_source, row, latents.index(0), ropes.index(0), barriers.index(0), first < last,
                    L, TILE_BYTES)  # fmt: skip
        next_row = _first_row(table, first + 1, last, PAGE)
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
    else:
        wide_rows = _rows(table, first, length, PAGE, wide_row)
        narrow_rows = _rows(table, first, length, PAGE, narrow_row)
        _copy_tile(cache, wide_rows, first, length, latents.index(0), 0, L, L + R, wide)
        _copy_tile(cache, narrow_rows, first, length, ropes.index(0), L, R, L + R, narrow)
        async_copy.commit_group()
        wide_rows = _rows(table, first + 1, length, PAGE, wide_row)
        narrow_rows = _rows(table, first + 1, length, PAGE, narrow_row)

    for tile in range(first, last):
        current = (tile - first) % 2
        c = latents.index(current)
        r = ropes.index(current)
        if USE_TMA:
            _fetch_tile(latent_source, rope_source, next_row, latents.index(1 - current), ropes.index(1 - current),
                        barriers.index(1 - current), tile + 1 < last, L, TILE_BYTES)  # fmt: skip
            next_row = _first_row(table, tile + 2, last, PAGE)
            mbarrier.wait(barriers.index(current), (tile - first) // 2 % 2)
            if (tile + 1) * BLOCK_N > length:
                _clear_rows(c, tile * BLOCK_N, length, L, narrow)
        else:
            limit = gl.where(tile + 1 < last, length, 0)
            # pyrefly: ignore[unbound-name]
            _copy_tile(cache, wide_rows, tile + 1, limit, latents.index(1 - current), 0, L, L + R, wide)
            # pyrefly: ignore[unbound-name]
            _copy_tile(cache, narrow_rows, tile + 1, limit, ropes.index(1 - current), L, R, L + R, narrow)
            async_copy.commit_group()
            wide_rows = _rows(table, tile + 2, length, PAGE, wide_row)
            narrow_rows = _rows(table, tile + 2, length, PAGE, narrow_row)
            async_copy.wait_group(1)
            # The copies wrote shared memory as ordinary stores do; the tensor cores read it by another way.
            fence_async_shared()

        if HEADS_ARE_ROWS:
            s = warpgroup_mma(q_latent, c.permute((1, 0)), logits_zero, use_acc=False, is_async=True)
            s = warpgroup_mma(q_rope, r.permute((1, 0)), s, is_async=True)
        else:
            s = warpgroup_mma(c, q_latent.permute((1, 0)), logits_zero, use_acc=False, is_async=True)
            s = warpgroup_mma(r, q_rope.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        valid = tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1 - AXIS, s_layout)) < length
        s = gl.where(gl.expand_dims(valid, 1 - AXIS), s * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(s, AXIS))
        keep = gl.exp2(top - new_top)
        weights = gl.exp2(s - gl.expand_dims(new_top, AXIS))
        top = new_top
        o = o * gl.expand_dims(gl.convert_layout(keep, gl.SliceLayout(AXIS, o_layout)), AXIS)

        # Each thread sums what it holds; threads are summed once, after the loop.
        if HEADS_ARE_ROWS:
            keep = gl.convert_layout(keep, gl.SliceLayout(1, gl.SliceLayout(2, total_layout)))
            share = gl.sum(gl.reshape(weights, [BLOCK_H, GROUPS, 4, BLOCK_N // 4 // GROUPS]), 2)
            partial_total = partial_total * gl.expand_dims(gl.expand_dims(keep, 1), 2) + share
            p_operand = gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
            o = warpgroup_mma(p_operand, c, o, is_async=True)
        else:
            keep = gl.convert_layout(keep, gl.SliceLayout(0, gl.SliceLayout(0, total_layout)))
            share = gl.sum(gl.reshape(weights, [4, 2, 8, BLOCK_H]), 1)
            partial_total = partial_total * gl.expand_dims(gl.expand_dims(keep, 0), 0) + share
            p.store(weights.to(dtype))  # pyrefly: ignore[unbound-name]
            fence_async_shared()
            o = warpgroup_mma(c.permute((1, 0)), p, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
    async_copy.wait_group(0)
    if OVERLAP:
        gdc_launch_dependents()

    if HEADS_ARE_ROWS:
        total = gl.sum(gl.sum(partial_total, 2), 1)
    else:
        total = gl.sum(gl.sum(partial_total, 1), 0)
    total = gl.convert_layout(total, gl.SliceLayout(AXIS, s_layout))
    # An empty share has total 0: its lse of -inf keeps the other kernel from using its output.
    inverse = gl.where(total > 0, 1.0 / total, 0.0)
    o = o * gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(AXIS, o_layout)), AXIS)
    first_row = (sequence * num_splits + split) * H
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(AXIS, o_layout))
    column = gl.arange(0, L, layout=gl.SliceLayout(1 - AXIS, o_layout))
    target = out + first_row * L + gl.expand_dims(head * L, AXIS) + gl.expand_dims(column, 1 - AXIS)
    if H % BLOCK_H == 0:
        gl.store(target, o.to(out.dtype.element_ty))
    else:
        gl.store(target, o.to(out.dtype.element_ty), mask=gl.expand_dims(head < H, AXIS))
    head = first_head + gl.arange(0, BLOCK_H, layout=gl.SliceLayout(AXIS, s_layout))
    gl.store(lse + first_row + head, top + gl.log2(total), mask=head < H)


def partial_attention(
    q: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, lse: Tensor, *, latent_dim: int,
    scale: float, num_splits: int,
) -> None:  # fmt: skip
    """Fills out [B, S, H, L] and lse [B, S, H], its logarithm to the base 2, for S shares.

    The cache begins at a multiple of 16 bytes.
    """
    if q.data_ptr() % 16:  # a part of a larger projection
        q = q.clone()
    batch, num_heads, width = q.shape
    block_h = min(64, max(16, next_power_of_2(num_heads)))
    num_warps = NUM_WARPS[block_h]
    # A tile of the copy engine lies within one page.
    use_tma = cache.shape[1] % BLOCK_N.value == 0 and cache.numel() > 0
    sources: tuple[TensorDescriptor | None, ...] = (None, None)
    if use_tma:
        sources = tuple(_source(cache, columns) for columns in (latent_dim, width - latent_dim))
    _partial_kernel[(num_splits, cdiv(num_heads, block_h), batch)](
        q, cache, *sources, block_table, lengths, out, lse, scale / math.log(2.0), block_table.stride(0), num_splits,
        H=num_heads, L=latent_dim, R=width - latent_dim, PAGE=cache.shape[1], BLOCK_H=block_h,
        USE_TMA=use_tma, WARPS=num_warps, num_warps=num_warps, **overlapping(q.device),
    )  # fmt: skip


def _source(cache: Tensor, columns: int) -> TensorDescriptor:
    shape = [BLOCK_N.value, columns]
    element = gl.bfloat16 if cache.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(shape, element)
    return TensorDescriptor.from_tensor(cache.view(-1, cache.shape[-1]), shape, layout)
