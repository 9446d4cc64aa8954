"""Sequences that share pools of pages and slots, for tests of the paged path; plain bookkeeping without a scheduler."""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perilune.model import Decoder
from perilune.model.paged import PagedBatch, PagedCache, new_paged_cache
from perilune.model.paged_batch import mixed_batch


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A run, as the builder of batches reads it."""

    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    slot: int
    late_row: int | None = None


@dataclass(eq=False)
class Sequence:
    tokens: tuple[int, ...]
    slot: int
    pages: list[int] = field(default_factory=list)
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


@dataclass(eq=False)
class Pool:
    """Deals random pages and slots of one cache to sequences, and runs any mix of them."""

    model: Decoder
    cache: PagedCache
    free_pages: list[int]
    sequences: list[Sequence]

    @staticmethod
    def of(model: Decoder, prompts: list[tuple[int, ...]], *, page_size: int, seed: int) -> "Pool":
        shuffled = random.Random(seed)
        num_pages = sum(-(-len(prompt) // page_size) for prompt in prompts) + 2
        slots = shuffled.sample(range(len(prompts) + 2), len(prompts))
        pages = shuffled.sample(range(num_pages), num_pages)
        cache = new_paged_cache(model.config, num_pages=num_pages, page_size=page_size, num_slots=len(prompts) + 2)
        return Pool(model, cache, pages, [Sequence(prompt, slot) for prompt, slot in zip(prompts, slots)])

    def take(self, sequence: Sequence, count: int) -> Tokens:
        """The next `count` tokens of a sequence, which count as done."""
        end = sequence.done + count
        while len(sequence.pages) * self.cache.page_size < end:
            sequence.pages.append(self.free_pages.pop())
        taken = Tokens(
            start=sequence.done,
            tokens=sequence.tokens[sequence.done : end],
            pages=tuple(sequence.pages),
            slot=sequence.slot,
        )
        sequence.done = end
        return taken

    def batch(self, runs: list[Tokens], wanted: list[int] | None = None) -> PagedBatch:
        """The order of rows is that of `in_row_order`."""
        ordered = in_row_order(runs)
        decodes = [run for run in ordered if len(run.tokens) == 1]
        return mixed_batch(
            decodes,
            ordered[len(decodes) :],
            page_size=self.cache.page_size,
            scratch_row=self.cache.scratch_row,
            wanted=wanted,
        )


def in_row_order(runs: list[Tokens]) -> list[Tokens]:
    """Decodes first."""
    return sorted(runs, key=lambda run: len(run.tokens) > 1)


def alone(model: Decoder, tokens: tuple[int, ...]) -> Tensor:
    """[T, hidden], one token at a time through the ordinary cache."""
    cache = model.new_cache()
    with torch.no_grad():
        return torch.cat([model.hidden(torch.tensor([[token]]), cache=cache)[0] for token in tokens])
