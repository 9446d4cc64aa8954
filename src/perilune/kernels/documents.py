"""Borders of packed documents: `cu_seqlens` [N + 1] on the device, as checked numbers on the host.

All operators of a step are given the same tensor, so the last answer is kept for tensors on a device: the host waits
for it once per batch instead of once per operator. Host memory is read again each time: that costs nothing, and it may
change without the tensor knowing (a numpy buffer that is filled anew).
"""

import weakref
from itertools import pairwise

from torch import Tensor

_last: tuple[weakref.ref[Tensor], int, tuple[int, ...]] | None = None


def document_borders(cu_seqlens: Tensor, *, batch: int, num_tokens: int) -> tuple[int, ...]:
    """The borders 0 <= ... <= num_tokens of documents packed into one row; ValueError when they are not that."""
    check_borders_shape(cu_seqlens, batch=batch)
    borders = _on_host(cu_seqlens)
    if borders[0] != 0 or borders[-1] != num_tokens or any(stop < start for start, stop in pairwise(borders)):
        raise ValueError(f"cu_seqlens={borders!r} must rise from 0 to T={num_tokens!r} without decreasing")
    return borders


def check_borders_shape(cu_seqlens: Tensor, *, batch: int) -> int:
    """The number of documents. All that can be checked without waiting for a device."""
    if batch != 1:
        raise ValueError(
            f"cu_seqlens needs one packed row, got batch size {batch!r}: reshape the rows to [1, B * T, ...]"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} with shape {tuple(cu_seqlens.shape)!r}, expected integers [N + 1]"
        )
    return cu_seqlens.shape[0] - 1


def _on_host(cu_seqlens: Tensor) -> tuple[int, ...]:
    global _last
    # Inference tensors have no version counter, so a change in place could not be seen.
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():
        return tuple(cu_seqlens.tolist())
    if _last is not None:
        owner, version, borders = _last
        if owner() is cu_seqlens and version == cu_seqlens._version:
            return borders
    borders = tuple(cu_seqlens.tolist())
    _last = (weakref.ref(cu_seqlens), cu_seqlens._version, borders)
    return borders
