"""What a model can do before it is rewarded for anything: the start of every arm of benchmarks/parl.py.

    python benchmarks/parl_start.py --out DIR                   the fine-tuned model of seed 0
    python benchmarks/parl_start.py --out DIR --tiny            in miniature, on a CPU

    sampled     as an arm begins: all tools, temperature 1; how often it delegates, how wide, and what that earns
    told        its prompt says to hand out all items at once, greedy: whether it can, which is not whether it does
    alone       without the tools for workers, greedy

A reward chooses among what a model can do: where `told` earns no more than `alone`, no arm can learn that it pays.
Workers are the model itself. The row goes to --results.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from parl_arms import MEMORY_GIB, means, short
from parl_models import Recipe, keep_row
from parl_traces import Mix, environment_of
from rl_base import is_there
from rl_rows import say

from perilune.recipes.parl import parl
from perilune.rl.environment import OUTCOME
from perilune.rl.environments.wide_search import SERIAL_TOOLS, WideSearch
from perilune.rl.environments.wide_search_traces import TOLD
from perilune.rl.parl import by_kind
from perilune.rl.rollout import Job, Rollouts
from perilune.rl.talk import Workers
from perilune.rl.trajectory import Trajectory
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine
from perilune.train import load_run
from perilune.train.environment import describe_environment
from perilune.train.trainer import pick_device


@dataclass(frozen=True, kw_only=True)
class Settings:
    recipe: Recipe = "full"
    mix: Mix = "mostly-serial"
    seed: int = 0
    out: Path = Path("runs/parl")
    tasks: int = 128
    """Test tasks, half of them wide."""
    samples: int = 4
    """Of each, where it samples."""
    concurrency: int = 256
    tiny: bool = False
    commit: str = ""
    results: Path = Path("benchmarks/results/parl.json")


def ways(settings: Settings) -> dict[str, tuple[WideSearch, float, int]]:
    """An environment, a temperature and samples of each task. Wide tasks are the same in all of them."""
    environment = environment_of(tiny=settings.tiny, spare_steps=1)
    told = replace(environment, instruction=TOLD)
    return {
        "sampled": (environment, 1.0, settings.samples),
        "told": (told, 0.0, 1),
        "alone": (replace(environment, main_tools=SERIAL_TOOLS), 0.0, 1),
    }


async def play(settings: Settings, folder: Path, device: str) -> dict[str, Any]:
    model, tokenizer, _ = load_run(folder, device=device)
    base = parl().rl
    config, talk, told = base.engine, base.rollout.talk, base.rollout.workers
    if settings.tiny:
        config = replace(config, max_sequences=8, token_budget=512, max_length=2048, num_pages=256)
        talk = told = replace(talk, max_tokens=48, max_turns=3)
    elif device != "cpu":
        config = replace(config, memory_gib=MEMORY_GIB)
    engine = AsyncEngine(Engine(model, tokenizer, replace(config, max_queue=1 << 20), device=device))
    found: dict[str, Any] = {}
    try:
        for way, (environment, temperature, samples) in ways(settings).items():
            workers = Workers(engine=engine, tokenizer=tokenizer, config=replace(told, temperature=temperature))
            rollout = replace(
                base.rollout, talk=replace(talk, temperature=temperature), concurrency=settings.concurrency,
                episode_seconds=3600.0,
            )  # fmt: skip
            rollouts = Rollouts(engine, tokenizer, {"wide_search": environment}, rollout, workers=workers)
            tasks = [environment.task(number, "test") for number in range(settings.tasks)]
            jobs = [
                Job(environment="wide_search", task=task, sample=sample, seed=settings.seed, iteration=-1)
                for task in tasks if way != "told" or task.data["kind"] == "wide" for sample in range(samples)
            ]  # fmt: skip
            played = await rollouts.collect(jobs, iteration=0)
            wide = [each for each in played.trajectories if each.task_data["kind"] == "wide"]
            found[way] = {
                "kinds": {kind: {name: short(value) for name, value in numbers.items()}
                          for kind, numbers in by_kind(played.trajectories).items()},
                "wide_by_width": by_width(wide), "failures": dict(played.failures),
            }  # fmt: skip
            say(f"{way}: {json.dumps(found[way])}")
    finally:
        await engine.close()
    return found


def by_width(wide: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """Wide tasks by how many workers ran side by side at most: none, one, some, or as many as half of the items."""
    groups: dict[str, list[dict[str, float]]] = {}
    for each in wide:
        width, items = each.facets["width"], each.facets["items"]
        name = "none" if not width else "one" if width == 1 else "some" if width < items / 2 else "half or more"
        found = {"f1": each.facets[OUTCOME], "critical_steps": each.facets["critical_steps"]}
        groups.setdefault(name, []).append(found)
    return {name: {"episodes": float(len(group)), **means(group)} for name, group in sorted(groups.items())}


def main(settings: Settings) -> None:
    name = f"sft-{settings.recipe}-{settings.mix}-{settings.seed}"
    if not is_there(settings.out, name):
        raise SystemExit(f"{str(settings.out)!r} has no {name} that is whole: benchmarks/parl_models.py all makes it")
    device = pick_device("cpu" if settings.tiny else "auto")
    if settings.tiny:
        settings = replace(settings, tasks=min(settings.tasks, 4), samples=1)
    began = time.monotonic()
    found = asyncio.run(play(settings, settings.out / name, str(device)))
    environment = describe_environment(device)
    row = {
        "row": "start", "name": name, "seed": settings.seed, "tiny": settings.tiny, "recipe": settings.recipe,
        "tasks": settings.tasks, "samples": settings.samples, "ways": found,
        "seconds": round(time.monotonic() - began, 1), "commit": settings.commit or environment.get("commit", ""),
        "environment": environment,
    }  # fmt: skip
    keep_row(row, results=settings.results, out=settings.out)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
