"""Triton kernels of Attention Residuals (arXiv 2603.15031); what they compute is in `reference.py` and `dense.py`.

`mix_forward` and `mix_backward` hold all sources of one token in registers, as one tile [sources, width], so each is
read once and each gradient written once. Sums over the width cross threads; softmax and sums over sources stay inside a
thread. `merge_forward` and `merge_backward` are phase 2, on tiles [tokens, width]; on request they take the residual
addition before and the RMSNorm after along.

Programs of the backward kernels walk over tokens with a fixed stride and keep their share of the gradients of query
and norm weight in registers. The shares are added in a fixed order afterwards, so results do not vary between runs.
"""

import triton
import triton.language as tl

from perilune.kernels.triton_support import INTERPRETED

# The interpreter runs a reduction of several operands element by element; there each is reduced on its own.
SEPARATE_SUMS = tl.constexpr(INTERPRETED)


@triton.jit
def _add_pairs(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def _add_triples(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _sum_pair(a, b):
    """Both sums over the width by one exchange between warps."""
    if SEPARATE_SUMS:
        return tl.sum(a, axis=1)[:, None], tl.sum(b, axis=1)[:, None]
    first, second = tl.reduce((a, b), 1, _add_pairs)
    return first[:, None], second[:, None]


@triton.jit
def _sum_triple(a, b, c):
    if SEPARATE_SUMS:
        return tl.sum(a, axis=1)[:, None], tl.sum(b, axis=1)[:, None], tl.sum(c, axis=1)[:, None]
    first, second, third = tl.reduce((a, b, c), 1, _add_triples)
    return first[:, None], second[:, None], third[:, None]


@triton.jit
def _source_pointers(sources, wanted, NUM_SOURCES: tl.constexpr):
    """[rows, 1]: where the sources of these numbers start; a number past the last gets the first and must be masked."""
    pointers = sources[0] + wanted * 0
    for i in tl.static_range(1, NUM_SOURCES):
        pointers = tl.where(wanted == i, sources[i], pointers)
    return pointers


@triton.jit
def _direction(query: tl.constexpr, query_ptr, gain_ptr, columns, WIDTH: tl.constexpr, GAIN: tl.constexpr):
    """u = gain * query [1, BLOCK] of one query: only the product enters the scores."""
    place = query * WIDTH + columns
    u = tl.load(query_ptr + place, mask=columns < WIDTH, other=0.0).to(tl.float32)
    if GAIN:
        u = u * tl.load(gain_ptr + place, mask=columns < WIDTH, other=0.0).to(tl.float32)
    return u


@triton.jit(do_not_specialize=["num_tokens"])
def mix_forward(
    sources, query_ptr, gain_ptr, mix_ptr, log_sum_ptr, kept_ptr, num_tokens, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM_SOURCES: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    GAIN: tl.constexpr,
):  # fmt: skip
    """One token: mixes [query, token, width] and log-sum-exps [query, token] over NUM_SOURCES sources.

    Kept for backward, a row for each token: for each query its scores and their log-sum-exp, then the sources' inverse
    RMS.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    here = tl.zeros([1, 1], tl.int32)
    token = tl.program_id(0).to(tl.int64)
    inside = columns < WIDTH
    offsets = token * WIDTH + columns
    is_source = rows < NUM_SOURCES
    v = tl.load(_source_pointers(sources, rows, NUM_SOURCES) + offsets, mask=is_source & inside, other=0.0)
    v = v.to(tl.float32)
    square, dot = _sum_pair(v * v, v * _direction(0, query_ptr, gain_ptr, columns, WIDTH, GAIN))
    inverse_rms = tl.rsqrt(square / WIDTH + eps)
    row = kept_ptr + token * (QUERIES * (NUM_SOURCES + 1) + NUM_SOURCES)
    for i in tl.static_range(NUM_SOURCES):
        # One number at a time: all threads hold all of them, and a column of numbers would first change hands.
        place = row + QUERIES * (NUM_SOURCES + 1) + i + here
        tl.store(place, tl.sum(tl.where(rows == i, inverse_rms, 0.0), axis=0)[None, :])
    for query in tl.static_range(QUERIES):
        if query > 0:
            dot = tl.sum(v * _direction(query, query_ptr, gain_ptr, columns, WIDTH, GAIN), axis=1)[:, None]
        score = tl.where(is_source, dot * inverse_rms, float("-inf"))
        top = tl.max(score, axis=0)[None, :]
        p = tl.exp(score - top)
        scale = tl.sum(p, axis=0)[None, :]
        log_sum = top + tl.log(scale)
        kept = row + query * (NUM_SOURCES + 1)
        for i in tl.static_range(NUM_SOURCES):
            tl.store(kept + i + here, tl.sum(tl.where(rows == i, score, 0.0), axis=0)[None, :])
        tl.store(kept + NUM_SOURCES + here, log_sum)
        tl.store(log_sum_ptr + query * num_tokens.to(tl.int64) + token + here, log_sum)
        mix = tl.sum(p * (1.0 / scale) * v, axis=0)[None, :]
        place = mix_ptr + query * num_tokens.to(tl.int64) * WIDTH + offsets
        tl.store(place, mix.to(mix_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _column(pointer, first, rows, GROUP: tl.constexpr, LENGTH: tl.constexpr):
    """[GROUP, 1]: numbers first, first + 1, ... of a list of LENGTH, 0 past its end; every thread loads all of them."""
    column = tl.zeros([GROUP, 1], tl.float32)
    for i in tl.static_range(GROUP):
        number = tl.load(pointer + first + i, mask=first + i < LENGTH, other=0.0)
        column = tl.where(rows == i, number, column)
    return column


@triton.jit
def _column_again(pointer, rows, ROWS: tl.constexpr, LENGTH: tl.constexpr):
    """The same from 0 on, of numbers that are near already.

    The cache modifier is the default one; named, it keeps the compiler from holding numbers since their first load.
    """
    column = tl.zeros([ROWS, 1], tl.float32)
    for i in tl.static_range(LENGTH):
        column = tl.where(rows == i, tl.load(pointer + i, cache_modifier=".ca"), column)
    return column


@triton.jit
def _probability(kept, first, rows, NUM_SOURCES: tl.constexpr, GROUP: tl.constexpr):
    """Score and softmax weight [GROUP, 1] of sources first, first + 1, ... for one query; both 0 past the last."""
    score = _column(kept, first, rows, GROUP, NUM_SOURCES)
    return score, tl.where(first + rows < NUM_SOURCES, tl.exp(score - tl.load(kept + NUM_SOURCES)), 0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def mix_backward(
    sources, query_ptr, gain_ptr, grad_mix_ptr, base_ptr, kept_ptr, grad_ptr, partial_ptr, num_tokens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM_SOURCES: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr, GAIN: tl.constexpr, FIRST_BASE: tl.constexpr,
):  # fmt: skip
    """Gradients of all sources [source, token, width] from those of the mixes; shares of that of u = gain * query.

        ds = p (g . v + base),   base = dlse - g . o
        dv = sum over queries of p g + ds r u  -  (ds s) r^2 / width v,   du = sum of ds r v

    The bases [query, token] of all queries but the first are given. That of the first is made here from its mix, to
    which a given one is added with FIRST_BASE; the first walk over the sources that it takes also brings them into the
    cache for the second, which handles GROUP sources at a time.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, GROUP)[:, None]
    partial_rows = tl.arange(0, PARTIAL_ROWS)[:, None]
    inside = columns < WIDTH
    stride = num_tokens.to(tl.int64) * WIDTH
    partial = tl.zeros([PARTIAL_ROWS, BLOCK], tl.float32)
    program = tl.program_id(0)
    for step in range(program, num_tokens, tl.num_programs(0)):
        token = tl.full([], step, tl.int64)
        offsets = token * WIDTH + columns
        row = kept_ptr + token * (QUERIES * (NUM_SOURCES + 1) + NUM_SOURCES)
        g0 = tl.load(grad_mix_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        base0 = tl.zeros([1, 1], tl.float32)
        if NUM_SOURCES > 1:
            mix = tl.zeros([1, BLOCK], tl.float32)
            for first in range(0, NUM_SOURCES, GROUP):
                wanted = first + rows
                mask = (wanted < NUM_SOURCES) & inside
                v = tl.load(_source_pointers(sources, wanted, NUM_SOURCES) + offsets, mask=mask, other=0.0)
                _, p = _probability(row, first, rows, NUM_SOURCES, GROUP)
                mix += tl.sum(p * v.to(tl.float32), axis=0)[None, :]
            base0 -= tl.sum(g0 * mix, axis=1)[:, None]
        if FIRST_BASE:
            base0 += tl.load(base_ptr + token)
        for first in range(0, NUM_SOURCES, GROUP):
            wanted = first + rows
            mask = (wanted < NUM_SOURCES) & inside
            v = tl.load(_source_pointers(sources, wanted, NUM_SOURCES) + offsets, mask=mask, other=0.0)
            v = v.to(tl.float32)
            inverse_rms = _column(row + QUERIES * (NUM_SOURCES + 1), first, rows, GROUP, NUM_SOURCES)
            grad_v = tl.zeros([GROUP, BLOCK], tl.float32)
            shrink = tl.zeros([GROUP, 1], tl.float32)
            for query in tl.static_range(QUERIES):
                g, base = g0, base0
                if query > 0:
                    g = tl.load(grad_mix_ptr + query * stride + offsets, mask=inside, other=0.0).to(tl.float32)
                    base = tl.load(base_ptr + query * num_tokens.to(tl.int64) + token)
                score, p = _probability(row + query * (NUM_SOURCES + 1), first, rows, NUM_SOURCES, GROUP)
                if NUM_SOURCES == 1:
                    # p is exactly 1 and does not move with the score: only the gradient of the log-sum-exp is left.
                    ds = p * base
                else:
                    ds = p * (tl.sum(v * g, axis=1)[:, None] + base)
                shrink += ds * score
                ds = ds * inverse_rms
                grad_v += p * g + ds * _direction(query, query_ptr, gain_ptr, columns, WIDTH, GAIN)
                partial = tl.where(partial_rows == query, partial + tl.sum(ds * v, axis=0)[None, :], partial)
            grad_v -= shrink * inverse_rms * inverse_rms * (1.0 / WIDTH) * v
            tl.store(grad_ptr + wanted * stride + offsets, grad_v.to(grad_ptr.dtype.element_ty), mask=mask)
    place = (program.to(tl.int64) * QUERIES + partial_rows) * WIDTH + columns
    tl.store(partial_ptr + place, partial, mask=(partial_rows < QUERIES) & inside)


@triton.jit(do_not_specialize=["num_tokens"])
def held_mix_backward(
    sources, query_ptr, gain_ptr, grad_mix_ptr, kept_ptr, grad_ptr, partial_ptr, num_tokens,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM_SOURCES: tl.constexpr, ROWS: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """mix_backward for one query, several sources and no gradient of the log-sum-exp: all sources of a token in
    registers, one walk over them and one exchange between threads, for all g . v at once; g . o is their mean by p."""
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    inside = columns < WIDTH
    mask = (rows < NUM_SOURCES) & inside
    stride = num_tokens.to(tl.int64) * WIDTH
    u = _direction(0, query_ptr, gain_ptr, columns, WIDTH, GAIN)
    partial = tl.zeros([1, BLOCK], tl.float32)
    program = tl.program_id(0)
    for step in range(program, num_tokens, tl.num_programs(0)):
        token = tl.full([], step, tl.int64)
        offsets = token * WIDTH + columns
        row = kept_ptr + token * (2 * NUM_SOURCES + 1)
        g = tl.load(grad_mix_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(_source_pointers(sources, rows, NUM_SOURCES) + offsets, mask=mask, other=0.0)
        _, p = _probability(row, 0, rows, NUM_SOURCES, ROWS)
        v = v.to(tl.float32)
        dot = tl.sum(v * g, axis=1)[:, None]
        ds = p * (dot - tl.sum(p * dot, axis=0)[None, :])
        score = _column_again(row, rows, ROWS, NUM_SOURCES)
        inverse_rms = _column_again(row + NUM_SOURCES + 1, rows, ROWS, NUM_SOURCES)
        shrink = ds * score * inverse_rms * inverse_rms * (1.0 / WIDTH)
        ds = ds * inverse_rms
        partial += tl.sum(ds * v, axis=0)[None, :]
        grad_v = p * g + ds * u - shrink * v
        tl.store(grad_ptr + rows * stride + offsets, grad_v.to(grad_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + program.to(tl.int64) * WIDTH + columns, partial, mask=inside)


@triton.jit
def add_direction_shares(
    partial_ptr, query_ptr, gain_ptr, grad_query_ptr, grad_gain_ptr, num_shares, num_columns,
    SHARES: tl.constexpr, COLUMNS: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """du is the sum of the shares [share, column] in a fixed order; dquery = gain du, dgain = query du."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = columns < num_columns
    total = tl.zeros([SHARES, COLUMNS], tl.float32)
    for first in range(0, num_shares, SHARES):
        shares = first + tl.arange(0, SHARES)[:, None]
        total += tl.load(partial_ptr + shares * num_columns + columns, mask=inside & (shares < num_shares), other=0.0)
    grad = tl.sum(total, axis=0)[None, :]
    if GAIN:
        query = tl.load(query_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_gain_ptr + columns, (grad * query).to(grad_gain_ptr.dtype.element_ty), mask=inside)
        grad = grad * tl.load(gain_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(grad_query_ptr + columns, grad.to(grad_query_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def merge_forward(
    running_ptr, x_ptr, o_ptr, log_sum_ptr, u_ptr, weight_ptr, total_ptr, out_ptr, kept_ptr, num_tokens, eps, norm_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """b = running + x (ADD) or x;  z = sigmoid(score(b) - lse);  h = o + z (b - o);  out = RMSNorm(h) (NORM) or h.

    Kept for backward, [4, tokens]: z, score, inverse RMS of b, inverse RMS of h.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    mask = inside & is_token[:, None]
    offsets = tokens[:, None] * WIDTH + columns
    b = tl.load(x_ptr + offsets, mask=mask, other=0.0)
    o = tl.load(o_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        running = tl.load(running_ptr + offsets, mask=mask, other=0.0)
        b = (b.to(tl.float32) + running.to(tl.float32)).to(b.dtype)
        tl.store(total_ptr + offsets, b, mask=mask)
    b = b.to(tl.float32)
    u = tl.load(u_ptr + columns, mask=inside, other=0.0)
    square, dot = _sum_pair(b * b, b * u)
    inverse_rms = tl.rsqrt(square / WIDTH + eps)
    score = dot * inverse_rms
    gate = tl.sigmoid(score - tl.load(log_sum_ptr + tokens, mask=is_token, other=0.0)[:, None])
    h = o + gate * (b - o)
    if NORM:
        norm = tl.rsqrt(tl.sum(h * h, axis=1)[:, None] / WIDTH + norm_eps)
        h = h * norm * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(kept_ptr + 3 * num_tokens.to(tl.int64) + tokens[:, None], norm, mask=is_token[:, None])
    tl.store(out_ptr + offsets, h.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(kept_ptr + tokens[:, None], gate, mask=is_token[:, None])
    tl.store(kept_ptr + num_tokens.to(tl.int64) + tokens[:, None], score, mask=is_token[:, None])
    tl.store(kept_ptr + 2 * num_tokens.to(tl.int64) + tokens[:, None], inverse_rms, mask=is_token[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def merge_backward(
    grad_out_ptr, grad_total_ptr, total_ptr, o_ptr, u_ptr, weight_ptr, kept_ptr, grad_o_ptr, grad_log_sum_ptr,
    grad_ptr, partial_ptr, num_tokens, norm_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, NORM: tl.constexpr, ACCUMULATE: tl.constexpr,
    ALONE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gradients of o, of lse and of the sum b (plus grad_total with ACCUMULATE); shares of those of u and weight.

        do = (1 - z) dh,   ds = z (1 - z) dh . (b - o),   dlse = -ds,   db = z dh + ds r u - ds s r^2 / width b

    With NORM, dh . (b - o) follows from three sums taken at once, before dh itself is known, and lse gets the `base` of
    block_backward, dlse - do . o. (Not so if o is a single source, ALONE, whose weight does not move.)
    """
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < WIDTH
    u = tl.load(u_ptr + columns, mask=inside, other=0.0)
    u_share = tl.zeros([TOKENS, BLOCK], tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        weight_share = tl.zeros([TOKENS, BLOCK], tl.float32)
    program = tl.program_id(0)
    for tile in tl.range(program, tl.cdiv(num_tokens, TOKENS), tl.num_programs(0), num_stages=STAGES):
        tokens = tile * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
        is_token = tokens < num_tokens
        mask = inside & is_token[:, None]
        offsets = tokens[:, None] * WIDTH + columns
        grad_h = tl.load(grad_out_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        o = tl.load(o_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if ACCUMULATE:
            grad_total = tl.load(grad_total_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        kept = kept_ptr + tokens
        gate = tl.load(kept, mask=is_token, other=0.0)[:, None]
        score = tl.load(kept + num_tokens, mask=is_token, other=0.0)[:, None]
        inverse_rms = tl.load(kept + 2 * num_tokens, mask=is_token, other=0.0)[:, None]
        difference = b - o
        if NORM:
            norm = tl.load(kept + 3 * num_tokens, mask=is_token, other=0.0)[:, None]
            unit = (o + gate * difference) * norm
            weight_share += grad_h * unit  # pyrefly: ignore[unbound-name]
            grad_h = grad_h * weight  # pyrefly: ignore[unbound-name]
            along, across, tilt = _sum_triple(grad_h * unit, grad_h * difference, unit * difference)
            along = along / WIDTH
            grad_h = (grad_h - unit * along) * norm
            dot = (across - tilt * along) * norm
        else:
            dot = tl.sum(grad_h * difference, axis=1)[:, None]
        ds = gate * (1.0 - gate) * dot
        base = -ds
        if NORM and not ALONE:
            # dh . o = dh . h - z dh . (b - o), and of dh . h, projected out by the norm, eps leaves a little.
            base -= (1.0 - gate) * (along * WIDTH * norm_eps * norm * norm - gate * dot)  # pyrefly: ignore[unbound-name]
        tl.store(grad_log_sum_ptr + tokens[:, None], base, mask=is_token[:, None])
        tl.store(grad_o_ptr + offsets, ((1.0 - gate) * grad_h).to(grad_o_ptr.dtype.element_ty), mask=mask)
        shrink = ds * score * inverse_rms * inverse_rms * (1.0 / WIDTH)
        ds = ds * inverse_rms
        grad = gate * grad_h + ds * u - shrink * b
        u_share += ds * b
        if ACCUMULATE:
            grad += grad_total  # pyrefly: ignore[unbound-name]
        tl.store(grad_ptr + offsets, grad.to(grad_ptr.dtype.element_ty), mask=mask)
    used: tl.constexpr = 2 if NORM else 1
    place = program.to(tl.int64) * used * WIDTH + columns
    tl.store(partial_ptr + place, tl.sum(u_share, axis=0)[None, :], mask=inside)
    if NORM:
        tl.store(partial_ptr + place + WIDTH, tl.sum(weight_share, axis=0)[None, :], mask=inside)  # pyrefly: ignore[unbound-name]
