"""What a token brings to KDA, ready for a kernel that has no activations of its own: one Triton pass each way.

    q' = factor q / sqrt(sum q^2 + eps)     k' = k / sqrt(sum k^2 + eps)     log decay = gate(g), float32

Libraries want normalised q and k and a float32 log decay, and give back their gradients; in plain torch the steps
around them cost as much as the library. Here q, k and g are read once and written once in each direction. `prepare` is
differentiable in q, k, g and the gate's parameters; `prepare_backward` is its gradient by itself.

The backward uses q' and k' as they were rounded, as fla does. Sums over tokens for the gate's parameters go through
one partial sum per strip of tokens, added in a fixed order: the same bits in every run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.kda.gates import BoundedGate, Gate
from perilune.kernels.kda.reference import L2NORM_EPS
from perilune.kernels.triton_support import why_not_triton

GIVEN, SOFTPLUS, BOUNDED = 0, 1, 2  # what becomes of g: used as it is, or one of the gates
# Measured on an H200 (32,768 tokens, 32 heads of 128): 88% of copy bandwidth forward, 85% to 90% backward.
FORWARD_TILE, BACKWARD_TILE, STRIP_TOKENS, NUM_WARPS = 32, 8, 128, 4


class Prepared(NamedTuple):
    q: Tensor  # [B, T, H, K] normalised, times the factor, in q's dtype
    k: Tensor  # [B, T, H, K] normalised, in k's dtype
    log_decay: Tensor  # [B, T, H, K] float32
    q_rstd: Tensor  # [B, T, H] float32, 1 / sqrt(sum q^2 + eps); 1 without the norm
    k_rstd: Tensor


def prepare(
    q: Tensor, k: Tensor, g: Tensor, *, gate: Gate | None, qk_l2norm: bool = True, query_factor: float = 1.0
) -> Prepared:
    """Differentiable. q, k, g [B, T, H, K] on one device with Triton; without a gate, g already is the log decay."""
    if reason := why_not_triton(q):
        raise RuntimeError(f"prepare: {reason}")
    kind, lower_bound, log_rate, bias = gate_arguments(gate, q.shape[-2], q.shape[-1])
    q, k, g = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, g))
    found = torch.ops.perilune.kda_prepare(q, k, g, log_rate, bias, kind, lower_bound, qk_l2norm, query_factor)
    return Prepared(found[0], found[1], g.float() if kind == GIVEN else found[2], found[3], found[4])


def gate_arguments(gate: Gate | None, num_heads: int, key_dim: int) -> tuple[int, float, Tensor | None, Tensor | None]:
    """Kind, lower bound, A_log [H] and dt_bias [H, K] in float32; differentiable views of the gate's parameters."""
    if gate is None:
        return GIVEN, 0.0, None, None
    log_rate = None if gate.A_log is None else gate.A_log.float().contiguous()
    bias = gate.dt_bias.float().reshape(num_heads, key_dim).contiguous()
    if isinstance(gate, BoundedGate):
        return BOUNDED, gate.lower_bound, log_rate, bias
    return SOFTPLUS, 0.0, log_rate, bias


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _softplus(x):
    # log(1 + e) loses small e: below 2^-10 its series is exact to float32.
    small = tl.exp(-tl.abs(x))
    log1p = tl.where(small < 0.0009765625, small * (1 - small * (0.5 - small * 0.3333333333)), tl.log(1 + small))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1 + small)


@triton.jit
def _row_offsets(token, num_tokens, head, stride_batch, stride_token, stride_head):
    row = token // num_tokens  # in 32 bits, as the number of tokens: a division in 64 takes a hundred instructions
    place = token - row * num_tokens
    return row.to(tl.int64) * stride_batch + place.to(tl.int64) * stride_token + head * stride_head


