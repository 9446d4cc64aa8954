"""Runs with pictures whose language model is replayed as CUDA graphs, against the same runs kernel by kernel."""

from dataclasses import replace

import pytest
import torch

from perilune.data import FusionConfig
from perilune.model import Decoder
from perilune.train import graphed, train, trainer
from perilune.train.graphed import GraphedBackward
from tests.train.test_graphed import batch_of
from tests.train.test_graphed_cuda import MODELS, Watched, same_runs
from tests.train.test_graphed_pictures import GRIDS, TOWER, shown
from tests.train.test_trainer import records
from tests.train.test_vision_runs import vision_run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run_of(cache, name, fusion, *, graphs):
    """12 steps of 12 rows; pictures of 28 x 28 pixels, whose attention is one tile: sums have one order."""
    how = {"steps": 12, "global_batch_rows": 12, "micro_batch_rows": 6, "eval_every": 5, "checkpoint_every": 0}
    settings = {"device": "cuda", "precision": "bf16", "cuda_graphs": graphs, "sample_prompts": (), **how}
    options = {"lr": 0.01, "qk_clip_tau": 0.05, "orthogonalize_dtype": "auto"}
    config = vision_run(
        cache, name=name, pictures={"fusion": fusion, "samples": 0}, optimizer=options, trainer=settings
    )
    return replace(config, model=replace(MODELS["3:1"], vocab_size=360, vision=TOWER))


@pytest.mark.parametrize("fusion", [FusionConfig(share=0.5), FusionConfig(share=0.5, start=0.5)], ids=["early", "late"])
def test_recorded_runs_with_pictures_have_the_bits_of_runs_that_are_not(cache, tmp_path, monkeypatch, fusion):
    watched = Watched(monkeypatch)
    for kind in (False, True):
        train(run_of(cache, str(kind), fusion, graphs=kind), runs_folder=tmp_path, quiet=True)
    watched.assert_recorded()
    same_runs(tmp_path / "True", tmp_path / "False")
    lines = records(tmp_path / "True", "train")
    assert len(lines) == 12 and "vision_loss" in lines[-1]


def test_gradients_of_replays_with_pictures_are_those_of_kernels_one_by_one():
    config = replace(MODELS["block_attnres"], vision=TOWER, compute_dtype="bfloat16")
    plain, recorded = (Decoder(config, seed=0).cuda().train() for _ in range(2))
    record = graphed.cuda_recorder(torch.device("cuda"))
    graphs = GraphedBackward(recorded, record=record, pictures=True)
    for step in range(6):
        batch = shown(batch_of([9 + step, 200 + 7 * step], seed=step, tokens=512), GRIDS[: 2 + step % 3], seed=step)
        on_device = {name: getattr(batch, name).cuda() for name in ("tokens_BT", "targets_BT", "cu_seqlens")}
        batches = [replace(batch, media=batch.media.to("cuda"), **on_device)] * 2
        theirs = trainer.forward_backward(plain, batches, 999)
        ours = trainer.forward_backward(recorded, batches, 999, graphed=graphs)
        assert torch.equal(ours, theirs)
        for (name, mine), other in zip(recorded.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad), (step, name)
        for model in (plain, recorded):
            model.zero_grad(set_to_none=True)
    assert len(graphs) > 0
