"""How the kernels of `triton_blocks.py` are launched, and their compilation ahead of use.

Each block of a network has a number of sources and a number of queries of its own, so each takes its own variants of
the kernels. They follow from the sizes of all blocks; when the first opens, all are compiled at once on all cores,
where one after the other would take most of a minute.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import torch
import triton
from triton.runtime.jit import MockTensor

from perilune.kernels.attnres import cuda
from perilune.kernels.attnres.triton_blocks import (
    block_backward,
    block_forward,
    gather_coefficients,
    source_backward,
    source_forward,
)
from perilune.kernels.triton_support import INTERPRETED, num_sms


def power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def mix_warps(block: int) -> int:
    """Eight elements of each source to a thread."""
    return max(1, min(16, block // 256))


@lru_cache(maxsize=256)
def mix_forward_options(width: int, num_sources: int, queries: int, *, gain: bool) -> dict[str, Any]:
    block = power_of_2(width)
    return {
        "WIDTH": width, "BLOCK": block, "NUM_SOURCES": num_sources, "ROWS": power_of_2(num_sources),
        "QUERIES": queries, "GAIN": gain, "num_warps": mix_warps(block),
    }  # fmt: skip


def holds_sources(num_sources: int, width: int) -> bool:
    """Whether registers have room for all sources of a token: 16 numbers of each in a thread."""
    return num_sources <= 9 and power_of_2(width) <= 4096


@lru_cache(maxsize=256)
def mix_backward_options(
    width: int, num_sources: int, queries: int, *, gain: bool, held: bool, first_base: bool
) -> tuple[int, dict[str, Any]]:
    """Programs on a multiprocessor, and the rest."""
    block = power_of_2(width)
    options = {"WIDTH": width, "BLOCK": block, "NUM_SOURCES": num_sources, "GAIN": gain}
    if held:
        # 16 elements of each source to a thread and two programs: on an H200, nine sources of 16,384 x 2,048 take
        # 337 us, 392 us with 8 elements and 388 us without holding them.
        warps = max(1, block // 512)
        return max(1, 8 // warps), options | {"ROWS": power_of_2(num_sources), "num_warps": warps, "maxnreg": 255}
    return max(1, min(8, 8192 // block)), options | {
        "GROUP": 2, "QUERIES": queries, "PARTIAL_ROWS": power_of_2(queries), "FIRST_BASE": first_base,
        "num_warps": max(1, min(16, block // 512)),
    }  # fmt: skip


def source_tokens(num_tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens of a tile of `source_forward`, few enough to give every multiprocessor one.

    On an H200, without the softmax, 16,384 tokens of 1,024 take 37 to 40 us in tiles of 64 and 56 us or more in tiles
    of 32; 2,048 tokens 18 to 21 us in tiles of 16 and 20 to 30 us in tiles of 32.
    """
    return max(16, min(_most_tokens(dtype), power_of_2(num_tokens // num_sms(device) + 1) // 2))


def _most_tokens(dtype: torch.dtype) -> int:
    """As many bytes for float32 as for half precision: small GPUs have 100 KiB of shared memory."""
    return 128 // dtype.itemsize


def source_forward_options(
    width: int, dtype: torch.dtype, sizes: Sequence[int], all_queries: int, num_sources: int, tokens: int, *,
    added: bool,
) -> dict[str, Any]:  # fmt: skip
    """sizes: of this and later blocks."""
    queries = sum(sizes)
    return {
        "WIDTH": width, "QUERIES": queries, "START": all_queries - queries, "TOTAL": all_queries, "SIZE": sizes[0],
        "OLD_SOURCES": num_sources - 1, "TOKENS": tokens,
        "COLUMNS": 128 if tokens == 16 and dtype != torch.float32 else 64,
        "QUERY_BLOCK": max(16, power_of_2(queries)), "ADD": added, "SPLIT": dtype != torch.float32, "num_warps": 4,
        "num_stages": 3,
    }  # fmt: skip


def block_forward_options(width: int, num_sources: int, size: int) -> dict[str, Any]:
    block = power_of_2(width)
    # From five sources on, 16 elements of each to a thread: for eight of 2,048, 274 us instead of 320 us on an H200.
    warps = mix_warps(block) if num_sources <= 4 else max(1, mix_warps(block) // 2)
    return {
        "WIDTH": width, "BLOCK": block, "NUM_SOURCES": num_sources, "ROWS": power_of_2(num_sources), "QUERIES": size,
        "MIXES": size if num_sources > 1 else 1, "num_warps": warps,
    }  # fmt: skip


def block_backward_options(
    width: int, num_sources: int, size: int, all_queries: int, *, accumulates: bool
) -> tuple[int, dict[str, Any]]:
    """Programs on a multiprocessor, and the rest.

    More sources at a time take fewer instructions, but registers that other programs then lack. On an H200, four of
    16,384 x 1,024 take 244 us four at a time and 260 us two at a time, eight 487 us and 453 us.
    """
    block = power_of_2(width)
    group = power_of_2(num_sources) if num_sources <= 4 else 2
    registers = 96 if group == 1 else 128
    warps = mix_warps(block)
    return max(1, min(16, 65536 // (32 * warps * registers))), {
        "WIDTH": width, "BLOCK": block, "NUM_SOURCES": num_sources, "GROUP": group, "QUERIES": size,
        "TOTAL": all_queries, "ACCUMULATE": accumulates, "num_warps": warps, "maxnreg": registers,
    }  # fmt: skip


def source_backward_options(
    width: int, dtype: torch.dtype, queries: int, num_tokens: int, device: torch.device
) -> tuple[tuple[int, int], int, dict[str, Any]]:
    """Grid (column blocks, shares of the tokens), tokens of a share, and the rest.

    On an H200, 16,384 tokens of 1,024 take 40 to 44 us in tiles of 64 tokens with two programs on a multiprocessor,
    43 to 47 us in tiles of 32 with four.
    """
    column_blocks = triton.cdiv(width, 64)
    shares = max(1, min(triton.cdiv(num_tokens, 64), triton.cdiv(2 * num_sms(device), column_blocks)))
    tokens_per_share = triton.cdiv(triton.cdiv(num_tokens, shares), 64) * 64
    query_block = max(16, power_of_2(queries))
    return (column_blocks, triton.cdiv(num_tokens, tokens_per_share)), tokens_per_share, {
        "WIDTH": width, "TOKENS": _most_tokens(dtype), "COLUMNS": 64, "QUERY_BLOCK": query_block,
        "num_warps": 4, "num_stages": 3,
    }  # fmt: skip


def gather_options(queries: int, parts: int) -> dict[str, Any]:
    return {"TOKENS": 32, "QUERY_BLOCK": max(16, power_of_2(queries)), "PARTS": parts, "num_warps": 4}


@lru_cache(maxsize=64)
def compile_ahead(width: int, dtype: torch.dtype, sizes: tuple[int, ...], tokens: int, device: torch.device) -> None:
    """Compile the kernels of all blocks of a network with these sizes, the output's last."""
    if INTERPRETED or device.type != "cuda":
        return
    x, f = MockTensor(dtype), MockTensor(torch.float32)
    num_tokens = 1024 * tokens  # some number: only its size class goes into the compiled kernel
    jobs: dict[str, Callable[[], Any]] = {}

    def add(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        name = f"{kernel.__name__} {sorted(options.items())}"
        jobs.setdefault(name, partial(kernel.warmup, *arguments, grid=(1,), **options))

    all_queries = sum(sizes)
    for index, size in enumerate(sizes):
        n, later = index + 1, sizes[index:]
        # Blocks of one sublayer have nothing to add: their sum is the output of that sublayer.
        added = index > 0 and sizes[index - 1] > 1
        options = source_forward_options(width, dtype, later, all_queries, n, tokens, added=added)
        add(source_forward, (x, x, x, x, x, f, (f,) * n, (f,) * size, f, num_tokens, 0.5), options)
        options = block_forward_options(width, n, size)
        add(block_forward, ((x,) * n, f, (x,) * options["MIXES"], f, f, 0.5), options)
        if cuda.why_not_cuda(device, dtype, torch.float32, width, n, size) is None:
            ctas = cuda.ctas(width, n)
            jobs.setdefault(f"block_backward {size} {ctas}", partial(cuda.compiled, width, size, ctas, device))
        else:
            last = index == len(sizes) - 1
            _, options = block_backward_options(width, n, size, all_queries, accumulates=not last)
            pointers = ((x,) * n, (f,) * n, f, (x,) * size, (f,) * size, f, f, x, x, (f,) * n, f)
            add(block_backward, (*pointers, num_tokens, num_tokens * width), options)
        _, share, options = source_backward_options(width, dtype, sum(later), num_tokens, device)
        add(source_backward, (x, x, x, x, x, f, num_tokens, share, sum(later)), options)
        add(gather_coefficients, ((f,) * len(later), later, x, num_tokens), gather_options(sum(later), len(later)))

    def compile_one(job: Callable[[], Any]) -> None:
        # What cannot be compiled ahead is compiled at its launch, and reported there.
        with suppress(Exception), torch.cuda.device(device):
            job()

    with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1)) as pool:
        list(pool.map(compile_one, jobs.values()))
