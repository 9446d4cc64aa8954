"""What the Triton kernels of this folder share: tiles of Q, K and V by the copy engine, logits, borders of documents.

A tensor [B, T, heads, width] is read in tiles of one head, PART channels at a time: heads of 192 are three parts, and
nothing is padded to 256. What lies outside the tensor, in tokens or channels, is read as 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# In 16-bit types the 128 bytes that the operands of the tensor cores are swizzled over.
PART = 64


def described(x: Tensor, rows: int, part: int) -> TensorDescriptor:
    """x [B, T, H, D] for copies of `rows` tokens of one head, `part` channels at a time."""
    size = x.element_size()
    strides = list(x.stride())
    for axis in range(3):  # the stride of an axis of length 1 means nothing, and may be anything
        if x.shape[axis] == 1:
            strides[axis] = x.shape[3]
    if strides[3] != 1 or any(stride <= 0 or stride * size % 16 for stride in strides[:3]) or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = list(x.stride())
    batch, length, heads, width = x.shape
    # Heads before tokens: only leading axes of length 1 vanish without leaving the shared memory.
    strides = [strides[0], strides[2], strides[1], strides[3]]
    return TensorDescriptor(x, [batch, heads, length, width], strides, [1, 1, rows, part])


def borders_on(device: torch.device, cu_seqlens: Tensor | None) -> Tensor | None:
    """cu_seqlens as a kernel reads it. Its values are not checked: that would wait for the device."""
    if cu_seqlens is None:
        return None
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} with shape {tuple(cu_seqlens.shape)!r}, expected int32 or int64 [N + 1]"
        )
    return cu_seqlens.to(device).contiguous()


@triton.jit
def load_part(x, batch, first, head, part, ROWS: tl.constexpr, PART: tl.constexpr):
    """[ROWS, PART] of one head of a described tensor, from token `first` on."""
    return x.load([batch, head, first, part * PART]).reshape(ROWS, PART)


@triton.jit
def load_parts(x, batch, first, head, ROWS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr):
    """All parts of a tile; those beyond PARTS repeat the first and are not used."""
    x0 = load_part(x, batch, first, head, 0, ROWS, PART)
    x1, x2, x3 = x0, x0, x0
    if PARTS > 1:
        x1 = load_part(x, batch, first, head, 1, ROWS, PART)
    if PARTS > 2:
        x2 = load_part(x, batch, first, head, 2, ROWS, PART)
    if PARTS > 3:
        x3 = load_part(x, batch, first, head, 3, ROWS, PART)
    return x0, x1, x2, x3


@triton.jit
def products(x0, x1, x2, x3, y0, y1, y2, y3, PARTS: tl.constexpr, HOW: tl.constexpr):
    """X Y^T over all parts, in float32."""
    s = tl.dot(x0, y0.T, input_precision=HOW)
    if PARTS > 1:
        s = tl.dot(x1, y1.T, s, input_precision=HOW)
    if PARTS > 2:
        s = tl.dot(x2, y2.T, s, input_precision=HOW)
    if PARTS > 3:
        s = tl.dot(x3, y3.T, s, input_precision=HOW)
    return s


@triton.jit
def logits_of_parts(
    q0,
    q1,
    q2,
    q3,
    k,
    batch,
    first,
    head,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    HOW: tl.constexpr,
):
    """[rows, COLUMNS] of Q K^T for the keys from `first` on."""
    k0, k1, k2, k3 = load_parts(k, batch, first, head, COLUMNS, PART, PARTS)
    return products(q0, q1, q2, q3, k0, k1, k2, k3, PARTS, HOW)


@triton.jit
def document_of(token, cu_seqlens, num_documents, search_steps):
    """First token of each token's document and the first token behind it, by binary search. Empty documents hold none.

    search_steps: at least the number of bits of num_documents.
    """
    low = token * 0
    high = low + num_documents
    for _ in range(search_steps):
        middle = (low + high) // 2
        before = tl.load(cu_seqlens + middle) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return tl.load(cu_seqlens + low).to(tl.int32), tl.load(cu_seqlens + low + 1).to(tl.int32)
