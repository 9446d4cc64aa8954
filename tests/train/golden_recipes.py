"""Three tiny recipes whose losses are pinned in golden_losses.json.

After a change that is meant to alter the numbers, and only then, write them again from the repository's root:

    python -m tests.train.golden_recipes

The file records the spread seen over the kernels one machine can emulate (vector width, summation order, threads); see
test_golden_losses.py for how the tolerance follows from it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from perilune.model import KDAConfig, RopeConfig
from perilune.train import RunConfig, train
from tests.train.tiny_runs import MODEL, MOE, tiny_run

GOLDEN = Path(__file__).with_name("golden_losses.json")
STEPS = 30

# Environment variables under which the libraries take the code paths of other processors.
OTHER_MACHINES = {
    "no vector instructions": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
    },
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "two threads": {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
}


def recipes(cache: Path, *, seed: int = 1) -> dict[str, RunConfig]:
    trainer = {"steps": STEPS, "eval_every": 0, "checkpoint_every": 0, "sample_prompts": (), "global_batch_rows": 8}
    shared = {"seed": seed, "schedule": {"warmup_steps": 5, "decay_fraction": 0.3}}
    return {
        "dense_muonclip": tiny_run(cache, name="dense", trainer=trainer, optimizer={"lr": 0.01}, **shared),
        "attnres_moe_muonclip": tiny_run(
            cache,
            name="moe",
            model={
                "num_hidden_layers": 3,
                "layer_types": ("kda", "mla", "mla"),
                "kda": KDAConfig(num_heads=2, head_dim=16, gate_lower_bound=-5.0),
                "residual": "block_attnres",
                "block_sublayers": 2,
                "moe": MOE,
            },
            trainer={**trainer, "micro_batch_rows": 4},
            optimizer={"lr": 0.01, "per_head": True},
            **shared,
        ),
        "full_attention_adamw_bf16": tiny_run(
            cache,
            name="bf16",
            model={
                "layer_types": ("mla", "mla"),
                "mla": MODEL.mla.__class__(**{**vars(MODEL.mla), "rope": RopeConfig()}),
                "tie_word_embeddings": True,
            },
            trainer={**trainer, "precision": "bf16"},
            optimizer={"kind": "adamw", "lr": 0.01},
            seed=seed,
            schedule={"kind": "cosine", "warmup_steps": 5},
        ),
    }


def losses(config: RunConfig, folder: Path) -> list[float]:
    train(config, runs_folder=folder, quiet=True, overwrite=True)
    lines = (folder / config.name / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]


def all_losses(*, seed: int = 1) -> dict[str, list[float]]:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        return {name: losses(config, root) for name, config in recipes(root / "cache", seed=seed).items()}


def spread(a: list[float], b: list[float]) -> float:
    """Largest relative difference over the steps."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def _elsewhere(environment: dict[str, str], *arguments: str) -> dict[str, list[float]]:
    command = [sys.executable, "-m", "tests.train.golden_recipes", "--print", *arguments]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    answer = subprocess.run(command, env=settings, check=True, capture_output=True, text=True)
    return json.loads(answer.stdout)


def main() -> None:
    if "--print" in sys.argv:
        print(json.dumps(all_losses(seed=int(sys.argv[-1]) if sys.argv[-1].isdecimal() else 1)))
        return
    here = _elsewhere({})
    others = {name: _elsewhere(environment) for name, environment in OTHER_MACHINES.items()}
    other_seed = _elsewhere({}, "2")
    golden = {
        name: {
            "losses": [round(value, 6) for value in values],
            "spread": {machine: float(f"{spread(result[name], values):.1e}") for machine, result in others.items()},
            "spread_other_seed": float(f"{spread(other_seed[name], values):.1e}"),
        }
        for name, values in here.items()
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
    for name, entry in golden.items():
        print(name, entry["losses"][0], "->", entry["losses"][-1], entry["spread"], entry["spread_other_seed"])


if __name__ == "__main__":
    main()
