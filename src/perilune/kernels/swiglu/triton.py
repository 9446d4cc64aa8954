"""silu(gate) * up and its gradient, one pass over memory each. With s = sigmoid(gate):

    h = gate * s * up        dup = dh * gate * s        dgate = dh * up * s * (1 + gate * (1 - s))

Only the input is kept for the backward.

Shape letters: R rows, I width of gate and of up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import device_of, launch
from perilune.kernels.operator import operator
from perilune.kernels.triton_activations import sigmoid

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# A tile of 256 columns wastes little of any usual width (2816 = 11 x 256).
ROWS, BLOCK, WARPS = 8, 256, 4


@triton.jit
def _tile(num_rows, width, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, columns, mask) of this program."""
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row, column, (row < num_rows) & (column < width)


@triton.jit(do_not_specialize=["num_rows"])
def _forward_kernel(gate_up, h, num_rows, width, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask = _tile(num_rows, width, blocks, ROWS, BLOCK)
    place = gate_up + row * (2 * width) + column
    gate = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=mask, other=0.0).to(tl.float32)
    tl.store(h + row * width + column, (gate * sigmoid(gate) * up).to(h.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(dh, gate_up, d_gate_up, num_rows, width, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask = _tile(num_rows, width, blocks, ROWS, BLOCK)
    place = row * (2 * width) + column
    gate = tl.load(gate_up + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + place + width, mask=mask, other=0.0).to(tl.float32)
    d_out = tl.load(dh + row * width + column, mask=mask, other=0.0).to(tl.float32)
    chance = sigmoid(gate)
    active = gate * chance
    d_gate = d_out * up * (chance + active * (1.0 - chance))
    tl.store(d_gate_up + place, d_gate.to(d_gate_up.dtype.element_ty), mask=mask)
    tl.store(d_gate_up + place + width, (d_out * active).to(d_gate_up.dtype.element_ty), mask=mask)


def _grid(gate_up: Tensor) -> tuple[int, int, int]:
    """(rows, width, column blocks)"""
    width = gate_up.shape[-1] // 2
    return (gate_up.numel() // (2 * width) if width else 0), width, triton.cdiv(width, BLOCK)


def _forward(gate_up: Tensor) -> Tensor:
    gate_up = gate_up.contiguous()
    num_rows, width, blocks = _grid(gate_up)
    h = gate_up.new_empty(*gate_up.shape[:-1], width)
    if num_rows:
        launch(
            _forward_kernel, triton.cdiv(num_rows, ROWS) * blocks, (gate_up, h, num_rows, width, blocks), ("swiglu",),
            {"ROWS": ROWS, "BLOCK": BLOCK, "num_warps": WARPS},
        )  # fmt: skip
    return h


def _backward(dh: Tensor, gate_up: Tensor) -> Tensor:
    dh, gate_up = dh.contiguous(), gate_up.contiguous()
    num_rows, width, blocks = _grid(gate_up)
    d_gate_up = torch.empty_like(gate_up)
    if num_rows:
        grid = (triton.cdiv(num_rows, ROWS) * blocks,)
        with device_of(dh):
            _backward_kernel[grid](
                dh, gate_up, d_gate_up, num_rows, width, blocks, ROWS=ROWS, BLOCK=BLOCK, num_warps=WARPS
            )
    return d_gate_up


triton_swiglu = operator(
    "swiglu",
    forward=_forward,
    backward=_backward,
    fake_forward=lambda gate_up: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    fake_backward=lambda dh, gate_up: gate_up.new_empty(gate_up.shape),
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    gradients=lambda ctx, backward, dh: backward(dh, *ctx.saved_tensors),
)


def why_not(gate_up: Tensor) -> str | None:
    """Why this input cannot take this path where Triton runs, or None."""
    return None if gate_up.dtype in DTYPES else f"it takes float32, bfloat16 and float16, got {gate_up.dtype}"
