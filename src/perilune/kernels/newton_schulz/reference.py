"""Newton-Schulz orthogonalisation of one matrix: the definition, in the matrix's own dtype.

    X_0 = X / ||X||_F,  transposed so that it has no more rows than columns
    A = X X^T,  X <- a X + (b A + c A^2) X          for each (a, b, c)

With X = U S V^T the result is U p(S) V^T, where p is the composed odd polynomial: close to the polar factor U V^T.
Dividing by max|x| first keeps the squares of the norm inside the number range. A zero matrix stays zero.
"""

import torch
from torch import Tensor

from perilune.kernels.newton_schulz.coefficients import Coefficients


def reference_orthogonalize(x: Tensor, coefficients: Coefficients) -> Tensor:
    """Orthogonalise one matrix [n, m]."""
    largest = x.abs().max()
    if largest == 0:
        return torch.zeros_like(x)
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / largest
    wide = wide / torch.linalg.vector_norm(wide)
    for a, b, c in coefficients:
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.T if x.shape[0] > x.shape[1] else wide
