"""Rotary frequencies and YaRN against transformers' own functions, number by number."""

import pytest
import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from perilune.model import RopeConfig
from perilune.model.rope import inverse_frequencies, rotation
from perilune.recipes.extend import extended_rope


def theirs(rope: RopeConfig, dim: int) -> tuple[torch.Tensor, float]:
    parameters = {
        "rope_type": "yarn", "rope_theta": rope.theta, "factor": rope.factor, "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow, "original_max_position_embeddings": rope.original_max_position_embeddings,
        "mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim,
    }  # fmt: skip
    config = PretrainedConfig(
        head_dim=dim, hidden_size=4 * dim, num_attention_heads=4, rope_parameters=parameters,
        max_position_embeddings=int(rope.original_max_position_embeddings * rope.factor),
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(factor=8.0, original_max_position_embeddings=4096),
        RopeConfig(factor=64.0, theta=50_000.0),
        RopeConfig(factor=2.5, theta=500.0, original_max_position_embeddings=256, beta_fast=16.0, beta_slow=2.0),
        RopeConfig(factor=8.0, mscale=1.0, mscale_all_dim=0.0),
        RopeConfig(factor=8.0, mscale=0.7, mscale_all_dim=0.5),
        extended_rope(RopeConfig(), trained=4096, length=32_768),
    ],
)
def test_yarn_frequencies_and_magnitude_equal_transformers(rope: RopeConfig, dim: int) -> None:
    frequencies, magnitude = theirs(rope, dim)
    torch.testing.assert_close(inverse_frequencies(rope, dim), frequencies, rtol=2e-6, atol=0)
    cos, sin = rotation(rope, torch.zeros(1), dim)
    torch.testing.assert_close(cos, torch.full_like(cos, magnitude), rtol=1e-6, atol=0)
    assert not sin.any()


def test_extending_keeps_the_fast_turns_and_slows_the_slow_ones() -> None:
    plain = RopeConfig()
    extended = extended_rope(plain, trained=4096, length=32_768)
    assert (extended.factor, extended.original_max_position_embeddings) == (8.0, 4096)
    before, after = inverse_frequencies(plain, 64), inverse_frequencies(extended, 64)
    assert after[0] == before[0] and torch.isclose(after[-1], before[-1] / 8)
    again = extended_rope(extended, trained=32_768, length=131_072)
    assert (again.factor, again.original_max_position_embeddings) == (32.0, 4096)