@triton.jit
def _normalize_tile(
    x_ptr, y_ptr, rstd_ptr, token, head, valid, num_tokens, num_heads, stride_batch, stride_token, stride_head,
    factor, eps, NORM: tl.constexpr, KEY: tl.constexpr, KEY_BLOCK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, KEY_BLOCK)
    mask = valid[:, None] & (column < KEY)[None, :]
    offsets = _row_offsets(token, num_tokens, head, stride_batch, stride_token, stride_head)
    x = tl.load(x_ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    row = token.to(tl.int64) * num_heads + head
    if NORM:
        rstd = 1 / tl.sqrt(tl.sum(x * x, axis=1) + eps)
    else:
        rstd = tl.full([x.shape[0]], 1.0, tl.float32)
    y = x * (rstd * factor)[:, None]
    tl.store(y_ptr + row[:, None] * KEY + column[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + row, rstd, mask=valid)


@triton.jit
def _prepare_kernel(
    q_ptr, k_ptr, g_ptr, rate_ptr, bias_ptr, q_out_ptr, k_out_ptr, decay_ptr, q_rstd_ptr, k_rstd_ptr,
    total_tokens, num_tokens, num_heads,
    q_batch, q_token, q_head, k_batch, k_token, k_head, g_batch, g_token, g_head,
    factor, eps, lower_bound,
    KIND: tl.constexpr, RATE: tl.constexpr, NORM: tl.constexpr, KEY: tl.constexpr, KEY_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of tokens of one head: program axis 2 takes q, k or g."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    valid = token < total_tokens
    part = tl.program_id(2)
    if part == 0:
        _normalize_tile(q_ptr, q_out_ptr, q_rstd_ptr, token, head, valid, num_tokens, num_heads,
                        q_batch, q_token, q_head, factor, eps, NORM, KEY, KEY_BLOCK)  # fmt: skip
    elif part == 1:
        _normalize_tile(k_ptr, k_out_ptr, k_rstd_ptr, token, head, valid, num_tokens, num_heads,
                        k_batch, k_token, k_head, 1.0, eps, NORM, KEY, KEY_BLOCK)  # fmt: skip
    else:
        column = tl.arange(0, KEY_BLOCK)
        mask = valid[:, None] & (column < KEY)[None, :]
        offsets = _row_offsets(token, num_tokens, head, g_batch, g_token, g_head)
        x = tl.load(g_ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
        x += tl.load(bias_ptr + head * KEY + column, mask=column < KEY, other=0.0)[None, :]
        if RATE:
            rate = tl.exp(tl.load(rate_ptr + head))
        else:
            rate = 1.0
        if KIND == 1:
            decay = -rate * _softplus(x)
        else:
            decay = lower_bound * _sigmoid(rate * x)
        row = token.to(tl.int64) * num_heads + head
        tl.store(decay_ptr + row[:, None] * KEY + column[None, :], decay, mask=mask)


@triton.jit
def _normalize_backward_strip(
    y_ptr, rstd_ptr, dy_ptr, dx_ptr, first, last, head, num_heads, factor, inverse,
    NORM: tl.constexpr, KEY: tl.constexpr, KEY_BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dx = factor rstd (dy - y (y . dy)) with y the normalised row, which y_ptr holds times the factor."""
    column = tl.arange(0, KEY_BLOCK)
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        valid = token < last
        mask = valid[:, None] & (column < KEY)[None, :]
        row = token.to(tl.int64) * num_heads + head
        places = row[:, None] * KEY + column[None, :]
        dy = tl.load(dy_ptr + places, mask=mask, other=0.0).to(tl.float32)
        if NORM:
            y = tl.load(y_ptr + places, mask=mask, other=0.0).to(tl.float32) * inverse
            rstd = tl.load(rstd_ptr + row, mask=valid, other=0.0)
            dy = (dy - y * tl.sum(y * dy, axis=1)[:, None]) * rstd[:, None]
        tl.store(dx_ptr + places, (dy * factor).to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _prepare_backward_kernel(
    q_ptr, k_ptr, q_rstd_ptr, k_rstd_ptr, g_ptr, rate_ptr, bias_ptr, dq_in_ptr, dk_in_ptr, d_decay_ptr,
    dq_ptr, dk_ptr, dg_ptr, d_bias_ptr, d_rate_ptr,
    total_tokens, num_tokens, num_heads, g_batch, g_token, g_head, factor, inverse, lower_bound,
    KIND: tl.constexpr, RATE: tl.constexpr, NORM: tl.constexpr, KEY: tl.constexpr, KEY_BLOCK: tl.constexpr,
    TILE: tl.constexpr, STRIP: tl.constexpr,
):  # fmt: skip
    """One strip of tokens of one head; the gate's part also leaves the strip's sums for dt_bias and A_log."""
    strip = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    first = strip * STRIP
    last = tl.minimum(first + STRIP, total_tokens)
    if part == 0:
        _normalize_backward_strip(q_ptr, q_rstd_ptr, dq_in_ptr, dq_ptr, first, last, head, num_heads,
                                  factor, inverse, NORM, KEY, KEY_BLOCK, TILE)  # fmt: skip
    elif part == 1:
        _normalize_backward_strip(k_ptr, k_rstd_ptr, dk_in_ptr, dk_ptr, first, last, head, num_heads,
                                  1.0, 1.0, NORM, KEY, KEY_BLOCK, TILE)  # fmt: skip
    else:
        column = tl.arange(0, KEY_BLOCK)
        bias = tl.load(bias_ptr + head * KEY + column, mask=column < KEY, other=0.0)[None, :]
        if RATE:
            rate = tl.exp(tl.load(rate_ptr + head))
        else:
            rate = 1.0
        bias_sum = tl.zeros([TILE, KEY_BLOCK], tl.float32)
        rate_sum = tl.zeros([TILE, KEY_BLOCK], tl.float32)
        for start in range(first, last, TILE):
            token = start + tl.arange(0, TILE)
            mask = (token < last)[:, None] & (column < KEY)[None, :]
            offsets = _row_offsets(token, num_tokens, head, g_batch, g_token, g_head)
            places = (token.to(tl.int64) * num_heads + head)[:, None] * KEY + column[None, :]
            x = tl.load(g_ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32) + bias
            d_decay = tl.load(d_decay_ptr + places, mask=mask, other=0.0)
            if KIND == 1:
                dx = -rate * _sigmoid(x) * d_decay
                rate_sum += -rate * _softplus(x) * d_decay
            else:
                gate = _sigmoid(rate * x)
                dx = lower_bound * rate * gate * (1 - gate) * d_decay
                rate_sum += x * dx
            bias_sum += dx
            tl.store(dg_ptr + places, dx.to(dg_ptr.dtype.element_ty), mask=mask)
        sums = (strip * num_heads + head) * KEY + column
        tl.store(d_bias_ptr + sums, tl.sum(bias_sum, axis=0), mask=column < KEY)
        if RATE:
            tl.store(d_rate_ptr + strip * num_heads + head, tl.sum(rate_sum))


# Operators -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("perilune::kda_prepare", mutates_args=())
def _prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    log_rate: Tensor | None,
    bias: Tensor | None,
    kind: int,
    lower_bound: float,
    qk_l2norm: bool,
    query_factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, num_tokens, num_heads, key_dim = q.shape
    q_out, k_out, decay, q_rstd, k_rstd = _prepare_outputs(q, k, g, kind)
    total = batch * num_tokens
    if total:
        grid = (triton.cdiv(total, FORWARD_TILE), num_heads, 2 if kind == GIVEN else 3)
        _prepare_kernel[grid](
            q, k, g, log_rate if log_rate is not None else q_rstd, bias if bias is not None else q_rstd,
            q_out, k_out, decay, q_rstd, k_rstd, total, num_tokens, num_heads,
            *q.stride()[:3], *k.stride()[:3], *g.stride()[:3], query_factor, L2NORM_EPS, lower_bound,
            KIND=kind, RATE=log_rate is not None, NORM=qk_l2norm, KEY=key_dim,
            KEY_BLOCK=triton.next_power_of_2(key_dim), TILE=FORWARD_TILE, num_warps=NUM_WARPS,
        )  # fmt: skip
    return q_out, k_out, decay, q_rstd, k_rstd


def _prepare_outputs(q: Tensor, k: Tensor, g: Tensor, kind: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    decay_shape = (0,) if kind == GIVEN else g.shape
    rows = q.shape[:3]
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        g.new_empty(decay_shape, dtype=torch.float32),
        q.new_empty(rows, dtype=torch.float32),
        k.new_empty(rows, dtype=torch.float32),
    )


@_prepare.register_fake
def _(q, k, g, log_rate, bias, kind, lower_bound, qk_l2norm, query_factor):
    return _prepare_outputs(q, k, g, kind)


@torch.library.custom_op("perilune::kda_prepare_backward", mutates_args=())
def _prepare_backward(
    q_out: Tensor,
    k_out: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    g: Tensor,
    log_rate: Tensor | None,
    bias: Tensor | None,
    dq_out: Tensor,
    dk_out: Tensor,
    d_decay: Tensor | None,
    kind: int,
    lower_bound: float,
    qk_l2norm: bool,
    query_factor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, g, dt_bias [H, K] and A_log [H]; those of the gate are empty without one."""
    batch, num_tokens, num_heads, key_dim = q_out.shape
    dq, dk, dg, _, _ = _prepare_backward_outputs(q_out, k_out, g, kind)
    total = batch * num_tokens
    strips = triton.cdiv(total, STRIP_TOKENS)
    d_bias = q_rstd.new_empty(strips, num_heads, key_dim) if kind != GIVEN else q_rstd.new_empty(0)
    d_rate = q_rstd.new_empty(strips, num_heads) if kind != GIVEN else q_rstd.new_empty(0)
    if total:
        d_decay = q_rstd if d_decay is None else d_decay
        _prepare_backward_kernel[(strips, num_heads, 2 if kind == GIVEN else 3)](
            q_out, k_out, q_rstd, k_rstd, g, log_rate if log_rate is not None else q_rstd,
            bias if bias is not None else q_rstd, dq_out, dk_out, d_decay, dq, dk, dg, d_bias, d_rate,
            total, num_tokens, num_heads, *g.stride()[:3], query_factor, 1 / query_factor if query_factor else 0.0,
            lower_bound, KIND=kind, RATE=log_rate is not None, NORM=qk_l2norm, KEY=key_dim,
            KEY_BLOCK=triton.next_power_of_2(key_dim), TILE=BACKWARD_TILE, STRIP=STRIP_TOKENS, num_warps=NUM_WARPS,
        )  # fmt: skip
    if kind == GIVEN:
        return dq, dk, dg, d_bias, d_rate
    return dq, dk, dg, d_bias.sum(0), d_rate.sum(0)


def _prepare_backward_outputs(
    q_out: Tensor, k_out: Tensor, g: Tensor, kind: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    has_gate = kind != GIVEN
    return (
        q_out.new_empty(q_out.shape),
        k_out.new_empty(k_out.shape),
        g.new_empty(g.shape if has_gate else (0,)),
        g.new_empty(q_out.shape[2:] if has_gate else (0,), dtype=torch.float32),
        g.new_empty(q_out.shape[2:3] if has_gate else (0,), dtype=torch.float32),
    )


@_prepare_backward.register_fake
def _(q_out, k_out, q_rstd, k_rstd, g, log_rate, bias, dq_out, dk_out, d_decay, kind, lower_bound, qk_l2norm,
      query_factor):  # fmt: skip
    return _prepare_backward_outputs(q_out, k_out, g, kind)


def prepare_backward(
    prepared: Prepared,
    g: Tensor,
    dq_out: Tensor,
    dk_out: Tensor,
    d_decay: Tensor,
    *,
    gate: Gate | None,
    qk_l2norm: bool = True,
    query_factor: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, g, A_log and dt_bias from those of what `prepare` returned."""
    kind, lower_bound, log_rate, bias = gate_arguments(gate, g.shape[-2], g.shape[-1])
    g = g if g.stride(-1) == 1 else g.contiguous()
    dq, dk, dg, d_bias, d_rate = torch.ops.perilune.kda_prepare_backward(
        prepared.q, prepared.k, prepared.q_rstd, prepared.k_rstd, g, log_rate, bias, dq_out.contiguous(),
        dk_out.contiguous(), None if kind == GIVEN else d_decay.contiguous(), kind, lower_bound, qk_l2norm,
        query_factor,
    )  # fmt: skip
    if gate is None:
        return dq, dk, d_decay.to(g.dtype), None, None
    d_log_rate = None if gate.A_log is None else d_rate.to(gate.A_log.dtype)
    return dq, dk, dg, d_log_rate, d_bias.view(gate.dt_bias.shape).to(gate.dt_bias.dtype)


def _setup_context(ctx, inputs, output) -> None:
    _, _, g, log_rate, bias, kind, lower_bound, qk_l2norm, query_factor = inputs
    q_out, k_out, _, q_rstd, k_rstd = output
    ctx.save_for_backward(q_out, k_out, q_rstd, k_rstd, g, log_rate, bias)
    ctx.options = (kind, lower_bound, qk_l2norm, query_factor)
    ctx.mark_non_differentiable(q_rstd, k_rstd)


def _autograd_backward(ctx, dq_out, dk_out, d_decay, *_):
    q_out, k_out, q_rstd, k_rstd, g, log_rate, bias = ctx.saved_tensors
    kind = ctx.options[0]
    dq, dk, dg, d_bias, d_rate = torch.ops.perilune.kda_prepare_backward(
        q_out, k_out, q_rstd, k_rstd, g, log_rate, bias, dq_out.contiguous(), dk_out.contiguous(),
        None if kind == GIVEN else d_decay.contiguous(), *ctx.options,
    )  # fmt: skip
    if kind == GIVEN:  # g passed by outside the operator
        return dq, dk, None, None, None, None, None, None, None
    return dq, dk, dg, None if log_rate is None else d_rate, d_bias, None, None, None, None


_prepare.register_autograd(_autograd_backward, setup_context=_setup_context)
