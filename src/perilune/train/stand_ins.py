"""What a dry run computes instead of kernels and routing: the same shapes, the same memory kept, no numbers.

A dry run has tensors without values. Kernels plan their work from document borders and routers from scores, which have
none; so attention and the delta rule are replaced by functions that keep for the backward pass what the CUDA kernels
keep, and every expert gets the same number of rows.

    attention   keeps q, k, v, o and one number a row; the convolution keeps its input
    KDA         keeps q, k, v, gate input, beta and, for every 64 tokens, a state [K, V] per head in float32
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.kernels.collectives import exchanged
from perilune.kernels.kda import Gate
from perilune.model import MixtureOfExperts
from perilune.model.moe import Experts
from perilune.train.parallel_expert import Dispatching

CHUNK = 64


class _Kept(torch.autograd.Function):
    """An output of the first input's dtype and this shape; all inputs are kept, and `extra` floats more."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], extra: tuple[int, ...], keeps_output: bool, *inputs: Tensor
    ) -> Tensor:
        y = inputs[0].new_empty(shape)
        more = inputs[0].new_empty(extra, dtype=torch.float32)
        ctx.save_for_backward(*inputs, more, *([y] if keeps_output else []))
        ctx.count = len(inputs)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        return None, None, None, *(torch.empty_like(x) for x in ctx.saved_tensors[: ctx.count])


def _attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    heads = q.shape[2]
    o = _Kept.apply((*q.shape[:3], v.shape[-1]), tuple(q.shape[:3]), True, q, k, v)
    return o, q.new_zeros(heads, dtype=torch.float32), q.new_zeros(heads, dtype=torch.bool)


def _kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, gate: Gate, initial_state: Tensor | None = None,
    output_final_state: bool = False, **_: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    batch, tokens, heads, key_dim = q.shape
    states = (batch, -(-tokens // CHUNK), heads, key_dim, v.shape[-1])
    learned = [x for x in (gate.A_log, gate.dt_bias, initial_state) if x is not None]
    o = _Kept.apply(tuple(v.shape), states, False, v, q, k, g, beta, *learned)
    state = None
    if output_final_state:
        state = _Kept.apply((batch, heads, key_dim, v.shape[-1]), (0,), False, v, q, k, g, beta).float()
    return o, state


def _short_conv(x: Tensor, weight: Tensor, *, initial_state: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
    states = [] if initial_state is None else [initial_state]
    return _Kept.apply(tuple(x.shape), (0,), False, x, weight, *states), None


def _experts(self: Experts, sorted_MD: Tensor, counts_E: Tensor | None) -> Tensor:
    weights = (self.gate_up_proj.to(sorted_MD.dtype), self.down_proj.to(sorted_MD.dtype))
    rows_EMD = sorted_MD.unflatten(0, (weights[0].shape[0], -1))
    gate, up = torch.bmm(rows_EMD, weights[0].mT).chunk(2, dim=-1)
    return torch.bmm(F.silu(gate) * up, weights[1].mT).flatten(0, 1).clone()  # FSDP warns about a view


def _mixture(self: MixtureOfExperts, x_BTD: Tensor) -> Tensor:
    """Rows of this rank's tokens for own experts, those of ranks of `ep` exchanged in equal parts."""
    x_ND = x_BTD.flatten(0, 1)
    top_k = self.config.num_experts_per_token
    weights, _ = self.gate(x_ND)
    ep = tp = 1
    group = None
    if isinstance(self, Dispatching):
        ep, tp, group = Dispatching.owners(self)
    owned = self.config.num_experts // (ep * tp)
    # Rounded up so that every expert of every rank has the same number of rows.
    rows = -(-x_ND.shape[0] * top_k // (tp * ep * owned)) * ep * owned
    index = torch.arange(rows, device=x_ND.device) % x_ND.shape[0]
    given = x_ND[index]
    if ep > 1:
        parts = [rows // ep] * ep
        given = exchanged(given, send=parts, receive=parts, group=group)
        outputs = self.experts(given, None)
        outputs = exchanged(outputs, send=parts, receive=parts, group=group)
    else:
        outputs = self.experts(given, None)
    places = x_ND.shape[0] * top_k
    index = torch.arange(places, device=x_ND.device) % rows
    chosen_NKD = outputs[index].unflatten(0, (-1, top_k))
    y = (chosen_NKD * weights[..., None].to(chosen_NKD.dtype)).sum(dim=1).view_as(x_BTD)
    return y if self.shared_experts is None else y + self.shared_experts(x_BTD)


@contextmanager
def stand_ins() -> Iterator[None]:
    """While it lasts, layers of the model and of parallel_context call the functions above."""
    with (
        mock.patch("perilune.model.kda.kda", _kda),
        mock.patch("perilune.kernels.kda.context.kda", _kda),
        mock.patch("perilune.model.kda.short_conv", _short_conv),
        mock.patch("perilune.kernels.short_conv.context.short_conv", _short_conv),
        mock.patch("perilune.model.mla.attention", _attention),
        mock.patch("perilune.kernels.attention.context.attention", _attention),
        mock.patch.object(Experts, "forward", _experts),
        mock.patch.object(MixtureOfExperts, "forward", _mixture),
        mock.patch.object(Dispatching, "forward", _mixture),
    ):
        yield
