"""RMSNorm with a sigmoid gate in one pass each way. With n = x / sqrt(mean(x^2) + eps) and s = sigmoid(gate):

    y     = weight * n * s
    dx    = (dn - n * mean(dn * n)) / sqrt(mean(x^2) + eps)          dn = dy * weight * s
    dgate = dy * weight * n * s * (1 - s)        dweight = sum over rows of dy * n * s

The backward recomputes n and s from x and gate; nothing else is kept. A program of the backward takes many rows and
leaves one partial sum of dweight, so the sum is the same every time.

Shape letters: R rows, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import device_of, launch
from perilune.kernels.norm.triton import add_shares
from perilune.kernels.operator import operator
from perilune.kernels.triton_activations import sigmoid
from perilune.kernels.triton_support import num_sms

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_WIDTH = 8192

# Elements of one tile, warps that hold it, tiles in flight. On an H200, 262,144 rows of 128 in bfloat16: forward 0.048
# ms (as with half or twice the tile), backward 0.086, the best of eleven, where memory alone takes 0.047 and 0.078.
FORWARD_TILE, FORWARD_WARPS = 2048, 4
BACKWARD_TILE, BACKWARD_WARPS, BACKWARD_STAGES, PROGRAMS_PER_SM = 2048, 8, 3, 2


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(x, gate, weight, y, num_rows, width, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < width)
    place = row * width + column
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    opening = sigmoid(tl.load(gate + place, mask=mask, other=0.0).to(tl.float32))
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True) / width + eps)
    tl.store(y + place, (value * scale * gain * opening).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(dy, x, gate, weight, dx, dgate, partials, num_rows, width, eps, tiles, ROWS: tl.constexpr,
                     BLOCK: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    column = tl.arange(0, BLOCK)[None, :]
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    d_gain = tl.zeros((ROWS, BLOCK), tl.float32)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)[:, None]
        mask = (row < num_rows) & (column < width)
        place = row * width + column
        value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
        logit = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
        d_out = tl.load(dy + place, mask=mask, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1, keep_dims=True) / width + eps)
        normed = value * scale
        opening = sigmoid(logit)
        d_gated = d_out * normed * opening
        d_gain += d_gated
        d_normed = d_out * opening * gain
        along = tl.sum(d_normed * normed, axis=1, keep_dims=True) / width
        tl.store(dx + place, ((d_normed - normed * along) * scale).to(dx.dtype.element_ty), mask=mask)
        tl.store(dgate + place, (d_gated * gain * (1.0 - opening)).to(dgate.dtype.element_ty), mask=mask)
    total = tl.sum(d_gain, axis=0, keep_dims=True)
    tl.store(partials + tl.program_id(0) * width + column, total, mask=column < width)


def _tile(width: int, elements: int) -> tuple[int, int]:
    """(rows, padded width) of a tile."""
    block = triton.next_power_of_2(width)
    return max(1, elements // block), block


def norm_rows(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The forward alone, for who needs no gradient and knows that all fits."""
    x, gate = x.contiguous(), gate.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    num_rows = x.numel() // width if width else 0
    if num_rows:
        rows, block = _tile(width, FORWARD_TILE)
        launch(
            _forward_kernel, triton.cdiv(num_rows, rows), (x, gate, weight.contiguous(), y, num_rows, width, eps),
            ("gated_norm", rows, block), {"ROWS": rows, "BLOCK": block, "num_warps": FORWARD_WARPS},
        )  # fmt: skip
    return y


def _forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm_rows(x, gate, weight, eps)


def _backward(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dy, x, gate = dy.contiguous(), x.contiguous(), gate.contiguous()
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    width = x.shape[-1]
    num_rows = x.numel() // width if width else 0
    if not num_rows:
        return dx, dgate, torch.zeros_like(weight)
    rows, block = _tile(width, BACKWARD_TILE)
    tiles = triton.cdiv(num_rows, rows)
    # Wider rows than a tile, in float32 and three of them in flight, need more shared memory than an A100 has.
    stages = BACKWARD_STAGES if rows * block <= BACKWARD_TILE else 1
    programs = min(tiles, PROGRAMS_PER_SM * num_sms(x.device))
    partials = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    with device_of(dy):
        _backward_kernel[(programs,)](
            dy, x, gate, weight.contiguous(), dx, dgate, partials, num_rows, width, eps, tiles,
            ROWS=rows, BLOCK=block, STAGES=stages, num_warps=BACKWARD_WARPS,
        )  # fmt: skip
    return dx, dgate, add_shares(partials).to(weight.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, gate, weight, ctx.eps = inputs
    ctx.save_for_backward(x, gate, weight)


triton_gated_rms_norm = operator(
    "gated_rms_norm",
    forward=_forward,
    backward=_backward,
    fake_forward=lambda x, gate, weight, eps: x.new_empty(x.shape),
    fake_backward=lambda dy, x, gate, weight, eps: tuple(y.new_empty(y.shape) for y in (x, gate, weight)),
    save=_save,
    gradients=lambda ctx, backward, dy: (*backward(dy, *ctx.saved_tensors, ctx.eps), None),
)


def why_not(x: Tensor, gate: Tensor, weight: Tensor) -> str | None:
    """Why these inputs cannot take this path where Triton runs, or None."""
    for name, y in (("x", x), ("gate", gate), ("weight", weight)):
        if y.dtype not in DTYPES:
            return f"{name} is {y.dtype}, and it takes float32, bfloat16 and float16"
        if y.device != x.device:
            return f"{name} is on {y.device} and x on {x.device}"
    if x.shape[-1] > MAX_WIDTH:
        return f"rows of {x.shape[-1]} are wider than {MAX_WIDTH}"
    return None
