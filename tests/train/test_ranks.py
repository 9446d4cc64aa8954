"""What fails on one rank ends all of them; none is left waiting. Two gloo processes."""

import errno
import json
import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from perilune.train import checkpoint, ranks, train
from tests.train.killable_runs import forks
from tests.train.tiny_runs import tiny_run

pytestmark = pytest.mark.distributed


def nothing_fails(rank: int, root: Path) -> None:
    with ranks.Together():
        pass


def one_rank_raises(rank: int, root: Path) -> None:
    with ranks.Together():
        if rank == 1:
            raise ValueError("no such file")


def folder_cannot_be_claimed(rank: int, root: Path) -> None:
    train(tiny_run(root / f"cache{rank}"), runs_folder=root / "file", quiet=True)


def manifest_cannot_be_written(rank: int, root: Path) -> None:
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint._write_json = full
    save(rank, root)


def tensors_cannot_be_written(rank: int, root: Path) -> None:
    real = checkpoint._remove

    def remove_and_block(path):
        real(path)
        if path.parent.is_dir() and path.name.startswith(".partial-step"):
            path.write_text("in the way")

    checkpoint._remove = remove_and_block
    save(rank, root)


def save(rank: int, root: Path) -> None:
    (root / "checkpoints").mkdir(exist_ok=True)
    tensors = {f"model.{rank}": torch.ones(3)}
    checkpoint.save(root / "checkpoints", step=1, tensors=tensors, state={"step": 1}, keep_last=1)


def _on_rank(rank: int, scenario, root: Path) -> None:
    torch.set_num_threads(1)
    # A rank left waiting would fail by this timeout, with an error of another type.
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/store", rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    outcome = ["none", ""]
    try:
        scenario(rank, root)
    except Exception as error:
        outcome = [type(error).__name__, str(error)]
    (root / f"{rank}.json").write_text(json.dumps(outcome))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "scenario,first,second",
    [
        (nothing_fails, ("none", ""), ("none", "")),
        (one_rank_raises, ("OtherRankFailed", "rank 1: ValueError: no such file"), ("ValueError", "no such file")),
        (folder_cannot_be_claimed, ("RunError", "Not a directory"), ("OtherRankFailed", "rank 0: RunError: cannot")),
        (manifest_cannot_be_written, ("CheckpointError", "disk is full"), ("OtherRankFailed", "rank 0: OSError")),
        (tensors_cannot_be_written, ("CheckpointError", "File exists"), ("OtherRankFailed", "rank 0: FileExists")),
        (save, ("none", ""), ("none", "")),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_error_on_one_rank_is_raised_on_all(tmp_path, scenario, first, second):
    (tmp_path / "file").write_text("in the way")
    processes = [forks.Process(target=_on_rank, args=(rank, scenario, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    for rank, (kind, words) in enumerate((first, second)):
        name, message = json.loads((tmp_path / f"{rank}.json").read_text())
        assert name == kind and words in message


def test_without_other_ranks_an_error_passes_through():
    with pytest.raises(ValueError, match="^alone$"), ranks.Together():
        raise ValueError("alone")
