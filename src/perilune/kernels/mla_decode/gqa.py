"""Grouped-query decoding through the fastest library kernel on the machine: FlashAttention as torch ships it.

On an H200 it reads keys and values at full memory bandwidth; what torch would choose by itself (cuDNN) takes half as
long again. With lengths, the same kernel is entered by its variable-length door, which takes them on the device. Where
it cannot run, torch chooses, with the groups folded: the G = H / Hkv query heads that share a key head become G query
rows of that head. One new token has no causal order among them, so every key is still read once for all G heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from perilune.kernels.precision import full_precision

LARGEST_FLASH_WIDTH = 256


@full_precision
def gqa_decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None = None, *, scale: float | None = None) -> Tensor:
    """One token per sequence: q [B, H, D], k [B, T, Hkv, D], v [B, T, Hkv, Dv] -> o [B, H, Dv]; H a multiple of Hkv.

    lengths [B]: how many of the T cached tokens are real; None: all of them. A sequence of length 0 gives zeros. The
    lengths are read on the device, so the call is safe in a CUDA graph.
    scale: factor on q . k, D ** -0.5 by default.
    """
    _check(q, k, v, lengths)
    batch, num_heads, width = q.shape
    num_tokens, num_kv_heads = k.shape[1:3]
    can_flash = _can_flash(q, k, v)
    if can_flash and lengths is None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            o = F.scaled_dot_product_attention(
                q.unsqueeze(2), k.transpose(1, 2), v.transpose(1, 2), scale=scale, enable_gqa=True
            ).squeeze(2)
    elif can_flash and lengths is not None:
        ends_q = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        o = torch.ops.aten._flash_attention_forward(
            q, k.flatten(0, 1), v.flatten(0, 1), ends_q, ends_q * num_tokens, 1, num_tokens, 0.0, False, False,
            scale=width**-0.5 if scale is None else scale, seqused_k=lengths.int(),
        )[0]  # fmt: skip
    else:
        mask = None
        if lengths is not None:
            mask = (torch.arange(num_tokens, device=k.device) < lengths.unsqueeze(-1))[:, None, None, :]
        grouped = q.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))
        o = F.scaled_dot_product_attention(grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, scale=scale)
        o = o.flatten(1, 2)
    # A row without any key is not zero in every kernel.
    return o if lengths is None else o.masked_fill((lengths == 0)[:, None, None], 0)


def _can_flash(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and k.shape == v.shape
        and k.numel() > 0
        and k.is_contiguous()
        and v.is_contiguous()
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= LARGEST_FLASH_WIDTH
        and _has_flash(q.device)
    )


@torch.compiler.assume_constant_result
def _has_flash(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _check(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> None:
    fits = q.dim() == 3 and k.dim() == 4 and k.shape[:3] == v.shape[:3]
    if not fits or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit: expected q [B, H, D], "
            "k [B, T, Hkv, D], v [B, T, Hkv, Dv]."
        )
    if k.shape[2] == 0 or q.shape[1] % k.shape[2]:
        raise ValueError(f"q has {q.shape[1]} heads and k {k.shape[2]}: the first must be a multiple of the second.")
    if lengths is not None and tuple(lengths.shape) != (q.shape[0],):
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}, expected [B] = ({q.shape[0]},).")
