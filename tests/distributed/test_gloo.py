"""The worlds that tests start: results by rank, the guilty rank's traceback, no endless wait."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.gloo import run

pytestmark = pytest.mark.distributed


def add_ranks(rank: int, offset: int) -> tuple[int, float]:
    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, float(value)


def one_raises(rank: int) -> None:
    if rank == 1:
        raise ValueError("rank one is unhappy")
    dist.barrier()


def one_dies(rank: int) -> None:
    if rank == 1:
        os._exit(7)
    time.sleep(60)


def waits_for_nobody(rank: int) -> None:
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)


def test_results_come_by_rank():
    assert run(3, add_ranks, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_the_traceback_of_the_rank_that_failed_is_the_error():
    with pytest.raises(AssertionError, match=r"^rank 1 of 2:(.|\n)*ValueError: rank one is unhappy"):
        run(2, one_raises)


def test_a_hang_names_the_rank_and_its_place():
    with pytest.raises(AssertionError, match=r"ranks \[0.*did not finish(.|\n)*waits_for_nobody"):
        run(2, waits_for_nobody, timeout_s=3)


def test_a_rank_that_dies_silently_is_named():
    with pytest.raises(AssertionError, match=r"exit codes \{1: 7\}"):
        run(2, one_dies)
