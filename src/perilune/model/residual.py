"""The residual path over depth: plain sum, or Attention Residuals (arXiv 2603.15031), full and in blocks.

Sublayers (attention and MLP each count as one) read their input from the stream and write their output to it:

    plain    h_l = v_0 + v_1 + ... + v_{l-1}                             v_0 the embedding, v_i the output of sublayer i
    attnres  h_l = sum_i a_i v_i,   a = softmax_i(w_l . RMSNorm_g(v_i))   one learned query w_l and gain g_l per reader
    block    the same over block sums b_0 = v_0, b_1, ..., and the running sum of the open block

Queries start at zero, so the mix starts as the mean: with the pre-norm that follows, the network starts as the plain
one. A block is closed by moving its running sum into the bank *before* the next mix (the embedding is "block 0",
counted once). Full Attention Residuals are blocks of one sublayer.

All queries of a block meet the finished blocks in one pass (`phase1`); each sublayer then only merges the running sum.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from perilune.kernels.attnres import merge, mix, phase1
from perilune.optim.matrices import Adam, Layout


class AttentionResidual(nn.Module):
    """One reading site: softmax over sources of query . RMSNorm(source)."""

    def __init__(self, hidden_size: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(hidden_size))
        self.gain = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, sources: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
        return mix(sources, self.query, gain=self.gain, eps=self.eps)

    def folded(self) -> Tensor:
        """Only gain * query enters the score."""
        return self.gain * self.query

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"query": Adam(), "gain": Adam()}


class Stream(NamedTuple):
    """The state of the residual path between two sublayers. A value: reading and writing return new streams."""

    bank: tuple[Tensor, ...]
    """Finished sources: the embedding, then one sum per closed block. Empty on the plain path."""
    running: Tensor | None
    """Plain: the whole sum. Otherwise the sum of the open block, None when nothing was written since it opened."""
    queries: tuple[Tensor, ...]
    """Folded query of every site in reading order, the output's last. Empty on the plain path."""
    block: int = 1
    site: int = 0
    ahead: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    """Phase 1 of the open block: for each of its sites, the output over the bank and the log-sum-exp."""
    eps: float = 1e-6

    def read(self) -> tuple[Tensor, "Stream"]:
        """The input of the next sublayer (or of the head)."""
        if not self.queries:
            assert self.running is not None
            return self.running, self
        if self.site == len(self.queries) - 1:
            sources = self.bank if self.running is None else (*self.bank, self.running)
            return mix(sources, self.queries[-1], eps=self.eps), self
        stream = self._open_block() if self.site % self.block == 0 else self
        return stream._mixed(), stream._replace(site=stream.site + 1)

    def write(self, output: Tensor) -> "Stream":
        return self._replace(running=output if self.running is None else self.running + output)

    def _open_block(self) -> "Stream":
        assert self.running is not None
        bank = (*self.bank, self.running)
        ahead = None
        if self.block > 1:
            # The head's query (the last) reads after the last block is closed, never ahead.
            queries = self.queries[self.site : min(self.site + self.block, len(self.queries) - 1)]
            outputs, log_sums = phase1(bank, torch.stack(queries), eps=self.eps)
            ahead = (outputs.unbind(0), log_sums.unbind(0))
        return self._replace(bank=bank, running=None, ahead=ahead)

    def _mixed(self) -> Tensor:
        query = self.queries[self.site]
        if self.ahead is None:
            return mix(self.bank, query, eps=self.eps)
        offset = self.site % self.block
        outputs, log_sums = self.ahead
        if self.running is None:
            return outputs[offset]
        return merge(outputs[offset], log_sums[offset], self.running, query, eps=self.eps)


def plain_stream(embedding: Tensor) -> Stream:
    return Stream(bank=(), running=embedding, queries=())


def attnres_stream(embedding: Tensor, sites: list[AttentionResidual], *, block_sublayers: int) -> Stream:
    """`sites` in reading order: two per layer, then the output's."""
    return Stream(
        bank=(),
        running=embedding,
        queries=tuple(site.folded() for site in sites),
        block=block_sublayers,
        eps=sites[0].eps,
    )
