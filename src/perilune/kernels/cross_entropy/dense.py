"""Cross entropy of a linear head in plain torch, for any device and dtype.

Logits are reduced in float32. A chunk's dlogits become dh and dW at once, in the forward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
"""Target value of a position that does not count."""

CHUNK_ELEMENTS = 2**23
"""Logits per chunk: 32 MiB in float32."""


def dense_cross_entropy_sum(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, needs_grad: bool, chunk_elements: int | None
) -> Tensor:
    rows = max(1, (chunk_elements or CHUNK_ELEMENTS) // weight_VD.shape[0])
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, targets_N, needs_grad, rows)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool, rows: int) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        used = weight.to(hidden.dtype)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if needs_grad else None
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        for start in range(0, hidden.shape[0], rows):
            chunk, chunk_targets = hidden[start : start + rows], targets[start : start + rows]
            log_probs = F.log_softmax(F.linear(chunk, used), dim=-1, dtype=wide)
            valid = chunk_targets != IGNORED
            index = torch.where(valid, chunk_targets, 0)[:, None]
            picked = log_probs.gather(1, index)[:, 0]
            loss -= torch.where(valid, picked, 0.0).sum()
            if grad_hidden is not None and grad_weight is not None:
                dlogits = log_probs.exp_()
                dlogits.scatter_add_(1, index, torch.full_like(index, -1, dtype=wide))
                dlogits.mul_(valid[:, None])
                dlogits = dlogits.to(hidden.dtype)
                torch.mm(dlogits, used, out=grad_hidden[start : start + rows])
                if grad_weight.dtype == dlogits.dtype:
                    grad_weight.addmm_(dlogits.T, chunk)
                else:
                    grad_weight += dlogits.T @ chunk
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_loss,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad_loss.to(grad_hidden.dtype),
            grad_weight * grad_loss.to(grad_weight.dtype),
            None,
            None,
            None,
        )
