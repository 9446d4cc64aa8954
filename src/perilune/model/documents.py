"""Packed documents as the layers of a model are told about them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.model.rope import RopeConfig, rotation
from perilune.model.routes import Routes


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the documents of a packed row begin and end, and each token's position in its own document."""

    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    """[B, T], only computed when some layer has rotary positions"""
    routes: Routes | None = None
    """Where the layers of experts record what they choose, or find what they are to take."""
    _angles: dict[tuple[RopeConfig, int], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def angles(self, rope: RopeConfig, dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, dim / 2] of the positions, computed for the first layer that rotates."""
        assert self.positions is not None, "the decoder computes positions when a layer rotates"
        if (rope, dim) not in self._angles:
            self._angles[rope, dim] = rotation(rope, self.positions, dim)
        return self._angles[rope, dim]


def positions_of(tokens: Tensor, cu_seqlens: Tensor | None, start: int) -> Tensor:
    """[B, T] position of each token inside its document."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    if cu_seqlens is None:
        return (index + start).expand(tokens.shape)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), index.to(cu_seqlens.dtype), right=True)
    return (index - cu_seqlens[document]).expand(tokens.shape)
