"""The decoupled encoder step: the vision tower runs apart from the language model, with the same gradients.

For all micro-batches of one optimizer step (arXiv 2602.02276, "decoupled encoder process"):

1. the media of all ranks are dealt out among the ranks by patches (media_exchange.py); the tower looks at them in
   groups balanced by patches and keeps the features only, no activations; these go back to whose media they are;
2. the language model takes its micro-batches with the features as leaves, whose gradients are stored;
3. the gradients go to where the media were looked at; the tower looks at every group again, and they go through it.

So activations of the tower and of the language model are never in memory together, one group's at a time, and however
uneven the pictures of ranks and micro-batches are, the tower's work comes in even pieces. The price is a second forward
pass of the tower and, for media that another rank looks at, the way of pixels, features and gradients. Gradients equal
those of the plain step up to the order of sums over groups and ranks.

On many ranks the tower's weights are gathered for every group, so all ranks look equally often: those with fewer groups
look at their first item again, and nothing comes back from it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from perilune.model import Decoder, MediaInput
from perilune.model.vision_grids import Grid, tokens_of
from perilune.train.batches import MicroBatch, uncounted
from perilune.train.media_exchange import Deal, dealt_out
from perilune.train.ranks import largest_over_ranks

PATCHES_PER_GROUP = 16_384
"""About the largest picture of the published processor; enough to fill a GPU."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Item:
    """One picture or chunk of video, and whose it is."""

    batch: int
    """Number of the micro-batch."""
    pixels: Tensor
    grid: Grid


def decoupled_backward(
    model: Decoder,
    batches: Sequence[MicroBatch],
    num_targets: int,
    *,
    patches_per_group: int | None = None,
) -> list[Tensor]:
    """Gradients of the loss per target into .grad; the loss of every micro-batch in nats, summed over its targets.

    The media of the micro-batches hold pixels. A group of the tower holds about `patches_per_group` patches at most
    (None: PATCHES_PER_GROUP), but never less than one item. All ranks call it together.
    """
    patches_per_group = PATCHES_PER_GROUP if patches_per_group is None else patches_per_group
    if patches_per_group < 1:
        raise ValueError(f"patches_per_group is {patches_per_group!r}, expected at least 1")
    items = [item for number, batch in enumerate(batches) for item in _items(number, batch.media)]
    deal = dealt_out([item.grid for item in items])
    patches = [prod(grid) for grid in deal.grids]
    groups = balanced(patches, ceil(sum(patches) / patches_per_group))
    (most,) = largest_over_ranks((len(groups),), batches[0].tokens_BT.device)
    work = _Work(model=model, items=items, deal=deal, groups=groups, num_idle=most - len(groups))

    leaves = work.leaves(len(batches)) if most else [None] * len(batches)
    losses = []
    for batch, leaf in zip(batches, leaves, strict=True):
        media = batch.media if leaf is None or batch.media is None else batch.media.with_features(leaf)
        with uncounted(model, batch.filler):
            loss = model.loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens, media=media)
        (loss / max(1, num_targets)).backward()
        losses.append(loss.detach())

    gradients = _of_items([None if leaf is None else leaf.grad for leaf in leaves], items)
    del leaves
    if most:
        work.take_back(gradients)
    return losses


def balanced(sizes: Sequence[int], groups: int) -> list[list[int]]:
    """Numbers of the items in each group, in rising order: the longest first, each to the group with least so far.

    No group is empty; there are as many as `groups`, or as items where they are fewer. The largest sum is at most 4/3
    of the best possible.
    """
    count = min(groups, len(sizes))
    held: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for item in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        least = min(range(count), key=lambda group: (sums[group], len(held[group])))
        held[least].append(item)
        sums[least] += sizes[item]
    return [sorted(group) for group in held]


def _items(number: int, media: MediaInput | None) -> list[Item]:
    if media is None:
        return []
    if media.pixels is None:
        raise ValueError(
            f"the media of micro-batch {number} hold features, expected pixels: the tower is to look at them"
        )
    pieces = media.pixels.split([prod(grid) for grid in media.grids])
    return [Item(batch=number, pixels=piece, grid=grid) for piece, grid in zip(pieces, media.grids, strict=True)]


def _look(model: Decoder, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> Tensor:
    return model.vision_features(torch.cat(list(pixels)), list(grids))


@dataclass(kw_only=True, eq=False)
class _Work:
    """The tower's part of a step on this rank: what it looks at, for itself and for others."""

    model: Decoder
    items: Sequence[Item]
    deal: Deal
    groups: Sequence[Sequence[int]]
    """Numbers of held items."""
    num_idle: int
    """Looks only for the sake of other ranks. Where any rank has a picture, all have one, if only in a filler."""

    def __post_init__(self) -> None:
        self._like: Tensor | None = None
        self._pixels: list[Tensor] = []
        if self.items:
            own = [item.pixels for item in self.items]
            self._pixels = self.deal.there(own, own[0][:0], [prod(grid) for grid in self.deal.grids])

    def _looks(self) -> Iterator[tuple[Sequence[int], Tensor]]:
        """Every group with its features, then looks at an own item with no group."""
        for group in self.groups:
            grids = [self.deal.grids[number] for number in group]
            yield group, _look(self.model, [self._pixels[number] for number in group], grids)
        for _ in range(self.num_idle):
            yield (), _look(self.model, [self.items[0].pixels], [self.items[0].grid])

    @torch.no_grad()
    def leaves(self, num_batches: int) -> list[Tensor | None]:
        """What the language model reads of the media of every micro-batch; None where it has none."""
        found: dict[int, Tensor] = {}
        for group, features in self._looks():
            self._like = features[:0]
            if group:
                sizes = [tokens_of(self.deal.grids[number]) for number in group]
                found |= zip(group, features.split(sizes), strict=True)
        assert self._like is not None
        held = [found[number] for number in range(len(found))]
        own = self.deal.back(held, self._like, [tokens_of(item.grid) for item in self.items])
        of_batch: list[list[Tensor]] = [[] for _ in range(num_batches)]
        for item, features in zip(self.items, own, strict=True):
            of_batch[item.batch].append(features)
        return [torch.cat(pieces).requires_grad_() if pieces else None for pieces in of_batch]

    def take_back(self, gradients: Sequence[Tensor]) -> None:
        """Gradients of the features of own items, through the tower."""
        assert self._like is not None
        held = self.deal.there(gradients, self._like, [tokens_of(grid) for grid in self.deal.grids])
        for group, features in self._looks():
            gradient = torch.cat([held[number] for number in group]) if group else torch.zeros_like(features)
            features.backward(gradient)


def _of_items(gradients: Sequence[Tensor | None], items: Sequence[Item]) -> list[Tensor]:
    """The gradient of every item's features, cut out of those of its micro-batch."""
    found: list[Tensor] = []
    for number, gradient in enumerate(gradients):
        sizes = [tokens_of(item.grid) for item in items if item.batch == number]
        if gradient is not None:
            found += gradient.split(sizes)
    return found
