"""What a bucket of matrices sends where, and the packed collectives that carry it.

    rank 0   A0 B0 C0            A  .  .      orthogonalise A      A0 B0 C0
    rank 1   A1 B1 C1   gather   .  B  .      orthogonalise B      A1 B1 C1      (updates)
    rank 2   A2 B2 C2   ----->   .  .  C      orthogonalise C  --> A2 B2 C2
                      all-to-all                            all-to-all

All parts for one destination lie behind each other in one flat buffer, so a bucket costs one collective in each
direction, however many matrices it holds and however unevenly they are cut; a rank without rows sends nothing. Where
several ranks hold the same part (replicas of HSDP), the one in the owner's replica sends it and all of them receive the
update. Replicated matrices (DDP) skip the gather, and one all-gather returns what the owners made.

Sender and receiver derive the order of the parts from the same plan: by matrix, in the order of the bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.optim.ownership import Kind, OwnedMatrix, Ownership
from perilune.optim.shards import Box, intersection, shape_of


@dataclass(frozen=True, kw_only=True)
class Part:
    """The piece `box` of matrix number `matrix`, in coordinates of its parameter."""

    matrix: int
    box: Box

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = shape_of(self.box)[-2:]
        return rows, columns

    @property
    def num_elements(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, kw_only=True)
class Route:
    """What this rank sends to each rank, and receives from each."""

    sends: tuple[tuple[Part, ...], ...]
    receives: tuple[tuple[Part, ...], ...]

    @property
    def send_sizes(self) -> list[int]:
        return [sum(part.num_elements for part in parts) for parts in self.sends]

    @property
    def receive_sizes(self) -> list[int]:
        return [sum(part.num_elements for part in parts) for parts in self.receives]


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One rank's view of matrices that travel together."""

    kind: Kind
    held: tuple[Part, ...]
    """All that this rank holds of them."""
    owned: tuple[int, ...]
    gather: Route | None = None
    """None: every owner has its matrices whole."""
    scatter: Route | None = None
    """None: nothing returns (home), or all of it returns to everyone (replicated)."""
    by_owner: tuple[tuple[Part, ...], ...] = ()
    """Of replicated matrices, what each rank owns."""


def route_bucket(ownership: Ownership, matrices: Sequence[int], rank: int) -> Bucket:
    """The bucket of these matrices, all of one kind, as `rank` sees it."""
    kind = ownership.matrices[matrices[0]].kind
    held = [part for index in matrices if (part := _part_on(ownership, index, rank)) is not None]
    owned = tuple(index for index in matrices if ownership.matrices[index].owner == rank)
    if kind == "home":
        return Bucket(kind=kind, held=tuple(held), owned=owned)
    if kind == "replicated":
        by_owner: list[list[Part]] = [[] for _ in range(ownership.world)]
        for part in held:
            by_owner[ownership.matrices[part.matrix].owner].append(part)
        return Bucket(kind=kind, held=tuple(held), owned=owned, by_owner=tuple(map(tuple, by_owner)))
    ranks = range(ownership.world)
    to_owner: list[list[Part]] = [[] for _ in ranks]
    from_holder: list[list[Part]] = [[] for _ in ranks]
    to_holder: list[list[Part]] = [[] for _ in ranks]
    from_owner: list[list[Part]] = [[] for _ in ranks]
    for part in held:
        matrix = ownership.matrices[part.matrix]
        from_owner[matrix.owner].append(part)
        if _is_source(ownership, matrix, rank):
            to_owner[matrix.owner].append(part)
    for index in owned:
        for holder in ranks:
            part = _part_on(ownership, index, holder)
            if part is None:
                continue
            to_holder[holder].append(part)
            if _is_source(ownership, ownership.matrices[index], holder):
                from_holder[holder].append(part)
    travels = any(ownership.matrices[index].travels_in for index in matrices)
    gather = Route(sends=tuple(map(tuple, to_owner)), receives=tuple(map(tuple, from_holder)))
    scatter = Route(sends=tuple(map(tuple, to_holder)), receives=tuple(map(tuple, from_owner)))
    return Bucket(kind=kind, held=tuple(held), owned=owned, gather=gather if travels else None, scatter=scatter)


