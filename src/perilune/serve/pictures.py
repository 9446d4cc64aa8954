"""Features of pictures by what they show: a picture is looked at once, however many requests and chunks show it.

`FeatureStore` keeps what the vision tower made of pictures under their keys (sha256 of grid and pixels) and drops the
least recently used when they take more bytes than allowed. `media_of` lays the features of a step at their rows; a
chunk may begin or end inside a picture, so only the part of it that lies in the chunk is taken. The new pictures of a
step go through the tower together: for a small tower launches take longer than their arithmetic.

What this promises: equal keys give the same tensor until it is dropped; dropping changes time, never results. The
picture that was asked for last always stays, even if it alone is larger than the limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from perilune.model import Decoder, MediaInput
from perilune.model.vision_grids import tokens_of
from perilune.serve.plan import Share
from perilune.serve.request import Picture

DEFAULT_BYTES = 256 << 20
PATCHES_TOGETHER = 16_384
"""About the largest picture of the published processor."""


class FeatureStore:
    """Features [tokens, hidden] of pictures, least recently used first."""

    def __init__(self, model: Decoder, *, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes!r}, expected at least 0")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_looks = 0
        """Pictures that the vision tower was shown."""
        self._model = model
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def features(self, picture: Picture) -> Tensor:
        if picture.key not in self._kept:
            self._keep(picture, self._look([picture])[0])
        self._kept.move_to_end(picture.key)
        return self._kept[picture.key]

    def look_at(self, pictures: Iterable[Picture]) -> None:
        """Make the features of these pictures, as many in one go as PATCHES_TOGETHER allows."""
        new = {picture.key: picture for picture in pictures if picture.key not in self._kept}
        for group in _groups(new.values()):
            for picture, features in zip(group, self._look(group), strict=True):
                self._keep(picture, features.clone())  # a view would keep the whole group in memory

    def forget(self) -> None:
        """Of weights that are no longer those of the model."""
        self._kept.clear()
        self.num_bytes = 0

    def _keep(self, picture: Picture, features: Tensor) -> None:
        self._kept[picture.key] = features
        self.num_bytes += _bytes(features)
        while self.num_bytes > self.max_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            self.num_bytes -= _bytes(dropped)

    @torch.no_grad()
    def _look(self, pictures: list[Picture]) -> list[Tensor]:
        self.num_looks += len(pictures)
        pixels = torch.cat([torch.from_numpy(picture.pixels) for picture in pictures])
        grids = tuple(picture.grid for picture in pictures)
        features = self._model.vision_features(pixels.to(self._model.embed_tokens.weight.device), grids)
        return list(features.split([tokens_of(grid) for grid in grids]))


def _groups(pictures: Iterable[Picture]) -> Iterator[list[Picture]]:
    """Of at most PATCHES_TOGETHER patches, but never less than one picture."""
    group: list[Picture] = []
    patches = 0
    for picture in pictures:
        if group and patches + prod(picture.grid) > PATCHES_TOGETHER:
            yield group
            group, patches = [], 0
        group.append(picture)
        patches += prod(picture.grid)
    if group:
        yield group


def media_of(placed: Iterable[tuple[Share, int]], store: FeatureStore, *, together: bool = True) -> MediaInput | None:
    """The features of a step, given its shares with the row of each one's first token; None without any.

    `together` False shows every picture to the tower alone, for bits that do not depend on what else is new.
    """
    shown = []
    for share, first_row in placed:
        for picture in share.pictures:
            start, end = max(picture.start, share.start), min(picture.end, share.end)
            if start < end:
                shown.append((picture, start, end, first_row - share.start))
    if not shown:
        return None
    if together:
        store.look_at(picture for picture, *_ in shown)
    features = [
        store.features(picture)[start - picture.start : end - picture.start] for picture, start, end, _ in shown
    ]
    positions = [torch.arange(start, end) + offset for _, start, end, offset in shown]
    return MediaInput(positions=torch.cat(positions).to(features[0].device), features=torch.cat(features))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
