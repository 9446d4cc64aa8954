"""Which form of the iteration, and which tiles of the symmetric products, for a stack of a given shape.

No tuning at run time: the time of each form is estimated from rates measured once on an H200 (float16, Triton 3.6,
torch 2.11), on the GPU and on the host, whose launches set the pace of small stacks. A form other than the plain one
has to promise more than the estimate may be off. The choice depends on shape and coefficients only, so that a step
recorded in a CUDA graph does what an eager one does, bit by bit.
"""

from __future__ import annotations

import math
from functools import lru_cache

from perilune.kernels.newton_schulz.coefficients import Coefficients
from perilune.kernels.newton_schulz.forms import FORMS, Form, launches
from perilune.kernels.newton_schulz.triton import Tiling

# 128 x 128 tiles with 4 warps leave room for two programs on a multiprocessor: one multiplies while the other stores.
POINTERS = Tiling(edge=128, depth=64, warps=4, stages=3)
COPY_ENGINE = Tiling(edge=128, depth=64, warps=4, stages=3, tma=True)
SMALL = Tiling(edge=64, depth=64, warps=4, stages=4)

# Products that take the GPU less are launched with pointers: describing tiles to the copy engine takes the host longer.
COPY_ENGINE_MICROSECONDS = 45.0
# Microseconds of one multiprocessor for a step of `depth` of a tile, for the rest of a tile, and for adding C to it.
POINTER_STEP, POINTER_TILE, POINTER_C = 0.46, 3.0, 1.7
COPY_ENGINE_STEP, COPY_ENGINE_TILE, COPY_ENGINE_C = 0.39, 3.2, 1.3
MULTIPROCESSORS = 132
# Products of the library: multiply-adds and bytes per microsecond, and microseconds for the last, partly filled wave.
LIBRARY_RATE, BANDWIDTH, LIBRARY_TAIL = 3.7e8, 4.0e6, 8.0
# Microseconds of the host for a launch.
HOST_LIBRARY, HOST_POINTERS, HOST_COPY_ENGINE = 15.0, 20.0, 40.0
# What an estimate may be off by; a form is only preferred to the plain one when it wins by more.
MARGIN = 1.05


@lru_cache(maxsize=1024)
def tiling_for(batch: int, rows: int, depth: int, has_c: bool) -> Tiling:
    """Tiles for the symmetric product of [b, n, k] operands, with a sum or without."""
    if rows <= SMALL.edge:
        return SMALL
    fast = depth % 8 == 0 and _symmetric(batch, rows, depth, COPY_ENGINE) >= COPY_ENGINE_MICROSECONDS
    return COPY_ENGINE if fast else POINTERS


@lru_cache(maxsize=1024)
def choose_form(batch: int, rows: int, columns: int, coefficients: Coefficients) -> Form:
    """The fastest form for a stack [b, n, m], n <= m."""
    if not coefficients or rows % 8 or columns % 8 or rows * columns >= 2**31:
        return "plain"  # rows of the operands must begin at multiples of 16 bytes to be loaded at full speed
    times = {form: estimate(batch, rows, columns, coefficients, form) for form in FORMS}
    best = min(FORMS, key=lambda form: times[form])
    return best if times[best] * MARGIN < times["plain"] else "plain"


def estimate(batch: int, rows: int, columns: int, coefficients: Coefficients, form: Form) -> float:
    """Microseconds of the iteration: of the GPU, or of the host where it is slower."""
    outer, inner, wide, square = launches(coefficients, form)
    outer_tiling, inner_tiling = tiling_for(batch, rows, columns, False), tiling_for(batch, rows, rows, True)
    gpu = outer * _symmetric(batch, rows, columns, outer_tiling)
    gpu += inner * _symmetric(batch, rows, rows, inner_tiling)
    if inner:  # one sum for each step
        gpu += len(coefficients) * _sums(batch, rows, inner_tiling)
    gpu += wide * _library(batch, rows, rows, columns)
    # A square of the plain form also copies A to where the sum goes, reads it there, and adds to the diagonal.
    gpu += square * (_library(batch, rows, rows, rows) + 6 * batch * rows**2 / BANDWIDTH)
    host = outer * _host(outer_tiling) + inner * _host(inner_tiling) + (wide + 2 * square) * HOST_LIBRARY
    return max(gpu, host)


def _symmetric(batch: int, rows: int, depth: int, tiling: Tiling) -> float:
    step, tile = (COPY_ENGINE_STEP, COPY_ENGINE_TILE) if tiling.tma else (POINTER_STEP, POINTER_TILE)
    one = math.ceil(depth / tiling.depth) * step * (tiling.edge / POINTERS.edge) + tile
    bytes_moved = 2 * batch * rows * (depth + rows)
    # Two programs share a multiprocessor, so that waves run into each other: only the first must be whole.
    return max(max(_tiles(batch, rows, tiling) / MULTIPROCESSORS, 1) * one, bytes_moved / BANDWIDTH)


def _sums(batch: int, rows: int, tiling: Tiling) -> float:
    one = COPY_ENGINE_C if tiling.tma else POINTER_C
    return max(_tiles(batch, rows, tiling) / MULTIPROCESSORS, 1) * one


def _tiles(batch: int, rows: int, tiling: Tiling) -> int:
    across = math.ceil(rows / tiling.edge)
    return batch * across * (across + 1) // 2


def _library(batch: int, rows: int, depth: int, columns: int) -> float:
    bytes_moved = 2 * batch * (rows * depth + depth * columns + rows * columns)
    return max(batch * rows * depth * columns / LIBRARY_RATE, bytes_moved / BANDWIDTH) + LIBRARY_TAIL


def _host(tiling: Tiling) -> float:
    return HOST_COPY_ENGINE if tiling.tma else HOST_POINTERS
