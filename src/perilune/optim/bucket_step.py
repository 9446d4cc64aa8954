"""The Muon step of one bucket, in three phases between which its collectives fly.

    gather                 M <- mu M + (1 - mu) G on what the rank holds; the directions D start their way to the owners
    orthogonalize          owners assemble their matrices into stacks of equal shape; O starts its way back
    apply                  W <- W (1 - lr weight_decay) - lr 0.2 sqrt(max(out, in)) O on what the rank holds

`run_buckets` interleaves them: while one bucket is orthogonalised, the next one's directions and the previous one's
updates are under way. Every rank calls the collectives in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.optim.exchange import Bucket, Flight, Part, Route, copy_all, start_all_gather, start_all_to_all
from perilune.optim.ownership import OwnedMatrix, Ownership
from perilune.optim.shards import as_matrix, cut
from perilune.optim.stacks import STACK_ELEMENTS


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalParameter:
    """What this rank has of a parameter: its part of weight and gradient, and where its momentum lies."""

    weight: Tensor
    gradient: Tensor | None
    """None: other ranks have a gradient and this one has not; it counts as zero."""
    momentum_of: Callable[[Part], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketSettings:
    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    orthogonalize: Callable[[Tensor], Tensor]
    payload_dtype: torch.dtype
    group: dist.ProcessGroup | None
    rank: int


class BucketStep:
    def __init__(
        self,
        bucket: Bucket,
        ownership: Ownership,
        parameters: Mapping[int, LocalParameter],
        settings: BucketSettings,
    ) -> None:
        self.bucket, self.ownership, self.parameters, self.settings = bucket, ownership, parameters, settings
        self.device = next(iter(parameters.values())).weight.device
        self._incoming: Flight | None = None
        self._directions: list[tuple[Part, Tensor]] = []
        self._returning: Flight | None = None
        self._updates: list[tuple[Part, Tensor]] = []

    def gather(self) -> None:
        parts = [part for part in self.bucket.held if self._advances(part)]
        momenta = [as_matrix(self._parameter(part).momentum_of(part)) for part in parts]
        gradients = [self._gradient(part, momentum) for part, momentum in zip(parts, momenta, strict=True)]
        directions = momenta
        if parts:
            torch._foreach_lerp_(momenta, gradients, 1 - self.settings.momentum)
            if self.settings.nesterov:
                directions = list(torch._foreach_lerp(gradients, momenta, self.settings.momentum))
        held = list(zip(parts, directions, strict=True))
        if self.bucket.gather is None:
            self._directions = held
        else:
            self._incoming = self._start(self.bucket.gather, dict(held))

    def orthogonalize(self) -> None:
        pieces: dict[int, list[tuple[Part, Tensor]]] = {}
        for part, tensor in self._directions if self._incoming is None else self._incoming.wait():
            pieces.setdefault(part.matrix, []).append((part, tensor))
        updates: dict[int, Tensor] = {}
        for members in self._stacks():
            updates.update(self._orthogonalize_stack(members, pieces))
        self._incoming, self._directions = None, []
        bucket, settings = self.bucket, self.settings
        if bucket.kind == "replicated":
            self._returning = start_all_gather(
                bucket,
                [updates[part.matrix] for part in bucket.by_owner[settings.rank]],
                dtype=settings.payload_dtype,
                device=self.device,
                group=settings.group,
            )
        elif bucket.scatter is not None:
            sends = [part for parts in bucket.scatter.sends for part in parts]
            self._returning = self._start(
                bucket.scatter, {part: self._piece(updates[part.matrix], part) for part in sends}
            )
        else:
            self._updates = [(part, updates[part.matrix]) for part in bucket.held]

    def apply(self) -> None:
        updates = self._updates if self._returning is None else self._returning.wait()
        by_factor: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
        rounded: list[tuple[Tensor, Tensor]] = []
        for part, update in updates:
            matrix = self._matrix(part)
            weight = as_matrix(cut(self._parameter(part).weight, part.box, self._origin(part)))
            # Half-precision weights are updated in float32 and rounded once.
            master = weight.to(_wide(weight.dtype))
            if master.dtype != weight.dtype:
                rounded.append((weight, master))
            masters, changes = by_factor.setdefault(0.2 * math.sqrt(max(matrix.rows, matrix.columns)), ([], []))
            masters.append(master)
            changes.append(update.to(master.dtype))
        settings = self.settings
        for factor, (masters, changes) in by_factor.items():
            if settings.weight_decay:
                torch._foreach_mul_(masters, 1 - settings.lr * settings.weight_decay)
            torch._foreach_add_(masters, changes, alpha=-settings.lr * factor)
        copy_all([weight for weight, _ in rounded], [master for _, master in rounded])
        self._returning, self._updates = None, []

    def _start(self, route: Route, tensors: Mapping[Part, Tensor]) -> Flight:
        ordered = [tensors[part] for parts in route.sends for part in parts]
        settings = self.settings
        return start_all_to_all(route, ordered, dtype=settings.payload_dtype, device=self.device, group=settings.group)

    def _stacks(self) -> list[list[int]]:
        """Owned matrices of equal shape, turned on their side where tall, in stacks of bounded size."""
        alike: dict[tuple[int, int], list[int]] = {}
        for index in self.bucket.owned:
            matrix = self.ownership.matrices[index]
            shape = min(matrix.rows, matrix.columns), max(matrix.rows, matrix.columns)
            alike.setdefault(shape, []).append(index)
        stacks = []
        for (rows, columns), members in alike.items():
            length = max(1, STACK_ELEMENTS // (rows * columns))
            stacks += [members[start : start + length] for start in range(0, len(members), length)]
        return stacks

    def _orthogonalize_stack(
        self, members: Sequence[int], pieces: Mapping[int, Sequence[tuple[Part, Tensor]]]
    ) -> dict[int, Tensor]:
        first = self.ownership.matrices[members[0]]
        short, long = sorted((first.rows, first.columns))
        dtype = _wide(self.parameters[first.parameter].weight.dtype)
        stack = torch.empty(len(members), short, long, dtype=dtype, device=self.device)
        whole = dict(zip(members, self._upright(members, stack), strict=True))
        wanted = [piece for index in members for piece in pieces[index]]
        copy_all([self._piece(whole[part.matrix], part) for part, _ in wanted], [tensor for _, tensor in wanted])
        return dict(zip(members, self._upright(members, self.settings.orthogonalize(stack)), strict=True))

    def _upright(self, members: Sequence[int], stack: Tensor) -> list[Tensor]:
        """Views [out, in] of a stack."""
        matrices = [self.ownership.matrices[index] for index in members]
        return [
            view.mT if matrix.rows > matrix.columns else view
            for matrix, view in zip(matrices, stack.unbind(0), strict=True)
        ]

    def _advances(self, part: Part) -> bool:
        """Whether this rank keeps the momentum of a part it holds."""
        return self.bucket.kind != "replicated" or self._matrix(part).owner == self.settings.rank

    def _gradient(self, part: Part, momentum: Tensor) -> Tensor:
        gradient = self._parameter(part).gradient
        if gradient is None:
            return torch.zeros_like(momentum)
        return as_matrix(cut(gradient, part.box, self._origin(part))).to(momentum.dtype)

    def _piece(self, matrix: Tensor, part: Part) -> Tensor:
        """Where a part lies in its matrix [out, in]."""
        return cut(matrix, part.box[-2:], self._matrix(part).box[-2:])

    def _matrix(self, part: Part) -> OwnedMatrix:
        return self.ownership.matrices[part.matrix]

    def _parameter(self, part: Part) -> LocalParameter:
        return self.parameters[self._matrix(part).parameter]

    def _origin(self, part: Part) -> tuple[tuple[int, int], ...]:
        return self.ownership.parameters[self._matrix(part).parameter].boxes[self.settings.rank]


def run_buckets(home: Sequence[BucketStep], travelling: Sequence[BucketStep]) -> None:
    """All phases of all buckets; what stays at home is done while the first directions are under way."""
    if travelling:
        travelling[0].gather()
    for step in home:
        step.gather()
        step.orthogonalize()
        step.apply()
    for number, step in enumerate(travelling):
        if number + 1 < len(travelling):
            travelling[number + 1].gather()
        step.orthogonalize()
        if number:
            travelling[number - 1].apply()
    if travelling:
        travelling[-1].apply()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
