"""How hard the tasks of benchmarks/rl_experiments.py are. No script of its own.

A model learns nothing from tasks that it never solves, and shows little on those that it always does. So the model that
arms start from plays some tasks of every level, and each environment takes its hardest level with a mean reward of at
least its START when greedy, which is how arms are measured, and SAMPLED when sampled, which is what they learn from;
where none has, the easiest. The choice is made once for a folder of models and kept beside them in
levels.json, with the rewards that it follows from: all arms there have the same tasks and can be compared.

    drawing   pictures of 1-2, 3-4, 5-6, 7-8 or 9-10 shapes; the base has seen at most 6
    sums      word problems of 1-3 steps, the last with larger numbers (rl_texts.py). A greedy model answers at once and
              is often wrong; more than half of what it samples is worked out, and is right often enough to teach
    tools     calculations of 1-3 steps, with numbers of a digit more

Played are tasks of the train split, before anything is trained on them: those that are held out take long to find.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl_rows import say
from rl_texts import LEVELS, MINI_CALCULATIONS, MINI_PROBLEMS, PROBLEMS, SCENES

from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.rl.environment import Environment
from perilune.rl.environments.drawing import Ask, Drawing
from perilune.rl.environments.tool_use import ToolUse
from perilune.rl.environments.word_problems import WordProblems
from perilune.rl.loop import Loop, RLConfig
from perilune.rl.trajectory import Trajectory

SHAPES = {1: (1, 2), 2: (3, 4), 3: (5, 6), 4: (7, 8), 5: (9, 10)}
START = {"drawing": 0.3, "sums": 0.1, "tools": 0.3}
SAMPLED = {"drawing": 0.1, "sums": 0.3, "tools": 0.1}
MOST = 0.7
"""A greedy reward above it at the start is warned about: little is left to gain."""
Found = dict[str, dict[int, dict[str, float]]]
"""Of each environment and level: what `Look` says, as plain numbers."""


@dataclass(frozen=True, kw_only=True)
class Levels:
    drawing: int = 3
    sums: int = 2
    tools: int = 2

    def __post_init__(self) -> None:
        for name, level in asdict(self).items():
            if level not in known_levels(name):
                known = ", ".join(map(str, known_levels(name)))
                raise ValueError(f"{name} has level {level!r}, expected one of {known}")


def known_levels(name: str) -> Sequence[int]:
    return {"drawing": tuple(SHAPES), "sums": tuple(PROBLEMS), "tools": LEVELS}[name]


MINI_LEVELS = Levels(sums=max(MINI_PROBLEMS), tools=max(MINI_CALCULATIONS))
"""What the model of `rl_base.py mini` has learnt."""


def drawing(level: int, ask: Ask = "picture") -> Drawing:
    """Room for a source that is half as long again as the longest of the level."""
    few, many = SHAPES[level]
    scenes = replace(SCENES, min_shapes=few, max_shapes=many)
    return Drawing(name="words" if ask == "words" else "drawing", scenes=scenes, ask=ask, max_tokens=48 + 34 * many)


def sums(level: int) -> WordProblems:
    return replace(PROBLEMS[level], name="sums", max_tokens=256)


def tools(level: int) -> ToolUse:
    return ToolUse(name="tools", max_turns=4, max_tokens=96, steps=level, digits=level + 1)


def environment_of(name: str, level: int) -> Environment:
    made: dict[str, Any] = {"drawing": drawing, "sums": sums, "tools": tools}
    return made[name](level)


def kept_levels(path: Path) -> Levels | None:
    """Those that were chosen before; what a file of an older script does not name is as by default."""
    return Levels(**json.loads(path.read_text())["levels"]) if path.exists() else None


def choose_levels(path: Path, model: Decoder, tokenizer: Tokenizer, config: RLConfig, *, tasks: int) -> Levels:
    """Play, choose, and keep the choice; of two that choose at once, the first one's counts."""
    found = look(model, tokenizer, config, tasks=tasks)
    levels = Levels(**{name: hardest(name, found[name]) for name in START})
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps({"levels": asdict(levels), "found": found}) + "\n")
    try:
        os.link(aside, path)
    except FileExistsError:
        pass
    finally:
        aside.unlink()
    kept = kept_levels(path)
    assert kept is not None
    tell(found, kept)
    return kept


def hardest(name: str, found: Mapping[int, Mapping[str, float]]) -> int:
    """The level to train on, given what was found on each."""
    enough = (level for level, each in found.items() if _teaches(name, each))
    return max(enough, default=min(found))


def _teaches(name: str, seen: Mapping[str, float]) -> bool:
    return seen["reward"] >= START[name] and seen["sampled"] >= SAMPLED[name]


def tell(found: Found, levels: Levels) -> None:
    """A line for every level; the chosen one is marked, and warned about where it leaves no room."""
    for name, each in found.items():
        chosen = asdict(levels)[name]
        for level, seen in each.items():
            say(
                f"{'*' if level == chosen else ' '} {name} {level}: reward {seen['reward']:.3f} greedy, "
                f"{seen['sampled']:.3f} sampled; {seen['length']:.0f} tokens, right ones sampled "
                f"{seen['shortest']:.0f} to {seen['longest']:.0f}"
            )
        seen = each[chosen]
        start = (
            f"WARNING: {name} starts on level {chosen} at {seen['reward']:.3f} greedy, {seen['sampled']:.3f} sampled"
        )
        if not _teaches(name, seen):
            say(f"{start}, expected at least {START[name]} and {SAMPLED[name]}: too little to learn from")
        elif seen["reward"] > MOST:
            say(f"{start}, expected at most {MOST} greedy: little is left to gain")


def look(model: Decoder, tokenizer: Tokenizer, config: RLConfig, *, tasks: int) -> Found:
    """So many tasks of every level of every environment, greedily and sampled as in training."""
    played = {(name, level): environment_of(name, level) for name in START for level in known_levels(name)}
    by_name = {f"{name} {level}": environment for (name, level), environment in played.items()}
    greedy, sampled = asyncio.run(_play(model, tokenizer, config, by_name, tasks))
    found: Found = {name: {} for name in START}
    for name, level in played:
        first, second = (_of(f"{name} {level}", each) for each in (greedy, sampled))
        right = sorted(each.num_trained for each in second if each.reward >= 0.5) or [0]
        found[name][level] = {
            "reward": _mean([each.reward for each in first]),
            "sampled": _mean([each.reward for each in second]),
            "length": _mean([float(each.num_trained) for each in first]),
            "shortest": float(right[len(right) // 10]),
            "longest": float(right[len(right) * 9 // 10]),
        }
    return found


async def _play(
    model: Decoder, tokenizer: Tokenizer, config: RLConfig, environments: dict[str, Environment], tasks: int
) -> list[Sequence[Trajectory]]:
    with tempfile.TemporaryDirectory() as folder:
        async with Loop(model, tokenizer, environments, config, folder=folder) as loop:
            return [
                (
                    await loop.evaluate(tasks, split="train", temperature=temperature, environments=environments)
                ).trajectories
                for temperature in (0.0, config.rollout.talk.temperature)
            ]


def _of(name: str, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return [each for each in trajectories if each.environment == name]


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0
