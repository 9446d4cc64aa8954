"""Attention Residuals (arXiv 2603.15031) of a whole network on CUDA: operators over Triton kernels.

A single mix is in `triton_mix.py`. In a network there is a block of S sublayers at a time, with the residual addition
before and the RMSNorm after fused in:

    attnres_open   closes the block before: source = running + x, and its scores for all later queries of the network;
                   then the mixes of this block's S queries over all n sources, the first one normed
    attnres_merge  phase 2 of one other sublayer: total = running + x, merge with its mix, norm

Rows of [tokens, width] they move, beside some float32 numbers a token:

    open    read n + 2, write S + 1           backward: read 2n + S + 2, write n + 1     (n = 1: write 2, no mixes)
    merge   read 3, write 2                   backward: read 4, write 2     (first in its block: 2, 1 and 4, 2)
    plain   read 2, write 2                   backward: read 3, write 1     (add_rms_norm, for comparison)

For bfloat16 of usual widths, the largest of the kernels, `block_backward`, is written in CUDA C++ (`cuda/`).

Kept for backward beside what a network keeps anyway (the inputs of its linear maps): the sources and running sums,
where the plain path keeps its sums, and one mix a sublayer.

A source is read by all later blocks. Autograd would write one gradient per reader and add them up. Instead it is handed
from reader to reader: `carrier` is a tensor of shape [n, ..., width] without memory (its strides are zero) whose only
use is its gradient, the gradients of the n sources so far, to which each block adds its own on the way back. What the
scores of a source receive, C [tokens, queries], runs through carriers too, one for each reader, back to where the
source was made: there dU = C^T source and dsource += C U are one product each for all readers together. Another carrier
collects dU from source to source. Where a mix or a sum is a tensor that exists already (the mixes of one source, the
sum of one output), a carrier takes its gradient back without a copy or an addition by autograd.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from perilune.kernels.attnres import cuda
from perilune.kernels.attnres.triton_blocks import (
    block_backward,
    block_forward,
    gather_coefficients,
    source_backward,
    source_forward,
)
from perilune.kernels.attnres.triton_kernels import merge_backward, merge_forward
from perilune.kernels.attnres.triton_launch import (
    block_backward_options,
    block_forward_options,
    compile_ahead,
    gather_options,
    source_backward_options,
    source_forward_options,
    source_tokens,
)
from perilune.kernels.launch import device_of, launch
from perilune.kernels.norm.triton import add_shares, row_programs, row_stages, row_tile
from perilune.kernels.operator import operator
from perilune.kernels.triton_support import num_sms


def _empty(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


def _carrier(x: Tensor, *shape: int) -> Tensor:
    """A tensor of that shape without memory: only its gradient is used."""
    return _empty(x, 1).expand(shape)


# Phase 2 of one sublayer ----------------------------------------------------------------------------------------------


def _merge_outputs(running: Tensor | None, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, what backward keeps [4, tokens], and the total: without a running sum, which is x, its carrier."""
    total = _carrier(x, *x.shape) if running is None else _empty(x, *x.shape)
    return _empty(x, *x.shape), _empty(u, 4, x.shape[:-1].numel()), total


