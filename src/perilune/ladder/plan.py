"""What a ladder asks for, before anything runs: parameters, tokens, epochs, FLOPs, memory, time; and what cannot be.

Epochs are counted in unique tokens: a document that stands in the corpus twice counts once. Time is known where a cell
of the same rung and arm has run or its speed was measured (speed.py); else it may be assumed (cost.py).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from perilune.data import PackedDataset
from perilune.data.store import TokenStore
from perilune.ladder import cost
from perilune.ladder.design import Cell, Ladder
from perilune.train import RunConfig
from perilune.train.batches import DataConfig, RunData, open_data


@dataclass(frozen=True, kw_only=True)
class RungPlan:
    rung: str
    is_held_out: bool
    parameters: int
    """The baseline's, without the embedding."""
    tokens: tuple[int, ...]
    """By horizon, shortest first."""
    steps: tuple[int, ...]
    epochs: float
    """Of the longest horizon."""
    flops: float
    """All arms and seeds, with every decay."""
    memory_bytes: int
    """Of the largest arm."""
    seconds: float | None
    """All arms and seeds, one after the other; None where a speed is not known."""
    is_assumed: bool
    """Some of these seconds are assumed."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    ladder: str
    rungs: tuple[RungPlan, ...]
    unique_tokens: int
    """Of the training split, documents that are there twice counted once."""
    repeated_tokens: int
    """Of those further copies."""
    corpus: str
    """Fingerprint of the text."""
    num_cells: int
    problems: tuple[str, ...]
    """Why it cannot run as it is; empty when it can."""


def make_plan(
    ladder: Ladder,
    *,
    speeds: Mapping[tuple[str, str], float] | None = None,
    assume: bool = False,
    available_bytes: int | None = None,
) -> Plan:
    """speeds: tokens a second by rung and arm. assume: take those of an H200 where none is known."""
    rows: list[RungPlan] = []
    problems: list[str] = []
    corpora = _Corpora()
    for rung in ladder.rungs:
        configs = {arm.name: Cell(rung=rung, arm=arm, seed=ladder.seeds[0]).config() for arm in ladder.arms}
        costs = {arm.name: cost.cost(ladder, rung, arm) for arm in ladder.arms}
        known = {name: speed for name in configs if (speed := (speeds or {}).get((rung.name, name))) is not None}
        used = {name: cost.assumed_speed(config) for name, config in configs.items()} | known if assume else known
        ends = cost.schedule(ladder, rung).ends
        epochs = max(
            corpora.epochs(config, ends[-1] * cost.tokens_per_step(config))
            for config in _different_data(configs.values())
        )
        memory = max(each.memory_bytes for each in costs.values())
        times = [each.trained_tokens / used[name] * len(ladder.seeds) for name, each in costs.items() if name in used]
        rows.append(
            RungPlan(
                rung=rung.name,
                is_held_out=rung.is_held_out,
                parameters=costs[ladder.baseline.name].parameters,
                tokens=costs[ladder.baseline.name].tokens,
                steps=ends,
                epochs=epochs,
                flops=sum(each.flops for each in costs.values()) * len(ladder.seeds),
                memory_bytes=memory,
                seconds=sum(times) if len(times) == len(costs) else None,
                is_assumed=assume and len(known) < len(configs),
            )
        )
        if epochs > ladder.max_epochs:
            problems.append(
                f"rung {rung.name} needs {epochs:.1f} epochs of the corpus, more than "
                f"max_epochs={ladder.max_epochs:g}: give it more text, or fewer tokens per parameter"
            )
        if available_bytes is not None and memory > available_bytes:
            problems.append(
                f"rung {rung.name} needs about {memory / 2**30:.1f} GiB, more than the "
                f"{available_bytes / 2**30:.1f} GiB there are: lower trainer.micro_batch_rows"
            )
    unique, repeated, corpus = corpora.largest()
    return Plan(
        ladder=ladder.name,
        rungs=tuple(rows),
        unique_tokens=unique,
        repeated_tokens=repeated,
        corpus=corpus,
        num_cells=len(ladder.rungs) * len(ladder.arms) * len(ladder.seeds),
        problems=tuple(problems),
    )


class _Corpora:
    """Each corpus of a ladder, opened and counted once: its rungs share it."""

    def __init__(self) -> None:
        self._found: dict[DataConfig, tuple[RunData, int]] = {}

    def epochs(self, config: RunConfig, tokens: int) -> float:
        """How often `tokens` go through the text; rows of a probe never come again."""
        if config.data not in self._found:
            data = open_data(config.data, seed=config.seed)
            unique = unique_tokens(data.train.store) if isinstance(data.train, PackedDataset) else 0
            self._found[config.data] = (data, unique)
        unique = self._found[config.data][1]
        return tokens / unique if unique else 0.0

    def largest(self) -> tuple[int, int, str]:
        """Unique tokens, repeated tokens and fingerprint of the corpus that has most."""
        data, unique = max(self._found.values(), key=lambda entry: entry[1])
        repeated = data.train.store.num_tokens - unique if isinstance(data.train, PackedDataset) else 0
        return unique, repeated, data.corpus.fingerprint[:16]


def unique_tokens(store: TokenStore) -> int:
    """Tokens of the documents, further copies of a document left out."""
    seen: set[bytes] = set()
    count = 0
    for number in range(store.num_documents):
        tokens = store.document(number)
        mark = hashlib.blake2b(tokens.tobytes(), digest_size=12).digest()
        if mark not in seen:
            seen.add(mark)
            count += len(tokens)
    return count


def available_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _different_data(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """One config for each corpus and packing that the arms have."""
    found: dict[object, RunConfig] = {}
    for config in configs:
        found.setdefault((config.data, config.trainer.global_batch_rows), config)
    return list(found.values())
