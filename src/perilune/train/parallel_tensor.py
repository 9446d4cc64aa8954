"""Tensor parallel: heads of attention and columns of MLPs split over ranks that read the same tokens.

    x -> replicate -> own heads (or own columns, own experts) -> sum over ranks -> y

A rank computes with its part of the weights: rows of what makes heads (q, k, v, gates, W_kvb, gate and up), columns of
what consumes them (W_o, down). These are DTensors, so that optimizer and checkpoint see whole parameters. What all
heads share (latents, low-rank gates, norms) stays whole, and every rank has only a part of its gradient, which is added
over the ranks. Routed experts are split by expert: a rank runs its own experts on all tokens (parallel_expert.py).

Modules keep their global config and global parameters. Only while their forward runs do they see what is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from perilune.kernels.collectives import replicate, total
from perilune.model import Decoder, KimiDeltaAttention, LatentAttention, MixtureOfExperts
from perilune.model.decoder import DecoderLayer
from perilune.model.linear import SwiGLU
from perilune.optim.heads import MaxLogitRecorder

Use = Callable[[Tensor], Tensor]
"""From a parameter to what a forward computes with."""

KDA_ROWS = ("q_proj", "k_proj", "v_proj", "f_b_proj", "b_proj", "g_proj", "g_b_proj")
KDA_SHARED = ("f_a_proj.weight", "g_a_proj.weight", "o_norm.weight")
MLA_ROWS = ("q_proj", "q_b_proj", "kv_b_proj")
MLA_SHARED = ("q_a_proj.weight", "q_a_layernorm.weight", "kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight")


def split_tensors(model: Decoder, mesh: DeviceMesh) -> None:
    """Split attention and dense MLPs of every layer over the 1-D `mesh`, in place. Experts are not touched."""
    if mesh.size() == 1:
        return
    for layer in decoder_layers(model):
        if isinstance(layer.self_attn, KimiDeltaAttention):
            _split_kda(layer.self_attn, mesh)
        else:
            _split_mla(layer.self_attn, mesh)
        split_work(layer.self_attn, mesh.get_group())
        if isinstance(layer.mlp, MixtureOfExperts):
            split_work(layer.mlp, mesh.get_group())
            become(layer.mlp.gate, LocalParameters, uses=_shared(layer.mlp.gate, ("weight",), mesh))
            if layer.mlp.shared_experts is not None:
                _split_mlp(layer.mlp.shared_experts, mesh)
        else:
            _split_mlp(layer.mlp, mesh)
            split_work(layer.mlp, mesh.get_group())


def decoder_layers(model: Decoder) -> list[DecoderLayer]:
    """The layers of the model, or of one stage of it."""
    return [layer for layer in model.layers if isinstance(layer, DecoderLayer)]


# ---------------------------------------------------------------------------------------------------------------------
# How a module comes to compute with its part


def become(module: nn.Module, mixin: type, **attributes: Any) -> None:
    """Put `mixin` before the class of this one module, as fully_shard does; `attributes` are what the mixin reads."""
    kind = type(module)
    module.__class__ = type(f"{mixin.__name__}{kind.__name__}", (mixin, kind), {"__doc__": mixin.__doc__})
    for name, value in attributes.items():
        setattr(module, name, value)


class LocalParameters:
    """While forward runs, the parameters named in `uses` are what their functions make of them."""

    uses: Mapping[str, Use]
    seen: Mapping[str, Any]
    """Attributes that forward sees instead of the module's own."""

    def forward(self, *args: Any) -> Any:
        with _swapped(self, self.uses, getattr(self, "seen", {})):  # type: ignore[arg-type]
            return super().forward(*args)  # type: ignore[misc]


class SplitWork:
    """The input is the same on all ranks of `group`, the outputs are parts of a sum."""

    group: ProcessGroup

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return total(super().forward(replicate(x, self.group), *rest), self.group)  # type: ignore[misc]


def split_work(module: nn.Module, group: ProcessGroup) -> None:
    become(module, SplitWork, group=group)


@contextmanager
def _swapped(module: nn.Module, uses: Mapping[str, Use], seen: Mapping[str, Any]) -> Iterator[None]:
    places = [(*_place(module, name), use) for name, use in uses.items()]
    kept = [owner._parameters[name] for owner, name, _ in places]
    own = {name: getattr(module, name) for name in seen}
    try:
        for owner, name, use in places:
            owner._parameters[name] = use(owner._parameters[name])  # type: ignore[arg-type]
        for name, value in seen.items():
            setattr(module, name, value)
        yield
    finally:
        for (owner, name, _), parameter in zip(places, kept, strict=True):
            owner._parameters[name] = parameter
        for name, value in own.items():
            setattr(module, name, value)


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


