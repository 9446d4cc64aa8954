"""Losses of a chunk of logits, and their gradient in the same memory.

    loss_t = logsumexp_v z_tv - z_t,target        dz_tv = softmax_v(z_t)_v - [v = target]        both 0 for IGNORED

A program owns one row of logits. A row of up to ONE_BLOCK is held in registers and read once; a longer one is walked
over twice, and the second walk finds it in the second-level cache.

The products around it stay with the library, in half precision with float32 sums: logits into one buffer that all
chunks share, dh per chunk, dW summed over chunks in float32.

Shape letters: N tokens, V vocabulary, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.cross_entropy.dense import IGNORED
from perilune.kernels.launch import device_of
from perilune.kernels.operator import operator
from perilune.kernels.triton_activations import power_of_two

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

CHUNK_ELEMENTS = 2**28
"""Logits per chunk: 512 MiB in bfloat16. Smaller chunks read and write dW more often: with 32,768 tokens, width 1,024
and a vocabulary of 32,768 on an H200, 2^27 take 11.3 ms, 2^28 11.0, 2^29 10.7."""
MIN_CHUNK_ROWS = 1024
"""The matrix products need this many rows to run at full speed, however large the vocabulary."""

ONE_BLOCK = 16384
BLOCK, WARPS = 16384, 16
SCALE_BLOCK = 4096


@triton.jit
def _losses_kernel(logits, targets, losses, vocabulary, stride, IGNORED: tl.constexpr, WRITE_GRADIENT: tl.constexpr,
                   ONE_PASS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    target = tl.load(targets + row)
    counts = target != IGNORED
    # Read before the sums, in which all warps meet: the row is overwritten after them. A target outside of the
    # vocabulary makes the loss NaN: nothing beside the row is read, and nobody trains on it unnoticed.
    exists = (target >= 0) & (target < vocabulary)
    at_target = tl.load(logits + target, mask=exists, other=float("nan")).to(tl.float32)
    column = tl.arange(0, BLOCK)
    z = tl.load(logits + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    largest = tl.max(z, axis=0)
    power = power_of_two(z * LOG2E - largest * LOG2E)
    total = tl.sum(power, axis=0)
    if not ONE_PASS:
        for first in range(BLOCK, vocabulary, BLOCK):
            z = tl.load(logits + first + column, mask=first + column < vocabulary, other=float("-inf")).to(tl.float32)
            larger = tl.maximum(largest, tl.max(z, axis=0))
            power = power_of_two(z * LOG2E - larger * LOG2E)
            total = total * power_of_two((largest - larger) * LOG2E) + tl.sum(power, axis=0)
            largest = larger
    tl.store(losses + row, tl.where(counts, largest + tl.log(total) - at_target, 0.0))
    if WRITE_GRADIENT:
        factor = tl.where(counts, 1.0 / total, 0.0)
        one = tl.where(counts, 1.0, 0.0)
        if ONE_PASS:
            dz = power * factor - tl.where(column == target, one, 0.0)
            tl.store(logits + column, dz.to(logits.dtype.element_ty), mask=column < vocabulary)
        else:
            for first in range(0, vocabulary, BLOCK):
                mask = first + column < vocabulary
                z = tl.load(logits + first + column, mask=mask, other=float("-inf")).to(tl.float32)
                power = power_of_two(z * LOG2E - largest * LOG2E)
                dz = power * factor - tl.where(first + column == target, one, 0.0)
                tl.store(logits + first + column, dz.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def _scale_kernel(x, factor, y, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=place < size)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x times a number that is on the device. (torch's own product with a tensor of one element reads no vectors.)"""
    y = torch.empty_like(x)
    if x.numel():
        with device_of(x):
            _scale_kernel[(triton.cdiv(x.numel(), SCALE_BLOCK),)](
                x, factor, y, x.numel(), BLOCK=SCALE_BLOCK, num_warps=4
            )
    return y


