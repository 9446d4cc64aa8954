"""What an exported `perilune-nano` can do, and what it declines, for its card (nano_release.py). No script itself."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_rows import say

from perilune import hub
from perilune.cli_serve import served_inside
from perilune.data.picture_scores import bootstrap_interval
from perilune.eval.safety import SafetyConfig, load_probes, run_probes, write_reports
from perilune.recipes.nano_dialogues import SCENES, DialogueCounts
from perilune.recipes.nano_release import TINY_COUNTS
from perilune.rl.environment import Environment
from perilune.rl.environments.calculator import Calculator
from perilune.rl.environments.drawing import Drawing
from perilune.rl.environments.wide_search import SERIAL_TOOLS, WideSearch
from perilune.rl.environments.wide_search_corpus import CorpusConfig as LibraryConfig
from perilune.rl.rollout import Job, RolloutConfig, Rollouts
from perilune.rl.talk import TalkConfig, Workers
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine
from perilune.serve.sizing import EngineConfig
from perilune.swarm.http_client import HTTPClient
from perilune.swarm.provider import Secret
from perilune.train.trainer import pick_device

REPLY_TOKENS = 768
"""As in the demonstration (wide_search_demo.py): a table of 16 rows fits."""
AT_A_TIME = 16
EPISODE_SECONDS = 3600.0
"""On a CPU all episodes wait for one another; only one that hangs is to be cut off."""


def environments(*, tiny: bool) -> dict[str, Environment]:
    library = LibraryConfig(pages=(TINY_COUNTS if tiny else DialogueCounts()).library_pages)
    return {
        "drawing": Drawing(scenes=SCENES, max_tokens=384),
        "calculator": Calculator(),
        "wide search, alone": WideSearch(corpus=library, main_tools=SERIAL_TOOLS),
        "wide search, swarm": WideSearch(corpus=library),
    }


def measure(folder: Path, *, tasks: int, device: str, seed: int, tiny: bool) -> dict[str, Any]:
    """Mean rewards of the exported model on test tasks, greedy. An episode that is lost is counted, not rewarded."""
    place = pick_device(device)
    opened = hub.open_folder(folder, device=place)
    talk = TalkConfig(
        max_tokens=16 if tiny else REPLY_TOKENS, max_turns=24, temperature=0.0, processor=opened.processor
    )
    config = RolloutConfig(
        group_size=1, concurrency=AT_A_TIME, talk=talk, workers=talk, episode_seconds=EPISODE_SECONDS
    )

    async def play() -> dict[str, Any]:
        engine = AsyncEngine(Engine(opened.model, opened.tokenizer, EngineConfig(max_sequences=64), device=place))
        found: dict[str, Any] = {}
        try:
            workers = Workers(engine=engine, tokenizer=opened.tokenizer, config=talk)
            for name, environment in environments(tiny=tiny).items():
                rollouts = Rollouts(engine, opened.tokenizer, {name: environment}, config, workers=workers)
                jobs = [
                    Job(environment=name, task=environment.task(number, "test"), sample=0, seed=seed, iteration=-1)
                    for number in range(tasks)
                ]
                played = await rollouts.collect(jobs, iteration=0)
                rewards = [each.reward for each in played.trajectories]
                if played.failures:
                    say(f"{name}: episodes lost: {dict(played.failures)}")
                if rewards:
                    interval = bootstrap_interval(rewards)
                    reward = {"mean": interval.mean, "low": interval.low, "high": interval.high}
                    found[name] = {"count": len(rewards), "lost": tasks - len(rewards), "reward": reward}
                    say(f"{name}: mean reward {interval.mean:.3f} of {len(rewards)} tasks")
        finally:
            await engine.close(drain_seconds=1.0)
        return found

    return asyncio.run(play())


def probe_safety(folder: Path, *, device: str, tiny: bool) -> Mapping[str, Any]:
    """The shipped probes; their report is written beside the weights."""
    probes = load_probes()
    probes = probes[::17] if tiny else probes
    config = SafetyConfig(max_tokens=8, turns=1) if tiny else SafetyConfig(max_tokens=256)

    async def ask(url: str, key: str) -> Any:
        async with HTTPClient(base_url=f"{url}/v1", api_key_env=None, api_key=Secret(key)) as client:
            return await run_probes(client, folder.name, probes, config)

    with served_inside(str(folder), runs=str(folder.parent), device=device, sequences=8) as (url, key):
        outcome = asyncio.run(ask(url, key))
    write_reports(outcome, folder)
    return outcome.plain()
