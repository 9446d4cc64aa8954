"""What an MLA layer remembers of new tokens, written to its pool of latents in one launch: CUDA, inference.

    row = [RMSNorm(c) ; k_r]        of the product [c ; k_r] = W_kva x, with R numbers in c

In plain torch this is a copy of c out of the wider product, a norm, a concatenation and a copy to scattered rows.
Without rotation: k_r is written as it is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from perilune.kernels.launch import launch


@triton.jit
def _write_kernel(
    product, weight, pool, rows, product_stride, pool_stride, eps,
    RANK: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr, SHARED_BLOCK: tl.constexpr,
):  # fmt: skip
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    source = product + token * product_stride
    target = pool + tl.load(rows + token).to(tl.int64) * pool_stride
    column = tl.arange(0, BLOCK)
    latent = tl.load(source + column, mask=column < RANK, other=0.0).to(tl.float32)
    gain = tl.load(weight + column, mask=column < RANK, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(latent * latent, axis=0) / RANK + eps)
    tl.store(target + column, (latent * inverse_rms * gain).to(pool.dtype.element_ty), mask=column < RANK)
    if SHARED > 0:
        other = tl.arange(0, SHARED_BLOCK)
        key = tl.load(source + RANK + other, mask=other < SHARED, other=0.0)
        tl.store(target + RANK + other, key.to(pool.dtype.element_ty), mask=other < SHARED)


@torch.no_grad()
def write_latents(product: Tensor, weight: Tensor, eps: float, pool: Tensor, rows: Tensor) -> None:
    """pool[rows[t]] = [RMSNorm(product[t, :R]) ; product[t, R:]] for all T tokens; nothing is checked.

    product [T, R + rope] with unit stride over its columns, weight [R], pool [.., R + rope], rows [T] int64.
    """
    rank = weight.shape[0]
    shared = product.shape[1] - rank
    block = triton.next_power_of_2(rank)
    launch(
        _write_kernel, product.shape[0],
        (product, weight, pool, rows, product.stride(0), pool.stride(0), eps),
        ("write_latents", rank, shared),
        {"RANK": rank, "SHARED": shared, "BLOCK": block, "SHARED_BLOCK": triton.next_power_of_2(max(shared, 1)),
         "num_warps": max(1, min(8, block // 128))},
    )  # fmt: skip
