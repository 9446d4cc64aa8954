"""Features of pictures by what they show: a picture is looked at once, however many requests and chunks show it.

`FeatureStore` keeps what the vision tower made of pictures under their keys (sha256 of grid and pixels) and drops the
least recently used when they take more bytes than allowed. `media_of` lays the features of a step at their rows; a
chunk may begin or end inside a picture, so only the part of it that lies in the chunk is taken.

What this promises: equal keys give the same tensor until it is dropped; dropping changes time, never results. The
picture that was asked for last always stays, even if it alone is larger than the limit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor

from perilune.model import Decoder, MediaInput
from perilune.serve.plan import Share
from perilune.serve.request import Picture

DEFAULT_BYTES = 256 << 20


class FeatureStore:
    """Features [tokens, hidden] of pictures, least recently used first."""

    def __init__(self, model: Decoder, *, max_bytes: int = DEFAULT_BYTES) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes!r}, expected at least 0")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_looks = 0
        """How often the vision tower ran."""
        self._model = model
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def features(self, picture: Picture) -> Tensor:
        kept = self._kept.get(picture.key)
        if kept is None:
            kept = self._look(picture)
            self._kept[picture.key] = kept
            self.num_bytes += _bytes(kept)
            while self.num_bytes > self.max_bytes and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self.num_bytes -= _bytes(dropped)
        else:
            self._kept.move_to_end(picture.key)
        return kept

    def forget(self) -> None:
        """Of weights that are no longer those of the model."""
        self._kept.clear()
        self.num_bytes = 0

    @torch.no_grad()
    def _look(self, picture: Picture) -> Tensor:
        self.num_looks += 1
        pixels = torch.from_numpy(picture.pixels).to(self._model.embed_tokens.weight.device)
        return self._model.vision_features(pixels, (picture.grid,))


def media_of(placed: Iterable[tuple[Share, int]], store: FeatureStore) -> MediaInput | None:
    """The features of a step, given its shares with the row of each one's first token; None without any."""
    positions, features = [], []
    for share, first_row in placed:
        for picture in share.pictures:
            start, end = max(picture.start, share.start), min(picture.end, share.end)
            if start < end:
                features.append(store.features(picture)[start - picture.start : end - picture.start])
                positions.append(torch.arange(start, end) + (first_row - share.start))
    if not features:
        return None
    return MediaInput(positions=torch.cat(positions).to(features[0].device), features=torch.cat(features))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
