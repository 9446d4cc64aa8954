"""Pictures of all ranks, dealt out among the ranks by patches; what each rank made of them goes back to their owners.

    deal = dealt_out(grids)                             grids of this rank's own items; all ranks call together
    pixels = deal.there(own_pixels, like, rows)         of the items that this rank looks at, `deal.grids`
    features = deal.back(made_of_them, like, rows)      of its own items

Every rank knows the grids of all, so every rank finds the same deal: the largest item first, each to the rank with the
least patches so far, its owner where that is as good. So no rank has more than 4/3 of the patches of the best deal, and
equal pictures in equal numbers do not travel. Gradients are sums over ranks (parallel.py), whoever computed them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from perilune.model.vision_grids import Grid
from perilune.train.ranks import distributed, rank, world_size


@dataclass(frozen=True, kw_only=True)
class Deal:
    """holders: of each own item, the rank that looks at it. owners, grids: of each item that this rank looks at."""

    holders: tuple[int, ...]
    owners: tuple[int, ...]
    grids: tuple[Grid, ...]

    def there(self, pieces: Sequence[Tensor], like: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Rows of each held item, from rows of each own one. `rows` says how many each held item has; `like` has the
        dtype and, behind the first, the sizes of all."""
        return _moved(pieces, self.holders, self.owners, rows, like)

    def back(self, pieces: Sequence[Tensor], like: Tensor, rows: Sequence[int]) -> list[Tensor]:
        """Rows of each own item, from rows of each held one; `rows` of each own item."""
        return _moved(pieces, self.owners, self.holders, rows, like)


def dealt_out(grids: Sequence[Grid]) -> Deal:
    """Who looks at what. All ranks call it together."""
    if not distributed() or world_size() == 1:
        return Deal(holders=(0,) * len(grids), owners=(0,) * len(grids), grids=tuple(grids))
    everyone: list[list[Grid]] = [[] for _ in range(world_size())]
    dist.all_gather_object(everyone, list(grids))
    holders = deal_by_size([[prod(grid) for grid in owned] for owned in everyone])
    held = [
        (owner, grid)
        for owner, owned in enumerate(everyone)
        for number, grid in enumerate(owned)
        if holders[owner][number] == rank()
    ]
    return Deal(
        holders=tuple(holders[rank()]),
        owners=tuple(owner for owner, _ in held),
        grids=tuple(grid for _, grid in held),
    )


def deal_by_size(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of the items that each rank owns, given by size, the rank that each goes to."""
    # One item of each rank after another: else the first rank would deal its equal items out before others keep theirs.
    items = sorted((-size, number, owner) for owner, owned in enumerate(sizes) for number, size in enumerate(owned))
    sums = [0] * len(sizes)
    holders = [[0] * len(owned) for owned in sizes]
    for size, number, owner in items:
        holder = min(range(len(sizes)), key=lambda each: (sums[each], each != owner))
        holders[owner][number] = holder
        sums[holder] -= size
    return holders


def _moved(
    pieces: Sequence[Tensor], to: Sequence[int], source: Sequence[int], rows: Sequence[int], like: Tensor
) -> list[Tensor]:
    """Pieces to the ranks `to`; those that come from the ranks `source`, with `rows` rows each. Both keep their order
    between any two ranks."""
    if not distributed() or world_size() == 1:
        return list(pieces)
    order = sorted(range(len(pieces)), key=lambda number: to[number])
    sent = torch.cat([like[:0], *(pieces[number] for number in order)]).contiguous()
    arriving = sorted(range(len(rows)), key=lambda number: source[number])
    came = like.new_empty((sum(rows), *like.shape[1:]))
    counts_out, counts_in = [0] * world_size(), [0] * world_size()
    for number, piece in enumerate(pieces):
        counts_out[to[number]] += len(piece)
    for number, count in enumerate(rows):
        counts_in[source[number]] += count
    # As bytes, which every backend carries.
    dist.all_to_all_single(_as_bytes(came), _as_bytes(sent), counts_in, counts_out)
    ends = accumulate(rows[number] for number in arriving)
    found = {number: came[end - rows[number] : end] for number, end in zip(arriving, ends, strict=True)}
    return [found[number] for number in range(len(rows))]


def _as_bytes(rows: Tensor) -> Tensor:
    """The same memory as uint8 [rows, bytes of a row]."""
    return rows.view(len(rows), prod(rows.shape[1:])).view(torch.uint8)
