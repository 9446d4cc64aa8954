"""The optimizer of a run with everything that happens around its step: learning rate, gradient clipping, QK-Clip."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from perilune.model.moe import Router
from perilune.optim import Adam, ClipReport, MuonClip, QKClip, clip_grad_norm_
from perilune.optim.capture import CapturedStep, CaptureFailed
from perilune.optim.plan import PlannedParameter, plan_parameters
from perilune.optim.qk_clip import find_heads, is_frozen
from perilune.optim.sharded import ShardedMuonClip
from perilune.train.parallel import Parallel
from perilune.train.stages import own_rows, rows_of_stages


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    kind: Literal["muonclip", "adamw"] = "muonclip"
    lr: float = 3e-3
    adam_lr: float | None = None
    """Learning rate of embedding, head and vectors: what MuonClip gives to AdamW; None: `lr`."""
    weight_decay: float = 0.1
    momentum: float = 0.95
    adam_betas: tuple[float, float] = (0.9, 0.95)
    per_head: bool = False
    """Orthogonalise the heads of q, k, v and o one by one."""
    orthogonalize_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Of Newton-Schulz. "auto" is float16 on a GPU, bfloat16 on a processor that multiplies it in hardware, else
    float32; name one to compare machines."""
    payload_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """In which directions and updates travel between ranks. "auto": bfloat16 on GPUs, else float32."""
    qk_clip_tau: float | None = 100.0
    """Attention logit above which QK-Clip shrinks a head; None: only record (on a GPU, upper bounds)."""
    exact_logits_above: float | None = None
    """Record exact maxima above this where QK-Clip's threshold is higher, or off; a GPU bounds the others."""

    def __post_init__(self) -> None:
        if self.kind not in ("muonclip", "adamw"):
            raise ValueError(f'optimizer.kind is {self.kind!r}, expected "muonclip" or "adamw"')
        for name in ("lr", "adam_lr", "qk_clip_tau"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"optimizer.{name} is {value!r}, expected a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"optimizer.weight_decay is {self.weight_decay!r}, expected 0 or more")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optimizer.momentum is {self.momentum!r}, expected a number in [0, 1)")
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            raise ValueError(f"optimizer.adam_betas is {self.adam_betas!r}, expected two numbers in [0, 1)")
        if self.payload_dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(
                f'optimizer.payload_dtype is {self.payload_dtype!r}, expected "auto", "float32" or "bfloat16"'
            )
        if self.orthogonalize_dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise ValueError(
                f"optimizer.orthogonalize_dtype is {self.orthogonalize_dtype!r}, expected "
                '"auto", "float32", "float16" or "bfloat16"'
            )


CLIP_TENSORS = ("last_max_logits", "ever_clipped")
"""What of QK-Clip goes into a checkpoint, a row for every layer with softmax attention."""


class Optimization:
    """An optimizer and the QK-Clip after it. `clip` is None for a model (or a stage of one) without softmax attention.

    `parallel` is how the model is spread: checkpoints hold QK-Clip's statistics of all layers, a stage some of them.
    `routers` are those whose expert counts travel with the gradient norm.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        clip: QKClip | None,
        parallel: Parallel | None = None,
        routers: Sequence[Router] = (),
    ) -> None:
        self.optimizer = optimizer
        self.clip = clip
        self._parallel = parallel
        self._routers = tuple(routers)
        self._base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._captured: CapturedStep | None = None
        self._captures = True

    def set_lr(self, scale: float) -> None:
        for group, base in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base * scale

    def clip_gradients(self, max_norm: float | None) -> torch.Tensor:
        """The norm of all gradients, a device scalar, after scaling down AdamW's part of them to `max_norm`.

        On many ranks the expert counts become those of all of them, in the same all-reduce.
        """
        limit = math.inf if max_norm is None else max_norm
        if isinstance(self.optimizer, ShardedMuonClip):
            return self.optimizer.clip_grad_norm_(limit, sums=[router.counts for router in self._routers])
        return clip_grad_norm_(self.optimizer, limit)

    def step(self, *, gradients_stay: bool = False) -> ClipReport:
        """Move the weights, clip heads, forget gradients and statistics; says what QK-Clip saw and did.

        gradients_stay: they are where they were in the last step and will be in the next, so that on a GPU the step
        can be recorded as a CUDA graph.
        """
        if not (gradients_stay and self._step_captured()):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.clip is None:
            return nothing_seen()
        if isinstance(self.optimizer, MuonClip):
            assert self.optimizer.qk_report is not None, "MuonClip reports after every step that had a gradient"
            return self.optimizer.qk_report
        return self.clip.apply()

    def _step_captured(self) -> bool:
        """A step that is recorded or replayed; False where it has to be taken as usual."""
        optimizer = self.optimizer
        if not self._captures or type(optimizer) is not MuonClip or not on_gpu(optimizer):
            return False
        if self._captured is None:
            optimizer.capturable = True
            self._captured = optimizer.captured_step()
        try:
            self._captured()
        except CaptureFailed as error:
            warnings.warn(f"{error}; every step is launched kernel by kernel", stacklevel=3)
            optimizer.capturable, self._captures, self._captured = False, False, None
            return False
        return True

    def skip(self) -> ClipReport:
        """Throw the step away: no weight moves, and what it saw of the logits clips nothing later."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.clip is None:
            return nothing_seen()
        seen = self.clip.seen()
        self.clip.discard()
        return seen

    def clip_tensors(self) -> dict[str, torch.Tensor]:
        """QK-Clip's statistics, for the checkpoint; all ranks have to ask."""
        state: dict[str, Any] = {} if self.clip is None else self.clip.state_dict()
        rows = {name: rows_of_stages(self._parallel, state.get(name)) for name in CLIP_TENSORS}
        return {f"qk_clip.{name}": value for name, value in rows.items() if value is not None}

    def load_clip_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        own = own_rows(self._parallel, 0 if self.clip is None else len(self.clip.layers))
        if self.clip is not None:
            saved = {name: tensors.get(f"qk_clip.{name}") for name in CLIP_TENSORS}
            rows = {name: None if value is None else value[own] for name, value in saved.items()}
            self.clip.load_state_dict({"layers": list(self.clip.layers), **rows})


