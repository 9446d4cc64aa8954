"""How far one update of reinforcement learning moves a policy, and whether it gains on tasks that it did not see.

    python benchmarks/rl_step.py sums --mini                    from the model of `rl_base.py mini`, on a CPU
    python benchmarks/rl_step.py sums tools drawing             from sft-hybrid-zero_vision, before arms are started
    python benchmarks/rl_step.py sums --kinds muonclip adamw --samples 64 256 1024

The model plays `--tasks` tasks; one half teaches, the other is held out. For every optimizer, number of samples and
learning rate the model begins anew and takes one step. With w the ratio of a sample's probability after and before the
step, and A its reward less the mean of its group:

    moved        mean over tokens of |log w|: of what was learnt from, and of the held-out half
    gain         mean over samples of A (w - 1): what the step adds to the expected reward of tasks whose samples differ

A step that gains on its own samples and not on others has learnt them by heart: take more samples, or tasks that have
more in common; a lower rate changes both alike. A useful rate moves its own samples by 0.003 to 0.03.
"""

import asyncio
import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from rl_experiments import Settings as Arms
from rl_experiments import levels_of, mini, model_folder, rl_config
from rl_levels import environment_of
from rl_rows import add_rows, say

from perilune.rl.learner import Learner, LearnerConfig, Sample
from perilune.rl.loop import Loop
from perilune.train import OptimizerConfig, load_run
from perilune.train.environment import describe_environment
from perilune.train.trainer import pick_device

KEY = ("environment", "start", "optimizer", "samples", "lr", "seed")


@dataclass(frozen=True, kw_only=True)
class Settings:
    environments: tyro.conf.Positional[tuple[Literal["sums", "tools", "drawing"], ...]] = ("sums",)
    start: str = "hybrid-zero_vision"
    mini: bool = False
    """The model of `rl_base.py mini`."""
    tasks: int = 128
    """That are played, eight times each."""
    kinds: tuple[Literal["muonclip", "adamw"], ...] = ("muonclip",)
    samples: tuple[int, ...] = (256,)
    """To learn from; at most as many are held out."""
    lrs: tuple[float, ...] = (1e-5, 1e-4, 2e-4, 5e-4, 1e-3)
    seed: int = 0
    out: Path = Path("runs/rl")
    commit: str = ""
    results: Path = Path("benchmarks/results/rl_step.json")


@dataclass(frozen=True, kw_only=True)
class Moved:
    mean: float
    gain: float
    error: float
    """One standard error of the gain."""


def moved(learner: Learner, samples: Sequence[Sample]) -> Moved:
    """How far the learner's model is from the one that sampled, and what it gains."""
    branches = [branch for sample in samples for branch in sample.branches]
    new = learner.log_probs(branches)
    old = [branch.logprobs[branch.mask] for branch in branches]
    changes = iter([after - before for after, before in zip(new, old, strict=True)])
    whole = [[next(changes) for _ in sample.branches] for sample in samples]
    ratios = np.array([np.exp(np.clip(sum(part.sum() for part in parts), -20, 5)) for parts in whole])
    gains = np.array([sample.advantage for sample in samples]) * (ratios - 1)
    tokens = np.concatenate([part for parts in whole for part in parts])
    return Moved(
        mean=float(np.abs(tokens).mean()), gain=float(gains.mean()), error=float(gains.std() / len(gains) ** 0.5)
    )


async def played(loop: Loop) -> tuple[list[Sample], list[Sample]]:
    """One iteration's samples, of two halves of its tasks."""
    rolled = await loop._roll(0)
    groups = loop.groups.add(rolled.collected.trajectories)
    rewards = [each.reward for group in groups for each in group]
    say(f"{len(rewards)} samples in {rolled.seconds:.1f} s, reward {np.mean(rewards):.3f}")
    halves = groups[: len(groups) // 2], groups[len(groups) // 2 :]
    first, second = (loop.groups.samples(half, iteration=0, version=0) for half in halves)
    return first, second


def measure(settings: Settings, name: str) -> list[dict]:
    arms = Arms(arm="sums", tasks=settings.tasks, seed=settings.seed, out=settings.out, mini=settings.mini)
    arms = mini(arms) if settings.mini else arms
    start, device = model_folder(arms, "mini" if settings.mini else settings.start), pick_device("auto")
    level = getattr(levels_of(arms, device), name)
    model, tokenizer, run = load_run(start, device=device)
    config, weights = rl_config(arms, run, start), copy.deepcopy(model.state_dict())
    say(f"{name}, level {level}: {start.name} plays {settings.tasks} tasks, on {device}")

    async def play() -> tuple[list[Sample], list[Sample]]:
        with tempfile.TemporaryDirectory() as folder:
            async with Loop(model, tokenizer, {name: environment_of(name, level)}, config, folder=folder) as loop:
                return await played(loop)

    seen, held = asyncio.run(play())
    rows = []
    for kind in settings.kinds:
        for count in settings.samples:
            part, others = seen[:count], held[: max(settings.samples)]
            for lr in settings.lrs:
                model.load_state_dict(weights)
                optimizer = OptimizerConfig(kind=kind, lr=lr, weight_decay=0.0)
                told = LearnerConfig(optimizer=optimizer, row_tokens=config.learner.row_tokens)
                learner = Learner(model, replace(told, objective=config.learner.objective))
                norm = learner.update(part).grad_norm
                own, other = moved(learner, part), moved(learner, others)
                say(
                    f"{name} {kind} {len(part)} samples, lr {lr:g}: moved {own.mean:.4f}, gain {own.gain:+.4f}; "
                    f"held out: moved {other.mean:.4f}, gain {other.gain:+.5f} +- {other.error:.5f}"
                )
                rows.append(
                    {
                        "environment": name, "level": level, "start": start.name, "optimizer": kind, "lr": lr,
                        "samples": len(part), "seed": settings.seed, "moved": own.mean, "gain": own.gain,
                        "held_moved": other.mean, "held_gain": other.gain, "held_error": other.error,
                        "gradient": norm, "commit": settings.commit, "environment_of": describe_environment(device),
                    }
                )  # fmt: skip
    return rows


def main(settings: Settings) -> None:
    for name in settings.environments:
        add_rows(settings.results, measure(settings, name), key=KEY)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
