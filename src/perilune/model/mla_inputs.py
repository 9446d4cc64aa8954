"""Queries, keys and values of a latent attention layer, as one operator for CUDA in half precision.

    q = W_q x                     per head, unless the query is compressed: then the layer computes it itself
    [c' ; k_r] = W_kva x          c = RMSNorm(c')
    k_h = [W_uk,h c ; k_r],  v_h = W_uv,h c

The products write keys and values where attention reads them, and the gradients of both become one matrix for the
products of the backward: see kernels/attention/triton_latent.py for what happens in between. The gradient of x is the
sum that the second of its products adds to the first.

With rotary positions q's last channels and k_r are turned where the products wrote them; the heads share k_r, so its
gradient is turned back once, after the sum over heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.kernels.operator import operator
from perilune.model.linear import stacked, weight_gradient


def mla_inputs(
    x_BTD: Tensor,
    *,
    q_weight: Tensor | None,
    kv_a_weight: Tensor,
    norm_weight: Tensor,
    kv_b_weight: Tensor,
    num_heads: int,
    v_head_dim: int,
    eps: float,
    angles: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = True,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """q [B, T, H, P + E] (None without its weight), k [B, T, H, P + E], v [B, T, H, V], in the dtype of x.

    kv_b_weight [H * (P + V), R] holds per head the key rows and then the value rows. angles: cos and sin
    [B, T, E / 2] of rotary positions, float32; interleaved: as in model/rope.py.
    """
    q_weights = [] if q_weight is None else [q_weight]
    turns = [] if angles is None else [x.contiguous().flatten(0, -2) for x in angles]
    q, k, v, *_ = _mla_inputs(
        x_BTD, q_weights, kv_a_weight, norm_weight, kv_b_weight, turns, num_heads, v_head_dim, eps, interleaved
    )
    return (None if q_weight is None else q), k, v


def _forward(
    x: Tensor, q_weights: Sequence[Tensor], kv_a_weight: Tensor, norm_weight: Tensor, kv_b_weight: Tensor,
    turns: Sequence[Tensor], num_heads: int, v_head_dim: int, eps: float, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(q, k, v), then what the backward needs: [c' ; k_r], c, the norm's factors, and the weights as they were used."""
    from perilune.kernels.attention.triton_latent import norm_latent
    from perilune.kernels.attention.triton_rotary import rotate_in_place

    rank, rows = norm_weight.shape[0], x.shape[:-1]
    own, shared = kv_b_weight.shape[0] // num_heads - v_head_dim, kv_a_weight.shape[0] - rank
    used_q = stacked(q_weights, x.dtype) if q_weights else x.new_empty(0)
    used_a, used_b = stacked([kv_a_weight], x.dtype), stacked([kv_b_weight], x.dtype)
    q = F.linear(x, used_q).unflatten(-1, (num_heads, own + shared)) if q_weights else x.new_empty(0)
    down_NC = F.linear(x, used_a).flatten(0, -2)
    k, v = (x.new_empty(*rows, num_heads, width) for width in (own + shared, v_head_dim))
    k_NHK, v_NHV = k.flatten(0, -3), v.flatten(0, -3)
    if turns:
        rotate_in_place(down_NC.unsqueeze(1), *turns, first=rank, interleaved=interleaved)
        if q_weights:
            rotate_in_place(q.flatten(0, -3), *turns, first=own, interleaved=interleaved)
    latent_NR, inverse_rms = norm_latent(down_NC, norm_weight, eps, k_NHK=k_NHK)
    # One product per head, all heads at once: each writes into its own columns.
    latent_HNR = latent_NR.expand(num_heads, *latent_NR.shape)
    up_k_HRP, up_v_HRV = used_b.view(num_heads, own + v_head_dim, rank).mT.split([own, v_head_dim], dim=-1)
    torch.bmm(latent_HNR, up_k_HRP, out=k_NHK[..., :own].transpose(0, 1))
    torch.bmm(latent_HNR, up_v_HRV, out=v_NHV.transpose(0, 1))
    return q, k, v, down_NC, latent_NR, inverse_rms, used_q, used_a, used_b


