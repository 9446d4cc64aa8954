"""Absorbed MLA decoding in two launches: partial softmax over a share of a sequence, then the mix of the shares.

All heads of a sequence read the same cached rows, so one program takes up to 64 heads at once (the rows of its matrix
products) and every cached row is read once. To fill the chip with few sequences, each sequence is cut into `num_splits`
equal shares of tiles; their number depends on shapes only, their borders on the lengths, which are read on the device.
A share leaves its output and the log2 of its softmax sum; the second kernel weighs the shares by them. It is placed on
the chip while the first one ends (`dependent_launch.py`).

This kernel takes any widths and runs wherever Triton does; `hopper.py` is the same loop written for one chip.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from perilune.kernels.dependent_launch import overlapping
from perilune.kernels.launch import device_of
from perilune.kernels.triton_support import num_sms

LN_2 = tl.constexpr(math.log(2.0))
TOKENS_PER_SPLIT = 256  # a shorter share costs more in partial results than it wins in parallelism
LARGEST_BLOCK_H = 64
MOST_SPLITS = 256
# The mix of the shares: a program loads, as often as needed, so many shares of some columns, so many numbers in all.
COMBINE_STEP, COMBINE_NUMBERS, COMBINE_WARPS = 32, 1024, 4


@triton.jit
def _share(lengths, sequence, split, num_splits, BLOCK_N: tl.constexpr):
    """Length of the sequence and the tiles [first, last) of this share; shares differ by one tile at most."""
    length = tl.load(lengths + sequence)
    num_tiles = tl.cdiv(length, BLOCK_N)
    per_split, rest = num_tiles // num_splits, num_tiles % num_splits
    first = split * per_split + tl.minimum(split, rest)
    return length, first, first + per_split + (split < rest).to(tl.int32)


@triton.jit(do_not_specialize=["num_splits"])
def _partial_kernel(
    q, cache, block_table, lengths, out, lse, scale_log2, table_stride, num_splits,
    H: tl.constexpr, L: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_wait()
    split = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    sequence = tl.program_id(2).to(tl.int64)
    length, first, last = _share(lengths, sequence, split, num_splits, BLOCK_N)
    latent = tl.arange(0, BLOCK_L)
    rope = tl.arange(0, BLOCK_R)
    in_latent = (latent < L)[None, :]
    in_rope = (rope < R)[None, :]
    in_head = head < H
    q_row = q + (sequence * H + head)[:, None] * (L + R)
    q_latent = tl.load(q_row + latent[None, :], mask=in_head[:, None] & in_latent, other=0.0)
    q_rope = tl.load(q_row + L + rope[None, :], mask=in_head[:, None] & in_rope, other=0.0)

    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    o = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    for tile in tl.range(first, last, num_stages=STAGES):
        token = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = token < length
        page = tl.load(block_table + sequence * table_stride + token // PAGE, mask=valid, other=0)
        row = cache + (page.to(tl.int64) * PAGE + token % PAGE)[:, None] * (L + R)
        # Rows past the end read as zero: what the page holds there may be NaN, and 0 * NaN is NaN.
        c = tl.load(row + latent[None, :], mask=valid[:, None] & in_latent, other=0.0)
        logits = tl.dot(q_latent, tl.trans(c), input_precision="ieee")
        if R > 0:
            r = tl.load(row + L + rope[None, :], mask=valid[:, None] & in_rope, other=0.0)
            logits = tl.dot(q_rope, tl.trans(r), logits, input_precision="ieee")
        logits = tl.where(valid[None, :], logits * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, axis=1))
        keep = tl.exp2(top - new_top)
        weights = tl.exp2(logits - new_top[:, None])
        total = total * keep + tl.sum(weights, axis=1)
        o = tl.dot(weights.to(c.dtype), c, o * keep[:, None], input_precision="ieee")
        top = new_top

    if OVERLAP:
        gdc_launch_dependents()
    # An empty share has total 0: its lse of -inf keeps the other kernel from using its output.
    row = (sequence * num_splits + split) * H + head
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    target = out + row[:, None] * L + latent[None, :]
    tl.store(target, o.to(out.dtype.element_ty), mask=in_head[:, None] & in_latent)
    tl.store(lse + row, top + tl.log2(total), mask=in_head)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial, partial_lse, out, lse, num_splits,
    H: tl.constexpr, L: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_L: tl.constexpr, STEP: tl.constexpr,
    STEPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first_row = row // H * num_splits * H + row % H
    column = tl.program_id(1) * BLOCK_L + tl.arange(0, BLOCK_L)
    in_row = (column < L)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    every = tl.arange(0, BLOCK_S)
    logs = tl.load(partial_lse + first_row + every * H, mask=every < num_splits, other=float("-inf"))
    # All loads are under way before the first is waited for.
    log_steps = ()
    part_steps = ()
    for step in tl.static_range(STEPS):
        split = step * STEP + tl.arange(0, STEP)
        is_split = split < num_splits
        log_steps += (tl.load(partial_lse + first_row + split * H, mask=is_split, other=float("-inf")),)
        source = partial + (first_row + split * H)[:, None] * L + column[None, :]
        part_steps += (tl.load(source, mask=is_split[:, None] & in_row, other=0.0),)
    top = tl.max(logs, axis=0)
    is_empty = top == float("-inf")
    log_total = top + tl.log2(tl.sum(tl.exp2(logs - tl.where(is_empty, 0.0, top)), axis=0))
    offset = tl.where(is_empty, 0.0, log_total)
    o = tl.zeros([STEP, BLOCK_L], tl.float32)
    for step in tl.static_range(STEPS):
        weight = tl.exp2(log_steps[step] - offset)[:, None]
        # An empty share left its memory as it was: anything, NaN for instance.
        o += tl.where(weight > 0, part_steps[step].to(tl.float32), 0.0) * weight
    tl.store(out + row * L + column, tl.sum(o, axis=0).to(out.dtype.element_ty), mask=column < L)
    if tl.program_id(1) == 0:
        tl.store(lse + row, log_total * LN_2)


def choose_num_splits(batch: int, head_groups: int, capacity: int, device: torch.device) -> int:
    """Shares per sequence so that whole waves of one program per multiprocessor are at least 90% full."""
    sms, sequences = num_sms(device), batch * head_groups
    most = max(1, -(-capacity // TOKENS_PER_SPLIT))
    options = [min(most, max(1, waves * sms // sequences)) for waves in range(1, 5)]
    filled = [splits * sequences / (sms * -(-splits * sequences // sms)) for splits in options]
    good = [splits for splits, share in zip(options, filled) if share >= 0.9]
    return good[0] if good else options[filled.index(max(filled))]


def combine(partial: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """partial [B, S, H, L] and partial_lse [B, S, H] (log2) of S shares -> out [B, H, L], lse [B, H]."""
    batch, num_splits, num_heads, width = partial.shape
    block_s = triton.next_power_of_2(num_splits)
    step = min(block_s, COMBINE_STEP)
    block_l = min(triton.next_power_of_2(width), COMBINE_NUMBERS // step)
    _combine_kernel[(batch * num_heads, triton.cdiv(width, block_l))](
        partial, partial_lse, out, lse, num_splits,
        H=num_heads, L=width, BLOCK_S=block_s, BLOCK_L=block_l, STEP=step,
        STEPS=triton.cdiv(num_splits, step), num_warps=COMBINE_WARPS, **overlapping(partial.device),
    )  # fmt: skip


def _launch_parameters(block_h: int, row_width: int) -> tuple[int, int, int]:
    """(BLOCK_N, STAGES, num_warps): tiles of 64 rows, or 32 where two of them and the queries would fill the memory."""
    if row_width <= 320:
        return 64, 3, 4
    return (32 if block_h == LARGEST_BLOCK_H else 64), 3, 8


def partial_attention(
    q: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor, lse: Tensor, *, latent_dim: int,
    scale: float, num_splits: int,
) -> None:  # fmt: skip
    """Fills out [B, S, H, L] and lse [B, S, H], its logarithm to the base 2, for S shares."""
    batch, num_heads, width = q.shape
    block_h = min(LARGEST_BLOCK_H, max(16, triton.next_power_of_2(num_heads)))
    block_n, stages, num_warps = _launch_parameters(block_h, width)
    _partial_kernel[(num_splits, triton.cdiv(num_heads, block_h), batch)](
        q, cache, block_table, lengths, out, lse, scale / math.log(2.0), block_table.stride(0), num_splits,
        H=num_heads, L=latent_dim, R=width - latent_dim, PAGE=cache.shape[1],
        BLOCK_H=block_h, BLOCK_L=max(16, triton.next_power_of_2(latent_dim)),
        BLOCK_R=max(16, triton.next_power_of_2(width - latent_dim)), BLOCK_N=block_n, STAGES=stages,
        num_warps=num_warps, **overlapping(q.device),
    )  # fmt: skip


def run_mla_decode(
    q: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, latent_dim: int, scale: float, num_splits: int,
    hopper: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, num_heads, _ = q.shape
    out = torch.empty(batch, num_heads, latent_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, num_heads, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse.fill_(float("-inf"))
    # Copies of 16 bytes are all that path has: a cache that begins elsewhere takes the other one.
    if hopper and cache.data_ptr() % 16 == 0:
        from perilune.kernels.mla_decode.hopper import partial_attention as attend
    else:
        attend = partial_attention
    if num_splits == 0:
        capacity = block_table.shape[1] * cache.shape[1]
        num_splits = choose_num_splits(batch, triton.cdiv(num_heads, LARGEST_BLOCK_H), capacity, q.device)
    num_splits = min(num_splits, MOST_SPLITS)
    partial = torch.empty(batch, num_splits, num_heads, latent_dim, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(batch, num_splits, num_heads, dtype=torch.float32, device=q.device)
    with device_of(q):
        attend(
            q, cache, block_table, lengths, partial, partial_lse,
            latent_dim=latent_dim, scale=scale, num_splits=num_splits,
        )  # fmt: skip
        combine(partial, partial_lse, out, lse)
    return out, lse


# What torch.compile sees. Without it the function itself is called: the dispatcher costs the host more than it does.
mla_decode_op = torch.library.custom_op("perilune::mla_decode", run_mla_decode, mutates_args=())


@mla_decode_op.register_fake
def _(q: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, latent_dim: int, scale: float, num_splits: int,
      hopper: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(*q.shape[:2], latent_dim), q.new_empty(q.shape[:2], dtype=torch.float32)
