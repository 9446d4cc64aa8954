"""Where Triton kernels can run: on CUDA, and on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1, for tests).

Nothing here imports Triton unless a kernel is about to be used, so that a machine without it works.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import warnings
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

# Triton reads the variable when a kernel is defined; later changes have no effect there, and none here.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")
HAS_TRITON = importlib.util.find_spec("triton") is not None


def why_not_triton(x: Tensor) -> str | None:
    """The reason why no Triton kernel can run on `x`, or None when one can."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install 'perilune[gpu]')"
    if x.device.type == "cuda":
        if INTERPRETED:
            return "TRITON_INTERPRET is set, which moves Triton kernels to the CPU; unset it to use the GPU"
        major, minor = torch.cuda.get_device_capability(x.device)
        if major < 8:
            return f"Triton kernels need compute capability 8.0 or later, this GPU has {major}.{minor}"
        return why_not_assembler() if (major, minor) == (9, 0) else None
    if x.device.type == "cpu" and INTERPRETED:
        return None
    return f"Triton kernels run on CUDA, not on {x.device.type!r} (on CPU only with TRITON_INTERPRET=1, for tests)"


@lru_cache(maxsize=8)
def warn_slow(operator: str, reason: str) -> None:
    """Say once why an operator does without its GPU kernels."""
    warnings.warn(f"{operator} runs without its GPU kernels, many times slower: {reason}", stacklevel=4)


# ptxas 12.8, which Triton 3.6 and 3.7 bring along, may compute the shared memory descriptor of Hopper's matrix
# instruction from a register that was never set (seen with the first operand in registers): wrong results or an illegal
# access. 12.9 is right.
OLDEST_ASSEMBLER = (12, 9)


@torch.compiler.assume_constant_result
def why_not_assembler() -> str | None:
    """Have Triton use an assembler that is right on Hopper; the reason when none is found, else None."""
    return _why_not_assembler()


@lru_cache(maxsize=1)
def _why_not_assembler() -> str | None:
    from triton import knobs

    if _assembler_version(knobs.nvidia.ptxas.path) >= OLDEST_ASSEMBLER:
        return None
    for path in _other_assemblers():
        if _assembler_version(path) >= OLDEST_ASSEMBLER:
            os.environ["TRITON_PTXAS_PATH"] = path
            return None
    return (
        f"Triton's assembler, {knobs.nvidia.ptxas.path}, is older than 12.9 and computes wrong results on Hopper: "
        "install triton>=3.8, or a CUDA toolkit >= 12.9 (pip install nvidia-cuda-nvcc-cu12), or point "
        "TRITON_PTXAS_PATH at its ptxas"
    )


def _other_assemblers() -> list[str]:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [str(Path(home) / "bin" / "ptxas") for home in homes if home]
    if on_path := shutil.which("ptxas"):
        found.append(on_path)
    wheels = importlib.util.find_spec("nvidia")
    for folder in (wheels.submodule_search_locations or []) if wheels is not None else []:
        found += sorted(str(path) for path in Path(folder).glob("*/bin/ptxas"))
    return [path for path in found if Path(path).is_file()]


def _assembler_version(path: str) -> tuple[int, int]:
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return (0, 0)
    found = re.search(r"release (\d+)\.(\d+)", answer)
    return (int(found[1]), int(found[2])) if found else (0, 0)


@lru_cache(maxsize=8)
def num_sms(device: torch.device) -> int:
    """Multiprocessors of the GPU; a small number where there is none, so that tests take the same branches."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
