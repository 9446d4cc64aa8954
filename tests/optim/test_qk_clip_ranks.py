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
        weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        # One rank knows head 0 exactly, the other has a larger bound; of head 1 the exact one is larger.
        values, bounds = ([0.5, 3.0], [False, False]) if rank == 0 else ([0.9, 0.8], [True, True])
        module.recorder.update(torch.tensor(values), torch.tensor(bounds))
        mixed = clip.apply()
        assert mixed.num_clipped == 1
        saved = {"weights": weights, "max_logits": report.max_logits, "mixed": mixed.max_logits}
        torch.save({**saved, "is_bound": mixed.is_bound, "later": module.state_dict()}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
def test_replicas_stay_equal_when_their_batches_differ(tmp_path: Path):
    torch.multiprocessing.spawn(clip_on_one_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first["max_logits"].tolist() == second["max_logits"].tolist() == [[4.0, 9.0]]
    for step in ("weights", "later"):
        assert all(torch.equal(value, second[step][name]) for name, value in first[step].items())
    for rank in (first, second):
        torch.testing.assert_close(rank["mixed"], torch.tensor([[0.9, 3.0]]))
        assert rank["is_bound"].tolist() == [[True, False]]
