"""Causal attention over packed documents by Triton: forward and backward, exact maximum logits included.

The equations are in `reference.py`, the algorithm is that of `tiled.py` (online softmax, arXiv 2205.14135; weights
recomputed in the backward). What this path adds for documents: a tile of queries finds the borders around it by a
binary search in cu_seqlens on the device, and reads the keys from the start of its first document to its diagonal and
no others. So nothing depends on the number of documents or on the longest of them, no mask is built, the host reads
nothing, and the work is that of the allowed pairs, rounded up to tiles. The running maximum of the online softmax is
the exact maximum of the row, so the largest logit of every head is a by-product.

Gradients are sums in a fixed order, so they repeat bit by bit: one program owns the keys of a tile and runs over the
queries that see them, another owns queries and runs over keys. The weights are computed twice for that, the price of
having no atomics.

Legend: B batch, H query heads, K key heads, T tokens, D width of q and k, V width of v.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from perilune.kernels.attention.machine import why_not_triton_on
from perilune.kernels.attention.packed_kernels import delta_kernel, forward_kernel, keys_kernel, queries_kernel
from perilune.kernels.attention.triton_tiles import PART, borders_on, described
from perilune.kernels.launch import device_of

MIN_WIDTH = 16
MAX_WIDTH = 192
MAX_VALUE_WIDTH = 128

# Queries and keys of a tile, warps, stages of the pipeline: for 16-bit types, and for float32, which is for Triton's
# interpreter. The first are the largest whose sums stay in Hopper's registers; they are checked there, not tuned.
Tiling = tuple[int, int, int, int]
FORWARD: tuple[Tiling, Tiling] = (128, 64, 8, 3), (32, 16, 4, 2)
KEYS: tuple[Tiling, Tiling] = (32, 128, 8, 2), (16, 32, 4, 2)
QUERIES: tuple[Tiling, Tiling] = (128, 64, 8, 2), (32, 16, 4, 2)
DELTA_ROWS = 32


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these inputs cannot take this path, or None."""
    if obstacle := why_not_triton_on(q.device):
        return obstacle
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"q, k, v must all be bfloat16, float16 or float32, got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[1] != k.shape[1]:
        return f"it takes as many queries as keys, got {q.shape[1]} and {k.shape[1]}"
    width, value_width, size = q.shape[3], v.shape[3], q.element_size()
    if not MIN_WIDTH <= width <= MAX_WIDTH or not MIN_WIDTH <= value_width <= MAX_VALUE_WIDTH:
        return f"heads must be {MIN_WIDTH} to {MAX_WIDTH} wide, values to {MAX_VALUE_WIDTH}, got {width}, {value_width}"
    if width * size % 16 or value_width * size % 16:
        return f"the widths must be multiples of 16 bytes, got {width} and {value_width} of {size} bytes"
    return None


def _tiling(table: tuple[Tiling, Tiling], q: Tensor) -> Tiling:
    return table[q.dtype == torch.float32]


