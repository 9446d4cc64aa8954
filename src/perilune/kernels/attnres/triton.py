"""Attention Residuals (arXiv 2603.15031) on CUDA: operators over Triton kernels.

`attnres_mix` is the plain definition for any number of queries; `attnres_merge` adds one more source to a mix. For a
network there is a block of S sublayers at a time, with the residual addition before and the RMSNorm after fused in:

    attnres_open   closes the block before: source = running + x, and its scores for all later queries of the network;
                   then the mixes of this block's S queries over all n sources, the first one normed
    attnres_merge  phase 2 of one other sublayer: total = running + x, merge with its mix, norm

Rows of [tokens, width] they move, beside some float32 numbers a token:

    open    read n + 2, write S + 1           backward: read 2n + S + 2, write n + 1
    merge   read 3, write 2                   backward: read 4, write 2     (first in its block: 2, 1 and 4, 2)
    plain   read 2, write 2                   backward: read 3, write 1     (add_rms_norm, for comparison)

Kept for backward beside what a network keeps anyway (the inputs of its linear maps): the sources and running sums,
where the plain path keeps its sums, and one mix a sublayer.

A source is read by all later blocks. Autograd would write one gradient per reader and add them up. Instead it is handed
from reader to reader: `carrier` is a tensor of shape [n, ..., width] without memory (its strides are zero) whose only
use is its gradient, the gradients of the n sources so far, to which each block adds its own on the way back. What the
scores of a source receive, C [tokens, queries], runs through carriers too, one for each reader, back to where the
source was made: there dU = C^T source and dsource += C U are one product each for all readers together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from perilune.kernels.attnres.triton_blocks import block_backward, block_forward, source_backward, source_forward
from perilune.kernels.attnres.triton_kernels import merge_backward, merge_forward, mix_backward, mix_forward
from perilune.kernels.attnres.triton_launch import (
    block_backward_options,
    block_forward_options,
    compile_ahead,
    mix_warps,
    power_of_2,
    source_backward_options,
    source_forward_options,
    source_tokens,
)
from perilune.kernels.norm.triton import add_shares, row_programs, row_stages, row_tile
from perilune.kernels.operator import operator
from perilune.kernels.triton_support import num_sms


def _mix_backward_tile(block: int) -> tuple[int, int, int]:
    """(warps, sources at a time, programs per multiprocessor)."""
    return max(1, min(16, block // 512)), 2, max(1, min(8, 8192 // block))


def _empty(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)


# One mix, by definition -----------------------------------------------------------------------------------------------


def _mix_forward(sources: list[Tensor], u: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs = _mix_outputs(sources, u)
    queries, width = u.shape
    num_tokens, block = sources[0].numel() // width, power_of_2(width)
    if num_tokens:
        mix_forward[(num_tokens,)](
            tuple(source.contiguous() for source in sources), u.contiguous(), *outputs, num_tokens, eps, WIDTH=width,
            BLOCK=block, NUM_SOURCES=len(sources), ROWS=power_of_2(len(sources)), QUERIES=queries,
            num_warps=mix_warps(block),
        )  # fmt: skip
    return outputs


def _mix_outputs(sources: list[Tensor], u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mixes, log-sum-exps, and for backward scores with their log-sum-exp and inverse RMS."""
    queries, leading = u.shape[0], sources[0].shape[:-1]
    tokens = leading.numel()
    return (
        _empty(sources[0], queries, *sources[0].shape),
        _empty(u, queries, *leading),
        _empty(u, tokens, queries, len(sources) + 1),
        _empty(u, tokens, len(sources)),
    )


def _mix_backward(
    sources: list[Tensor],
    u: Tensor,
    grad_mixes: Tensor,
    bases: Tensor | None,
    first_base: bool,
    scores: Tensor,
    inverse_rms: Tensor,
) -> tuple[Tensor, Tensor]:
    queries, width = u.shape
    num_tokens, block = sources[0].numel() // width, power_of_2(width)
    bank = _empty(sources[0], len(sources), *sources[0].shape)
    if not num_tokens:
        return bank, torch.zeros_like(u)
    warps, group, per_sm = _mix_backward_tile(block)
    programs = min(num_tokens, num_sms(u.device) * per_sm)
    partial = _empty(u, programs, queries, width)
    mix_backward[(programs,)](
        tuple(source.contiguous() for source in sources), u.contiguous(), grad_mixes.contiguous(),
        u if bases is None else bases, scores, inverse_rms, bank, partial, num_tokens, WIDTH=width, BLOCK=block,
        NUM_SOURCES=len(sources), GROUP=group, QUERIES=queries, PARTIAL_ROWS=power_of_2(queries),
        FIRST_BASE=first_base, num_warps=warps,
    )  # fmt: skip
    return bank, add_shares(partial)


