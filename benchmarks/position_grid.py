"""How large the vision tower's learned position grid should start: `nano` on pictures alone, a few hundred steps.

    python benchmarks/position_grid.py --std 0.02 1.0 --seeds 0 1 2            two minutes a run on one core

Prints a line for every run and writes benchmarks/results/position_grid.json: loss on held-out pictures, the score of
what the model draws of them, and the same answers held against other pictures.
"""

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from perilune.data import FusionConfig
from perilune.model import Decoder
from perilune.recipes.pretrain import nano
from perilune.train import train
from perilune.train.environment import describe_environment


@dataclass(frozen=True, kw_only=True)
class Settings:
    std: tuple[float, ...] = (0.02, 1.0)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 260
    rows: int = 3
    """In a step, all with pictures."""
    results: Path = Path("benchmarks/results/position_grid.json")


def measure(settings: Settings, std: float, seed: int, folder: str) -> dict[str, Any]:
    run = nano()
    assert run.data.vision is not None
    vision = replace(run.data.vision, workers=0, samples=64, fusion=FusionConfig(share=1.0))
    trainer = replace(
        run.trainer, steps=settings.steps, global_batch_rows=settings.rows, eval_every=0, eval_rows=32,
        checkpoint_every=0, report=False, tensorboard=False, sample_prompts=(),
    )  # fmt: skip

    @torch.no_grad()
    def start(model: Decoder) -> None:
        assert model.vision_tower is not None
        model.vision_tower.patch_embed.pos_emb.weight.normal_(
            0.0, std, generator=torch.Generator().manual_seed(seed + 99)
        )

    run = replace(run, name=f"grid-{std}-{seed}", seed=seed, trainer=trainer, data=replace(run.data, vision=vision))
    summary = train(run, runs_folder=folder, quiet=True, initialize=start)
    return {
        "std": std, "seed": seed, "steps": settings.steps, "rows": settings.rows,
        "vision_loss": summary["valid_vision_loss"], **summary["pictures"],
    }  # fmt: skip


def main(settings: Settings) -> None:
    torch.set_num_threads(1)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in settings.seeds:
            for std in settings.std:
                runs.append(measure(settings, std, seed, folder))
                print(json.dumps(runs[-1]), flush=True)
    settings.results.write_text(
        json.dumps({"environment": describe_environment(torch.device("cpu")), "runs": runs}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
