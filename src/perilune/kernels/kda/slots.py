"""Chunks of prompts through a KDA layer between its projections, on states kept in pools: what decode.py is for one
token. Convolution, recurrence and gated RMSNorm, for CUDA.

A sequence owns a slot: a row of the pool of convolution windows and of the pool of states. The kernels read both where
they lie and write them back there, so nothing is gathered, put back or cast on the way. A chunk step that is no CUDA
graph is launched operator by operator, and takes the host longer than the GPU: what counts here is the number of
launches.

Shape letters: T tokens, N chunks, H heads, K key dim, V value dim, W convolution width, C = H * (2 K + V) channels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from perilune.kernels.kda.gates import Gate, SoftplusGate

__all__ = ["kda_at_slots", "takes_slots"]

WIDTHS = (16, 32, 64, 128, 256)
MOST_TAPS = 8


def takes_slots(qkv: Tensor, conv_pool: Tensor, state_pool: Tensor) -> bool:
    """Whether `kda_at_slots` runs on these; elsewhere `short_conv`, `kda` and `gated_rms_norm` do."""
    if not qkv.is_cuda or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    taps, (_, _, key_dim, value_dim) = conv_pool.shape[2] + 1, state_pool.shape
    is_plain = conv_pool.is_contiguous() and state_pool.is_contiguous() and state_pool.dtype == torch.float32
    return (
        is_plain
        and qkv.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and key_dim == value_dim  # as the three parts of the convolution are
        and key_dim in WIDTHS
        and taps <= MOST_TAPS
        and _runs_on(qkv.device)
    )


@lru_cache(maxsize=16)
def _runs_on(device: torch.device) -> bool:
    from perilune.kernels.triton_support import why_not_triton

    return why_not_triton(torch.empty(0, device=device)) is None


@torch.no_grad()
def kda_at_slots(
    qkv: Tensor,
    gate_input: Tensor,
    beta_logits: Tensor,
    output_gate: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    *,
    cu_seqlens: Tensor,
    origins: Tensor,
    conv_weight: Tensor,
    norm_weight: Tensor,
    gate: Gate,
    norm_eps: float,
    beta_scale: float = 1.0,
) -> Tensor:
    """[T, H * V] in the dtype of qkv; the slots [N] int64 of the chunks with borders `cu_seqlens` [N + 1] move on.

    qkv [T, C], gate_input [T, H * K], beta_logits [T, H], output_gate [T, H * V]: as `kda_decode` takes them.
    origins [2, T] int32: the first token of every token's chunk, and the chunk's slot.
    Trusts its caller: nothing is checked, and no two chunks may share a slot, unless what it holds means nothing.
    Chunks may be empty. What is worked out about the borders is kept while the tensor `cu_seqlens` lives, for the
    layers that follow (`share_tables`).
    """
    from perilune.kernels.gated_norm.triton import norm_rows
    from perilune.kernels.kda.triton import GATE_KINDS, _Call
    from perilune.kernels.kda.triton_tables import share_tables
    from perilune.kernels.launch import device_of
    from perilune.kernels.short_conv.pooled import conv_at_slots

    _, num_heads, key_dim, _ = state_pool.shape
    heads = (1, qkv.shape[0], num_heads, key_dim)
    q, k, v = conv_at_slots(
        qkv, conv_weight, conv_pool, cu_seqlens=cu_seqlens, slots=slots, origins=origins, parts=3
    )  # fmt: skip
    share_tables(cu_seqlens)
    is_softplus = isinstance(gate, SoftplusGate)
    with device_of(qkv):
        call = _Call(
            q.view(heads), k.view(heads), v.view(heads), gate_input.view(heads), beta_logits.unsqueeze(0),
            gate.A_log, gate.dt_bias, cu_seqlens, key_dim**-0.5, GATE_KINDS["softplus" if is_softplus else "bounded"],
            0.0 if isinstance(gate, SoftplusGate) else gate.lower_bound, True, beta_scale, needs_grad=False,
        )  # fmt: skip
        products, _, _, operands, _ = call.prepare()
        o = torch.empty(heads, dtype=v.dtype, device=v.device)
        if call.tables.pieces is None:
            runs = call.tables.sequences
            call.scan(operands, products, runs, start=state_pool, o=o, final=state_pool, slots=slots)
        else:
            runs = call.tables.pieces
            affine = call.scan(operands, products, runs, transition=True)
            start = call.join(affine, runs, state_pool, state_pool, is_reverse=False, slots=slots)
            call.scan(operands, products, runs, start=start, o=o)
    return norm_rows(o, output_gate.view(heads), norm_weight, norm_eps).view(heads[1], -1)
