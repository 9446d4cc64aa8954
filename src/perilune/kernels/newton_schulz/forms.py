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

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from perilune.kernels.launch import device_of, is_aligned
from perilune.kernels.newton_schulz.coefficients import Coefficients

if TYPE_CHECKING:
    from perilune.kernels.newton_schulz.triton import SymmetricProducts

Form = Literal["plain", "symmetric", "gram"]
FORMS: tuple[Form, ...] = ("plain", "symmetric", "gram")
FIRST_GROWTH, LATER_GROWTH = 200.0, 16.0
# Stacks that the GPU is done with before the host is: there, fewer calls count and a copy does not.
FEW_ELEMENTS = 2**22


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
    if not is_aligned(x_BNM):
        x_BNM = x_BNM.clone()
    with device_of(x_BNM):
        return _symmetric(x_BNM, coefficients) if form == "symmetric" else _gram(x_BNM, coefficients)


def _plain(x_BNM: Tensor, coefficients: Coefficients) -> Tensor:
    batch, rows, _ = x_BNM.shape
    other = torch.empty_like(x_BNM)
    gram, polynomial = (x_BNM.new_empty(batch, rows, rows) for _ in range(2))
    few = x_BNM.numel() <= FEW_ELEMENTS
    diagonal = None if few else polynomial.diagonal(dim1=-2, dim2=-1)
    for a, b, c in coefficients:
        torch.bmm(x_BNM, x_BNM.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        if diagonal is None:
            torch.baddbmm(x_BNM, polynomial, x_BNM, beta=a, out=other)
        else:
            # a X inside the product: baddbmm would first copy X to where the result goes.
            diagonal.add_(a)
            torch.bmm(polynomial, x_BNM, out=other)
        x_BNM, other = other, x_BNM
    return x_BNM


def _symmetric(x_BNM: Tensor, coefficients: Coefficients) -> Tensor:
    from perilune.kernels.newton_schulz.triton import Operand

    outer, _, adding = _products(x_BNM)
    batch, rows, _ = x_BNM.shape
    x, other = Operand(x_BNM), Operand(torch.empty_like(x_BNM))
    gram, polynomial = (Operand(x_BNM.new_empty(batch, rows, rows)) for _ in range(2))
    for a, b, c in coefficients:
        outer(x, x, gram)
        adding(gram, gram, polynomial, alpha=c, c=gram, beta=b, diagonal=a)
        torch.bmm(polynomial.stack, x.stack, out=other.stack)
        x, other = other, x
    return x.stack


def _gram(x_BNM: Tensor, coefficients: Coefficients) -> Tensor:
    from perilune.kernels.newton_schulz.triton import Operand

    outer, inner, adding = _products(x_BNM)
    batch, rows, _ = x_BNM.shape
    x, other = Operand(x_BNM), Operand(torch.empty_like(x_BNM))
    gram, half, polynomial, product, free = (Operand(x_BNM.new_empty(batch, rows, rows)) for _ in range(5))
    fresh = {0, *restarts(coefficients)}
    for step, (a, b, c) in enumerate(coefficients):
        if step in fresh:
            if step:
                torch.bmm(product.stack, x.stack, out=other.stack)
                x, other = other, x
            outer(x, x, gram)
        adding(gram, gram, polynomial, alpha=c, c=gram, beta=b, diagonal=a)
        if step + 1 < len(coefficients) and step + 1 not in fresh:
            inner(gram, polynomial, half)
            inner(half, polynomial, gram)
        if step in fresh:
            product, polynomial = polynomial, product
        else:
            inner(product, polynomial, free)
            product, free = free, product
    return torch.bmm(product.stack, x.stack, out=other.stack)


def _products(x_BNM: Tensor) -> tuple[SymmetricProducts, SymmetricProducts, SymmetricProducts]:
    """Symmetric products of matrices like X, of square ones, and of square ones with a sum."""
    from perilune.kernels.newton_schulz.choice import tiling_for
    from perilune.kernels.newton_schulz.triton import symmetric_products

    device, dtype = x_BNM.device, x_BNM.dtype
    batch, rows, columns = x_BNM.shape
    return (
        symmetric_products(device, dtype, batch, rows, columns, tiling_for(batch, rows, columns, False), False),
        symmetric_products(device, dtype, batch, rows, rows, tiling_for(batch, rows, rows, False), False),
        symmetric_products(device, dtype, batch, rows, rows, tiling_for(batch, rows, rows, True), True),
    )


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
