"""Recording CUDA graphs in a process that goes on working: other threads launch, other engines record.

    with recording(graph, device, memory=pool):
        output = step()

What this promises:
  * recordings of one process come one after the other, whoever makes them (`RECORDING`);
  * they are made on a stream that nobody else has. PyTorch hands out 32 streams in turn: the 33rd is the first again,
    and work that another thread puts on a stream while it is being recorded either ends up in the graph or breaks it;
  * Python collects no garbage meanwhile: an old graph among it would be destroyed by the thread that records, which
    breaks the recording (PyTorch collected before each one until 2.8);
  * after a recording that broke, work goes on. It leaves PyTorch (2.13 too) on the stream of the recording and its
    allocator waiting for the end of it.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

RECORDING = threading.RLock()
_STREAMS: dict[int, torch.cuda.Stream] = {}
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: the default stream, on which other threads work, does not wait for it."""


def stream_of(device: torch.device) -> torch.cuda.Stream:
    """The one stream of recordings on a device. Memory that recordings share is shared on one stream only."""
    number = torch.cuda.current_device() if device.index is None else device.index
    with RECORDING:
        if number not in _STREAMS:
            _STREAMS[number] = _own_stream(number) or torch.cuda.Stream(number)
        return _STREAMS[number]


def _own_stream(device: int) -> torch.cuda.Stream | None:
    """Made by the driver, not taken out of PyTorch's 32; None where that does not work."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # so that this thread has a context
        try:
            code = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(NON_BLOCKING))
        except (OSError, AttributeError):
            return None
    return torch.cuda.ExternalStream(handle.value, device) if code == 0 and handle.value else None


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, device: torch.device, *, memory: Any = None) -> Iterator[None]:
    """`torch.cuda.graph` on a device; `memory` is a graph_pool_handle that recordings may share."""
    memory = torch.cuda.graph_pool_handle() if memory is None else memory
    # A graph records a stream of the current device: what runs on another would run now, and never again. By thread:
    # another one may take memory meanwhile, which would break a recording of all threads.
    with RECORDING, no_collection(), torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            with torch.cuda.graph(graph, pool=memory, stream=stream_of(device), capture_error_mode="thread_local"):
                yield
        except BaseException:
            with suppress(RuntimeError, AttributeError):  # ended already, or another PyTorch
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), memory)
            raise


@contextmanager
def no_collection() -> Iterator[None]:
    """Python's cyclic garbage stays where it is, in all threads."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
