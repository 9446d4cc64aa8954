"""Which logical matrices a parameter holds.

Muon orthogonalises matrices, but a parameter is storage: a fused gate-and-up weight holds two matrices, a stack of
experts holds one per expert, a query projection holds one per head when heads are orthogonalised apart. A layout says
how to cut. Everything after this file sees only two-dimensional blocks.

A module says what the default rule (plan.py) would get wrong by implementing `DeclaresMatrices`. Names are local to the
module:

    def logical_matrices(self):
        return {"q_proj.weight": RowBlocks((64,) * 8), "experts": Stacked(), "A_log": Adam()}

Shapes: a matrix is [out, in] as in `nn.Linear`. The RMS-matching factor 0.2 sqrt(max(out, in)) (arXiv 2502.16982) takes
the shape of the block that is orthogonalised, not of the parameter it was cut from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor


@dataclass(frozen=True)
class Whole:
    """The parameter is one matrix [out, in]."""


@dataclass(frozen=True)
class RowBlocks:
    """Rows are split into blocks of these sizes, for example one per head of a q, k or v projection.

    Used per block when the optimizer runs with `per_head=True`, else as one whole matrix. `fused=True` is for matrices
    that only share storage (a fused QKV projection): they are split whatever `per_head` says.
    """

    sizes: tuple[int, ...]
    fused: bool = False


@dataclass(frozen=True)
class ColumnBlocks:
    """Columns are split into blocks of these sizes (heads of an output projection) when `per_head=True`, else whole."""

    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Stacked:
    """[experts, out, in]: one matrix per expert. `row_sizes` also splits the rows of each (fused gate and up)."""

    row_sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Adam:
    """Not a matrix for Muon: AdamW, with decoupled weight decay only when `weight_decay` is True."""

    weight_decay: bool = False


Layout = Whole | RowBlocks | ColumnBlocks | Stacked | Adam
LAYOUTS = (Whole, RowBlocks, ColumnBlocks, Stacked, Adam)


@runtime_checkable
class DeclaresMatrices(Protocol):
    """A module that names the layout of its own parameters; names are local to it, dots reach into submodules."""

    def logical_matrices(self) -> Mapping[str, Layout]: ...


def check_layout(name: str, parameter: Tensor, layout: object) -> None:
    """Raise when `layout` cannot describe `parameter`."""
    shape = tuple(parameter.shape)
    if not isinstance(layout, LAYOUTS):
        expected = ", ".join(kind.__name__ for kind in LAYOUTS)
        raise TypeError(f"layout of {name!r} is {layout!r}; expected one of {expected} from perilune.optim")
    if isinstance(layout, Adam):
        return
    wanted_dims = 3 if isinstance(layout, Stacked) else 2
    if len(shape) != wanted_dims:
        raise ValueError(
            f"layout of {name!r} is {layout!r}, which needs {wanted_dims} dimensions, but its shape is {shape}"
        )
    if isinstance(layout, Whole) or (isinstance(layout, Stacked) and not layout.row_sizes):
        return
    sizes = layout.row_sizes if isinstance(layout, Stacked) else layout.sizes
    length = shape[-1] if isinstance(layout, ColumnBlocks) else shape[-2]
    if not sizes or min(sizes) < 1 or sum(sizes) != length:
        side = "columns" if isinstance(layout, ColumnBlocks) else "rows"
        raise ValueError(
            f"layout of {name!r} has block sizes {sizes!r} with sum {sum(sizes)}; "
            f"they must be positive and add up to its {length} {side}"
        )


def blocks(tensor: Tensor, layout: Layout, *, per_head: bool) -> Iterator[Tensor]:
    """Views of the logical matrices inside `tensor`, in a fixed order; each is [out, in] and shares its storage."""
    if isinstance(layout, Stacked):
        for matrix in tensor.unbind(0):
            yield from matrix.split(layout.row_sizes, 0) if layout.row_sizes else (matrix,)
    elif isinstance(layout, RowBlocks) and (per_head or layout.fused):
        yield from tensor.split(layout.sizes, 0)
    elif isinstance(layout, ColumnBlocks) and per_head:
        yield from tensor.split(layout.sizes, 1)
    elif isinstance(layout, Adam):
        raise ValueError(f"layout {layout!r} has no matrices for Muon")
    else:
        yield tensor
