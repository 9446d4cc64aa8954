"""Attention Residuals (arXiv 2603.15031) for a few tokens at once, without gradients: decoding.

    total = running + x;   sources = the bank's first n, and total;   normed = RMSNorm_w(mix of the sources)

One kernel does all of it, and opening a block is no special case: a sublayer costs one launch, as the residual addition
and the norm of a plain network do. The product of gain and query is taken on the way.

The bank does not change while a block is open. So the read that opens it (`open_few_rows`) mixes the bank for all later
readers of the block too: other programs of the same launch, which a few tokens leave room for. They leave a mix o and
its log-sum-exp, and a later reader (`merge_few_rows`) joins these with the running sum: two vectors instead of all,

    h = (exp(lse) o + exp(score) total) / (exp(lse) + exp(score)).

Where the chip can, a launch overlaps with the end of the one before it (dependent_launch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from perilune.kernels.attnres.triton_kernels import _sum_pair
from perilune.kernels.attnres.triton_launch import mix_warps
from perilune.kernels.dependent_launch import overlapping
from perilune.kernels.launch import device_of

MOST_ROWS = 512
MOST_SOURCES = 16
MOST_WIDTH = 4096
"""A thread holds 8 numbers of every source, in registers."""
MOST_READERS = 16
"""Of a block, whose queries are arguments of one kernel."""


@triton.jit(do_not_specialize=["num_sources", "num_tokens"])
def _read_kernel(
    bank_ptr, running_ptr, x_ptr, queries, gains, weight_ptr, total_ptr, normed_ptr, ahead_ptr, log_sum_ptr,
    num_sources, num_tokens, eps, norm_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, READERS: tl.constexpr, ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token and one reader. All sources are one tile [ROWS, width] in registers; the last of them is the total.

    Reader 0 is the sublayer that reads now: it stores total and normed. The others store their mix and its log-sum-exp.
    """
    token = tl.program_id(0).to(tl.int64)
    reader = tl.program_id(1)
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    inside = columns < WIDTH
    offsets = token * WIDTH + columns
    u = tl.load(queries[0] + columns, mask=inside, other=0.0).to(tl.float32)
    u *= tl.load(gains[0] + columns, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, READERS):
        if reader == i:
            u = tl.load(queries[i] + columns, mask=inside, other=0.0).to(tl.float32)
            u *= tl.load(gains[i] + columns, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()  # weights are there already, what kernels wrote may not be
    finished = bank_ptr + rows.to(tl.int64) * num_tokens * WIDTH + offsets
    v = tl.load(finished, mask=(rows < num_sources) & inside, other=0.0).to(tl.float32)
    total = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    if ADD:
        running = tl.load(running_ptr + offsets, mask=inside, other=0.0)
        total = (total.to(tl.float32) + running.to(tl.float32)).to(total.dtype)
    v = tl.where(rows == num_sources, total.to(tl.float32), v)
    square, dot = _sum_pair(v * v, v * u)
    score = tl.where(rows <= num_sources, dot * tl.rsqrt(square / WIDTH + eps), float("-inf"))
    top = tl.max(score, axis=0)[None, :]
    p = tl.exp(score - top)
    mass = tl.sum(p, axis=0)[None, :]
    h = tl.sum(p * (1.0 / mass) * v, axis=0)[None, :]
    if reader == 0:
        tl.store(total_ptr + offsets, total, mask=inside)
        norm = tl.rsqrt(tl.sum(h * h, axis=1)[:, None] / WIDTH + norm_eps)
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed_ptr + offsets, (h * norm * weight).to(normed_ptr.dtype.element_ty), mask=inside)
    else:
        place = (reader - 1).to(tl.int64) * num_tokens + token
        tl.store(ahead_ptr + place * WIDTH + columns, h, mask=inside)
        tl.store(log_sum_ptr + place + tl.zeros([1, 1], tl.int32), top + tl.log(mass))


