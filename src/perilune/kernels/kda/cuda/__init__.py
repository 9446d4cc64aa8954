"""Kernels of KDA in CUDA C++, compiled at run time by the NVRTC that torch brings along: where Triton costs most.

`prepare` replaces chunk_products, invert_chunks and chunk_operands, `gradients` replaces chunk_gradients; the Triton
kernels define them and stay where these cannot run. Operands stay in registers in the layout of the tensor cores, so a
chunk takes about half of the instructions. Tests run the same source on the CPU (tests/kernels/emulator.h).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CHUNK, THREADS = 64, 128
WIDTHS = (64, 128)


def why_not_cuda(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int) -> str | None:
    """The reason why these kernels cannot run, or None."""
    if device.type != "cuda":
        return f"CUDA kernels run on CUDA, not on {device.type!r}"
    if dtype != torch.bfloat16:
        return f"these kernels take bfloat16, not {dtype}"
    if key_dim not in WIDTHS or value_dim not in WIDTHS:
        return f"these kernels take K and V in {WIDTHS}, got {key_dim} and {value_dim}"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "these kernels need compute capability 8.0"
    return None if hasattr(torch.cuda, "_compile_kernel") else f"torch {torch.__version__} cannot compile CUDA sources"


def source(name: str, key_dim: int, value_dim: int) -> str:
    folder = Path(__file__).parent
    parts = [
        (folder / file).read_text(encoding="utf-8") for file in ("instructions.cuh", "fragments.cuh", f"{name}.cu")
    ]
    return "\n".join([f"#define K {key_dim}", f"#define V {value_dim}", *parts])


def shared_memory(name: str, key_dim: int, value_dim: int) -> int:
    """Bytes, as the kernels lay them out."""
    exchange = 16 * 32 * 16
    if name == "prepare":
        return 3 * CHUNK * (key_dim + 8) * 2 + exchange + 4 * key_dim * 4 + 3 * CHUNK * 4
    tiles = (3 * CHUNK + 2 * 16) * (value_dim + 8) * 2
    return tiles + exchange + 4 * key_dim * 4 + 128 * 4 + key_dim * 4


def launch(
    name: str, num_programs: int, key_dim: int, value_dim: int, arguments: Sequence[Tensor | int | float]
) -> None:
    kernel = _kernel(name, key_dim, value_dim, torch.cuda.current_device())
    shared = shared_memory(name, key_dim, value_dim)
    kernel(grid=(num_programs, 1, 1), block=(THREADS, 1, 1), args=list(arguments), shared_mem=shared)


@lru_cache(maxsize=16)
def _kernel(name: str, key_dim: int, value_dim: int, device_index: int) -> Any:
    text = source(name, key_dim, value_dim)
    kernel = torch.cuda._compile_kernel(text, f"kda_{name}", nvcc_options=["--use_fast_math"])
    kernel.set_shared_memory_config(shared_memory(name, key_dim, value_dim))
    return kernel
