"""What an attention layer tells QK-Clip: exact maxima or upper bounds, in training only."""

import math

import pytest
import torch
from torch import Tensor

from perilune.kernels.attention import attention
from perilune.model import mla
from perilune.model.documents import Packing
from perilune.optim import QKClip

CONFIG = mla.MLAConfig(num_attention_heads=4, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """Thresholds the layer passed to attention, which answers as on CUDA: bounds for heads that are not above it."""
    thresholds: list[float | None] = []

    def bounding(q: Tensor, k: Tensor, v: Tensor, *, clip_threshold: float | None, **options) -> tuple[Tensor, ...]:
        thresholds.append(clip_threshold)
        o, max_logit, _ = attention(q, k, v, clip_threshold=clip_threshold, **options)
        bound = max_logit.abs() * 1.01
        is_bound = bound <= (math.inf if clip_threshold is None else clip_threshold)
        return o, torch.where(is_bound, bound, max_logit), is_bound

    monkeypatch.setattr(mla, "attention", bounding)
    return thresholds


def test_the_layer_asks_for_what_the_clip_needs_and_in_evaluation_for_nothing(asked: list[float | None]) -> None:
    layer = mla.LatentAttention(32, CONFIG)
    x, packing = torch.randn(1, 12, 32), Packing()
    layer(x, packing)
    QKClip(layer, tau=50.0)
    layer(x, packing)
    layer.eval()(x, packing)
    assert asked == [-math.inf, 50.0, None]


def test_only_heads_above_tau_are_clipped_when_the_others_report_bounds(asked: list[float | None]) -> None:
    layer = mla.LatentAttention(32, CONFIG)
    x, packing = torch.randn(1, 12, 32) * 3, Packing()
    with torch.no_grad():
        layer.q_proj.weight.unflatten(0, (4, -1))[2] *= 40
    layer(x, packing)
    exact = layer.max_logit.exact.clone()
    layer.max_logit.reset()
    tau = float(exact[2] / 2)
    assert exact[[0, 1, 3]].abs().max() * 1.01 < tau
    clip = QKClip(layer, tau)
    layer(x, packing)
    report = clip.apply()
    assert report.is_bound.tolist() == [[True, True, False, True]] and report.num_clipped == 1
    assert (report.max_logits[0] >= exact).all() and report.max_logits[0, 2] == exact[2]
    layer(x, packing)
    torch.testing.assert_close(layer.max_logit.value[2], torch.tensor(tau), rtol=1e-5, atol=0)
    assert asked == [-math.inf, tau, tau]
