"""KDA through cuDNN's Hopper kernels (package nvidia-cudnn-frontend, `cudnn.linear_attention`), and their limits.

The library computes log decays, post-sigmoid beta and normalised q and k in bfloat16; everything around that, and its
gradient, is `prepare`. Its backward needs nothing from its forward: it recomputes chunk factors and states, so that
`cudnn_backward` serves any forward. What decides who may use it, read from version 1.32:

- Decays are anchored over 16 tokens: 16 |g| must stay below 87, or factors overflow without a word.
- The forward cuts a sequence into about 264 / (N * H) pieces and starts each from a state it warms up until the decay
  says the rest is negligible. That argument needs |k| <= 1 and beta <= 1: with beta = 2 the delta rule may carry a
  state around the decaying channels. Weak decays make the warm-up long: exact still, but up to 8 times slower.
- The backward walks all chunks, whatever the decays. It knows one scale, 128 ** -0.5.

Ranges of tensors are promised by the gate or the caller (`decay_floor`, `beta_bound`), or else read from the device,
which waits for it.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from perilune.kernels.kda.gates import BoundedGate, Gate

DTYPE, HEAD_DIM = torch.bfloat16, 128
DECAY_FLOOR = -5.45  # exp(16 * -5.45) is still a normal number in float32
TARGET_BLOCKS = 264  # the forward cuts sequences until it has about this many
PLAN = "kda_hopper_cuda"
PACKAGE, OLDEST = "nvidia-cudnn-frontend", (1, 32)
SCALE = HEAD_DIM**-0.5


def cudnn_kda(
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
    decay_floor: float | None = None,
    beta_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, V] and the final state [N, H, K, V] in float32; ValueError with the reason when it cannot."""
    options: dict[str, Any] = dict(
        scale=scale, initial_state_NHKV=initial_state_NHKV, cu_seqlens=cu_seqlens, gate=gate, qk_l2norm=qk_l2norm,
        dtype=dtype,
    )  # fmt: skip
    tensors = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    # First what the shapes say: values are read only for a case that they decide.
    if reason := why_not_cudnn(*tensors, **options, decay_floor=DECAY_FLOOR, beta_bound=1.0):
        raise ValueError(f"backend='cudnn': {reason}")
    if decay_floor is None and gate is None:
        decay_floor = _read(g_BTHK.detach().amin())
    if beta_bound is None and _num_pieces(q_BTHK, cu_seqlens) > 1:
        beta_bound = _read(beta_BTH.detach().amax())
    if reason := why_not_cudnn(*tensors, **options, decay_floor=decay_floor, beta_bound=beta_bound):
        raise ValueError(f"backend='cudnn': {reason}")

    from perilune.kernels.kda.prepare import prepare

    prepared = prepare(q_BTHK, k_BTHK, g_BTHK, gate=gate, qk_l2norm=qk_l2norm)
    o, final, _ = torch.ops.cudnn.kimi_delta_attention_fwd(
        _packed(prepared.q), _packed(prepared.k), _packed(v_BTHV), _packed(prepared.log_decay),
        _packed(beta_BTH.float()), _borders(cu_seqlens, q_BTHK), SCALE,
        initial_state=_value_first(initial_state_NHKV), output_final_state=True, plan_name=PLAN,
    )  # fmt: skip
    return o.view(v_BTHV.shape), final.transpose(-1, -2)


