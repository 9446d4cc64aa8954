"""The runner turns a plan of the scheduler into tensors, runs the model and gives back logits.

It owns the model and the pools (model/paged.py), and nothing else touches their memory. Where there is CUDA, steps of
decodes alone replay CUDA graphs (graphs.py), and so do most steps with chunks of prompts (mixed_graphs.py). On a CPU
decodes alone go straight through bound weights (model/decode_step.py). Every other step runs module by module.

    runner = Runner(model, num_pages=512, page_size=64, num_slots=64, max_sequences=32)
    logits = runner.run(plan, late_ids)          [rows wanted, vocabulary], in the order of the plan

What this promises: the logits of a share depend on its own sequence alone; weights are changed in place, so graphs stay
valid; with `deterministic` they are, bit by bit, those of the training forward in the same mode
(model/deterministic.py), however the sequences were batched, cut into chunks or continued from cached prefixes.

The runner takes possession of the model: it is put into evaluation mode, and in half precision its matrices are rounded
once instead of at every use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from perilune.kernels.cpu_products import fast_products
from perilune.model import Decoder
from perilune.model.decode_step import DecodeStep, bind
from perilune.model.deterministic import TILE, logits_of_rows
from perilune.model.linear import HALF, at_least_float32
from perilune.model.paged import PagedBatch, bytes_per_page, bytes_per_slot, new_paged_cache
from perilune.model.paged_batch import mixed_batch
from perilune.model.paged_tiles import run_tiles
from perilune.model.side_by_side import lay_apart, lay_side_by_side, round_matrices
from perilune.serve.graphs import DecodeGraphs
from perilune.serve.mixed_graphs import MixedGraphs, why_not
from perilune.serve.pictures import DEFAULT_BYTES, FeatureStore, media_of
from perilune.serve.plan import Share, StepPlan
from perilune.serve.routes import RouteBook

__all__ = ["Runner", "bytes_per_page", "bytes_per_slot"]

MANY_TOKENS = 512
"""In a step, most of them of prompts: with so many a faster path of some CPUs is worth preparing its new shapes."""


class Runner:
    """A model with pools for `num_pages` pages and `num_slots` slots; at most `max_sequences` decode in one step."""

    def __init__(
        self,
        model: Decoder,
        *,
        num_pages: int,
        page_size: int,
        num_slots: int,
        max_sequences: int,
        token_budget: int = 8192,
        deterministic: bool = False,
        device: torch.device | str | None = None,
        picture_bytes: int = DEFAULT_BYTES,
        use_graphs: bool | None = None,
        record_routes: bool = False,
    ) -> None:
        """token_budget: tokens of a step with chunks that are worth a graph; larger steps run without.
        use_graphs: None takes them on CUDA; False never; True also runs the padded steps on a CPU, for tests.
        record_routes: keep the experts of every token (routes.py)."""
        self.device = torch.device(device) if device is not None else model.embed_tokens.weight.device
        self.model = model.to(self.device).eval()
        if model.compute_dtype in HALF:
            round_matrices(model, model.compute_dtype)
        if deterministic:
            lay_apart(model)  # as weights lie in training
        else:
            lay_side_by_side(model)
        on_cuda = self.device.type == "cuda"
        takes_graphs = not deterministic and (on_cuda if use_graphs is None else use_graphs)
        self.cache = new_paged_cache(
            model.config, num_pages=num_pages, page_size=page_size, device=self.device,
            num_slots=num_slots + takes_graphs,  # the last one is scratch, where padding of chunks writes
        )  # fmt: skip
        self.pictures = FeatureStore(model, max_bytes=picture_bytes)
        if deterministic and page_size % TILE:
            raise ValueError(f"page_size is {page_size!r}, expected a multiple of {TILE} with deterministic=True")
        self.num_pages, self.page_size, self.num_slots = num_pages, page_size, num_slots
        self.deterministic = deterministic
        # Behind all pages, also where no layer keeps latents: the book of routes has pages then too.
        self._scratch_row = num_pages * page_size
        self.routes: RouteBook | None = None
        if record_routes:
            self.routes = RouteBook(model.config, num_pages=num_pages, page_size=page_size, device=self.device)
        self._tables = _PageTables()
        self._decode_step = None if deterministic else bind(model)
        self._graphs = self._mixed_graphs = None
        if takes_graphs:
            common = {
                "page_size": page_size, "scratch_row": self._scratch_row, "max_sequences": max_sequences,
                "device": self.device, "capture": on_cuda,
            }  # fmt: skip
            self._graphs = DecodeGraphs(self._logits, **common)
            with torch.no_grad():
                can_mix = not on_cuda or why_not(model, self.cache) is None
            if can_mix:
                self._mixed_graphs = MixedGraphs(
                    self._logits, scratch_slot=num_slots, max_tokens=token_budget,
                    has_latents=self.cache.num_pages > 0, **common,
                )  # fmt: skip

    @torch.inference_mode()
    def record_usual_steps(self) -> int:
        """Make the graphs that most requests will need, before there are any; returns how many there are then."""
        graphs = [each for each in (self._graphs, self._mixed_graphs) if each is not None]
        for each in graphs:
            each.record_usual()
        return sum(map(len, graphs))

    def run(self, plan: StepPlan, late_ids: Tensor | None = None, *, number: int = 0) -> Tensor:
        """Logits [rows wanted, vocabulary], at least float32, on the device, in the order of the plan's shares.

        late_ids: what was sampled in the step before, for shares with a `late_row`.
        number: of the round, for bursts: each after the one before it, whose ids are the late ones then.
        """
        # In inference mode operators start sooner, which is what a small step waits for.
        with torch.inference_mode(), self._products(plan):
            logits = self._run_later(plan, late_ids, number) if number else self._run(plan, late_ids)
        return logits.clone()  # outside, where the caller may change it in place

    def _products(self, plan: StepPlan) -> AbstractContextManager[None]:
        if self.device.type != "cpu" or self.deterministic or plan.num_tokens < MANY_TOKENS:
            return nullcontext()
        return fast_products(self.device)

    def _run(self, plan: StepPlan, late_ids: Tensor | None) -> Tensor:
        for share in plan.shares:
            self._check(share)
        if not plan.shares:
            return self.model.logits(self.model.embed_tokens.weight[:0])
        if self._graphs is not None and all(map(_is_plain_decode, plan.shares)):  # mostly: nothing is sorted out
            rounds = [share.rounds for share in plan.shares] if plan.rounds > 1 else None
            return self._graphs.run(plan.shares, self._tables.of(plan.shares), late_ids, rounds)
        if self.deterministic:
            return torch.cat([self._deterministic_logits(share) for share in plan.shares])
        decodes = [share for share in plan.shares if len(share.tokens) == 1]
        if self.device.type == "cpu" and self._graphs is None:
            decodes.sort(key=lambda share: share.slot)  # slots in a row need not be gathered
        chunks = [share for share in plan.shares if len(share.tokens) > 1]
        first_row = _first_rows((*decodes, *chunks))
        wanted = [row for share in plan.shares for row in _wanted_rows(share, first_row[id(share)])]
        media = media_of(((share, first_row[id(share)]) for share in plan.shares if share.pictures), self.pictures)
        if self._graphs is not None and not chunks and media is None:
            logits = self._graphs.run(decodes, self._tables.of(decodes), late_ids)
            if wanted == list(range(len(decodes))):
                return logits
            return logits[torch.tensor(wanted, dtype=torch.long, device=self.device)]
        if self._mixed_graphs is not None and chunks and media is None and all(run.want != "all" for run in chunks):
            pages = self._tables.of(decodes)
            logits = self._mixed_graphs.run(decodes, chunks, pages, wanted=wanted, late_ids=late_ids)
            if logits is not None:
                return logits
        is_all = not chunks and wanted == list(range(len(decodes)))
        batch = mixed_batch(
            decodes, chunks,
            page_size=self.page_size, scratch_row=self._scratch_row, wanted=None if is_all else wanted,
            late_ids=late_ids, device=self.device,
        )  # fmt: skip
        batch = self._recording(batch)
        step = self._bound_step() if batch.places is not None and not chunks and media is None else None
        hidden = self.model.step(batch, self.cache, media=media) if step is None else step(batch, self.cache)
        return self.model.logits(hidden)

    def _run_later(self, plan: StepPlan, late_ids: Tensor | None, number: int) -> Tensor:
        if self._graphs is not None:
            assert late_ids is not None and all(map(_is_plain_decode, plan.shares))
            return self._graphs.run_later(number, plan.in_round(number), late_ids)
        return self._run(plan.later_round(number), late_ids)

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        """Snapshots are slots too."""
        self._check_slot(source_slot)
        self._check_slot(target_slot)
        self.cache.copy_state(source_slot, target_slot)

    def clear_state(self, slot: int) -> None:
        self._check_slot(slot)
        self.cache.clear_state(slot)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor] | nn.Module) -> None:
        """Copy weights into those of the model, by name; nothing is changed unless all of them fit."""
        given = weights.state_dict() if isinstance(weights, nn.Module) else weights
        own = self.model.state_dict()
        if missing := sorted(own.keys() - given.keys()):
            raise ValueError(f"weights lack {missing[0]!r} (and {len(missing) - 1} more), expected all of the model's")
        if unknown := sorted(given.keys() - own.keys()):
            raise ValueError(
                f"weights hold {unknown[0]!r} (and {len(unknown) - 1} more), which the model does not have"
            )
        for name, tensor in own.items():
            if tuple(given[name].shape) != tuple(tensor.shape):
                raise ValueError(
                    f"weights[{name!r}] is {tuple(given[name].shape)}, expected {tuple(tensor.shape)}: "
                    "the model keeps its shape"
                )
        for name, tensor in own.items():
            tensor.copy_(given[name])
        self.pictures.forget()

    def _bound_step(self) -> DecodeStep | None:
        """Bound again where the weights have changed since."""
        if self._decode_step is not None and not self._decode_step.is_current():
            self._decode_step = bind(self.model)
        return self._decode_step

    def _logits(self, batch: PagedBatch) -> Tensor:
        return self.model.logits(self.model.step(self._recording(batch), self.cache))

    def _recording(self, batch: PagedBatch) -> PagedBatch:
        return batch if self.routes is None else replace(batch, routes=self.routes.at(batch.write_rows))

    def _deterministic_logits(self, share: Share) -> Tensor:
        if share.late_row is not None:
            raise ValueError(f"share of {share.request_id!r} has a late token: deterministic steps wait for their ids")
        book = None if self.routes is None else self.routes.book
        media = media_of([(share, 0)], self.pictures, together=False)
        hidden = run_tiles(self.model, share, self.cache, media, book)
        return at_least_float32(logits_of_rows(hidden[len(hidden) - share.num_rows :], self.model.head_weight()))

    def _check(self, share: Share) -> None:
        if not 0 <= share.slot < self.num_slots:
            self._check_slot(share.slot)
        if not share.tokens:
            raise ValueError(f"share of {share.request_id!r} has no tokens, expected at least one")
        if len(share.pages) * self.page_size < share.last_end and self.cache.num_pages:
            raise ValueError(
                f"share of {share.request_id!r} has {len(share.pages)} pages of {self.page_size} tokens, expected "
                f"enough for {share.last_end}"
            )

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot is {slot!r}, expected 0 .. {self.num_slots - 1}")


def _is_plain_decode(share: Share) -> bool:
    return len(share.tokens) == 1 and share.want == "last" and not share.pictures


def _first_rows(shares: Sequence[Share]) -> dict[int, int]:
    rows, found = 0, {}
    for share in shares:
        found[id(share)] = rows
        rows += len(share.tokens)
    return found


def _wanted_rows(share: Share, first: int) -> range:
    """Rows of a step in which the tokens of the share begin at row `first`."""
    end = first + len(share.tokens)
    return range(end - share.num_rows, end)


class _PageTables:
    """The pages of running sequences as arrays: those of a long one are turned into numbers when it gets a page, not at
    every step. A sequence keeps the same tuple until then."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[tuple[int, ...], np.ndarray]] = {}

    def of(self, decodes: Sequence[Share]) -> list[np.ndarray]:
        found = {}
        for share in decodes:
            pages, array = self._kept.get(share.request_id, ((), None))
            same = array is not None and pages is share.pages
            found[share.request_id] = (share.pages, array if same else np.array(share.pages, np.int32))
        self._kept = found
        return [found[share.request_id][1] for share in decodes]
