"""Who am I among the processes of this run: plain functions that answer 0 of 1 without torch.distributed."""

import torch
import torch.distributed as dist


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if distributed() else 1


def barrier() -> None:
    if distributed():
        dist.barrier()


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """All-reduced in place; the same tensor on one process."""
    if distributed():
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def largest_over_ranks(value: int, device: torch.device) -> int:
    """The same answer on every rank, so that all of them stop (or not) after the same step."""
    if not distributed():
        return value
    shared = torch.tensor(value, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)
