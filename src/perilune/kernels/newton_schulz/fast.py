"""Newton-Schulz on a GPU: normalise every matrix in float32, choose the cheapest form, iterate in half precision.

Also in Triton's interpreter, in float32, for tests. As an operator of torch.library it can stand in compiled code; who
does not compile is spared that operator, whose dispatch takes the host longer than small stacks take the GPU.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from perilune.kernels.newton_schulz.choice import choose_form, tiling_for
from perilune.kernels.newton_schulz.coefficients import Coefficients
from perilune.kernels.newton_schulz.forms import FORMS, Form, iterate
from perilune.kernels.newton_schulz.triton import Tiling, normalized_stack, symmetric_product, why_not_on
from perilune.kernels.operator import is_traced
from perilune.kernels.triton_support import INTERPRETED


def why_not_fast(x_BNM: Tensor, dtype: torch.dtype) -> str | None:
    """The reason why this path cannot orthogonalise x in `dtype`, or None when it can."""
    if reason := _why_not_on(x_BNM.device.type, x_BNM.device.index):
        return reason
    if x_BNM.dtype == torch.float64:
        return "x is float64"
    if dtype not in (torch.float16, torch.bfloat16) and not (INTERPRETED and dtype == torch.float32):
        return f"dtype is {dtype}, not float16 or bfloat16"
    _, rows, columns = x_BNM.shape
    if rows * columns >= 2**31 or rows * x_BNM.stride(1) >= 2**31:
        return "a matrix has 2^31 elements or more"
    return None


@torch.compiler.assume_constant_result
def _why_not_on(device_type: str, index: int | None) -> str | None:
    """Compiled code asks once, when it is compiled."""
    return why_not_on(torch.device(device_type) if index is None else torch.device(device_type, index))


def fast_orthogonalize(
    x_BNM: Tensor, coefficients: Coefficients, dtype: torch.dtype, form: Form | None = None
) -> Tensor:
    """Orthogonalise a stack [b, n, m], iterating in `dtype`; returns `dtype`."""
    if reason := why_not_fast(x_BNM, dtype):
        raise ValueError(f"backend='triton' cannot orthogonalise: {reason}")
    if not is_traced(x_BNM):
        return _orthogonalize(x_BNM, coefficients, dtype, form)
    flat = [value for step in coefficients for value in step]
    return orthogonalize_operator(x_BNM, flat, dtype, form or "")


def _orthogonalize(x_BNM: Tensor, coefficients: Coefficients, dtype: torch.dtype, form: Form | None) -> Tensor:
    result = iterate_normalized(normalized_stack(x_BNM, dtype), coefficients, form)
    # Operators of torch.library may not return views, and a turned stack is one.
    return result.mT.contiguous() if x_BNM.shape[1] > x_BNM.shape[2] else result


@torch.library.custom_op("perilune::orthogonalize", mutates_args=())
def orthogonalize_operator(x_BNM: Tensor, coefficients: list[float], dtype: torch.dtype, form: str) -> Tensor:
    steps = tuple(zip(coefficients[0::3], coefficients[1::3], coefficients[2::3], strict=True))
    return _orthogonalize(x_BNM, steps, dtype, FORMS[FORMS.index(form)] if form else None)


@orthogonalize_operator.register_fake
def _(x_BNM: Tensor, coefficients: list[float], dtype: torch.dtype, form: str) -> Tensor:
    return torch.empty(x_BNM.shape, dtype=dtype, device=x_BNM.device)


def iterate_normalized(x_BNM: Tensor, coefficients: Coefficients, form: Form | None = None) -> Tensor:
    """The iteration alone on a stack [b, n, m], n <= m, of matrices with Frobenius norm 1 (or 0, or NaN), in the form
    that suits the shape. Returns the same dtype; x is scratch space afterwards."""
    batch, rows, columns = x_BNM.shape
    if form is None:
        form = choose_form(batch, rows, columns, coefficients)
        kernels = _kernels(batch, rows, columns, form)
        if not all(is_right(x_BNM.device, x_BNM.dtype, kernel) for kernel in kernels):
            form = "plain"
    return iterate(x_BNM, coefficients, form)


class Kernel(NamedTuple):
    """A symmetric product with these tiles, with a sum or without, compiled for matrices that whole tiles make up (by
    the copy engine: of the result, else: steps of the sum) or for any."""

    tiling: Tiling
    has_c: bool = False
    whole: bool = True


@lru_cache(maxsize=1024)
def _kernels(batch: int, rows: int, columns: int, form: Form) -> tuple[Kernel, ...]:
    """What this form needs for such a stack."""
    if form == "plain":
        return ()

    def kernel(depth: int, has_c: bool) -> Kernel:
        tiling = tiling_for(batch, rows, depth, has_c)
        return Kernel(tiling, has_c, rows % tiling.edge == 0 if tiling.tma else depth % tiling.depth == 0)

    depths = {columns, rows} if form == "gram" else {columns}
    return (*{kernel(depth, False) for depth in depths}, kernel(rows, True))


def is_right(device: torch.device, dtype: torch.dtype, kernel: Kernel) -> bool:
    """Whether a kernel runs on this device and agrees with the library, tried once.

    Assemblers have got Hopper's matrix instructions wrong (see triton_support.py), and wrong directions train a model
    badly rather than not at all. Smaller GPUs may lack the shared memory. A CUDA graph that is being recorded cannot be
    waited for: there, only what was tried before counts.
    """
    key = (device, dtype, kernel)
    if key not in _TRIED:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        trouble = f"are wrong on {device} in {dtype} (a newer Triton or ptxas may help)"
        try:
            # Each product is rounded once.
            _TRIED[key] = _error(device, dtype, kernel) < 2 * torch.finfo(dtype).eps
        except OutOfResources as error:
            _TRIED[key], trouble = False, f"do not fit on {device} in {dtype} ({error})"
        if not _TRIED[key]:
            warnings.warn(
                f"products by Triton {trouble}; Newton-Schulz uses the library's products instead, which are slower",
                stacklevel=2,
            )
    return _TRIED[key]


_TRIED: dict[tuple[torch.device, torch.dtype, Kernel], bool] = {}


def _error(device: torch.device, dtype: torch.dtype, kernel: Kernel) -> float:
    tiling, whole = kernel.tiling, kernel.whole
    # Two tiles and a half, or three where the copy engine stores whole ones.
    rows = 3 * tiling.edge if whole and tiling.tma else 5 * tiling.edge // 2 + 8 * (not whole)
    depth = 5 * tiling.depth + 8 * (not whole)
    number = torch.arange(2 * rows * depth, device=device, dtype=torch.float64)
    x = torch.sin(number * number).view(2, rows, depth).mul_(depth**-0.5).to(dtype)
    want = x.double() @ x.double().mT
    if kernel.has_c:
        c = want.to(dtype)
        got = symmetric_product(x, x, tiling=tiling, alpha=2.0, c_BNN=c, beta=-5.0, diagonal=3.0)
        want = 2 * want - 5 * c.double() + 3 * torch.eye(rows, device=device, dtype=torch.float64)
    else:
        got = symmetric_product(x, x, tiling=tiling)
    return float((got.double() - want).norm() / want.norm())
