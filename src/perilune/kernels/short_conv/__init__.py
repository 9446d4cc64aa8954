"""Causal depthwise convolution of small width over sequences or packed documents, with a decode state.

`short_conv` runs whole rows, `short_conv_step` one token; `reference.py` states the meaning. Paths: "reference"
(F.conv1d per document), "shifted" (shifted multiply-adds, plain torch, any device) and "triton" (one pass over memory
each way, CUDA; it reads document borders on the device, so the host never waits and never checks them).

    y, state = short_conv(x, weight, cu_seqlens=cu_seqlens, output_final_state=True)

Shape letters: B batch, T tokens, C channels, W width, N sequences (B, or the number of packed documents).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.kernels.documents import check_borders_shape, document_borders
from perilune.kernels.precision import full_precision
from perilune.kernels.short_conv.reference import reference_short_conv
from perilune.kernels.short_conv.shifted import shifted_short_conv
from perilune.kernels.triton_support import why_not_triton

__all__ = ["BACKENDS", "short_conv", "short_conv_step"]

BACKENDS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "reference": reference_short_conv,
    "shifted": shifted_short_conv,
}
TRITON = "triton"


@full_precision
def short_conv(
    x: Tensor,
    weight: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = "silu",
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Causal depthwise convolution, differentiable in x, weight and initial_state.

    x [B, T, C], weight [C, W] (the last column multiplies the current token, as in F.conv1d).
    cu_seqlens [N + 1]: borders of packed documents, 0 first and T last; B must be 1.
    initial_state [N, C, W - 1]: raw inputs before the first token, oldest first; zero by default.

    Returns y [B, T, C] in x's dtype and the state after the last token, [N, C, W - 1] in float32 (float64 when an input
    is), or None unless `output_final_state`. Half precision is computed in float32.
    """
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)!r}, expected [B, T, C].")
    batch, num_tokens, num_channels = x.shape
    _check_floating(x=x, weight=weight, initial_state=initial_state)
    _check_weight(weight, num_channels, activation)
    backend = _choose_backend(backend, x, weight, initial_state)
    if backend == TRITON:
        from perilune.kernels.short_conv.triton import triton_short_conv

        num_sequences = batch if cu_seqlens is None else check_borders_shape(cu_seqlens, batch=batch)
        _check_state(initial_state, (num_sequences, num_channels, weight.shape[1] - 1), "initial_state")
        return triton_short_conv(
            x, weight,
            initial_state_NCW=initial_state,
            cu_seqlens=cu_seqlens,
            activation=activation,
            output_final_state=output_final_state,
        )  # fmt: skip
    if cu_seqlens is None:
        borders = [row * num_tokens for row in range(batch + 1)]
    else:
        borders = list(document_borders(cu_seqlens, batch=batch, num_tokens=num_tokens))
    _check_state(initial_state, (len(borders) - 1, num_channels, weight.shape[1] - 1), "initial_state")
    run = BACKENDS[backend]
    y, state = run(
        x, weight,
        initial_state_NCW=initial_state,
        borders=borders,
        activation=activation,
        dtype=_compute_dtype(x, weight, initial_state),
    )  # fmt: skip
    return y, state if output_final_state else None


@full_precision
def short_conv_step(
    x: Tensor, state: Tensor, weight: Tensor, *, activation: str | None = "silu"
) -> tuple[Tensor, Tensor]:
    """One token: x [B, C], state [B, C, W - 1], weight [C, W] -> (y [B, C], new state).

    The state is not written in place.
    """
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)!r}, expected [B, C]: short_conv_step takes one token.")
    _check_floating(x=x, weight=weight, state=state)
    _check_weight(weight, x.shape[1], activation)
    _check_state(state, (*x.shape, weight.shape[1] - 1), "state")
    dtype = _compute_dtype(x, weight, state)
    window = torch.cat((state.to(dtype), x.to(dtype).unsqueeze(-1)), dim=-1)
    y = (window * weight.to(dtype)).sum(-1)
    return (F.silu(y) if activation == "silu" else y).to(x.dtype), window[..., 1:]


def _choose_backend(backend: str | None, x: Tensor, weight: Tensor, initial_state: Tensor | None) -> str:
    if backend in BACKENDS:
        return backend
    if backend not in (None, TRITON):
        known = sorted((*BACKENDS, TRITON))
        raise ValueError(f"backend={backend!r} is not a path of short_conv; expected None or one of {known!r}.")
    if backend is None and not x.is_cuda:
        return "shifted"  # also where Triton is interpreted: that is for tests, which ask for it
    obstacle = why_not_triton(x)
    if obstacle is None:
        from perilune.kernels.short_conv.triton import why_not

        obstacle = why_not(x, weight, initial_state)
    if obstacle is None:
        return TRITON
    if backend is None:
        return "shifted"
    raise ValueError(f"backend='triton' cannot run here: {obstacle}; use backend='shifted'.")


def _compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    is_double = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if is_double else torch.float32


def _check_floating(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if x is not None and not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype!r}, expected a floating point dtype.")


def _check_weight(weight: Tensor, num_channels: int, activation: str | None) -> None:
    if weight.dim() != 2 or weight.shape[0] != num_channels or weight.shape[1] < 1:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)!r}, expected [C, W] with C={num_channels!r} and W >= 1."
        )
    if activation not in ("silu", None):
        raise ValueError(f"activation={activation!r} is unknown; expected 'silu' or None.")


def _check_state(state: Tensor | None, shape: tuple[int, ...], name: str) -> None:
    if state is not None and tuple(state.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(state.shape)!r}, expected [N, C, W - 1] = {shape!r}.")
