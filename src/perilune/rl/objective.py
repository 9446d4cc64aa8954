"""What a policy is trained to increase: Kimi K2.5's token-level objective, and the forms it came from.

K samples of one prompt form a group. With w = pi_theta / pi_old for a token, A = r - mean of the group's rewards, N the
number of trained tokens of the whole batch, J the number of samples, |y| the trained tokens of one:

    k25     (1/N) sum over tokens  [alpha <= w <= beta] w A  -  tau (log w)^2                       (Kimi K2.5)
    k2     -(1/J) sum over samples (A - tau log W)^2,  log W = sum of log w over the sample         (arXiv 2507.20534)
    k15     (1/J) sum over samples log pi_theta(y) A  -  tau/2 (log W)^2                            (arXiv 2501.12599)
    grpo    (1/J) sum over samples (1/|y|) sum over tokens  min(w A', clip(w, alpha, beta) A') - tau kl
            A' = A / standard deviation of the group, kl = w^-1 - 1 + log w against pi_old          (arXiv 2402.03300)

The band of k25 is a mask on the gradient, whatever the sign of A: a token that has left it gives no policy gradient in
either direction (grpo masks one side per sign). It keeps its tau term, which pulls it back. pi_old are the log-probs
that the engine reported when it sampled, so the ratio also measures how far engine and trainer differ.

`loss` is the negative objective of the rows it is given. N and J are those of the whole step, so that the losses of
micro-batches, or of ranks, add up to the loss of the step, however samples are packed into rows. Groups whose rewards
are all equal are not in it (groups.py): their policy gradient is zero, and so they count neither in N nor by tau.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["k25", "k2", "k15", "grpo"]
FARTHEST = 20.0
"""Of log w in grpo: a token that is 5e8 times as likely as it was pulls as hard as any number can say."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    kind: Kind = "k25"
    ratio_low: float = 0.5
    """alpha: k25 masks tokens below; grpo clips there (0.8 in its paper)."""
    ratio_high: float = 2.0
    """beta: k25 masks tokens above; grpo clips there (1.2 in its paper)."""
    tau: float = 0.01
    """Strength of the pull towards the policy that sampled."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"objective.kind is {self.kind!r}, expected one of {', '.join(get_args(Kind))}")
        if not 0 < self.ratio_low < 1 < self.ratio_high:
            raise ValueError(
                f"objective.ratio_low={self.ratio_low!r} and ratio_high={self.ratio_high!r}: expected two positive "
                "numbers on both sides of 1"
            )
        if not 0 <= self.tau < float("inf"):
            raise ValueError(f"objective.tau is {self.tau!r}, expected at least 0 and finite")


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """The trained tokens of some samples, one after the other; what tools, users and sub-agents wrote is not here."""

    new: Tensor
    """[n] log-probs under the policy that is trained, with gradient."""
    old: Tensor
    """[n] log-probs that the engine reported when it sampled."""
    advantage: Tensor
    """[n] of the token's sample; of `advantages`, in the scale that the objective wants."""
    sample: Tensor
    """[n] int64: which sample of these rows a token belongs to."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Of the whole step, all micro-batches and ranks together."""

    tokens: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    loss: Tensor
    """Scalar with gradient; losses of micro-batches add up."""
    num_clipped: Tensor
    """Tokens that give no policy gradient because of the band."""
    gap: Tensor
    """Sum over tokens of |log w|: on the first step after sampling, what engine and trainer differ by."""
    largest_gap: Tensor


def policy_loss(tokens: PolicyTokens, totals: Totals, config: ObjectiveConfig) -> PolicyLoss:
    """The negative objective of these tokens. No token gives loss 0, with a gradient of 0."""
    _check(tokens, totals)
    log_ratio = tokens.new - tokens.old
    ratio = log_ratio.exp()
    detached = log_ratio.detach()
    outside = (ratio.detach() < config.ratio_low) | (ratio.detach() > config.ratio_high)
    clipped = torch.zeros((), dtype=torch.long, device=outside.device)
    advantage = tokens.advantage
    if config.kind == "k25":
        # A ratio that has left the band may be inf; times 0 it would be NaN, so it is replaced before the product.
        gain = torch.where(outside, torch.zeros_like(ratio), torch.where(outside, 0.0, log_ratio).exp() * advantage)
        objective = (gain - config.tau * log_ratio.square()).sum() / totals.tokens
        clipped = (outside & (advantage != 0)).sum()
    elif config.kind == "grpo":
        # Beyond e^FARTHEST a ratio or its inverse is inf, and inf times 0 no number: it counts as if it were there.
        near = log_ratio.clamp(-FARTHEST, FARTHEST)
        bounded = near.exp().clamp(config.ratio_low, config.ratio_high)
        gain = torch.minimum(near.exp() * advantage, bounded * advantage)
        kl = torch.exp(-near) - 1 + near
        lengths = torch.zeros_like(log_ratio).index_add(0, tokens.sample, torch.ones_like(log_ratio))
        objective = ((gain - config.tau * kl) / lengths[tokens.sample]).sum() / totals.samples
        too_high = (ratio.detach() > config.ratio_high) & (advantage > 0)
        clipped = (too_high | ((ratio.detach() < config.ratio_low) & (advantage < 0))).sum()
    else:
        objective = _of_samples(log_ratio, tokens, config).sum() / totals.samples
    gap = detached.abs()
    return PolicyLoss(
        loss=-objective,
        num_clipped=clipped,
        gap=gap.sum(),
        largest_gap=gap.max() if gap.numel() else gap.sum(),
    )


def _of_samples(log_ratio: Tensor, tokens: PolicyTokens, config: ObjectiveConfig) -> Tensor:
    """[samples] the objective of each, for the two forms that look at whole samples."""
    count = int(tokens.sample.max()) + 1 if tokens.sample.numel() else 0
    zeros = log_ratio.new_zeros(count)
    whole = zeros.index_add(0, tokens.sample, log_ratio)
    # All tokens of a sample have its advantage; the largest index wins, which is the same number.
    advantage = zeros.index_copy(0, tokens.sample, tokens.advantage.to(zeros.dtype))
    if config.kind == "k2":
        return -(advantage - config.tau * whole).square()
    likelihood = zeros.index_add(0, tokens.sample, tokens.new)
    return likelihood * advantage - 0.5 * config.tau * whole.square()


def advantages(rewards: Tensor, *, scale: bool = False) -> Tensor:
    """[K] rewards of a group -> reward minus the group's mean; with `scale` over its standard deviation (grpo).

    A group whose rewards are all equal teaches nothing: zeros, exactly.
    """
    if rewards.ndim != 1 or rewards.numel() == 0:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}, expected [K] of one group with K >= 1")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"rewards holds {rewards.tolist()!r}, expected finite numbers: drop what could not be judged")
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / rewards.std(correction=0) if scale else centred


def _check(tokens: PolicyTokens, totals: Totals) -> None:
    shapes = {name: tuple(getattr(tokens, name).shape) for name in ("new", "old", "advantage", "sample")}
    if len(set(shapes.values())) != 1 or tokens.new.ndim != 1:
        raise ValueError(f"policy tokens have shapes {shapes}, expected [n] for all four")
    if totals.tokens < max(1, tokens.new.numel()) or totals.samples < 1:
        raise ValueError(
            f"totals say {totals.tokens} tokens and {totals.samples} samples in the step, but here are "
            f"{tokens.new.numel()} tokens"
        )
