"""What a run's optimizer config asks of the model."""

import math

import pytest
import torch

from perilune.model import Decoder
from perilune.optim import MuonClip
from perilune.optim.capture import CapturedStep, CaptureFailed
from perilune.optim.qk_clip import find_heads
from perilune.train import optimizer as optimizer_module
from perilune.train.optimizer import OptimizerConfig, build_optimization
from tests.model.small_models import BASE


@pytest.mark.parametrize(
    ("kind", "tau", "above", "expected"),
    [
        ("muonclip", None, None, math.inf),
        ("muonclip", None, 10.0, 10.0),
        ("muonclip", 100.0, 10.0, 10.0),
        ("muonclip", 5.0, 10.0, 5.0),
        ("adamw", None, 10.0, 10.0),
    ],
)
def test_exact_logits_are_recorded_above_the_lower_of_both_thresholds(kind, tau, above, expected):
    model = Decoder(BASE)
    build_optimization(model, OptimizerConfig(kind=kind, qk_clip_tau=tau, exact_logits_above=above))
    thresholds = {layer.recorder.clip_threshold for layer in find_heads(model).values()}
    assert thresholds == {expected}


@pytest.mark.parametrize("kind", ["muonclip", "adamw"])
def test_embedding_head_and_vectors_take_the_other_learning_rate(kind):
    model = Decoder(BASE)
    config = OptimizerConfig(kind=kind, lr=0.01, adam_lr=0.04)
    names = {parameter: name for name, parameter in model.named_parameters()}
    rates = {
        names[parameter]: group["lr"]
        for group in build_optimization(model, config).optimizer.param_groups
        for parameter in group["params"]
    }
    assert len(rates) == len(names)
    assert rates["embed_tokens.weight"] == rates["lm_head.weight"] == rates["norm.weight"] == 0.04
    assert rates["layers.0.mlp.down_proj.weight"] == 0.01


def stepped(monkeypatch, kind, *, stays, breaks=False):
    """Which of four steps were captured, and the weights after them; what captures here is the usual step."""
    taken = []

    class Captured(CapturedStep):
        def __call__(self):
            if breaks:
                raise CaptureFailed("no")
            taken.append(step)
            self.optimizer.step()

    monkeypatch.setattr(optimizer_module, "on_gpu", lambda optimizer: True)
    monkeypatch.setattr(MuonClip, "captured_step", lambda optimizer: Captured(optimizer))
    model = Decoder(BASE, seed=0)
    optimization = build_optimization(model, OptimizerConfig(kind=kind, orthogonalize_dtype="float32"))
    for step in range(4):
        for number, parameter in enumerate(model.parameters()):
            parameter.grad = torch.full_like(parameter, math.sin(step + number))
        optimization.step(gradients_stay=stays and step >= 1)
        assert all(parameter.grad is None for parameter in model.parameters())
    return taken, [parameter.detach().clone() for parameter in model.parameters()]


def test_steps_are_captured_from_when_gradients_stay_and_only_those_of_muonclip(monkeypatch):
    for kind, expected in (("muonclip", [1, 2, 3]), ("adamw", [])):
        taken, weights = stepped(monkeypatch, kind, stays=True)
        assert taken == expected
        assert all(map(torch.equal, weights, stepped(monkeypatch, kind, stays=False)[1]))


def test_a_step_that_cannot_be_captured_is_taken_as_usual_and_never_tried_again(monkeypatch):
    with pytest.warns(UserWarning, match="kernel by kernel") as warned:
        taken, weights = stepped(monkeypatch, "muonclip", stays=True, breaks=True)
    assert taken == [] and len(warned) == 1
    assert all(map(torch.equal, weights, stepped(monkeypatch, "muonclip", stays=False)[1]))
