"""Ranks see different batches but must scale by the same factor."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from perilune.optim import QKClip
from tests.optim.small_attention import GroupedAttention


def clip_on_one_rank(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    module = GroupedAttention(8, 2, 2, 4)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        clip = QKClip(module, tau=1.0)
        module.recorder.update(torch.tensor([4.0, 0.5]) if rank == 0 else torch.tensor([2.0, 9.0]))
        report = clip.apply()
        torch.save({"weights": module.state_dict(), "max_logits": report.max_logits}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_replicas_stay_equal_when_their_batches_differ(tmp_path: Path):
    torch.multiprocessing.spawn(clip_on_one_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["max_logits"].tolist() == second["max_logits"].tolist() == [[4.0, 9.0]]
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
