"""Launches that overlap with the end of the kernel before them (programmatic dependent launch, compute capability 9.0).

A kernel launched with `overlapping(device)` may be placed on the chip while the previous kernel of its stream still
runs: when every program of that kernel has called `gdc_launch_dependents` or ended. It calls `gdc_wait` before its
first access to device memory, which returns when everything the previous kernel wrote is there. What is saved is the
time between two kernels, about a microsecond, inside a CUDA graph too. A previous or next kernel that knows nothing of
this loses nothing.

Kernels take the constant OVERLAP and call the two instructions only when it is true: there are none before Hopper, and
none in the interpreter.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from perilune.kernels.triton_support import INTERPRETED

__all__ = ["overlapping"]


@lru_cache(maxsize=16)
def overlapping(device: torch.device) -> dict[str, Any]:
    """Keyword arguments of a launch: the constant OVERLAP, and the launch attribute where the chip has it."""
    if INTERPRETED or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}