def _part_on(ownership: Ownership, index: int, rank: int) -> Part | None:
    matrix = ownership.matrices[index]
    box = intersection(matrix.box, ownership.parameters[matrix.parameter].boxes[rank])
    return None if box is None else Part(matrix=index, box=box)


def _is_source(ownership: Ownership, matrix: OwnedMatrix, rank: int) -> bool:
    """Whether it is this rank, of all with the same box, that sends its part to the owner."""
    parameter, owner = ownership.parameters[matrix.parameter], matrix.owner
    if parameter.boxes[rank] == parameter.boxes[owner]:
        return rank == owner
    number, copies = parameter.replica_of_rank[rank]
    return number == min(parameter.replica_of_rank[owner][0], copies - 1)


# ---------------------------------------------------------------------------------------------------------------------
# Packing


def pack(tensors: Sequence[Tensor], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """All elements behind each other in one new vector."""
    buffer = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=device)
    copy_all(unpack(buffer, [tuple(tensor.shape) for tensor in tensors]), tensors)
    return buffer


def unpack(buffer: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Views of these shapes, from the beginning of the buffer."""
    views, start = [], 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        views.append(buffer[start : start + size].view(shape))
        start += size
    return views


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


# ---------------------------------------------------------------------------------------------------------------------
# Collectives. Started here, finished by `wait`: computation goes on between the two.


@dataclass(frozen=True, kw_only=True, eq=False)
class Flight:
    """A collective under way, with its buffers."""

    parts: tuple[Part, ...]
    received: tuple[Tensor, ...]
    work: dist.Work | None
    sent: Tensor

    def wait(self) -> list[tuple[Part, Tensor]]:
        if self.work is not None:
            self.work.wait()
        return list(zip(self.parts, self.received, strict=True))


def start_all_to_all(
    route: Route,
    tensors: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Flight:
    """Send `tensors`, one for each part of route.sends in their order."""
    sent = pack(tensors, dtype=dtype, device=device)
    received = torch.empty(sum(route.receive_sizes), dtype=dtype, device=device)
    work = dist.all_to_all_single(received, sent, route.receive_sizes, route.send_sizes, group=group, async_op=True)
    parts = tuple(part for parts in route.receives for part in parts)
    views = unpack(received, [part.shape for part in parts])
    return Flight(parts=parts, received=tuple(views), work=work, sent=sent)


def start_all_gather(
    bucket: Bucket,
    tensors: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> Flight:
    """Give everyone `tensors`, one for each matrix this rank owns. Ranks with less than the fullest send padding."""
    length = longest_share(bucket)
    sent = torch.zeros(length, dtype=dtype, device=device)
    copy_all(unpack(sent, [tuple(tensor.shape) for tensor in tensors]), tensors)
    received = torch.empty(length * len(bucket.by_owner), dtype=dtype, device=device)
    work = _all_gather(received, sent, group=group, async_op=True)
    parts = tuple(part for parts in bucket.by_owner for part in parts)
    views = [
        view
        for parts, share in zip(bucket.by_owner, received.split(length), strict=True)
        for view in unpack(share, [part.shape for part in parts])
    ]
    return Flight(parts=parts, received=tuple(views), work=work, sent=sent)


def reduce_to_owners(
    bucket: Bucket,
    tensors: Sequence[Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
) -> list[tuple[Part, Tensor]]:
    """The sum over ranks of `tensors`, one for each part of bucket.by_owner; every owner gets its own."""
    length, world = longest_share(bucket), len(bucket.by_owner)
    sent = torch.zeros(length * world, dtype=dtype, device=device)
    views = [
        view
        for parts, share in zip(bucket.by_owner, sent.split(length), strict=True)
        for view in unpack(share, [part.shape for part in parts])
    ]
    copy_all(views, tensors)
    received = torch.empty(length, dtype=dtype, device=device)
    _reduce_scatter(received, sent, group=group)
    parts = bucket.by_owner[dist.get_rank(group)]
    return list(zip(parts, unpack(received, [part.shape for part in parts]), strict=True))


def _all_gather(*arguments: Any, **options: Any) -> Any:
    # torch 2.13 renames it and warns at every call of the old name.
    return (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(*arguments, **options)


def _reduce_scatter(*arguments: Any, **options: Any) -> Any:
    return (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(*arguments, **options)


def longest_share(bucket: Bucket) -> int:
    return max(sum(part.num_elements for part in parts) for parts in bucket.by_owner)