# ---------------------------------------------------------------------------------------------------------------------
# Which part


def local(parameter: Tensor) -> Tensor:
    """This rank's part, as an ordinary tensor."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, dims: tuple[int, ...]) -> None:
    """Parameter `name` becomes a DTensor, cut along dims[i] over the i-th dimension of `mesh`."""
    owner, last = _place(module, name)
    whole = owner._parameters[last]
    assert whole is not None
    # Every rank has built the same weights, so each takes its part of its own copy.
    part = distribute_tensor(whole.detach(), mesh, [Shard(dim) for dim in dims], src_data_rank=None)
    owner._parameters[last] = nn.Parameter(part, requires_grad=whole.requires_grad)


def _cut(module: nn.Module, names: tuple[str, ...], mesh: DeviceMesh, dim: int) -> dict[str, Use]:
    for name in names:
        shard_parameter(module, name, mesh, (dim,))
    return dict.fromkeys(names, local)


def _shared(module: nn.Module, names: tuple[str, ...], mesh: DeviceMesh) -> dict[str, Use]:
    """Whole on every rank; gradients are added."""
    group, present = mesh.get_group(), dict(module.named_parameters())
    return {name: lambda parameter: replicate(parameter, group) for name in names if name in present}


def _split_kda(attention: KimiDeltaAttention, mesh: DeviceMesh) -> None:
    config, ranks, rank = attention.config, mesh.size(), mesh.get_local_rank()
    rows = tuple(f"{name}.weight" for name in KDA_ROWS if hasattr(attention, name))
    width = config.num_heads * config.head_dim // ranks

    def own_channels(weight: Tensor) -> Tensor:
        """The convolutions of own heads among those of q, k and v, which lie one after another."""
        parts = replicate(weight, mesh.get_group()).unflatten(0, (3, ranks, width))
        return parts[:, rank].flatten(0, 1)

    become(
        attention,
        LocalParameters,
        uses={
            **_cut(attention, (*rows, "A_log", "dt_bias"), mesh, 0),
            **_cut(attention, ("o_proj.weight",), mesh, 1),
            **_shared(attention, KDA_SHARED, mesh),
            "conv_weight": own_channels,
        },
        seen={"config": replace(config, num_heads=config.num_heads // ranks)},
    )


def _split_mla(attention: LatentAttention, mesh: DeviceMesh) -> None:
    config, ranks = attention.config, mesh.size()
    rows = tuple(f"{name}.weight" for name in MLA_ROWS if hasattr(attention, name))
    heads = config.num_attention_heads // ranks
    first = mesh.get_local_rank() * heads
    become(
        attention,
        LocalParameters,
        uses={
            **_cut(attention, rows, mesh, 0),
            **_cut(attention, ("o_proj.weight",), mesh, 1),
            **_shared(attention, MLA_SHARED, mesh),
        },
        seen={
            "config": replace(config, num_attention_heads=heads),
            "max_logit": OwnHeads(attention.max_logit, slice(first, first + heads)),
        },
    )


def _split_mlp(mlp: SwiGLU, mesh: DeviceMesh) -> None:
    uses = {
        **_cut(mlp, ("gate_proj.weight", "up_proj.weight"), mesh, 0),
        **_cut(mlp, ("down_proj.weight",), mesh, 1),
    }
    become(mlp, LocalParameters, uses=uses)


class OwnHeads:
    """A recorder for some heads, which keeps their maxima in that of all heads; the others stay -inf on this rank."""

    def __init__(self, everyone: MaxLogitRecorder, heads: slice) -> None:
        self.everyone = everyone
        self.heads = heads

    @property
    def clip_threshold(self) -> float:
        return self.everyone.clip_threshold

    def update(self, max_logit: Tensor, is_bound: Tensor | None = None) -> None:
        num_heads = len(self.everyone.value)
        maxima = max_logit.new_full((num_heads,), -torch.inf)
        maxima[self.heads] = max_logit.detach()
        bounds = None
        if is_bound is not None:
            bounds = is_bound.new_zeros(num_heads)
            bounds[self.heads] = is_bound
        self.everyone.update(maxima, bounds)