def _merge_forward(
    running: Tensor | None,
    x: Tensor,
    o: Tensor,
    log_sum: Tensor,
    u: Tensor,
    weight: Tensor | None,
    eps: float,
    norm_eps: float,
    num_sources: int,
    running_carrier: Tensor | None,
    o_carrier: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    x, o = x.contiguous(), o.contiguous()
    out, kept, total = _merge_outputs(running, x, u)
    if x.numel():
        width = x.shape[-1]
        num_tokens = x.numel() // width
        block, tokens, warps = row_tile(width)
        add, norm = running is not None, weight is not None
        launch(
            merge_forward, triton.cdiv(num_tokens, tokens),
            (x if running is None else running.contiguous(), x, o, log_sum.contiguous(), u.contiguous(),
             u if weight is None else weight.contiguous(), total if add else x, out, kept, num_tokens, eps, norm_eps),
            ("merge_forward", width, add, norm),
            {"WIDTH": width, "BLOCK": block, "TOKENS": tokens, "ADD": add, "NORM": norm, "num_warps": warps},
        )  # fmt: skip
    return out, kept, total


def _merge_gradient_outputs(total: Tensor, o: Tensor, u: Tensor, weight: Tensor | None):
    """Of the total, of o, of log_sum, and of u (and weight) as rows."""
    return (
        _empty(total, *total.shape),
        _empty(o, *o.shape),
        _empty(u, *total.shape[:-1]),
        _empty(u, 1 + (weight is not None), total.shape[-1]),
    )


def _merge_backward(
    grad_out: Tensor,
    grad_total: Tensor | None,
    total: Tensor,
    o: Tensor,
    u: Tensor,
    weight: Tensor | None,
    kept: Tensor,
    norm_eps: float,
    num_sources: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, o = total.contiguous(), o.contiguous()
    grad, grad_o, grad_log_sum, grad_rows = _merge_gradient_outputs(total, o, u, weight)
    if not total.numel():
        return grad, grad_o, grad_log_sum, grad_rows.zero_()
    width = total.shape[-1]
    num_tokens = total.numel() // width
    block, tokens, warps = row_tile(width)
    programs = row_programs(triton.cdiv(num_tokens, tokens), block, total.device, most=4)
    partial = _empty(u, programs, *grad_rows.shape)
    accumulate, norm, alone = grad_total is not None, weight is not None, num_sources == 1
    launch(
        merge_backward, programs,
        (grad_out.contiguous(), grad_out if grad_total is None else grad_total.contiguous(), total, o, u.contiguous(),
         u if weight is None else weight.contiguous(), kept, grad_o, grad_log_sum, grad, partial, num_tokens, norm_eps),
        ("merge_backward", width, norm, accumulate, alone),
        {"WIDTH": width, "BLOCK": block, "TOKENS": tokens, "NORM": norm, "ACCUMULATE": accumulate, "ALONE": alone,
         "STAGES": row_stages(block, total.dtype), "num_warps": warps},
    )  # fmt: skip
    return grad, grad_o, grad_log_sum, add_shares(partial)


def _save_merge(ctx, inputs, output) -> None:
    running, x, o, _, u, weight, _, ctx.norm_eps, ctx.num_sources, running_carrier, o_carrier = inputs
    ctx.save_for_backward(x if running is None else output[2], o, u, weight, output[1])
    ctx.has_running = running is not None
    ctx.has_carrier, ctx.has_o_carrier = running_carrier is not None, o_carrier is not None
    ctx.set_materialize_grads(False)


def _merge_gradients(ctx, backward, grad_out: Tensor | None, _: Tensor | None, grad_total: Tensor | None):
    total, o, u, weight, kept = ctx.saved_tensors
    grad, grad_o, grad_log_sum, grad_u, grad_weight = grad_total, None, None, None, None
    if grad_out is not None:
        grad, grad_o, grad_log_sum, grad_rows = backward(
            grad_out, grad_total, total, o, u, weight, kept, ctx.norm_eps, ctx.num_sources
        )
        grad_u = grad_rows[0]
        grad_weight = None if weight is None else grad_rows[1].to(weight.dtype)
    return (
        grad if ctx.has_running and not ctx.has_carrier else None,
        grad,
        None if ctx.has_o_carrier else grad_o,
        grad_log_sum,
        grad_u,
        grad_weight,
        None,
        None,
        None,
        grad if ctx.has_carrier else None,
        grad_o if ctx.has_o_carrier else None,
    )


_merge = operator(
    "attnres_merge",
    forward=_merge_forward,
    backward=_merge_backward,
    fake_forward=lambda running, x, o, log_sum, u, *rest: _merge_outputs(running, x, u),
    fake_backward=lambda grad_out, grad_total, total, o, u, weight, *rest: _merge_gradient_outputs(total, o, u, weight),
    save=_save_merge,
    gradients=_merge_gradients,
)


def triton_merge(o: Tensor, log_sum: Tensor, running: Tensor, u_D: Tensor, eps: float) -> Tensor:
    """Fold `running` into the mix (o, log_sum)."""
    return _merge(None, running, o, log_sum, u_D, None, eps, eps, 0, None, None)[0]


class Carried(NamedTuple):
    """A tensor whose gradient goes to its carrier, if it has one."""

    value: Tensor
    carrier: Tensor | None = None


def triton_merge_norm(
    running: Carried | None, x: Tensor, o: Carried, log_sum: Tensor, u_D: Tensor, weight: Tensor, *,
    eps: float, norm_eps: float, num_sources: int,
) -> tuple[Carried, Tensor]:  # fmt: skip
    """(total, normed input of the sublayer); o and log_sum are this sublayer's from `triton_open`, and only those.

    The gradient it hands to log_sum is the one at constant o * exp(log_sum), which is what `triton_open` expects.
    """
    value, carrier = (None, None) if running is None else running
    normed, _, total = _merge(value, x, o.value, log_sum, u_D, weight, eps, norm_eps, num_sources, carrier, o.carrier)
    # The first total of a block is x itself. Both would have a gradient, and autograd would add them in a pass of its
    # own: the carrier hands that of the total to this operator instead, which adds it on the way.
    return (Carried(x.detach(), total) if running is None else Carried(total)), normed


# Opening a block ------------------------------------------------------------------------------------------------------


class Bank(NamedTuple):
    """The sources of a network so far. Values only: what the graph sees of them are the carriers."""

    sources: tuple[Tensor, ...] = ()
    scores: tuple[Tensor, ...] = ()
    """Of each source: its scores for all later queries, and its inverse RMS, [tokens, all queries + 1]."""
    carrier: Tensor | None = None
    """Its gradient is that of the sources, [n, ..., width]."""
    score_carriers: tuple[tuple[Tensor, ...], ...] = ()
    """Of each source, one for each block still to open, the output's last: its gradient is that block's C."""
    query_carrier: Tensor | None = None
    """Its gradient is what sources still to come add to the gradients of the queries still to come, [Q, width]."""
    query_parts: tuple[Tensor, Tensor] | None = None
    """All queries as sums of two numbers of the sources' dtype; without the second where the first is all."""
    is_cut: bool = False
    """A block was opened under no_grad although sources or queries have gradients: carriers do not reach them."""


def _open_outputs(
    num_sources: int, running: Tensor, x: Tensor | None, u: Tensor, sizes: list[int], all_queries: int
) -> list[Tensor]:
    """First input, carrier, log-sum-exps [S], mixes of the other sublayers [S - 1] (of a single source, which is all of
    them: carriers), carriers of scores, carrier of queries, scores, what backward keeps (weights and scores of the
    block, inverse RMS of the first mix), and with an addition the source."""
    leading, tokens = running.shape[:-1], running.shape[:-1].numel()
    mix = _carrier if num_sources == 1 else _empty
    return [
        _empty(running, *running.shape),
        _carrier(running, num_sources, *running.shape),
        *(_empty(u, *leading) for _ in range(sizes[0])),
        *(mix(running, *running.shape) for _ in range(sizes[0] - 1)),
        *(_carrier(u, *leading, size) for size in sizes[1:]),
        _carrier(u, sum(sizes[1:]), running.shape[-1]),
        _empty(u, tokens, all_queries + 1),
        _empty(u, tokens, sizes[0], 2, num_sources),
        _empty(u, tokens),
        *([] if x is None else [_empty(running, *running.shape)]),
    ]


class _Opened(NamedTuple):
    """The outputs by name, or their gradients."""

    normed: Tensor
    carrier: Tensor
    log_sums: list[Tensor]
    mixes: list[Tensor]
    score_carriers: list[Tensor]
    query_carrier: Tensor
    scores: Tensor
    kept: Tensor
    norm: Tensor
    source: Tensor | None


def _opened(outputs: Sequence[Tensor], size: int, num_blocks: int) -> _Opened:
    rest = list(outputs)
    normed, carrier = rest[:2]
    log_sums, mixes = rest[2 : 2 + size], rest[2 + size : 1 + 2 * size]
    score_carriers = rest[1 + 2 * size : 2 * size + num_blocks]
    query_carrier, scores, kept, norm, *source = rest[2 * size + num_blocks :]
    return _Opened(
        normed,
        carrier,
        log_sums,
        mixes,
        score_carriers,
        query_carrier,
        scores,
        kept,
        norm,
        source[0] if source else None,
    )


@torch.library.custom_op("perilune::attnres_open", mutates_args=())
def _open(
    bank: list[Tensor],
    scores: list[Tensor],
    carrier: Tensor | None,
    score_carriers: list[Tensor],
    running: Tensor,
    running_carrier: Tensor | None,
    x: Tensor | None,
    u: Tensor,
    u_rounded: Tensor,
    u_rest: Tensor,
    query_carrier: Tensor | None,
    weight: Tensor,
    sizes: list[int],
    all_queries: int,
    eps: float,
    norm_eps: float,
) -> list[Tensor]:
    outputs = _open_outputs(len(bank) + 1, running, x, u, sizes, all_queries)
    num_tokens, width = running.shape[:-1].numel(), running.shape[-1]
    if not num_tokens:
        return outputs
    size = sizes[0]
    opened = _opened(outputs, size, len(sizes))
    source = running if opened.source is None else opened.source
    num_sources, tokens = len(bank) + 1, source_tokens(num_tokens, running.dtype, running.device)
    if not bank:
        compile_ahead(width, running.dtype, tuple(sizes), tokens, running.device)
    options = source_forward_options(width, running.dtype, sizes, all_queries, num_sources, tokens, added=x is not None)
    mixes = (opened.normed, *(opened.mixes if num_sources > 1 else ()))
    with device_of(running):
        source_forward[(triton.cdiv(num_tokens, tokens),)](
            running, running if x is None else x.contiguous(), u_rounded.contiguous(), u_rest.contiguous(), source,
            opened.scores, (*scores, opened.scores), tuple(opened.log_sums), opened.kept, num_tokens, eps, **options,
        )  # fmt: skip
        block_forward[(num_tokens,)](
            (*bank, source), weight.contiguous(), mixes, opened.kept, opened.norm, norm_eps,
            **block_forward_options(width, num_sources, size),
        )  # fmt: skip
    return outputs


@_open.register_fake
def _(
    bank, scores, carrier, score_carriers, running, running_carrier, x, u, u_rounded, u_rest, query_carrier, weight,
    sizes, all_queries, eps, norm_eps,
) -> list[Tensor]:  # fmt: skip
    return _open_outputs(len(bank) + 1, running, x, u, sizes, all_queries)


@torch.library.custom_op("perilune::attnres_open_backward", mutates_args=())
def _open_backward(
    sources: list[Tensor],
    scores: list[Tensor],
    u: Tensor,
    u_rounded: Tensor,
    weight: Tensor,
    grads: list[Tensor],
    bases: list[Tensor],
    kept: Tensor,
    norm: Tensor,
    prior: Tensor | None,
    later: list[Tensor],
    later_u: Tensor | None,
) -> list[Tensor]:
    """Gradients of the sources [n, ..., width], of u and of weight; C [..., S] of every source but the last."""
    num_sources, size = len(sources), len(grads)
    leading, width = sources[0].shape[:-1], sources[0].shape[-1]
    num_tokens, queries, all_queries = leading.numel(), u.shape[0], scores[0].shape[1] - 1
    bank = _empty(sources[0], num_sources, *sources[0].shape)
    coefficients = [_empty(u, *leading, size) for _ in sources]
    if not num_tokens:
        return [bank, torch.zeros_like(u), torch.zeros_like(weight), *coefficients[:-1]]
    weight = weight.contiguous()
    grads, bases = [grad.contiguous() for grad in grads], [base.contiguous() for base in bases]
    prior = None if prior is None else prior.contiguous()
    rows = [*sources, *grads, bank if prior is None else prior]
    if cuda.takes(rows, weight, num_sources, size):
        partial = _empty(u, cuda.num_programs(num_tokens, width, num_sources, u.device), width)
        given = cuda.arguments(
            sources, scores, coefficients, grads, [norm, *bases], weight, kept, norm, prior, bank, partial
        )
        cuda.launch(given, width, size, u.device)
    else:
        per_sm, options = block_backward_options(width, num_sources, size, all_queries, accumulates=prior is not None)
        programs = min(num_tokens, num_sms(u.device) * per_sm)
        partial = _empty(u, programs, width)
        block_backward[(programs,)](
            tuple(sources), tuple(scores), weight, tuple(grads), (norm, *bases), kept, norm,
            bank if prior is None else prior, bank, tuple(coefficients), partial, num_tokens, num_tokens * width,
            **options,
        )  # fmt: skip
    parts = (coefficients[-1], *(part.contiguous() for part in later))
    options = gather_options(queries, len(parts))
    gathered = _empty(bank, num_tokens, options["QUERY_BLOCK"])
    gather_coefficients[(triton.cdiv(num_tokens, options["TOKENS"]),)](
        parts, tuple(part.shape[-1] for part in parts), gathered, num_tokens, **options
    )
    grid, tokens_per_share, options = source_backward_options(width, bank.dtype, queries, num_tokens, u.device)
    u_partial = _empty(u, grid[1], queries, width)
    source_backward[grid](
        bank[-1], sources[-1], gathered, u_rounded.contiguous(), bank[-1], u_partial, num_tokens, tokens_per_share,
        queries, **options,
    )  # fmt: skip
    return [bank, add_shares(u_partial, later_u), add_shares(partial).to(weight.dtype), *coefficients[:-1]]


@_open_backward.register_fake
def _(sources, scores, u, u_rounded, weight, grads, bases, kept, norm, prior, later, later_u) -> list[Tensor]:
    coefficients = [_empty(u, *sources[0].shape[:-1], len(grads)) for _ in sources[1:]]
    bank = _empty(sources[0], len(sources), *sources[0].shape)
    return [bank, _empty(u, *u.shape), _empty(weight, *weight.shape), *coefficients]


def _save_open(ctx, inputs, output) -> None:
    bank, scores, carrier, _, running, running_carrier, x, u, u_rounded, _, query_carrier, weight, sizes, *_ = inputs
    opened = _opened(output, sizes[0], len(sizes))
    source = running if opened.source is None else opened.source
    ctx.save_for_backward(*bank, source, *scores, opened.scores, opened.kept, opened.norm, u, u_rounded, weight)
    ctx.sizes, ctx.num_sources = list(sizes), len(bank) + 1
    ctx.has_carrier, ctx.has_x = carrier is not None, x is not None
    ctx.has_running_carrier, ctx.has_query_carrier = running_carrier is not None, query_carrier is not None
    ctx.set_materialize_grads(False)


def _backward_of_open(ctx, outputs: list[Tensor | None]):
    num_sources, sizes = ctx.num_sources, ctx.sizes
    saved = ctx.saved_tensors
    sources, scores = saved[:num_sources], saved[num_sources : 2 * num_sources]
    kept, norm, u, u_rounded, weight = saved[2 * num_sources :]
    grads = _opened(outputs, sizes[0], len(sizes))  # pyrefly: ignore[bad-argument-type]

    def given(grad: Tensor | None, like: Tensor, *shape: int) -> Tensor:
        return like.new_zeros(shape) if grad is None else grad

    leading = sources[0].shape[:-1]
    mixes = [given(grad, sources[0], *sources[0].shape) for grad in (grads.normed, *grads.mixes)]
    bases = [given(grad, u, *leading) for grad in grads.log_sums[1:]]
    later = [given(grad, u, *leading, width) for grad, width in zip(grads.score_carriers, sizes[1:], strict=True)]
    bank, grad_u, grad_weight, *coefficients = torch.ops.perilune.attnres_open_backward(
        list(sources),
        list(scores),
        u,
        u_rounded,
        weight,
        mixes,
        bases,
        kept,
        norm,
        grads.carrier,
        later,
        grads.query_carrier,
    )
    grad_new = bank[-1] if grads.source is None else bank[-1] + grads.source
    nothing = [None] * (num_sources - 1)
    return (
        nothing,
        nothing,
        bank[:-1] if ctx.has_carrier else None,
        coefficients,
        None if ctx.has_running_carrier else grad_new,
        grad_new if ctx.has_running_carrier else None,
        grad_new if ctx.has_x else None,
        None if ctx.has_query_carrier else grad_u,
        None,
        None,
        grad_u if ctx.has_query_carrier else None,
        grad_weight,
        *([None] * 4),
    )


_open.register_autograd(_backward_of_open, setup_context=_save_open)


def triton_open(
    bank: Bank, running: Carried, x: Tensor | None, u_QD: Tensor, weight: Tensor, *,
    sizes: Sequence[int], all_queries: int, eps: float, norm_eps: float,
) -> tuple[Bank, Tensor, list[Carried], list[Tensor]]:  # fmt: skip
    """Close the block before, whose sum is running + x, and open one of S = sizes[0] sublayers.

    u_QD: the queries of the whole network; sizes: of this and all later blocks. Returns the bank with the new source,
    the normed input of the first sublayer, and for the S - 1 others mix and log-sum-exp, both for `triton_merge_norm`.

    What a later block finds out about the gradients of sources and queries, earlier ones hand on. If one of those ran
    under no_grad, there would be silence instead: refused.
    """
    if bank.is_cut and torch.is_grad_enabled():
        raise RuntimeError(
            "an earlier block of this stream was opened under no_grad, so its sources and later queries would get no "
            "gradient; freeze parameters by requires_grad_(False) instead, or make the stream with fused=False"
        )
    given = (*running, x, u_QD, bank.carrier)
    first = all_queries - sum(sizes)
    running = Carried(running.value.contiguous(), running.carrier)
    parts = bank.query_parts
    if parts is None:
        rounded = u_QD.detach().to(running.value.dtype)
        parts = (rounded, (u_QD.detach() - rounded).to(rounded.dtype) if rounded.dtype != u_QD.dtype else rounded)
    out = torch.ops.perilune.attnres_open(
        list(bank.sources), list(bank.scores), bank.carrier, [carriers[0] for carriers in bank.score_carriers],
        running.value, running.carrier, x, u_QD if first == 0 else u_QD.detach()[first:], parts[0][first:],
        parts[1][first:], bank.query_carrier, weight, list(sizes), all_queries, eps, norm_eps,
    )  # fmt: skip
    opened = _opened(out, sizes[0], len(sizes))
    source = (running.value if opened.source is None else opened.source).detach()
    rest = tuple(carriers[1:] for carriers in bank.score_carriers)
    grown = Bank(
        sources=(*bank.sources, source),
        scores=(*bank.scores, opened.scores.detach()),
        carrier=opened.carrier,
        score_carriers=(*rest, tuple(opened.score_carriers)),
        query_carrier=opened.query_carrier,
        query_parts=parts,
        is_cut=bank.is_cut
        or (not torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)),
    )
    mixes = [Carried(mix) if bank.sources else Carried(source, mix) for mix in opened.mixes]
    return grown, opened.normed, mixes, opened.log_sums[1:]
