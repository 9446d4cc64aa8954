"""Arms of the experiment with PARL (benchmarks/parl.py): what each is paid for, what it starts from, the time of a call
and the rows. No script of its own.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

import torch
import tyro
from parl_models import AGAIN, Recipe, keep_row
from parl_traces import Mix, environment_of
from rl_base import saved_step
from rl_rows import say

from perilune.data.chat_rows import ChatDataConfig
from perilune.data.picture_scores import bootstrap_interval
from perilune.recipes.parl import parl
from perilune.rl.environments.wide_search import CRITICAL_STEPS, SERIAL_TOOLS, WideSearch
from perilune.rl.evaluation import EvaluationConfig
from perilune.rl.loop import RLConfig
from perilune.rl.parl import Arm, arm
from perilune.rl.run_config import EnvironmentsConfig, RLRunConfig
from perilune.train import OptimizerConfig
from perilune.train.environment import describe_environment
from perilune.train.trainer import pick_device

ArmName = Literal["full", "economy", "outcome", "instantiation", "no-finish", "blog", "joint", "control", "serial"]
CAPS = (1.0, 0.5, 2.0)
"""Times the cap, in the order in which they are tested: what bars need most comes first."""
SERIAL_CAPS = (1.0, 0.5, 2.0, 3.0, 4.0, 6.0, 1000.0)
"""The serial agent also gets as many steps as it likes: what equal quality costs it."""
MEMORY_GIB = 2.0
"""Of each engine, for states and pages: 0.3 GiB of states for 256 sequences (0.6 for the 512 of workers), and pages for
2M tokens (1.6M). 128 episodes of at most 10,240 tokens take 1.3M, 512 workers of 1,100 take 0.6M."""
LR = parl().rl.learner.optimizer.lr
COOLDOWN = parl().rl.cooldown
NANO_LR, NANO_COOLDOWN = 3e-4, 12
"""Of the released model's arms on a CPU: a quarter of the episodes an iteration, and half of the iterations."""
CPU_EPISODE_SECONDS = 900.0
CPU_ROW_TOKENS = 4096
"""Longer rows are slower there: 16,384 tokens spend a third of the time on pages of memory that come and go."""
HIDDEN = ("environment", "curves", "share", "wide_f1s")
"""Of a row, what is not printed."""
CURVES = ("spawn", "outcome", "parallel", "finish", "width", "critical_steps", "total_steps", "finished", "unused")


@dataclass(frozen=True, kw_only=True)
class Settings:
    step: tyro.conf.Positional[
        Literal["train", "test", "audit", "arm", "best-of", "served", "one-by-one", "report", "all"]
    ]
    arm: ArmName = "full"
    mix: Mix | None = None
    """Traces that the arm starts from, in place of its own."""
    trained_cap: float = 1.0
    """Times the cap, in training. With twice the steps an agent alone gets nearly all items: nothing but the extra
    rewards speaks for workers then."""
    recipe: Recipe = "full"
    seed: int = 0
    models: int | None = None
    """Seed of the models that the arm starts from; None: its own. With one start for all, seeds are those of training:
    which tasks are drawn, and what is sampled."""
    out: Path = Path("runs/parl")
    seconds: float = 540.0
    """Of this call, from its start on. A piece that would not end in time is not begun: training is saved, tests and
    judging again are left to the next call."""
    now: bool = False
    """Test the arm also when it is not trained to its end."""
    again: bool = False
    """Test also at caps that have a row with these settings."""
    iterations: int = parl().rl.iterations
    tasks: int = 16
    samples: int = 8
    lr: float = LR
    """That of the recipe. With 3e-4 ten iterations led 21M parameters from workers in 3% of wide tasks to all, and
    sixty cost them what they could read: with the outcome alone it fell from 0.44 to 0.31 on wide tasks."""
    cooldown: int = COOLDOWN
    """Iterations at the end in which the rate falls to 0, as in the recipe."""
    ptx: float = 0.0
    """Weight of the loss of workers' dialogues, from the traces that the model was fine-tuned on: it keeps what a model
    can read, and says nothing of when to delegate."""
    over: int = 16
    """Iterations in which the extra rewards fade, as in the recipe."""
    spare_steps: int | None = 1
    """Steps beyond the oracle's on narrow tasks and chains; None: the cap of wide ones."""
    tested: int = 128
    """Test tasks of all kinds."""
    shown: int = 16
    """Test tasks that are played before and after training, for the report."""
    most: int = 16
    """Samples of the serial agent at most, for best-of."""
    memory_gib: float = MEMORY_GIB
    """Of each of the two engines, on a GPU."""
    merge: tuple[Path, ...] = ()
    """Rows of other machines to add first."""
    tiny: bool = False
    plot: Path | None = None
    """With report: a picture of how often arms work with workers, by iteration; PATH_narrow for narrow tasks, and
    PATH_width for how many at a time."""
    commit: str = ""
    results: Path = Path("benchmarks/results/parl.json")


