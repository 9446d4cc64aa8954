"""Recipes of reinforcement learning: each function returns one full, typed config (`perilune rl NAME`).

`micro_copy` needs nothing and takes seconds, `micro_agent` and `micro_parl` (recipes/parl.py) a little longer. The
others start from a trained model: `--from RUN` or `--from FOLDER`. `--processes N` has N processes play the episodes of
any of them, through Ray. The drawing recipes ask one question three ways: with the picture, in words (the text
control), and with the picture of another task (the control that cannot be solved by looking).
"""

import difflib
from collections.abc import Callable
from dataclasses import replace

from perilune.recipes.parl import micro_parl, parl
from perilune.rl.environments.arithmetic import Arithmetic
from perilune.rl.environments.black_box import BlackBox
from perilune.rl.environments.calculator import Calculator
from perilune.rl.environments.code import Code
from perilune.rl.environments.copying import Copying
from perilune.rl.environments.drawing import Ask, Drawing
from perilune.rl.environments.logic import Logic
from perilune.rl.environments.looking import Looking
from perilune.rl.environments.tool_use import ToolUse
from perilune.rl.environments.word_problems import WordProblems
from perilune.rl.learner import LearnerConfig
from perilune.rl.loop import RLConfig
from perilune.rl.rollout import RolloutConfig
from perilune.rl.run_config import EnvironmentsConfig, EvaluationConfig, RLRunConfig
from perilune.rl.talk import TalkConfig
from perilune.serve.engine import EngineConfig
from perilune.train.optimizer import OptimizerConfig


class UnknownRLRecipe(ValueError):
    """A name nobody gave a recipe."""


def micro_copy() -> RLRunConfig:
    """A tiny model learns to say the letter it is shown: seconds on a CPU, nothing else needed."""
    return RLRunConfig(
        name="micro_copy",
        environments=EnvironmentsConfig(copying=Copying()),
        makes_model=True,
        rl=RLConfig(
            iterations=50,
            tasks=4,
            pool=4,
            warmup=0,
            rollout=RolloutConfig(group_size=8, talk=TalkConfig(max_tokens=4)),
            learner=LearnerConfig(optimizer=OptimizerConfig(lr=4e-3, weight_decay=0.0), row_tokens=1024),
            engine=EngineConfig(num_pages=96, token_budget=512, num_snapshots=8),
            checkpoint_every=20,
        ),
        evaluation=EvaluationConfig(tasks=4, every=10),
        device="cpu",
    )


def micro_agent() -> RLRunConfig:
    """The same, but every answer comes from a program that speaks OpenAI's API (--environments.black-box.command)."""
    run = micro_copy()
    talk = TalkConfig(max_tokens=16, max_turns=4)
    return replace(
        run,
        name="micro_agent",
        environments=EnvironmentsConfig(black_box=BlackBox(copying=Copying(), seconds=60.0)),
        rl=replace(run.rl, iterations=20, rollout=replace(run.rl.rollout, concurrency=8, talk=talk)),
    )


def agent() -> RLRunConfig:
    """Any program as the agent: --environments.black-box.command python my_agent.py; sums unless set otherwise."""
    chosen = EnvironmentsConfig(black_box=BlackBox(arithmetic=Arithmetic()))
    run = _base("agent", chosen, max_tokens=1024, max_turns=16)
    return replace(run, rl=replace(run.rl, rollout=replace(run.rl.rollout, concurrency=64)))


def _base(name: str, environments: EnvironmentsConfig, *, max_tokens: int, max_turns: int = 1) -> RLRunConfig:
    return RLRunConfig(
        name=name,
        environments=environments,
        rl=RLConfig(
            iterations=200,
            tasks=32,
            rollout=RolloutConfig(group_size=8, talk=TalkConfig(max_tokens=max_tokens, max_turns=max_turns)),
            learner=LearnerConfig(optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.0)),
            engine=EngineConfig(max_sequences=256, token_budget=4096),
        ),
        evaluation=EvaluationConfig(tasks=128, every=50),
    )


def arithmetic() -> RLRunConfig:
    """Sums and differences of two numbers."""
    return _base("arithmetic", EnvironmentsConfig(arithmetic=Arithmetic()), max_tokens=64)


def word_problems() -> RLRunConfig:
    """Word problems with one number as the answer; rows of GSM8K with --environments.word-problems.source FILE"""
    return _base("word_problems", EnvironmentsConfig(word_problems=WordProblems()), max_tokens=256)


def logic() -> RLRunConfig:
    """Puzzles of order, and of people who always or never lie."""
    return _base("logic", EnvironmentsConfig(logic=Logic()), max_tokens=256)


def code() -> RLRunConfig:
    """Functions in Python, judged by what they answer in the sandbox."""
    return _base("code", EnvironmentsConfig(code=Code()), max_tokens=512)


def calculator() -> RLRunConfig:
    """Calculations that are written down and sent to a calculator; needs no sandbox."""
    return _base("calculator", EnvironmentsConfig(calculator=Calculator()), max_tokens=512, max_turns=4)


def tool_use() -> RLRunConfig:
    """Questions that are answered by calling a calculator, over several turns."""
    return _base("tool_use", EnvironmentsConfig(tool_use=ToolUse()), max_tokens=768, max_turns=6)


def _drawn(name: str, ask: Ask) -> RLRunConfig:
    return _base(name, EnvironmentsConfig(drawing=Drawing(ask=ask)), max_tokens=512)


def drawing() -> RLRunConfig:
    """Vision: a picture is shown, and written as SVG; the reward compares what it draws."""
    return _drawn("drawing", "picture")


def drawing_text() -> RLRunConfig:
    """The same task in words: what text alone teaches."""
    return _drawn("drawing_text", "words")


def drawing_shuffled() -> RLRunConfig:
    """The same task with the picture of another one: what is learnt without looking."""
    return _drawn("drawing_shuffled", "shuffled")


def looking() -> RLRunConfig:
    """Vision: questions about pictures (counting; --environments.looking.tasks for more)."""
    return _base("looking", EnvironmentsConfig(looking=Looking()), max_tokens=128)


def joint() -> RLRunConfig:
    """Text and vision together: drawing, counting and sums take turns."""
    run = drawing()
    chosen = EnvironmentsConfig(drawing=Drawing(), looking=Looking(), arithmetic=Arithmetic())
    return replace(run, name="joint", environments=chosen)


RL_RECIPES: dict[str, Callable[[], RLRunConfig]] = {
    function.__name__: function
    for function in (
        *(micro_copy, micro_agent, arithmetic, word_problems, logic, code, calculator, tool_use, agent),
        *(drawing, drawing_text, drawing_shuffled, looking, joint),
        *(micro_parl, parl),
    )
}


def rl_recipe(name: str) -> RLRunConfig:
    """The config of the recipe `name`."""
    found = RL_RECIPES.get(name.replace("-", "_"))
    if found is None:
        near = difflib.get_close_matches(name, RL_RECIPES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UnknownRLRecipe(f"unknown recipe {name!r}: {hint}known are {', '.join(RL_RECIPES)}")
    return found()
