"""Collective operations that autograd knows: each is a linear map between ranks, and its gradient is the transpose.

    forward                                         gradient
    replicate      x                                sum over ranks               x is the same on every rank
    total          sum of x over ranks              the gradient itself          it is the same on every rank
    gathered       x of all ranks, stacked          sum of the own slice's gradients over ranks
    exchanged      rows cut by rank, swapped        the same with rows going back

A group of None is a group of one: every function is then the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

# torch 2.13 has new names for these two.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def replicate(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """x where ranks go on with different parts of the work; their gradients are added."""
    return x if _is_alone(group) else _Replicate.apply(x, group)


def total(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum of what the ranks have, on all of them."""
    return x if _is_alone(group) else _Total.apply(x, group)


def gathered(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[ranks, *x.shape]; x has the same shape on every rank."""
    return x[None] if _is_alone(group) else _Gathered.apply(x, group)


def exchanged(x: Tensor, *, send: Sequence[int], receive: Sequence[int], group: ProcessGroup | None) -> Tensor:
    """Rows of x: the first send[0] go to rank 0, and so on; returns receive[0] rows of rank 0, then those of rank 1."""
    return x if _is_alone(group) else _Exchanged.apply(x, tuple(send), tuple(receive), group)


def _is_alone(group: ProcessGroup | None) -> bool:
    return group is None or group.size() == 1


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        dx = dy.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dx, group=ctx.group)
        return dx, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        flat = x.new_empty(group.size() * x.numel())
        _all_gather(flat, x.contiguous().view(-1), group=group)
        return flat.view(group.size(), *x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        own = dy.new_empty(ctx.shape.numel())
        _reduce_scatter(own, dy.contiguous().view(-1), group=ctx.group)
        return own.view(ctx.shape), None


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(dy, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(x: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: ProcessGroup) -> Tensor:
    y = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(y, x.contiguous(), list(receive), list(send), group=group)
    return y
