"""Triton kernels of a block of sublayers with Attention Residuals; `triton.py` says how they fit together.

Two kinds. `source_forward` and `source_backward` run once for each source, on tiles [tokens, columns]: what a source
has to do with all queries that will ever read it is a product of matrices, for the tensor cores. `block_forward` and
`block_backward` run once for each block, one token at a time, with sources of the token in registers: each source is
read once and each gradient written once, whatever the number of queries.
"""

import triton
import triton.language as tl

from perilune.kernels.attnres.triton_kernels import _source_pointers, _sum_pair, _sum_triple


@triton.jit(do_not_specialize=["num_tokens"])
def source_forward(
    running_ptr, x_ptr, u_ptr, u_rest_ptr, source_ptr, score_ptr, scores, log_sums, kept_ptr, num_tokens, eps,
    WIDTH: tl.constexpr, QUERIES: tl.constexpr, START: tl.constexpr, TOTAL: tl.constexpr, SIZE: tl.constexpr,
    OLD_SOURCES: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, QUERY_BLOCK: tl.constexpr,
    ADD: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """source = running + x (ADD) or running; its scores for the queries START, START + 1, ... and its inverse RMS.

    Both go to score [token, TOTAL + 1], the inverse RMS last. SPLIT: queries are float32 and sources are not, so they
    come as sums of two numbers of the sources' dtype.

    The first SIZE queries are those of the block that opens. Their softmax over this source and OLD_SOURCES others,
    whose `scores` are known, is taken here: weights and scores to kept [token, query, 2, source], log-sum-exps.
    """
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    queries = tl.arange(0, QUERY_BLOCK)
    # Queries come first in the products. With the tokens first, wgmma would read the sum `source` from registers while
    # the next round already writes them: NaN now and then. (Triton issue 9433, open; seen with 3.6, ptxas 13.0.)
    dots = tl.zeros([QUERY_BLOCK, TOKENS], tl.float32)
    square = tl.zeros([TOKENS], tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < WIDTH
        offsets = tokens[:, None] * WIDTH + columns[None, :]
        mask = is_token[:, None] & inside[None, :]
        source = tl.load(running_ptr + offsets, mask=mask, other=0.0)
        if ADD:
            x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
            source = (source.to(tl.float32) + x.to(tl.float32)).to(source.dtype)
            tl.store(source_ptr + offsets, source, mask=mask)
        place = queries[:, None] * WIDTH + columns[None, :]
        of_query = (queries < QUERIES)[:, None] & inside[None, :]
        u = tl.load(u_ptr + place, mask=of_query, other=0.0)
        dots = tl.dot(u, tl.trans(source), dots, input_precision="ieee")
        if SPLIT:
            rest = tl.load(u_rest_ptr + place, mask=of_query, other=0.0)
            dots = tl.dot(rest, tl.trans(source), dots, input_precision="ieee")
        wide = source.to(tl.float32)
        square += tl.sum(wide * wide, axis=1)
    inverse_rms = tl.rsqrt(square / WIDTH + eps)
    row = tokens * (TOTAL + 1)
    tl.store(score_ptr + row + TOTAL, inverse_rms, mask=is_token)
    score = tl.trans(dots) * inverse_rms[:, None]
    place = row[:, None] + START + queries[None, :]
    tl.store(score_ptr + place, score, mask=is_token[:, None] & (queries < QUERIES)[None, :])

    mask = is_token[:, None] & (queries < SIZE)[None, :]
    top = score
    for i in tl.static_range(OLD_SOURCES):
        top = tl.maximum(top, tl.load(scores[i] + place, mask=mask, other=float("-inf")))
    scale = tl.exp(score - top)
    for i in tl.static_range(OLD_SOURCES):
        scale += tl.exp(tl.load(scores[i] + place, mask=mask, other=float("-inf")) - top)
    log_sum = top + tl.log(scale)
    kept = kept_ptr + (tokens[:, None] * SIZE + queries[None, :]) * (2 * OLD_SOURCES + 2)
    for i in tl.static_range(OLD_SOURCES):
        other = tl.load(scores[i] + place, mask=mask, other=0.0)
        tl.store(kept + i, tl.exp(other - log_sum), mask=mask)
        tl.store(kept + OLD_SOURCES + 1 + i, other, mask=mask)
    tl.store(kept + OLD_SOURCES, tl.exp(score - log_sum), mask=mask)
    tl.store(kept + 2 * OLD_SOURCES + 1, score, mask=mask)
    for query in tl.static_range(SIZE):
        tl.store(
            log_sums[query] + tokens[:, None] + queries[None, :] * 0,
            log_sum,
            mask=mask & (queries == query)[None, :],
        )


@triton.jit(do_not_specialize=["num_tokens"])
def gather_coefficients(
    parts, sizes, out_ptr, num_tokens, TOKENS: tl.constexpr, QUERY_BLOCK: tl.constexpr, PARTS: tl.constexpr
):
    """C [token, QUERY_BLOCK] from its parts [token, size], one from each reader; zero past the last query."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    queries = tl.arange(0, QUERY_BLOCK)[None, :]
    start = sizes[0]
    pointers = parts[0] + queries
    strides = sizes[0] + queries * 0
    for i in tl.static_range(1, PARTS):
        pointers = tl.where(queries >= start, parts[i] + (queries - start), pointers)
        strides = tl.where(queries >= start, sizes[i], strides)
        start += sizes[i]
    is_token = tokens < num_tokens
    factors = tl.load(pointers + tokens * strides, mask=is_token & (queries < start), other=0.0)
    tl.store(out_ptr + tokens * QUERY_BLOCK + queries, factors.to(out_ptr.dtype.element_ty), mask=is_token)


@triton.jit(do_not_specialize=["num_tokens", "num_queries"])
def source_backward(
    grad_ptr, source_ptr, coefficient_ptr, u_ptr, out_ptr, partial_ptr, num_tokens, tokens_per_share, num_queries,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, QUERY_BLOCK: tl.constexpr,
):  # fmt: skip
    """What all readers' scores add to the gradient of a source, and the source to the gradients of all queries.

        out = grad + C U,   dU = C^T source          C [token, query] = ds r, gathered from the readers

    A program has its columns and a share of the tokens, and keeps the share of dU in registers.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (columns < WIDTH)[None, :]
    queries = tl.arange(0, QUERY_BLOCK)
    is_query = queries < num_queries
    place = queries[:, None] * WIDTH + columns[None, :]
    u = tl.load(u_ptr + place, mask=is_query[:, None] & inside, other=0.0)
    partial = tl.zeros([QUERY_BLOCK, COLUMNS], tl.float32)
    share = tl.program_id(1)
    start = share * tokens_per_share
    stop = tl.minimum(start + tokens_per_share, num_tokens)
    for first in range(start, stop, TOKENS):
        tokens = first + tl.arange(0, TOKENS).to(tl.int64)
        is_token = tokens < stop
        mask = is_token[:, None] & inside
        offsets = tokens[:, None] * WIDTH + columns[None, :]
        source = tl.load(source_ptr + offsets, mask=mask, other=0.0)
        grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        factors = tl.load(
            coefficient_ptr + tokens[:, None] * QUERY_BLOCK + queries[None, :], mask=is_token[:, None], other=0.0
        )
        partial = tl.dot(tl.trans(factors), source, partial, input_precision="ieee")
        grad += tl.dot(factors, u, input_precision="ieee")
        tl.store(out_ptr + offsets, grad.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + share.to(tl.int64) * num_queries * WIDTH + place, partial, mask=is_query[:, None] & inside)


@triton.jit
def block_forward(
    sources, weight_ptr, mixes, kept_ptr, norm_ptr, norm_eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM_SOURCES: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr,
    MIXES: tl.constexpr,
):  # fmt: skip
    """One token: mixes of all sources by the weights in kept [token, query, 2, source]; the first leaves RMS-normed.

    MIXES of the QUERIES are wanted.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, ROWS)[:, None]
    token = tl.program_id(0).to(tl.int64)
    inside = columns < WIDTH
    offsets = token * WIDTH + columns
    v = tl.load(_source_pointers(sources, rows, NUM_SOURCES) + offsets, mask=(rows < NUM_SOURCES) & inside, other=0.0)
    v = v.to(tl.float32)
    own = rows + columns * 0
    for query in tl.static_range(MIXES):
        # A weight at a time, straight to all threads: a column of them, loaded at once, would have to change hands.
        weights = tl.zeros([ROWS, BLOCK], tl.float32)
        for i in tl.static_range(NUM_SOURCES):
            p = tl.load(kept_ptr + (token * QUERIES + query) * (2 * NUM_SOURCES) + i)
            weights = tl.where(own == i, p, weights)
        mix = tl.sum(weights * v, axis=0)[None, :]
        if query == 0:
            norm = tl.rsqrt(tl.sum(mix * mix, axis=1)[:, None] / WIDTH + norm_eps)
            tl.store(norm_ptr + token + tl.zeros([1, 1], tl.int32), norm)
            mix = mix * norm * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(mixes[query] + offsets, mix.to(mixes[query].dtype.element_ty), mask=inside)


@triton.jit
def _pick(pointers, wanted, LENGTH: tl.constexpr):
    """One pointer of a tuple by its number; a number past the last gets the first."""
    pointer = pointers[0]
    for i in tl.static_range(1, LENGTH):
        pointer = tl.where(wanted == i, pointers[i], pointer)
    return pointer


@triton.jit
def _numbers(kept, first, rows, NUM_SOURCES: tl.constexpr, GROUP: tl.constexpr):
    """[GROUP, 1]: numbers first, first + 1, ... of NUM_SOURCES; 0 past the last."""
    numbers = tl.zeros([GROUP, 1], tl.float32)
    for i in tl.static_range(GROUP):
        number = tl.load(kept + first + i, mask=first + i < NUM_SOURCES, other=0.0)
        numbers = tl.where(rows == i, number, numbers)
    return numbers


@triton.jit
def _gradient(query: tl.constexpr, g0, grads, offsets, inside):
    """Gradient of one mix. That of the first is held, the others are loaded."""
    if query == 0:
        return g0
    return tl.load(grads[query] + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _spread(
    query: tl.constexpr, dot, g0, base0, grad_v, shrink, inverse_rms, token, first, rows, offsets, inside, grads, bases,
    kept_ptr, coefficients, NUM_SOURCES: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """What the gradient of one mix adds to those of a group of sources; its share of C is stored."""
    kept = kept_ptr + (token * QUERIES + query) * (2 * NUM_SOURCES)
    p = _numbers(kept, first, rows, NUM_SOURCES, GROUP)
    base = base0 if query == 0 else tl.load(bases[query] + token)
    if NUM_SOURCES == 1:
        # p is exactly 1 and does not move with the score: only the gradient of the log-sum-exp is left in `base`.
        ds = p * base
    else:
        ds = p * (dot + base)
    shrink += ds * _numbers(kept + NUM_SOURCES, first, rows, NUM_SOURCES, GROUP)
    ds = ds * inverse_rms
    for i in tl.static_range(GROUP):
        place = _pick(coefficients, first + i, NUM_SOURCES) + token * QUERIES + query
        one = tl.sum(tl.where(rows == i, ds, 0.0), axis=0)[None, :]
        tl.store(place + tl.zeros([1, 1], tl.int32), one, mask=first + i < NUM_SOURCES)
    if query == 0:
        grad_v += p * g0
    else:
        # The cache modifier is the default one; named, it keeps the compiler from holding the first load in registers.
        g = tl.load(grads[query] + offsets, mask=inside, other=0.0, cache_modifier=".ca")
        grad_v += p * g.to(tl.float32)
    return grad_v, shrink


@triton.jit(do_not_specialize=["num_tokens"])
def block_backward(
    sources, scores, weight_ptr, grads, bases, kept_ptr, norm_ptr, prior_ptr, grad_ptr, coefficients, partial_ptr,
    num_tokens, bank_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM_SOURCES: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr,
    TOTAL: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Gradients of all sources [source, token, width], plus `prior` with ACCUMULATE, but for what U adds to them.

        ds = p (g . v + base),   base = dlse - g . o,   dv = sum over queries of p g  -  (ds s) r^2 / width v

    Stored for `source_backward`: C = ds r. The bases of all queries but the first are given. That of the first, whose
    mix was normed, is made here; the first walk over the sources that it takes also brings them into the cache for the
    second, which handles GROUP sources at a time.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    rows = tl.arange(0, GROUP)[:, None]
    inside = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight_share = tl.zeros([1, BLOCK], tl.float32)
    program = tl.program_id(0)
    for step in range(program, num_tokens, tl.num_programs(0)):
        token = tl.full([], step, tl.int64)
        offsets = token * WIDTH + columns
        mix = tl.zeros([1, BLOCK], tl.float32)
        for first in range(0, NUM_SOURCES, GROUP):
            wanted = first + rows
            mask = (wanted < NUM_SOURCES) & inside
            v = tl.load(_source_pointers(sources, wanted, NUM_SOURCES) + offsets, mask=mask, other=0.0)
            p = _numbers(kept_ptr + token * QUERIES * (2 * NUM_SOURCES), first, rows, NUM_SOURCES, GROUP)
            mix += tl.sum(p * v.to(tl.float32), axis=0)[None, :]
        norm = tl.load(norm_ptr + token)
        unit = mix * norm
        g0 = tl.load(grads[0] + offsets, mask=inside, other=0.0).to(tl.float32)
        weight_share += g0 * unit
        g0 = g0 * weight
        along, length = _sum_pair(g0 * unit, unit * unit)
        g0 = (g0 - unit * (along / WIDTH)) * norm
        base0 = along * (length / WIDTH - 1.0) if NUM_SOURCES > 1 else along * 0.0
        for first in range(0, NUM_SOURCES, GROUP):
            wanted = first + rows
            mask = (wanted < NUM_SOURCES) & inside
            v = tl.load(_source_pointers(sources, wanted, NUM_SOURCES) + offsets, mask=mask, other=0.0)
            v = v.to(tl.float32)
            inverse_rms = tl.zeros([GROUP, 1], tl.float32)
            for i in tl.static_range(GROUP):
                number = tl.load(_pick(scores, first + i, NUM_SOURCES) + token * (TOTAL + 1) + TOTAL)
                inverse_rms = tl.where(rows == i, number, inverse_rms)
            bank = wanted.to(tl.int64) * bank_stride + offsets
            if ACCUMULATE:
                grad_v = tl.load(prior_ptr + bank, mask=mask, other=0.0).to(tl.float32)
            else:
                grad_v = tl.zeros([GROUP, BLOCK], tl.float32)
            shrink = tl.zeros([GROUP, 1], tl.float32)
            for query in tl.static_range(0, QUERIES, 3):
                dot_a = v * _gradient(query, g0, grads, offsets, inside)
                dot_b, dot_c = dot_a, dot_a
                if query + 2 < QUERIES:
                    dot_b = v * _gradient(query + 1, g0, grads, offsets, inside)
                    dot_c = v * _gradient(query + 2, g0, grads, offsets, inside)
                    dot_a, dot_b, dot_c = _sum_triple(dot_a, dot_b, dot_c)
                elif query + 1 < QUERIES:
                    dot_a, dot_b = _sum_pair(dot_a, v * _gradient(query + 1, g0, grads, offsets, inside))
                else:
                    dot_a = tl.sum(dot_a, axis=1)[:, None]
                grad_v, shrink = _spread(
                    query, dot_a, g0, base0, grad_v, shrink, inverse_rms, token, first, rows, offsets, inside, grads,
                    bases, kept_ptr, coefficients, NUM_SOURCES, GROUP, QUERIES,
                )  # fmt: skip
                if query + 1 < QUERIES:
                    grad_v, shrink = _spread(
                        query + 1, dot_b, g0, base0, grad_v, shrink, inverse_rms, token, first, rows, offsets, inside,
                        grads, bases, kept_ptr, coefficients, NUM_SOURCES, GROUP, QUERIES,
                    )  # fmt: skip
                if query + 2 < QUERIES:
                    grad_v, shrink = _spread(
                        query + 2, dot_c, g0, base0, grad_v, shrink, inverse_rms, token, first, rows, offsets, inside,
                        grads, bases, kept_ptr, coefficients, NUM_SOURCES, GROUP, QUERIES,
                    )  # fmt: skip
            grad_v -= shrink * inverse_rms * inverse_rms * (1.0 / WIDTH) * v
            tl.store(grad_ptr + bank, grad_v.to(grad_ptr.dtype.element_ty), mask=mask)
    tl.store(partial_ptr + program.to(tl.int64) * WIDTH + columns, weight_share, mask=inside)