@triton.jit
def _merge_kernel(
    ahead_ptr, log_sum_ptr, running_ptr, x_ptr, query_ptr, gain_ptr, weight_ptr, total_ptr, normed_ptr, eps, norm_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    offsets = token * WIDTH + columns
    u = tl.load(query_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    u *= tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    total = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    ahead = tl.load(ahead_ptr + offsets, mask=inside, other=0.0)
    log_sum = tl.load(log_sum_ptr + token)
    if ADD:
        running = tl.load(running_ptr + offsets, mask=inside, other=0.0)
        total = (total.to(tl.float32) + running.to(tl.float32)).to(total.dtype)
    tl.store(total_ptr + offsets, total, mask=inside)
    v = total.to(tl.float32)
    square, dot = _sum_pair(v * v, v * u)
    score = dot * tl.rsqrt(square / WIDTH + eps)
    # The share of the running sum: exp(score) / (exp(score) + exp(log_sum)), which no large score makes infinite.
    share = 1.0 / (1.0 + tl.exp(log_sum - score))
    h = ahead + share * (v - ahead)
    norm = tl.rsqrt(tl.sum(h * h, axis=1)[:, None] / WIDTH + norm_eps)
    tl.store(normed_ptr + offsets, (h * norm * weight).to(normed_ptr.dtype.element_ty), mask=inside)


class Ahead(NamedTuple):
    """What the bank is to the later readers of an open block."""

    mixes: Tensor
    """[readers, ..., d] float32"""
    log_sums: Tensor
    """[readers, ...] float32"""


def takes_few_rows(x: Tensor, num_sources: int) -> bool:
    """Whether `read_few_rows` is made for such tokens [..., width] and so many sources, the total included."""
    rows, width = x.shape[:-1].numel(), x.shape[-1]
    return 0 < rows <= MOST_ROWS and num_sources <= MOST_SOURCES and width <= MOST_WIDTH


def read_few_rows(
    bank: Tensor, num_sources: int, running: Tensor | None, x: Tensor, query: Tensor, gain: Tensor, weight: Tensor, *,
    eps: float, norm_eps: float, closes: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, normed), both as x [..., d]. bank [n, ..., d], of which the first `num_sources` hold sources.

    closes: total becomes the next source of the bank, in place.
    """
    total, normed, _ = open_few_rows(
        bank, num_sources, running, x, [query], [gain], weight, eps=eps, norm_eps=norm_eps, closes=closes
    )
    return total, normed


@torch.no_grad()
def open_few_rows(
    bank: Tensor, num_sources: int, running: Tensor | None, x: Tensor, queries: Sequence[Tensor],
    gains: Sequence[Tensor], weight: Tensor, *, eps: float, norm_eps: float, closes: bool,
) -> tuple[Tensor, Tensor, Ahead]:  # fmt: skip
    """`read_few_rows` with the first query and gain, and for each of the others what `merge_few_rows` takes."""
    if not num_sources < bank.shape[0]:
        raise ValueError(f"num_sources={num_sources!r} leaves no place in a bank of {bank.shape[0]}")
    if bank.shape[1:] != x.shape or bank.dtype != x.dtype or not bank.is_contiguous():
        raise ValueError(
            f"bank is {bank.dtype} {tuple(bank.shape)}, expected {x.dtype} [n, {', '.join(map(str, x.shape))}] in one "
            "piece, as x is"
        )
    if not 0 < len(queries) == len(gains) <= MOST_READERS:
        raise ValueError(
            f"queries are {len(queries)} and gains {len(gains)}, expected as many of both, 1 to {MOST_READERS}"
        )
    x = x.contiguous()
    normed = torch.empty_like(x)
    total = bank[num_sources] if closes else torch.empty_like(x)
    width, later = x.shape[-1], len(queries) - 1
    ahead = Ahead(
        x.new_empty(later, *x.shape, dtype=torch.float32), x.new_empty(later, *x.shape[:-1], dtype=torch.float32)
    )
    block = triton.next_power_of_2(width)
    with device_of(x):
        _read_kernel[(x.numel() // width, len(queries))](
            bank, x if running is None else running.contiguous(), x, tuple(query.contiguous() for query in queries),
            tuple(gain.contiguous() for gain in gains), weight.contiguous(), total, normed, *ahead,
            num_sources, x.numel() // width, eps, norm_eps,
            WIDTH=width, BLOCK=block, ROWS=triton.next_power_of_2(num_sources + 1), READERS=len(queries),
            ADD=running is not None, num_warps=mix_warps(block), **overlapping(x.device),
        )  # fmt: skip
    return total, normed, ahead


@torch.no_grad()
def merge_few_rows(
    ahead: Ahead, reader: int, running: Tensor | None, x: Tensor, query: Tensor, gain: Tensor, weight: Tensor, *,
    eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, normed), both as x [..., d], for the later reader `reader` of a block, counted from 0."""
    x = x.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    with device_of(x):
        _merge_kernel[(x.numel() // width,)](
            ahead.mixes[reader], ahead.log_sums[reader], x if running is None else running.contiguous(), x,
            query.contiguous(), gain.contiguous(), weight.contiguous(), total, normed, eps, norm_eps,
            WIDTH=width, BLOCK=block, ADD=running is not None, num_warps=mix_warps(block), **overlapping(x.device),
        )  # fmt: skip
    return total, normed
