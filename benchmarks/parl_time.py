"""How long models of benchmarks/parl_models.py are trained where seconds decide, and how long it took. No script of its
own.
"""

import json
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_rows import say

from perilune.train import RunConfig, train
from perilune.train.batches import RunData
from perilune.train.run_folder import METRICS

MEASURED_STEPS = 24
"""The later half of them says how long one takes."""
TURNS = 2
"""Of measuring two models, turn about, where they are to be trained for equally long."""
AS_LONG = "as_long.json"
"""In the folder of a model that is to take as long as another: steps of both, and their speeds."""
SECONDS = "seconds.json"
"""In the folder of a model: those of training, by the step that a call began with."""


def steps_for(config: RunConfig, seconds: float, data: RunData) -> int:
    """Optimizer steps that fit."""
    tokens = config.trainer.global_batch_rows * config.data.seq_len
    return max(MEASURED_STEPS, int(seconds * speed_of(config, data) / tokens))


def steps_as_long(config: RunConfig, full: RunConfig, data: RunData, *, full_steps: int, folder: Path) -> int:
    """Steps that take as long as those of `full`, both alone or both beside the same others; told in `folder`."""
    measured: dict[str, list[float]] = {"full": [], "own": []}
    for _ in range(TURNS):  # what else the machine does may change meanwhile
        for name, each in (("full", full), ("own", config)):
            measured[name].append(speed_of(each, data))
    speeds = {name: statistics.fmean(values) for name, values in measured.items()}
    steps = max(1, round(full_steps * speeds["own"] / speeds["full"]))
    say(f"{config.name}: {steps} steps take as long as {full_steps} of the full recipe")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / AS_LONG).write_text(json.dumps({"steps": steps, "full_steps": full_steps, "tokens_per_s": speeds}) + "\n")
    return steps


def as_long(folder: Path) -> dict[str, Any]:
    """What a row says of it; {} of a model that has a number of steps."""
    path = folder / AS_LONG
    return {"as_long": json.loads(path.read_text(encoding="utf-8"))} if path.exists() else {}


def speed_of(config: RunConfig, data: RunData) -> float:
    """Tokens a second: the median of the later half of a few steps, which have their kernels and graphs."""
    say(f"{config.name}: {MEASURED_STEPS} steps to see how long one takes")
    few = replace(config, trainer=replace(config.trainer, steps=MEASURED_STEPS, checkpoint_every=0, log_every=1))
    with tempfile.TemporaryDirectory() as folder:
        train(few, runs_folder=folder, quiet=True, data=data)
        lines = (Path(folder) / few.name / METRICS).read_text().splitlines()
    found = [record["tokens_per_s"] for record in map(json.loads, lines) if record["kind"] == "train"]
    rate = statistics.median(found[len(found) // 2 :])
    say(f"{config.name}: {rate:,.0f} tokens/s in steps {len(found) // 2 + 1} to {len(found)}")
    return rate


def seconds_before(folder: Path, begun: int) -> dict[int, float]:
    """Of earlier calls, by the step that each began with. One that was cut off before it saved began where this one
    does: its time has led to nothing and does not count."""
    if not begun or not (folder / SECONDS).exists():
        return {}
    known = json.loads((folder / SECONDS).read_text(encoding="utf-8"))
    return {int(step): seconds for step, seconds in known.items() if int(step) < begun}


def keep_seconds(folder: Path, spent: Mapping[int, float]) -> None:
    if folder.is_dir():
        (folder / SECONDS).write_text(json.dumps(spent) + "\n", encoding="utf-8")
