"""Memory as a GPU hands it out: full of what was there before, with other tensors before and after it.

Inside `fenced_memory` everything that kernels allocate lies between two fences and begins as NaN (the largest number in
integers). A read of memory nobody wrote, or beyond the end, then shows in a result even where it is multiplied by
zero; a write beyond the end shows in a fence. `Fences.around` puts a tensor that exists into such memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

FENCE = 512
"""Elements before and after: a multiple of 16 bytes in every dtype, which kernels ask of addresses."""


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _shape(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else tuple(sizes)


class Fences:
    """All memory handed out so far."""

    def __init__(self) -> None:
        self._memory: list[tuple[Tensor, int]] = []

    def __len__(self) -> int:
        return len(self._memory)

    def new(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = torch.Size(shape).numel()
        memory = torch.full((size + 2 * FENCE,), _poison(dtype), dtype=dtype)
        self._memory.append((memory, size))
        return memory[FENCE : FENCE + size].view(shape)

    def around(self, x: Tensor) -> Tensor:
        return self.new(tuple(x.shape), x.dtype).copy_(x.detach())

    def broken(self) -> list[int]:
        """Sizes of the tensors beside which somebody wrote."""
        found = []
        for memory, size in self._memory:
            fences = torch.cat([memory[:FENCE], memory[FENCE + size :]])
            whole = fences.isnan() if memory.is_floating_point() else fences == _poison(memory.dtype)
            if not whole.all():
                found.append(size)
        return found


@contextmanager
def fenced_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fences]:
    """torch.empty and torch.zeros with their relatives hand out fenced memory inside, on the CPU."""
    fences = Fences()
    empty_like = torch.empty_like

    def empty(*sizes: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        assert torch.device(device or "cpu").type == "cpu"
        return fences.new(_shape(sizes), dtype or torch.get_default_dtype())

    def like(x: Tensor, **options: Any) -> Tensor:
        wanted = empty_like(x, **options)
        return fences.new((wanted.numel(),), wanted.dtype).as_strided(wanted.shape, wanted.stride(), FENCE)

    def new_empty(x: Tensor, *sizes: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        return empty(*sizes, dtype=dtype or x.dtype, device=device)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch, "empty_like", like)
        patch.setattr(Tensor, "new_empty", new_empty)
        patch.setattr(torch, "zeros", lambda *sizes, **options: empty(*sizes, **options).zero_())
        patch.setattr(torch, "zeros_like", lambda x, **options: like(x, **options).zero_())
        patch.setattr(Tensor, "new_zeros", lambda x, *sizes, **options: new_empty(x, *sizes, **options).zero_())
        yield fences
