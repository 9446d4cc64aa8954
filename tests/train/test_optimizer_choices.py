"""What a run's optimizer config asks of the model."""

import math

import pytest

from perilune.model import Decoder
from perilune.optim.qk_clip import find_heads
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
