"""Kimi Delta Attention, chunkwise (arXiv 2510.26692, section 3), exact for any gate, with a hand-written backward.

Within a chunk of C tokens that starts from state S, with rise and fall the decays from the chunk's start up to a token
and from the token to the chunk's end (see decay_tree.py), X = (beta k, scale q) and X' = X * rise:

    L = strict_tril(decayed beta k k^T)      P = tril(decayed scale q k^T)      A = (I + L)^-1
    D = A (beta v - X'_write S)              what the delta rule writes
    o = X'_read S + P D
    S_next = rise_last * S + (k * fall)^T D

Backward, given do and the gradient dS of S_next:

    dD = P^T do + (k * fall) dS                     Y = (-A^T dD, do)
    dS_prev = rise_last * dS + X'^T Y               d(beta v) = A^T dD
    dX' = Y S^T        d(L, P) = tril(Y D^T)        d(k * fall) = D dS^T

dL needs no product with A's derivative because -A^T (dD R^T) A^T = -(A^T dD)(A R)^T. What is saved for it: S at every
chunk start, D, P and A; decays and normalised keys are recomputed. Nothing is divided by beta or by a decay.

Work goes segment by segment (layout.py) so that temporaries stay in cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.kda import decay_tree
from perilune.kernels.kda.gates import Gate
from perilune.kernels.kda.layout import Layout, Segment, Step, dense_layout, packed_layout
from perilune.kernels.kda.operands import (
    GateParameters,
    Problem,
    Target,
    compact,
    gate_gradient,
    gather,
    key_gradient,
    load,
    query_gradient,
)
from perilune.kernels.precision import full_precision

# On CPU a segment's tensors should fit the caches. Elsewhere launches cost more than memory traffic: large segments,
# and large chunks because the scan is serial.
CPU_CHUNK_SIZES, CPU_SEGMENT_BYTES = (4, 8, 16, 32, 64), 1 << 19
ACCELERATOR_CHUNK_SIZES, ACCELERATOR_SEGMENT_BYTES = (64,), 1 << 28


def chunked_kda(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float,
    initial_state_NHKV: Tensor | None,
    cu_seqlens: list[int] | None,
    gate: Gate | None,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] in v's dtype and the final state [N, H, K, V] in `dtype`."""
    batch, _, num_heads, key_dim = q_BTHK.shape
    num_sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state_NHKV is None:
        state = q_BTHK.new_zeros(num_sequences, num_heads, key_dim, v_BTHV.shape[-1], dtype=dtype)
    else:
        state = initial_state_NHKV.to(dtype)
    if q_BTHK.numel() == 0 or v_BTHV.numel() == 0:
        return torch.zeros_like(v_BTHV), state
    parameters = () if gate is None else (gate.A_log, gate.dt_bias)
    tensors = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state, *parameters)
    problem = Problem(
        layout=_choose_layout(q_BTHK, v_BTHV, cu_seqlens, dtype),
        num_heads=num_heads,
        scale=scale,
        gate=gate,
        qk_l2norm=qk_l2norm,
        dtype=dtype,
        needs_grad=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors),
    )
    A_log, dt_bias = parameters or (None, None)
    return _ChunkedKDA.apply(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state, A_log, dt_bias, problem)