def cudnn_backward(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    d_output_BTHV: Tensor,
    d_final_NHKV: Tensor | None,
    *,
    scale: float,
    initial_state_NHKV: Tensor | None,
    cu_seqlens: list[int] | Tensor | None,
    gate: Gate | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, g, beta, the initial state, A_log and dt_bias, from the inputs of any forward.

    The caller has asked `why_not_cudnn_backward`, which also loads the library. What was not given has no gradient:
    None.
    """
    from perilune.kernels.kda.prepare import prepare, prepare_backward

    options: dict[str, Any] = dict(gate=gate, qk_l2norm=qk_l2norm)
    with torch.no_grad():
        prepared = prepare(q_BTHK, k_BTHK, g_BTHK, **options)
        dq, dk, dv, d_decay, d_beta, d_initial, _, _ = torch.ops.cudnn.kimi_delta_attention_bwd(
            _packed(d_output_BTHV.to(v_BTHV.dtype)), _packed(prepared.q), _packed(prepared.k), _packed(v_BTHV),
            _packed(prepared.log_decay), _packed(beta_BTH.float()), _borders(cu_seqlens, q_BTHK), SCALE,
            initial_state=_value_first(initial_state_NHKV), d_final_state=_value_first(d_final_NHKV), plan_name=PLAN,
        )  # fmt: skip
        dq, dk, dg, d_log_rate, d_bias = prepare_backward(
            prepared, g_BTHK, dq.view(q_BTHK.shape), dk.view(k_BTHK.shape), d_decay.view(g_BTHK.shape), **options
        )
    return (
        dq,
        dk,
        dv.view(v_BTHV.shape),
        dg,
        d_beta.view(beta_BTH.shape).to(beta_BTH.dtype),
        None if initial_state_NHKV is None else d_initial.transpose(-1, -2),
        d_log_rate,
        d_bias,
    )


def why_not_cudnn(
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
    decay_floor: float | None = None,
    beta_bound: float | None = None,
) -> str | None:
    """Why cuDNN's forward (and with it the pair) cannot serve this case exactly, or None. Never waits for the device.

    `decay_floor` is a promise about a pre-computed log decay, `beta_bound` one about beta.
    """
    if reason := why_not_cudnn_backward(
        q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, scale=scale, initial_state_NHKV=initial_state_NHKV,
        cu_seqlens=cu_seqlens, gate=gate, qk_l2norm=qk_l2norm, dtype=dtype, decay_floor=decay_floor,
    ):  # fmt: skip
        return reason
    pieces = _num_pieces(q_BTHK, cu_seqlens)
    if pieces > 1 and not qk_l2norm:
        return f"it cuts this sequence into {pieces} pieces, which is exact for L2-normalised keys; pass qk_l2norm=True"
    if pieces > 1 and (beta_bound is None or beta_bound > 1):
        found = "unknown here" if beta_bound is None else f"up to {beta_bound:.3g}"
        return f"it cuts this sequence into {pieces} pieces, which is exact for beta <= 1; beta is {found}"
    return None


def why_not_cudnn_backward(
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
    decay_floor: float | None = None,
) -> str | None:
    """The same for its backward alone."""
    if reason := why_not_here(q_BTHK.device.type, q_BTHK.device.index):
        return reason
    if dtype == torch.float64 or any(x.dtype != DTYPE for x in (q_BTHK, k_BTHK, v_BTHV)):
        kinds = ", ".join(str(x.dtype).removeprefix("torch.") for x in (q_BTHK, k_BTHK, v_BTHV))
        return f"it computes bfloat16 q, k and v, got {kinds}"
    if (key_dim := q_BTHK.shape[-1]) != HEAD_DIM or v_BTHV.shape[-1] != HEAD_DIM:
        return f"its head dims are {HEAD_DIM}, got K={key_dim} and V={v_BTHV.shape[-1]}"
    if abs(scale - SCALE) > 1e-6 * SCALE:
        return f"its backward knows one scale, 1 / sqrt({HEAD_DIM}), got {scale:.4g}"
    if q_BTHK.numel() == 0:
        return "there are no tokens"
    if isinstance(gate, BoundedGate):
        floor = gate.lower_bound
    elif gate is not None:
        return f"a softplus gate has no lower bound, its kernels overflow below {DECAY_FLOOR} a token"
    else:
        floor = decay_floor
    if floor is None:
        return f"its kernels overflow below {DECAY_FLOOR} a token, the range of this log decay is unknown; pass gate="
    if not floor >= DECAY_FLOOR:
        return f"log decays reach {floor:.3g}, its kernels overflow below {DECAY_FLOOR} a token"
    return None


@torch.compiler.assume_constant_result
def why_not_here(device_type: str, device_index: int | None) -> str | None:
    """What the machine lacks, whatever the case; a compiled graph keeps the answer of its compilation."""
    if device_type != "cuda":
        return f"it runs on CUDA, q is on {device_type!r}"
    if (capability := torch.cuda.get_device_capability(device_index)) != (9, 0):
        return f"its kernels are for compute capability 9.0 (Hopper), this GPU has {capability[0]}.{capability[1]}"
    return _why_not_installed()


@lru_cache(maxsize=1)
def _why_not_installed() -> str | None:
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed (pip install 'perilune[gpu]')"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        return f"{PACKAGE} is {version}, the first with these kernels is {'.'.join(map(str, OLDEST))}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return f"{PACKAGE} compiles its kernels with the package cuda-bindings, which is not installed"
    try:
        # Defines the operators torch.ops.cudnn.kimi_delta_attention_fwd and _bwd.
        import cudnn.linear_attention.ops  # noqa: F401
    except Exception as error:  # a foreign package may fail at import in any way; the reason goes to the person
        return f"{PACKAGE} {version} does not load: {error}"
    return None


def _num_pieces(q_BTHK: Tensor, cu_seqlens: list[int] | Tensor | None) -> int:
    """Into how many pieces the forward cuts each sequence: it aims at a full chip and at 16 tokens a piece or more."""
    batch, num_tokens, num_heads = q_BTHK.shape[:3]
    num_sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    chunks = -(-max(batch * num_tokens, 1) // max(num_sequences, 1) // 16)
    return max(1, min(TARGET_BLOCKS // max(num_sequences * num_heads, 1), chunks))


def _packed(x_BTH: Tensor) -> Tensor:
    """[B, T, ...] -> [B * T, ...], contiguous."""
    return x_BTH.contiguous().flatten(0, 1)


def _value_first(state_NHKV: Tensor | None) -> Tensor | None:
    """The library keeps states as [N, H, V, K]."""
    return None if state_NHKV is None else state_NHKV.float().transpose(-1, -2).contiguous()


def _borders(cu_seqlens: list[int] | Tensor | None, q_BTHK: Tensor) -> Tensor:
    """Of the sequences among the B * T tokens, on the device."""
    batch, num_tokens = q_BTHK.shape[:2]
    if cu_seqlens is None:
        return torch.arange(0, batch * num_tokens + 1, num_tokens, dtype=torch.int32, device=q_BTHK.device)
    if isinstance(cu_seqlens, Tensor):
        return cu_seqlens.to(device=q_BTHK.device, dtype=torch.int32)
    return _uploaded(tuple(cu_seqlens), q_BTHK.device)


@lru_cache(maxsize=16)
def _uploaded(borders: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(borders, dtype=torch.int32, device=device)


def _read(value: Tensor) -> float | None:
    """A number from the device; None where the host must not wait: in a graph being captured or compiled."""
    if torch.compiler.is_compiling() or (value.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    return float(value)
