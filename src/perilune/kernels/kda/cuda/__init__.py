"""Kernels of KDA in CUDA C++, compiled at run time by the NVRTC that torch brings along: where Triton costs most.

    prepare.cu     gates, products inside a chunk, their inverse, operands of the scans (triton_chunk.py)
    signals.cu     what the gradients of the writes say inside a chunk (chunk_signals of triton_gradients.py)
    gradients.cu   gradients of q, k, gate and beta (chunk_gradients and gate_gradients of triton_gradients.py)

The Triton kernels define them and stay where these cannot run. Operands stay in registers in the layout of the tensor
cores, so a chunk takes about half of the instructions. Tests run these sources on the CPU (tests/kernels/emulator.h).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.cuda_source import INSTRUCTIONS, compile_source, start, why_not_cuda_source

CHUNK, THREADS = 64, 128
WIDTHS = (64, 128)
GATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADERS = ("fragments.cuh", "gates.cuh")
EXCHANGE = 16 * 32 * 16  # operands on their way between warps


def why_not_cuda(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, *, x: torch.dtype, l2norm: bool
) -> str | None:
    """The reason why these kernels cannot run, or None. x: dtype of the gate's input."""
    if not l2norm:
        return "these kernels invert in float16, whose range only products of normalised keys keep"
    if x not in GATE_DTYPES:
        return f"these kernels take a gate's input in {GATE_DTYPES}, not {x}"
    if dtype != torch.bfloat16:
        return f"these kernels take bfloat16, not {dtype}"
    if key_dim not in WIDTHS or value_dim not in WIDTHS:
        return f"these kernels take K and V in {WIDTHS}, got {key_dim} and {value_dim}"
    return why_not_cuda_source(device)


def source(
    name: str, key_dim: int, value_dim: int, *, gate: int = 0, x: torch.dtype = torch.float32, known: int = 0
) -> str:
    """gate: as in triton.py, x: dtype of the gate's input, known: A and the norms are inputs of `prepare`."""
    defines = {
        "K": key_dim, "V": value_dim, "GATE": gate, "KNOWN": known,
        "X": "float" if x == torch.float32 else "u16", "X_HALF": int(x == torch.float16),
    }  # fmt: skip
    folder = Path(__file__).parent
    files = [INSTRUCTIONS, *(folder / file for file in (*HEADERS, f"{name}.cu"))]
    lines = [f"#define {key} {value}" for key, value in defines.items()]
    return "\n".join([*lines, *(file.read_text(encoding="utf-8") for file in files)])


def shared_memory(name: str, key_dim: int, value_dim: int, *, known: int = 0) -> int:
    """Bytes, as the kernels lay them out."""
    if name == "prepare":
        tiles = CHUNK * (max(key_dim, value_dim) + 2 * key_dim) * 2
        return tiles + 12 * key_dim * 4 + 3 * CHUNK * 4 + (0 if known else EXCHANGE)
    if name == "signals":
        return CHUNK * (3 * value_dim + CHUNK) * 2
    tiles = (3 * CHUNK + 2 * 16) * value_dim * 2
    return tiles + EXCHANGE + 14 * key_dim * 4 + 128 * 4 + CHUNK * 32


def launch(
    name: str,
    num_programs: int,
    arguments: Sequence[Tensor | int | float],
    key_dim: int,
    value_dim: int,
    **options: Any,
) -> None:
    """Start `num_programs` CTAs on the current stream. Pointers, ints and doubles, as the kernel declares them."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    function, shared, formats, _ = _kernel(name, first.device, key_dim, value_dim, **options)
    if not formats:
        codes = ("P" if isinstance(x, Tensor) else "d" if isinstance(x, float) else "i" for x in arguments)
        formats.append(struct.Struct("@" + "".join(codes)))
    packed = formats[0].pack(*(x.data_ptr() if isinstance(x, Tensor) else x for x in arguments))
    start(function, num_programs, THREADS, shared, first.device, packed)


def compile_together(
    kernels: Sequence[tuple[str, dict[str, Any]]], device: torch.device, key_dim: int, value_dim: int
) -> None:
    """Compile kernels, with their options as `launch` will give them, side by side: each takes a second or two."""
    missing = [
        (name, options)
        for name, options in kernels
        if (name, device, key_dim, value_dim, *options.items()) not in _built
    ]
    if not missing:
        return
    with ThreadPoolExecutor(len(missing)) as pool:
        list(pool.map(lambda each: _kernel(each[0], device, key_dim, value_dim, **each[1]), missing))


class _Kernel(NamedTuple):
    function: Any
    shared: int
    formats: list[struct.Struct]  # of the arguments, once they are known
    owner: Any  # its module is unloaded with it


_built: dict[tuple[Any, ...], _Kernel] = {}


def _kernel(name: str, device: torch.device, key_dim: int, value_dim: int, **options: Any) -> _Kernel:
    key = (name, device, key_dim, value_dim, *options.items())
    if key not in _built:
        shared = shared_memory(name, key_dim, value_dim, known=options.get("known", 0))
        text = source(name, key_dim, value_dim, **options)
        kernel = compile_source(text, f"kda_{name}", device, shared_memory=shared)
        # Of two threads that compile the same, both use what the first has kept.
        return _built.setdefault(key, _Kernel(kernel.func, shared, [], kernel))
    return _built[key]