def _choose_layout(q_BTHK: Tensor, v_BTHV: Tensor, cu_seqlens: list[int] | None, dtype: torch.dtype) -> Layout:
    batch, num_tokens, num_heads, key_dim = q_BTHK.shape
    width = max(key_dim, v_BTHV.shape[-1])
    if q_BTHK.device.type == "cpu":
        sizes, segment_bytes = CPU_CHUNK_SIZES, CPU_SEGMENT_BYTES
    else:
        sizes, segment_bytes = ACCELERATOR_CHUNK_SIZES, ACCELERATOR_SEGMENT_BYTES
    if cu_seqlens is None:
        lengths = [num_tokens]
    else:
        lengths = [stop - start for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)]
    chunk_size = min(sizes, key=lambda size: _cost(lengths, size, width))
    chunks_per_segment = max(1, segment_bytes // (num_heads * chunk_size * width * dtype.itemsize))
    if cu_seqlens is None and num_tokens % chunk_size == 0:
        return dense_layout(batch, num_tokens, chunk_size, chunks_per_segment)
    borders = tuple(range(0, batch * num_tokens + 1, num_tokens)) if cu_seqlens is None else tuple(cu_seqlens)
    return packed_layout(borders, chunk_size, chunks_per_segment, q_BTHK.device)


def _cost(lengths: list[int], chunk_size: int, width: int) -> float:
    """Relative time: padded rows, times work per row, plus its share of the chunk's state, plus products in the chunk.

    The two constants fit the measured time per row at widths 32, 64 and 128 and chunks of 4 to 64 rows.
    """
    rows = sum(-(-length // chunk_size) for length in lengths) * chunk_size
    return rows * (1 + width / (24 * chunk_size) + chunk_size / 200)


class _ChunkedKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        state: Tensor,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        problem: Problem,
    ) -> tuple[Tensor, Tensor]:
        layout = problem.layout
        parameters = GateParameters.of(A_log, dt_bias, problem)
        carry = state.clone() if layout.sequence_order is None else state.index_select(0, layout.sequence_order)
        output = Target(v, layout)
        saved = []
        for segment in layout.segments:
            rows, key, decay, strength, _, _ = load(q, k, g, beta, parameters, segment, problem)
            levels, rise, fall = decay_tree.climb(rows, key, decay, keep_factors=False)
            reads, inverse = decay_tree.products(levels, rows, key)
            del levels
            rows.mul_(rise.unsqueeze(1))
            key.mul_(fall)
            target = compact(v, segment, problem).mul_(strength)
            states, writes = _scan(segment, carry, rows[:, 0], key, rise[:, -1:].mT, inverse, target)
            output.write(segment, torch.bmm(rows[:, 1], states).baddbmm_(reads, writes))
            if problem.needs_grad:
                saved += [states, writes, reads, inverse]
        ctx.problem = problem
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, *saved)
        return output.result(), carry if layout.sequence_rank is None else carry.index_select(0, layout.sequence_rank)

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, d_output: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        problem: Problem = ctx.problem
        layout = problem.layout
        q, k, v, g, beta, A_log, dt_bias, *saved = ctx.saved_tensors
        parameters = GateParameters.of(A_log, dt_bias, problem)
        totals = GateParameters(*(None if x is None else torch.zeros_like(x) for x in parameters))
        d_q, d_k, d_v, d_g, d_beta = (Target(x, layout) for x in (q, k, v, g, beta))
        d_carry = d_final.clone() if layout.sequence_order is None else d_final.index_select(0, layout.sequence_order)
        for segment in reversed(layout.segments):
            states, writes, reads, inverse = saved[-4:]
            del saved[-4:]
            operands = load(q, k, g, beta, parameters, segment, problem)
            rows, key = operands.rows, operands.key
            levels, rise, fall = decay_tree.climb(rows, key, operands.decay, keep_factors=True)
            state_decay = rise[:, -1:].mT

            signals = writes.new_empty(writes.shape[0], 2, *writes.shape[1:])  # -A^T dD and do
            _load_output_gradient(signals[:, 1], d_output, segment, problem)
            d_key, d_state_decay = _reverse_scan(
                segment,
                d_carry,
                rows * rise.unsqueeze(1),
                key * fall,
                state_decay,
                inverse,
                reads,
                states,
                writes,
                signals,
            )

            d_products = torch.bmm(signals.flatten(1, 2), writes.mT).unflatten(1, (2, -1))
            d_rows = torch.bmm(signals.flatten(1, 2), states.mT).view_as(rows).mul_(rise.unsqueeze(1))
            d_rise = torch.mul(d_rows[:, 0], rows[:, 0]).addcmul_(d_rows[:, 1], rows[:, 1])
            d_rise[:, -1:].addcmul_(d_state_decay.mT, state_decay.mT)
            d_fall = d_key.mul_(fall) * key
            decay_tree.descend(levels, d_products, rows, key, d_rows, d_key, d_rise, d_fall)

            value = compact(v, segment, problem)
            d_strength = (d_rows[:, 0] * key).sum(-1) - value.mul_(signals[:, 0]).sum(-1)
            d_key.addcmul_(d_rows[:, 0], operands.beta)
            d_v_view = d_v.view(segment)
            torch.mul(signals[:, 0].view(d_v_view.shape), -operands.beta.view(*d_v_view.shape[:-1], 1), out=d_v_view)
            d_beta.write(segment, d_strength)
            d_k.write(segment, key_gradient(d_key, operands))
            d_q.write(segment, query_gradient(d_rows[:, 1], operands, problem))
            d_g.write(segment, gate_gradient(d_rise, g, parameters, totals, segment, problem))
        d_state = d_carry if layout.sequence_rank is None else d_carry.index_select(0, layout.sequence_rank)
        d_A_log = None if totals.log_rate is None else totals.log_rate.view(A_log.shape).to(A_log.dtype)
        d_dt_bias = None if totals.bias is None else totals.bias.view(dt_bias.shape).to(dt_bias.dtype)
        return (*(target.result() for target in (d_q, d_k, d_v, d_g, d_beta)), d_state, d_A_log, d_dt_bias, None)


def _active(step: Step, segment: Segment, num_heads: int) -> slice:
    first = (step.first_chunk - segment.first_chunk) * num_heads
    return slice(first, first + step.num_active * num_heads)


def _scan(
    segment: Segment,
    carry: Tensor,
    write_rows: Tensor,
    key_to_end: Tensor,
    state_decay: Tensor,
    inverse: Tensor,
    target: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carry the states through a segment: returns S [Z, K, V] at every chunk's start and what every chunk writes, D."""
    num_heads = carry.shape[1]
    states = carry.new_empty(target.shape[0], *carry.shape[2:])
    writes = torch.empty_like(target)
    for step in segment.steps:
        here = _active(step, segment, num_heads)
        running = carry[step.first_sequence : step.first_sequence + step.num_active].flatten(0, 1)
        before = states[here]
        if step is segment.steps[0]:
            before.copy_(running)
        residual = torch.baddbmm(target[here], write_rows[here], before, alpha=-1)
        torch.bmm(inverse[here], residual, out=writes[here])
        # Sequences that go on within the segment leave their state where the next step reads it, the others in `carry`.
        continuing = step.num_continuing * num_heads
        for part, after in (
            (slice(here.start, here.start + continuing), states[here.stop : here.stop + continuing]),
            (slice(here.start + continuing, here.stop), running[continuing:]),
        ):
            if after.shape[0]:
                torch.mul(states[part], state_decay[part], out=after)
                after.baddbmm_(key_to_end[part].mT, writes[part])
    return states, writes


def _reverse_scan(
    segment: Segment,
    d_carry: Tensor,
    rows_from_start: Tensor,
    key_to_end: Tensor,
    state_decay: Tensor,
    inverse: Tensor,
    reads: Tensor,
    states: Tensor,
    writes: Tensor,
    signals: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carry dS backwards through a segment: fills signals[:, 0] and returns d(k * fall) and d(rise_last) [Z, K, 1]."""
    num_heads = d_carry.shape[1]
    d_writes = torch.bmm(reads.mT, signals[:, 1])
    d_key_to_end = torch.empty_like(key_to_end)
    d_state_decay = torch.empty_like(state_decay)
    for step in reversed(segment.steps):
        here = _active(step, segment, num_heads)
        running = d_carry[step.first_sequence : step.first_sequence + step.num_active].flatten(0, 1)
        torch.bmm(writes[here], running.mT, out=d_key_to_end[here])
        torch.sum(states[here] * running, dim=-1, keepdim=True, out=d_state_decay[here])
        d_writes[here].baddbmm_(key_to_end[here], running)
        torch.neg(torch.bmm(inverse[here].mT, d_writes[here]), out=signals[here, 0])
        running.mul_(state_decay[here]).baddbmm_(rows_from_start[here].flatten(1, 2).mT, signals[here].flatten(1, 2))
    return d_key_to_end, d_state_decay


def _load_output_gradient(block: Tensor, d_output: Tensor, segment: Segment, problem: Problem) -> None:
    view = gather(d_output, segment, problem.layout)
    block.view(view.shape).copy_(view)
    if segment.padding is not None:
        block.unflatten(0, (-1, problem.num_heads)).masked_fill_(segment.padding, 0)
