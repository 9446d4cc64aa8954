"""Thirty steps of three tiny recipes give the losses they gave when the code was last meant to change them.

Tolerances. Another CPU sums in another order. Forcing the libraries onto the code paths of processors without vector
instructions and with AVX2, and onto two threads, moves no float32 loss by more than 3e-7 (golden_losses.json keeps
these spreads); a processor with still other kernels is allowed some hundred times that, and ten times more where a near
tie may send a token to another expert. bf16 rounds to 8 bits at each operation: 1.6e-3 was seen, 2e-2 is allowed, a
seventh of what another seed moves. A wrong schedule, seed, batch or update moves the losses by far more: the last test
shows it for a seed and for a weight decay.
"""

import json

import pytest

from tests.train.golden_recipes import GOLDEN, STEPS, losses, recipes, spread

TOLERANCE = {"dense_muonclip": 1e-4, "attnres_moe_muonclip": 1e-3, "full_attention_adamw_bf16": 2e-2}
golden = json.loads(GOLDEN.read_text())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("name", TOLERANCE)
def test_losses_equal_the_pinned_ones(name, cache, tmp_path):
    values = losses(recipes(cache)[name], tmp_path)
    pinned = golden[name]["losses"]
    assert len(values) == STEPS
    assert pinned[-1] < pinned[0] - 1.0  # a curve that falls: constants would pin nothing
    assert spread(values, pinned) < TOLERANCE[name]


@pytest.mark.parametrize("name", TOLERANCE)
def test_the_tolerance_covers_the_spread_between_processors(name):
    assert max(golden[name]["spread"].values()) * 10 < TOLERANCE[name]


def test_another_seed_or_weight_decay_misses_the_pinned_losses(cache, tmp_path):
    name = "dense_muonclip"
    pinned = golden[name]["losses"]
    assert spread(losses(recipes(cache, seed=2)[name], tmp_path), pinned) > 10 * TOLERANCE[name]
    config = recipes(cache)[name]
    without_decay = config.__class__(
        **{**vars(config), "optimizer": config.optimizer.__class__(**{**vars(config.optimizer), "weight_decay": 0.0})}
    )
    assert spread(losses(without_decay, tmp_path), pinned) > 2 * TOLERANCE[name]
