"""AdamW (arXiv 1711.05101) over lists of tensors, with the state layout and the arithmetic of torch.optim.AdamW.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
    p <- p (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Gradients and states are float32 or wider; t is counted per parameter, so a parameter without gradient stands still.
On a GPU one library kernel does it all; counter and learning rate may lie on the device there, for CUDA graphs.

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
    lr: float | Tensor,
    lr_on_device: Tensor | None = None,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step in place on `masters` and `states`; gradients are only read.

    lr_on_device: the same as `lr`, float32 where the masters lie; lets a GPU read it there.
    """
    # One launch where the counters lie on the device.
    torch._foreach_add_([state["step"] for state in states], 1)
    if lr_on_device is not None and all(map(_fusable, masters, gradients, states)):
        _fused(masters, gradients, states, lr=lr_on_device, betas=betas, eps=eps, weight_decay=weight_decay)
    else:
        _foreach(masters, gradients, states, lr=float(lr), betas=betas, eps=eps, weight_decay=weight_decay)


def _foreach(
    masters: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    first = [state["exp_avg"] for state in states]
    second = [state["exp_avg_sq"] for state in states]
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


def _fusable(master: Tensor, gradient: Tensor, state: dict[str, Any]) -> bool:
    tensors = (master, gradient, state["exp_avg"], state["exp_avg_sq"])
    return all(
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_cuda
        and tensor.device == master.device
        and tensor.dtype == torch.float32
        and tensor.stride() == master.stride()
        and _is_dense(tensor)
        for tensor in tensors
    )


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap, in some order of the dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _fused(
    masters: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[dict[str, Any]],
    *,
    lr: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    alike: dict[tuple[torch.device, float], list[int]] = {}
    for number, (master, state) in enumerate(zip(masters, states, strict=True)):
        step = -1.0 if state["step"].is_cuda else float(state["step"])
        alike.setdefault((master.device, step), []).append(number)
    for (device, step), members in alike.items():
        if step < 0:
            steps = [states[number]["step"] for number in members]
        else:
            steps = [torch.full((), step, device=device)] * len(members)
        torch._fused_adamw_(
            [masters[number] for number in members],
            [gradients[number] for number in members],
            [states[number]["exp_avg"] for number in members],
            [states[number]["exp_avg_sq"] for number in members],
            [],
            steps,
            lr=lr.to(device),
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