def _fake_forward(
    x: Tensor, q_weights: Sequence[Tensor], kv_a_weight: Tensor, norm_weight: Tensor, kv_b_weight: Tensor,
    turns: Sequence[Tensor], num_heads: int, v_head_dim: int, eps: float, interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    rank, rows = norm_weight.shape[0], x.shape[:-1]
    width = kv_b_weight.shape[0] // num_heads - v_head_dim + kv_a_weight.shape[0] - rank
    num_tokens = rows.numel()
    q_shapes = ((*rows, num_heads, width), q_weights[0].shape) if q_weights else ((0,), (0,))
    return (
        x.new_empty(q_shapes[0]),
        x.new_empty(*rows, num_heads, width),
        x.new_empty(*rows, num_heads, v_head_dim),
        x.new_empty(num_tokens, kv_a_weight.shape[0]),
        x.new_empty(num_tokens, rank),
        x.new_empty(num_tokens, dtype=torch.float32),
        x.new_empty(q_shapes[1]),
        x.new_empty(kv_a_weight.shape),
        x.new_empty(kv_b_weight.shape),
    )


def _backward(
    gradients: Sequence[Tensor], turns: Sequence[Tensor], x: Tensor, norm_weight: Tensor, down_NC: Tensor,
    latent_NR: Tensor, inverse_rms: Tensor, used_q: Tensor, used_a: Tensor, used_b: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dW_q (empty without), dW_kva, dw of the norm, dW_kvb); weights' in float32."""
    from perilune.kernels.attention.triton_latent import collect_gradients, norm_latent_backward
    from perilune.kernels.attention.triton_rotary import rotate_in_place

    dq, dk, dv = gradients
    x_ND = x.flatten(0, -2)
    d_down_NC = torch.empty_like(down_NC)
    shared = down_NC.shape[1] - latent_NR.shape[1]
    d_up = collect_gradients(dk.flatten(0, -3), dv.flatten(0, -3), d_down_NC=d_down_NC, shared=shared)
    if turns:
        rotate_in_place(d_down_NC.unsqueeze(1), *turns, first=latent_NR.shape[1], interleaved=interleaved, inverse=True)
    d_latent = torch.mm(d_up, used_b)
    d_kv_b = weight_gradient(d_up, latent_NR)
    d_norm = norm_latent_backward(d_latent, down_NC, norm_weight, inverse_rms, d_down_NC=d_down_NC)
    d_kv_a = weight_gradient(d_down_NC, x_ND)
    dx = torch.mm(d_down_NC, used_a)
    d_q = used_q.new_empty(0, dtype=torch.float32)
    if used_q.numel():
        if turns:  # in a copy: the gradient may be somebody else's too
            dq = dq.clone(memory_format=torch.contiguous_format)
            own = dq.shape[-1] - shared
            rotate_in_place(dq.flatten(0, -3), *turns, first=own, interleaved=interleaved, inverse=True)
        dq_NO = dq.reshape(x_ND.shape[0], used_q.shape[0])
        dx.addmm_(dq_NO, used_q)
        d_q = weight_gradient(dq_NO, x_ND)
    return dx.view(x.shape), d_q, d_kv_a, d_norm, d_kv_b


def _fake_backward(
    gradients: Sequence[Tensor], turns: Sequence[Tensor], x: Tensor, norm_weight: Tensor, down_NC: Tensor,
    latent_NR: Tensor, inverse_rms: Tensor, used_q: Tensor, used_a: Tensor, used_b: Tensor, interleaved: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    weights = (used_q, used_a, norm_weight, used_b)
    return x.new_empty(x.shape), *(weight.new_empty(weight.shape, dtype=torch.float32) for weight in weights)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, q_weights, _, norm_weight, _, turns, *_, interleaved = inputs
    kept = output[3:]
    ctx.has_q, ctx.interleaved, ctx.num_turns = bool(q_weights), interleaved, len(turns)
    ctx.shapes = [y.shape for y in output[:3]]
    ctx.save_for_backward(*turns, x, norm_weight, *kept)
    ctx.mark_non_differentiable(*kept)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, backward: Callable[..., tuple[Tensor, ...]], *given: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing computes them when they are asked for, and refuses twice
    turns, saved = list(saved[: ctx.num_turns]), saved[ctx.num_turns :]
    dense = [saved[0].new_zeros(shape) if dy is None else dy for dy, shape in zip(given[:3], ctx.shapes, strict=True)]
    dx, d_q, d_kv_a, d_norm, d_kv_b = backward(dense, turns, *saved, ctx.interleaved)
    return dx, [d_q] if ctx.has_q else [], d_kv_a, d_norm, d_kv_b, [None] * ctx.num_turns, None, None, None, None


_mla_inputs = operator(
    "mla_inputs",
    forward=_forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=_fake_backward,
    save=_save,
    gradients=_gradients,
)