def name_of(settings: Settings) -> str:
    shared = [] if models_of(settings) == settings.seed else [f"models{models_of(settings)}"]
    return "-".join([settings.arm, settings.recipe, *_beside(settings), *shared, str(settings.seed)])


def _beside(settings: Settings) -> list[str]:
    """What is not as in the arm of the bars."""
    lr, cooldown = (NANO_LR, NANO_COOLDOWN) if settings.recipe == "nano" else (LR, COOLDOWN)
    numbers = {"cap": (settings.trained_cap, 1.0), "lr": (settings.lr, lr), "ptx": (settings.ptx, 0.0),
               "cooldown": (settings.cooldown, cooldown)}  # fmt: skip
    unlike = [f"{name}{value:g}" for name, (value, usual) in numbers.items() if value != usual]
    return unlike if settings.mix is None else [settings.mix, *unlike]


def start_of(settings: Settings) -> str:
    return f"sft-{settings.recipe}-{mix_of(settings)}-{models_of(settings)}"


def models_of(settings: Settings) -> int:
    """The seed of the models."""
    return settings.seed if settings.models is None else settings.models


def arm_of(settings: Settings) -> str:
    """As rows name it: one that starts from other traces, or trains at another cap, is not the arm of the bars."""
    return ", ".join([settings.arm, *_beside(settings)])


def traces_of(settings: Settings) -> Path:
    return settings.out / f"traces-{mix_of(settings)}-{models_of(settings)}.jsonl"


def workers_of(settings: Settings) -> Path:
    return traces_of(settings).with_stem(f"workers-{mix_of(settings)}-{models_of(settings)}")


def mix_of(settings: Settings) -> Mix:
    return settings.mix or ("well-formed" if settings.arm == "control" else "mostly-serial")


def wide_search(settings: Settings, cap: float = 1.0) -> WideSearch:
    more: dict[str, Any] = {"critical_steps": max(1, round(CRITICAL_STEPS * cap))}
    if settings.arm == "serial":
        more["main_tools"] = SERIAL_TOOLS
    # Where the cap of wide tasks is changed, that of the others stays: they ask whether spawning is left alone.
    return environment_of(tiny=settings.tiny, spare_steps=settings.spare_steps, **more)


def optimizer_of(settings: Settings) -> OptimizerConfig:
    """That of the recipe, in reinforcement learning too; MuonClip's updates are as large as AdamW's, so is the rate."""
    kind = "adamw" if settings.recipe == "plain" else "muonclip"
    return OptimizerConfig(kind=kind, lr=settings.lr, weight_decay=0.0)


