"""One part of a row of tokens whose other parts are on other ranks, and where the documents in it begin and end.

Rank r of R has the tokens [r T, (r + 1) T) of a row of R T. Documents are cut wherever the ranks are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from perilune.kernels.documents import document_borders


@dataclass(frozen=True, kw_only=True)
class ContextPart:
    group: ProcessGroup
    rank: int
    num_tokens: int
    """T, of this part."""
    borders: tuple[int, ...] | None
    """Of the documents in this part, from 0 to T; None: every row of the batch is one document."""
    before: int
    """Tokens of the first document that are on earlier ranks."""
    goes_on: bool
    """Whether the last document goes on at the next rank."""

    @property
    def start(self) -> int:
        return self.rank * self.num_tokens

    @property
    def first_end(self) -> int:
        """Where the first document ends in this part."""
        return self.num_tokens if self.borders is None else self.borders[1]

    @property
    def last_start(self) -> int:
        return 0 if self.borders is None else self.borders[-2]

    @property
    def is_one_document(self) -> bool:
        return self.borders is None or len(self.borders) == 2

    def cu_seqlens(self, like: Tensor) -> Tensor | None:
        """The borders on the device of `like`."""
        if self.borders is None:
            return None
        return torch.tensor(self.borders, dtype=torch.int32, device=like.device)


def context_part(x_BT: Tensor, cu_seqlens: Tensor | None, group: ProcessGroup) -> ContextPart:
    """x [B, T, ...]: this rank's part; cu_seqlens: the borders of the whole row, from 0 to R T."""
    batch, num_tokens = x_BT.shape[:2]
    borders = None
    if cu_seqlens is not None:
        borders = document_borders(cu_seqlens, batch=batch, num_tokens=num_tokens * group.size())
    rank = group.rank()
    local, before, goes_on = cut_borders(borders, rank, group.size(), num_tokens)
    return ContextPart(group=group, rank=rank, num_tokens=num_tokens, borders=local, before=before, goes_on=goes_on)


@lru_cache(maxsize=64)
def cut_borders(
    borders: tuple[int, ...] | None, rank: int, ranks: int, num_tokens: int
) -> tuple[tuple[int, ...] | None, int, bool]:
    """(borders inside the part, tokens of its first document before it, whether its last document goes on)"""
    start, stop = rank * num_tokens, (rank + 1) * num_tokens
    if borders is None:
        return None, start, rank + 1 < ranks
    inside = sorted({border for border in borders if start < border < stop})
    opened = max(border for border in borders if border <= start)
    return (0, *(border - start for border in inside), num_tokens), start - opened, stop not in borders