def _save_mix(ctx, inputs, output) -> None:
    sources, u, _ = inputs
    mixes, _, scores, inverse_rms = output
    ctx.save_for_backward(*sources, u, mixes if u.shape[0] > 1 else None, scores, inverse_rms)
    ctx.set_materialize_grads(False)


def _mix_gradients(ctx, backward, grad_mixes: Tensor | None, grad_log_sums: Tensor | None, *_: Tensor | None):
    *sources, u, mixes, scores, inverse_rms = ctx.saved_tensors
    if grad_mixes is None and grad_log_sums is None:
        return [None] * len(sources), None, None
    queries = u.shape[0]
    bases = None if grad_log_sums is None else grad_log_sums.reshape(queries, -1).contiguous()
    if grad_mixes is None:
        grad_mixes = sources[0].new_zeros(queries, *sources[0].shape)
    elif queries > 1:
        # The kernel makes the base of its first query itself, and takes none at all from a single source.
        inner = torch.linalg.vecdot(grad_mixes.float(), mixes.float()).reshape(queries, -1)
        inner = inner * (torch.arange(queries, device=u.device) > 0)[:, None] if len(sources) > 1 else inner * 0
        bases = -inner if bases is None else bases - inner
    bank, grad_u = backward(sources, u, grad_mixes, bases, grad_log_sums is not None, scores, inverse_rms)
    return list(bank.unbind(0)), grad_u, None


_mix = operator(
    "attnres_mix",
    forward=_mix_forward,
    backward=_mix_backward,
    fake_forward=lambda sources, u, eps: _mix_outputs(sources, u),
    fake_backward=lambda sources, u, *rest: (_empty(sources[0], len(sources), *sources[0].shape), _empty(u, *u.shape)),
    save=_save_mix,
    gradients=_mix_gradients,
)


