"""The residual path over depth: plain sum, or Attention Residuals (arXiv 2603.15031), full and in blocks.

Sublayers (attention and MLP each count as one) read their input from the stream and write their output to it:

    plain    h_l = v_0 + v_1 + ... + v_{l-1}                             v_0 the embedding, v_i the output of sublayer i
    scalars  plain, with h <- s h + e v_0 before every layer             two learned numbers a layer, 1 and 0 at first
    attnres  h_l = sum_i a_i v_i,   a = softmax_i(w_l . RMSNorm_g(v_i))   one learned query w_l and gain g_l per reader
    block    the same over block sums b_0 = v_0, b_1, ..., and the running sum of the open block

Scalars are those of modded-nanogpt and nanochat: the strengthened baseline that Attention Residuals have to beat.
Queries start at zero, so the mix starts as the mean: with the pre-norm that follows, the network starts as the plain
one. A block is closed by moving its running sum into the bank *before* the next mix (the embedding is "block 0",
counted once). Full Attention Residuals are blocks of one sublayer.

All queries of a block meet the finished blocks in one pass (`phase1`); each sublayer then only merges the running sum.

A sublayer reads through its pre-norm, and what it writes is added when the next one reads: on CUDA addition, mix and
norm are one kernel. See kernels/attnres/triton.py for the bank it keeps there.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from perilune.kernels.attnres import fused_block_takes, merge, mix, phase1
from perilune.kernels.norm import add_rms_norm, rms_norm, takes_triton
from perilune.model.linear import RMSNorm
from perilune.optim.matrices import Adam, Layout

if TYPE_CHECKING:
    from perilune.kernels.attnres.triton import Bank, Carried


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


class ResidualScalars(nn.Module):
    """What a layer does to the plain sum before it reads: s h + e v_0."""

    def __init__(self) -> None:
        super().__init__()
        self.sum_scale = nn.Parameter(torch.ones(()))
        self.embedding_scale = nn.Parameter(torch.zeros(()))

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"sum_scale": Adam(), "embedding_scale": Adam()}


class Stream(NamedTuple):
    """The state of the residual path between two sublayers. A value: reading and writing return new streams."""

    bank: tuple[Tensor, ...]
    """Finished sources: the embedding, then one sum per closed block. Empty on the plain path."""
    running: Tensor | None
    """Plain: the whole sum. Otherwise the sum of the open block, None when nothing was added since it opened."""
    queries: tuple[Tensor, ...]
    """Folded query of every site in reading order, the output's last. Empty on the plain path."""
    pending: Tensor | None = None
    """What was written last; the next reader adds it to the running sum."""
    block: int = 1
    site: int = 0
    ahead: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
    """Phase 1 of the open block: for each of its sites, the output over the bank and the log-sum-exp."""
    eps: float = 1e-6
    embedding: Tensor | None = None
    """Of the path with scalars: what they add again."""
    fused: bool = False
    """Addition, mix and norm run as one kernel. Decided once: the gradients of the bank take another way then."""
    fused_bank: "Bank | None" = None
    """Fused: takes the place of `bank`."""
    fused_running: "Carried | None" = None
    """Fused: takes the place of `running` while a block is open."""
    fused_ahead: "tuple[list[Carried], list[Tensor]] | None" = None
    """Fused: takes the place of `ahead`, for each site of the block but the first."""
    all_queries: Tensor | None = None
    """Fused: the folded queries of all sites [Q, d]."""
    block_sizes: tuple[int, ...] = ()
    """Fused: sites of each block, then 1 for the output."""

    def read(self, norm: RMSNorm | None = None) -> tuple[Tensor, "Stream"]:
        """The input of the next sublayer (or of the head), normed if a norm is given."""
        if self.fused:
            if norm is None:
                raise ValueError("norm is None: a fused stream is read through the RMSNorm that follows")
            return self._read_plain_fused(norm) if not self.queries else self._read_fused(norm)
        h, stream = self._added()._read()
        return (h if norm is None else norm(h)), stream

    def write(self, output: Tensor) -> "Stream":
        assert self.pending is None, "written twice without a read"
        return self._replace(pending=output)

    def rescaled(self, scalars: ResidualScalars) -> "Stream":
        """The plain sum times one number, plus the embedding times another."""
        stream = self._added()
        assert stream.running is not None and stream.embedding is not None
        running = scalars.sum_scale * stream.running + scalars.embedding_scale * stream.embedding
        return stream._replace(running=running)

    def _added(self) -> "Stream":
        if self.pending is None:
            return self
        return self._replace(
            running=self.pending if self.running is None else self.running + self.pending, pending=None
        )

    def _read(self) -> tuple[Tensor, "Stream"]:
        if not self.queries:
            assert self.running is not None
            return self.running, self
        if self.site == len(self.queries) - 1:
            sources = self.bank if self.running is None else (*self.bank, self.running)
            return mix(sources, self.queries[-1], eps=self.eps), self
        stream = self._open_block() if self.site % self.block == 0 else self
        return stream._mixed(), stream._replace(site=stream.site + 1)

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

    def _read_plain_fused(self, norm: RMSNorm) -> tuple[Tensor, "Stream"]:
        assert self.running is not None
        if self.pending is None:
            return rms_norm(self.running, norm.weight, norm.eps), self
        pending = self.pending.to(self.running.dtype)
        total, normed = add_rms_norm(self.running, pending, norm.weight, norm.eps)
        return normed, self._replace(running=total, pending=None)

    def _read_fused(self, norm: RMSNorm) -> tuple[Tensor, "Stream"]:
        from perilune.kernels.attnres.triton import Bank, Carried, triton_merge_norm, triton_open

        bank = Bank() if self.fused_bank is None else self.fused_bank
        offset = self.site % self.block
        if offset and self.site < len(self.queries) - 1:
            assert self.pending is not None and self.fused_ahead is not None
            outputs, log_sums = self.fused_ahead
            total, normed = triton_merge_norm(
                self.fused_running, self.pending, outputs[offset - 1], log_sums[offset - 1], self.queries[self.site],
                norm.weight, eps=self.eps, norm_eps=norm.eps, num_sources=len(bank.sources),
            )  # fmt: skip
            return normed, self._replace(fused_running=total, pending=None, site=self.site + 1)
        running, pending = self.fused_running, self.pending
        if running is None:
            # Nothing to add: the embedding, or the only output of its block.
            embedding_or_output = self.running if self.pending is None else self.pending
            assert embedding_or_output is not None
            running, pending = Carried(embedding_or_output), None
        assert self.all_queries is not None
        bank, normed, outputs, log_sums = triton_open(
            bank, running, pending, self.all_queries, norm.weight, sizes=self.block_sizes[len(bank.sources) :],
            all_queries=len(self.queries), eps=self.eps, norm_eps=norm.eps,
        )  # fmt: skip
        return normed, self._replace(
            fused_bank=bank, running=None, fused_running=None, pending=None, fused_ahead=(outputs, log_sums),
            site=self.site + 1,
        )  # fmt: skip


