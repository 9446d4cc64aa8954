"""What library and chip can do, asked once. Compilers see constants: asking the driver would break their graph."""

from functools import lru_cache

import torch

from perilune.kernels.triton_support import why_not_triton

HOPPER = (9, 0)


@torch.compiler.assume_constant_result
def why_not_triton_on(device: torch.device) -> str | None:
    """Why the Triton kernels of this folder cannot run on the device, or None."""
    return _why_not_triton_on(device)


@torch.compiler.assume_constant_result
def cudnn_version() -> int:
    """91900 for 9.19.0; 0 without cuDNN."""
    return _cudnn_version()


@torch.compiler.assume_constant_result
def capability(device: torch.device) -> tuple[int, int]:
    return _capability(device)


@lru_cache(maxsize=16)
def _why_not_triton_on(device: torch.device) -> str | None:
    if obstacle := why_not_triton(torch.empty(0, device=device)):
        return obstacle
    if device.type == "cuda" and (found := _capability(device)) != HOPPER:
        return f"its kernels were only ever checked on compute capability {HOPPER}, this GPU has {found}"
    return None


@lru_cache(maxsize=1)
def _cudnn_version() -> int:
    return torch.backends.cudnn.version() or 0


@lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
