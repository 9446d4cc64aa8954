"""Kimi Delta Attention (arXiv 2510.26692): a gated delta rule whose state forgets at its own rate in every key channel.

`kda` runs whole sequences or packed documents, `kda_step` one token for decoding; both compute the recurrence that
`reference.py` states. Paths: "reference" (token loop), "chunked" (chunkwise form, plain torch, any device), "triton"
(own kernels, any gate), and adapters to libraries, "cudnn" and "fla". Without `backend` the fastest that is exact for
the case is taken (choice.py).

    o, state = kda(q, k, v, gate_input, beta, gate=SoftplusGate(A_log, dt_bias), qk_l2norm=True)

Shape letters: B batch, T tokens, H heads, K key dim, V value dim, N sequences (B, or the number of packed documents).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perilune.kernels.documents import check_borders_shape, document_borders
from perilune.kernels.kda.choice import own_or_library
from perilune.kernels.kda.chunked import chunked_kda
from perilune.kernels.kda.gates import BoundedGate, Gate, SoftplusGate
from perilune.kernels.kda.reference import l2norm, recurrent_kda
from perilune.kernels.kda.reference import step as _reference_step
from perilune.kernels.precision import full_precision
from perilune.kernels.triton_support import HAS_TRITON, warn_slow, why_not_triton

__all__ = ["BACKENDS", "BoundedGate", "Gate", "SoftplusGate", "kda", "kda_step", "l2norm"]

BACKENDS = ("reference", "chunked", "triton", "cudnn", "fla")


@full_precision
def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    gate: Gate | None = None,
    qk_l2norm: bool = False,
    beta_max: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over sequences or packed documents, differentiable in every tensor argument.

    q, k [B, T, H, K], v [B, T, H, V], beta [B, T, H] in [0, 2] (0 writes nothing; above 1 needs L2-normalised keys).
    g [B, T, H, K]: the log decay (<= 0), or the raw gate input when `gate` is given.
    scale: factor on the read, K ** -0.5 by default.
    initial_state [N, H, K, V]: the state before the first token, zero by default.
    cu_seqlens [N + 1]: borders of packed documents, 0 first and T last; B must be 1. Documents never touch.
    qk_l2norm: divide q and k by sqrt(sum x^2 + 1e-6) per head first.
    beta_max: beta is a raw input and beta_max * sigmoid(beta) the strength.
    backend: one of BACKENDS; by default the fastest that is exact for the case.

    Returns o [B, T, H, V] in v's dtype and the state after the last token, [N, H, K, V] in float32 (float64 when an
    input is), or None unless `output_final_state`. "reference" and "chunked" compute half precision in float32.
    "triton" trusts `cu_seqlens` instead of waiting for the device, the others check it.
    """
    _check_sequence_shapes(q, k, v, g, beta)
    batch, num_tokens, num_heads, key_dim = q.shape
    _check_gate(gate, num_heads, key_dim)
    _check_devices(q, initial_state=initial_state, **_parameters(gate))
    if beta_max is not None and not beta_max > 0:
        raise ValueError(f"beta_max={beta_max!r} must be positive, or None when beta is the strength itself.")
    name = _choose_backend(backend, q, k, v, g, beta, initial_state, gate)
    scale = key_dim**-0.5 if scale is None else scale
    if name == "triton" and backend is None and q.is_cuda and not torch.compiler.is_compiling():
        options = {
            "scale": scale, "initial_state_NHKV": initial_state, "cu_seqlens": cu_seqlens, "gate": gate,
            "qk_l2norm": qk_l2norm, "dtype": torch.float32, "beta_bound": beta_max,
        }  # fmt: skip
        name = own_or_library(q, k, v, g, beta, options)
    if name == "triton":
        from perilune.kernels.kda.triton import triton_kda

        num_sequences = batch if cu_seqlens is None else check_borders_shape(cu_seqlens, batch=batch)
        if num_sequences < 1:
            raise ValueError(f"cu_seqlens has no documents, expected borders [N + 1] from 0 to T={num_tokens!r}.")
        _check_devices(q, cu_seqlens=cu_seqlens)
        _check_state(initial_state, (num_sequences, num_heads, key_dim, v.shape[-1]), "initial_state")
        o, state = triton_kda(
            q, k, v, g, beta, scale=scale, initial_state_NHKV=initial_state, cu_seqlens=cu_seqlens, gate=gate,
            qk_l2norm=qk_l2norm, beta_max=beta_max,
        )  # fmt: skip
        return o, state if output_final_state else None

    borders = None if cu_seqlens is None else list(document_borders(cu_seqlens, batch=batch, num_tokens=num_tokens))
    num_sequences = batch if borders is None else len(borders) - 1
    _check_state(initial_state, (num_sequences, num_heads, key_dim, v.shape[-1]), "initial_state")
    dtype = _compute_dtype(q, k, v, g, beta, initial_state)
    promises = {"beta_bound": beta_max} if name == "cudnn" and beta_max is not None else {}
    o, state = _path(name)(
        q, k, v, g,
        beta if beta_max is None else beta_max * torch.sigmoid(beta.to(dtype)),
        scale=scale,
        initial_state_NHKV=initial_state,
        cu_seqlens=borders,
        gate=gate,
        qk_l2norm=qk_l2norm,
        dtype=dtype,
        **promises,
    )  # fmt: skip
    return o, state if output_final_state else None


