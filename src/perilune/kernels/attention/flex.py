"""Causal attention over packed documents by torch's compiled FlexAttention (arXiv 2412.05496), CUDA only.

FlexAttention hands out each row's log-sum-exp beside the output at no cost, and each row's largest score at some;
QK-Clip needs the second, or the first with the kernel in `triton.py`. Its block mask is built here from the documents'
borders, block against block: `create_block_mask` would evaluate every pair of tokens.
Scores are kept in base 2 inside the kernel, so `max_logit` may differ from the dense maximum in its last bit.
"""

import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
MIN_WIDTH = 16  # below it the tensor cores' matmul has no shape
MAX_VARIANTS = 1024
MAX_FLOAT32_WIDTH = 128  # above it the tiles of the backward pass do not fit into shared memory (H200, torch 2.11)


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these inputs cannot take this path, or None."""
    if q.device.type != "cuda":
        return f"it runs on CUDA only, and q is on {q.device}"
    if q.dtype == torch.float64:
        return "it has no float64"
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k, v differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[1] != k.shape[1] or q.shape[1] == 0:
        return f"it takes as many queries as keys, at least one, got {q.shape[1]} and {k.shape[1]}"
    if min(q.shape[3], v.shape[3]) < MIN_WIDTH:
        return f"heads must be at least {MIN_WIDTH} wide, got {q.shape[3]} and {v.shape[3]}"
    if q.dtype == torch.float32 and max(q.shape[3], v.shape[3]) > MAX_FLOAT32_WIDTH:
        return f"float32 heads may be at most {MAX_FLOAT32_WIDTH} wide, got {q.shape[3]} and {v.shape[3]}"
    return None


def document_mask(document_T: Tensor) -> BlockMask:
    """Causal mask inside documents, from the (non-decreasing) document number of every token."""
    length = document_T.shape[0]
    num_blocks = -(-length // BLOCK)
    padded = torch.nn.functional.pad(document_T[None], (0, num_blocks * BLOCK - length), mode="replicate")[0]
    first, last = padded[::BLOCK], padded[BLOCK - 1 :: BLOCK]
    row, column = (torch.arange(num_blocks, device=document_T.device).view(shape) for shape in ((-1, 1), (1, -1)))
    visible = (column <= row) & (last[None, :] >= first[:, None])
    full = (column < row) & (first[None, :] == last[:, None])

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Number of chosen blocks per row, and their indices first in each row."""
        indices = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
        return blocks.sum(dim=-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None].contiguous()

    def same_document_and_causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document_T[query] == document_T[key])

    return BlockMask.from_kv_blocks(
        *ordered(visible & ~full),
        *ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=same_document_and_causal,
        seq_lengths=(length, length),
    )


def _document_of_token(cu_seqlens: Tensor | None, length: int, device: torch.device) -> Tensor:
    if cu_seqlens is None:
        return torch.zeros(length, dtype=torch.int64, device=device)
    positions = torch.arange(length, device=device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)


# All layers of a model ask for the mask of the same cu_seqlens: the last one is kept, without keeping cu_seqlens alive.
_last_mask: tuple[weakref.ref[Tensor], int, BlockMask] | None = None


@torch.inference_mode(False)  # a cached inference tensor could never be used in training
def _mask_of(cu_seqlens: Tensor, length: int) -> BlockMask:
    global _last_mask
    if cu_seqlens.is_inference():  # without a version counter, so a change in place could not be seen
        return document_mask(_document_of_token(cu_seqlens, length, cu_seqlens.device))
    if _last_mask is not None:
        owner, version, mask = _last_mask
        if owner() is cu_seqlens and version == cu_seqlens._version and mask.shape[-1] == length:
            return mask
    mask = document_mask(_document_of_token(cu_seqlens, length, cu_seqlens.device))
    _last_mask = (weakref.ref(cu_seqlens), cu_seqlens._version, mask)
    return mask


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _causal_mask(length: int, device: torch.device) -> BlockMask:
    return document_mask(_document_of_token(None, length, device))


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention, fullgraph=True)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, cu_seqlens: Tensor | None, aux: AuxRequest) -> Any:
    options = {"scale": scale, "enable_gqa": q.shape[2] != k.shape[2], "return_aux": aux}
    heads_first = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    if torch.compiler.is_compiling():  # part of the caller's graph; what is kept between calls would break it
        mask = document_mask(_document_of_token(cu_seqlens, q.shape[1], q.device))
        return flex_attention(*heads_first, block_mask=mask, **options)
    mask = _causal_mask(q.shape[1], q.device) if cu_seqlens is None else _mask_of(cu_seqlens, q.shape[1])
    # One compiled function serves every width, dtype, mode and number of heads a process meets; dynamo's default limit
    # of 8 variants would end the process at the ninth.
    with torch._dynamo.config.patch(recompile_limit=MAX_VARIANTS, accumulated_recompile_limit=MAX_VARIANTS):
        return _compiled()(*heads_first, block_mask=mask, **options)


def flex_attention_with_max(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, Dv] and the detached max_logit [H]."""
    o_BHTV, aux = _attend(q, k, v, scale, cu_seqlens, AuxRequest(max_scores=True))
    return o_BHTV.transpose(1, 2), aux.max_scores.detach().amax(dim=(0, 2)).float()


def flex_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o [B, T, H, Dv] and the detached log-sum-exp [B, H, T]."""
    o_BHTV, aux = _attend(q, k, v, scale, cu_seqlens, AuxRequest(lse=True))
    return o_BHTV.transpose(1, 2), aux.lse.detach().float()
