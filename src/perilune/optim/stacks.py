"""Logical matrices of equal shape, gathered into stacks so that one batched Newton-Schulz serves them all.

A tall matrix is turned on its side: the orthogonal factor of X^T is that of X transposed, and [out, in] joins [in, out]
in one stack. All members then share the RMS-matching factor 0.2 sqrt(max(out, in)) of arXiv 2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.optim.matrices import Layout, blocks

# 2^26 elements: 256 MB of float32. Bounds the memory of a step; below it, larger stacks were never slower.
STACK_ELEMENTS = 2**26
# The fused path of a GPU has 16-bit stacks, whose products fill the chip in waves: 1.5 GB with scratch space.
FUSED_STACK_ELEMENTS = 2**28


@dataclass(frozen=True, kw_only=True)
class Member:
    """Block number `block` of tensor number `tensor`, tall ones transposed."""

    tensor: int
    block: int
    transposed: bool


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Blocks of one shape [rows, columns], rows <= columns."""

    rows: int
    columns: int
    members: tuple[Member, ...]

    @property
    def rms_factor(self) -> float:
        return 0.2 * math.sqrt(self.columns)


def plan_stacks(
    tensors: Sequence[Tensor], layouts: Sequence[Layout], *, per_head: bool, max_elements: int | None = None
) -> list[Stack]:
    """Cut every tensor by its layout and put blocks of equal shape, device and dtype together, up to `max_elements`
    each (None: STACK_ELEMENTS)."""
    gathered: dict[tuple[int, int, torch.device, torch.dtype], list[Member]] = {}
    for number, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
        for block, matrix in enumerate(blocks(tensor, layout, per_head=per_head)):
            rows, columns = matrix.shape
            if rows * columns == 0:
                continue
            key = (min(rows, columns), max(rows, columns), tensor.device, tensor.dtype)
            gathered.setdefault(key, []).append(Member(tensor=number, block=block, transposed=rows > columns))
    stacks = []
    for (rows, columns, _, _), members in gathered.items():
        length = max(1, (max_elements or STACK_ELEMENTS) // (rows * columns))
        for start in range(0, len(members), length):
            stacks.append(Stack(rows=rows, columns=columns, members=tuple(members[start : start + length])))
    return stacks


def members_of(stack: Stack, cut: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Views [rows, columns] of the stack's members; `cut` holds the blocks of every tensor."""
    return [
        cut[member.tensor][member.block].mT if member.transposed else cut[member.tensor][member.block]
        for member in stack.members
    ]


def gather(matrices: Sequence[Tensor]) -> Tensor:
    """[b, rows, columns]; a copy, so whatever follows cannot write the gradients or the momentum."""
    return torch.stack(list(matrices))