@full_precision
def kda_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    *,
    scale: float | None = None,
    gate: Gate | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """One token of `kda`: q, k, g [B, H, K], v [B, H, V], beta [B, H], state [B, H, K, V] -> (o [B, H, V], new state).

    The state is not written in place.
    """
    if q.dim() != 3:
        raise ValueError(
            f"q has shape {tuple(q.shape)!r}, expected [B, H, K]: kda_step takes one token without a T dim."
        )
    _check_sequence_shapes(*(x.unsqueeze(1) for x in (q, k, v, g, beta)))
    batch, num_heads, key_dim = q.shape
    _check_gate(gate, num_heads, key_dim)
    _check_state(state, (batch, num_heads, key_dim, v.shape[-1]), "state")
    dtype = _compute_dtype(q, k, v, g, beta, state)
    log_decay = g.to(dtype) if gate is None else gate.log_decay(g.to(dtype))
    query, key = q.to(dtype), k.to(dtype)
    if qk_l2norm:
        query, key = l2norm(query), l2norm(key)
    scale = key_dim**-0.5 if scale is None else scale
    o, new_state = _reference_step(query, key, v.to(dtype), log_decay, beta.to(dtype), state.to(dtype), scale)
    return o.to(v.dtype), new_state


def _choose_backend(
    backend: str | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None,
    gate: Gate | None,
) -> str:  # fmt: skip
    if backend not in (None, *BACKENDS):
        raise ValueError(f"backend={backend!r} is not a path of kda; expected None or one of {BACKENDS!r}.")
    if backend not in (None, "triton"):
        return backend
    if backend is None and (q.device.type == "cpu" or not HAS_TRITON):
        return "chunked"
    from perilune.kernels.kda.triton import why_not_triton_kda

    parameters = () if gate is None else (gate.A_log, gate.dt_bias)
    reason = why_not_triton_kda(q, k, v, g, beta, state, *parameters)
    if reason is None and q.numel() > 0 and v.numel() > 0:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend='triton' cannot run this call: {reason or 'q or v is empty'}.")
    if q.device.type == "cuda" and not torch.compiler.is_compiling() and (cause := why_not_triton(q)):
        warn_slow("kda", cause)
    return "chunked"


def _path(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    if name == "cudnn":
        from perilune.kernels.kda.cudnn import cudnn_kda

        return cudnn_kda
    if name == "fla":
        from perilune.kernels.kda.fla import fla_kda

        return fla_kda
    return recurrent_kda if name == "reference" else chunked_kda


def _compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    is_double = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if is_double else torch.float32


def _check_sequence_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    if q.dim() != 4:
        raise ValueError(f"q has shape {tuple(q.shape)!r}, expected [B, T, H, K].")
    batch, num_tokens, num_heads, key_dim = q.shape
    if key_dim == 0:
        raise ValueError(f"q has shape {tuple(q.shape)!r}: K = 0, expected at least one key channel.")
    value_dim = v.shape[-1] if v.dim() == 4 else "V"
    expected = {
        "k": (k, tuple(q.shape), "[B, T, H, K] like q"),
        "v": (v, (batch, num_tokens, num_heads, value_dim), "[B, T, H, V]"),
        "g": (g, tuple(q.shape), "[B, T, H, K] like q"),
        "beta": (beta, (batch, num_tokens, num_heads), "[B, T, H]"),
    }
    for name, (x, shape, letters) in expected.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)!r}, expected {letters} = {shape!r}.")
    for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)):
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype!r}, expected a floating point dtype.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device!r} but q is on {q.device!r}; move them to one device.")


def _check_gate(gate: Gate | None, num_heads: int, key_dim: int) -> None:
    if gate is None:
        return
    if not isinstance(gate, SoftplusGate | BoundedGate):
        raise TypeError(f"gate={gate!r} is not a SoftplusGate or BoundedGate.")
    if gate.A_log is None and isinstance(gate, SoftplusGate):
        raise TypeError("gate.A_log is None, which only a BoundedGate allows; expected [H].")
    if gate.A_log is not None and tuple(gate.A_log.shape) != (num_heads,):
        raise ValueError(f"gate.A_log has shape {tuple(gate.A_log.shape)!r}, expected [H] = ({num_heads},).")
    if tuple(gate.dt_bias.shape) not in ((num_heads, key_dim), (num_heads * key_dim,)):
        raise ValueError(
            f"gate.dt_bias has shape {tuple(gate.dt_bias.shape)!r}, "
            f"expected [H, K] = ({num_heads}, {key_dim}) or [H * K] = ({num_heads * key_dim},)."
        )


def _parameters(gate: Gate | None) -> dict[str, Tensor | None]:
    return {} if gate is None else {"gate.A_log": gate.A_log, "gate.dt_bias": gate.dt_bias}


def _check_devices(q: Tensor, **others: Tensor | None) -> None:
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device!r} but q is on {q.device!r}; move them to one device.")


def _check_state(state: Tensor | None, shape: tuple[int, ...], name: str) -> None:
    if state is not None and tuple(state.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(state.shape)!r}, expected [N, H, K, V] = {shape!r}.")
