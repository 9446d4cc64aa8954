"""Tokens a second of every rung and arm with the device for itself: what turns a multiplier of tokens into one of time.

Runs that share a card say nothing about their arm's speed, so speeds are measured apart: a few dozen training steps of
each arm on real rows, the arms of a rung in turns and several times over, so that a drift of the machine meets all.
Steps are those of the training loop: rows are packed ahead, and what can be a CUDA graph is one.

    LADDER/speeds.json    {"speeds": {RUNG: {ARM: [tokens/s, ...]}}, "environment": {...}}
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from perilune.ladder import cost
from perilune.ladder.design import Arm, Cell, Ladder, Rung
from perilune.ladder.findings import Speeds
from perilune.ladder.results import Result, write_json
from perilune.train import RunConfig, graphed
from perilune.train.batches import DataConfig, Packed, RunData, fused_packed, open_data
from perilune.train.environment import describe_environment
from perilune.train.optimizer import build_optimization
from perilune.train.run_folder import RunError, build_model
from perilune.train.step import forward_backward
from perilune.train.steps_ahead import StepsAhead

FILE = "speeds.json"


def measure_speed(
    config: RunConfig, device: torch.device, *, steps: int = 3, warmup: int = 1, data: RunData | None = None
) -> float:
    """Median tokens a second of optimizer steps on rows of the corpus, which is opened if it is not given."""
    data = data or open_data(config.data, seed=config.seed)
    model = build_model(config, device).train()
    optimization = build_optimization(model, config.optimizer)
    graphs = None
    if graphed.why_not(config, model, data, device) is None:
        graphs = graphed.GraphedBackward(model, record=graphed.cuda_recorder(device))
        warmup = max(warmup, graphed.WARM_UPS + 3)  # backward is recorded first, then the optimizer's step
    seconds, rows, size = [], config.trainer.global_batch_rows, config.trainer.micro_batch_rows

    def packed(first_row: int) -> list[Packed]:
        return list(fused_packed(data, None, first_row=first_row, rows=rows, micro_batch_rows=size))

    with StepsAhead(packed, in_background=device.type == "cuda") as ahead:
        for step in range(warmup + steps):
            began = _now(device)
            batches = [each.on(device) for each in ahead.take(step * rows, then=(step + 1) * rows)]
            targets = sum(batch.num_targets for batch in batches)
            losses = forward_backward(model, batches, targets, graphed=graphs)
            norm = optimization.clip_gradients(config.trainer.grad_clip)
            torch.cat([losses, norm.double()[None]]).tolist()  # the loop's own wait for the device
            optimization.step(gradients_stay=graphs is not None and graphs.gradients_stay)
            model.after_optimizer_step()
            seconds.append(_now(device) - began)
    return cost.tokens_per_step(config) / statistics.median(seconds[warmup:])


def measure_ladder(
    ladder: Ladder,
    device: torch.device,
    *,
    rungs: Sequence[Rung] | None = None,
    arms: Sequence[Arm] | None = None,
    repeats: int = 1,
    steps: int = 3,
    warmup: int = 1,
    on_measured: Callable[[str, str, float], None] = lambda rung, arm, speed: None,
) -> Speeds:
    """Every rung and arm, or those that are given."""
    found: dict[tuple[str, str], list[float]] = {}
    opened: dict[DataConfig, RunData] = {}
    for rung in ladder.rungs if rungs is None else rungs:
        for _ in range(repeats):
            for arm in ladder.arms if arms is None else arms:
                config = Cell(rung=rung, arm=arm, seed=ladder.seeds[0]).config()
                if config.data not in opened:
                    opened[config.data] = open_data(config.data, seed=config.seed)
                speed = measure_speed(config, device, steps=steps, warmup=warmup, data=opened[config.data])
                found.setdefault((rung.name, arm.name), []).append(speed)
                on_measured(rung.name, arm.name, speed)
    return found


def write_speeds(folder: Path, speeds: Speeds, device: torch.device, commit: str | None = None) -> Path:
    by_rung: dict[str, dict[str, Sequence[float]]] = {}
    for (rung, arm), values in speeds.items():
        by_rung.setdefault(rung, {})[arm] = [round(value, 1) for value in values]
    environment = describe_environment(device) | ({"commit": commit} if commit else {})
    write_json(folder / FILE, {"speeds": by_rung, "environment": environment})
    return folder / FILE


def read_speeds(folder: Path) -> Speeds:
    """Empty where nothing was measured apart."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())["speeds"]
        return {(rung, arm): list(map(float, values)) for rung, arms in found.items() for arm, values in arms.items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise RunError(f"{str(path)!r} does not hold speeds ({error}): remove it and measure again") from error


def known_speeds(results: Sequence[Result], measured: Speeds) -> dict[tuple[str, str], float]:
    """One number for each rung and arm: measured apart, else of cells that ran alone, else of any."""
    ordered = sorted(results, key=lambda result: result.ran_alone)
    found = {(result.rung, result.arm): result.tokens_per_s for result in ordered if result.tokens_per_s}
    return found | {place: statistics.median(values) for place, values in measured.items() if values}


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
