"""Training runs in worlds of gloo processes, and what is compared of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from perilune.train import RunConfig, train
from perilune.train.run_folder import CONFIG, METRICS
from tests.distributed.gloo import run

STEPS = 5


def losses_of(folder: Path) -> list[tuple[float, ...]]:
    """Of every step, in order: loss, gradient norm, loss of rows with pictures."""
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [
        (record["loss"], record["grad_norm"], record.get("vision_loss", 0.0))
        for record in records
        if record["kind"] == "train"
    ]


def clipped_heads(folder: Path) -> list[int]:
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [record["clipped_heads"] for record in records if record["kind"] == "train"]


def imbalances_of(folder: Path) -> list[float]:
    """Load of the busiest expert over the mean one, of every step; none without experts."""
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [record["moe_imbalance"] for record in records if "moe_imbalance" in record]


def validations_of(folder: Path) -> list[float]:
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "valid"]


def trained(config: RunConfig, runs: Path, *, world: int | None, steps: int | None = None) -> dict[str, Any]:
    """Begin or continue the run in `runs`; world None: one process without torch.distributed."""
    if steps is not None:
        # The schedule stays that of the whole run: only the end comes earlier.
        config = replace(config, trainer=replace(config.trainer, steps=steps))
    if world is None:
        return _train(0, config, runs)
    return run(world, _train, config, runs)[0]


def _train(rank: int, config: RunConfig, runs: Path) -> dict[str, Any]:
    resume = (runs / config.name / CONFIG).exists()
    return train(config, runs_folder=runs, resume=resume, quiet=True)


def worst_difference(found: list[tuple[float, ...]], expected: list[tuple[float, ...]]) -> float:
    assert len(found) == len(expected)
    pairs = [pair for mine, theirs in zip(found, expected) for pair in zip(mine, theirs, strict=True)]
    return max(abs(mine - theirs) / max(abs(theirs), 1e-12) if theirs or mine else 0.0 for mine, theirs in pairs)


def max_logits_of(folder: Path) -> list[tuple[float, ...]]:
    """Of every step, the largest attention logit of every layer that has any."""
    records = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [tuple(record["max_logit"]) for record in records if record["kind"] == "train"]
