"""How well an ownership plan spreads work and memory, and what it moves: rows, and a plain table.

    print(format_plans(describe_plans(k2_shapes(), world=256)))

Bytes are those a rank sends in one step. Sharded: its rows to owners and its owned updates back, two bytes an element
in bfloat16. Replicated: what a ring all-gather passes on, padding included. What FSDP2 or DDP move themselves is not in
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from perilune.optim.ownership import Ownership, PlacedParameter, held_of, max_over_mean, plan_buckets, plan_ownership
from perilune.optim.published_shapes import ParameterShape
from perilune.optim.shards import chunk_boxes, whole_box

Placement = Literal["replicated", "rows", "experts"]
STATE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    placement: Placement
    world: int
    num_matrices: int
    num_elements: int
    num_buckets: int
    load_balance: float
    """Fullest rank over mean, in floating-point operations."""
    mean_flops: float
    state_balance: float
    mean_state_bytes: float
    mean_sent_bytes: float
    max_sent_bytes: float


def place(shapes: Sequence[ParameterShape], world: int, placement: Placement) -> list[PlacedParameter]:
    """On a mesh of one dimension. "rows": every matrix by its rows, those of experts too; "experts": stacks by whole
    experts, all else by rows; "replicated": everything everywhere."""
    if placement not in get_args(Placement):
        raise ValueError(f"placement is {placement!r}; expected one of {get_args(Placement)}")
    placed = []
    for entry in shapes:
        if placement == "replicated":
            boxes = (whole_box(entry.shape),) * world
        else:
            boxes = chunk_boxes(entry.shape, world, len(entry.shape) - 2 if placement == "rows" else 0)
        placed.append(PlacedParameter(name=entry.name, shape=entry.shape, layout=entry.layout, boxes=boxes))
    return placed


def describe_plans(
    shapes: Sequence[ParameterShape],
    *,
    world: int,
    placements: Sequence[Placement] = get_args(Placement),
    payload_bytes: int = 2,
    bucket_bytes: int = 2**28,
) -> list[PlanRow]:
    rows = []
    for placement in placements:
        ownership = plan_ownership(place(shapes, world, placement), per_head=False)
        travelling = [index for index, matrix in enumerate(ownership.matrices) if matrix.kind != "home"]
        buckets = plan_buckets(ownership, travelling, max_elements=bucket_bytes // payload_bytes)
        replicated = placement == "replicated"
        state = ownership.owned_elements() if replicated else ownership.held_elements()
        sent = _gathered(ownership, buckets) if replicated else _exchanged(ownership)
        rows.append(
            PlanRow(
                placement=placement,
                world=world,
                num_matrices=len(ownership.matrices),
                num_elements=sum(matrix.num_elements for matrix in ownership.matrices),
                num_buckets=len(buckets),
                load_balance=max_over_mean(ownership.loads()),
                mean_flops=sum(ownership.loads()) / world,
                state_balance=max_over_mean(state),
                mean_state_bytes=STATE_BYTES * sum(state) / world,
                mean_sent_bytes=payload_bytes * float(sent.mean()),
                max_sent_bytes=payload_bytes * float(sent.max()),
            )
        )
    return rows


def _exchanged(ownership: Ownership) -> np.ndarray:
    """Elements that each rank sends in both directions, where every part has one holder."""
    sent = np.zeros(ownership.world)
    by_parameter: dict[int, list[int]] = {}
    for index, matrix in enumerate(ownership.matrices):
        by_parameter.setdefault(matrix.parameter, []).append(index)
    for number, members in by_parameter.items():
        matrices = [ownership.matrices[index] for index in members]
        held = held_of([matrix.box for matrix in matrices], ownership.parameters[number].boxes)
        owners = np.array([matrix.owner for matrix in matrices])
        held[np.arange(len(owners)), owners] = 0
        sent += held.sum(axis=0)
        np.add.at(sent, owners, held.sum(axis=1))
    return sent


def _gathered(ownership: Ownership, buckets: Sequence[Sequence[int]]) -> np.ndarray:
    total = 0
    for bucket in buckets:
        shares = [0] * ownership.world
        for index in bucket:
            shares[ownership.matrices[index].owner] += ownership.matrices[index].num_elements
        total += max(shares) * (ownership.world - 1)
    return np.full(ownership.world, float(total))


def format_plans(rows: Sequence[PlanRow]) -> str:
    lines = [
        ("placement", "ranks", "matrices", "elements", "buckets", "TFLOP/rank", "max/mean")
        + ("state/rank", "max/mean", "sent/rank", "most")
    ]
    for row in rows:
        lines.append(
            (row.placement, f"{row.world}", f"{row.num_matrices:,}", f"{row.num_elements / 1e9:.1f}e9")
            + (f"{row.num_buckets}", f"{row.mean_flops / 1e12:.2f}", f"{row.load_balance:.3f}")
            + (f"{row.mean_state_bytes / 1e9:.2f} GB", f"{row.state_balance:.3f}")
            + (f"{row.mean_sent_bytes / 1e9:.2f} GB", f"{row.max_sent_bytes / 1e9:.2f} GB")
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    aligned = [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([aligned[0], "-" * len(aligned[0]), *aligned[1:]])
