"""Who am I among the processes of this run: plain functions that answer 0 of 1 without torch.distributed."""

from types import TracebackType

import torch
import torch.distributed as dist


class OtherRankFailed(RuntimeError):
    """Another rank could not go on; the message is its error."""


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if distributed() else 0


def world_size() -> int:
    return dist.get_world_size() if distributed() else 1


class Together:
    """Context manager that all ranks leave together: an error on one of them raises on every one.

    A plain barrier would keep the others waiting for the rank that failed. Inside there may be no collective
    operation, or the rank that failed before it would answer the wrong question.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not distributed():
            return
        failures: list[str | None] = [None] * world_size()
        dist.all_gather_object(failures, None if error is None else f"{type(error).__name__}: {error}")
        failed = [f"rank {number}: {failure}" for number, failure in enumerate(failures) if failure is not None]
        if error is None and failed:
            raise OtherRankFailed("; ".join(failed))


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
