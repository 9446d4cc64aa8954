"""The residual path of block Attention Residuals in a decoding step on CUDA: `Stream` of residual.py for a few tokens.

Sublayers read and write as ever. The sources lie in one bank that grows in place, and every read is one kernel
(kernels/attnres/few_rows.py): it adds what was written last, mixes and norms. Where a block begins it puts the sum of
the one before into the bank, and mixes the bank for the later readers of the block too, each of which then has one
vector to join with the running sum. Not for training: nothing here has a gradient.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from perilune.kernels.attnres import fused_block_takes
from perilune.model.linear import RMSNorm

if TYPE_CHECKING:
    from perilune.kernels.attnres.few_rows import Ahead
    from perilune.model.residual import AttentionResidual


class DecodeStream(NamedTuple):
    """A value, but for the bank: a stream that was read is not read again."""

    bank: Tensor
    """[most sources, ..., d]"""
    sites: list[AttentionResidual]
    """In reading order: two per layer, then the output's."""
    block: int
    pending: Tensor | None
    """What was written last; at first the embedding."""
    running: Tensor | None = None
    """Sum of the open block without it; None when that is all there is."""
    num_sources: int = 0
    site: int = 0
    opened: int = 0
    """The site that opened the block."""
    ahead: Ahead | None = None
    """What the bank is to the later sites of the block."""

    def read(self, norm: RMSNorm) -> tuple[Tensor, DecodeStream]:
        """The normed input of the next sublayer, or of the head."""
        assert self.pending is not None, "read twice without a write"
        pending = self.pending.to(self.bank.dtype)
        if self.site % self.block == 0 and self.site < len(self.sites) - 1:
            return self._open(pending, norm)
        if self.ahead is None:
            return self._read_all(pending, norm)
        site = self.sites[self.site]
        total, normed = few_rows().merge_few_rows(
            self.ahead, self.site - self.opened - 1, self.running, pending, site.query, site.gain, norm.weight,
            eps=site.eps, norm_eps=norm.eps,
        )  # fmt: skip
        return normed, self._replace(pending=None, running=total, site=self.site + 1)

    def _open(self, pending: Tensor, norm: RMSNorm) -> tuple[Tensor, DecodeStream]:
        """The sum of the block before becomes a source; the sites of the new one, and the head's after the last, look
        ahead."""
        last = len(self.sites) - 1
        end = min(self.site + self.block, last)
        readers = self.sites[self.site : end + (end == last)]
        is_long = len(readers) > few_rows().MOST_READERS
        if is_long:
            readers = readers[:1]
        _, normed, ahead = few_rows().open_few_rows(
            self.bank, self.num_sources, self.running, pending, [site.query for site in readers],
            [site.gain for site in readers], norm.weight, eps=readers[0].eps, norm_eps=norm.eps, closes=True,
        )  # fmt: skip
        return normed, self._replace(
            pending=None, running=None, num_sources=self.num_sources + 1, site=self.site + 1, opened=self.site,
            ahead=None if is_long else ahead,
        )  # fmt: skip

    def _read_all(self, pending: Tensor, norm: RMSNorm) -> tuple[Tensor, DecodeStream]:
        """Of a block of many sites: each mixes the whole bank."""
        site = self.sites[self.site]
        total, normed = few_rows().read_few_rows(
            self.bank, self.num_sources, self.running, pending, site.query, site.gain, norm.weight, eps=site.eps,
            norm_eps=norm.eps, closes=False,
        )  # fmt: skip
        return normed, self._replace(pending=None, running=total, site=self.site + 1)

    def write(self, output: Tensor) -> DecodeStream:
        assert self.pending is None, "written twice without a read"
        return self._replace(pending=output)


def decode_stream(embedding: Tensor, sites: list[AttentionResidual], *, block_sublayers: int) -> DecodeStream | None:
    """None where the kernel does not run: elsewhere than on CUDA, for many tokens, or for many blocks."""
    sublayers = len(sites) - 1
    most_sources = -(-sublayers // block_sublayers) + 1
    if torch.is_grad_enabled() or not fused_block_takes(embedding, most_sources):
        return None
    if not few_rows().takes_few_rows(embedding, most_sources):
        return None
    return DecodeStream(
        bank=embedding.new_empty(most_sources, *embedding.shape), sites=sites, block=block_sublayers, pending=embedding
    )  # fmt: skip


def few_rows() -> ModuleType:
    """Of kernels/attnres: imported where it is used, since a machine may have no Triton."""
    from perilune.kernels.attnres import few_rows

    return few_rows
