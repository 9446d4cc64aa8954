"""Kimi Delta Attention, token by token: the definition (arXiv 2510.26692).

Per head, with state S [K, V], S_0 = initial_state or 0:

    S   <- exp(g_t)[:, None] * S                  every key channel forgets at its own rate
    S   <- S + k_t (beta_t (v_t - S^T k_t))^T     the delta rule corrects what the decayed state predicts for k_t
    o_t  = scale * S^T q_t                        the read sees the token's own write

Plain differentiable torch operations in float32, or float64 when an input is float64. Slow by design: every other
path is tested against this one.

Shape letters: B batch, T tokens, H heads, K key dim, V value dim, N sequences (B, or the number of packed documents).
"""

from __future__ import annotations

import torch
from torch import Tensor

from perilune.kernels.kda.gates import Gate

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dim; eps sits inside the root, unlike F.normalize."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)


def step(q_BHK: Tensor, k_BHK: Tensor, v_BHV: Tensor, g_BHK: Tensor, beta_BH: Tensor, state_BHKV: Tensor,
         scale: float) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token of the recurrence above; returns the output [B, H, V] and the new state."""
    decayed = g_BHK.exp().unsqueeze(-1) * state_BHKV
    predicted = torch.einsum("bhkv,bhk->bhv", decayed, k_BHK)
    delta = beta_BH.unsqueeze(-1) * (v_BHV - predicted)
    state = decayed + k_BHK.unsqueeze(-1) * delta.unsqueeze(-2)
    return scale * torch.einsum("bhkv,bhk->bhv", state, q_BHK), state


def recurrent_kda(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, g_BTHK: Tensor, beta_BTH: Tensor, *, scale: float,
                  initial_state_NHKV: Tensor | None, cu_seqlens: list[int] | None, gate: Gate | None,
                  qk_l2norm: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [B, T, H, V] in v's dtype and the final state [N, H, K, V] in `dtype`."""
    g = g_BTHK.to(dtype) if gate is None else gate.log_decay(g_BTHK.to(dtype))
    q, k, v, beta = (x.to(dtype) for x in (q_BTHK, k_BTHK, v_BTHV, beta_BTH))
    if qk_l2norm:
        q, k = l2norm(q), l2norm(k)

    batch, num_tokens, num_heads, key_dim = q.shape
    num_sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state_NHKV is None:
        states = q.new_zeros(num_sequences, num_heads, key_dim, v.shape[-1])
    else:
        states = initial_state_NHKV.to(dtype)

    if cu_seqlens is None:
        documents, first_states = [(0, num_tokens)], [states]
    else:
        documents = list(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))
        first_states = list(states.split(1))
    outputs, final_states = [], []
    for (start, stop), state in zip(documents, first_states, strict=True):
        for t in range(start, stop):
            o, state = step(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], state, scale)
            outputs.append(o)
        final_states.append(state)
    output = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return output.to(v_BTHV.dtype), torch.cat(final_states) if final_states else states
