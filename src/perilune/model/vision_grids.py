"""Pictures and chunks of video packed one after the other: what is asked of their grids, and in which order they run.

A media item is a grid (t, h, w): t frames of h x w patches, its patches in the order frame, row, column. A batch is the
patches of all items in one row [P, ...] and the grids, as numbers on the host: no shape is ever read from the device.
Items with equally many patches stand next to each other inside the tower, so that one call of attention serves them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from math import prod

import torch
from torch import Tensor

Grid = tuple[int, int, int]

MERGE = 2
"""Neighbours of this many rows and columns become one token of the language model."""
MAX_SIDE = 512
"""Patches along one side of a picture."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The items of a batch in the order in which the tower holds them."""

    order: tuple[int, ...]
    """Number of the item that comes first, second, ..."""
    runs: tuple[tuple[Grid, int], ...]
    """Equal grids next to each other, and how many."""
    lengths: tuple[tuple[int, int], ...]
    """Patches of an item, and how many items next to each other have so many."""

    def arranged(self, rows: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Patches [P, ...] of items in the order they came -> in the order of the tower."""
        return _permuted(rows, [prod(grid) for grid in grids], self.order)

    def restored(self, tokens: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Merged tokens [N, ...] in the order of the tower -> in the order the items came."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return _permuted(tokens, [tokens_of(grids[item]) for item in self.order], back)


def _permuted(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    # Pieces and not an index: an index would have to be copied to the device.
    if list(order) == sorted(order):
        return rows
    pieces = rows.split(list(sizes))
    return torch.cat([pieces[item] for item in order])


def tokens_of(grid: Grid) -> int:
    """Tokens of the language model that an item becomes: its frames are averaged, 2x2 patches merged."""
    _, height, width = grid
    return (height // MERGE) * (width // MERGE)


def host_grids(grids: Iterable[Sequence[int]]) -> tuple[Grid, ...]:
    """Grids as plain numbers; ValueError for what is no list of (t, h, w)."""
    if isinstance(grids, Tensor):
        raise ValueError("grids is a tensor, expected tuples (t, h, w) of plain numbers: use grids.tolist() once")
    found = tuple(tuple(int(side) for side in grid) for grid in grids)
    for grid in found:
        if len(grid) != 3:
            raise ValueError(f"grids holds {grid!r}, expected (t, h, w): frames, rows and columns of patches")
    return found  # type: ignore[return-value]


@lru_cache(maxsize=1024)
def arrange(grids: tuple[Grid, ...], max_frames: int) -> Arrangement:
    """The arrangement of a batch of media; ValueError names the first grid that the tower does not take."""
    for number, grid in enumerate(grids):
        _check(number, grid, max_frames)
    order = sorted(range(len(grids)), key=lambda item: (prod(grids[item]), grids[item]))
    held = [grids[item] for item in order]
    return Arrangement(
        order=tuple(order),
        runs=tuple((grid, len(list(equal))) for grid, equal in groupby(held)),
        lengths=tuple(Counter(prod(grid) for grid in held).items()),
    )


def _check(number: int, grid: Grid, max_frames: int) -> None:
    frames, height, width = grid
    what = f"media item {number} has the grid {grid!r} (t, h, w)"
    if min(grid) < 1:
        raise ValueError(f"{what}: expected at least one frame, row and column")
    if frames > max_frames:
        raise ValueError(f"{what}: expected at most {max_frames} frames; cut the video into chunks of {max_frames}")
    if height % MERGE or width % MERGE:
        raise ValueError(
            f"{what}: expected even h and w, since {MERGE}x{MERGE} patches become one token; pad the picture"
        )
    if max(height, width) > MAX_SIDE:
        raise ValueError(f"{what}: expected at most {MAX_SIDE} patches a side; scale the picture down")
