"""The same Newton-Schulz iteration on a GPU in three forms, for stacks of normalised half-precision matrices X [n, m].

    plain      A = X X^T,  Z = a I + b A + c A^2,  X <- Z X                            by products of the library
    symmetric  the same, the first two products at half the cost (triton.py)
    gram       R = X X^T, then on [n, n] matrices alone, all of them symmetric and polynomials of R, hence commuting:
               Z = a I + b R + c R^2,  Q <- Q Z,  R <- (R Z) Z,      and at the end X <- Q X       (Dao AI Lab's Gram
               Newton-Schulz); pays for wide matrices, whose products with X cost m / n times as much

With K steps and in units of n^3 multiply-adds, of which a symmetric product needs half: plain K (2 m/n + 1), symmetric
K (3 m/n + 1) / 2, gram (3 m/n + 4 K - 3) / 2.

The trap of the gram form: R is rounded, so its small eigenvalues are off by about eps ||R||, some below zero, and each
R <- R Z^2 multiplies what is wrong by a^2. After the five steps of torch.optim.Muon that is 1.4e5: on matrices with one
dominant direction the result explodes, in bfloat16 and in float16. So X and R are computed anew ("restart") before the
error has grown: by at most 200 from the first R, whose norm is below 1, and by at most 16 later, when many singular
values are near 1 and the rounding of R is as large as its small eigenvalues. With these restarts the gram form is as
near to the exact iteration as the plain one, for every published coefficient set and for spectra from flat to rank one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from perilune.kernels.newton_schulz.coefficients import Coefficients

Form = Literal["plain", "symmetric", "gram"]
FORMS: tuple[Form, ...] = ("plain", "symmetric", "gram")
FIRST_GROWTH, LATER_GROWTH = 200.0, 16.0


def restarts(coefficients: Coefficients) -> tuple[int, ...]:
    """Steps before which the gram form computes X and R anew."""
    steps: list[int] = []
    growth, limit = 1.0, FIRST_GROWTH
    for step, (a, _, _) in enumerate(coefficients[:-1]):
        growth *= a * a
        if growth > limit:
            steps.append(step + 1)
            growth, limit = 1.0, LATER_GROWTH
    return tuple(steps)


def iterate(x_BNM: Tensor, coefficients: Coefficients, form: Form) -> Tensor:
    """The iteration on a stack [b, n, m], n <= m, of matrices with Frobenius norm 1. x is scratch space afterwards."""
    if not coefficients:
        return x_BNM
    if form == "plain":
        return _plain(x_BNM, coefficients)
    return _symmetric(x_BNM, coefficients) if form == "symmetric" else _gram(x_BNM, coefficients)


def _plain(x_BNM: Tensor, coefficients: Coefficients) -> Tensor:
    other = torch.empty_like(x_BNM)
    for a, b, c in coefficients:
        gram = torch.bmm(x_BNM, x_BNM.mT)
        # a X inside the product: baddbmm would first copy X to where the result goes.
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal(dim1=-2, dim2=-1).add_(a)
        torch.bmm(polynomial, x_BNM, out=other)
        x_BNM, other = other, x_BNM
    return x_BNM


def _symmetric(x_BNM: Tensor, coefficients: Coefficients) -> Tensor:
    from perilune.kernels.newton_schulz.choice import tiling_for
    from perilune.kernels.newton_schulz.triton import symmetric_product

    batch, rows, columns = x_BNM.shape
    outer, inner = tiling_for(batch, rows, columns), tiling_for(batch, rows, rows)
    other = torch.empty_like(x_BNM)
    gram, polynomial = (x_BNM.new_empty(batch, rows, rows) for _ in range(2))
    for a, b, c in coefficients:
        symmetric_product(x_BNM, x_BNM, tiling=outer, out_BNN=gram)
        symmetric_product(gram, gram, tiling=inner, out_BNN=polynomial, alpha=c, c_BNN=gram, beta=b, diagonal=a)
        torch.bmm(polynomial, x_BNM, out=other)
        x_BNM, other = other, x_BNM
    return x_BNM


def _gram(x_BNM: Tensor, coefficients: Coefficients) -> Tensor:
    from perilune.kernels.newton_schulz.choice import tiling_for
    from perilune.kernels.newton_schulz.triton import symmetric_product

    batch, rows, columns = x_BNM.shape
    outer, inner = tiling_for(batch, rows, columns), tiling_for(batch, rows, rows)
    other = torch.empty_like(x_BNM)
    fresh = {0, *restarts(coefficients)}
    product = gram = x_BNM  # both are set in step 0
    for step, (a, b, c) in enumerate(coefficients):
        if step in fresh:
            if step:
                torch.bmm(product, x_BNM, out=other)
                x_BNM, other = other, x_BNM
            gram = symmetric_product(x_BNM, x_BNM, tiling=outer)
        polynomial = symmetric_product(gram, gram, tiling=inner, alpha=c, c_BNN=gram, beta=b, diagonal=a)
        product = polynomial if step in fresh else symmetric_product(product, polynomial, tiling=inner)
        if step + 1 < len(coefficients) and step + 1 not in fresh:
            gram = symmetric_product(symmetric_product(gram, polynomial, tiling=inner), polynomial, tiling=inner)
    return torch.bmm(product, x_BNM, out=other)


def launches(coefficients: Coefficients, form: Form) -> tuple[int, int, int, int]:
    """How many products: symmetric ones with X, symmetric ones of [n, n] matrices, library products with X, library
    products of [n, n] matrices."""
    steps = len(coefficients)
    if form == "plain":
        return 0, 0, 2 * steps, steps
    if form == "symmetric":
        return steps, steps, steps, 0
    borders = [0, *restarts(coefficients), steps]
    segments = [after - before for before, after in zip(borders, borders[1:])]
    # A segment of s steps: s squares, s - 1 products with Q, and two for each of the s - 1 times R moves on.
    return len(segments), sum(4 * length - 3 for length in segments), len(segments), 0


def multiplications(rows: int, columns: int, coefficients: Coefficients, form: Form) -> float:
    """Multiply-adds of one matrix, half of them for a symmetric product."""
    outer, inner, wide, square = launches(coefficients, form)
    return float(rows) ** 2 * (columns * (outer / 2 + wide) + rows * (inner / 2 + square))