def _common(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> dict[str, Any]:
    width = q.shape[3]
    part = min(PART, triton.next_power_of_2(width))
    return {
        "PART": part,
        "PARTS": triton.cdiv(width, part),
        "VALUE": triton.next_power_of_2(v.shape[3]),
        "PACKED": cu_seqlens is not None,
        "HOW": "ieee",
    }


@torch.library.custom_op("perilune::packed_attention", mutates_args=())
def _packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, num_heads, _ = q.shape
    rows, columns, warps, stages = _tiling(FORWARD, q)
    num_tiles = triton.cdiv(length, rows)
    o = q.new_empty(batch, length, num_heads, v.shape[3])
    lse = q.new_empty(batch, num_heads, length, dtype=torch.float32)
    tile_max = q.new_empty(batch, num_heads, num_tiles, dtype=torch.float32)
    if q.numel() == 0:
        return o, lse, tile_max
    common = _common(q, v, cu_seqlens)
    num_documents = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    with device_of(q):
        forward_kernel[(num_tiles, num_heads, batch)](
            described(q, rows, common["PART"]),
            described(k, columns, common["PART"]),
            described(v, columns, common["VALUE"]),
            lse if cu_seqlens is None else cu_seqlens,
            o,
            lse,
            tile_max,
            num_heads // k.shape[2],
            length,
            num_documents,
            num_documents.bit_length(),
            scale,
            v.shape[3],
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
            num_stages=stages,
            **common,
        )
    return o, lse, tile_max


@_packed_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, scale: float):
    batch, length, num_heads, _ = q.shape
    num_tiles = -(-length // _tiling(FORWARD, q)[0])
    return (
        q.new_empty(batch, length, num_heads, v.shape[3]),
        q.new_empty(batch, num_heads, length, dtype=torch.float32),
        q.new_empty(batch, num_heads, num_tiles, dtype=torch.float32),
    )


@torch.library.custom_op("perilune::packed_attention_backward", mutates_args=())
def _packed_attention_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_seqlens: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, num_heads, width = q.shape
    num_key_heads, value_width = v.shape[2:]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    if q.numel() == 0:
        return dq, dk, dv
    common = _common(q, v, cu_seqlens)
    part, value = common["PART"], common["VALUE"]
    grad_o = grad_o.contiguous()
    delta = torch.empty_like(lse)
    num_rows = batch * length * num_heads
    with device_of(q):
        delta_kernel[(triton.cdiv(num_rows, DELTA_ROWS),)](
            grad_o, o, delta, length, num_heads, num_rows, value_width, ROWS=DELTA_ROWS, VALUE=value
        )
    num_documents = 0 if cu_seqlens is None else cu_seqlens.numel() - 1
    borders = lse if cu_seqlens is None else cu_seqlens
    group = num_heads // num_key_heads
    sizes = (length, num_documents, num_documents.bit_length(), scale, width)
    rows, columns, warps, stages = _tiling(KEYS, q)
    with device_of(q):
        keys_kernel[(triton.cdiv(length, columns), num_key_heads, batch)](
            described(q, rows, part),
            described(k, columns, part),
            described(v, columns, value),
            described(grad_o, rows, value),
            borders,
            lse,
            delta,
            dk,
            dv,
            *sizes,
            value_width,
            GROUP=group,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
            num_stages=stages,
            **common,
        )
    rows, columns, warps, stages = _tiling(QUERIES, q)
    with device_of(q):
        queries_kernel[(triton.cdiv(length, rows), num_heads, batch)](
            described(q, rows, part),
            described(k, columns, part),
            described(v, columns, value),
            described(grad_o, rows, value),
            borders,
            lse,
            delta,
            dq,
            group,
            *sizes,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=warps,
            num_stages=stages,
            **common,
        )
    return dq, dk, dv


@_packed_attention_backward.register_fake
def _(grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_seqlens: Tensor | None, scale: float):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _keep(ctx, inputs, output) -> None:
    q, k, v, cu_seqlens, scale = inputs
    o, lse, tile_max = output
    ctx.save_for_backward(q, k, v, o, lse, *(() if cu_seqlens is None else (cu_seqlens,)))
    ctx.scale = scale
    ctx.mark_non_differentiable(lse, tile_max)


def _backward(ctx, grad_o: Tensor, _grad_lse: Tensor | None, _grad_max: Tensor | None):
    q, k, v, o, lse, *borders = ctx.saved_tensors
    cu_seqlens = borders[0] if borders else None
    return *_packed_attention_backward(grad_o, q, k, v, o, lse, cu_seqlens, ctx.scale), None, None


_packed_attention.register_autograd(_backward, setup_context=_keep)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, V] and the detached max_logit [H] (float32)."""
    if obstacle := why_not(q, k, v):
        raise ValueError(f"packed_attention cannot run here: {obstacle}")
    cu_seqlens = borders_on(q.device, cu_seqlens)
    if scale < 0:  # the largest logit is then the smallest product
        q, scale = -q, -scale
    o, _, tile_max = torch.ops.perilune.packed_attention(q, k, v, cu_seqlens, scale)
    if tile_max.numel() == 0:
        return o, tile_max.new_full((q.shape[2],), -math.inf)
    return o, tile_max.detach().amax(dim=(0, 2))
