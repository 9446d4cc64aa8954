"""Tokens for a batch of sequences, each with its own settings, and the log-probs that were asked for.

What happens to a row of logits, in this order:

    1. repetition penalty r, tokens of prompt and answer:    x / r if x > 0 else x * r
    2. frequency and presence penalty, answer alone:         x - frequency * count - presence * (count > 0)
    3. logit bias:                                           x + bias
    4. bans (-inf): forbidden ids; stop ids before min_tokens; what the grammar does not allow
    5. the draw of model/sampling.py with uniform(seed, tokens sampled before)

What is promised:
  * a sequence's tokens do not depend on what else is in the batch, and equal those of model.generate;
  * log-probs are those of softmax(logits) as they came: before all of the above;
  * a row that cannot be sampled has a problem, in words, and id 0; the others are not touched;
  * on CUDA `sample` does not wait for the device: ids stay there, a copy is under way, and `host()` waits for it.
    Counts for penalties live there too, so the next step can be launched before the ids are known.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from perilune.model.sampling import (
    FINE,
    PROBLEMS,
    UNIFORM,
    Arranged,
    Settings,
    draw,
    scrambled,
    to_device,
    uniforms,
)
from perilune.serve.request import SamplingParams, TokenLogprob
from perilune.serve.sample_graphs import IDS, LOGPROBS, PROBLEM_CODES, SampleGraphs

if TYPE_CHECKING:
    from perilune.serve.grammar import GrammarState

SCORED_ELEMENTS = 1 << 26  # prompt log-probs are computed for so many logits at a time


class SamplerRow:
    """What the sampler knows of one sequence. Make one per request and keep it: it counts what was sampled."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: Sequence[int] = (),
        generated: Sequence[int] = (),
        stop_ids: frozenset[int] = frozenset(),
        grammar: "GrammarState | None" = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.grammar = grammar
        self.index = len(generated)
        """How many tokens were sampled before the next one."""
        self.is_penalized = (
            params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        )
        self._history = (prompt, tuple(generated))
        self._counts_V: Tensor | None = None
        self._prompted_V: Tensor | None = None
        self.stop_ids = np.array(sorted(stop_ids), dtype=np.int64)
        self.bias_ids = np.array(list(params.logit_bias.keys()), dtype=np.int64)
        self.bias = np.array(list(params.logit_bias.values()), dtype=np.float64)

    @property
    def bans_stops(self) -> bool:
        """A grammar that has come to its end allows nothing but a stop id, whatever `min_tokens` says."""
        return self.index < self.params.min_tokens and not (self.grammar is not None and self.grammar.is_finished)

    def counts(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """(times in the answer int64 [V], whether in the prompt bool [V]), on the device."""
        if self._counts_V is None or self._prompted_V is None:
            prompt, generated = (np.array(ids, dtype=np.int64) for ids in self._history)
            self._counts_V = to_device(np.bincount(generated, minlength=vocab_size)[:vocab_size], device)
            self._prompted_V = to_device(np.bincount(prompt, minlength=vocab_size)[:vocab_size] > 0, device)
        return self._counts_V, self._prompted_V

    def count(self, ids_1: Tensor) -> None:
        """One more token of the answer; its id stays on the device."""
        assert self._counts_V is not None
        self._counts_V.index_add_(0, ids_1, torch.ones_like(ids_1))


@dataclass(frozen=True, kw_only=True)
class HostSampled:
    """What was sampled, on the host, one entry per row."""

    token_ids: list[int]
    problems: list[str | None]
    """Why a row has no token; its id is 0 then."""
    logprobs: list[TokenLogprob | None]
    """Where they were asked for."""

    def tokens(self) -> Sequence[int | None]:
        """None where there is none."""
        if not any(self.problems):
            return self.token_ids
        return [None if problem else token for token, problem in zip(self.token_ids, self.problems)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Sampled:
    token_ids: Tensor
    """[N] int64, on the device"""
    host: Callable[[], HostSampled]
    """Waits for the copy."""


class _Batch:
    """What follows from the parameters of some rows; from one step to the next they are mostly the same."""

    def __init__(self, rows: Sequence[SamplerRow], vocab_size: int) -> None:
        self.rows = list(rows)
        params = [row.params for row in rows]
        settings = Settings(
            temperature=[each.temperature for each in params],
            top_k=[each.top_k for each in params],
            top_p=[each.top_p for each in params],
            min_p=[each.min_p for each in params],
            uniform=[0.0] * len(params),
        )
        self._arranged = Arranged.of(settings, vocab_size)
        self._seeds = scrambled([row.seed for row in rows])
        self.asked = [n for n, each in enumerate(params) if each.logprobs is not None]
        self.tops = [params[n].logprobs or 0 for n in self.asked]
        self.penalized = [n for n, row in enumerate(rows) if row.is_penalized]
        self.biased = [n for n, row in enumerate(rows) if len(row.bias_ids)]
        self.may_ban_stops = [n for n, each in enumerate(params) if each.min_tokens]
        self.constrained = [n for n, row in enumerate(rows) if row.grammar is not None]
        self._is_plain = not (self.penalized or self.biased or self.constrained or any(self.tops))

    def is_plain_now(self) -> bool:
        """Nothing but bans of all rows changes the logits, and log-probs, if any, are those of drawn tokens alone."""
        return self._is_plain and not any(self.rows[n].bans_stops for n in self.may_ban_stops)

    def settings(self) -> Arranged:
        """Of the next token of every row."""
        if self._arranged.groups:
            indices = np.array([row.index for row in self.rows], np.uint64)
            self._arranged.columns[UNIFORM] = uniforms(self._seeds, indices)
        return self._arranged


class Sampler:
    def __init__(
        self,
        vocab_size: int,
        forbidden: Iterable[int] = (),
        device: torch.device | str = "cpu",
        *,
        use_graphs: bool | None = None,
    ) -> None:
        """`forbidden` ids are never sampled: pads of pictures, reserved ids, those the tokenizer does not have.
        use_graphs: None takes them on CUDA; False never; True also draws padded on a CPU, for tests."""
        self.vocab_size = vocab_size
        ids = sorted(set(forbidden))
        if ids and not 0 <= ids[0] <= ids[-1] < vocab_size:
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            raise ValueError(f"forbidden holds {wrong!r}, expected ids in [0, {vocab_size})")
        banned = np.zeros(vocab_size, dtype=bool)
        banned[ids] = True
        if banned.all():
            raise ValueError(f"all {vocab_size} tokens are forbidden: nothing is left to sample")
        self._banned_V = torch.from_numpy(banned).to(device) if banned.any() else None
        self._nothing = torch.tensor(-torch.inf, device=device)
        self._batch = _Batch((), vocab_size)
        place = torch.device(device)
        on_cuda = place.type == "cuda"
        takes_graphs = on_cuda if use_graphs is None else use_graphs
        self._graphs = None
        if takes_graphs:
            self._graphs = SampleGraphs(self._banned_V, self._nothing, device=place, capture=on_cuda)

    @torch.no_grad()
    def sample(self, logits_NV: Tensor, rows: Sequence[SamplerRow], *, often: bool = False) -> Sampled:
        """One token for every row. The logits are left as they are. `often`: so many rows will be sampled again and
        again, which is worth a graph."""
        if logits_NV.shape != (len(rows), self.vocab_size):
            raise ValueError(
                f"logits have the shape {tuple(logits_NV.shape)!r}, expected [{len(rows)}, {self.vocab_size}]"
            )
        if self._batch.rows != list(rows):  # not the same objects in the same order
            self._batch = _Batch(rows, self.vocab_size)
        batch = self._batch
        if often and rows and self._graphs is not None and batch.is_plain_now():
            block_3N = self._graphs.run(logits_NV, batch.settings())
            if block_3N is not None:
                return _unpacked(block_3N, rows, batch.asked)
        changed_NV, failures = self._changed(logits_NV, batch)
        ids_N, problems_N = draw(changed_NV, batch.settings())
        asked, scores = batch.asked, None
        if asked:
            all_asked = len(asked) == len(rows)
            index_n = None if all_asked else to_device(np.array(asked), logits_NV.device)
            some_NV, some_N = (logits_NV, ids_N) if index_n is None else (logits_NV[index_n], ids_N[index_n])
            scores = score(some_NV, some_N, batch.tops)
        wait = start_copy(ids_N, problems_N)
        for row in rows:  # last: whoever calls again after an error finds the rows as they were
            row.index += 1
        for n in batch.penalized:
            rows[n].count(ids_N[n : n + 1])

        def host() -> HostSampled:
            ids, codes = (tensor.tolist() for tensor in wait())
            problems: list[str | None] = [None] * len(codes)
            if any(codes):
                problems = [None if code == FINE else PROBLEMS[code] for code in codes]
            for n, failure in failures.items():
                ids[n], problems[n] = 0, failure
            logprobs: list[TokenLogprob | None] = [None] * len(rows)
            for n, logprob in zip(asked, scores() if scores is not None else []):
                logprobs[n] = logprob if problems[n] is None else None
            return HostSampled(token_ids=ids, problems=problems, logprobs=logprobs)

        return Sampled(token_ids=ids_N, host=host)

    def _changed(self, logits_NV: Tensor, batch: _Batch) -> tuple[Tensor, dict[int, str]]:
        """Logits after penalties, bias and bans; and why a grammar failed, by row."""
        device, original_NV, rows = logits_NV.device, logits_NV, batch.rows
        if batch.penalized:
            index_n = to_device(np.array(batch.penalized), device)
            changed = _penalized(logits_NV[index_n], [rows[n] for n in batch.penalized])
            logits_NV = logits_NV.index_copy(0, index_n, changed)
        # Ids outside the vocabulary are left out below: they would take the device down.
        biased = _flat((n, rows[n].bias_ids) for n in batch.biased)
        if biased is not None:
            bias = np.concatenate([rows[n].bias for n in batch.biased])
            inside = biased[1] < self.vocab_size
            where, values = _index(biased[:, inside], device), to_device(bias[inside], device)
            logits_NV = logits_NV.clone() if logits_NV is original_NV else logits_NV
            logits_NV[where] = logits_NV[where] + values.to(logits_NV.dtype)
        if self._banned_V is not None:
            logits_NV = torch.where(self._banned_V, self._nothing, logits_NV)  # sooner than masked_fill on a CPU
        unready = _flat((n, rows[n].stop_ids) for n in batch.may_ban_stops if rows[n].bans_stops)
        if unready is not None:
            logits_NV = logits_NV.clone() if logits_NV is original_NV else logits_NV
            where = _index(unready[:, unready[1] < self.vocab_size], device)
            logits_NV.index_put_(where, self._nothing.to(logits_NV.dtype))  # a number of the host would be waited for
        return self._constrained(logits_NV, batch)

    def _constrained(self, logits_NV: Tensor, batch: _Batch) -> tuple[Tensor, dict[int, str]]:
        failures: dict[int, str] = {}
        masks: dict[int, np.ndarray] = {}
        for n in batch.constrained:
            grammar = batch.rows[n].grammar
            assert grammar is not None
            mask = grammar.mask(self.vocab_size)
            if mask is None:
                failures[n] = grammar.error or "the grammar failed"
            else:
                masks[n] = mask
        if not masks:
            return logits_NV, failures
        index_n = to_device(np.array(list(masks)), logits_NV.device)
        bits_nW = to_device(np.stack(list(masks.values())), logits_NV.device)
        places_B = torch.arange(32, dtype=torch.int32, device=logits_NV.device)
        allowed_nV = ((bits_nW[:, :, None] >> places_B) & 1).bool().flatten(1)[:, : self.vocab_size]
        return logits_NV.index_copy(0, index_n, logits_NV[index_n].masked_fill(~allowed_nV, -torch.inf)), failures


def _unpacked(block_3N: Tensor, rows: Sequence[SamplerRow], asked: Sequence[int]) -> Sampled:
    """What a graph gave."""
    wait = start_copy(block_3N)
    for row in rows:
        row.index += 1

    def host() -> HostSampled:
        (block,) = wait()
        ids = block[IDS].long().tolist()
        problems: list[str | None] = [None] * len(ids)
        logprobs: list[TokenLogprob | None] = [None] * len(ids)
        if block[PROBLEM_CODES].any():
            codes = block[PROBLEM_CODES].long().tolist()
            problems = [None if code == FINE else PROBLEMS[code] for code in codes]
        scores = block[LOGPROBS].tolist()
        for n in asked:
            logprobs[n] = TokenLogprob(ids[n], scores[n]) if problems[n] is None else None
        return HostSampled(token_ids=ids, problems=problems, logprobs=logprobs)

    return Sampled(token_ids=block_3N[IDS].long(), host=host)


def _penalized(logits_NV: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    device = logits_NV.device
    counts, prompted = zip(*(row.counts(logits_NV.shape[1], device) for row in rows), strict=True)
    counts_NV, prompted_NV = torch.stack(counts), torch.stack(prompted)
    named = [(row.params.repetition_penalty, row.params.frequency_penalty, row.params.presence_penalty) for row in rows]
    penalties = to_device(np.array(named), device).to(logits_NV.dtype)
    repetition_N1, frequency_N1, presence_N1 = penalties.split(1, dim=1)
    answered_NV = counts_NV > 0
    repeated_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    logits_NV = torch.where(answered_NV | prompted_NV, repeated_NV, logits_NV)
    return logits_NV - (frequency_N1 * counts_NV + presence_N1 * answered_NV)


def _flat(places: Iterable[tuple[int, np.ndarray]]) -> np.ndarray | None:
    """[2, M]: row and token id of every place."""
    found = list(places)
    if not found:
        return None
    numbers = np.repeat([number for number, _ in found], [len(ids) for _, ids in found])
    return np.stack([numbers, np.concatenate([ids for _, ids in found])])


def _index(places: np.ndarray, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(to_device(np.ascontiguousarray(places), device))


# --- log-probs --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def score(logits_NV: Tensor, ids_N: Tensor, tops: Sequence[int]) -> Callable[[], list[TokenLogprob]]:
    """Log-probs of `ids` and of the `tops[n]` most likely tokens of each row; the call waits for the copy."""
    top = min(max(tops, default=0), logits_NV.shape[1])
    tile = max(1, SCORED_ELEMENTS // logits_NV.shape[1])
    parts = []
    for start in range(0, len(ids_N), tile):
        some_NV, some_N1 = logits_NV[start : start + tile], ids_N[start : start + tile, None]
        found = [(some_NV.gather(-1, some_N1), some_N1), *([some_NV.topk(top, dim=-1)] if top else [])]
        values, ids = (torch.cat(each, dim=1) for each in zip(*found, strict=True)) if top else found[0]
        parts.append((ids, values - some_NV.logsumexp(-1, keepdim=True)))
    if not parts:
        return list
    wait = start_copy(*(torch.cat(each) if len(each) > 1 else each[0] for each in zip(*parts, strict=True)))

    def host() -> list[TokenLogprob]:
        if not top:
            return list(map(TokenLogprob, *(tensor[:, 0].tolist() for tensor in wait())))
        ids, logprobs = (tensor.tolist() for tensor in wait())
        return [
            TokenLogprob(
                token_id=row_ids[0],
                logprob=row[0],
                top=tuple(zip(row_ids[1 : wanted + 1], row[1 : wanted + 1], strict=True)),
            )
            for row_ids, row, wanted in zip(ids, logprobs, tops, strict=True)
        ]

    return host


def score_prompt(logits_TV: Tensor, targets: Sequence[int], top: int) -> Callable[[], list[TokenLogprob]]:
    """Log-probs of the tokens that follow; row t of the logits predicts targets[t]."""
    if len(logits_TV) != len(targets):
        raise ValueError(f"{len(logits_TV)} rows of logits predict {len(targets)} tokens, expected as many")
    return score(logits_TV, to_device(np.array(targets, dtype=np.int64), logits_TV.device), [top] * len(targets))


def start_copy(*tensors: Tensor) -> Callable[[], list[Tensor]]:
    """Begin to copy to the host; the call waits until the copies are there."""
    if not any(tensor.is_cuda for tensor in tensors):
        return lambda: list(tensors)
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors):
        copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[Tensor]:
        done.synchronize()
        return copies

    return wait