def plain_stream(embedding: Tensor, *, scalars: bool = False) -> Stream:
    """scalars: layers rescale it, and need the embedding again."""
    kept = embedding if scalars else None
    return Stream(bank=(), running=embedding, queries=(), embedding=kept, fused=takes_triton(embedding))


def attnres_stream(
    embedding: Tensor, sites: list[AttentionResidual], *, block_sublayers: int, fused: bool = True
) -> Stream:
    """`sites` in reading order: two per layer, then the output's. fused: take the fused kernels where they can run."""
    sublayers = len(sites) - 1
    sizes = [min(block_sublayers, sublayers - start) for start in range(0, sublayers, block_sublayers)]
    stream = Stream(bank=(), running=embedding, queries=(), block=block_sublayers, eps=sites[0].eps)
    if not (fused and fused_block_takes(embedding, len(sizes) + 1)):
        return stream._replace(queries=tuple(site.folded() for site in sites))
    # All at once, and taken apart by two operations: a launch for each site and each gradient would cost more than
    # their arithmetic.
    folded = torch.stack([site.gain for site in sites]).float() * torch.stack([site.query for site in sites]).float()
    return stream._replace(
        queries=folded.unbind(0),
        all_queries=folded,
        block_sizes=(*sizes, 1),
        fused=True,
    )
