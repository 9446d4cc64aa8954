"""Kimi Delta Attention in Triton, gradients inside a chunk (notation and decays of triton_chunk.py).

Given D, dD, the state S before and the gradient dS after every chunk from triton_scan.py, with X = (beta k, scale q)
the writing and reading rows and X' = X e^G:

    Y = (-A^T dD, do)     dX' = Y S^T     d(L, P) = tril(Y D^T)     d(to_end) = D dS^T     dv = beta A^T dD

dL needs no derivative of the inverse because A^T (dD R^T) A^T = (A^T dD)(A R)^T. From there everything is local to a
channel, so `chunk_gradients` runs per block of channels, the sums over a whole row that the L2 norms need included,
because o is linear in q, and D almost so in k:

    q . dq = do . o          k . dk = y . (beta v - 2 D),  y = -A^T dD

dG collects x * dx of every exponential with the very operands that entered the products, so that the two ends of a pair
cancel in dg up to the last bit of the accumulation. Nothing is divided by beta or by a decay.
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.kernels.kda.triton_chunk import (
    SMALLEST_LEARNING_GATE,
    SOFTPLUS,
    TO_END,
    WHOLE,
    dot,
    interval_sums,
    level_decays,
    load_gate_parameters,
    load_strength,
    octet_decays,
)


@triton.jit
def chunk_signals(
    v, beta, o, d_o, A, writes, chunk_start, chunk_length,
    signals,  # dD on entry, y = -A^T dD on return [chunks, H, C, V]
    d_L, d_P, d_v, along, d_beta,  # [chunks, H, C, C] twice, like v, [B * T, H, 2], [B * T, H]
    v_token, v_head, beta_token, beta_head, o_token, o_head, do_token, do_head,
    H, beta_max, num_channels,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, BETA_SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program per chunk and head. along = (q . dq, k . dk); d_beta gets the values' part of its gradient."""
    record = tl.program_id(0).to(tl.int64)
    chunk = record // H
    head = (record % H).to(tl.int32)
    length = tl.load(chunk_length + chunk)
    if length == 0:
        return
    OPERAND = A.dtype.element_ty
    rows = tl.arange(0, C)
    valid = rows < length
    inside = valid[:, None]
    token = tl.load(chunk_start + chunk).to(tl.int64) + rows
    strength = load_strength(beta + token * beta_token + head * beta_head, valid, beta_max, BETA_SIGMOID)
    i, j = rows[:, None], rows[None, :]
    square = record * C * C + i * C + j
    inverse = tl.load(A + square)
    products_L = tl.zeros([C, C], tl.float32)
    products_P = tl.zeros([C, C], tl.float32)
    query_along = tl.zeros([C], tl.float32)
    key_along = tl.zeros([C], tl.float32)
    value_part = tl.zeros([C], tl.float32)
    for first in tl.range(0, num_channels, BV):
        channels = (first + tl.arange(0, BV))[None, :]
        tile = record * C * V + i * V + channels
        y = (-dot(tl.trans(inverse), tl.load(signals + tile), PRECISION)).to(OPERAND)
        tl.store(signals + tile, y)
        write = tl.load(writes + tile)
        out = tl.load(d_o + token[:, None] * do_token + head * do_head + channels, mask=inside, other=0.0)
        products_L = tl.dot(y, tl.trans(write), products_L, input_precision=PRECISION)
        products_P = tl.dot(out.to(OPERAND), tl.trans(write), products_P, input_precision=PRECISION)
        value = tl.load(v + token[:, None] * v_token + head * v_head + channels, mask=inside, other=0.0)
        answer = tl.load(o + token[:, None] * o_token + head * o_head + channels, mask=inside, other=0.0)
        signal = y.to(tl.float32)
        value = value.to(tl.float32)
        query_along += tl.sum(out.to(tl.float32) * answer.to(tl.float32), 1)
        key_along += tl.sum(signal * (value * strength[:, None] - 2.0 * write.to(tl.float32)), 1)
        value_part -= tl.sum(signal * value, 1)
        d_value = (-signal * strength[:, None]).to(d_v.dtype.element_ty)
        tl.store(d_v + (token[:, None] * H + head) * V + channels, d_value, mask=inside)
    tl.store(d_L + square, tl.where(i > j, products_L, 0.0).to(OPERAND))
    tl.store(d_P + square, tl.where(i >= j, products_P, 0.0).to(OPERAND))
    place = token * H + head
    tl.store(along + place * 2, query_along, mask=valid)
    tl.store(along + place * 2 + 1, key_along, mask=valid)
    tl.store(d_beta + place, value_part, mask=valid)


