"""Orthogonalise matrices by Newton-Schulz iteration: the direction of a Muon update.

`orthogonalize` takes one matrix or any stack of them and returns something close to the polar factor U V^T of each.
It is invariant to the scale of each matrix (any finite, non-zero input), maps zero to zero, and never writes its input.
"""

import difflib
from collections.abc import Sequence

import torch
from torch import Tensor

from perilune.kernels.newton_schulz.coefficients import COEFFICIENTS, Coefficients
from perilune.kernels.newton_schulz.dense import dense_orthogonalize
from perilune.kernels.newton_schulz.reference import reference_orthogonalize
from perilune.kernels.precision import full_precision
from perilune.kernels.triton_support import HAS_TRITON

__all__ = ["COEFFICIENTS", "orthogonalize", "resolve_coefficients"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def resolve_coefficients(coefficients: str | Sequence[tuple[float, float, float]]) -> Coefficients:
    """One (a, b, c) per step, from the name of a set or as given."""
    if not isinstance(coefficients, str):
        return tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    if coefficients not in COEFFICIENTS:
        nearest = difflib.get_close_matches(coefficients, COEFFICIENTS, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(f"coefficients={coefficients!r} is not one of {sorted(COEFFICIENTS)}{hint}")
    return COEFFICIENTS[coefficients]


@full_precision
@torch.no_grad()
def orthogonalize(
    x: Tensor,
    *,
    coefficients: str | Sequence[tuple[float, float, float]] = "jordan",
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> Tensor:
    """Orthogonalise every matrix of x [..., n, m]; same shape, float32 (float64 if x and `dtype` both are).

    coefficients: a name in COEFFICIENTS, or one (a, b, c) per step.
    dtype: what the iteration runs in. bfloat16 reproduces torch.optim.Muon.
    backend: "dense" (batched library products, any device and dtype), "triton" (GPU, half precision; forms.py says what
    it does less of) or "reference" (one matrix after the other, the definition). None takes "triton" where it runs on
    the GPU, else "dense".
    """
    if x.ndim < 2 or not x.is_floating_point():
        raise ValueError(f"x must be a floating-point tensor [..., n, m], got {x.dtype} of shape {tuple(x.shape)}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype!r} cannot iterate: expected one of {_DTYPES}")
    steps = resolve_coefficients(coefficients)
    out_dtype = torch.float64 if x.dtype == dtype == torch.float64 else torch.float32
    if x.numel() == 0:
        return torch.zeros_like(x, dtype=out_dtype)
    x_BNM = x.reshape(-1, *x.shape[-2:])
    if backend == "triton" and not HAS_TRITON:
        raise ValueError("backend='triton' cannot orthogonalise: Triton is not installed (pip install 'perilune[gpu]')")
    if backend == "triton" or (backend is None and _triton_suits(x_BNM, dtype)):
        from perilune.kernels.newton_schulz.fast import fast_orthogonalize

        out_BNM = fast_orthogonalize(x_BNM, steps, dtype)
    elif backend in (None, "dense"):
        out_BNM = dense_orthogonalize(x_BNM, steps, dtype)
    elif backend == "reference":
        out_BNM = torch.zeros_like(x_BNM, dtype=dtype)
        for index in range(x_BNM.shape[0]):
            out_BNM[index] = reference_orthogonalize(x_BNM[index].to(dtype), steps)
    else:
        raise ValueError(f"backend={backend!r} is unknown: expected 'dense', 'triton', 'reference' or None to choose")
    return out_BNM.to(out_dtype).reshape(x.shape)


def _triton_suits(x_BNM: Tensor, dtype: torch.dtype) -> bool:
    if x_BNM.device.type != "cuda" or not HAS_TRITON:
        return False
    from perilune.kernels.newton_schulz.fast import why_not_fast

    return why_not_fast(x_BNM, dtype) is None
