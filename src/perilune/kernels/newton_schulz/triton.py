"""Triton kernels of Newton-Schulz on stacks of half-precision matrices: symmetric products, and normalisation.

    symmetric_product:  out = alpha A B^T + beta C + diagonal I        A, B [b, n, k], C and out [b, n, n]

for products that are symmetric in exact arithmetic: X X^T, and products of polynomials of one symmetric matrix. Only
tiles that touch the lower triangle are multiplied, and each is written twice, as it is and mirrored: half the
arithmetic, and the result equals its transpose bit by bit. Operands are rounded once, sums are float32.

    tile_scales, normalize:  X / ||X||_F of every matrix in two passes, the first of which can sit inside whatever
    produces X (optim/fused.py). Tiles are first stored with a power-of-two scale of their own, so that float16 holds a
    gradient of any magnitude; the norm is summed in float32 from the unrounded values, in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from perilune.kernels.launch import Launch, device_of, is_aligned
from perilune.kernels.triton_support import why_not_triton

# Tile of the normalisation kernels, rows x columns of the stack.
TILE_ROWS, TILE_COLUMNS, TILE_WARPS = 64, 128, 8
TILE_CONSTANTS = {"TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS}


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a symmetric product is cut: `edge` x `edge` of the result a program, `depth` of the sum a step.

    `group`: programs that run at the same time share a square of `group` x `group` tiles, so that they read the same
    operands from the L2 cache. `tma`: tiles are moved by the copy engine, which is faster but costs the host more.
    """

    edge: int
    depth: int
    warps: int
    stages: int
    group: int = 1
    tma: bool = False


