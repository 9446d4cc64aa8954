"""The arms of benchmarks/rl_experiments.py: what each starts from, learns, and is measured by. No script of its own."""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from rl_levels import Levels, drawing, sums, tools

from perilune.rl.environment import Environment, Message, Split, Talk, Task
from perilune.rl.lengths import ToggleConfig

ArmName = Literal[
    "vision", "vision-kinds", "vision-ptx", "vision-text-image", "vision-none", "vision-mla", "words", "shuffled",
    "sums", "joint", "sums-toggle", "sums-rigid", "tools",
]  # fmt: skip
ARMS: tuple[ArmName, ...] = get_args(ArmName)
NUMBERS = "sums, sums-toggle, sums-rigid, tools"
"""Arms without a picture or a drawing."""
KINDS = 0.3
"""Of the reward, for shapes of the right kinds."""
PTX_WEIGHT, PTX_TOKENS = 0.1, 8192
"""Of the loss of dialogues, and how many tokens of them go into an update beside some 40,000 that are sampled."""
THRESHOLD, PERCENTILE = 0.5, 25.0
"""Of Toggle. A prompt that half of the samples solve has its budget; a quarter of the right answers keep it, since the
shorter ones are the fewer."""


def toggle(iterations: int, *, is_rigid: bool = False) -> ToggleConfig:
    """Free until problems are worked out: before, an answer that is right by luck would be the budget. Then six phases
    of a tenth of the run, the last one free: what the budget cost is learnt again. A rigid one never leaves its
    budgeted phase and asks for no accuracy first."""
    period = max(1, iterations // 10)
    return ToggleConfig(
        period=1 << 40 if is_rigid else period,
        threshold=0.0 if is_rigid else THRESHOLD,
        percentile=PERCENTILE,
        min_answers=4,
        after=max(0, iterations - 6 * period),
    )


@dataclass(frozen=True, kw_only=True)
class Arm:
    start: str = "hybrid-zero_vision"
    trained: Mapping[str, Environment]
    evaluated: Mapping[str, Environment]
    toggle: ToggleConfig | None = None
    ptx_weight: float = 0.0
    """Of the dialogues that it was fine-tuned on: their loss is added."""


def start_of(name: ArmName) -> str:
    starts = {"vision-mla": "mla-zero_vision", "vision-text-image": "hybrid-text_image", "vision-none": "hybrid-none"}
    return starts.get(name, "hybrid-zero_vision")


def arm_of(name: ArmName, levels: Levels, iterations: int) -> Arm:
    problems, calculations = sums(levels.sums), tools(levels.tools)
    pictures, in_words = drawing(levels.drawing), drawing(levels.drawing, "words")
    trained: dict[str, dict[str, Environment]] = {
        "vision-kinds": {"drawing": replace(pictures, kinds=KINDS)},
        "words": {"words": in_words},
        "shuffled": {"drawing": drawing(levels.drawing, "shuffled")},
        "sums": {"sums": problems},
        "joint": {"drawing": pictures, "sums": problems},
        "tools": {"tools": calculations},
    }
    tested: dict[str, Environment] = {"drawing": pictures, "words": in_words, "sums": problems}
    if name == "tools":
        tested = {"tools": calculations, "sums": problems}
    family = "sums" if name.startswith("sums") else name
    return Arm(
        start=start_of(name),
        trained=trained.get(family, {"drawing": pictures}),
        evaluated=tested,
        toggle=toggle(iterations, is_rigid=name == "sums-rigid") if name in ("sums-toggle", "sums-rigid") else None,
        ptx_weight=PTX_WEIGHT if name == "vision-ptx" else 0.0,
    )


def of_numbers(arm: Arm) -> Arm:
    """The same without what the model of `rl_base.py mini` has never met; SystemExit where nothing is left."""
    kept = {name: each for name, each in arm.evaluated.items() if name in ("sums", "tools")}
    if not set(arm.trained) <= set(kept):
        raise SystemExit(f"--mini knows numbers alone, not {', '.join(arm.trained)}: expected one of {NUMBERS}")
    return replace(arm, start="mini", evaluated=kept)


@dataclass(frozen=True, kw_only=True)
class Varied:
    """An environment whose rewards differ: an untrained model earns nothing, and nothing would be learnt from that."""

    inner: Environment

    @property
    def name(self) -> str:
        return self.inner.name

    def task(self, number: int, split: Split) -> Task:
        task = self.inner.task(number, split)
        return replace(task, weights={**task.weights, "varied": 1.0})

    async def episode(self, task: Task, talk: Talk) -> None:
        await self.inner.episode(task, talk)

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        said = str([message.get("content") for message in messages]).encode()
        return {**self.inner.judge(task, messages), "varied": zlib.crc32(said) / 2**32}


def shortened(arm: Arm) -> Arm:
    """A few tokens for each answer, and rewards that teach."""

    def short(environment: Any) -> Environment:
        return replace(environment, max_tokens=16)

    return replace(
        arm,
        trained={name: Varied(inner=short(each)) for name, each in arm.trained.items()},
        evaluated={name: short(each) for name, each in arm.evaluated.items()},
    )
