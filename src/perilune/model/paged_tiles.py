"""The deterministic mode (deterministic.py) over pools: runs of tokens tile by tile, with pages and slots as memory.

A run begins at a multiple of TILE. Its slot holds the states at that border and moves on with every full tile; the
latents of its tokens are written to its pages as they come, those of an open tile again, with the same bits, whenever
the tile runs again. Rows that only fill a tile up are written nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.model.cache import KDACache
from perilune.model.deterministic import TILE, Latents, States, media_between, run_tile
from perilune.model.paged import LatentPool, PagedCache, StatePool, rows_of
from perilune.model.paged_batch import Run
from perilune.model.routes import Recorded
from perilune.model.vision import MediaInput

if TYPE_CHECKING:
    from perilune.model.decoder import Decoder


@dataclass(frozen=True, eq=False)
class _PagedLatents:
    pool: LatentPool
    rows: Tensor
    """[end of the tile's tokens] rows of the pool, in order of positions"""
    start: int

    def with_tile(self, tile_TD: Tensor) -> Tensor:
        own = self.rows[self.start :]
        self.pool.rows.index_copy_(0, own, tile_TD[: len(own)])
        return torch.cat([self.pool.rows.index_select(0, self.rows[: self.start]), tile_TD])


@dataclass(frozen=True, eq=False)
class _SlotStates:
    pool: StatePool
    slot: int
    is_full: bool

    def before(self) -> KDACache:
        own = slice(self.slot, self.slot + 1)
        conv = self.pool.conv[own].to(self.pool.state.dtype)
        return KDACache(state=self.pool.state[own].clone(), conv=conv.mT.contiguous().mT)

    def after(self, cache: KDACache) -> None:
        if self.is_full:
            assert cache.state is not None and cache.conv is not None
            self.pool.state[self.slot] = cache.state[0]
            self.pool.conv[self.slot] = cache.conv[0].to(self.pool.conv.dtype)


@torch.no_grad()
def run_tiles(
    model: Decoder, run: Run, cache: PagedCache, media: MediaInput | None = None, book: Tensor | None = None
) -> Tensor:
    """Hidden states [tokens of the run, hidden]; `media` has positions counted from the run's first token.

    book: where the experts of every token are recorded (routes.py), in the rows of its latents.
    """
    pages = torch.tensor(run.pages, dtype=torch.long, device=model.embed_tokens.weight.device)
    found = []
    for first in range(0, len(run.tokens), TILE):
        tokens = run.tokens[first : first + TILE]
        start = run.start + first
        rows = rows_of(pages, start + len(tokens), cache.page_size)
        memory: list[Latents | States] = []
        for pool in cache.layers:
            if isinstance(pool, LatentPool):
                memory.append(_PagedLatents(pool, rows, start))
            else:
                memory.append(_SlotStates(pool, run.slot, len(tokens) == TILE))
        routes = None if book is None else Recorded(book=book, rows=rows[start:])
        shown = media_between(media, first, first + len(tokens))
        found.append(run_tile(model, tokens, start, memory, shown, routes))
    return torch.cat(found)
