"""Which rank orthogonalises which matrix: planned once, from shapes alone, and equal on all ranks.

Newton-Schulz needs a matrix whole, so every logical matrix (matrices.py) gets one rank as its owner. The cost of one of
n x m, n <= m, is 2 n^2 m (X X^T), 2 n^3 (its square) and 2 n^2 m (times X) a step. Matrices are dealt out longest
first, each to the candidate with the least work so far, which keeps the fullest rank close to the mean.

Who may own a matrix, by who holds what of it:

    home         every holder has it whole and there is one     that rank: an expert under expert parallelism, a head
                                                                block under tensor parallelism. Nothing travels
    replicated   every rank of the group has it whole           any rank. Its update travels (DDP; ZeRO-1: the momentum
                                                                lives on the owner alone)
    exchanged    all else: rows spread over ranks (FSDP2),      a rank that holds at least its share, elements / ranks:
                 or whole on some ranks                         so no more than (w - 1) / w of a matrix travels

A bucket is what travels together. Every owner's matrices, sorted by shape so that equal ones form one stack, are cut at
equal fractions of the owner's work: all ranks then need about the same time for a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from perilune.optim.matrices import Layout
from perilune.optim.shards import Box, matrix_boxes, num_elements, shape_of, whole_box

Kind = Literal["home", "replicated", "exchanged"]
NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class PlacedParameter:
    """A parameter of Muon's, and the box that each rank of the group holds of it."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    boxes: tuple[Box, ...]

    @cached_property
    def is_replicated(self) -> bool:
        return len(self.boxes) > 1 and all(box == whole_box(self.shape) for box in self.boxes)

    @cached_property
    def replica_of_rank(self) -> tuple[tuple[int, int], ...]:
        """For every rank, which of the ranks with the same box it is, and how many they are."""
        count: dict[Box, int] = {}
        index = []
        for box in self.boxes:
            index.append(count.get(box, 0))
            count[box] = index[-1] + 1
        return tuple((number, count[box]) for number, box in zip(index, self.boxes, strict=True))


@dataclass(frozen=True, kw_only=True)
class OwnedMatrix:
    """Block number `block` of parameter number `parameter`: where it lies there, who owns it, who takes part."""

    parameter: int
    block: int
    box: Box
    owner: int
    kind: Kind
    travels_in: bool
    """Whether the owner lacks a part of it."""

    @property
    def rows(self) -> int:
        return shape_of(self.box)[-2]

    @property
    def columns(self) -> int:
        return shape_of(self.box)[-1]

    @property
    def num_elements(self) -> int:
        return num_elements(self.box)

    @property
    def cost(self) -> float:
        return newton_schulz_flops(self.rows, self.columns)


@dataclass(frozen=True, kw_only=True)
class Ownership:
    """The plan. Ranks count inside the group."""

    world: int
    parameters: tuple[PlacedParameter, ...]
    matrices: tuple[OwnedMatrix, ...]

    def loads(self) -> list[float]:
        """Floating-point operations of Newton-Schulz on every rank."""
        return self._sums([matrix.cost for matrix in self.matrices])

    def owned_elements(self) -> list[float]:
        """Elements that every rank owns: its momentum, where parameters are replicated."""
        return self._sums([float(matrix.num_elements) for matrix in self.matrices])

    def held_elements(self) -> list[float]:
        """Elements that every rank holds: its momentum, where parameters are sharded."""
        return [
            float(sum(num_elements(parameter.boxes[rank]) for parameter in self.parameters))
            for rank in range(self.world)
        ]

    def _sums(self, values: Sequence[float]) -> list[float]:
        sums = [0.0] * self.world
        for matrix, value in zip(self.matrices, values, strict=True):
            sums[matrix.owner] += value
        return sums


def newton_schulz_flops(rows: int, columns: int, steps: int = NEWTON_SCHULZ_STEPS) -> float:
    short, long = min(rows, columns), max(rows, columns)
    return float(steps * (4 * short * short * long + 2 * short**3))


