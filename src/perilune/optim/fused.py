"""Muon's two passes over memory on a GPU, each one kernel for all matrices of a stack.

    direction:  M <- M + (1 - mu) (G - M),  D = M + (1 - mu) (G - M) (Nesterov) or M,  stack <- D, turned on its side
    update:     W <- W (1 - lr weight_decay) - lr factor O

Between them Newton-Schulz turns the stack of D into the stack of O (kernels/newton_schulz). Gradient and parameter are
read once, momentum and parameter are written once, and the stack is 16-bit: 24 bytes a float32 parameter in all.

Where the matrices lie is a table of addresses on the device, written only when one of them moved. The numbers that a
schedule may change (lr, weight decay, 1 - momentum) are read from device memory by the kernels, so that a step
recorded in a CUDA graph honours them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import Launch, device_of, is_aligned
from perilune.kernels.newton_schulz import triton as stacked
from perilune.kernels.newton_schulz.triton import scale_tile, tile_and_matrix
from perilune.optim.matrices import Layout, blocks
from perilune.optim.stacks import FUSED_STACK_ELEMENTS, Stack, plan_stacks

# Columns of the table of a stack's members; the gradient has a table of its own, because it may move every step.
SLOT, MOMENTUM, MOMENTUM_STRIDE, PARAMETER, PARAMETER_STRIDE, TABLE_WIDTH = 0, 1, 2, 3, 4, 5
ARGUMENTS = 16
BIAS = 2**62


@triton.jit
def _offset(table_ptr, ALIGNED: tl.constexpr):
    offset = tl.load(table_ptr)
    if ALIGNED:
        offset = tl.multiple_of(offset, 16)
    return offset


@triton.jit
def _row_stride(table_ptr, ALIGNED: tl.constexpr):
    stride = tl.load(table_ptr).to(tl.int32)
    if ALIGNED:
        stride = tl.multiple_of(stride, 16)
    return stride


@triton.jit
def _native_tile(tile, rows, columns, TURNED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Row, column and validity of this tile's entries in the parameter, which has the stack's rows as its columns when
    it is turned."""
    across = tl.cdiv(columns, TILE_COLUMNS)
    first_row, first_column = tile // across * TILE_ROWS, tile % across * TILE_COLUMNS
    if TURNED:
        row = (first_column + tl.arange(0, TILE_COLUMNS))[:, None]
        column = (first_row + tl.arange(0, TILE_ROWS))[None, :]
        inside = (row < columns) & (column < rows)
    else:
        row = (first_row + tl.arange(0, TILE_ROWS))[:, None]
        column = (first_column + tl.arange(0, TILE_COLUMNS))[None, :]
        inside = (row < rows) & (column < columns)
    return row, column, inside


