"""What a Kimi Delta Attention layer computes before its recurrence, as one operator for CUDA in half precision.

    [z_q z_k z_v | a_f | a_g | b] = x [W_q; W_k; W_v; W_fa; W_ga; W_b]^T      one product with stacked weights
    q, k, v = silu(conv(z))        gate input = a_f W_fb^T        output gate = a_g W_gb^T

The parts are used where the product wrote them, and the backward writes their gradients side by side into one buffer,
so the gradients of x and of all stacked weights are one product each, without a copy or a sum of parts. With a
full-rank output gate, W_g has a product of its own, whose gradient is added to dx by the product itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.kernels.operator import operator
from perilune.kernels.short_conv.states import final_state
from perilune.model.linear import stacked, weight_gradient

STRIDE_MULTIPLE = 16
"""Rows of the product begin at multiples of so many elements: only then Triton reads them in whole vectors."""


@dataclass(frozen=True, kw_only=True)
class KDAInputs:
    q: Tensor
    k: Tensor
    v: Tensor
    """[B, T, H * D], after convolution and SiLU"""
    gate_input: Tensor
    output_gate: Tensor
    """[B, T, H * D], before any activation"""
    beta: Tensor
    """[B, T, H], before the sigmoid"""
    conv_state: Tensor | None
    """[N, 3 * H * D, W - 1] after the last token, without gradient; None unless asked for"""


def kda_inputs(
    x_BTD: Tensor,
    *,
    qkv_weights: Sequence[Tensor],
    conv_weight: Tensor,
    gate_weights: tuple[Tensor, Tensor],
    output_gate_weights: tuple[Tensor, ...],
    beta_weight: Tensor,
    cu_seqlens: Tensor | None = None,
    conv_state: Tensor | None = None,
    output_conv_state: bool = False,
) -> KDAInputs:
    """Gate weights are (down, up), those of the output gate may be (full,). States are without gradient."""
    narrow = [*qkv_weights, gate_weights[0], *output_gate_weights[:-1], beta_weight]
    q, k, v, gate_input, output_gate, beta, projected, *_ = _kda_inputs(
        x_BTD, narrow, gate_weights[1], output_gate_weights[-1], conv_weight, cu_seqlens, conv_state
    )
    state = None
    if output_conv_state:
        state = final_state(projected[..., : conv_weight.shape[0]], conv_state, cu_seqlens, conv_weight.shape[1])
    return KDAInputs(
        q=q, k=k, v=v, gate_input=gate_input, output_gate=output_gate, beta=beta, conv_state=state
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Where the parts lie in the product."""

    qkv: slice
    gate: slice
    output_gate: slice | None
    beta: slice
    total: int

    @property
    def stride(self) -> int:
        return -(-self.total // STRIDE_MULTIPLE) * STRIDE_MULTIPLE

    @classmethod
    def of(cls, rows: Sequence[int]) -> "_Columns":
        """From the rows of W_q, W_k, W_v, W_fa, maybe W_ga, W_b."""
        ends = [sum(rows[: i + 1]) for i in range(len(rows))]
        low_rank = len(rows) == 6
        return cls(
            qkv=slice(0, ends[2]),
            gate=slice(ends[2], ends[3]),
            output_gate=slice(ends[3], ends[4]) if low_rank else None,
            beta=slice(ends[-2], ends[-1]),
            total=ends[-1],
        )


def _forward(
    x: Tensor,
    narrow: Sequence[Tensor],
    gate_up: Tensor,
    output_gate_up: Tensor,
    conv_weight: Tensor,
    cu_seqlens: Tensor | None,
    conv_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, k, v, gate input, output gate, beta), then what the backward needs: the product and the weights as used."""
    from perilune.kernels.short_conv.triton import document_origins, forward_parts

    columns = _Columns.of([weight.shape[0] for weight in narrow])
    used = stacked(narrow, x.dtype)
    used_gate, used_output_gate = stacked([gate_up], x.dtype), stacked([output_gate_up], x.dtype)
    projected = x.new_empty(*x.shape[:-1], columns.stride)
    torch.mm(x.flatten(0, -2), used.T, out=projected.flatten(0, -2)[:, : columns.total])
    origins = None if cu_seqlens is None else document_origins(cu_seqlens, x.shape[1])
    q, k, v = forward_parts(
        projected[..., columns.qkv], conv_weight, parts=3, origins=origins, state=conv_state, silu=True
    )
    gate_input = F.linear(projected[..., columns.gate], used_gate)
    source = x if columns.output_gate is None else projected[..., columns.output_gate]
    output_gate = F.linear(source, used_output_gate)
    beta = projected[..., columns.beta].contiguous()
    return q, k, v, gate_input, output_gate, beta, projected, used, used_gate, used_output_gate


def _fake_forward(
    x: Tensor, narrow: Sequence[Tensor], gate_up: Tensor, output_gate_up: Tensor, conv_weight: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    columns = _Columns.of([weight.shape[0] for weight in narrow])
    rows = x.shape[:-1]
    wide = conv_weight.shape[0] // 3
    shapes = [
        *((*rows, wide) for _ in range(3)),
        (*rows, gate_up.shape[0]),
        (*rows, output_gate_up.shape[0]),
        (*rows, narrow[-1].shape[0]),
        (*rows, columns.stride),
        (columns.total, x.shape[-1]),
        gate_up.shape,
        output_gate_up.shape,
    ]
    return tuple(x.new_empty(shape) for shape in shapes)


def _backward(
    gradients: Sequence[Tensor],
    x: Tensor,
    conv_weight: Tensor,
    cu_seqlens: Tensor | None,
    conv_state: Tensor | None,
    projected: Tensor,
    used: Tensor,
    used_gate: Tensor,
    used_output_gate: Tensor,
    rows: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dx, d of the stacked weights, d gate_up, d output_gate_up, d conv_weight); weights' in float32."""
    from perilune.kernels.short_conv.triton import backward_parts, document_origins

    dq, dk, dv, d_gate_input, d_output_gate, d_beta = gradients
    columns = _Columns.of(rows)
    d_projected = torch.empty_like(projected)
    origins = None if cu_seqlens is None else document_origins(cu_seqlens, x.shape[1])
    d_conv_weight = backward_parts(
        [dq, dk, dv], projected[..., columns.qkv], conv_weight, dx_BTC=d_projected[..., columns.qkv], origins=origins,
        state=conv_state, silu=True,
    )  # fmt: skip
    d_projected[..., columns.beta] = d_beta

    x_N, z_N = x.flatten(0, 1), projected.flatten(0, 1)
    dz_N = d_projected.flatten(0, 1)[:, : columns.total]
    d_gate_N, d_output_N = d_gate_input.flatten(0, 1), d_output_gate.flatten(0, 1)
    torch.mm(d_gate_N, used_gate, out=dz_N[:, columns.gate])
    d_gate_up = weight_gradient(d_gate_N, z_N[:, columns.gate])
    if columns.output_gate is None:
        dx = torch.mm(d_output_N, used_output_gate)
        d_output_gate_up = weight_gradient(d_output_N, x_N)
        dx.addmm_(dz_N, used)
    else:
        torch.mm(d_output_N, used_output_gate, out=dz_N[:, columns.output_gate])
        d_output_gate_up = weight_gradient(d_output_N, z_N[:, columns.output_gate])
        dx = torch.mm(dz_N, used)
    return dx.view(x.shape), weight_gradient(dz_N, x_N), d_gate_up, d_output_gate_up, d_conv_weight.contiguous()


def _fake_backward(
    gradients: Sequence[Tensor], x: Tensor, conv_weight: Tensor, cu_seqlens: Any, conv_state: Any, projected: Tensor,
    used: Tensor, used_gate: Tensor, used_output_gate: Tensor, rows: Sequence[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    weights = (used, used_gate, used_output_gate, conv_weight)
    return x.new_empty(x.shape), *(weight.new_empty(weight.shape, dtype=torch.float32) for weight in weights)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, narrow, _, _, conv_weight, cu_seqlens, conv_state = inputs
    kept = output[6:]
    ctx.rows = [weight.shape[0] for weight in narrow]
    ctx.save_for_backward(x, conv_weight, cu_seqlens, conv_state, *kept)
    ctx.shapes = [y.shape for y in output[:6]]
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)  # zeros for the kept ones would cost more than the rest


def _gradients(ctx: Any, backward: Callable[..., tuple[Tensor, ...]], *given: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing computes them when they are asked for, and refuses twice
    dense = [saved[0].new_zeros(shape) if dy is None else dy for dy, shape in zip(given[:6], ctx.shapes, strict=True)]
    dx, d_used, d_gate_up, d_output_gate_up, d_conv_weight = backward(dense, *saved, ctx.rows)
    return dx, list(d_used.split(ctx.rows)), d_gate_up, d_output_gate_up, d_conv_weight, None, None


_kda_inputs = operator(
    "kda_inputs",
    forward=_forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    save=_save,
    gradients=_gradients,
)
