"""What a ladder asks for, before anything runs: parameters, tokens, epochs, FLOPs, memory, time; and what cannot be.

Epochs are counted in rows of the packed corpus, the unit in which training repeats it. Time is known where a cell of
the same rung and arm has run, or its speed was measured (`measure_speed`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from perilune.ladder import cost
from perilune.ladder.design import Cell, Ladder
from perilune.ladder.run import Result
from perilune.model import Decoder
from perilune.train import RunConfig
from perilune.train.batches import open_data
from perilune.train.optimizer import build_optimization

Speeds = Mapping[tuple[str, str], float]
"""Tokens a second by rung and arm."""


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    ladder: str
    rungs: tuple[RungPlan, ...]
    unique_tokens: int
    num_cells: int
    problems: tuple[str, ...]
    """Why it cannot run as it is; empty when it can."""


def make_plan(ladder: Ladder, *, speeds: Speeds | None = None, available_bytes: int | None = None) -> Plan:
    rows: list[RungPlan] = []
    problems: list[str] = []
    unique_tokens = 0
    for rung in ladder.rungs:
        configs = {arm.name: Cell(rung=rung, arm=arm, seed=ladder.seeds[0]).config() for arm in ladder.arms}
        costs = {arm.name: cost.cost(ladder, rung, arm) for arm in ladder.arms}
        ends = cost.schedule(ladder, rung).ends
        epochs = 0.0
        for config in _different_data(configs.values()):
            data = open_data(config.data, seed=config.seed)
            unique_tokens = max(unique_tokens, data.train.store.num_tokens)
            epochs = max(epochs, ends[-1] * config.trainer.global_batch_rows / data.train.rows_per_epoch)
        memory = max(each.memory_bytes for each in costs.values())
        times = [
            None if speed is None else each.trained_tokens / speed * len(ladder.seeds)
            for name, each in costs.items()
            for speed in [(speeds or {}).get((rung.name, name))]
        ]
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
                seconds=None if None in times else sum(each for each in times if each is not None),
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
    return Plan(
        ladder=ladder.name,
        rungs=tuple(rows),
        unique_tokens=unique_tokens,
        num_cells=len(ladder.rungs) * len(ladder.arms) * len(ladder.seeds),
        problems=tuple(problems),
    )


def known_speeds(results: list[Result]) -> Speeds:
    """What finished cells ran at; those that had the device for themselves count first."""
    ordered = sorted(results, key=lambda result: result.ran_alone)
    return {(result.rung, result.arm): result.tokens_per_s for result in ordered if result.tokens_per_s}


def measure_speed(config: RunConfig, device: torch.device, *, steps: int = 3) -> float:
    """Tokens a second of optimizer steps on random tokens, after one to warm up."""
    model = Decoder(config.model, seed=0).to(device).train()
    optimization = build_optimization(model, config.optimizer)
    shape = (config.trainer.micro_batch_rows, config.data.seq_len)
    tokens = torch.randint(config.data.vocab_size, shape, device=device)
    began = 0.0
    for step in range(steps + 1):
        if step == 1:
            began = _now(device)
        for _ in range(max(1, config.trainer.global_batch_rows // shape[0])):
            (model.loss(tokens, tokens) / tokens.numel()).backward()
        optimization.clip_gradients(config.trainer.grad_clip)
        optimization.step()
    return steps * cost.tokens_per_step(config) / (_now(device) - began)


def measure_ladder(ladder: Ladder, device: torch.device) -> Speeds:
    """Every rung and arm."""
    return {
        (rung.name, arm.name): measure_speed(Cell(rung=rung, arm=arm, seed=ladder.seeds[0]).config(), device)
        for rung in ladder.rungs
        for arm in ladder.arms
    }


def available_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _different_data(configs: Iterable[RunConfig]) -> list[RunConfig]:
    """One config for each corpus and packing that the arms have."""
    found: dict[object, RunConfig] = {}
    for config in configs:
        found.setdefault((config.data, config.trainer.global_batch_rows), config)
    return list(found.values())
