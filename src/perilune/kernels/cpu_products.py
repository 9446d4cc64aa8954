"""Float32 products of training and of prompts on AMD's processors by oneDNN: AVX-512, where MKL keeps to AVX2.

    with fast_products(device):
        loss.backward()

On an EPYC with AVX-512 a product of 1,024 x 256 x 704 does 237 in place of 107 GFLOP/s on one core, with float32's
rounding (`python benchmarks/cpu_products.py`). torch's switch for that path allows rounding to bfloat16 too, and oneDNN
takes it where the processor has units for it: so it is used only where products of several shapes are seen to be exact.

Decoding does without: oneDNN prepares every new shape for half a millisecond, and caches there grow by a token a step.
The switch is one for the whole process: while one thread has it on, so have the others, which computes the same in
other last bits.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

FINE = 1.0 + 2.0**-12
"""1 in bfloat16, itself in float32, and half of what TF32 can tell."""
TRIED = ((64, 64, 64), (37, 256, 704), (1024, 256, 256), (1024, 704, 256))


@contextmanager
def fast_products(device: torch.device | str, *, bits_matter: bool = False) -> Iterator[None]:
    """For code that trains in shapes which come again. `bits_matter`: products are to be those of code outside."""
    if bits_matter or torch.device(device).type != "cpu" or _is_kept() or not onednn_is_ahead():
        yield
        return
    with by_onednn():
        yield


@cache
def onednn_is_ahead() -> bool:
    """Whether oneDNN computes faster here, and as exactly."""
    return _is_amd() and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_exact()


def _is_kept() -> bool:
    """Whether the switch is to stay as it is: it would allow TF32 to a process that uses CUDA, and what was set through
    old and new interfaces of torch cannot be read, so it could not be set again."""
    try:
        torch.get_float32_matmul_precision()
    except RuntimeError:
        return True
    return torch.cuda.is_initialized()


@cache
def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")[:4096]
    except OSError:
        return False


def _is_exact() -> bool:
    """Sums of FINE are what float32 says, in products of one matrix and of many."""
    try:
        with by_onednn():
            for m, k, n in TRIED:
                a, b = torch.full((m, k), FINE), torch.ones(k, n)
                for found in (a @ b, torch.bmm(a[None], b[None])):
                    if not torch.allclose(found, torch.full_like(found, k * FINE), rtol=1e-6, atol=0):
                        return False
    except (AttributeError, RuntimeError):  # a torch without the switch
        return False
    return True


class _Switch:
    """On while anybody wants it; then what it was before.

    Through torch's old interface, which sets all backends: after the new one, which sets oneDNN's alone, torch refuses
    to say its precision, and torch.compile asks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._before = ("highest", "none", "none")

    def on(self) -> None:
        with self._lock:
            if not self._wanted:
                self._before = (torch.get_float32_matmul_precision(), *(each.fp32_precision for each in _backends()))
                torch.set_float32_matmul_precision("medium")
            self._wanted += 1

    def off(self) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                torch.set_float32_matmul_precision(self._before[0])
                for backend, before in zip(_backends(), self._before[1:], strict=True):
                    backend.fp32_precision = before


def _backends() -> tuple[Any, Any]:
    return torch.backends.mkldnn.matmul, torch.backends.cuda.matmul  # pyrefly: ignore


_SWITCH = _Switch()


@contextmanager
def by_onednn() -> Iterator[None]:
    """Whatever the processor: for measurements, and to see whether it is exact."""
    _SWITCH.on()
    try:
        yield
    finally:
        _SWITCH.off()