@triton.jit
def _stack_tile(tile, rows, columns, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    across = tl.cdiv(columns, TILE_COLUMNS)
    row = (tile // across * TILE_ROWS + tl.arange(0, TILE_ROWS))[:, None]
    column = (tile % across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    return row * columns + column, (row < rows) & (column < columns)


@triton.jit
def _direction_kernel(
    gradient_ptr, momentum_ptr, table_ptr, gradient_table_ptr, settings_ptr, stack_ptr, exponent_ptr, square_ptr,
    rows, columns,
    NESTEROV: tl.constexpr, TURNED: tl.constexpr, ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    tile, member = tile_and_matrix(rows, columns, TILE_ROWS, TILE_COLUMNS)
    table_ptr += member * 5
    slot = tl.load(table_ptr)
    momentum_ptr += _offset(table_ptr + 1, ALIGNED)
    gradient_ptr += _offset(gradient_table_ptr + member * 2, ALIGNED)
    momentum_stride = _row_stride(table_ptr + 2, ALIGNED)
    gradient_stride = _row_stride(gradient_table_ptr + member * 2 + 1, ALIGNED)
    weight = tl.load(settings_ptr + 2)
    row, column, inside = _native_tile(tile, rows, columns, TURNED, TILE_ROWS, TILE_COLUMNS)
    gradient = tl.load(gradient_ptr + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    momentum = tl.load(momentum_ptr + row * momentum_stride + column, mask=inside, other=0.0)
    momentum += weight * (gradient - momentum)
    tl.store(momentum_ptr + row * momentum_stride + column, momentum, mask=inside)
    direction = momentum
    if NESTEROV:
        direction += weight * (gradient - momentum)
    scaled, exponent, square = scale_tile(direction)
    scaled = scaled.to(stack_ptr.dtype.element_ty)
    if TURNED:
        scaled = tl.trans(scaled)
    offset, inside = _stack_tile(tile, rows, columns, TILE_ROWS, TILE_COLUMNS)
    tl.store(stack_ptr + slot * rows * columns + offset, scaled, mask=inside)
    number = slot * tl.cdiv(rows, TILE_ROWS) * tl.cdiv(columns, TILE_COLUMNS) + tile
    tl.store(exponent_ptr + number, exponent)
    tl.store(square_ptr + number, square)


@triton.jit
def _update_kernel(
    parameter_ptr, table_ptr, settings_ptr, stack_ptr, rows, columns, factor,
    TURNED: tl.constexpr, ALIGNED: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    tile, member = tile_and_matrix(rows, columns, TILE_ROWS, TILE_COLUMNS)
    table_ptr += member * 5
    slot = tl.load(table_ptr)
    parameter_ptr += _offset(table_ptr + 3, ALIGNED)
    parameter_stride = _row_stride(table_ptr + 4, ALIGNED)
    lr = tl.load(settings_ptr)
    decay = 1.0 - lr * tl.load(settings_ptr + 1)
    offset, inside = _stack_tile(tile, rows, columns, TILE_ROWS, TILE_COLUMNS)
    update = tl.load(stack_ptr + slot * rows * columns + offset, mask=inside, other=0.0)
    if TURNED:
        update = tl.trans(update)
    row, column, inside = _native_tile(tile, rows, columns, TURNED, TILE_ROWS, TILE_COLUMNS)
    place = parameter_ptr + row * parameter_stride + column
    # Half-precision parameters are updated in float32 and rounded once.
    parameter = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    parameter = parameter * decay - (lr * factor) * update.to(tl.float32)
    tl.store(place, parameter.to(parameter_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[f"v{number}" for number in range(16)])
def _write_kernel(out_ptr, bias, v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15):
    tl.store(out_ptr + 0, v0 - bias)
    tl.store(out_ptr + 1, v1 - bias)
    tl.store(out_ptr + 2, v2 - bias)
    tl.store(out_ptr + 3, v3 - bias)
    tl.store(out_ptr + 4, v4 - bias)
    tl.store(out_ptr + 5, v5 - bias)
    tl.store(out_ptr + 6, v6 - bias)
    tl.store(out_ptr + 7, v7 - bias)
    tl.store(out_ptr + 8, v8 - bias)
    tl.store(out_ptr + 9, v9 - bias)
    tl.store(out_ptr + 10, v10 - bias)
    tl.store(out_ptr + 11, v11 - bias)
    tl.store(out_ptr + 12, v12 - bias)
    tl.store(out_ptr + 13, v13 - bias)
    tl.store(out_ptr + 14, v14 - bias)
    tl.store(out_ptr + 15, v15 - bias)


def device_table(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 values on the device, without waiting for it; inside a CUDA graph they become arguments of its kernels."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=torch.int64)
    if not torch.cuda.is_current_stream_capturing():
        return torch.tensor(values, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
    padded = [*values, *[0] * (-len(values) % ARGUMENTS)]
    table = torch.empty(len(padded), dtype=torch.int64, device=device)
    for start in range(0, len(padded), ARGUMENTS):
        # The bias makes every argument int64, so that one compiled kernel serves all.
        biased = [value + BIAS for value in padded[start : start + ARGUMENTS]]
        _write_kernel[(1,)](table[start:], BIAS, *biased, num_warps=1)
    return table


@dataclass(frozen=True, kw_only=True, eq=False)
class Place:
    """Where one matrix of a stack lies: views [out, in] of parameter and momentum, and of the gradient."""

    slot: int
    turned: bool
    parameter: Tensor
    momentum: Tensor
    gradient: Tensor


class Part:
    """Matrices of a stack that one launch serves: turned alike, one dtype of gradient and one of parameter.

    Tables hold distances in elements from the first of them. The first gradient is not kept: its memory would stay
    occupied between steps.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        first = places[0]
        self.turned = first.turned
        self.slots = [place.slot for place in places]
        self.parameter, self.momentum = first.parameter, first.momentum
        rows = [
            (
                place.slot,
                _distance(place.momentum, self.momentum),
                place.momentum.stride(0),
                _distance(place.parameter, self.parameter),
                place.parameter.stride(0),
            )
            for place in places
        ]
        self.momentum_aligned = all(row[MOMENTUM] % 16 == row[MOMENTUM_STRIDE] % 16 == 0 for row in rows)
        self.parameter_aligned = all(row[PARAMETER] % 16 == row[PARAMETER_STRIDE] % 16 == 0 for row in rows)
        self.table = device_table([value for row in rows for value in row], self.parameter.device)
        self._place_gradients([place.gradient for place in places])

    def _place_gradients(self, gradients: Sequence[Tensor]) -> None:
        rows = [(_distance(gradient, gradients[0]), gradient.stride(0)) for gradient in gradients]
        self.gradient_aligned = all(distance % 16 == stride % 16 == 0 for distance, stride in rows)
        self.gradient_table = device_table([value for row in rows for value in row], gradients[0].device)

    def with_gradients(self, gradients: Sequence[Tensor]) -> Part:
        """The same matrices with gradients that lie elsewhere; a graph may still use the old tables."""
        part = copy.copy(self)
        part._place_gradients(gradients)
        return part

    def direction(
        self, gradient: Tensor, settings: Tensor, stack_BNM: Tensor, exponents: Tensor, squares: Tensor, nesterov: bool
    ) -> None:
        _, rows, columns = stack_BNM.shape
        kind = (settings.device, gradient.dtype, stack_BNM.dtype, rows, columns, len(self.slots))
        kind += (nesterov, self.turned, self.momentum_aligned and self.gradient_aligned)
        launch = _direction_launch(*kind, is_aligned(gradient), is_aligned(self.momentum))
        launch(
            gradient, self.momentum, self.table, self.gradient_table, settings, stack_BNM, exponents, squares,
            rows, columns,
        )  # fmt: skip

    def update(self, settings: Tensor, stack_BNM: Tensor, factor: float) -> None:
        _, rows, columns = stack_BNM.shape
        kind = (settings.device, self.parameter.dtype, stack_BNM.dtype, rows, columns, len(self.slots))
        kind += (self.turned, self.parameter_aligned)
        launch = _update_launch(*kind, is_aligned(self.parameter), is_aligned(stack_BNM))
        launch(self.parameter, self.table, settings, stack_BNM, rows, columns, factor)


@lru_cache(maxsize=1024)
def _direction_launch(
    device: torch.device, gradient_dtype: torch.dtype, dtype: torch.dtype, rows: int, columns: int, members: int,
    nesterov: bool, turned: bool, offsets_are_aligned: bool, gradient_is_aligned: bool, momentum_is_aligned: bool,
) -> Launch:  # fmt: skip
    constants = {"NESTEROV": nesterov, "TURNED": turned, "ALIGNED": offsets_are_aligned, **stacked.TILE_CONSTANTS}
    grid = (stacked.num_tiles(rows, columns) * members,)
    return Launch(_direction_kernel, grid, constants, num_warps=stacked.TILE_WARPS)


@lru_cache(maxsize=1024)
def _update_launch(
    device: torch.device, parameter_dtype: torch.dtype, dtype: torch.dtype, rows: int, columns: int, members: int,
    turned: bool, offsets_are_aligned: bool, parameter_is_aligned: bool, stack_is_aligned: bool,
) -> Launch:  # fmt: skip
    constants = {"TURNED": turned, "ALIGNED": offsets_are_aligned, **stacked.TILE_CONSTANTS}
    grid = (stacked.num_tiles(rows, columns) * members,)
    return Launch(_update_kernel, grid, constants, num_warps=stacked.TILE_WARPS)


class FusedStack:
    """One stack of matrices with its passes over memory. `gradients` are views of its members, in their order."""

    def __init__(self, stack: Stack, places: Sequence[Place]) -> None:
        self.stack = stack
        kinds: dict[tuple, list[Place]] = {}
        for place in places:
            kinds.setdefault((place.turned, place.gradient.dtype, place.parameter.dtype), []).append(place)
        self._parts = [Part(members) for members in kinds.values()]

    def with_gradients(self, gradients: Sequence[Tensor]) -> FusedStack:
        moved = copy.copy(self)
        moved._parts = [part.with_gradients([gradients[slot] for slot in part.slots]) for part in self._parts]
        return moved

    def direction(self, gradients: Sequence[Tensor], settings: Tensor, *, nesterov: bool, dtype: torch.dtype) -> Tensor:
        """Advance the momentum; a new stack [b, n, m] of directions, every matrix of Frobenius norm 1."""
        stack, device = self.stack, settings.device
        stack_BNM = torch.empty(len(stack.members), stack.rows, stack.columns, dtype=dtype, device=device)
        tiles = stacked.num_tiles(stack.rows, stack.columns)
        exponents = torch.empty(len(stack.members), tiles, dtype=torch.int32, device=device)
        squares = torch.empty(len(stack.members), tiles, dtype=torch.float32, device=device)
        with device_of(settings):
            for part in self._parts:
                part.direction(gradients[part.slots[0]], settings, stack_BNM, exponents, squares, nesterov)
        return stacked.normalize(stack_BNM, exponents, squares)

    def update(self, settings: Tensor, orthogonal_BNM: Tensor) -> None:
        """Decay the parameters and move them along the stack."""
        with device_of(settings):
            for part in self._parts:
                part.update(settings, orthogonal_BNM, self.stack.rms_factor)


class FusedMatrices:
    """The stacks of a list of parameters, with the addresses of everything they hold. Never changed once built."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        momenta: Sequence[Tensor],
        *,
        layouts: Sequence[Layout],
        per_head: bool,
    ) -> None:
        self._layouts, self._per_head = layouts, per_head
        self._fixed, self._moving = _fixed(parameters, gradients, momenta), _moving(gradients)
        self._plan = plan_stacks(parameters, layouts, per_head=per_head, max_elements=FUSED_STACK_ELEMENTS)
        cut = [self.members(tensors) for tensors in (parameters, momenta, gradients)]
        self.stacks = [
            FusedStack(
                stack,
                [
                    Place(slot=slot, turned=member.transposed, parameter=views[0], momentum=views[1], gradient=views[2])
                    for slot, (member, *views) in enumerate(zip(stack.members, *members, strict=True))
                ],
            )
            for stack, *members in zip(self._plan, *cut, strict=True)
        ]

    def members(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """For every stack the views [out, in] of its members in these tensors."""
        cut = [
            list(blocks(tensor.detach(), layout, per_head=self._per_head))
            for tensor, layout in zip(tensors, self._layouts, strict=True)
        ]
        return [[cut[member.tensor][member.block] for member in stack.members] for stack in self._plan]

    def fits(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> bool:
        """Whether these are the parameters and states it was built for, where they were then."""
        return self._fixed == _fixed(parameters, gradients, momenta)

    def holds(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these gradients lie where they were then."""
        return self._moving == _moving(gradients)

    def with_gradients(self, gradients: Sequence[Tensor]) -> FusedMatrices:
        """The same parameters and states with gradients that lie elsewhere."""
        moved = copy.copy(self)
        moved._moving = _moving(gradients)
        moved.stacks = [
            stack.with_gradients(members) for stack, members in zip(self.stacks, self.members(gradients), strict=True)
        ]
        return moved


def _fixed(parameters: Sequence[Tensor], gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> tuple:
    return tuple(
        (parameter.data_ptr(), momentum.data_ptr(), parameter.stride(), momentum.stride(), parameter.shape,
         parameter.dtype, gradient.dtype)
        for parameter, gradient, momentum in zip(parameters, gradients, momenta, strict=True)
    )  # fmt: skip


def _moving(gradients: Sequence[Tensor]) -> tuple:
    return tuple((gradient.data_ptr(), gradient.stride()) for gradient in gradients)


def why_not_fused(parameter: Tensor, gradient: Tensor, momentum: Tensor) -> str | None:
    """The reason why the kernels cannot serve a matrix that lies in these tensors, or None when they can."""
    if reason := stacked.why_not_on(parameter.device):
        return reason
    for tensor in (parameter, gradient, momentum):
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return f"{type(tensor).__name__} is no plain tensor"
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            return "rows are not contiguous"
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{tensor.dtype} is not float32, bfloat16 or float16"
        if tensor.shape[-2] * tensor.stride(-2) >= 2**31:
            return "offsets inside a matrix pass 2^31"
    return None if momentum.dtype == torch.float32 else f"momentum is {momentum.dtype}"


def _distance(tensor: Tensor, base: Tensor) -> int:
    return (tensor.data_ptr() - base.data_ptr()) // tensor.element_size()
