"""Weights as decoding wants them: rounded once, and matrices of the same input side by side in memory.

A decoding step of a few tokens spends its time on starting products, not on multiplying. `lay_side_by_side` moves the
weights of such maps into one piece of memory, of which each parameter is a part: values, names and shapes stay, and a
weight that is changed in place changes the whole. `side_by_side` in linear.py finds the whole again from where its
parts lie; a model that was copied or moved since has lost it, and every map then multiplies by itself.

For inference: a whole carries no gradient, and what was rounded is no longer the master weight of a training run. Files
that refuse tensors with shared memory (safetensors) take copies.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from perilune.model.kda import KimiDeltaAttention
from perilune.model.linear import Linear, SwiGLU, are_plain, filled_rows
from perilune.model.mla import LatentAttention
from perilune.model.moe import Experts


@torch.no_grad()
def lay_side_by_side(model: nn.Module) -> None:
    """Every group of maps that read the same input, in all layers."""
    for group in _groups(model):
        if not are_plain(*group):
            continue
        sizes = [linear.out_features for linear in group]
        first = group[0].weight.data
        whole = first.new_zeros(filled_rows(sum(sizes)), first.shape[1])
        torch.cat([linear.weight.data for linear in group], out=whole[: sum(sizes)])
        for linear, part in zip(group, whole.split([*sizes, len(whole) - sum(sizes)])[: len(sizes)], strict=True):
            linear.weight.data = part


@torch.no_grad()
def round_matrices(model: nn.Module, dtype: torch.dtype) -> None:
    """Matrices that layers round to the compute dtype at every use, rounded once. Gates, norms and routers stay."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Experts):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)


@torch.no_grad()
def lay_apart(model: nn.Module) -> None:
    """Every weight in memory of its own again."""
    for linear in (linear for group in _groups(model) for linear in group):
        if linear.weight.untyped_storage().nbytes() > linear.weight.nbytes:
            linear.weight.data = linear.weight.data.clone()


def _groups(model: nn.Module) -> Iterator[tuple[Linear, ...]]:
    for module in model.modules():
        if isinstance(module, KimiDeltaAttention | LatentAttention):
            yield module.maps_of_input()
        elif isinstance(module, SwiGLU):
            yield module.gate_proj, module.up_proj