def rl_config(settings: Settings) -> RLConfig:
    base = parl().rl
    assert base.parl is not None
    rewards: dict[ArmName, Arm] = {"no-finish": "no_finish", "joint": "full", "control": "full", "serial": "outcome"}
    chosen: Arm = rewards.get(settings.arm) or next(each for each in get_args(Arm) if each == settings.arm)
    rewarded = arm(chosen, replace(base.parl, over=settings.over))
    if settings.arm == "joint":
        rewarded = replace(rewarded, workers="joint")
    config = replace(
        base,
        iterations=settings.iterations,
        cooldown=settings.cooldown,
        tasks=settings.tasks,
        seed=settings.seed,
        rollout=replace(base.rollout, group_size=settings.samples),
        learner=replace(base.learner, optimizer=optimizer_of(settings), ptx_weight=settings.ptx),
        parl=rewarded,
        checkpoint_every=0,
    )
    if settings.tiny:
        engine = replace(base.engine, max_sequences=8, token_budget=512, max_length=2048, num_pages=256)
        talk = replace(base.rollout.talk, max_tokens=48, max_turns=3)
        rollout = replace(config.rollout, talk=talk, workers=talk)
        config = replace(config, engine=engine, worker_engine=engine, pool=8, rollout=rollout)
    elif torch.cuda.is_available():
        # Few and long rows, since each costs the host some thousand launches; twice as long ones of a dozen arms would
        # not fit on one card.
        memory = settings.memory_gib
        config = replace(config, engine=replace(base.engine, memory_gib=memory), worker_engine=replace(
            base.worker_engine or base.engine, memory_gib=memory), learner=replace(config.learner, row_tokens=32_768),
        )  # fmt: skip
    elif settings.recipe == "nano":  # all episodes take a minute there, and those of the other arm as long
        config = replace(config, rollout=replace(config.rollout, episode_seconds=CPU_EPISODE_SECONDS),
                         learner=replace(config.learner, row_tokens=CPU_ROW_TOKENS))  # fmt: skip
    return config


def run_config(settings: Settings) -> RLRunConfig:
    """The arm as `perilune rl` would have it: what lies in its folder, for audits, replays and the report."""
    return RLRunConfig(
        name=name_of(settings),
        start_from=str(settings.out / start_of(settings)),
        environments=EnvironmentsConfig(wide_search=wide_search(settings, settings.trained_cap)),
        rl=rl_config(settings),
        ptx=ChatDataConfig(sources=(str(workers_of(settings)),) if settings.ptx else ()),
        evaluation=EvaluationConfig(tasks=settings.shown),
        device=str(device_of(settings)),
    )


def given(settings: Settings) -> dict[str, Any]:
    """Of the settings, what a row's numbers depend on beside its name."""
    names = ("tasks", "samples", "lr", "cooldown", "ptx", "over", "spare_steps")
    return {
        "wanted": settings.iterations, "models": models_of(settings),
        **{name: getattr(settings, name) for name in names},
    }  # fmt: skip


def iterations_done(settings: Settings) -> int:
    """Of the last complete checkpoint."""
    return saved_step(settings.out / name_of(settings))


# The time of a call ---------------------------------------------------------------------------------------------------


CALLED = time.monotonic()
OPENING_SECONDS = 60.0
"""For two models and their engines on an H200, graphs included."""
ENDING_SECONDS = 30.0
"""For rows, a checkpoint, the end of engines and processes; also for imports, which come before CALLED."""


def left(settings: Settings) -> float:
    """Seconds of the call that a piece may still take."""
    return settings.seconds - ENDING_SECONDS - (time.monotonic() - CALLED)


def stop_here(settings: Settings, why: str) -> NoReturn:
    say(f"{name_of(settings)}: {why}; the same command goes on")
    raise SystemExit(AGAIN)


# Rows -----------------------------------------------------------------------------------------------------------------


def device_of(settings: Settings) -> torch.device:
    return torch.device(pick_device("cpu" if settings.tiny else "auto"))


def means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    known = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: round(sum(values) / len(values), 4) for name, values in known.items()}


def interval(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = bootstrap_interval(values)
    return {"mean": round(found.mean, 4), "low": round(found.low, 4), "high": round(found.high, 4)}


def short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def record(settings: Settings, row: dict[str, Any], seconds: float) -> None:
    environment = describe_environment(device_of(settings))
    row = {
        **row, "seed": settings.seed, "recipe": settings.recipe, "tiny": settings.tiny, "seconds": round(seconds, 1),
        "commit": settings.commit or environment.get("commit", ""), "environment": environment,
    }  # fmt: skip
    keep_row(row, results=settings.results, out=settings.out)
    shown = {name: value for name, value in row.items() if name not in HIDDEN}
    say(json.dumps(shown))
