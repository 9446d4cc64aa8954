"""Which form of the iteration, and which tiles of the symmetric products, for a stack of a given shape.

No tuning at run time: the time of each form is estimated from rates measured once on an H200 (float16, Triton 3.6,
torch 2.11), on the GPU and on the host, whose launches set the pace of small stacks. A form other than the plain one
has to promise more than the estimate may be off, in a CUDA graph and without. The choice depends on shape and
coefficients only, so that a step recorded in a CUDA graph does what an eager one does, bit by bit.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from perilune.kernels.newton_schulz.coefficients import Coefficients
from perilune.kernels.newton_schulz.forms import Form, launches
from perilune.kernels.newton_schulz.triton import Tiling

# 128 x 128 tiles with 4 warps leave room for two programs on a multiprocessor: one multiplies while the other stores.
POINTERS = Tiling(edge=128, depth=64, warps=4, stages=3)
COPY_ENGINE = Tiling(edge=128, depth=64, warps=4, stages=3, tma=True)
SMALL = Tiling(edge=64, depth=64, warps=4, stages=4)


class Cost(NamedTuple):
    """Microseconds of one multiprocessor for a step of `depth` of a tile, for the rest of a tile and for adding C to
    it, and microseconds of the host for a launch."""

    step: float
    tile: float
    c: float
    host: float


COSTS = {
    POINTERS: Cost(step=0.46, tile=3.0, c=1.7, host=12.0),
    COPY_ENGINE: Cost(step=0.39, tile=3.2, c=1.3, host=19.0),
    SMALL: Cost(step=0.27, tile=0.9, c=0.4, host=12.0),
}
MULTIPROCESSORS = 132
# Products that take the GPU less are launched with pointers: describing tiles to the copy engine takes the host longer.
COPY_ENGINE_MICROSECONDS = 25.0
# Products of the library: multiply-adds per microsecond; microseconds for the last, partly filled wave; microseconds of
# the host for a call.
LIBRARY_RATE, LIBRARY_TAIL, LIBRARY_HOST = 3.7e8, 8.0, 15.0
BANDWIDTH = 4.6e6  # bytes per microsecond, of operands some of which are still in the L2 cache
# What an estimate may be off by: for products of as many tiles as were measured, and of fewer.
MEASURED_TILES, MARGIN, FEW_TILES_MARGIN = 500, 1.05, 1.25


@lru_cache(maxsize=1024)
def tiling_for(batch: int, rows: int, depth: int, has_c: bool) -> Tiling:
    """Tiles for the symmetric product of [b, n, k] operands, with a sum or without."""
    if rows <= SMALL.edge:
        return SMALL
    if depth % 8 == 0 and _symmetric(batch, rows, depth, COPY_ENGINE, has_c) >= COPY_ENGINE_MICROSECONDS:
        return COPY_ENGINE
    return POINTERS


@lru_cache(maxsize=1024)
def choose_form(batch: int, rows: int, columns: int, coefficients: Coefficients) -> Form:
    """The fastest form for a stack [b, n, m], n <= m."""
    best: Form = "plain"
    if not coefficients or rows % 8 or columns % 8 or rows * columns >= 2**31:
        return best  # rows of the operands must begin at multiples of 16 bytes to be loaded at full speed
    tiles = _tiles(batch, rows, tiling_for(batch, rows, columns, False))
    margin = MARGIN if tiles >= MEASURED_TILES else FEW_TILES_MARGIN
    least = estimate(batch, rows, columns, coefficients, best)
    for form in ("symmetric", "gram"):
        times = estimate(batch, rows, columns, coefficients, form)
        if all(mine * margin < other for mine, other in zip(times, least, strict=True)):
            best, least = form, times
    return best


def estimate(batch: int, rows: int, columns: int, coefficients: Coefficients, form: Form) -> tuple[float, float]:
    """Microseconds of the iteration: of the GPU alone, and of whichever is slower, GPU or host."""
    outer, inner, wide, square = launches(coefficients, form)
    sums = len(coefficients) if inner else 0  # each step squares once, and adds
    # A square of the plain form also copies A to where the sum goes, reads it there, and adds to the diagonal.
    gpu = wide * _library(batch, rows, rows, columns)
    gpu += square * (_library(batch, rows, rows, rows) + 6 * batch * rows**2 / BANDWIDTH)
    host = (wide + square) * LIBRARY_HOST
    for count, depth, has_c in ((outer, columns, False), (inner - sums, rows, False), (sums, rows, True)):
        tiling = tiling_for(batch, rows, depth, has_c)
        gpu += count * _symmetric(batch, rows, depth, tiling, has_c)
        host += count * COSTS[tiling].host
    return gpu, max(gpu, host)


def _symmetric(batch: int, rows: int, depth: int, tiling: Tiling, has_c: bool) -> float:
    cost, tiles = COSTS[tiling], _tiles(batch, rows, tiling)
    one = math.ceil(depth / tiling.depth) * cost.step + cost.tile + cost.c * has_c
    bytes_moved = 2 * batch * rows * (depth + rows)
    # Two programs share a multiprocessor, and one alone is hardly faster.
    return max(2 * math.ceil(tiles / (2 * MULTIPROCESSORS)) * one, bytes_moved / BANDWIDTH)


def _tiles(batch: int, rows: int, tiling: Tiling) -> int:
    across = math.ceil(rows / tiling.edge)
    return batch * across * (across + 1) // 2


def _library(batch: int, rows: int, depth: int, columns: int) -> float:
    bytes_moved = 2 * batch * (rows * depth + depth * columns + rows * columns)
    return max(batch * rows * depth * columns / LIBRARY_RATE + LIBRARY_TAIL, bytes_moved / BANDWIDTH)
