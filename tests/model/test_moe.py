"""Routing without auxiliary loss: what selects, what weighs, what is counted, and that it balances."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from perilune.model import MixtureOfExperts
from perilune.model.moe import every_linear, grouped_linear
from tests.model.small_models import MOE, relative_error


def experts_layer(config=MOE, width: int = 16) -> MixtureOfExperts:
    torch.manual_seed(0)
    layer = MixtureOfExperts(width, config).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def written_out(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """Token by token, expert by expert."""
    config, rows = layer.config, []
    for token in x.flatten(0, 1):
        scores = torch.sigmoid(layer.gate.weight @ token)
        chosen = (scores + layer.gate.e_score_correction_bias).topk(config.num_experts_per_token).indices
        total = scores[chosen].sum() + 1e-20 if config.moe_renormalize else 1.0
        y = layer.shared_experts(token) if layer.shared_experts is not None else torch.zeros_like(token)
        for expert in chosen:
            gate, up = (layer.experts.gate_up_proj[expert] @ token).chunk(2)
            weight = config.routed_scaling_factor * scores[expert] / total
            y = y + weight * (layer.experts.down_proj[expert] @ (F.silu(gate) * up))
        rows.append(y)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("config", [MOE, replace(MOE, moe_renormalize=False, num_shared_experts=0)])
def test_layer_equals_the_definition_token_by_token_with_gradients(config) -> None:
    layer = experts_layer(config)
    layer.gate.e_score_correction_bias.copy_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    ours = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    theirs = torch.autograd.grad(written_out(layer, x).square().sum(), [x, *layer.parameters()])
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) < 1e-11


def test_group_limited_routing_takes_experts_of_the_best_groups_only() -> None:
    layer = experts_layer(replace(MOE, num_experts=8, num_expert_group=4, topk_group=1))
    x = torch.randn(50, 16, dtype=torch.float64)
    _, experts = layer.gate(x)
    assert (experts[:, 0] // 2 == experts[:, 1] // 2).all()


def test_bias_selects_but_never_weighs_and_has_no_gradient() -> None:
    layer = experts_layer()
    x = torch.randn(40, 16, dtype=torch.float64)
    weights, experts = layer.gate(x)
    layer.gate.e_score_correction_bias += 7.0  # the same for all: selects the same, must weigh the same
    again, same_experts = layer.gate(x)
    assert torch.equal(experts, same_experts)
    assert torch.equal(weights, again)
    assert "gate.e_score_correction_bias" in layer.state_dict()
    assert "gate.e_score_correction_bias" not in dict(layer.named_parameters())


def test_counts_grow_over_micro_batches_but_not_in_eval_or_recomputation() -> None:
    layer = experts_layer()
    x = torch.randn(1, 10, 16, dtype=torch.float64, requires_grad=True)
    layer(x)
    layer(x)
    assert layer.gate.counts.sum() == 2 * 10 * 2
    layer.eval()
    layer(x)
    layer.train()
    assert layer.gate.counts.sum() == 2 * 10 * 2
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.gate.counts.sum() == 3 * 10 * 2


def test_update_moves_each_bias_by_the_sign_of_its_shortfall_and_clears_the_counts() -> None:
    layer = experts_layer()
    layer.gate.counts.copy_(torch.tensor([8.0, 4.0, 0.0, 4.0]))
    imbalance = layer.gate.update_bias()
    expected = 1e-3 * torch.tensor([-1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    assert torch.equal(layer.gate.e_score_correction_bias, expected)
    assert imbalance == 2.0
    assert not layer.gate.counts.any()


def test_a_skewed_router_balances_within_300_steps() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(16, replace(MOE, num_experts=8))
    torch.nn.init.normal_(layer.gate.weight, std=0.02)
    with torch.no_grad():
        layer.gate.weight[:2, 0] += 1.0  # two experts that every token prefers
    for parameter in layer.experts.parameters():
        torch.nn.init.zeros_(parameter)
    imbalance = []
    for _ in range(300):
        tokens = torch.randn(1, 512, 16)
        tokens[..., 0] = tokens[..., 0].abs()
        with torch.no_grad():
            layer(tokens)
        imbalance.append(layer.gate.update_bias().item())
    assert imbalance[0] > 3.5  # both take nearly every token: 2 of 8 experts carry all of the load
    # A perfectly uniform router with 1024 draws over 8 experts has max / mean of about 1.15.
    assert max(imbalance[-20:]) < 1.5


def test_grouped_linear_takes_empty_groups() -> None:
    x, weight = torch.randn(5, 3), torch.randn(4, 2, 3)
    counts = torch.tensor([0, 3, 0, 2])
    expected = torch.cat([x[:3] @ weight[1].T, x[3:] @ weight[3].T])
    torch.testing.assert_close(grouped_linear(x, weight, counts), expected)


def test_linear_that_asks_nobody_for_the_length_of_groups_equals_the_grouped_one() -> None:
    torch.manual_seed(0)
    counts, weight = torch.tensor([0, 3, 0, 1, 4]), torch.randn(5, 6, 7, dtype=torch.float64)
    x = torch.randn(8, 7, dtype=torch.float64)
    torch.testing.assert_close(every_linear(x, weight, counts), grouped_linear(x, weight, counts))
