"""Runs whose steps are CUDA graphs against the same runs launched kernel by kernel: the same bits."""

import math
from dataclasses import replace

import pytest
import torch

from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, RopeConfig
from perilune.train import graphed, train, trainer
from perilune.train.graphed import GraphedBackward
from perilune.train.optimizer import Optimization
from tests.train.test_graphed import batch_of
from tests.train.test_trainer import final_tensors, records, untimed
from tests.train.tiny_runs import VOCAB, tiny_run

pytestmark = pytest.mark.gpu

MODEL = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=4,
    kda=KDAConfig(num_heads=2, head_dim=32),
    mla=MLAConfig(num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32),
    intermediate_size=128,
    residual="plain",
)
MODELS = {
    "3:1": replace(MODEL, layer_types=("kda", "kda", "kda", "mla")),
    "mla": replace(MODEL, layer_types=("mla",) * 4),
    "mla with positions": replace(MODEL, layer_types=("mla",) * 4, mla=replace(MODEL.mla, rope=RopeConfig())),
    "block_attnres": replace(MODEL, layer_types=("kda", "mla") * 2, residual="block_attnres"),
}
WIDE_HEADS = replace(MODELS["3:1"], kda=KDAConfig(num_heads=2, head_dim=64))
"""Heads that the CUDA kernels of KDA take."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run_of(cache, name, model=MODELS["3:1"], *, graphs, **changes):
    """12 steps of two micro-batches; QK-Clip has something to do."""
    how = {"steps": 12, "global_batch_rows": 16, "micro_batch_rows": 8, "eval_every": 5, "checkpoint_every": 4}
    settings = {"device": "cuda", "precision": "bf16", "cuda_graphs": graphs, "sample_prompts": (), **how}
    options = {"data": {"seq_len": 128}, "optimizer": {"lr": 0.01, "qk_clip_tau": 0.05, "orthogonalize_dtype": "auto"}}
    return tiny_run(cache, name=name, model=model, **options, trainer={**settings, **changes})


class Watched:
    """What the last run recorded."""

    def __init__(self, monkeypatch):
        self.graphs, self.optimizers = [], []
        of_run = graphed.of_run

        def remember(run):
            self.graphs.append(of_run(run))
            self.optimizers.append(run.optimization)
            return self.graphs[-1]

        monkeypatch.setattr(graphed, "of_run", remember)

    def assert_recorded(self):
        assert self.graphs[-1] is not None and len(self.graphs[-1]) > 0
        captured = self.optimizers[-1]._captured
        assert captured is not None and captured._graph is not None


def same_runs(ours, theirs):
    for mine, other in zip(untimed(ours), untimed(theirs), strict=True):
        assert mine == other
    same_weights(ours, theirs)


def same_weights(ours, theirs):
    mine, other = final_tensors(ours), final_tensors(theirs)
    assert mine.keys() == other.keys()
    different = [name for name in mine if not torch.equal(mine[name].cpu(), other[name].cpu())]
    assert not different, different


@pytest.mark.parametrize("name", MODELS)
def test_recorded_runs_have_the_bits_of_runs_that_are_not(cache, tmp_path, monkeypatch, name):
    watched = Watched(monkeypatch)
    for kind in (False, True):
        train(run_of(cache, str(kind), MODELS[name], graphs=kind), runs_folder=tmp_path, quiet=True)
    watched.assert_recorded()
    same_runs(tmp_path / "True", tmp_path / "False")
    lines = records(tmp_path / "True", "train")
    assert len(lines) == 12 and sum(line["clipped_heads"] for line in lines) > 0
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert len(records(tmp_path / "True", "valid")) == 3


def test_wide_heads_have_the_bits_of_the_same_padded_step_and_stay_near_the_plain_one(cache, tmp_path, monkeypatch):
    watched = Watched(monkeypatch)
    for kind in (False, True):
        train(run_of(cache, str(kind), WIDE_HEADS, graphs=kind), runs_folder=tmp_path, quiet=True)
    watched.assert_recorded()
    # Sums over chunks have more zeros in them, so their order is another one; bfloat16 then makes more of it.
    ours, theirs = (records(tmp_path / name, "train") for name in ("True", "False"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2**-8)
    monkeypatch.setattr(Optimization, "_step_captured", lambda optimization: False)
    monkeypatch.setattr(graphed, "of_run", lambda run: GraphedBackward(run.model, record=lambda compute: compute))
    train(run_of(cache, "padded", WIDE_HEADS, graphs=True), runs_folder=tmp_path, quiet=True)
    same_runs(tmp_path / "True", tmp_path / "padded")


def test_a_recorded_run_resumes_to_the_same_bits(cache, tmp_path, monkeypatch):
    watched = Watched(monkeypatch)
    train(run_of(cache, "plain", graphs=False), runs_folder=tmp_path, quiet=True)
    config = run_of(cache, "resumed", graphs=True)

    def kill(phase):
        if phase == "step:validated" and not killed:
            killed.append(phase)
            raise KeyboardInterrupt

    killed: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(config, runs_folder=tmp_path, quiet=True, on_phase=kill)
    train(config, runs_folder=tmp_path, quiet=True, resume=True)
    watched.assert_recorded()
    same_weights(tmp_path / "resumed", tmp_path / "plain")


def test_a_skipped_step_leaves_nothing_behind(cache, tmp_path, monkeypatch):
    real = trainer.forward_backward

    def broken_once(count):
        calls = iter(range(100))

        def step(model, batches, num_targets, **how):
            sums = real(model, batches, num_targets, **how)
            if next(calls) == count:
                model.embed_tokens.weight.grad[0, 0] = math.nan
            return sums

        return step

    watched = Watched(monkeypatch)
    for kind in (False, True):
        monkeypatch.setattr(trainer, "forward_backward", broken_once(7))
        train(run_of(cache, str(kind), graphs=kind), runs_folder=tmp_path, quiet=True)
    watched.assert_recorded()
    same_runs(tmp_path / "True", tmp_path / "False")
    assert records(tmp_path / "True", "train")[-1]["skipped"] == 1


def test_a_step_that_waits_for_the_device_goes_on_without_a_graph(cache, tmp_path, monkeypatch, capsys):
    train(run_of(cache, "plain", graphs=False), runs_folder=tmp_path, quiet=True)
    real = Decoder.loss

    def waits(model, tokens, *arguments, **options):
        if torch.cuda.is_current_stream_capturing():
            int(tokens.sum())
        return real(model, tokens, *arguments, **options)

    monkeypatch.setattr(Decoder, "loss", waits)
    watched = Watched(monkeypatch)
    train(run_of(cache, "waits", graphs=True), runs_folder=tmp_path)
    assert len(watched.graphs[-1]) == 0
    same_runs(tmp_path / "waits", tmp_path / "plain")
    assert "goes on without" in " ".join(capsys.readouterr().err.split())


def test_gradients_of_replays_are_those_of_kernels_one_by_one():
    config = replace(MODELS["3:1"], compute_dtype="bfloat16")
    plain, recorded = (Decoder(config, seed=0).cuda().train() for _ in range(2))
    graphs = GraphedBackward(recorded, record=graphed.cuda_recorder(torch.device("cuda")))
    for step in range(6):
        batch = batch_of([9 + step, 200 + 7 * step], seed=step, tokens=512)
        on_device = {name: getattr(batch, name).cuda() for name in ("tokens_BT", "targets_BT", "cu_seqlens")}
        batches = [replace(batch, **on_device)] * 2
        theirs = trainer.forward_backward(plain, batches, 999)
        ours = trainer.forward_backward(recorded, batches, 999, graphed=graphs)
        assert torch.equal(ours, theirs)
        for (name, mine), other in zip(recorded.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad), (step, name)
        assert torch.equal(recorded.max_logits(), plain.max_logits())
        for model in (plain, recorded):
            model.zero_grad(set_to_none=True)
    assert len(graphs) == 1
