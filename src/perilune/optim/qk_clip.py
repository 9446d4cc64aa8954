"""QK-Clip: after the optimizer step, shrink the query and key weights of heads whose attention logits grew past tau.

For head h let S_h be the largest softmax input scale * q_i . k_j seen in the step's training forwards (over the batch,
all allowed pairs and all micro-batches). With gamma_h = tau / S_h where S_h > tau and 1 elsewhere (Kimi K2, arXiv
2507.20534):

    MHA   W_q^h and W_k^h times sqrt(gamma_h), and their biases
    MLA   nope rows of W_q^h and W_k^h times sqrt(gamma_h), rope rows of W_q^h times gamma_h; the shared rope key stays
    GQA   "query": W_q^h times gamma_h, the shared key untouched; or
          "balanced": W_q^h times gamma_h / sqrt(g) and the group's key times sqrt(g), g the smallest gamma of the group

Each rule multiplies the logits of head h by exactly gamma_h and those of no other head. It is a controller, not a
bound: S was measured before the weights moved. Momentum is not touched.

A layer with a frozen q or k parameter (requires_grad=False, also when frozen later) is left alone as a whole: scaling
only the rest of its rows would change the logits by another factor. A trainable parameter that merely got no gradient
in a step is scaled like any other.

Works with any optimizer: attention modules implement `ClipsQK` and feed a `MaxLogitRecorder`; call `QKClip.apply()`
after `optimizer.step()`. Nothing here waits for the device.

Below tau nothing has to be known exactly: QKClip tells the recorders so (`MaxLogitRecorder.want`), and a module may
then hand in an upper bound that is not above tau, as attention on CUDA does. Bounds are reported as such and clip
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perilune.optim.adapters import transformers_heads
from perilune.optim.heads import ClipsQK, MaxLogitRecorder, QKHeads, RowScaling, gqa_heads, mha_heads, mla_heads
from perilune.optim.shards import local_box, local_part

__all__ = [
    "ClipReport",
    "ClipsQK",
    "MaxLogitRecorder",
    "QKClip",
    "QKHeads",
    "RowScaling",
    "find_heads",
    "gamma_of",
    "gqa_heads",
    "is_frozen",
    "mha_heads",
    "mla_heads",
    "refuse_qk_norm",
]

# Modules that normalise q or k per head undo any scaling of the rows before them. Names are looked at only in modules
# that adapters.py knows from outside; a module that implements ClipsQK says so itself by `qk_norm`.
QK_NORM_NAMES = frozenset(
    ("q_norm", "k_norm", "qk_norm", "norm_q", "norm_k", "query_norm", "key_norm", "q_layernorm", "k_layernorm")
    + ("query_layernorm", "key_layernorm", "q_ln", "k_ln")
)


def gamma_of(max_logits: Tensor, tau: float) -> Tensor:
    """tau / S where S is finite and above tau, else 1: also for S <= 0, -inf (no pair), +inf and NaN (a broken
    step)."""
    return torch.where((max_logits > tau) & max_logits.isfinite(), tau / max_logits, torch.ones_like(max_logits))


@dataclass(frozen=True, kw_only=True, eq=False)
class ClipReport:
    """What one `QKClip.apply` saw and did; tensors stay on the device. Layers with fewer heads are padded with -inf."""

    layers: tuple[str, ...]
    max_logits: Tensor  # [layers, heads]
    is_bound: Tensor  # bool [layers, heads]: the entry of max_logits is an upper bound
    num_clipped: Tensor  # int64 scalar

    def by_layer(self) -> tuple[list[float], list[bool]]:
        """The largest entry of every layer, and whether it is only an upper bound. Waits for the device."""
        if not self.layers:
            return [], []
        exact = self.max_logits.masked_fill(self.is_bound, -torch.inf).amax(dim=-1).tolist()
        largest = self.max_logits.amax(dim=-1).tolist()
        return largest, [low < high for low, high in zip(exact, largest, strict=True)]


class QKClip:
    """Applies the rule to every attention module of a model; usable after the step of any optimizer.

    `heads` is a model (its modules that implement `ClipsQK`, and transformers attention that adapters.py knows) or a
    mapping of names to `QKHeads`. `gqa` picks the rule for shared keys. When torch.distributed is initialised, `apply`
    takes the maximum over the ranks of `process_group` (None: all of them) in one all-reduce, so that replicas stay
    equal; every rank of the group must then call it.
    """

    def __init__(
        self,
        heads: nn.Module | Mapping[str, QKHeads] | Iterable[QKHeads],
        tau: float = 100.0,
        *,
        gqa: Literal["query", "balanced"] = "query",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not tau > 0:
            raise ValueError(f"tau is {tau!r}; expected a positive attention logit such as 100.0")
        if gqa not in ("query", "balanced"):
            raise ValueError(f"gqa is {gqa!r}; expected 'query' or 'balanced'")
        self.tau = tau
        self.gqa: Literal["query", "balanced"] = gqa
        self.process_group = process_group
        named = _as_named(heads)
        refuse_qk_norm(named)
        self.layers = tuple(named)
        self.heads = tuple(named.values())
        for layer in self.heads:
            layer.recorder.want(tau)
        self.num_heads = max((layer.num_heads for layer in self.heads), default=0)
        self.last_max_logits: Tensor | None = None
        self.ever_clipped = torch.zeros(len(self.layers), self.num_heads, dtype=torch.bool)
        self._scaled, self._index, self._exponent, self._group_exponent = self._flatten()
        self._group_index = self._flatten_groups()

    def _flatten(self) -> tuple[list[nn.Parameter], Tensor, Tensor, Tensor]:
        """One long vector over all rows of all layers, so that a step costs a few kernels, not a few per layer."""
        parameters: list[nn.Parameter] = []
        index, exponent, group_exponent = [], [], []
        owners: dict[int, str] = {}
        for number, layer in enumerate(self.heads):
            for scaling in rows_of(layer, self.gqa):
                first = owners.setdefault(id(scaling.parameter), self.layers[number])
                if any(scaling.parameter is other for other in parameters):
                    raise ValueError(
                        f"a parameter of shape {tuple(scaling.parameter.shape)} is scaled by {first!r} and again by "
                        f"{self.layers[number]!r}, so its logits would shrink twice; share it only within mha_heads, "
                        "or pass qk_clip_tau=None"
                    )
                head = scaling.head_of_row.cpu()
                if head.shape != scaling.parameter.shape[:1] or scaling.exponent.shape != head.shape:
                    raise ValueError(
                        f"RowScaling of {self.layers[number]!r}: head_of_row {tuple(head.shape)} and exponent "
                        f"{tuple(scaling.exponent.shape)} must both be [{scaling.parameter.shape[0]}], one entry a row"
                    )
                if len(head) and int(head.max()) >= layer.num_heads:
                    raise ValueError(
                        f"RowScaling of {self.layers[number]!r} names head {int(head.max())}, "
                        f"but num_heads is {layer.num_heads}"
                    )
                zeros = torch.zeros_like(scaling.exponent, device="cpu")
                parameters.append(scaling.parameter)
                index.append(torch.where(head < 0, 0, head + number * self.num_heads))
                exponent.append(torch.where(head < 0, zeros, scaling.exponent.cpu()))
                shared = zeros if scaling.group_exponent is None else scaling.group_exponent.cpu()
                group_exponent.append(torch.where(head < 0, zeros, shared))
        if not parameters:
            return [], torch.zeros(0, dtype=torch.long), torch.zeros(0), torch.zeros(0)
        return parameters, torch.cat(index), torch.cat(exponent), torch.cat(group_exponent)

    def _flatten_groups(self) -> Tensor | None:
        """Key group of every head, numbered over all layers; None when no rule needs it."""
        if not bool(self._group_exponent.any()):
            return None
        own = torch.arange(len(self.layers) * self.num_heads).view(len(self.layers), self.num_heads).clone()
        for number, layer in enumerate(self.heads):
            if layer.group_of_head is not None:
                own[number, : layer.num_heads] = layer.group_of_head.cpu() + number * self.num_heads
        return own.flatten()

    def _place(self, device: torch.device) -> None:
        if self._index.device != device:
            self._index, self._exponent = self._index.to(device), self._exponent.to(device)
            self._group_exponent = self._group_exponent.to(device)
            self._group_index = None if self._group_index is None else self._group_index.to(device)
        if self.ever_clipped.device != device:
            self.ever_clipped = self.ever_clipped.to(device)

    def max_logits(self) -> Tensor:
        """[layers, heads]: what the recorders hold now, -inf where nothing was seen."""
        return self.recorded()[0]

    def recorded(self) -> Tensor:
        """[2, layers, heads]: the largest values the recorders of this rank hold now, and the largest that are
        exact."""
        recorders = [layer.recorder for layer in self.heads]
        values = [recorder.value for recorder in recorders] + [recorder.exact for recorder in recorders]
        device = self._scaled[0].device if self._scaled else torch.device("cpu")
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        if not values:
            return torch.full((2, 0, 0), -torch.inf, dtype=dtype, device=device)
        rows = [value.to(device, dtype) for value in values]
        rows = [nn.functional.pad(row, (0, self.num_heads - len(row)), value=-torch.inf) for row in rows]
        return torch.stack(rows).unflatten(0, (2, -1))

    def seen(self) -> ClipReport:
        """What the recorders of this rank hold now; nothing is clipped and nothing forgotten."""
        max_logits, exact = self.recorded()
        none = torch.zeros((), dtype=torch.int64, device=max_logits.device)
        return ClipReport(layers=self.layers, max_logits=max_logits, is_bound=exact < max_logits, num_clipped=none)

    @torch.no_grad()
    def apply(self, recorded: Tensor | None = None) -> ClipReport:
        """Scale the rows of heads above tau, forget this step's maxima, and say what was seen.

        recorded: what `recorded()` gave, when somebody has already taken its maximum over the ranks.
        """
        if recorded is None:
            recorded = self.recorded()
            if dist.is_available() and dist.is_initialized() and recorded.numel():
                dist.all_reduce(recorded, op=dist.ReduceOp.MAX, group=self.process_group)
        max_logits, exact = recorded
        self._place(max_logits.device)
        gamma = gamma_of(exact, self.tau)
        for number, layer in enumerate(self.heads):
            if is_frozen(layer, self.gqa):
                gamma[number] = 1.0
        clipped = gamma < 1
        if self._scaled:
            multiplier = gamma.flatten()[self._index].pow(self._exponent)
            if self._group_index is not None:
                flat = gamma.flatten()
                group_min = torch.ones_like(flat).scatter_reduce(0, self._group_index, flat, "amin")
                multiplier = multiplier * group_min[self._group_index][self._index].pow(self._group_exponent)
            pieces = multiplier.split([parameter.shape[0] for parameter in self._scaled])
            for parameter, piece in zip(self._scaled, pieces, strict=True):
                # A shard is scaled by the factors of the rows it holds.
                start, stop = local_box("a q or k projection", parameter)[0]
                rows = piece[start:stop].to(parameter.device).view(-1, *[1] * (parameter.ndim - 1))
                local_part(parameter).mul_(rows)
        self.last_max_logits = max_logits
        self.ever_clipped = self.ever_clipped | clipped
        self.discard()
        return ClipReport(
            layers=self.layers, max_logits=max_logits, is_bound=exact < max_logits, num_clipped=clipped.sum()
        )

    def discard(self) -> None:
        """Forget this step's maxima without clipping; for steps the trainer skips."""
        for layer in self.heads:
            layer.recorder.reset()

    def state_dict(self) -> dict[str, Any]:
        """Statistics only (last maxima, heads ever clipped): the rule itself has no memory between steps."""
        return {
            "layers": list(self.layers),
            "last_max_logits": None if self.last_max_logits is None else self.last_max_logits.clone(),
            "ever_clipped": self.ever_clipped.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        layers, ever_clipped = list(state["layers"]), state["ever_clipped"]
        if layers != list(self.layers) or ever_clipped.shape != self.ever_clipped.shape:
            raise ValueError(
                f"QK-Clip state has layers {layers!r} with heads {tuple(ever_clipped.shape)}; "
                f"this model has {list(self.layers)!r} with {tuple(self.ever_clipped.shape)}: "
                "load it into the model it was saved from"
            )
        self.ever_clipped = ever_clipped.to(self.ever_clipped.device, torch.bool).clone()
        last = state["last_max_logits"]
        self.last_max_logits = None if last is None else last.clone()


def rows_of(layer: QKHeads, gqa: Literal["query", "balanced"]) -> tuple[RowScaling, ...]:
    """What the chosen rule scales in this layer."""
    return layer.balanced_rows if gqa == "balanced" and layer.balanced_rows else layer.rows


def is_frozen(layer: QKHeads, gqa: Literal["query", "balanced"]) -> bool:
    """Whether a parameter that the rule would scale must not move."""
    return not all(scaling.parameter.requires_grad for scaling in rows_of(layer, gqa))


def refuse_qk_norm(heads: Mapping[str, QKHeads]) -> None:
    """Raise for modules that declare a norm on q or k: it would undo the scaling, and bounds the logits by itself."""
    for name, layer in heads.items():
        if layer.qk_norm:
            raise ValueError(
                f"attention {name!r} normalises q or k (QK-norm), which undoes QK-Clip and already bounds the "
                "logits; pass qk_clip_tau=None (or leave this module out of QKClip)"
            )


def find_heads(model: nn.Module) -> dict[str, QKHeads]:
    """Heads of every module that implements `ClipsQK`, and of transformers attention modules known to adapters.py."""
    found: dict[str, QKHeads] = {}
    for name, module in model.named_modules():
        heads = module.qk_heads() if isinstance(module, ClipsQK) else _foreign_heads(module)
        if heads is not None:
            found[name] = heads
    return found


def _foreign_heads(module: nn.Module) -> QKHeads | None:
    heads = transformers_heads(module)
    if heads is None:
        return None
    return replace(heads, qk_norm=any(_is_qk_norm(name, part) for name, part in module.named_modules()))


def _is_qk_norm(name: str, module: nn.Module) -> bool:
    return name.rpartition(".")[2] in QK_NORM_NAMES and not isinstance(module, nn.Identity)


def _as_named(heads: nn.Module | Mapping[str, QKHeads] | Iterable[QKHeads]) -> dict[str, QKHeads]:
    if isinstance(heads, nn.Module):
        return find_heads(heads)
    if isinstance(heads, Mapping):
        return {str(name): layer for name, layer in heads.items()}
    return {str(number): layer for number, layer in enumerate(heads)}
