"""How hard the word problems and calculations of benchmarks/rl_experiments.py are. No script of its own.

A model learns nothing from tasks that it never solves, and little from those that it always does. So the model that
arms start from plays some tasks of every level, and each environment takes its hardest level with a mean reward of at
least START; where none has, the easiest. The choice is made once for a folder of models and kept beside them in
levels-SEED.json, with the rewards that it follows from: all arms there have the same tasks and can be compared.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl_rows import say
from rl_texts import LEVELS, PROBLEMS

from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.rl.environment import Environment
from perilune.rl.environments.tool_use import ToolUse
from perilune.rl.environments.word_problems import WordProblems
from perilune.rl.loop import Loop, RLConfig

START = 0.3
TASKS = 64
"""Of each level."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Of LEVELS in rl_texts.py."""

    sums: int = 2
    tools: int = 2

    def __post_init__(self) -> None:
        for name, level in asdict(self).items():
            if level not in LEVELS:
                raise ValueError(f"{name} has level {level!r}, expected one of {', '.join(map(str, LEVELS))}")


def sums(level: int) -> WordProblems:
    return replace(PROBLEMS[level], name="sums", max_tokens=256)


def tools(level: int) -> ToolUse:
    return ToolUse(name="tools", max_turns=4, max_tokens=96, steps=level, digits=level + 1)


def kept_levels(path: Path) -> Levels | None:
    """Those that were chosen before."""
    return Levels(**json.loads(path.read_text())["levels"]) if path.exists() else None


def choose_levels(path: Path, model: Decoder, tokenizer: Tokenizer, config: RLConfig) -> Levels:
    """Play, choose, and keep the choice; of two that choose at once, the first one's counts."""
    rewards = asyncio.run(_rewards(model, tokenizer, config))
    levels = Levels(**{name: hardest(found) for name, found in rewards.items()})
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({"levels": asdict(levels), "rewards": rewards}) + "\n")
    try:
        os.link(aside, path)
    except FileExistsError:
        pass
    finally:
        aside.unlink()
    kept = kept_levels(path)
    assert kept is not None
    say(f"levels: {asdict(kept)}; rewards at the start {rewards}")
    return kept


def hardest(rewards: Mapping[int, float]) -> int:
    """The level to train on, given the mean reward on each."""
    return max((level for level, reward in rewards.items() if reward >= START), default=min(rewards))


async def _rewards(model: Decoder, tokenizer: Tokenizer, config: RLConfig) -> dict[str, dict[int, float]]:
    made: dict[str, Any] = {"sums": sums, "tools": tools}
    played: dict[str, Environment] = {f"{name} {level}": make(level) for name, make in made.items() for level in LEVELS}
    with tempfile.TemporaryDirectory() as folder:
        async with Loop(model, tokenizer, {"sums 1": played["sums 1"]}, config, folder=folder) as loop:
            found = (await loop.evaluate(TASKS, environments=played)).trajectories
    rewards: dict[str, dict[int, float]] = {name: {} for name in made}
    for name in made:
        for level in LEVELS:
            own = [each.reward for each in found if each.environment == f"{name} {level}"]
            rewards[name][level] = round(sum(own) / len(own), 4) if own else 0.0
    return rewards
