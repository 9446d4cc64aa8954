"""Next-token cross entropy straight from hidden states, without ever holding all logits: kernels/cross_entropy."""

from torch import Tensor

from perilune.kernels.cross_entropy import IGNORED, linear_cross_entropy_sum

__all__ = ["IGNORED", "cross_entropy_sum"]

CHUNK_ELEMENTS: int | None = None
"""Logits held at a time; None is what suits the device."""


def cross_entropy_sum(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of -log p(target) over valid targets, a float32 scalar (float64 for float64 inputs)."""
    return linear_cross_entropy_sum(hidden_ND, weight_VD, targets_N, chunk_elements=CHUNK_ELEMENTS)