def max_over_mean(values: Sequence[float]) -> float:
    """1 where all are equal; 1 also where there is nothing."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def plan_ownership(parameters: Sequence[PlacedParameter], *, per_head: bool) -> Ownership:
    """Owners of all matrices. Depends on nothing but its arguments, so ranks that agree on them agree on the plan."""
    if not parameters:
        return Ownership(world=1, parameters=(), matrices=())
    world = len(parameters[0].boxes)
    places: list[tuple[int, int, Box]] = []
    kinds: list[Kind] = []
    candidates: list[np.ndarray | None] = []
    held: list[np.ndarray] = []
    for number, parameter in enumerate(parameters):
        _check_tiling(parameter)
        boxes = matrix_boxes(parameter.shape, parameter.layout, per_head=per_head)
        boxes_on_ranks = held_of(boxes, parameter.boxes)
        for block, (box, shares) in enumerate(zip(boxes, boxes_on_ranks, strict=True)):
            if num_elements(box) == 0:
                continue
            kind, allowed = _candidates(parameter, num_elements(box), shares)
            places.append((number, block, box))
            kinds.append(kind)
            candidates.append(allowed)
            held.append(shares)
    costs = [newton_schulz_flops(*shape_of(box)[-2:]) for _, _, box in places]
    owners = assign_owners(costs, candidates, world)
    matrices = tuple(
        OwnedMatrix(
            parameter=number,
            block=block,
            box=box,
            owner=owner,
            kind=kind,
            travels_in=bool(shares[owner] < num_elements(box)),
        )
        for (number, block, box), owner, kind, shares in zip(places, owners, kinds, held, strict=True)
    )
    return Ownership(world=world, parameters=tuple(parameters), matrices=matrices)


def held_of(matrices: Sequence[Box], ranks: Sequence[Box]) -> np.ndarray:
    """[matrices, ranks]: how many elements of a matrix a rank holds."""
    wanted, given = np.array(matrices, dtype=np.int64), np.array(ranks, dtype=np.int64)
    start = np.maximum(wanted[:, None, :, 0], given[None, :, :, 0])
    stop = np.minimum(wanted[:, None, :, 1], given[None, :, :, 1])
    return np.clip(stop - start, 0, None).prod(axis=-1)


def _candidates(parameter: PlacedParameter, size: int, shares: np.ndarray) -> tuple[Kind, np.ndarray | None]:
    if parameter.is_replicated:
        return "replicated", None
    holders = np.flatnonzero(shares)
    if len(holders) and bool((shares[holders] == size).all()):
        return ("home" if len(holders) == 1 else "exchanged"), holders
    return "exchanged", np.flatnonzero(shares * len(shares) >= size)


def assign_owners(costs: Sequence[float], candidates: Sequence[np.ndarray | None], world: int) -> list[int]:
    """Longest first, to the candidate (None: anyone) with the least so far; ties to the lower rank. Matrices with one
    candidate come before all others: the rest is dealt out around them."""
    loads = np.zeros(world)
    owners = [0] * len(costs)

    def is_free(index: int) -> bool:
        allowed = candidates[index]
        return allowed is None or len(allowed) > 1

    for index in sorted(range(len(costs)), key=lambda index: (is_free(index), -costs[index], index)):
        allowed = candidates[index]
        owner = int(loads.argmin()) if allowed is None else int(allowed[loads[allowed].argmin()])
        owners[index] = owner
        loads[owner] += costs[index]
    return owners


def plan_buckets(ownership: Ownership, chosen: Sequence[int], *, max_elements: int) -> list[tuple[int, ...]]:
    """Cut the matrices with these numbers into buckets; no owner has more than `max_elements` in one, except by a
    single larger matrix. The same on every rank."""
    by_owner: list[list[int]] = [[] for _ in range(ownership.world)]
    for index in chosen:
        by_owner[ownership.matrices[index].owner].append(index)
    for members in by_owner:
        members.sort(
            key=lambda index: (-ownership.matrices[index].cost, _stack_shape(ownership.matrices[index]), index)
        )
    largest = max((sum(ownership.matrices[index].num_elements for index in members) for members in by_owner), default=0)
    count = max(1, math.ceil(largest / max_elements))
    while True:
        cuts = [_cut_by_cost(ownership, members, count) for members in by_owner]
        if all(_fits(ownership, part, max_elements) for parts in cuts for part in parts):
            break
        count += max(1, count // 4)
    buckets = [tuple(index for parts in cuts for index in parts[number]) for number in range(count)]
    return [bucket for bucket in buckets if bucket]


def _stack_shape(matrix: OwnedMatrix) -> tuple[int, int]:
    return min(matrix.rows, matrix.columns), max(matrix.rows, matrix.columns)


def _cut_by_cost(ownership: Ownership, members: Sequence[int], count: int) -> list[list[int]]:
    total = sum(ownership.matrices[index].cost for index in members)
    parts: list[list[int]] = [[] for _ in range(count)]
    before = 0.0
    for index in members:
        # Where its work begins decides; rounding must not reach past the last bucket.
        parts[min(count - 1, int(count * before / total))].append(index)
        before += ownership.matrices[index].cost
    return parts


def _fits(ownership: Ownership, part: Sequence[int], max_elements: int) -> bool:
    return len(part) <= 1 or sum(ownership.matrices[index].num_elements for index in part) <= max_elements


def _check_tiling(parameter: PlacedParameter) -> None:
    """Every element is on some rank, and two boxes are equal or share nothing."""
    boxes = sorted({box for box in parameter.boxes if num_elements(box)})
    total = num_elements(whole_box(parameter.shape))
    if total == 0:
        return
    if sum(map(num_elements, boxes)) == total and np.count_nonzero(held_of(boxes, boxes)) == len(boxes):
        return
    raise ValueError(
        f"the ranks hold {boxes[:4]!r}... of {parameter.name!r} with shape {parameter.shape!r}, which neither tile "
        "it nor repeat each other; expected plain tensors, or Replicate and Shard placements that cut contiguous parts"
    )