def losses_and_gradient_(logits_NV: Tensor, targets_N: Tensor, *, write_gradient: bool) -> Tensor:
    """Losses [N] in float32; `logits_NV` becomes its own gradient, or stays."""
    num_rows, vocabulary = logits_NV.shape
    losses = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    one_pass = vocabulary <= ONE_BLOCK  # else two walks: less to hold in registers, and other rows run meanwhile
    block = triton.next_power_of_2(vocabulary) if one_pass else BLOCK
    warps = min(32, max(1, block // 1024)) if one_pass else WARPS
    with device_of(logits_NV):
        _losses_kernel[(num_rows,)](
            logits_NV, targets_N, losses, vocabulary, logits_NV.stride(0),
            IGNORED=IGNORED, WRITE_GRADIENT=write_gradient, ONE_PASS=one_pass, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return losses


def _add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in float32 also when the factors are in half precision."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left.to(total.dtype) @ right.to(total.dtype)


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool, chunk_elements: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dhidden, dweight), the gradients for a gradient of 1 (and empty unless wanted)."""
    num_rows, (vocabulary, _) = hidden.shape[0], weight.shape
    hidden, targets = hidden.contiguous(), targets.contiguous()
    used = weight.to(hidden.dtype)
    if chunk_elements is None:
        rows = max(MIN_CHUNK_ROWS, CHUNK_ELEMENTS // vocabulary)
    else:
        rows = max(1, chunk_elements // vocabulary)
    rows = min(rows, num_rows)
    losses = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if needs_grad else hidden.new_empty(0)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else weight.new_empty(0)
    # Rows of 16 bytes times a whole number, so that every row of the buffer can be read in full vectors.
    padded = triton.cdiv(vocabulary, 16) * 16
    buffer = hidden.new_empty(rows, padded)
    for first in range(0, num_rows, rows or 1):
        chunk, chunk_targets = hidden[first : first + rows], targets[first : first + rows]
        logits = buffer[: chunk.shape[0], :vocabulary]
        torch.mm(chunk, used.T, out=logits)
        losses[first : first + rows] = losses_and_gradient_(logits, chunk_targets, write_gradient=needs_grad)
        if needs_grad:
            torch.mm(logits, used, out=grad_hidden[first : first + rows])
            _add_product_(grad_weight, logits.T, chunk)
    return losses.sum(), grad_hidden, grad_weight.to(weight.dtype)


def _backward(grad_loss: Tensor, grad_hidden: Tensor, grad_weight: Tensor) -> tuple[Tensor, Tensor]:
    return scaled(grad_hidden, grad_loss), scaled(grad_weight, grad_loss)


def _fake_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, needs_grad: bool, chunk_elements: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    if needs_grad:
        return loss, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)
    return loss, hidden.new_empty(0), weight.new_empty(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, grad_hidden, grad_weight = output
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.mark_non_differentiable(grad_hidden, grad_weight)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, backward: Callable[..., Any], grad_loss: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    given = (None, None) if grad_loss is None else backward(grad_loss, *ctx.saved_tensors)
    return *given, None, None, None


_linear_cross_entropy = operator(
    "linear_cross_entropy",
    forward=_forward,
    backward=_backward,
    fake_forward=_fake_forward,
    fake_backward=lambda grad_loss, *kept: tuple(x.new_empty(x.shape) for x in kept),
    save=_save,
    gradients=_gradients,
)


def why_not(hidden: Tensor, weight: Tensor, targets: Tensor) -> str | None:
    """Why these inputs cannot take this path where Triton runs, or None."""
    if hidden.dtype not in DTYPES or weight.dtype not in DTYPES:
        return f"it takes float32, bfloat16 and float16, got hidden {hidden.dtype} and weight {weight.dtype}"
    for name, y in (("weight", weight), ("targets", targets)):
        if y.device != hidden.device:
            return f"{name} is on {y.device} and hidden on {hidden.device}"
    return None


def triton_cross_entropy_sum(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, needs_grad: bool, chunk_elements: int | None
) -> Tensor:
    if hidden_ND.dim() != 2 or weight_VD.dim() != 2 or hidden_ND.shape[1] != weight_VD.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden_ND.shape)} and weight {tuple(weight_VD.shape)} do not fit: "
            "expected [N, D] and [V, D]."
        )
    if targets_N.shape != hidden_ND.shape[:1] or targets_N.is_floating_point():
        raise ValueError(
            f"targets are {targets_N.dtype} {tuple(targets_N.shape)}, expected {hidden_ND.shape[0]} integers."
        )
    loss, _, _ = torch.ops.perilune.linear_cross_entropy(hidden_ND, weight_VD, targets_N, needs_grad, chunk_elements)
    return loss
