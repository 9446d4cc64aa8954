"""The experts of every token that the pages of an engine hold, for routing replay (model/routes.py).

A book has a row for each row of each page, and one page more for padding: the choice of a token lies where its latents
lie. Whoever takes over a page from the prefix cache therefore takes over its routes, and what is computed anew is
recorded anew. When the weights change, nothing cached is found again, so routes never outlive the weights that chose.

What a request gets: for each of its tokens that was computed, the experts with which it was computed when a token was
first sampled from it or behind it. After a pre-emption, or new weights, the sequence is computed again, perhaps with
other experts; those with which its tokens were sampled have been kept (`Kept`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from perilune.model import ModelConfig
from perilune.model.paged import rows_of
from perilune.model.routes import Recorded, new_book


class RouteBook:
    """Routes of the tokens in `num_pages` pages of `page_size`."""

    def __init__(self, config: ModelConfig, *, num_pages: int, page_size: int, device: torch.device) -> None:
        self.book = new_book(config, (num_pages + 1) * page_size, device)
        self._page_size, self._device = page_size, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def at(self, rows: Tensor) -> Recorded:
        """For a step that writes its tokens to these rows of the pages."""
        return Recorded(book=self.book, rows=rows)

    def gather(self, pages: Sequence[int], start: int, end: int) -> Tensor:
        """[end - start, layers, k] on the device: of tokens start .. end of the sequence with these pages."""
        rows = rows_of(torch.tensor(pages, dtype=torch.long, device=self._device), end, self._page_size)[start:]
        return self.book.index_select(1, rows).transpose(0, 1)

    def read(self, kept: Kept, pages: Sequence[int], end: int) -> np.ndarray:
        """[end - kept.start, layers, k] uint8 or uint16: what was kept, and the rest from the pages.

        For tokens whose step is over: a step under way is not waited for. More may be kept, of rounds that a burst went
        on after the end.
        """
        if kept.parts and self._stream is not None:  # gathered perhaps a moment ago, in the stream of the steps
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with self._beside():
            parts = [*kept.parts, *([self.gather(pages, kept.end, end)] if end > kept.end else [])]
            empty = self.book[:, :0].transpose(0, 1)
            found = torch.cat(parts or [empty])[: max(0, end - kept.start)].cpu().numpy()
        return found if found.dtype == np.uint8 else found.view(np.uint16)

    def _beside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


@dataclass
class Kept:
    """Routes of one request from token `start` on that the pages may not hold any more."""

    start: int
    parts: list[Tensor] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + sum(map(len, self.parts))

    def keep(self, book: RouteBook, pages: Sequence[int], end: int) -> None:
        """Before the pages are given up: what of tokens up to `end` is not kept yet."""
        if end > self.end:
            self.parts.append(book.gather(pages, self.end, end))
