"""`block_backward` of `triton_blocks.py` in CUDA C++, compiled at run time by torch's NVRTC.

The products of one token's gradients with its sources are too small for a matrix product in Triton, and without the
tensor cores the instructions take twice as long as the memory traffic. The Triton kernel defines what is computed and
stays where this one cannot run. On an H200, eight sources of 16,384 x 1,024 take 344 us, 453 us in Triton; of 2,048
columns 637 us and 951 us. (The same for `block_forward` was slower than Triton, whose instructions fit there.)

Tests run the same source on the CPU (tests/kernels/emulator.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.cuda_source import INSTRUCTIONS, compile_source, start, why_not_cuda_source
from perilune.kernels.triton_support import num_sms

MAX_SOURCES, MAX_QUERIES = 8, 7
POINTERS = ("weight", "kept", "norm", "prior", "grad", "partial")


@cache
def why_not_cuda(
    device: torch.device, dtype: torch.dtype, weight_dtype: torch.dtype, width: int, num_sources: int, queries: int
) -> str | None:
    """The reason why this kernel cannot run, or None."""
    if dtype != torch.bfloat16 or weight_dtype != torch.float32:
        return f"this kernel takes bfloat16 and a weight in float32, not {dtype} and {weight_dtype}"
    if width % 256 or not 1024 <= width <= 4096:
        return f"this kernel takes multiples of 256 from 1,024 to 4,096 as width, got {width}"
    if num_sources > MAX_SOURCES or queries > MAX_QUERIES:
        return f"this kernel takes up to {MAX_SOURCES} sources and {MAX_QUERIES} queries"
    return why_not_cuda_source(device)


def takes(rows: Sequence[Tensor], weight: Tensor, num_sources: int, queries: int) -> bool:
    """Whether the kernel takes these rows [..., width] of `num_sources` sources and of gradients."""
    first = rows[0]
    reason = why_not_cuda(first.device, first.dtype, weight.dtype, first.shape[-1], num_sources, queries)
    return reason is None and all([x.data_ptr() % 16 == 0 for x in (*rows, weight)])


def ctas(width: int, num_sources: int) -> int:
    """CTAs of width / 256 warps on a multiprocessor.

    On an H200, 1,024 columns: 3 are faster than 4, for 1, 4 and 8 sources. 2,048 columns: 2 for 4 sources (416 us
    against 448), 1 for 8 (637 us against 756). Other widths are not measured.
    """
    if width <= 1024:
        return 3
    return 2 if width <= 2048 and num_sources <= 5 else 1


def source(width: int, queries: int, num_ctas: int) -> str:
    folder = Path(__file__).parent
    files = (INSTRUCTIONS, folder / "block_backward.cu")
    defines = {"WIDTH": width, "QUERIES": queries, "CTAS": num_ctas}
    return "\n".join(
        [*(f"#define {key} {value}" for key, value in defines.items()), *(x.read_text(encoding="utf-8") for x in files)]
    )


def shared_memory(width: int, queries: int) -> int:
    """Bytes, as the kernel lays them out."""
    return 4 * width + 4 * (66 * (width // 256) + 2 * (17 * queries + 9))


@cache
def _arguments_type(queries: int) -> Any:
    """`Gradients` of the kernel."""
    lists = [("sources", 8), ("scores", 8), ("coefficients", 8), ("grads", queries), ("bases", queries)]
    fields: list[tuple[str, Any]] = [(name, ctypes.c_void_p * length) for name, length in lists]
    fields += [(name, ctypes.c_void_p) for name in POINTERS]
    fields += [("bank_stride", ctypes.c_longlong)]
    fields += [(name, ctypes.c_int) for name in ("num_tokens", "num_sources", "total", "programs")]
    return type("Gradients", (ctypes.Structure,), {"_fields_": fields})


def arguments(
    sources: Sequence[Tensor], scores: Sequence[Tensor], coefficients: Sequence[Tensor], grads: Sequence[Tensor],
    bases: Sequence[Tensor], weight: Tensor, kept: Tensor, norm: Tensor, prior: Tensor | None, grad: Tensor,
    partial: Tensor,
) -> Any:  # fmt: skip
    """All tensors contiguous; bases: of all queries, of which the first is not read; partial [programs, width]."""
    if coefficients[0].dtype != torch.float32:  # as scores, bases and norms: all have the dtype of the queries
        raise TypeError(f"this kernel takes queries in float32, not {coefficients[0].dtype}")
    given = _arguments_type(len(grads))()
    lists = {"sources": sources, "scores": scores, "coefficients": coefficients, "grads": grads, "bases": bases}
    for name, tensors in lists.items():
        into = getattr(given, name)
        for index, x in enumerate(tensors):
            into[index] = x.data_ptr()
    for name, x in zip(POINTERS, (weight, kept, norm, prior, grad, partial), strict=True):
        setattr(given, name, None if x is None else x.data_ptr())
    given.bank_stride, given.num_tokens, given.num_sources = sources[0].numel(), norm.numel(), len(sources)
    given.total, given.programs = scores[0].shape[1] - 1, partial.shape[0]
    return given


def num_programs(num_tokens: int, width: int, num_sources: int, device: torch.device) -> int:
    return min(num_tokens, num_sms(device) * ctas(width, num_sources))


def launch(given: Any, width: int, queries: int, device: torch.device) -> None:
    function = compiled(width, queries, ctas(width, given.num_sources), device).func
    start(function, given.programs, width // 8, shared_memory(width, queries), device, bytes(given))


@cache
def compiled(width: int, queries: int, num_ctas: int, device: torch.device) -> Any:
    text = source(width, queries, num_ctas)
    return compile_source(text, "attnres_block_backward", device, shared_memory=shared_memory(width, queries))