def on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    return optimizer.param_groups[0]["params"][0].is_cuda


def nothing_seen() -> ClipReport:
    return ClipReport(
        layers=(),
        max_logits=torch.zeros(0, 1),
        is_bound=torch.zeros(0, 1, dtype=torch.bool),
        num_clipped=torch.zeros((), dtype=torch.int64),
    )


def build_optimization(model: nn.Module, config: OptimizerConfig, parallel: Parallel | None = None) -> Optimization:
    """On a model that is spread over ranks, Distributed MuonClip; all ranks have to build it together."""
    # Frozen heads (beside adapters) are not for QK-Clip.
    heads = {name: layer for name, layer in find_heads(model).items() if not is_frozen(layer, "query")}
    # An infinite threshold never clips, and the statistics are still read and reset every step.
    tau = (math.inf if config.qk_clip_tau is None else config.qk_clip_tau) if heads else None
    if config.exact_logits_above is not None:
        for layer in heads.values():
            layer.recorder.want(config.exact_logits_above)
    if config.kind == "adamw" and parallel is None:
        return Optimization(_adamw(model, config), None if tau is None else QKClip(heads, tau))
    options: dict[str, Any] = {
        "lr": config.lr,
        "adam_lr": config.adam_lr,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "adam_betas": config.adam_betas,
        "per_head": config.per_head,
        "orthogonalize_dtype": _dtype(config.orthogonalize_dtype),
        "qk_clip_tau": tau,
    }
    if parallel is None:
        optimizer = MuonClip.for_model(model, **options)
    else:
        if config.kind == "adamw":
            # Distributed MuonClip without a matrix for Muon is AdamW over ranks, with the same names of its state.
            if config.adam_lr not in (None, config.lr):
                raise ValueError(
                    f"optimizer.adam_lr is {config.adam_lr!r} beside lr={config.lr!r}: with kind='adamw' on many ranks "
                    "there is one learning rate for all; drop adam_lr"
                )
            everything = {entry.name: Adam(weight_decay=decays) for entry, decays in _decaying(model)}
            options |= {"adam_lr": config.lr, "overrides": everything}
        optimizer = ShardedMuonClip.for_model(
            model,
            process_group=parallel.stage_group(),
            stages=parallel.stages(),
            payload_dtype=_payload_dtype(config, parallel),
            **options,
        )
    return Optimization(optimizer, optimizer.qk_clip, parallel, [] if parallel is None else _summed_with_norm(model))


def _summed_with_norm(model: nn.Module) -> list[Router]:
    """The routers, which from now on leave it to `clip_gradients` to sum their counts over ranks.

    Ranks of tp count the same tokens, so counts come out times tp: balance is about their ratios.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    for router in routers:
        router.count_groups = ()
    return routers


def _dtype(name: str) -> torch.dtype | None:
    return None if name == "auto" else getattr(torch, name)


def _payload_dtype(config: OptimizerConfig, parallel: Parallel) -> torch.dtype:
    if config.payload_dtype == "auto":
        return torch.bfloat16 if parallel.meshes.dense.device_type == "cuda" else torch.float32
    return getattr(torch, config.payload_dtype)


def _adamw(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over everything; matrices decay, and of the rest what MuonClip would let decay."""
    grouped: dict[tuple[float, float], list[nn.Parameter]] = {}
    for entry, decays in _decaying(model):
        lr = config.lr if config.adam_lr is None or not isinstance(entry.layout, Adam) else config.adam_lr
        grouped.setdefault((lr, config.weight_decay if decays else 0.0), []).append(entry.parameter)
    groups = [{"params": found, "lr": lr, "weight_decay": decay} for (lr, decay), found in grouped.items()]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.adam_betas, eps=1e-8)


def _decaying(model: nn.Module) -> list[tuple[PlannedParameter, bool]]:
    return [
        (entry, not isinstance(entry.layout, Adam) or entry.layout.weight_decay) for entry in plan_parameters(model)
    ]
