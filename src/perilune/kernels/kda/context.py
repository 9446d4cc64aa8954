"""Kimi Delta Attention over a row whose parts are on different ranks (context parallel), exact in output and gradients.

The recurrence is affine in its state: a part turns the state S before it into M S + H. So all ranks compute their own
(M, H) at once, every rank gathers those of the others and folds what lies before it,

    S_r = M_{r-1} S_{r-1} + H_{r-1},   S_0 = 0,

and runs its part from the right state. Backward, with D_r the gradient of S_r through the outputs of part r alone,

    dS_r = D_r + M_r^T dS_{r+1}            what the state after part r - 1 has to answer for

H is the final state of a run from zero, M that of a run from the identity that writes nothing (v = 0). Only the
document that crosses the end of a part has them; where it began inside the part, M is zero, so documents stay apart.
M, H and D are float32: K x (K + V) numbers per head and part travel each way. The price of not waiting for the ranks
before is up to two more runs of the recurrence in the forward and two in the backward.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from perilune.kernels.collectives import gathered
from perilune.kernels.context import ContextPart
from perilune.kernels.kda import Gate, kda
from perilune.kernels.precision import full_precision


def context_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    part: ContextPart,
    gate: Gate,
    qk_l2norm: bool = False,
    beta_max: float | None = None,
) -> Tensor:
    """`kda` with the arguments of this rank's part [B, T, H, ...]; returns o [B, T, H, V]."""
    options = {"qk_l2norm": qk_l2norm, "beta_max": beta_max}
    return _ContextKDA.apply(q, k, v, g, beta, gate.A_log, gate.dt_bias, gate, part, options)


class _ContextKDA(torch.autograd.Function):
    @staticmethod
    @full_precision
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor | None, dt_bias: Tensor,
        gate: Gate, part: ContextPart, options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        own = _own(gate, A_log, dt_bias)
        transition, end = _affine_map((q, k, v, g, beta), own, part, options)
        maps = gathered(torch.cat([transition, end], dim=-1), part.group)
        state = torch.zeros_like(end)
        for other in maps[: part.rank]:
            state = other[..., : q.shape[-1]] @ state + other[..., q.shape[-1] :]
        o, _ = _run((q, k, v, g, beta), own, state, part, options)
        ctx.save_for_backward(q, k, v, g, beta, A_log, dt_bias, state, transition)
        ctx.gate, ctx.part, ctx.options = gate, part, options
        return o

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx: Any, do: Tensor) -> tuple[Any, ...]:
        *inputs, state, transition = ctx.saved_tensors
        part: ContextPart = ctx.part
        leaves: list[Any] = [x if x is None else x.detach().requires_grad_() for x in (*inputs, state)]
        *sequences, A_log, dt_bias, state = leaves
        with torch.enable_grad():
            o, end = _run(tuple(sequences), _own(ctx.gate, A_log, dt_bias), state, part, ctx.options)
        (through_outputs,) = torch.autograd.grad(o, state, do, retain_graph=True)
        if part.before == 0:
            through_outputs = torch.zeros_like(through_outputs)
        maps = gathered(torch.cat([transition, through_outputs], dim=-1), part.group)
        d_end = torch.zeros_like(through_outputs)
        for other in reversed(maps[part.rank + 1 :].unbind(0)):
            d_end = other[..., transition.shape[-1] :] + other[..., : transition.shape[-1]].mT @ d_end
        wanted = [x for x in leaves[:-1] if x is not None]
        found = iter(torch.autograd.grad([o, end], wanted, [do, d_end]))
        return *(None if x is None else next(found) for x in leaves[:-1]), None, None, None


def _own(gate: Gate, A_log: Tensor | None, dt_bias: Tensor) -> Gate:
    learned: dict[str, Any] = {"A_log": A_log, "dt_bias": dt_bias}
    return replace(gate, **learned)


def _run(
    sequences: tuple[Tensor, ...], gate: Gate, state: Tensor, part: ContextPart, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(o, state after the last document) from `state` before the first one."""
    if part.borders is not None:
        others = state.new_zeros(len(part.borders) - 2, *state.shape[1:])
        state = torch.cat([state, others])
    o, end = kda(
        *sequences, gate=gate, initial_state=state, output_final_state=True,
        cu_seqlens=part.cu_seqlens(state), **options,
    )  # fmt: skip
    assert end is not None
    return o, end if part.borders is None else end[-1:]


def _affine_map(
    sequences: tuple[Tensor, ...], gate: Gate, part: ContextPart, options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(M, H) of the document that goes on at the next rank, [B, H, K, K] and [B, H, K, V]; zero without one."""
    q, k, v, g, beta = (x[:, part.last_start :] for x in sequences)
    batch, _, num_heads, key_dim = q.shape
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    transition = q.new_zeros(batch, num_heads, key_dim, key_dim, dtype=dtype)
    end = q.new_zeros(batch, num_heads, key_dim, v.shape[-1], dtype=dtype)
    if part.goes_on:
        _, end = kda(q, k, v, g, beta, gate=gate, output_final_state=True, **options)
        if part.before and part.is_one_document:
            identity = torch.eye(key_dim, dtype=dtype, device=q.device).expand_as(transition).contiguous()
            _, transition = kda(
                q, k, torch.zeros_like(k), g, beta, gate=gate, initial_state=identity, output_final_state=True,
                **options,
            )  # fmt: skip
    assert transition is not None and end is not None
    return transition, end