def triton_phase1(sources: list[Tensor], u_SD: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mixes [S, ..., D] in the sources' dtype and their log-sum-exp [S, ...] in float32."""
    mixes, log_sums, _, _ = _mix(sources, u_SD, eps)
    return mixes, log_sums


# Phase 2 of one sublayer ----------------------------------------------------------------------------------------------


def _merge_outputs(running: Tensor | None, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output, what backward keeps [4, tokens], and the total, which is empty without a running sum."""
    total = _empty(x, 0) if running is None else _empty(x, *x.shape)
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
) -> tuple[Tensor, Tensor, Tensor]:
    x, o = x.contiguous(), o.contiguous()
    out, kept, total = _merge_outputs(running, x, u)
    if x.numel():
        width = x.shape[-1]
        num_tokens = x.numel() // width
        block, tokens, warps = row_tile(width)
        merge_forward[(triton.cdiv(num_tokens, tokens),)](
            x if running is None else running.contiguous(), x, o, log_sum.contiguous(), u.contiguous(),
            u if weight is None else weight.contiguous(), total, out, kept, num_tokens, eps, norm_eps, WIDTH=width,
            BLOCK=block, TOKENS=tokens, ADD=running is not None, NORM=weight is not None, num_warps=warps,
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
    merge_backward[(programs,)](
        grad_out.contiguous(), grad_out if grad_total is None else grad_total.contiguous(), total, o, u.contiguous(),
        u if weight is None else weight.contiguous(), kept, grad_o, grad_log_sum, grad, partial, num_tokens, norm_eps,
        WIDTH=width, BLOCK=block, TOKENS=tokens, NORM=weight is not None, ACCUMULATE=grad_total is not None,
        ALONE=num_sources == 1, STAGES=row_stages(block, total.dtype), num_warps=warps,
    )  # fmt: skip
    return grad, grad_o, grad_log_sum, add_shares(partial)


def _save_merge(ctx, inputs, output) -> None:
    running, x, o, _, u, weight, _, ctx.norm_eps, ctx.num_sources = inputs
    ctx.save_for_backward(x if running is None else output[2], o, u, weight, output[1])
    ctx.has_running = running is not None
    ctx.set_materialize_grads(False)


def _merge_gradients(ctx, backward, grad_out: Tensor | None, _: Tensor | None, grad_total: Tensor | None):
    total, o, u, weight, kept = ctx.saved_tensors
    grad_total = grad_total if ctx.has_running else None
    if grad_out is None:
        return grad_total, grad_total, *([None] * 7)
    grad, grad_o, grad_log_sum, grad_rows = backward(
        grad_out, grad_total, total, o, u, weight, kept, ctx.norm_eps, ctx.num_sources
    )
    grad_weight = None if weight is None else grad_rows[1].to(weight.dtype)
    running_grad = grad if ctx.has_running else None
    return running_grad, grad, grad_o, grad_log_sum, grad_rows[0], grad_weight, None, None, None


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
    return _merge(None, running, o, log_sum, u_D, None, eps, eps, 0)[0]


def triton_merge_norm(
    running: Tensor | None, x: Tensor, o: Tensor, log_sum: Tensor, u_D: Tensor, weight: Tensor, *,
    eps: float, norm_eps: float, num_sources: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(total, normed input of the sublayer); o and log_sum are this sublayer's from `triton_open`, and only those.

    The gradient it hands to log_sum is the one at constant o * exp(log_sum), which is what `triton_open` expects.
    """
    normed, _, total = _merge(running, x, o, log_sum, u_D, weight, eps, norm_eps, num_sources)
    return (x if running is None else total), normed


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


def _open_outputs(
    num_sources: int, running: Tensor, x: Tensor | None, u: Tensor, sizes: list[int], all_queries: int
) -> list[Tensor]:
    """First input, carrier, log-sum-exps [S], mixes of the other sublayers [S - 1], carriers of scores, scores, what
    backward keeps (weights and scores of the block, inverse RMS of the first mix), and with an addition the source."""
    leading, tokens = running.shape[:-1], running.shape[:-1].numel()
    return [
        _empty(running, *running.shape),
        _empty(running, 1).expand(num_sources, *running.shape),
        *(_empty(u, *leading) for _ in range(sizes[0])),
        *(_empty(running, *running.shape) for _ in range(sizes[0] - 1)),
        *(_empty(u, 1).expand(*leading, size) for size in sizes[1:]),
        _empty(u, tokens, all_queries + 1),
        _empty(u, tokens, sizes[0], 2, num_sources),
        _empty(u, tokens),
        *([] if x is None else [_empty(running, *running.shape)]),
    ]


@torch.library.custom_op("perilune::attnres_open", mutates_args=())
def _open(
    bank: list[Tensor],
    scores: list[Tensor],
    carrier: Tensor | None,
    score_carriers: list[Tensor],
    running: Tensor,
    x: Tensor | None,
    u: Tensor,
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
    new_scores, kept, norm = outputs[2 * size + len(sizes) : 2 * size + len(sizes) + 3]
    running, u = running.contiguous(), u.contiguous()
    source = running if x is None else outputs[-1]
    num_sources, tokens = len(bank) + 1, source_tokens(num_tokens, running.device)
    if not bank:
        compile_ahead(width, running.dtype, tuple(sizes), tokens, running.device)
    options = source_forward_options(width, running.dtype, sizes, all_queries, num_sources, tokens, added=x is not None)
    source_forward[(triton.cdiv(num_tokens, tokens),)](
        running, running if x is None else x.contiguous(), u, source, new_scores, (*scores, new_scores),
        tuple(outputs[2 : 2 + size]), kept, num_tokens, eps, **options,
    )  # fmt: skip
    block_forward[(num_tokens,)](
        (*bank, source), weight.contiguous(), (outputs[0], *outputs[2 + size : 1 + 2 * size]), kept, norm, norm_eps,
        **block_forward_options(width, num_sources, size),
    )  # fmt: skip
    return outputs


@_open.register_fake
def _(
    bank, scores, carrier, score_carriers, running, x, u, weight, sizes, all_queries, eps, norm_eps
) -> list[Tensor]:  # fmt: skip
    return _open_outputs(len(bank) + 1, running, x, u, sizes, all_queries)


@torch.library.custom_op("perilune::attnres_open_backward", mutates_args=())
def _open_backward(
    sources: list[Tensor],
    scores: list[Tensor],
    u: Tensor,
    weight: Tensor,
    grads: list[Tensor],
    bases: list[Tensor],
    kept: Tensor,
    norm: Tensor,
    prior: Tensor | None,
    later: list[Tensor],
) -> list[Tensor]:
    """Gradients of the sources [n, ..., width], of u and of weight; C [..., S] of every source but the last."""
    num_sources, size = len(sources), len(grads)
    leading, width = sources[0].shape[:-1], sources[0].shape[-1]
    num_tokens, queries, all_queries = leading.numel(), u.shape[0], scores[0].shape[1] - 1
    bank = _empty(sources[0], num_sources, *sources[0].shape)
    coefficients = [_empty(u, *leading, size) for _ in sources]
    if not num_tokens:
        return [bank, torch.zeros_like(u), torch.zeros_like(weight), *coefficients[:-1]]
    per_sm, options = block_backward_options(width, num_sources, size, all_queries, accumulates=prior is not None)
    programs = min(num_tokens, num_sms(u.device) * per_sm)
    partial = _empty(u, programs, width)
    block_backward[(programs,)](
        tuple(sources), tuple(scores), weight.contiguous(), tuple(grad.contiguous() for grad in grads),
        (norm, *(base.contiguous() for base in bases)), kept, norm, bank if prior is None else prior.contiguous(),
        bank, tuple(coefficients), partial, num_tokens, num_tokens * width, **options,
    )  # fmt: skip
    gathered = torch.cat([coefficients[-1], *later], dim=-1) if later else coefficients[-1]
    grid, tokens_per_share, options = source_backward_options(width, queries, num_tokens, u.device)
    u_partial = _empty(u, grid[1], queries, width)
    source_backward[grid](
        bank[-1], sources[-1], gathered, u.contiguous(), bank[-1], u_partial, num_tokens, tokens_per_share, queries,
        **options,
    )  # fmt: skip
    return [bank, add_shares(u_partial), add_shares(partial).to(weight.dtype), *coefficients[:-1]]


@_open_backward.register_fake
def _(sources, scores, u, weight, grads, bases, kept, norm, prior, later) -> list[Tensor]:
    coefficients = [_empty(u, *sources[0].shape[:-1], len(grads)) for _ in sources[1:]]
    bank = _empty(sources[0], len(sources), *sources[0].shape)
    return [bank, _empty(u, *u.shape), _empty(weight, *weight.shape), *coefficients]


def _save_open(ctx, inputs, output) -> None:
    bank, scores, carrier, _, running, x, u, weight, sizes, _, _, _ = inputs
    size = sizes[0]
    kept_by_block = output[2 * size + len(sizes) : 2 * size + len(sizes) + 3]
    source = running if x is None else output[-1]
    ctx.save_for_backward(*bank, source, *scores, *kept_by_block, u, weight)
    ctx.sizes, ctx.num_sources = list(sizes), len(bank) + 1
    ctx.has_carrier, ctx.has_x = carrier is not None, x is not None
    ctx.set_materialize_grads(False)


def _backward_of_open(ctx, grads: list[Tensor | None]):
    num_sources, sizes, size = ctx.num_sources, ctx.sizes, ctx.sizes[0]
    saved = ctx.saved_tensors
    sources, scores = saved[:num_sources], saved[num_sources : 2 * num_sources]
    kept, norm, u, weight = saved[2 * num_sources :]

    def given(grad: Tensor | None, like: Tensor, *shape: int) -> Tensor:
        return like.new_zeros(shape) if grad is None else grad

    leading = sources[0].shape[:-1]
    mixes = [given(grad, sources[0], *sources[0].shape) for grad in (grads[0], *grads[2 + size : 1 + 2 * size])]
    bases = [given(grad, u, *leading) for grad in grads[3 : 2 + size]]
    later_grads = grads[1 + 2 * size : 2 * size + len(sizes)]
    later = [given(grad, u, *leading, width) for grad, width in zip(later_grads, sizes[1:], strict=True)]
    bank, grad_u, grad_weight, *coefficients = torch.ops.perilune.attnres_open_backward(
        list(sources), list(scores), u, weight, mixes, bases, kept, norm, grads[1], later
    )
    grad_new = bank[-1]
    if ctx.has_x and grads[-1] is not None:
        grad_new = grad_new + grads[-1]
    nothing = [None] * (num_sources - 1)
    return (
        nothing,
        nothing,
        bank[:-1] if ctx.has_carrier else None,
        coefficients,
        grad_new,
        grad_new if ctx.has_x else None,
        grad_u,
        grad_weight,
        *([None] * 4),
    )


_open.register_autograd(_backward_of_open, setup_context=_save_open)


def triton_open(
    bank: Bank, running: Tensor, x: Tensor | None, u_QD: Tensor, weight: Tensor, *,
    sizes: Sequence[int], all_queries: int, eps: float, norm_eps: float,
) -> tuple[Bank, Tensor, list[Tensor], list[Tensor]]:  # fmt: skip
    """Close the block before, whose sum is running + x, and open one of S = sizes[0] sublayers.

    u_QD: the queries of this block and of all later ones, whose sizes are sizes[1:]; all_queries counts those of the
    whole network. Returns the bank with the new source, the normed input of the first sublayer, and for the S - 1
    others mix and log-sum-exp, both for `triton_merge_norm`.
    """
    size, num_blocks = sizes[0], len(sizes)
    out = torch.ops.perilune.attnres_open(
        list(bank.sources), list(bank.scores), bank.carrier, [carriers[0] for carriers in bank.score_carriers],
        running, x, u_QD, weight, list(sizes), all_queries, eps, norm_eps,
    )  # fmt: skip
    source = (running if x is None else out[-1]).detach()
    rest = tuple(carriers[1:] for carriers in bank.score_carriers)
    opened = Bank(
        sources=(*bank.sources, source),
        scores=(*bank.scores, out[2 * size + num_blocks].detach()),
        carrier=out[1],
        score_carriers=(*rest, tuple(out[1 + 2 * size : 2 * size + num_blocks])),
    )
    return opened, out[0], out[2 + size : 1 + 2 * size], out[3 : 2 + size]
