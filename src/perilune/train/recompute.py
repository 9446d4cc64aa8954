"""Activation checkpointing: what the backward pass keeps of a layer, and what it computes again.

    none        everything is kept
    selective   MLPs and experts are computed again: wide activations for little arithmetic; attention is kept
    full        only what goes into a layer is kept

A layer takes and returns a Stream; its tensors are what "full" keeps. A repeated forward counts nothing twice: routers
look at whether a backward pass runs, and the maximum of attention logits is the same one. What other ranks sent is
asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch.utils.checkpoint import checkpoint

from perilune.model.decoder import DecoderLayer

Recompute = Literal["none", "selective", "full"]


def recompute_layers(layers: Sequence[DecoderLayer], how: Recompute) -> None:
    """Changes how the layers run, in place. Names of parameters stay, unlike with a wrapping module."""
    if how not in get_args(Recompute):
        raise ValueError(f"recompute is {how!r}, expected one of {', '.join(get_args(Recompute))}")
    for layer in layers:
        if how == "full":
            layer.forward = _checkpointed(layer.forward)
        elif how == "selective":
            layer.mlp.forward = _checkpointed(layer.mlp.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        # No layer draws random numbers, so there is no generator to rewind.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)

    return run
