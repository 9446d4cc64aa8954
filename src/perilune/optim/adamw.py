"""AdamW (arXiv 1711.05101) over lists of tensors, with the state layout and the arithmetic of torch.optim.AdamW.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
    p <- p (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Gradients and states are float32 or wider; t is counted per parameter, so a parameter without gradient stands still.

Not free of scale, as torch's is not: eps counts when gradients fall below 1e-8, and the square of a float32 gradient
above about 1e20 leaves the number range. v is then infinite and stays so: that entry never moves again but by decay.
Clip gradients, or skip a step whose norm is not sane.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def new_adamw_state(parameter: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    zeros = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # The counter stays on the CPU, as in torch.optim.AdamW, so that reading it never waits for a device.
    return {"step": torch.zeros((), device="cpu"), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}


def adamw_update(
    masters: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step in place on `masters` and `states`; gradients are only read."""
    first = [state["exp_avg"] for state in states]
    second = [state["exp_avg_sq"] for state in states]
    for state in states:
        state["step"] += 1
    steps = [float(state["step"]) for state in states]
    if weight_decay:
        torch._foreach_mul_(masters, 1 - lr * weight_decay)
    torch._foreach_lerp_(first, gradients, 1 - betas[0])
    torch._foreach_mul_(second, betas[1])
    torch._foreach_addcmul_(second, gradients, gradients, 1 - betas[1])
    scale = torch._foreach_sqrt(second)
    torch._foreach_div_(scale, [math.sqrt(1 - betas[1] ** step) for step in steps])
    torch._foreach_add_(scale, eps)
    torch._foreach_addcdiv_(masters, first, scale, [-lr / (1 - betas[0] ** step) for step in steps])
