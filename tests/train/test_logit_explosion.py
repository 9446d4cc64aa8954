"""MuonClip at work: where logits explode without QK-Clip, tau holds them."""

import json

import pytest
import torch

from perilune.optim import QKClip
from perilune.train import load_run, train
from perilune.train.batches import micro_batches, open_data
from tests.train.tiny_runs import tiny_run

TAU = 30.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run with a learning rate far too large, without and with QK-Clip."""
    root = tmp_path_factory.mktemp("runs")
    curves = {}
    for name, tau in (("off", None), ("on", TAU)):
        config = tiny_run(
            root / "cache",
            name=name,
            model={"num_hidden_layers": 1, "layer_types": ("mla",)},
            optimizer={"lr": 0.1, "adam_lr": 0.003, "weight_decay": 0.0, "qk_clip_tau": tau},
            schedule={"kind": "constant", "warmup_steps": 0},
            trainer={
                "steps": 140,
                "global_batch_rows": 16,
                "micro_batch_rows": 16,
                "eval_every": 0,
                "checkpoint_every": 0,
                "report": True,
            },
        )
        train(config, runs_folder=root, quiet=True)
        lines = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
        curves[name] = [line for line in lines if line["kind"] == "train"]
    return root, curves


def test_without_the_clip_logits_explode_and_with_it_they_stay_near_tau(runs):
    _, curves = runs
    off = [max(record["max_logit"]) for record in curves["off"]]
    on = [max(record["max_logit"]) for record in curves["on"]]
    assert max(off[-20:]) > 3 * TAU
    assert sum(record["clipped_heads"] for record in curves["off"]) == 0
    first = next(step for step, value in enumerate(on) if value > TAU)
    # Until a head first passes tau the clip does nothing at all.
    assert on[: first + 1] == off[: first + 1]
    # It is a controller: a maximum is measured before the step that the clip follows, so it may pass tau by what one
    # step adds, here about a fifth.
    assert max(on[first + 1 :]) <= 1.5 * TAU
    assert sum(record["clipped_heads"] for record in curves["on"]) > 20


def test_the_reports_show_the_explosion_and_the_limit(runs):
    root, curves = runs
    highest = {name: max(max(record["max_logit"]) for record in curve) for name, curve in curves.items()}
    for name, note in (("off", "QK-Clip off"), ("on", "limit 30")):
        page = (root / name / "report.html").read_text()
        (figure,) = [part for part in page.split("<figure")[1:] if "Max attention logit" in part]
        figure = figure.split("</figure>")[0]
        assert "<svg" in figure
        # The line at tau carries its name; without a clip there is none.
        assert ("limit 30" in figure) is (name == "on")
        assert note in page and f"{highest[name]:.1f}" in page


def test_logits_recomputed_on_the_same_batch_right_after_the_clip_are_at_most_tau(runs):
    root, _ = runs
    model, _, config = load_run(root / "off")
    data = open_data(config.data, seed=config.seed)
    (batch,) = micro_batches(data.train, first_row=0, rows=16, micro_batch_rows=16, device=torch.device("cpu"))
    clip = QKClip(model, TAU)

    def seen():
        clip.discard()
        with torch.no_grad():
            model.train().loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens)
        return clip.max_logits().flatten()

    before = seen()
    report = clip.apply()
    after = seen()
    assert before.max() > 3 * TAU and int(report.num_clipped) == int((before > TAU).sum()) > 0
    # float32 dot products of 16 terms around 30: relative 16 * 6e-8, rounded up.
    torch.testing.assert_close(after, before.clamp(max=TAU), rtol=1e-5, atol=0)
    assert after.max() <= TAU * (1 + 1e-5)