@triton.jit
def _tile_of(program, rows, EDGE: tl.constexpr, GROUP: tl.constexpr):
    """Matrix, first row and first column of this program's tile: the groups of the lower triangle row by row."""
    PER_GROUP: tl.constexpr = GROUP * GROUP
    groups = tl.cdiv(rows, EDGE * GROUP)
    per_matrix = groups * (groups + 1) // 2 * PER_GROUP
    matrix = program // per_matrix
    tile = program % per_matrix
    group = tile // PER_GROUP
    inside = tile % PER_GROUP
    # Row of the triangle from the number of the group; the float32 root may be off by one.
    down = ((tl.sqrt(8.0 * group.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    down = tl.where(down * (down + 1) // 2 > group, down - 1, down)
    down = tl.where((down + 1) * (down + 2) // 2 <= group, down + 1, down)
    across = group - down * (down + 1) // 2
    return matrix, (down * GROUP + inside // GROUP) * EDGE, (across * GROUP + inside % GROUP) * EDGE


@triton.jit
def _first_sum(
    c_ptr, matrix, first_row, first_column, rows, c_scale, diagonal,
    HAS_C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """What the sum of products starts from: c_scale C + diagonal I, or zero. At the end of the sum there would be no
    registers left to load C into."""
    total = tl.zeros((EDGE, EDGE), tl.float32)
    if HAS_C:
        row = (first_row + tl.arange(0, EDGE))[:, None]
        column = (first_column + tl.arange(0, EDGE))[None, :]
        inside = (row < rows) & (column < rows)
        # Offsets inside one matrix fit int32 (checked by the caller), those inside the stack may not.
        c_ptr += matrix.to(tl.int64) * rows * rows
        total += c_scale * tl.load(c_ptr + row * rows + column, mask=inside, other=0.0).to(tl.float32)
        total = tl.where(row == column, total + diagonal, total)
    return total


@triton.jit
def _store_both_halves(
    result, out, matrix, first_row, first_column, rows, EDGE: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """A tile as it is, and mirrored. `out` is a pointer; with TMA, tiles of [b n, n]."""
    row = (first_row + tl.arange(0, EDGE))[:, None]
    column = (first_column + tl.arange(0, EDGE))[None, :]
    if first_row == first_column:
        # The upper half of a tile on the diagonal is its lower half mirrored, so that both agree bit by bit. A mask of
        # the two stores would do as well, but allows no wide stores.
        result = tl.where(row >= column, result, tl.trans(result))
    if TMA:
        out.store([matrix * rows + first_row, first_column], result)
        out.store([matrix * rows + first_column, first_row], tl.trans(result))
    else:
        out += matrix.to(tl.int64) * rows * rows
        tl.store(out + row * rows + column, result, mask=(row < rows) & (column < rows))
        row = (first_column + tl.arange(0, EDGE))[:, None]
        column = (first_row + tl.arange(0, EDGE))[None, :]
        tl.store(out + row * rows + column, tl.trans(result), mask=(row < rows) & (column < rows))


@triton.jit
def _symmetric_product_kernel(
    a_ptr, b_ptr, c_ptr, out_ptr, rows, depth, alpha, c_scale, diagonal,
    HAS_C: tl.constexpr, EDGE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, WHOLE_STEPS: tl.constexpr,
):  # fmt: skip
    matrix, first_row, first_column = _tile_of(tl.program_id(0), rows, EDGE, GROUP)
    # Of a group on the diagonal, tiles above it and tiles outside the matrix have nothing to do.
    if (first_row >= first_column) & (first_row < rows):
        # Rows outside the matrix repeat its last row; what they produce is not stored.
        a_row = tl.minimum(first_row + tl.arange(0, EDGE), rows - 1)
        b_row = tl.minimum(first_column + tl.arange(0, EDGE), rows - 1)
        base = matrix.to(tl.int64) * rows * depth
        step = tl.arange(0, DEPTH)
        a_tile = (a_ptr + base) + a_row[:, None] * depth + step[None, :]
        b_tile = (b_ptr + base) + b_row[:, None] * depth + step[None, :]
        total = _first_sum(c_ptr, matrix, first_row, first_column, rows, c_scale, diagonal, HAS_C, EDGE)
        for start in range(0, depth, DEPTH):
            if WHOLE_STEPS:
                a, b = tl.load(a_tile), tl.load(b_tile)
            else:
                valid = (step < depth - start)[None, :]
                a, b = tl.load(a_tile, mask=valid, other=0.0), tl.load(b_tile, mask=valid, other=0.0)
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
            a_tile += DEPTH
            b_tile += DEPTH
        result = (total * alpha).to(out_ptr.dtype.element_ty)
        _store_both_halves(result, out_ptr, matrix, first_row, first_column, rows, EDGE, False)


@triton.jit
def _symmetric_product_tma_kernel(
    a_tiles, b_tiles, c_ptr, out, rows, depth, alpha, c_scale, diagonal,
    HAS_C: tl.constexpr, EDGE: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, TMA_STORE: tl.constexpr,
):  # fmt: skip
    """The same with tiles moved by the copy engine: a_tiles and b_tiles describe [b n, k], and `out` describes [b n, n]
    where whole tiles make up a matrix (TMA_STORE), else it is a pointer."""
    matrix, first_row, first_column = _tile_of(tl.program_id(0), rows, EDGE, GROUP)
    if (first_row >= first_column) & (first_row < rows):
        # Rows outside the matrix belong to the next one, or are zero; what they produce is not stored.
        a_row = matrix * rows + first_row
        b_row = matrix * rows + first_column
        total = _first_sum(c_ptr, matrix, first_row, first_column, rows, c_scale, diagonal, HAS_C, EDGE)
        for start in range(0, depth, DEPTH):
            a = a_tiles.load([a_row, start])
            b = b_tiles.load([b_row, start])
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
        result = (total * alpha).to(c_ptr.dtype.element_ty)
        _store_both_halves(result, out, matrix, first_row, first_column, rows, EDGE, TMA_STORE)


@triton.jit
def tile_and_matrix(rows, columns, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Numbers of this program's tile and of its matrix. (A second dimension of a grid ends at 65,535.)"""
    tiles = tl.cdiv(rows, TILE_ROWS) * tl.cdiv(columns, TILE_COLUMNS)
    return tl.program_id(0) % tiles, tl.program_id(0) // tiles


@triton.jit
def scale_tile(values):
    """values times a power of two that brings max|values| into [0.5, 1), its negated exponent, and the sum of squares
    of the scaled values. A tile with inf or NaN has a sum that is not finite."""
    largest = tl.max(tl.max(tl.abs(values), axis=1), axis=0)
    exponent = ((largest.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126
    # Two factors, because 2^-exponent itself leaves the number range at both ends.
    half = exponent >> 1
    first = ((127 - half) << 23).to(tl.float32, bitcast=True)
    second = ((127 - exponent + half) << 23).to(tl.float32, bitcast=True)
    scaled = values * first * second
    return scaled, exponent, tl.sum(tl.sum(scaled * scaled, axis=1), axis=0)


@triton.jit
def _scale_tiles_kernel(
    x_ptr, half_ptr, exponent_ptr, square_ptr, rows, columns, x_matrix_stride, x_row_stride,
    TURNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, TILE_COLUMNS)
    tile, matrix = tile_and_matrix(rows, columns, TILE_ROWS, TILE_COLUMNS)
    first_row, first_column = tile // across * TILE_ROWS, tile % across * TILE_COLUMNS
    row = (first_row + tl.arange(0, TILE_ROWS))[:, None]
    column = (first_column + tl.arange(0, TILE_COLUMNS))[None, :]
    x_ptr += matrix.to(tl.int64) * x_matrix_stride
    if TURNED:
        source_row = (first_column + tl.arange(0, TILE_COLUMNS))[:, None]
        source_column = (first_row + tl.arange(0, TILE_ROWS))[None, :]
        inside = (source_row < columns) & (source_column < rows)
        values = tl.load(x_ptr + source_row * x_row_stride + source_column, mask=inside, other=0.0).to(tl.float32)
        values = tl.trans(values)
    else:
        inside = (row < rows) & (column < columns)
        values = tl.load(x_ptr + row * x_row_stride + column, mask=inside, other=0.0).to(tl.float32)
    scaled, exponent, square = scale_tile(values)
    half_ptr += matrix.to(tl.int64) * rows * columns
    inside = (row < rows) & (column < columns)
    tl.store(half_ptr + row * columns + column, scaled.to(half_ptr.dtype.element_ty), mask=inside)
    tl.store(exponent_ptr + tl.program_id(0), exponent)
    tl.store(square_ptr + tl.program_id(0), square)


@triton.jit(do_not_specialize=["tiles"])
def _tile_factors_kernel(exponent_ptr, square_ptr, tiles, BLOCK: tl.constexpr):
    """In place of each tile's sum of squares, the factor 2^exponent / norm of the matrix."""
    exponent_ptr += tl.program_id(0) * tiles
    square_ptr += tl.program_id(0) * tiles
    largest = tl.full((BLOCK,), -200, tl.int32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(exponent_ptr + tile, mask=tile < tiles, other=-200))
    top = tl.max(largest, axis=0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        below = tl.maximum(tl.load(exponent_ptr + tile, mask=tile < tiles, other=-200) - top, -126)
        power = ((127 + below) << 23).to(tl.float32, bitcast=True)
        total += tl.load(square_ptr + tile, mask=tile < tiles, other=0.0) * power * power
    square = tl.sum(total, axis=0)
    # A zero matrix stays zero; one with inf or NaN becomes NaN as a whole.
    inverse = tl.where(square > 0, 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)
    inverse = tl.where(square < float("inf"), inverse, float("nan"))
    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        below = tl.maximum(tl.load(exponent_ptr + tile, mask=tile < tiles, other=-200) - top, -126)
        power = ((127 + below) << 23).to(tl.float32, bitcast=True)
        tl.store(square_ptr + tile, power * inverse, mask=tile < tiles)


@triton.jit
def _normalize_kernel(
    half_ptr, factor_ptr, rows, columns, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(columns, TILE_COLUMNS)
    tile, matrix = tile_and_matrix(rows, columns, TILE_ROWS, TILE_COLUMNS)
    row = (tile // across * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = (tile % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    half_ptr += matrix.to(tl.int64) * rows * columns
    factor = tl.load(factor_ptr + tl.program_id(0))
    values = tl.load(half_ptr + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(half_ptr + row * columns + column, (values * factor).to(half_ptr.dtype.element_ty), mask=inside)


class Operand:
    """A stack [b, n, k], and its tiles as the copy engine wants them described."""

    __slots__ = ("_described", "stack")

    def __init__(self, stack_BNK: Tensor) -> None:
        self.stack = stack_BNK
        self._described: dict[tuple[int, int], TensorDescriptor] = {}

    def tiles(self, shape: tuple[int, int]) -> TensorDescriptor:
        if shape not in self._described:
            flat = self.stack.view(-1, self.stack.shape[-1])
            self._described[shape] = TensorDescriptor.from_tensor(flat, list(shape))
        return self._described[shape]


class SymmetricProducts:
    """Products of stacks of one shape, dtype and device: prepared once (`symmetric_products`), cheap to call often.

    Stacks must be contiguous and begin at multiples of 16 bytes.
    """

    def __init__(self, batch: int, rows: int, depth: int, tiling: Tiling, has_c: bool) -> None:
        tma = tiling.tma and depth % 8 == 0
        tma_store = tma and rows % tiling.edge == 0
        self._sizes = (rows, depth)
        # Shapes of tiles where the copy engine moves them, else None.
        self._source = (tiling.edge, tiling.depth) if tma else None
        self._target = (tiling.edge, tiling.edge) if tma_store else None
        groups = triton.cdiv(rows, tiling.edge * tiling.group)
        grid = (batch * (groups * (groups + 1) // 2) * tiling.group**2,)
        constants = {"HAS_C": has_c, "EDGE": tiling.edge, "DEPTH": tiling.depth, "GROUP": tiling.group}
        constants |= {"TMA_STORE": tma_store} if tma else {"WHOLE_STEPS": depth % tiling.depth == 0}
        kernel = _symmetric_product_tma_kernel if tma else _symmetric_product_kernel
        self._launch = Launch(kernel, grid, constants, num_warps=tiling.warps, num_stages=tiling.stages)

    def __call__(
        self,
        a: Operand,
        b: Operand,
        out: Operand,
        *,
        alpha: float = 1.0,
        c: Operand | None = None,
        beta: float = 0.0,
        diagonal: float = 0.0,
    ) -> None:
        """out <- alpha A B^T + beta C + diagonal I, or alpha A B^T without C. Checks nothing."""
        if c is not None and alpha == 0:
            torch.mul(c.stack, beta, out=out.stack).diagonal(dim1=-2, dim2=-1).add_(diagonal)
            return
        left, right = (a.stack, b.stack) if self._source is None else (a.tiles(self._source), b.tiles(self._source))
        target = out.stack if self._target is None else out.tiles(self._target)
        if c is None:
            self._launch(left, right, out.stack, target, *self._sizes, alpha, 0.0, 0.0)
        else:
            self._launch(left, right, c.stack, target, *self._sizes, alpha, beta / alpha, diagonal / alpha)


@lru_cache(maxsize=1024)
def symmetric_products(
    device: torch.device, dtype: torch.dtype, batch: int, rows: int, depth: int, tiling: Tiling, has_c: bool
) -> SymmetricProducts:
    return SymmetricProducts(batch, rows, depth, tiling, has_c)


def symmetric_product(
    a_BNK: Tensor,
    b_BNK: Tensor,
    *,
    tiling: Tiling,
    out_BNN: Tensor | None = None,
    alpha: float = 1.0,
    c_BNN: Tensor | None = None,
    beta: float = 0.0,
    diagonal: float = 0.0,
) -> Tensor:
    """alpha A B^T + beta C + diagonal I, or alpha A B^T without C, for contiguous stacks whose product is symmetric.
    Never writes A, B or C."""
    batch, rows, depth = a_BNK.shape
    _check_operands(a_BNK, b_BNK, c_BNN, out_BNN)
    out = a_BNK.new_empty(batch, rows, rows) if out_BNN is None else out_BNN
    multiply = symmetric_products(a_BNK.device, a_BNK.dtype, batch, rows, depth, tiling, c_BNN is not None)
    c = None if c_BNN is None else Operand(c_BNN)
    with device_of(a_BNK):
        multiply(Operand(a_BNK), Operand(b_BNK), Operand(out), alpha=alpha, c=c, beta=beta, diagonal=diagonal)
    return out


def normalized_stack(x_BNM: Tensor, dtype: torch.dtype) -> Tensor:
    """Every matrix of x [b, n, m] divided by its Frobenius norm, tall ones turned on their side."""
    batch, rows, columns = x_BNM.shape
    turned = rows > columns
    if turned:
        rows, columns = columns, rows
    if x_BNM.stride(2) != 1:
        x_BNM = x_BNM.contiguous()
    device, strides = x_BNM.device, x_BNM.stride()
    half = torch.empty(batch, rows, columns, dtype=dtype, device=device)
    tiles = num_tiles(rows, columns)
    exponents = torch.empty(batch, tiles, dtype=torch.int32, device=device)
    squares = torch.empty(batch, tiles, dtype=torch.float32, device=device)
    kind = (device, x_BNM.dtype, dtype, batch, rows, columns, strides, turned, is_aligned(x_BNM))
    with device_of(x_BNM):
        _scale_tiles(*kind)(x_BNM, half, exponents, squares, rows, columns, strides[0], strides[1])
    return normalize(half, exponents, squares)


def num_tiles(rows: int, columns: int) -> int:
    return triton.cdiv(rows, TILE_ROWS) * triton.cdiv(columns, TILE_COLUMNS)


def normalize(half_BNM: Tensor, exponents_BT: Tensor, squares_BT: Tensor) -> Tensor:
    """Finish what `scale_tile` began: the stack, in place, with every matrix of Frobenius norm 1 (or 0, or NaN).
    All three are new tensors, not parts of others."""
    batch, rows, columns = half_BNM.shape
    tiles = exponents_BT.shape[1]
    find_factors, multiply = _normalization(half_BNM.device, half_BNM.dtype, batch, rows, columns)
    with device_of(half_BNM):
        find_factors(exponents_BT, squares_BT, tiles)
        multiply(half_BNM, squares_BT, rows, columns)
    return half_BNM


# One of each for every kind of arguments.


@lru_cache(maxsize=1024)
def _scale_tiles(
    device: torch.device, x_dtype: torch.dtype, dtype: torch.dtype, batch: int, rows: int, columns: int,
    strides: tuple[int, ...], turned: bool, x_is_aligned: bool,
) -> Launch:  # fmt: skip
    constants = {"TURNED": turned, **TILE_CONSTANTS}
    return Launch(_scale_tiles_kernel, (num_tiles(rows, columns) * batch,), constants, num_warps=TILE_WARPS)


@lru_cache(maxsize=1024)
def _normalization(
    device: torch.device, dtype: torch.dtype, batch: int, rows: int, columns: int
) -> tuple[Launch, Launch]:
    return (
        Launch(_tile_factors_kernel, (batch,), {"BLOCK": 1024}, num_warps=4),
        Launch(_normalize_kernel, (num_tiles(rows, columns) * batch,), TILE_CONSTANTS, num_warps=TILE_WARPS),
    )


@lru_cache(maxsize=16)
def why_not_on(device: torch.device) -> str | None:
    """The reason why no kernel can run on this device, or None; asked at every launch, so remembered."""
    return why_not_triton(torch.empty(0, device=device))


def _check_operands(a_BNK: Tensor, b_BNK: Tensor, c_BNN: Tensor | None, out_BNN: Tensor | None) -> None:
    if reason := why_not_on(a_BNK.device):
        raise ValueError(f"symmetric_product: {reason}")
    batch, rows, depth = a_BNK.shape
    results = [each for each in (c_BNN, out_BNN) if each is not None]
    if b_BNK.shape != a_BNK.shape or any(each.shape != (batch, rows, rows) for each in results):
        shapes = [tuple(each.shape) for each in (a_BNK, b_BNK, *results)]
        raise ValueError(f"symmetric_product needs A and B [b, n, k] and C [b, n, n], got {shapes}")
    for each in (a_BNK, b_BNK, *results):
        if not each.is_contiguous() or each.dtype != a_BNK.dtype or not is_aligned(each):
            raise ValueError("symmetric_product needs contiguous operands of one dtype, at multiples of 16 bytes")
    if rows * max(rows, depth) >= 2**31:
        raise ValueError(f"symmetric_product takes matrices below 2^31 elements, got {rows} x {max(rows, depth)}")
