"""KDA through flash-linear-attention's Triton kernels (package fla-core, `fla.ops.kda.chunk_kda`), and their limits.

Gates, L2 norm and states map one to one. It tunes its kernels for minutes on the first call of a new shape family, and
torch.compile breaks the graph at it. Products of float32 inputs run in tf32 there, which is not what `kda` promises
for them, so that half precision is all that is handed over.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import metadata

import torch
from torch import Tensor

from perilune.kernels.kda.gates import BoundedGate, Gate
from perilune.kernels.triton_support import INTERPRETED, why_not_triton

PACKAGE, OLDEST = "fla-core", (0, 6)
HEAD_DIMS = (32, 64, 128, 256)
# Down to this bound its 16-token anchors are exact ("safe gate"); below it the slower pairwise kernel is.
SAFE_LOWER_BOUND = -5.0


def fla_kda(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float,
    initial_state_NHKV: Tensor | None,
    cu_seqlens: list[int] | Tensor | None,
    gate: Gate | None,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] and the final state [N, H, K, V] in float32; ValueError with the reason when it cannot."""
    if reason := why_not_fla(
        q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, scale=scale, initial_state_NHKV=initial_state_NHKV,
        cu_seqlens=cu_seqlens, gate=gate, qk_l2norm=qk_l2norm, dtype=dtype,
    ):  # fmt: skip
        raise ValueError(f"backend='fla': {reason}")
    from fla.ops.kda import chunk_kda

    borders = borders_on_host = None
    if cu_seqlens is not None:
        borders, borders_on_host = _borders(cu_seqlens, q_BTHK.device)
    lower_bound = gate.lower_bound if isinstance(gate, BoundedGate) else None
    parameters = {} if gate is None else {
        "A_log": None if gate.A_log is None else gate.A_log.float(), "dt_bias": gate.dt_bias.float().flatten(),
    }  # fmt: skip
    o, state = chunk_kda(
        q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH,
        scale=scale,
        initial_state=None if initial_state_NHKV is None else initial_state_NHKV.float().contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=qk_l2norm,
        use_gate_in_kernel=gate is not None,
        safe_gate=lower_bound is not None and lower_bound >= SAFE_LOWER_BOUND,
        lower_bound=lower_bound,
        cu_seqlens=borders,
        cu_seqlens_cpu=borders_on_host,
        **parameters,
    )  # fmt: skip
    return o, state


def why_not_fla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float,
    initial_state_NHKV: Tensor | None,
    cu_seqlens: list[int] | Tensor | None,
    gate: Gate | None,
    qk_l2norm: bool,
    dtype: torch.dtype,
) -> str | None:
    """Why fla cannot serve this case, or None."""
    if q_BTHK.device.type != "cuda" or INTERPRETED:
        return why_not_triton(q_BTHK) or f"it runs on CUDA, q is on {q_BTHK.device.type!r}"
    if reason := why_not_installed():
        return reason
    kinds = {x.dtype for x in (q_BTHK, k_BTHK, v_BTHV)}
    if dtype == torch.float64 or len(kinds) != 1 or kinds.pop() not in (torch.bfloat16, torch.float16):
        named = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q_BTHK, k_BTHK, v_BTHV))
        return f"q, k and v must all be bfloat16 or all float16 (float32 products are tf32 there), got {named}"
    if (key_dim := q_BTHK.shape[-1]) not in HEAD_DIMS or v_BTHV.shape[-1] not in HEAD_DIMS:
        return f"head dims tried with it are {HEAD_DIMS}, got K={key_dim} and V={v_BTHV.shape[-1]}"
    if q_BTHK.numel() == 0:
        return "there are no tokens"
    return None


@lru_cache(maxsize=1)
def why_not_installed() -> str | None:
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed (pip install {PACKAGE})"
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < OLDEST:
        return f"{PACKAGE} is {version}; before 0.6 outputs depended on later gates (fla issue 1240)"
    try:
        import fla.ops.kda  # noqa: F401
    except Exception as error:  # a foreign package may fail at import in any way; the reason goes to the person
        return f"{PACKAGE} {version} does not load: {error}"
    return None


def _borders(cu_seqlens: list[int] | Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """On the device and, where they are known there, on the host: fla then need not wait for them."""
    if isinstance(cu_seqlens, Tensor):
        return cu_seqlens.to(device=device, dtype=torch.long), None
    return _uploaded(tuple(cu_seqlens), device)


@lru_cache(maxsize=16)
def _uploaded(borders: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    on_host = torch.tensor(borders, dtype=torch.long)
    return on_host.to(device), on_host
