"""Who am I among the processes of this run: plain functions that answer 0 of 1 without torch.distributed.

    torchrun --nproc-per-node 8 --no-python perilune train RECIPE

starts eight processes that find each other by their environment; `joined` makes them one world.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

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


ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun gives every process it starts."""


def launched() -> bool:
    """Whether this process was started as one of a world."""
    return all(name in os.environ for name in ENVIRONMENT)


def local_rank() -> int:
    """Number of this process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0")) if launched() else rank()


@contextmanager
def joined(device: str = "auto", *, timeout_s: float = 1800.0) -> Iterator[None]:
    """The world that torchrun started, as the default process group; nothing where there is none, or one already.

    Each process takes the GPU of its number. Leaving with an error does not wait for the other ranks.
    """
    if distributed() or not launched():
        yield
        return
    on_gpu = torch.cuda.is_available() and torch.device("cuda" if device == "auto" else device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(local_rank())
    timeout = timedelta(seconds=timeout_s)
    store, number, count = next(iter(dist.rendezvous("env://", timeout=timeout)))
    # torchrun keeps one store over its restarts: without a prefix ranks would read the addresses of dead processes.
    store = dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cuda:nccl,cpu:gloo" if on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timeout)
    yield  # after an error, destroying the group could wait for ranks that do not come: the end of the process does it
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Part:
    """The number-th of `count` equal parts of something."""

    number: int = 0
    count: int = 1

    def of(self, start: int, stop: int) -> tuple[int, int]:
        """Where this part of [start, stop) begins and ends; the first parts are one longer where they must."""
        share, longer = divmod(stop - start, self.count)
        begin = start + self.number * share + min(self.number, longer)
        return begin, begin + share + (self.number < longer)

    def largest(self, start: int, stop: int) -> int:
        """Length of the longest part."""
        return -(-(stop - start) // self.count)


def told_by_first(value: Any) -> Any:
    """What rank 0 has, on every rank."""
    if not distributed():
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


class Together:
    """Context manager that all ranks leave together: an error on one of them raises on every one.

    A plain barrier would keep the others waiting for the rank that failed. Inside there may be no collective
    operation, or the rank that failed before it would answer the wrong question. `group` holds all ranks, as the
    default one does; a thread that works beside the loop needs its own.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not distributed():
            return
        failures: list[str | None] = [None] * world_size()
        failure = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(failures, failure, group=self._group)
        failed = [f"rank {number}: {failure}" for number, failure in enumerate(failures) if failure is not None]
        if error is None and failed:
            raise OtherRankFailed("; ".join(failed))


def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """All-reduced in place; the same tensor on one process."""
    if distributed():
        dist.all_reduce(values, op=dist.ReduceOp.SUM)
    return values


def largest_over_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """Each of the values; the same answer on every rank, so that all of them stop (or not) after the same step."""
    if not distributed():
        return list(values)
    shared = torch.tensor(values, device=device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return shared.tolist()
