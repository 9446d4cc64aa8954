"""Newton-Schulz orthogonalisation of a stack of matrices by batched matmuls, on any device (Muon, arXiv 2502.16982).

The equation is in `reference.py`. What this file adds:

- **Scale invariance without touching the bits.** Each matrix is multiplied by the power of two that brings max|x| into
  [0.5, 1). A power of two commutes with every later rounding (the cast to bfloat16, the norm, the division): on an
  ordinary gradient the result has the bits of torch.optim.Muon, and it keeps them when the gradient is 2^-100 or 2^100
  times as large, where the epsilon of torch's norm or the number range would interfere. (A factor that is no power of
  two changes how the input rounds to bfloat16, and nothing else.)
- **Matrices of a stack do not see each other**: own scale, own norm; NaN or inf in one poisons only that one.
- The input is never written.
"""

import torch
from torch import Tensor

from perilune.kernels.newton_schulz.coefficients import Coefficients


def scale_to_unit_exponent(x_BNM: Tensor) -> Tensor:
    """Multiply each matrix by the power of two that brings its max|x| into [0.5, 1); a matrix with inf becomes NaN."""
    largest = x_BNM.abs().amax(dim=(-2, -1), keepdim=True)
    exponent = torch.frexp(largest).exponent
    # Two factors, because 2^-exponent itself leaves the number range when max|x| is subnormal or near the top.
    # ldexp of one is the power of two exactly; its exponent for inf and NaN is not specified, hence the `where`.
    first = torch.div(exponent, 2, rounding_mode="floor")
    one = torch.ones_like(largest)
    poison = torch.where(torch.isfinite(largest), one, torch.full_like(one, float("nan")))
    return x_BNM * torch.ldexp(poison, -first) * torch.ldexp(one, first - exponent)


def dense_orthogonalize(x_BNM: Tensor, coefficients: Coefficients, dtype: torch.dtype) -> Tensor:
    """Orthogonalise a stack [b, n, m], iterating in `dtype`; returns `dtype`."""
    scaled = scale_to_unit_exponent(x_BNM if x_BNM.dtype == torch.float64 else x_BNM.float()).to(dtype)
    tall = x_BNM.shape[-2] > x_BNM.shape[-1]
    wide = scaled.mT if tall else scaled
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    # After the scaling a non-zero matrix has a norm of at least 0.5: the floor only turns 0/0 into 0.
    wide = wide / norm.clamp(min=0.25)
    for a, b, c in coefficients:
        gram = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if tall else wide
