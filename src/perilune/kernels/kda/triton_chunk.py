"""Kimi Delta Attention in Triton, what is local to a chunk: gate, decays, products of tokens, their inverse.

A chunk is C = 64 tokens of one head. With G the running sum of the log decays inside the chunk, scale * q and
beta * k the reading and writing rows, the chunk is prepared for the scan over chunks (triton_scan.py) as

    P = tril(decayed scale q k^T)    A = (I + strict_tril(decayed beta k k^T))^-1
    W = A (beta k e^G)    U = A (beta v)    to_end = k e^(G_last - G)    from_start = scale q e^G

**Decays between two tokens.** e^(G_i - G_j) is never formed from e^G and e^-G, which over- and underflow. A pair i > j
is split at an anchor between them, and the decays from j to the anchor and from the anchor to i are both at most 1.
Levels 32, 16 and 8 of a binary tree provide the anchor: at level l, a token is a row if its index has bit l set and a
column otherwise, so one exponential per token, channel and level serves all pairs of the level in one product of
64 x 64. The anchor lies before the row: the past never depends on the future, in any bit.
Pairs inside the same eight tokens share one anchor, the start of the eight. There the column's factor exceeds 1; gates
are clamped at -12 for these pairs (e^-12 = 6e-6 beside a diagonal of 1), so that eight steps span e^96, half of it on
either side of 1. Every gate family is computed alike, at any strength.

**Exponents.** Each is a sum of gates over its own interval: a product with a matrix of zeros and ones (`interval_sums`)
on the tensor cores, whose result already lies where the next product wants it.

**Inverse.** From the diagonal up the same tree: with A the inverse inside blocks of l tokens and L_l the entries that
join two blocks, A - A L_l A is the inverse inside blocks of 2 l. Unlike a series in L nothing grows and cancels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNK = 64
LOG2E = tl.constexpr(1.4426950408889634)
# In units of log2, as all exponents here. Below the first a decay is nothing in float32 (e^-30 = 1e-13).
SMALLEST_GATE = tl.constexpr(-30.0 * 1.4426950408889634)
SMALLEST_OCTET_GATE = tl.constexpr(-12.0 * 1.4426950408889634)
# A log decay below this has no gradient, e^-12.7 = 3e-6 at most in truth: clamped pairs would leave it 6e-6 at any
# strength, and the slope of a strong gate, thousands, would make much of that.
SMALLEST_LEARNING_GATE = tl.constexpr(-12.7)
OCTET_CENTRE = tl.constexpr(-48.0 * 1.4426950408889634)

NO_GATE = tl.constexpr(0)
SOFTPLUS = tl.constexpr(1)
BOUNDED = tl.constexpr(2)
EPS = tl.constexpr(1e-6)

# Rows of `interval_table`.
OCTET = tl.constexpr(0)
WHOLE = tl.constexpr(4)
TO_END = tl.constexpr(5)


def interval_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[6, C, C] of zeros and ones: [n, i, t] tells whether the gate of token t counts for token i.

    n = 0: from the start of i's eight tokens up to i. n = 1, 2, 3, of the levels 8, 16, 32: after the anchor up to a
    row, after a column up to the anchor. n = 4: from the start of the chunk up to i. n = 5: after i.
    """
    i, t = torch.arange(CHUNK).view(-1, 1), torch.arange(CHUNK).view(1, -1)
    masks = [(i // 8 == t // 8) & (t <= i)]
    for level in (8, 16, 32):
        to_row = ((t & level) != 0) & (t <= i)
        from_column = ((t & level) == 0) & (t > i)
        is_same_block = i // (2 * level) == t // (2 * level)
        masks.append(is_same_block & torch.where((i & level) != 0, to_row, from_column))
    masks += [t <= i, t > i]
    return torch.stack(masks).to(device=device, dtype=dtype)


def later_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[C, C] of zeros and ones: [i, t] tells whether token t is i or comes after it."""
    return torch.ones(CHUNK, CHUNK).triu().to(device=device, dtype=dtype)


@triton.jit
def log2_decay(x, log_rate, bias, lower_bound, GATE: tl.constexpr):
    """The gate on a tile x [C, BK] in float32, times log2(e). log_rate is a number, bias [1, BK]."""
    if GATE == SOFTPLUS:
        z = x + bias
        softplus = tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z)))
        x = -tl.exp(log_rate) * softplus
    if GATE == BOUNDED:
        x = lower_bound / (1.0 + tl.exp(-tl.exp(log_rate) * (x + bias)))
    return tl.maximum(x * LOG2E, SMALLEST_GATE)


@triton.jit
def load_gate_parameters(A_log, dt_bias, head, channels, K: tl.constexpr, GATE: tl.constexpr, HAS_RATE: tl.constexpr):
    log_rate = 0.0
    bias = tl.zeros_like(channels).to(tl.float32)
    if GATE != NO_GATE:
        bias = tl.load(dt_bias + head * K + channels).to(tl.float32)
        if HAS_RATE:
            log_rate = tl.load(A_log + head).to(tl.float32)
    return log_rate, bias[None, :]


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Operands of 16 bits as they are; float32 ones in the given precision of the tensor cores."""
    return tl.dot(a, b, input_precision=PRECISION, out_dtype=tl.float32)


@triton.jit
def interval_sums(g, intervals, which, PRECISION: tl.constexpr, C: tl.constexpr):
    """Sums of g [C, BK] over one kind of interval, see `interval_table`; g has the dtype of the table."""
    square = tl.arange(0, C)[:, None] * C + tl.arange(0, C)[None, :]
    return dot(tl.load(intervals + which * C * C + square), g, PRECISION)


@triton.jit
def octet_decays(g, intervals, PRECISION: tl.constexpr, C: tl.constexpr):
    """Factors of a row and of a column for the pairs inside eight tokens."""
    clamped = tl.maximum(g.to(tl.float32), SMALLEST_OCTET_GATE).to(g.dtype)
    since_start = interval_sums(clamped, intervals, OCTET, PRECISION, C) - OCTET_CENTRE
    return tl.exp2(since_start), tl.exp2(-since_start)


@triton.jit
def level_decays(g, intervals, log_level, PRECISION: tl.constexpr, C: tl.constexpr):
    """Factor of a token for the pairs of level 2^log_level, whether it is a row or a column there."""
    return tl.exp2(interval_sums(g, intervals, log_level - 2, PRECISION, C))


@triton.jit
def level_mask(i, j, log_level):
    """The pairs (row i, column j) that meet at level 2^log_level."""
    return ((i >> (log_level + 1)) == (j >> (log_level + 1))) & ((i >> log_level) > (j >> log_level))


@triton.jit
def invert_chunks(
    L, chunk_length, A,  # [chunks, H, C, C]
    H,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A = (I + L)^-1 of strictly lower triangular L: inside blocks of 16, of 32, then of 64. One program per matrix."""
    record = tl.program_id(0).to(tl.int64)
    if tl.load(chunk_length + record // H) == 0:
        return
    L += record * C * C
    A += record * C * C
    OPERAND = A.dtype.element_ty
    r = tl.arange(0, 16)
    i, j = r[None, :, None], r[None, None, :]

    four = tl.arange(0, 4)[:, None, None] * 16
    inside = (four + i) * C + four + j
    D = tl.load(L + inside).to(tl.float32)
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(level_mask(i, j, 0), D, 0.0)
    for level in tl.static_range(1, 4):
        joined = dot(tl.where(level_mask(i, j, level), D, 0.0), inverse, PRECISION)
        inverse -= dot(inverse, joined, PRECISION)
    tl.store(A + inside, inverse.to(OPERAND))

    two = tl.arange(0, 2)[:, None, None] * 32
    below = (two + 16 + i) * C + two + j
    first, second = tl.split(tl.permute(tl.reshape(inverse, (2, 2, 16, 16)), (0, 2, 3, 1)))
    corner = -dot(second, dot(tl.load(L + below).to(tl.float32), first, PRECISION), PRECISION)
    tl.store(A + below, corner.to(OPERAND))
    nothing = tl.zeros_like(first)
    tl.store(A + (two + i) * C + two + 16 + j, nothing.to(OPERAND))

    upper = tl.reshape(tl.permute(tl.join(first, nothing), (0, 1, 3, 2)), (2, 16, 32))
    lower = tl.reshape(tl.permute(tl.join(corner, second), (0, 1, 3, 2)), (2, 16, 32))
    halves = tl.reshape(tl.permute(tl.join(upper, lower), (0, 3, 1, 2)), (2, 32, 32))
    first, second = tl.split(tl.permute(halves, (1, 2, 0)))
    r = tl.arange(0, 32)
    i, j = r[:, None], r[None, :]
    below = (32 + i) * C + j
    corner = -dot(second, dot(tl.load(L + below).to(tl.float32), first, PRECISION), PRECISION)
    tl.store(A + below, corner.to(OPERAND))
    tl.store(A + i * C + 32 + j, tl.zeros_like(corner).to(OPERAND))


@triton.jit
def load_strength(pointers, valid, beta_max, BETA_SIGMOID: tl.constexpr):
    """beta [C] in float32, 0 in padding."""
    strength = tl.load(pointers, mask=valid, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        strength = tl.where(valid, beta_max * tl.sigmoid(strength), 0.0)
    return strength


@triton.jit
def activate_gate(
    x, A_log, dt_bias, g,  # x [rows, H, K] with strides; output g [rows, H, K]
    x_row, x_head, num_rows, H, lower_bound,
    K: tl.constexpr, ROWS: tl.constexpr, GATE: tl.constexpr, HAS_RATE: tl.constexpr,
):  # fmt: skip
    """The log2 decays of all tokens, once, in the dtype in which they are summed."""
    head = tl.program_id(0) % H
    row = (tl.program_id(0) // H).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (row < num_rows)[:, None]
    channels = tl.arange(0, K)
    raw = tl.load(x + row[:, None] * x_row + head * x_head + channels[None, :], mask=inside, other=0.0)
    log_rate, bias = load_gate_parameters(A_log, dt_bias, head, channels, K, GATE, HAS_RATE)
    decay = log2_decay(raw.to(tl.float32), log_rate, bias, lower_bound, GATE)
    tl.store(g + (row[:, None] * H + head) * K + channels[None, :], decay.to(g.dtype.element_ty), mask=inside)


@triton.jit
def chunk_products(
    q, k, g, beta, chunk_start, chunk_length, intervals,  # inputs
    P, L, rstd,  # outputs: [chunks, H, C, C] twice, [B * T, H, 2]
    q_token, q_head, k_token, k_head, beta_token, beta_head,  # strides
    H, scale, beta_max, num_channels,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """P, L and the reciprocal norms of q and k. One program per chunk and head.

    Level by level, and inside it over blocks of channels (num_channels = K, told at run time so that the loop stays a
    loop): the products of a level are finished and stored before the next one needs the registers.
    """
    record = tl.program_id(0).to(tl.int64)
    chunk = record // H
    head = (record % H).to(tl.int32)
    length = tl.load(chunk_length + chunk)
    if length == 0:
        return
    OPERAND = P.dtype.element_ty
    rows = tl.arange(0, C)
    valid = rows < length
    inside = valid[:, None]
    token = tl.load(chunk_start + chunk).to(tl.int64) + rows
    strength = load_strength(beta + token * beta_token + head * beta_head, valid, beta_max, BETA_SIGMOID)
    i, j = rows[:, None], rows[None, :]
    rq = tl.zeros([C], tl.float32)
    rk = tl.zeros([C], tl.float32)

    products_k = tl.zeros([C, C], tl.float32)
    products_q = tl.zeros([C, C], tl.float32)
    for first in tl.range(0, num_channels, BK):
        channels = first + tl.arange(0, BK)
        query = tl.load(q + token[:, None] * q_token + head * q_head + channels[None, :], mask=inside, other=0.0)
        key = tl.load(k + token[:, None] * k_token + head * k_head + channels[None, :], mask=inside, other=0.0)
        gate = tl.load(g + (token[:, None] * H + head) * K + channels[None, :], mask=inside, other=0.0)
        row, column = octet_decays(gate, intervals, PRECISION, C)
        columns = tl.trans((key * column).to(OPERAND))
        products_k = tl.dot((key * row).to(OPERAND), columns, products_k, input_precision=PRECISION)
        products_q = tl.dot((query * row).to(OPERAND), columns, products_q, input_precision=PRECISION)
        if L2NORM:
            rq += tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
            rk += tl.sum(key.to(tl.float32) * key.to(tl.float32), 1)
    if L2NORM:
        rq = tl.rsqrt(rq + EPS)
        rk = tl.rsqrt(rk + EPS)
        norms = rstd + (token * H + head) * 2
        tl.store(norms, rq, mask=valid)
        tl.store(norms + 1, rk, mask=valid)
    else:
        rq += 1.0
        rk += 1.0
    rq *= scale
    rw = rk * strength
    reads = (products_q * rq[:, None] * rk[None, :]).to(OPERAND)
    writes = (products_k * rw[:, None] * rk[None, :]).to(L.dtype.element_ty)

    for level in tl.static_range(3, 6):
        products_k = tl.zeros([C, C], tl.float32)
        products_q = tl.zeros([C, C], tl.float32)
        for first in tl.range(0, num_channels, BK):
            channels = first + tl.arange(0, BK)
            query = tl.load(q + token[:, None] * q_token + head * q_head + channels[None, :], mask=inside, other=0.0)
            key = tl.load(k + token[:, None] * k_token + head * k_head + channels[None, :], mask=inside, other=0.0)
            gate = tl.load(g + (token[:, None] * H + head) * K + channels[None, :], mask=inside, other=0.0)
            decay = level_decays(gate, intervals, level, PRECISION, C)
            decayed = (key * decay).to(OPERAND)
            columns = tl.trans(decayed)
            products_k = tl.dot(decayed, columns, products_k, input_precision=PRECISION)
            products_q = tl.dot((query * decay).to(OPERAND), columns, products_q, input_precision=PRECISION)
        # Pairs of lower levels are done; what this product holds for pairs of higher ones is overwritten next.
        is_done = (i >> level) == (j >> level)
        reads = tl.where(is_done, reads, (products_q * rq[:, None] * rk[None, :]).to(OPERAND))
        writes = tl.where(is_done, writes, (products_k * rw[:, None] * rk[None, :]).to(L.dtype.element_ty))
    square = record * C * C + i * C + j
    tl.store(P + square, tl.where(i >= j, reads, 0.0))
    tl.store(L + square, tl.where(i > j, writes, 0.0))


@triton.jit
def chunk_operands(
    q, k, v, g, beta, chunk_start, chunk_length, intervals, rstd, A,  # inputs
    W, U, to_end, from_start, state_decay,  # outputs, [chunks, H, C, K or V]; state_decay [chunks, H, K]
    q_token, q_head, k_token, k_head, v_token, v_head, beta_token, beta_head,  # strides
    H, scale, beta_max, num_key_channels, num_value_channels,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    L2NORM: tl.constexpr, BETA_SIGMOID: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the scans read. One program per chunk and head."""
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
    inverse = tl.load(A + record * C * C + rows[:, None] * C + rows[None, :])
    query_factor = tl.zeros([C], tl.float32) + scale
    key_factor = tl.zeros([C], tl.float32) + 1.0
    if L2NORM:
        norms = rstd + (token * H + head) * 2
        query_factor *= tl.load(norms, mask=valid, other=0.0)
        key_factor = tl.load(norms + 1, mask=valid, other=0.0)

    for first in tl.range(0, num_value_channels, BV):
        channels = first + tl.arange(0, BV)
        value = tl.load(v + token[:, None] * v_token + head * v_head + channels[None, :], mask=inside, other=0.0)
        target = (value.to(tl.float32) * strength[:, None]).to(OPERAND)
        written = dot(inverse, target, PRECISION).to(OPERAND)
        tl.store(U + record * C * V + rows[:, None] * V + channels[None, :], written)

    for first in tl.range(0, num_key_channels, BK):
        channels = first + tl.arange(0, BK)
        query = tl.load(q + token[:, None] * q_token + head * q_head + channels[None, :], mask=inside, other=0.0)
        key = tl.load(k + token[:, None] * k_token + head * k_head + channels[None, :], mask=inside, other=0.0)
        gate = tl.load(g + (token[:, None] * H + head) * K + channels[None, :], mask=inside, other=0.0)
        last = tl.sum(gate.to(tl.float32), 0)
        rise = tl.exp2(interval_sums(gate, intervals, WHOLE, PRECISION, C))
        fall = tl.exp2(interval_sums(gate, intervals, TO_END, PRECISION, C))
        key = key.to(tl.float32) * key_factor[:, None]
        tile = record * C * K + rows[:, None] * K + channels[None, :]
        write = (key * rise * strength[:, None]).to(OPERAND)
        tl.store(from_start + tile, (query.to(tl.float32) * query_factor[:, None] * rise).to(OPERAND))
        tl.store(to_end + tile, (key * fall).to(OPERAND))
        tl.store(W + tile, dot(inverse, write, PRECISION).to(OPERAND))
        tl.store(state_decay + record * K + channels, tl.exp2(last))
