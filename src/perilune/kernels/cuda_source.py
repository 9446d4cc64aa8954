"""Kernels in CUDA C++, compiled at run time by the NVRTC that torch brings along, launched without detours."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

INSTRUCTIONS = Path(__file__).with_name("cuda_instructions.cuh")  # what sources have in common
# CUDA_ERROR_INVALID_CONTEXT, _INVALID_HANDLE: no device is current in this thread, or another one than the kernel's.
NO_CONTEXT, OTHER_CONTEXT = 201, 400


def why_not_cuda_source(device: torch.device) -> str | None:
    """The reason why sources cannot be compiled for this device, or None. They use instructions from 8.0 on."""
    if device.type != "cuda":
        return f"CUDA kernels run on CUDA, not on {device.type!r}"
    if torch.version.hip is not None:
        return "the CUDA kernels are written in instructions of NVIDIA's GPUs"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the CUDA kernels need compute capability 8.0"
    return None if hasattr(torch.cuda, "_compile_kernel") else f"torch {torch.__version__} cannot compile CUDA sources"


def compile_source(text: str, name: str, device: torch.device, *, shared_memory: int) -> Any:
    """The kernel `name`; keep it, its code is unloaded with it. `.func` is what `start` takes. Any thread may call."""
    with torch.cuda.device(device):
        ensure_context()
        kernel = torch.cuda._compile_kernel(text, name, nvcc_options=["--use_fast_math"])
        kernel.set_shared_memory_config(shared_memory)
    return kernel


def start(
    function: Any, programs: int, threads: int, shared_memory: int, device: torch.device, arguments: bytes
) -> None:
    """Launch on the current stream of `device`. arguments: the parameters' memory, each at a multiple of its own size.

    Any thread may call, with any device current.
    """
    size = ctypes.c_size_t(len(arguments))
    # CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END: all parameters in one block of memory.
    block = ctypes.cast(ctypes.c_char_p(arguments), ctypes.c_void_p)
    extra = (ctypes.c_void_p * 5)(1, block, 2, ctypes.addressof(size), 0)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    given = (function, programs, 1, 1, threads, 1, 1, shared_memory, stream, None, extra)
    error = driver().cuLaunchKernel(*given)
    if error in (NO_CONTEXT, OTHER_CONTEXT):  # nothing was launched; asked only then, since asking takes the host time
        with torch.cuda.device(device):
            ensure_context()
            error = driver().cuLaunchKernel(*given)
    if error:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(error, ctypes.byref(name))
        reason = (name.value or b"unknown").decode()
        raise RuntimeError(f"the launch of a CUDA kernel failed with error {error} of the driver, {reason}")


def ensure_context() -> None:
    """A thread that has not used the GPU yet has no context: nothing to load a kernel into or to launch it in."""
    context = ctypes.c_void_p()
    driver().cuCtxGetCurrent(ctypes.byref(context))
    if not context:
        driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device())
        driver().cuCtxSetCurrent(context)


@cache
def driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
