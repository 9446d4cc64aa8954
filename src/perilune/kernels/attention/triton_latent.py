"""What multi-head latent attention does between its matrix products, in one pass over memory each.

`down` [N, R + E] holds per token a latent of rank R and a key part of width E that all heads share.

    forward    r = 1 / sqrt(mean(latent^2) + eps);  normed = w latent r
               k[:, h, P:] = shared part            for every head h, where P is the width of a head's own key part
    backward   d_up[:, h] = [dk[:, h, :P], dv[:, h]]            the gradient of the up-projection's result, side by side
               d_down[:, R:] = sum over h of dk[:, h, P:]
               g = w d_normed;  d_down[:, :R] = r (g - latent r^2 mean(g latent));  dw = sum of d_normed latent r

The products in between write their results where they are used and read `d_up` as one matrix, so keys and values are
never concatenated or taken apart by a copy of their own.

Shape letters: N tokens, H heads, R rank of the latent, E width of the shared key part, P width of a head's own key
part, V width of a value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import device_of
from perilune.kernels.norm.triton import add_shares, row_programs, row_stages

# Elements of a tile of latents, and of a tile of keys or values; warps that hold it. On an H200 with 32,768 tokens, a
# rank of 512 and 8 heads of 128 + 64 and 128: 0.031 ms forward (half or twice the tile: the same), 0.077 for the
# gradients of keys and values (the best of eight), 0.037 for the norm's backward.
LATENT_TILE, LATENT_WARPS = 2048, 4
KEY_TILE, KEY_WARPS = 2048, 2
BACKWARD_TILE, BACKWARD_WARPS = 1024, 4
MOST_WARPS = 16


@triton.jit
def _norm_kernel(
    down, weight, normed, inverse_rms, k, num_tokens, rank, shared, heads, own, down_stride, eps,
    TOKENS: tl.constexpr, RANK: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TOKENS
    token = first + tl.arange(0, TOKENS)[:, None]
    column = tl.arange(0, RANK)[None, :]
    mask = (token < num_tokens) & (column < rank)
    latent = tl.load(down + token * down_stride + column, mask=mask, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < rank, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, axis=1)[:, None] / rank + eps)
    tl.store(normed + token * rank + column, (latent * scale * gain).to(normed.dtype.element_ty), mask=mask)
    tl.store(inverse_rms + token, scale, mask=token < num_tokens)
    if SHARED > 0:
        row = tl.arange(0, TOKENS * HEADS)[:, None]  # one row per token and head
        token = first + row // HEADS
        head = row % HEADS
        column = tl.arange(0, SHARED)[None, :]
        mask = (token < num_tokens) & (head < heads) & (column < shared)
        part = tl.load(down + token * down_stride + rank + column, mask=mask, other=0.0)
        tl.store(k + (token * heads + head) * (own + shared) + own + column, part, mask=mask)


@triton.jit
def _collect_kernel(
    dk, dv, d_up, d_down, num_tokens, rank, shared, heads, own, value, down_stride,
    TOKENS: tl.constexpr, OWN: tl.constexpr, VALUE: tl.constexpr, SHARED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TOKENS
    row = tl.arange(0, TOKENS * HEADS)[:, None]
    token = first + row // HEADS
    head = row % HEADS
    present = (token < num_tokens) & (head < heads)
    of_head = token * heads + head
    column = tl.arange(0, OWN)[None, :]
    mask = present & (column < own)
    part = tl.load(dk + of_head * (own + shared) + column, mask=mask, other=0.0)
    tl.store(d_up + of_head * (own + value) + column, part, mask=mask)
    column = tl.arange(0, VALUE)[None, :]
    mask = present & (column < value)
    part = tl.load(dv + of_head * value + column, mask=mask, other=0.0)
    tl.store(d_up + of_head * (own + value) + own + column, part, mask=mask)
    if SHARED > 0:
        token = first + tl.arange(0, TOKENS)[:, None, None]
        head = tl.arange(0, HEADS)[None, :, None]
        column = tl.arange(0, SHARED)[None, None, :]
        mask = (token < num_tokens) & (head < heads) & (column < shared)
        place = dk + (token * heads + head) * (own + shared) + own + column
        total = tl.sum(tl.load(place, mask=mask, other=0.0).to(tl.float32), axis=1)
        token = first + tl.arange(0, TOKENS)[:, None]
        column = tl.arange(0, SHARED)[None, :]
        tl.store(
            d_down + token * down_stride + rank + column,
            total.to(d_down.dtype.element_ty),
            mask=(token < num_tokens) & (column < shared),
        )


@triton.jit
def _norm_backward_kernel(
    d_normed, down, weight, inverse_rms, d_down, partials, num_tokens, rank, down_stride,
    TOKENS: tl.constexpr, RANK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, RANK)[None, :]
    gain = tl.load(weight + column, mask=column < rank, other=0.0).to(tl.float32)
    d_gain = tl.zeros((TOKENS, RANK), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_tokens, TOKENS), tl.num_programs(0), num_stages=STAGES):
        token = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)[:, None]
        mask = (token < num_tokens) & (column < rank)
        gradient = tl.load(d_normed + token * rank + column, mask=mask, other=0.0).to(tl.float32)
        latent = tl.load(down + token * down_stride + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(inverse_rms + token, mask=token < num_tokens, other=0.0)
        unit = latent * scale
        d_gain += gradient * unit
        gradient *= gain
        mean = tl.sum(gradient * unit, axis=1)[:, None] / rank
        result = ((gradient - unit * mean) * scale).to(d_down.dtype.element_ty)
        tl.store(d_down + token * down_stride + column, result, mask=mask)
    total = tl.sum(d_gain, axis=0)[None, :]
    tl.store(partials + tl.program_id(0).to(tl.int64) * rank + column, total, mask=column < rank)


def norm_latent(down_NC: Tensor, weight_R: Tensor, eps: float, *, k_NHK: Tensor) -> tuple[Tensor, Tensor]:
    """(normed [N, R], inverse root mean square [N] in float32); writes the shared part into every head of k_NHK.

    k_NHK is contiguous and its own part, in front, is left alone.
    """
    num_tokens, rank = down_NC.shape[0], weight_R.shape[0]
    shared = down_NC.shape[1] - rank
    normed = down_NC.new_empty(num_tokens, rank)
    inverse_rms = torch.empty(num_tokens, dtype=torch.float32, device=down_NC.device)
    if num_tokens:
        block, head_block = (triton.next_power_of_2(n) for n in (rank, k_NHK.shape[1]))
        shared_block = _block(shared)
        # A token's shared part is held once per head: with many heads that is the larger tile of the two.
        tokens, num_warps = _tile(max(block, head_block * shared_block), LATENT_TILE, LATENT_WARPS)
        with device_of(down_NC):
            _norm_kernel[(triton.cdiv(num_tokens, tokens),)](
                down_NC, weight_R.contiguous(), normed, inverse_rms, k_NHK,
                num_tokens, rank, shared, k_NHK.shape[1], k_NHK.shape[2] - shared, down_NC.stride(0), eps,
                TOKENS=tokens, RANK=block, SHARED=shared_block, HEADS=head_block,
                num_warps=num_warps,
            )  # fmt: skip
    return normed, inverse_rms


def collect_gradients(dk_NHK: Tensor, dv_NHV: Tensor, *, d_down_NC: Tensor, shared: int) -> Tensor:
    """d_up [N, H * (P + V)]; writes the gradient of the shared part into the last columns of d_down_NC."""
    dk_NHK, dv_NHV = dk_NHK.contiguous(), dv_NHV.contiguous()
    num_tokens, heads, value = dv_NHV.shape
    own = dk_NHK.shape[2] - shared
    d_up = dv_NHV.new_empty(num_tokens, heads * (own + value))
    if num_tokens:
        head_block, own_block, value_block = (triton.next_power_of_2(n) for n in (heads, own, value))
        shared_block = _block(shared)
        tokens, num_warps = _tile(head_block * max(own_block, value_block, shared_block), KEY_TILE, KEY_WARPS)
        with device_of(dk_NHK):
            _collect_kernel[(triton.cdiv(num_tokens, tokens),)](
                dk_NHK, dv_NHV, d_up, d_down_NC,
                num_tokens, d_down_NC.shape[1] - shared, shared, heads, own, value, d_down_NC.stride(0),
                TOKENS=tokens, OWN=own_block, VALUE=value_block, SHARED=shared_block, HEADS=head_block,
                num_warps=num_warps,
            )  # fmt: skip
    return d_up


def norm_latent_backward(
    d_normed_NR: Tensor, down_NC: Tensor, weight_R: Tensor, inverse_rms_N: Tensor, *, d_down_NC: Tensor
) -> Tensor:
    """dweight in float32; writes the gradient of the latents into the first columns of d_down_NC."""
    num_tokens, rank = d_normed_NR.shape
    if not num_tokens:
        return torch.zeros_like(weight_R, dtype=torch.float32)
    assert down_NC.stride(0) == d_down_NC.stride(0)
    block = triton.next_power_of_2(rank)
    tokens = max(1, BACKWARD_TILE // block)
    programs = row_programs(triton.cdiv(num_tokens, tokens), block, down_NC.device, most=4)
    partials = torch.empty(programs, rank, dtype=torch.float32, device=down_NC.device)
    with device_of(d_normed_NR):
        _norm_backward_kernel[(programs,)](
            d_normed_NR, down_NC, weight_R.contiguous(), inverse_rms_N, d_down_NC, partials,
            num_tokens, rank, down_NC.stride(0),
            TOKENS=tokens, RANK=block, STAGES=row_stages(tokens * block, down_NC.dtype),
            num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    return add_shares(partials)


def _tile(per_token: int, elements: int, warps: int) -> tuple[int, int]:
    """(tokens, warps) of a tile of so many elements, or of one token where that has more: then with more warps."""
    return max(1, elements // per_token), min(MOST_WARPS, warps * max(1, per_token // elements))


def _block(width: int) -> int:
    return triton.next_power_of_2(width) if width else 0
