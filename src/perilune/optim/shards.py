"""Which part of a parameter a rank holds, as boxes: half-open index ranges, one per dimension.

    parameter [out, in] on 3 ranks, Shard(0), 7 rows        boxes ((0, 3), (0, in)), ((3, 6), ...), ((6, 7), ...)
    a rank beyond the last row                              an empty box, ((7, 7), (0, in))
    a plain tensor or a replicated DTensor                  the box of the whole parameter, on every rank

Everything that asks "is this matrix whole here", "which rows do I scale", "what do I send to whom" is an intersection
of two boxes: that of a rank and that of a logical matrix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from perilune.optim.matrices import Adam, ColumnBlocks, Layout, RowBlocks, Stacked

Box = tuple[tuple[int, int], ...]


def whole_box(shape: Sequence[int]) -> Box:
    return tuple((0, int(size)) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def num_elements(box: Box) -> int:
    return math.prod(shape_of(box))


def intersection(first: Box, second: Box) -> Box | None:
    """What both cover; None where they share no element."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))
    return both if all(start < stop for start, stop in both) else None


def cut(tensor: Tensor, box: Box, origin: Box) -> Tensor:
    """The view of `box` in a tensor that covers `origin`; both in coordinates of the parameter."""
    places = [slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, origin, strict=True)]
    return tensor[tuple(places)]


def as_matrix(view: Tensor) -> Tensor:
    """[1, out, in], a piece of one expert, as [out, in]."""
    return view[0] if view.ndim == 3 else view


def matrix_boxes(shape: Sequence[int], layout: Layout, *, per_head: bool) -> list[Box]:
    """Where the logical matrices of a parameter lie, in the order of `matrices.blocks`."""
    everything = whole_box(shape)
    if isinstance(layout, Adam):
        raise ValueError(f"layout {layout!r} has no matrices for Muon")
    if isinstance(layout, Stacked):
        rows = _ranges(layout.row_sizes or (shape[1],))
        return [((expert, expert + 1), each, everything[2]) for expert in range(shape[0]) for each in rows]
    if isinstance(layout, RowBlocks) and (per_head or layout.fused):
        return [(rows, everything[1]) for rows in _ranges(layout.sizes)]
    if isinstance(layout, ColumnBlocks) and per_head:
        return [(everything[0], columns) for columns in _ranges(layout.sizes)]
    return [everything]


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    stops = list(accumulate(sizes))
    return [(stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def chunk_boxes(shape: Sequence[int], world: int, dim: int = 0) -> tuple[Box, ...]:
    """The boxes of Shard(dim) on a mesh of `world` ranks, as torch.chunk cuts; the last ones may be empty."""
    length = -(-shape[dim] // world)
    boxes = []
    for rank in range(world):
        box = list(whole_box(shape))
        box[dim] = (min(rank * length, shape[dim]), min((rank + 1) * length, shape[dim]))
        boxes.append(tuple(box))
    return tuple(boxes)


def local_box(name: str, tensor: Tensor) -> Box:
    """What this rank holds of a parameter."""
    if not isinstance(tensor, DTensor):
        return whole_box(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise ValueError(
            f"{name!r} has placements {tensor.placements!r}: a sum that is still spread over ranks cannot be "
            "optimised; redistribute it to Replicate or Shard first"
        )
    if tensor.device_mesh.get_coordinate() is None:
        return tuple((0, 0) for _ in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((int(start), int(start) + int(size)) for size, start in zip(shape, offset, strict=True))


def local_part(tensor: Tensor) -> Tensor:
    """The tensor of this rank, sharing storage with `tensor`. No autograd."""
    # What to_local() gives without autograd; a step asks thousands of times.
    held = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return held.detach()
