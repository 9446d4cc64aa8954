"""One mix of Attention Residuals (arXiv 2603.15031) on CUDA, by its definition, for one query or several.

The equations are in `reference.py` and `dense.py`. The kernels take gain and query apart and give each its gradient, so
that a call launches one kernel forward and two backward.
"""

import torch
import triton
from torch import Tensor

from perilune.kernels.attnres.triton_kernels import add_direction_shares, held_mix_backward, mix_backward, mix_forward
from perilune.kernels.attnres.triton_launch import (
    holds_sources,
    mix_backward_options,
    mix_forward_options,
    power_of_2,
)
from perilune.kernels.launch import launch
from perilune.kernels.operator import operator
from perilune.kernels.triton_support import num_sms


def _mix_forward(
    sources: list[Tensor], query: Tensor, gain: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    outputs = _mix_outputs(sources, query)
    width = query.shape[-1]
    num_tokens = outputs[2].shape[0]
    if num_tokens:
        query = query.contiguous()
        launch(
            mix_forward, num_tokens,
            (tuple([source.contiguous() for source in sources]), query, query if gain is None else gain.contiguous(),
             *outputs, num_tokens, eps),
            ("mix_forward", len(sources), query.shape, gain is not None),
            mix_forward_options(width, len(sources), query.numel() // width, gain=gain is not None),
        )  # fmt: skip
    return outputs


def _mix_outputs(sources: list[Tensor], query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mixes, log-sum-exps, and for backward scores with their log-sum-exp, and inverse RMS."""
    first = sources[0]
    queries, leading = query.shape[:-1], first.shape[:-1]
    numbers = queries.numel() * (len(sources) + 1) + len(sources)
    device, float32 = first.device, torch.float32
    return (
        torch.empty((*queries, *first.shape), dtype=first.dtype, device=device),
        torch.empty((*queries, *leading), dtype=float32, device=device),
        torch.empty((leading.numel(), numbers), dtype=float32, device=device),
    )


def _mix_gradient_outputs(sources: list[Tensor], query: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of the sources, of the query, and of the gain (empty without one)."""
    first = sources[0]
    grad_gain = (
        torch.empty(0, device=first.device)
        if gain is None
        else torch.empty_like(gain, memory_format=torch.contiguous_format)
    )
    return (
        torch.empty((len(sources), *first.shape), dtype=first.dtype, device=first.device),
        torch.empty_like(query, memory_format=torch.contiguous_format),
        grad_gain,
    )


def _mix_backward(
    sources: list[Tensor],
    query: Tensor,
    gain: Tensor | None,
    grad_mixes: Tensor,
    bases: Tensor | None,
    first_base: bool,
    kept: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    bank, grad_query, grad_gain = outputs = _mix_gradient_outputs(sources, query, gain)
    width = query.shape[-1]
    queries, num_tokens = query.numel() // width, kept.shape[0]
    if not num_tokens:
        return bank, grad_query.zero_(), grad_gain.zero_()
    query, gain = query.contiguous(), None if gain is None else gain.contiguous()
    held = queries == 1 and bases is None and len(sources) > 1 and holds_sources(len(sources), width)
    per_sm, options = mix_backward_options(
        width, len(sources), queries, gain=gain is not None, held=held, first_base=first_base
    )
    programs = min(num_tokens, num_sms(query.device) * per_sm)
    partial = torch.empty((programs, queries * width), dtype=torch.float32, device=query.device)
    given = () if held else (query if bases is None else bases,)
    launch(
        held_mix_backward if held else mix_backward, programs,
        (tuple([source.contiguous() for source in sources]), query, query if gain is None else gain,
         grad_mixes.contiguous(), *given, kept, bank, partial, num_tokens),
        ("mix_backward", len(sources), query.shape, gain is not None, held, first_base),
        options,
    )  # fmt: skip
    launch(
        add_direction_shares, triton.cdiv(queries * width, 16),
        (partial, query, query if gain is None else gain, grad_query, grad_gain, programs, queries * width),
        ("add_direction_shares", programs, query.shape, gain is not None),
        {"SHARES": min(1024, power_of_2(programs)), "COLUMNS": 16, "GAIN": gain is not None, "num_warps": 8},
    )  # fmt: skip
    return outputs


def _save_mix(ctx, inputs, output) -> None:
    sources, query, gain, _ = inputs
    mixes, _, kept = output
    ctx.save_for_backward(*sources, query, gain, mixes if query.shape[:-1].numel() > 1 else None, kept)
    ctx.set_materialize_grads(False)


def _mix_gradients(ctx, backward, grad_mixes: Tensor | None, grad_log_sums: Tensor | None, *_: Tensor | None):
    *sources, query, gain, mixes, kept = ctx.saved_tensors
    if grad_mixes is None and grad_log_sums is None:
        return [None] * len(sources), None, None, None
    queries = query.shape[:-1].numel()
    bases = None if grad_log_sums is None else grad_log_sums.reshape(queries, -1).contiguous()
    if grad_mixes is None:
        grad_mixes = sources[0].new_zeros(queries, *sources[0].shape)
    elif queries > 1:
        # The kernel makes the base of its first query itself, and takes none at all from a single source.
        inner = torch.linalg.vecdot(grad_mixes.float(), mixes.float()).reshape(queries, -1)
        inner = inner * (torch.arange(queries, device=kept.device) > 0)[:, None] if len(sources) > 1 else inner * 0
        bases = -inner if bases is None else bases - inner
    bank, grad_query, grad_gain = backward(sources, query, gain, grad_mixes, bases, grad_log_sums is not None, kept)
    return list(bank.unbind(0)), grad_query, None if gain is None else grad_gain, None


_mix = operator(
    "attnres_mix",
    forward=_mix_forward,
    backward=_mix_backward,
    fake_forward=lambda sources, query, gain, eps: _mix_outputs(sources, query),
    fake_backward=lambda sources, query, gain, *rest: _mix_gradient_outputs(sources, query, gain),
    save=_save_mix,
    gradients=_mix_gradients,
)


def triton_phase1(sources: list[Tensor], queries: Tensor, gain: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Mixes [S, ..., D] in the sources' dtype and their log-sum-exp [S, ...] in float32, for queries [S, D]."""
    return _mix(sources, queries, gain, eps)[:2]


def triton_mix(sources: list[Tensor], query: Tensor, gain: Tensor | None, eps: float) -> Tensor:
    """The mix [..., D] for one query [D]."""
    return _mix(sources, query, gain, eps)[0]
