"""One decoding step of a whole KDA layer between its projections, on states kept in pools (arXiv 2510.26692).

Per head, for the one new token of every sequence:

    q, k, v = silu(conv(qkv))                         the window of the last W - 1 inputs moves on by one
    q, k    = l2norm(q), l2norm(k)
    g, beta = gate(gate_input), beta_scale * sigmoid(beta_logits)
    S, o    = one step of the recurrence in reference.py
    y       = RMSNorm(o) * norm_weight * sigmoid(output_gate)

A sequence owns a slot: a row of the pool of convolution windows and of the pool of states, which the step updates in
place. Paths: "torch" (the operators above, one after the other, any device) and "triton" (one launch, safe in a CUDA
graph: slots are read on the device, nothing waits for the host).

Shape letters: B sequences, H heads, K key dim, V value dim, W convolution width, C = H * (2 K + V) channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.kernels.kda import BoundedGate, Gate, SoftplusGate, l2norm
from perilune.kernels.operator import is_traced
from perilune.kernels.precision import full_precision
from perilune.kernels.triton_support import why_not_triton

__all__ = ["kda_decode"]

BACKENDS = ("torch", "triton")
POOL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD_DIM = 256


@torch.no_grad()
@full_precision
def kda_decode(
    qkv: Tensor,
    gate_input: Tensor,
    beta_logits: Tensor,
    output_gate: Tensor,
    conv_pool: Tensor,
    state_pool: Tensor,
    slots: Tensor,
    *,
    conv_weight: Tensor,
    norm_weight: Tensor,
    gate: Gate,
    norm_eps: float,
    scale: float | None = None,
    beta_scale: float = 1.0,
    backend: str | None = None,
) -> Tensor:
    """One token of every sequence through convolution, gates, state update and gated RMSNorm; pools change in place.

    qkv [B, C]: the projections q, k, v, each with its heads one after the other.
    gate_input [B, H * K]: raw input of `gate`. beta_logits [B, H]. output_gate [B, H * V]: before its sigmoid.
    conv_pool [slots, C, W - 1]: raw inputs, oldest first. state_pool [slots, H, K, V]. float32 or half precision.
    slots [B] int32 or int64: the row of both pools that belongs to each sequence; no two sequences may share one. A
    negative slot marks an inactive sequence, which writes nothing to the pools and gives zeros.
    conv_weight [C, W] (the last column multiplies the new token), norm_weight [V].
    scale: factor on the read, K ** -0.5 by default. beta_scale: 2 for allow_neg_eigval.
    backend: "torch" or "triton"; None takes triton on CUDA, torch elsewhere.

    Returns [B, H * V] in the dtype of qkv. Everything is computed in float32 (float64 on the torch path when an input
    is); the convolution's output and the read are rounded to the dtype of qkv, where the layer rounds them in training,
    and the pools to their own. Rows of the first four tensors may be strided views of one larger projection. For
    inference: no gradients.
    """
    num_heads, key_dim, value_dim = _check_shapes(
        qkv, gate_input, beta_logits, output_gate, conv_pool, state_pool, slots, conv_weight, norm_weight, gate
    )
    scale = key_dim**-0.5 if scale is None else scale
    obstacle = _why_not_triton(qkv, conv_pool, state_pool)
    if backend is None:
        backend = "triton" if qkv.is_cuda and obstacle is None else "torch"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not a path of kda_decode; expected None or one of {BACKENDS!r}.")
    if backend == "torch":
        return _torch_step(
            qkv, gate_input, beta_logits, output_gate, conv_pool, state_pool, slots, conv_weight, norm_weight, gate,
            norm_eps, scale, beta_scale, (num_heads, key_dim, value_dim),
        )  # fmt: skip
    if obstacle is not None:
        raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='torch'.")
    from perilune.kernels.kda.decode_triton import kda_decode_op, run_kda_decode

    a_log = None if gate.A_log is None else gate.A_log.float().contiguous()
    decode = kda_decode_op if is_traced(qkv, state_pool) else run_kda_decode
    return decode(
        _with_whole_rows(qkv), _with_whole_rows(gate_input), _with_whole_rows(beta_logits),
        _with_whole_rows(output_gate), conv_weight.float().contiguous(), a_log,
        gate.dt_bias.float().contiguous().view(-1), norm_weight.float().contiguous(), conv_pool, state_pool,
        slots.contiguous(), scale, gate.lower_bound if isinstance(gate, BoundedGate) else None, beta_scale, norm_eps,
    )  # fmt: skip


def _torch_step(
    qkv: Tensor, gate_input: Tensor, beta_logits: Tensor, output_gate: Tensor, conv_pool: Tensor, state_pool: Tensor,
    slots: Tensor, conv_weight: Tensor, norm_weight: Tensor, gate: Gate, norm_eps: float, scale: float,
    beta_scale: float, dims: tuple[int, int, int],
) -> Tensor:  # fmt: skip
    num_heads, key_dim, value_dim = dims
    rows = slots.tolist() if slots.device.type == "cpu" else slots[slots >= 0].tolist()
    if len(rows) < slots.shape[0] or min(rows, default=0) < 0:
        active = slots >= 0
        out = torch.zeros(qkv.shape[0], num_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
        out[active] = _torch_step(
            qkv[active], gate_input[active], beta_logits[active], output_gate[active], conv_pool, state_pool,
            slots[active], conv_weight, norm_weight, gate, norm_eps, scale, beta_scale, dims,
        )  # fmt: skip
        return out
    if not rows:
        return qkv.new_empty(0, num_heads * value_dim)
    in_a_row = rows == list(range(rows[0], rows[0] + len(rows)))
    own = slice(rows[0], rows[0] + len(rows)) if in_a_row else slots.long()
    weights = step_weights(
        num_heads, conv_weight=conv_weight, norm_weight=norm_weight, gate=gate, norm_eps=norm_eps, scale=scale,
        beta_scale=beta_scale, dtype=torch.float64 if qkv.dtype == torch.float64 else torch.float32,
    )  # fmt: skip
    return decode_at(qkv, gate_input, beta_logits, output_gate, conv_pool, state_pool, own, weights)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class StepWeights:
    """What the torch path reads of a layer, in the dtype it computes in and as it wants it: made by `step_weights`."""

    taps: Tensor
    """[W, C] contiguous"""
    rate: Tensor
    """[H, 1]: -exp(A_log), or exp(A_log) of a bounded gate"""
    bias: Tensor
    """[H, K]"""
    lower_bound: float | None
    norm: Tensor
    """[V]"""
    norm_eps: float
    scale: float
    beta_scale: float

    def decay(self, gate_input: Tensor) -> Tensor:
        """exp of the log decay of gates.py, [B, H, K]."""
        shifted = gate_input + self.bias
        if self.lower_bound is None:
            return F.softplus(shifted).mul_(self.rate).exp_()
        return shifted.mul_(self.rate).sigmoid_().mul_(self.lower_bound).exp_()


@torch.no_grad()
def step_weights(
    num_heads: int, *, conv_weight: Tensor, norm_weight: Tensor, gate: Gate, norm_eps: float, scale: float,
    beta_scale: float, dtype: torch.dtype,
) -> StepWeights:  # fmt: skip
    is_bounded = isinstance(gate, BoundedGate)
    if gate.A_log is None:
        rate = torch.ones(num_heads, 1, dtype=dtype, device=conv_weight.device)
    else:
        rate = gate.A_log.to(dtype).exp().view(num_heads, 1)
    return StepWeights(
        taps=conv_weight.to(dtype).mT.contiguous(),
        rate=rate if is_bounded else rate.neg_(),
        bias=gate.dt_bias.to(dtype).view(num_heads, -1),
        lower_bound=gate.lower_bound if is_bounded else None,
        norm=norm_weight.to(dtype),
        norm_eps=norm_eps,
        scale=scale,
        beta_scale=beta_scale,
    )


def decode_at(
    qkv: Tensor, gate_input: Tensor, beta_logits: Tensor, output_gate: Tensor, conv_pool: Tensor, state_pool: Tensor,
    own: slice | Tensor, weights: StepWeights,
) -> Tensor:  # fmt: skip
    """`kda_decode` by torch operators, for a caller who knows that everything fits and where the slots are.

    own: a slice where slots lie in a row, which are then updated where they are; or their numbers [B] int64.
    A small step is as fast as its operators are few: they write in place, and nothing is cast that need not be.
    """
    batch = qkv.shape[0]
    _, num_heads, key_dim, value_dim = state_pool.shape
    given, dtype = qkv.dtype, weights.taps.dtype

    before = conv_pool[own]
    windows = torch.cat((_as(before.mT, dtype), _as(qkv, dtype).unsqueeze(1)), dim=1)
    mixed = F.silu((windows * weights.taps).sum(1), inplace=True)
    if given != dtype:
        mixed = mixed.to(given).to(dtype)
    query_key, value = mixed.split_with_sizes((2 * num_heads * key_dim, num_heads * value_dim), dim=-1)
    query, key = l2norm(query_key.view(batch, 2, num_heads, key_dim)).unbind(1)
    key_row = key.reshape(-1, 1, key_dim)
    decay = weights.decay(_as(gate_input, dtype).view(batch, num_heads, key_dim))
    strength = torch.sigmoid(_as(beta_logits, dtype))
    if weights.beta_scale != 1:
        strength.mul_(weights.beta_scale)

    kept = state_pool[own]
    state = _as(kept, dtype).mul_(decay.unsqueeze(-1))
    matrices = state.view(-1, key_dim, value_dim)
    predicted = torch.bmm(key_row, matrices)
    delta = torch.sub(value.reshape(-1, 1, value_dim), predicted).mul_(strength.view(-1, 1, 1))
    matrices.baddbmm_(key_row.mT, delta)
    read = torch.bmm(query.reshape(-1, 1, key_dim), matrices).mul_(weights.scale)

    if isinstance(own, slice):
        before.copy_(windows[:, 1:].mT)
        if state is not kept:
            kept.copy_(state)
    else:
        conv_pool[own] = windows[:, 1:].mT.to(conv_pool.dtype)
        state_pool[own] = state.to(state_pool.dtype)
    if given != dtype:
        read = read.to(given).to(dtype)
    normed = F.rms_norm(read.view(batch, num_heads, value_dim), (value_dim,), weights.norm, weights.norm_eps)
    return _as(normed.view(batch, -1).mul_(torch.sigmoid(_as(output_gate, dtype))), given)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Without the call that finds out that there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def _with_whole_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _why_not_triton(qkv: Tensor, conv_pool: Tensor, state_pool: Tensor) -> str | None:
    if (reason := _why_not_triton_on(qkv.device)) is not None:
        return reason
    if qkv.dtype not in POOL_DTYPES:
        return f"qkv has dtype {qkv.dtype}, expected one of {POOL_DTYPES}"
    for name, pool in (("conv_pool", conv_pool), ("state_pool", state_pool)):
        if pool.dtype not in POOL_DTYPES:
            return f"{name} has dtype {pool.dtype}, expected one of {POOL_DTYPES}"
        if pool.shape[0] > 0 and not pool[0].is_contiguous():
            return f"a slot of {name} with strides {pool.stride()} is not contiguous"
    if max(state_pool.shape[2:]) > LARGEST_HEAD_DIM:
        return f"state_pool has shape {tuple(state_pool.shape)}, expected K and V of at most {LARGEST_HEAD_DIM}"
    return None


@torch.compiler.assume_constant_result  # asking the driver would break the graph
def _why_not_triton_on(device: torch.device) -> str | None:
    return _cached_why_not_triton_on(device)


@lru_cache(maxsize=16)
def _cached_why_not_triton_on(device: torch.device) -> str | None:
    return why_not_triton(torch.empty(0, device=device))


def _check_shapes(
    qkv: Tensor, gate_input: Tensor, beta_logits: Tensor, output_gate: Tensor, conv_pool: Tensor, state_pool: Tensor,
    slots: Tensor, conv_weight: Tensor, norm_weight: Tensor, gate: Gate,
) -> tuple[int, int, int]:  # fmt: skip
    if state_pool.dim() != 4:
        raise ValueError(f"state_pool has shape {tuple(state_pool.shape)!r}, expected [slots, H, K, V].")
    if conv_weight.dim() != 2:
        raise ValueError(f"conv_weight has shape {tuple(conv_weight.shape)!r}, expected [C, W].")
    if qkv.dim() != 2:
        raise ValueError(f"qkv has shape {tuple(qkv.shape)!r}, expected [B, C].")
    if not isinstance(gate, SoftplusGate | BoundedGate):
        raise TypeError(f"gate={gate!r} is not a SoftplusGate or BoundedGate.")
    batch = qkv.shape[0]
    num_slots, num_heads, key_dim, value_dim = state_pool.shape
    channels = num_heads * (2 * key_dim + value_dim)
    width = conv_weight.shape[1]
    expected: dict[str, tuple[Tensor, tuple[int, ...], str]] = {
        "qkv": (qkv, (batch, channels), "[B, H * (2 K + V)]"),
        "gate_input": (gate_input, (batch, num_heads * key_dim), "[B, H * K]"),
        "beta_logits": (beta_logits, (batch, num_heads), "[B, H]"),
        "output_gate": (output_gate, (batch, num_heads * value_dim), "[B, H * V]"),
        "conv_pool": (conv_pool, (num_slots, channels, width - 1), "[slots, H * (2 K + V), W - 1]"),
        "conv_weight": (conv_weight, (channels, width), "[H * (2 K + V), W]"),
        "norm_weight": (norm_weight, (value_dim,), "[V]"),
    }
    if gate.A_log is not None:
        expected["gate.A_log"] = (gate.A_log, (num_heads,), "[H]")
    for name, (x, shape, letters) in expected.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)!r}, expected {letters} = {shape!r}.")
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype!r}, expected a floating point dtype.")
    if gate.dt_bias.numel() != num_heads * key_dim:
        raise ValueError(f"gate.dt_bias has shape {tuple(gate.dt_bias.shape)!r}, expected [H, K] or [H * K].")
    if tuple(slots.shape) != (batch,) or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"slots is {slots.dtype} of shape {tuple(slots.shape)!r}, expected int32 or int64 of shape ({batch},)."
        )
    tensors = {name: x for name, (x, _, _) in expected.items()}
    for name, x in (*tensors.items(), ("state_pool", state_pool), ("slots", slots), ("gate.dt_bias", gate.dt_bias)):
        if x.device != qkv.device:
            raise ValueError(f"{name} is on {x.device!r} but qkv is on {qkv.device!r}; move them to one device.")
    return num_heads, key_dim, value_dim
