"""One decoding step of attention over a cache: latent (MLA, absorbed, paged) and grouped-query.

`mla_decode` attends with the queries of one new token per sequence over cached latents, which serve as keys (all of
their width) and as values (its first part) of every head; `reference.py` states the meaning. Paths: "reference"
(a loop over sequences), "dense" (plain torch, any device), "triton" (split over the sequence, any widths) and "hopper"
(the same for the widths of the released models on an H100 or H200). The last two are safe in a CUDA graph: the number
of splits comes from shapes, lengths and pages are read on the device, nothing waits for the host.

    o, lse = mla_decode(q, cache, block_table, lengths, latent_dim=512, scale=192**-0.5)

One query token per sequence: several (speculative decoding) are not supported yet.

Shape letters: B sequences, H heads, D = latent_dim + rope width, P pages, S tokens per page, M pages per sequence.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from perilune.kernels.mla_decode.dense import dense_mla_decode
from perilune.kernels.mla_decode.gqa import gqa_decode
from perilune.kernels.mla_decode.reference import reference_mla_decode
from perilune.kernels.operator import is_traced
from perilune.kernels.precision import full_precision
from perilune.kernels.triton_support import INTERPRETED, why_not_triton

__all__ = ["BACKENDS", "gqa_decode", "mla_decode"]

BACKENDS = ("reference", "dense", "triton", "hopper")
HOPPER_WIDTHS = (512, 64)
LARGEST_WIDTH = 640
HALF = (torch.bfloat16, torch.float16)


@torch.no_grad()
@full_precision
def mla_decode(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    latent_dim: int,
    scale: float,
    num_splits: int | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Absorbed MLA attention of one token per sequence over its paged latents.

    q [B, H, D]: queries with W_uk absorbed, latent part first. cache [P, S, D]: latents, then the shared key part.
    block_table [B, M] int32: pages of each sequence in order; entries past its end may hold anything.
    lengths [B] int32: cached tokens of each sequence, from 0 to M * S.
    latent_dim: width of the value, the first part of a cached row. scale: factor on q . c.
    num_splits: shares per sequence of the two kernel paths, at most 256; None chooses from the shapes.
    backend: one of BACKENDS; None takes the fastest that can run.

    Returns o [B, H, latent_dim] in q's dtype (W_uv is applied by the caller) and lse [B, H], the natural log of the
    softmax sum, in float32 (float64 on the torch paths for float64 inputs). Length 0 gives zeros and -inf. Logits and
    sums are float32; the kernels round the softmax weights to the dtype of the cache before the second product. For
    inference: no gradients.
    """
    _check(q, cache, block_table, lengths, latent_dim, num_splits)
    hopper_obstacle = _why_not_hopper(q, cache, block_table, latent_dim)
    triton_obstacle = _why_not_triton(q, cache, block_table)
    if backend is None:
        backend = "dense"
        if q.is_cuda and triton_obstacle is None:
            backend = "triton" if hopper_obstacle else "hopper"
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not a path of mla_decode; expected None or one of {BACKENDS!r}.")
    if backend == "reference":
        return reference_mla_decode(q, cache, block_table, lengths, latent_dim=latent_dim, scale=scale)
    if backend == "dense":
        return dense_mla_decode(q, cache, block_table, lengths, latent_dim=latent_dim, scale=scale)
    obstacle = hopper_obstacle if backend == "hopper" else triton_obstacle
    if obstacle is not None:
        raise ValueError(f"backend={backend!r} cannot run here: {obstacle}; use backend='dense'.")
    from perilune.kernels.mla_decode.triton import mla_decode_op, run_mla_decode

    decode = mla_decode_op if is_traced(q, cache) else run_mla_decode
    return decode(
        q.contiguous(), cache, block_table, lengths.contiguous(), latent_dim, scale, num_splits or 0,
        backend == "hopper",
    )  # fmt: skip


def _why_not_triton(q: Tensor, cache: Tensor, block_table: Tensor) -> str | None:
    if (reason := _why_not_triton_on(q.device)) is not None:
        return reason
    if q.dtype != cache.dtype or q.dtype not in (*HALF, *((torch.float32,) if INTERPRETED else ())):
        return f"q is {q.dtype} and cache {cache.dtype}, expected both bfloat16 or both float16"
    if q.shape[-1] > LARGEST_WIDTH:
        return f"rows of {q.shape[-1]} numbers do not fit into shared memory, expected at most {LARGEST_WIDTH}"
    if not cache.is_contiguous():
        return f"cache with strides {cache.stride()} is not contiguous"
    if block_table.stride(-1) != 1:
        return f"the rows of block_table with strides {block_table.stride()} are not contiguous"
    return None


def _why_not_hopper(q: Tensor, cache: Tensor, block_table: Tensor, latent_dim: int) -> str | None:
    if not q.is_cuda or not _is_hopper(q.device):
        return "it needs a GPU of compute capability 9.0 (H100, H200)"
    if (latent_dim, q.shape[-1] - latent_dim) != HOPPER_WIDTHS:
        return f"widths {latent_dim} + {q.shape[-1] - latent_dim}, expected {HOPPER_WIDTHS[0]} + {HOPPER_WIDTHS[1]}"
    return _why_not_triton(q, cache, block_table)


@torch.compiler.assume_constant_result  # asking the driver would break the graph
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


@torch.compiler.assume_constant_result
def _why_not_triton_on(device: torch.device) -> str | None:
    return _cached_why_not_triton_on(device)


@lru_cache(maxsize=16)
def _cached_why_not_triton_on(device: torch.device) -> str | None:
    return why_not_triton(torch.empty(0, device=device))


def _check(
    q: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, latent_dim: int, num_splits: int | None
) -> None:
    if q.dim() != 3 or cache.dim() != 3 or q.shape[-1] != cache.shape[-1] or cache.shape[1] < 1:
        raise ValueError(
            f"q {tuple(q.shape)} and cache {tuple(cache.shape)} do not fit: expected q [B, H, D], cache [P, S, D]."
        )
    for name, x in (("q", q), ("cache", cache)):
        if not x.is_floating_point():
            raise TypeError(f"{name} has dtype {x.dtype}, expected a floating point dtype.")
    if not 0 < latent_dim <= q.shape[-1]:
        raise ValueError(f"latent_dim={latent_dim!r} must be in 1 .. D, and q has D = {q.shape[-1]}.")
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0] or block_table.dtype != torch.int32:
        raise ValueError(
            f"block_table is {block_table.dtype} {tuple(block_table.shape)}, expected int32 [B, M] "
            f"with B = {q.shape[0]}."
        )
    if tuple(lengths.shape) != (q.shape[0],) or lengths.dtype != torch.int32:
        raise ValueError(f"lengths is {lengths.dtype} {tuple(lengths.shape)}, expected int32 [B] = ({q.shape[0]},).")
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits={num_splits!r} must be at least 1, or None to choose.")
    for name, x in (("cache", cache), ("block_table", block_table), ("lengths", lengths)):
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} but q is on {q.device}; move them to one device.")
