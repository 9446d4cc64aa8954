"""Many sequences in one step: what a server's decoder is given, and the pools in which it remembers.

A step runs one packed row of T tokens. First come the decodes, one token of each of D sequences; behind them the
chunks, runs of tokens of N further sequences. Every token knows its position in its own sequence.

    row    = [ decode 0 | decode 1 | ... | chunk 0 ........ | chunk 1 ..... ]

Two pools, made once, hold what is remembered; sequences own parts of them:

    LatentPool   an MLA layer: pages of `page_size` tokens. Token i of a sequence lies in row i % page_size of page
                 block_table[i // page_size]; one page more than asked for is scratch, where padding writes.
    StatePool    a KDA layer: one slot per sequence (state and convolution window), whatever its length.

What this promises: a step gives every sequence what it would get alone, in any mix of decodes and chunks, with any
pages and slots. A decode with slot -1, length 0 and its write row on the scratch page is padding: it changes nothing
that is read, and its output means nothing. A step without chunks never waits for the host on CUDA (with weights and
pools that the kernels take), so that it can be captured in a CUDA graph; one with chunks does not either if it comes
from padded_batch.py.

Shape letters: T tokens of the row, D decodes, N chunks, M pages of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perilune.model.documents import Packing

if TYPE_CHECKING:  # a config names the layers, and the layers name what is here
    from perilune.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunks:
    """The runs of tokens behind the decodes.

    Where the host knows their lengths, each can be attended to by itself. In a step that is part of a CUDA graph
    (padded_batch.py) it does not: `lengths` is None, some runs may be empty, and `joined` says where their keys are.
    """

    cu_seqlens: Tensor
    """[N + 1] borders, counted from the first token behind the decodes."""
    slots: Tensor
    """[N] int64"""
    origins: Tensor
    """[2, T - D] int32: for every token the first one of its chunk, counted as the borders are, and its slot."""
    lengths: tuple[int, ...] | None = None
    """Tokens of every chunk."""
    cached_rows: tuple[Tensor, ...] = ()
    """For every chunk int64 [end]: the rows of the pools that hold its sequence up to the chunk's end."""
    joined: JoinedKeys | None = None
    """Where the chunks see few keys together; None: each is attended to by itself."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JoinedKeys:
    """The cached rows of all chunks of a step one after the other, so that one call attends to all of them."""

    rows: Tensor
    """[all keys, or more] int64: rows of the pools, chunk by chunk"""
    query_borders: Tensor
    """[N + 1] int32 of the chunks' tokens"""
    key_borders: Tensor
    """[N + 1] int32 of the rows"""
    most_queries: int
    most_keys: int
    """Of one chunk, or more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodePlaces:
    """Where the decodes of a step find what they remember, worked out once for all layers.

    For steps whose numbers the host knows and whose memory it shares (a CPU). None of the decodes is padding.
    """

    slots: slice | Tensor
    """Slots that lie in a row are read and written where they are; others [D] int64 are gathered and put back."""
    rows: Tensor
    """[D, T] int64: rows of the pools of latents, T the longest sequence; past the end of a shorter one its first."""
    outside: Tensor | None
    """[D, 1, T] true past the end of a sequence; None when all are equally long."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedBatch(Packing):
    """One step. `positions` is [1, T]; `cu_seqlens` stays None: the borders are those of the chunks."""

    tokens: Tensor
    """[1, T]"""
    write_rows: Tensor
    """[T] int64: page * page_size + row of every token"""
    slots: Tensor
    """[D] of the decodes, int64; -1 is padding."""
    block_table: Tensor
    """[D, M] int32 pages of the decodes in order; entries past the end may hold anything."""
    lengths: Tensor
    """[D] int32: tokens of each sequence with the new one; 0 is padding."""
    chunks: Chunks | None = None
    wanted: Tensor | None = None
    """[W] int64 rows whose hidden states are returned; None: all."""
    places: DecodePlaces | None = None
    """Of the decodes; None: the operators find them from the numbers on the device."""

    @property
    def num_decodes(self) -> int:
        return self.slots.shape[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class LatentPool:
    """What an MLA layer remembers of all sequences."""

    pages: Tensor
    """[pages + 1, page_size, R + rope]; the last one is scratch."""

    @property
    def rows(self) -> Tensor:
        return self.pages.flatten(0, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class StatePool:
    """What a KDA layer remembers of all sequences."""

    state: Tensor
    """[slots, H, K, V] float32 (float64 in a float64 model)"""
    conv: Tensor
    """[slots, C, W - 1]: the last raw inputs of the convolutions, oldest first, in the compute dtype"""


@dataclass(frozen=True, kw_only=True, eq=False)
class PagedCache:
    """One pool per layer; made by `new_paged_cache`."""

    layers: tuple[LatentPool | StatePool, ...]
    page_size: int
    by_slot: tuple[Tensor, ...] = ()
    """[KDA layers, slots, ...]: the states of all layers, then their windows, of which each layer's pool is a part.

    A sequence begins, and a snapshot is taken, by one operation on each instead of two for every layer.
    """

    @property
    def scratch_row(self) -> int:
        """Where padding writes its latents: the first row behind the pages of sequences."""
        return self.num_pages * self.page_size

    @property
    def num_pages(self) -> int:
        """Pages of sequences, without the scratch page; 0 when no layer has pages."""
        return next((pool.pages.shape[0] - 1 for pool in self.layers if isinstance(pool, LatentPool)), 0)

    def copy_state(self, source: int, target: int) -> None:
        """Make the states of slot `target` those of `source`."""
        for tensor in self.by_slot:
            tensor[:, target] = tensor[:, source]

    def clear_state(self, slot: int) -> None:
        """The states of a sequence that has not begun."""
        for tensor in self.by_slot:
            tensor[:, slot] = 0

    def num_bytes(self) -> int:
        held = [*(pool.pages for pool in self.layers if isinstance(pool, LatentPool)), *self.by_slot]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)


def new_paged_cache(
    config: ModelConfig, *, num_pages: int, page_size: int, num_slots: int, device: torch.device | str | None = None
) -> PagedCache:
    """Zeroed pools for every layer of a model. Zeroed because 0 * NaN is NaN where a kernel reads a row it masks."""
    for name, value in (("num_pages", num_pages), ("page_size", page_size), ("num_slots", num_slots)):
        if value < 1:
            raise ValueError(f"{name} is {value!r}, expected at least 1")
    kinds = config.layer_pattern()
    state, (channels, width) = _slot_shapes(config)
    slots = (kinds.count("kda"), num_slots)
    if torch.device(device or "cpu").type == "cpu":
        # Position by position in memory: a CPU then adds up whole rows of channels.
        windows = torch.zeros(*slots, width, channels, dtype=config.dtype()).mT
    else:
        windows = torch.zeros(*slots, channels, width, dtype=config.dtype(), device=device)
    states = torch.zeros(*slots, *state, dtype=_state_dtype(config), device=device)
    of_layers = iter(zip(states.unbind(0), windows.unbind(0), strict=True))
    layers: list[LatentPool | StatePool] = []
    for kind in kinds:
        if kind == "mla":
            shape = (num_pages + 1, page_size, _latent_width(config))
            layers.append(LatentPool(pages=torch.zeros(shape, dtype=config.dtype(), device=device)))
        else:
            own_states, own_windows = next(of_layers)
            layers.append(StatePool(state=own_states, conv=own_windows))
    return PagedCache(layers=tuple(layers), page_size=page_size, by_slot=(states, windows))


def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype | None = None) -> int:
    """Of one page in all MLA layers together; 0 for a model without them."""
    item = (config.dtype() if dtype is None else dtype).itemsize
    return config.layer_pattern().count("mla") * page_size * _latent_width(config) * item


def bytes_per_slot(config: ModelConfig) -> int:
    """Of the states of one sequence in all KDA layers together."""
    state, conv = _slot_shapes(config)
    one = torch.Size(state).numel() * _state_dtype(config).itemsize + torch.Size(conv).numel() * config.dtype().itemsize
    return config.layer_pattern().count("kda") * one


def rows_of(pages: Tensor, end: int, page_size: int) -> Tensor:
    """[end] rows of the first `end` tokens of a sequence with these pages [M] int64."""
    within = torch.arange(page_size, device=pages.device)
    return (pages[: -(-end // page_size), None] * page_size + within).flatten()[:end]


def _latent_width(config: ModelConfig) -> int:
    return config.mla.kv_lora_rank + config.mla.qk_rope_head_dim


def _slot_shapes(config: ModelConfig) -> tuple[tuple[int, int, int], tuple[int, int]]:
    heads, dim, width = config.kda.num_heads, config.kda.head_dim, config.kda.short_conv_kernel_size
    return (heads, dim, dim), (3 * heads * dim, width - 1)


def _state_dtype(config: ModelConfig) -> torch.dtype:
    return torch.float64 if config.dtype() == torch.float64 else torch.float32
