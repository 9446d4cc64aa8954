"""The steps of a KDA call that run in CUDA C++: what `_Call` of kernels/kda/triton.py does in Triton elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.kernels.kda.cuda import CHUNK, compile_together, launch

if TYPE_CHECKING:
    from perilune.kernels.kda.triton import _Call


FLOW_WIDTH = 32  # channels of the values in one part of `flows`, as gradients.cu reads them
SMALLEST_SCALE = 2.0**-126  # in the place of 0, by which `gradients` would divide 0; of float32 without denormals


def aligned(x: Tensor) -> Tensor:
    """The kernels move 16 bytes at a time: x, or a copy if its rows do not start at multiples of that.

    They count in 32 bits inside a chunk, too.
    """
    steps = (x.data_ptr(), *(stride * x.element_size() for stride in x.stride()[1:3]))
    if not any(step % 16 for step in steps) and x.stride(1) < 2**31 // CHUNK:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def compile_ahead(call: _Call) -> None:
    """All that a training step needs, before the first of it runs."""
    gate = {"gate": call.kind, "x": call.x.dtype}
    kernels = [("prepare", gate | {"known": 0}), ("prepare", gate | {"known": 1}), ("signals", {}), ("gradients", gate)]
    compile_together(kernels, call.device, call.key_dim, call.value_dim)


def prepare(
    call: _Call, known: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor]:
    """P, A, reciprocal norms, operands of the scans, and the gates where A and the norms are known (backward)."""
    H, K, V = call.num_heads, call.key_dim, call.value_dim
    if known is None:
        P, A = (call.empty(call.max_chunks, H, CHUNK, CHUNK) for _ in range(2))
        rstd = call.empty(call.batch, call.num_tokens, H, 2, dtype=torch.float32)
        gates = P
    else:
        A, rstd = known
        P = A
        gates = call.empty(call.rows, H, K, dtype=torch.float16)
    widths = {"W": K, "U": V, "to_end": K, "from_start": K}
    operands = {name: call.empty(call.max_chunks, H, CHUNK, width) for name, width in widths.items()}
    operands["state_decay"] = call.empty(call.max_chunks, H, K, dtype=torch.float32)
    beta, (rate, bias) = _beta(call), _gate_parameters(call)
    arguments = [
        call.q, call.k, call.v, call.x, rate, bias, beta, call.tables.chunk_start, call.tables.chunk_length, P, A, rstd,
        *operands.values(), gates, *_strides(call.q, call.k, call.v, call.x, beta), H, float(call.scale),
        float(call.lower_bound), float(call.beta_max), int(call.l2norm), int(call.beta_max > 0),
        int(call.A_log is not None),
    ]  # fmt: skip
    launch(
        "prepare", call.max_chunks * H, arguments, K, V, gate=call.kind, x=call.x.dtype, known=int(known is not None)
    )
    return P, A, rstd, operands, gates


def gradients(
    call: _Call, gates: Tensor, o: Tensor, d_o: Tensor, A: Tensor, rstd: Tensor, flows: Tensor, writes: Tensor,
    signals: Tensor, states: Tensor, d_states: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v, x, beta, A_log and dt_bias."""
    H, K, V, device = call.num_heads, call.key_dim, call.value_dim, call.device
    float32 = torch.float32
    assert flows.shape[2] == V // FLOW_WIDTH, f"gradients.cu takes flows of {FLOW_WIDTH} channels each"
    tables = (call.tables.chunk_start, call.tables.chunk_length)
    programs, beta = call.max_chunks * H, _beta(call)
    d_L, d_P = torch.empty_like(A), torch.empty_like(A)
    d_q, d_k, d_v, d_x = (torch.empty(t.shape, dtype=t.dtype, device=device) for t in (call.q, call.k, call.v, call.x))
    along = call.empty(call.rows, H, 2, dtype=float32)
    d_beta = call.empty(*call.beta.shape, dtype=float32)
    arguments = [
        call.v, beta, o, d_o, A, writes, *tables, signals, d_L, d_P, d_v, along, d_beta,
        *_strides(call.v, beta, o, d_o), H, float(call.beta_max), int(call.beta_max > 0),
    ]  # fmt: skip
    launch("signals", programs, arguments, K, V)
    d_bias = call.empty(call.max_chunks, H, K, dtype=float32)
    d_rate = call.empty(call.max_chunks, H, dtype=float32)
    arguments = [
        call.q, call.k, call.x, gates, *_gate_parameters(call), beta, d_o, rstd, along, flows, *tables, signals, writes,
        states, d_states, d_L, d_P, d_q, d_k, d_x, d_beta, d_bias, d_rate, *_strides(call.q, call.k, call.x, beta, d_o),
        H, float(call.scale) or SMALLEST_SCALE, float(call.lower_bound), float(call.beta_max), int(call.l2norm),
        int(call.beta_max > 0), int(call.A_log is not None),
    ]  # fmt: skip
    launch("gradients", programs, arguments, K, V, gate=call.kind, x=call.x.dtype)
    none = call.empty(0)
    return (
        d_q, d_k, d_v, d_x, d_beta.to(call.beta.dtype),
        none if call.A_log is None else d_rate.sum(0).view(call.A_log.shape).to(call.A_log.dtype),
        none.clone() if call.dt_bias is None else d_bias.sum(0).view(call.dt_bias.shape).to(call.dt_bias.dtype),
    )  # fmt: skip


def _beta(call: _Call) -> Tensor:
    """In float32. A copy is contiguous: one that keeps the order of strides may lose the single stride of B and T."""
    return call.beta.to(torch.float32, memory_format=torch.contiguous_format)


def _gate_parameters(call: _Call) -> tuple[Tensor, Tensor]:
    """A_log and dt_bias in float32, or anything where the gate has none."""
    rate, bias = (call.q if t is None else t.float() for t in (call.A_log, call.dt_bias))
    return rate, bias


def _strides(*tensors: Tensor) -> list[int]:
    """Of a token and of a head."""
    return [stride for x in tensors for stride in x.stride()[1:3]]
