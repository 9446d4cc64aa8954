"""Float32 products of training and of prompts on AMD's processors by oneDNN: AVX-512, where MKL keeps to AVX2.

    with fast_products(device):
        loss.backward()

On an EPYC with AVX-512 a product of 1,024 x 256 x 704 does 238 in place of 106 GFLOP/s on one core, with float32's
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

import torch

FINE = 1.0 + 2.0**-12
"""1 in bfloat16, itself in float32, and half of what TF32 can tell."""
TRIED = ((64, 64, 64), (37, 256, 704), (1024, 256, 256), (1024, 704, 256))


@contextmanager
def fast_products(device: torch.device | str, *, bits_matter: bool = False) -> Iterator[None]:
    """For code that trains in shapes which come again. `bits_matter`: products are to be those of code outside."""
    if bits_matter or torch.device(device).type != "cpu" or not onednn_is_ahead():
        yield
        return
    with by_onednn():
        yield


@cache
def onednn_is_ahead() -> bool:
    """Whether oneDNN computes faster here, and as exactly."""
    return _is_amd() and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_exact()


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
    """On while anybody wants it; then what it was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted = 0
        self._before = "none"

    def on(self) -> None:
        with self._lock:
            if not self._wanted:
                self._before = torch.backends.mkldnn.matmul.fp32_precision
                torch.backends.mkldnn.matmul.fp32_precision = "bf16"
            self._wanted += 1

    def off(self) -> None:
        with self._lock:
            self._wanted -= 1
            if not self._wanted:
                torch.backends.mkldnn.matmul.fp32_precision = self._before


_SWITCH = _Switch()


@contextmanager
def by_onednn() -> Iterator[None]:
    """Whatever the processor: for measurements, and to see whether it is exact."""
    _SWITCH.on()
    try:
        yield
    finally:
        _SWITCH.off()