@triton.jit
def chunk_gradients(
    q, k, g, beta, d_o, rstd, along, intervals, later, flows, chunk_start, chunk_length,
    signals, writes, states, d_states, d_L, d_P,
    d_q, d_k, d_g, d_beta,  # d_beta [K / BK, B * T, H]: the keys' part of its gradient
    q_token, q_head, k_token, k_head, beta_token, beta_head, do_token, do_head,
    H, num_tokens, scale, beta_max,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    FLOWS: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: chunks x heads x blocks of key channels, the last fastest. d_g: the gradient of the log decay."""
    block = tl.program_id(0) % (K // BK)
    record = (tl.program_id(0) // (K // BK)).to(tl.int64)
    chunk = record // H
    head = (record % H).to(tl.int32)
    length = tl.load(chunk_length + chunk)
    if length == 0:
        return
    OPERAND = d_L.dtype.element_ty
    rows = tl.arange(0, C)
    valid = rows < length
    inside = valid[:, None]
    token = tl.load(chunk_start + chunk).to(tl.int64) + rows
    place = token * H + head
    i, j = rows[:, None], rows[None, :]
    strength = load_strength(beta + token * beta_token + head * beta_head, valid, beta_max, BETA_SIGMOID)[:, None]
    query_norm = tl.zeros([C, 1], tl.float32) + 1.0
    key_norm = query_norm
    if L2NORM:
        query_norm = tl.load(rstd + place * 2, mask=valid, other=0.0)[:, None]
        key_norm = tl.load(rstd + place * 2 + 1, mask=valid, other=0.0)[:, None]
    values = tl.arange(0, BV)[None, :]
    value_tile = record * C * V + i * V + values
    out_tile = token[:, None] * do_token + head * do_head + values

    channels = block * BK + tl.arange(0, BK)
    d_write = tl.zeros([C, BK], tl.float32)
    d_read = tl.zeros([C, BK], tl.float32)
    d_key = tl.zeros([C, BK], tl.float32)
    for step in tl.static_range(V // BV):
        state_tile = record * K * V + channels[:, None] * V + step * BV + values
        S = tl.load(states + state_tile)
        dS = tl.load(d_states + state_tile)
        signal = tl.load(signals + value_tile + step * BV)
        d_write = tl.dot(signal, tl.trans(S), d_write, input_precision=PRECISION)
        out = tl.load(d_o + out_tile + step * BV, mask=inside, other=0.0).to(OPERAND)
        d_read = tl.dot(out, tl.trans(S), d_read, input_precision=PRECISION)
        write = tl.load(writes + value_tile + step * BV)
        d_key = tl.dot(write, tl.trans(dS), d_key, input_precision=PRECISION)

    query = tl.load(q + token[:, None] * q_token + head * q_head + channels[None, :], mask=inside, other=0.0)
    key = tl.load(k + token[:, None] * k_token + head * k_head + channels[None, :], mask=inside, other=0.0)
    gate = tl.load(g + (token[:, None] * H + head) * K + channels[None, :], mask=inside, other=0.0)
    query = query.to(tl.float32) * (query_norm * scale)
    key = key.to(tl.float32) * key_norm
    rise = tl.exp2(interval_sums(gate, intervals, WHOLE, PRECISION, C))
    d_write *= rise
    d_read *= rise
    d_key *= tl.exp2(interval_sums(gate, intervals, TO_END, PRECISION, C))
    key_part = key * d_key
    d_last = tl.sum(key_part, 0)
    for part in tl.static_range(FLOWS):
        d_last += tl.load(flows + (record * FLOWS + part) * K + channels)
    d_G = key * strength * d_write + query * d_read - key_part

    square = record * C * C + i * C + j
    row, column = octet_decays(gate, intervals, PRECISION, C)
    d_write, d_read, d_key, d_G = add_pair_gradients(
        query, key, strength, row, column, d_L, d_P, square, (i >> 3) == (j >> 3),
        d_write, d_read, d_key, d_G, PRECISION,
    )  # fmt: skip
    for level in tl.range(3, 6):
        decay = level_decays(gate, intervals, level, PRECISION, C)
        row = tl.where(((i >> level) & 1) == 1, decay, 0.0)
        d_write, d_read, d_key, d_G = add_pair_gradients(
            query, key, strength, row, decay - row, d_L, d_P, square, (i >> (level + 1)) == (j >> (level + 1)),
            d_write, d_read, d_key, d_G, PRECISION,
        )  # fmt: skip

    target = place[:, None] * K + channels[None, :]
    d_decays = sums_from_here(d_G, later, PRECISION, C) + d_last[None, :]
    tl.store(d_g + target, d_decays.to(d_g.dtype.element_ty), mask=inside)
    tl.store(d_beta + block * num_tokens * H + place, tl.sum(d_write * key, 1), mask=valid)
    d_query = d_read * scale
    d_key += d_write * strength
    if L2NORM:
        query = tl.load(q + token[:, None] * q_token + head * q_head + channels[None, :], mask=inside, other=0.0)
        query = query.to(tl.float32) * query_norm
        d_query -= query * tl.load(along + place * 2, mask=valid, other=0.0)[:, None]
        d_key -= key * tl.load(along + place * 2 + 1, mask=valid, other=0.0)[:, None]
        d_query *= query_norm
        d_key *= key_norm
    tl.store(d_q + target, d_query.to(d_q.dtype.element_ty), mask=inside)
    tl.store(d_k + target, d_key.to(d_k.dtype.element_ty), mask=inside)


@triton.jit
def gate_gradients(
    x, A_log, dt_bias, d_g, d_x, d_rate, d_bias,  # d_x may be d_g; d_rate, d_bias [programs, H, K] float32
    x_row, x_head, num_rows, H, lower_bound,
    K: tl.constexpr, ROWS: tl.constexpr, GATE: tl.constexpr, HAS_RATE: tl.constexpr,
):  # fmt: skip
    """From the gradient of the log decay to that of the gate's input; parameters get one partial sum per program."""
    head = tl.program_id(0) % H
    part = (tl.program_id(0) // H).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    channels = tl.arange(0, K)
    z = tl.load(x + row[:, None] * x_row + head * x_head + channels[None, :], mask=inside, other=0.0).to(tl.float32)
    target = (row[:, None] * H + head) * K + channels[None, :]
    gradient = tl.load(d_g + target, mask=inside, other=0.0).to(tl.float32)
    log_rate, bias = load_gate_parameters(A_log, dt_bias, head, channels, K, GATE, HAS_RATE)
    z += bias
    rate = tl.exp(log_rate)
    if GATE == SOFTPLUS:
        softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
        gradient = tl.where(-rate * softplus < SMALLEST_LEARNING_GATE, 0.0, gradient)
        d_z = -rate * tl.sigmoid(z) * gradient
        d_log_rate = -rate * softplus * gradient
    else:
        open_share = tl.sigmoid(rate * z)
        gradient = tl.where(lower_bound * open_share < SMALLEST_LEARNING_GATE, 0.0, gradient)
        d_z = lower_bound * rate * open_share * (1.0 - open_share) * gradient
        d_log_rate = d_z * z
    tl.store(d_x + target, d_z.to(d_x.dtype.element_ty), mask=inside)
    partial = (part * H + head) * K + channels
    tl.store(d_bias + partial, tl.sum(d_z, 0))
    if HAS_RATE:
        tl.store(d_rate + partial, tl.sum(d_log_rate, 0))


@triton.jit
def add_pair_gradients(
    query, key, strength, row, column, d_L, d_P, square, is_near, d_write, d_read, d_key, d_G,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the pairs of one level contribute: those of is_near [C, C] where `row` and `column` are not 0."""
    OPERAND = d_L.dtype.element_ty
    columns = (key * column).to(OPERAND)
    pairs = tl.where(is_near, tl.load(d_L + square), 0.0)
    write_rows = (key * row * strength).to(OPERAND)
    from_pairs = dot(pairs, columns, PRECISION)
    to_columns = dot(tl.trans(pairs), write_rows, PRECISION)
    d_write += from_pairs * row
    d_G += write_rows.to(tl.float32) * from_pairs
    pairs = tl.where(is_near, tl.load(d_P + square), 0.0)
    read_rows = (query * row).to(OPERAND)
    from_pairs = dot(pairs, columns, PRECISION)
    to_columns = tl.dot(tl.trans(pairs), read_rows, to_columns, input_precision=PRECISION)
    d_read += from_pairs * row
    d_G += read_rows.to(tl.float32) * from_pairs - columns.to(tl.float32) * to_columns
    d_key += to_columns * column
    return d_write, d_read, d_key, d_G


@triton.jit
def sums_from_here(x, later, PRECISION: tl.constexpr, C: tl.constexpr):
    """x [C, BK] -> sum of x over a token and all later ones."""
    table = tl.load(later + tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :])
    if table.dtype == tl.float32:
        sums = dot(table, x, PRECISION)
    else:
        high = x.to(table.dtype)
        low = (x - high.to(tl.float32)).to(table.dtype)
        sums = tl.dot(table, low, tl.dot(table, high))
    return sums
