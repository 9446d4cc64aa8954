"""The objectives against loops written from their formulas, in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.rl.objective import ObjectiveConfig, PolicyTokens, Totals, advantages, policy_loss

KINDS = ("k25", "k2", "k15", "grpo")


def batch(lengths: list[int], seed: int, spread: float = 0.5) -> PolicyTokens:
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    new = -torch.rand(count, generator=generator, dtype=torch.float64) * 3
    old = new + spread * torch.randn(count, generator=generator, dtype=torch.float64)
    rewards = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return PolicyTokens(new=new.requires_grad_(), old=old, advantage=rewards[sample], sample=sample)


def loop(tokens: PolicyTokens, totals: Totals, config: ObjectiveConfig) -> tuple[float, list[float]]:
    """Loss and its gradient with respect to every new log-prob, from the formulas, one token after the other."""
    new, old = tokens.new.tolist(), tokens.old.tolist()
    advantage, sample = tokens.advantage.tolist(), tokens.sample.tolist()
    whole = {j: sum(n - o for n, o, s in zip(new, old, sample) if s == j) for j in set(sample)}
    likelihood = {j: sum(n for n, s in zip(new, sample) if s == j) for j in set(sample)}
    value, gradient = 0.0, []
    for n, o, a, j in zip(new, old, advantage, sample):
        log_w, w = n - o, math.exp(n - o)
        if config.kind == "k25":
            inside = config.ratio_low <= w <= config.ratio_high
            value += ((w * a if inside else 0.0) - config.tau * log_w**2) / totals.tokens
            gradient.append(((w * a if inside else 0.0) - 2 * config.tau * log_w) / totals.tokens)
        elif config.kind == "grpo":
            weight = 1 / sample.count(j) / totals.samples
            bounded = min(max(w, config.ratio_low), config.ratio_high)
            value += weight * (min(w * a, bounded * a) - config.tau * (1 / w - 1 + log_w))
            active = w * a <= bounded * a
            gradient.append(weight * ((w * a if active else 0.0) - config.tau * (1 - 1 / w)))
        elif config.kind == "k2":
            gradient.append(2 * config.tau * (a - config.tau * whole[j]) / totals.samples)
        else:
            gradient.append((a - config.tau * whole[j]) / totals.samples)
    for j, total in whole.items():
        a = advantage[sample.index(j)]
        if config.kind == "k2":
            value -= (a - config.tau * total) ** 2 / totals.samples
        elif config.kind == "k15":
            value += (likelihood[j] * a - 0.5 * config.tau * total**2) / totals.samples
    return -value, [-each for each in gradient]


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5), seed=st.integers(0, 2**20), tau=st.floats(0, 2))
@settings(max_examples=30, deadline=None)
def test_loss_and_gradient_are_those_of_the_formula(kind, lengths, seed, tau):
    tokens = batch(lengths, seed)
    totals = Totals(tokens=sum(lengths) + 3, samples=len(lengths) + 1)
    config = ObjectiveConfig(kind=kind, tau=tau, ratio_low=0.7, ratio_high=1.4)
    found = policy_loss(tokens, totals, config)
    (gradient,) = torch.autograd.grad(found.loss, tokens.new)
    value, expected = loop(tokens, totals, config)
    torch.testing.assert_close(found.loss.item(), value, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-5.0, 5.0, 800.0, -800.0])
def test_outside_the_band_no_token_gives_a_policy_gradient_whatever_the_sign(advantage, log_ratio):
    new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    tokens = PolicyTokens(
        new=new,
        old=new.detach() - log_ratio,
        advantage=torch.tensor([advantage], dtype=torch.float64),
        sample=torch.tensor([0]),
    )
    totals = Totals(tokens=1, samples=1)
    found = policy_loss(tokens, totals, ObjectiveConfig(tau=0.0))
    (gradient,) = torch.autograd.grad(found.loss, new)
    assert gradient.item() == 0.0 and found.loss.item() == 0.0 and found.num_clipped.item() == 1
    pulled = policy_loss(tokens, totals, ObjectiveConfig(tau=0.5))
    (gradient,) = torch.autograd.grad(pulled.loss, new)
    assert gradient.item() == pytest.approx(log_ratio)  # down when it has risen: back to the policy that sampled


@pytest.mark.parametrize(
    "advantage,log_ratio,is_clipped", [(1, 5, True), (-1, 5, False), (1, -5, False), (-1, -5, True)]
)
def test_grpo_masks_one_side_per_sign(advantage, log_ratio, is_clipped):
    new = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    tokens = PolicyTokens(
        new=new, old=new.detach() - log_ratio, advantage=torch.tensor([float(advantage)]).double(),
        sample=torch.tensor([0]),
    )  # fmt: skip
    found = policy_loss(tokens, Totals(tokens=1, samples=1), ObjectiveConfig(kind="grpo", tau=0.0))
    (gradient,) = torch.autograd.grad(found.loss, new)
    assert (gradient.item() == 0.0) == is_clipped and found.num_clipped.item() == int(is_clipped)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**20), cut=st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_losses_of_micro_batches_add_up_however_samples_are_packed(kind, seed, cut):
    lengths = [3, 5, 1, 4, 2]
    whole = batch(lengths, seed)
    totals, config = Totals(tokens=sum(lengths), samples=len(lengths)), ObjectiveConfig(kind=kind)
    parts = []
    for chosen in (whole.sample < cut, whole.sample >= cut):
        part = PolicyTokens(
            new=whole.new[chosen], old=whole.old[chosen], advantage=whole.advantage[chosen],
            sample=whole.sample[chosen] - int(whole.sample[chosen].min()),
        )  # fmt: skip
        parts.append(policy_loss(part, totals, config).loss)
    torch.testing.assert_close(sum(parts), policy_loss(whole, totals, config).loss, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_without_trained_tokens_adds_nothing(kind):
    none = torch.empty(0, dtype=torch.float64)
    tokens = PolicyTokens(
        new=none.clone().requires_grad_(), old=none, advantage=none, sample=torch.empty(0, dtype=torch.long)
    )
    found = policy_loss(tokens, Totals(tokens=5, samples=2), ObjectiveConfig(kind=kind))
    found.loss.backward()
    assert found.loss.item() == 0.0 and found.gap.item() == 0.0


def test_at_the_policy_that_sampled_the_gradient_is_the_plain_policy_gradient():
    tokens = batch([4, 3], 1, spread=0.0)
    found = policy_loss(tokens, Totals(tokens=7, samples=2), ObjectiveConfig(tau=3.0))
    (gradient,) = torch.autograd.grad(found.loss, tokens.new)
    torch.testing.assert_close(gradient, -tokens.advantage / 7)
    assert found.gap.item() == 0.0 and found.num_clipped.item() == 0


def test_the_gap_is_that_between_engine_and_trainer():
    tokens = batch([4, 3], 2, spread=0.1)
    found = policy_loss(tokens, Totals(tokens=7, samples=2), ObjectiveConfig())
    difference = (tokens.new.detach() - tokens.old).abs()
    assert found.gap.item() == pytest.approx(difference.sum().item())
    assert found.largest_gap.item() == pytest.approx(difference.max().item())


def test_a_group_is_compared_with_its_own_mean():
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(advantages(rewards), torch.tensor([-0.25, -0.25, -0.25, 0.75]).double())
    scaled = advantages(rewards, scale=True)
    assert scaled.mean().item() == pytest.approx(0) and scaled.std(correction=0).item() == pytest.approx(1)
    assert advantages(torch.full((5,), 0.1)).tolist() == [0.0] * 5  # exactly, although the mean is rounded


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: ObjectiveConfig(kind="ppo"), "expected one of k25, k2, k15, grpo"),
        (lambda: ObjectiveConfig(ratio_low=1.5), "on both sides of 1"),
        (lambda: ObjectiveConfig(tau=-1.0), "expected at least 0"),
        (lambda: advantages(torch.tensor([1.0, math.nan])), "finite"),
        (lambda: advantages(torch.empty(0)), "K >= 1"),
        (lambda: policy_loss(batch([2], 0), Totals(tokens=1, samples=1), ObjectiveConfig()), "but here are 2 tokens"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("distance", [99.9, -99.9, 30.0, -30.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_grpo_stays_finite_however_far_a_token_has_moved(distance, advantage):
    new = torch.tensor([distance - 1.0, -1.0], dtype=torch.float32, requires_grad=True)
    tokens = PolicyTokens(
        new=new, old=torch.tensor([-1.0, -1.0]), advantage=torch.full((2,), advantage), sample=torch.tensor([0, 1])
    )  # fmt: skip
    found = policy_loss(
        tokens, Totals(tokens=2, samples=2), ObjectiveConfig(kind="grpo", ratio_low=0.8, ratio_high=1.2)
    )
    found.loss.backward()
    assert bool(torch.isfinite(found.loss)) and bool(torch.isfinite(new.grad).all())
