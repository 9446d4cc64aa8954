"""The decoupled encoder step: the vision tower runs apart from the language model, with the same gradients.

For all micro-batches of one rank and one optimizer step (arXiv 2602.02276, "decoupled encoder process"):

1. the tower looks at all media in groups balanced by patches, and keeps the features only, no activations;
2. the language model takes its micro-batches with the features as leaves, whose gradients are stored;
3. the tower looks at every group again, and the stored gradients go through it.

So activations of the tower and of the language model are never in memory together, one group's at a time, and however
uneven the pictures of the micro-batches are, the tower's work comes in even pieces. The price is a second forward pass
of the tower. Gradients equal those of the plain step up to the order of sums over groups.

On many ranks the tower's weights are gathered for every group, so all ranks look equally often: those with fewer groups
look at their first item again, and nothing comes back from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from perilune.model import Decoder, MediaInput
from perilune.model.vision_grids import Grid, tokens_of
from perilune.train.batches import MicroBatch, uncounted
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
    patches = [prod(item.grid) for item in items]
    groups = balanced(patches, ceil(sum(patches) / patches_per_group))
    (most,) = largest_over_ranks((len(groups),), batches[0].tokens_BT.device)
    # Only for the sake of other ranks. Where any rank has a picture, all have one, if only in a filler.
    idle = [[0]] * (most - len(groups))

    leaves = _features(model, items, groups, idle, len(batches))
    losses = []
    for batch, leaf in zip(batches, leaves, strict=True):
        media = batch.media if leaf is None or batch.media is None else batch.media.with_features(leaf)
        with uncounted(model, batch.filler):
            loss = model.loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens, media=media)
        (loss / max(1, num_targets)).backward()
        losses.append(loss.detach())

    gradients = _of_items([None if leaf is None else leaf.grad for leaf in leaves], items)
    del leaves
    for group in groups:
        features = _look(model, [items[number] for number in group])
        features.backward(torch.cat([gradients[number] for number in group]))
    for group in idle:
        features = _look(model, [items[number] for number in group])
        features.backward(torch.zeros_like(features))
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


def _look(model: Decoder, group: Sequence[Item]) -> Tensor:
    return model.vision_features(torch.cat([item.pixels for item in group]), [item.grid for item in group])


@torch.no_grad()
def _features(
    model: Decoder,
    items: Sequence[Item],
    groups: Sequence[Sequence[int]],
    idle: Sequence[Sequence[int]],
    num_batches: int,
) -> list[Tensor | None]:
    """What the language model reads of the media of every micro-batch, as leaves; None where it has none."""
    found: dict[int, Tensor] = {}
    for group in groups:
        features = _look(model, [items[number] for number in group])
        found |= zip(group, features.split([tokens_of(items[number].grid) for number in group]), strict=True)
    for group in idle:
        _look(model, [items[number] for number in group])
    of_batch: list[list[Tensor]] = [[] for _ in range(num_batches)]
    for number, item in enumerate(items):
        of_batch[item.batch].append(found[number])
    return [torch.cat(pieces).requires_grad_() if pieces else None for pieces in of_batch]


def _of_items(gradients: Sequence[Tensor | None], items: Sequence[Item]) -> list[Tensor]:
    """The gradient of every item's features, cut out of those of its micro-batch."""
    found: list[Tensor] = []
    for number, gradient in enumerate(gradients):
        sizes = [tokens_of(item.grid) for item in items if item.batch == number]
        if gradient is not None:
            found += gradient.split(sizes)
    return found
