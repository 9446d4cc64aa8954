"""PARL on one GPU: serial collapse, its cure, and what a swarm buys and costs. A piece a call, each can be continued.

    python benchmarks/parl_models.py all --out DIR                first: a base, fine-tuned by traces
    python benchmarks/parl.py train --arm full --out DIR          train an arm
    python benchmarks/parl.py test --arm full --out DIR           test tasks at half, once and twice the cap
    python benchmarks/parl.py arm --arm full --out DIR            both, one after the other
    python benchmarks/parl.py best-of --out DIR                   the serial agent, N samples, as many tokens
    python benchmarks/parl.py report                              every bar with what was measured
    python benchmarks/parl.py all --tiny --out DIR                everything in miniature, on a CPU

An arm has as many iterations as the recipe; how long they take is nothing that results depend on. Training that is not
over after --seconds is saved, and the call ends with exit code 75: the same command goes on. An arm is tested when it
is trained to its end, or as it is with --now.

    arm             rewards                                     workers           starts from
    full            instantiation, finish and outcome, fading   frozen            9 of 10 traces serial
    outcome         the outcome alone                           frozen            the same
    instantiation   workers alone are paid for                  frozen            the same
    no-finish       instantiation and outcome                   frozen            the same
    blog            the blog's form                             frozen            the same
    joint           as full                                     trained with it   the same
    control         as full                                     frozen            traces without a bad delegation
    serial          the outcome; it has no tools for workers    -                 9 of 10 traces serial

The claim of a product, {AdamW + MLA + plain residuals, full recipe} x {single agent, swarm}: train and test the arms
serial and full with --recipe plain too, from models that were trained for as many --seconds as those of the full recipe
took (their rows say it). Rows go to benchmarks/results/parl.json.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import tyro
from parl_models import AGAIN, KEY, Recipe
from parl_models import Settings as Models
from parl_models import main as make_models
from parl_traces import Mix, environment_of
from rl_base import is_there, saved_step
from rl_rows import add_rows, read_rows, say

from perilune.data.picture_scores import bootstrap_interval
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.recipes.parl import parl
from perilune.rl.environments.wide_search import CRITICAL_STEPS, SERIAL_TOOLS, WideSearch
from perilune.rl.loop import CHECKPOINTS, RECORDS, Loop, RLConfig
from perilune.rl.parl import Arm, arm, by_kind
from perilune.rl.replay import replay_folder
from perilune.rl.rollout import Collected, Job, Rollouts
from perilune.rl.talk import Workers
from perilune.rl.trajectory import Trajectory
from perilune.rl.workers import frozen_workers
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine
from perilune.train import OptimizerConfig, RunConfig, checkpoint, load_run
from perilune.train.config_file import to_plain
from perilune.train.environment import describe_environment
from perilune.train.run_folder import create
from perilune.train.trainer import pick_device

ArmName = Literal["full", "outcome", "instantiation", "no-finish", "blog", "joint", "control", "serial"]
CAPS = (0.5, 1.0, 2.0)
SERIAL_CAPS = (0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 1000.0)
"""The serial agent also gets as many steps as it likes: what equal quality costs it."""
TURN_SECONDS = 5e-4
"""For which a thread may keep the interpreter while another waits for it; Python's own 5 ms are several decoding steps:
an engine whose numbers are there would wait as long for the episodes, which compute all the time."""
MEMORY_GIB = 2.0
"""Of each engine, for states and pages: 0.3 GiB of states for 256 sequences (0.6 for the 512 of workers), and pages for
2M tokens (1.6M). 128 episodes of at most 8,192 tokens take 1M, 512 workers of 1,100 take 0.6M."""
EQUAL = "groups with equal rewards"
CURVES = ("spawn", "outcome", "parallel", "finish", "width", "critical_steps", "total_steps", "finished", "unused")


@dataclass(frozen=True, kw_only=True)
class Settings:
    step: tyro.conf.Positional[Literal["train", "test", "arm", "best-of", "report", "all"]]
    arm: ArmName = "full"
    mix: Mix | None = None
    """Traces that the arm starts from, in place of its own."""
    trained_cap: float = 1.0
    """Times the cap, in training. With twice the steps an agent alone gets nearly all items: nothing but the extra
    rewards speaks for workers then."""
    recipe: Recipe = "full"
    seed: int = 0
    out: Path = Path("runs/parl")
    seconds: float = 420.0
    """Of training in this call, after which it stops, saved; opening models comes on top."""
    now: bool = False
    """Test the arm also when it is not trained to its end."""
    iterations: int = parl().rl.iterations
    tasks: int = 16
    samples: int = 8
    lr: float = 3e-4
    """That of the recipe: ten iterations on an H200 led 21M parameters from workers in 3% of wide tasks to all."""
    over: int = 20
    """Iterations in which the extra rewards fade, as in the recipe."""
    spare_steps: int | None = 1
    """Steps beyond the oracle's on narrow tasks and chains; None: the cap of wide ones."""
    tested: int = 128
    """Test tasks of all kinds."""
    most: int = 16
    """Samples of the serial agent at most, for best-of."""
    memory_gib: float = MEMORY_GIB
    """Of each of the two engines, on a GPU."""
    merge: tuple[Path, ...] = ()
    """Rows of other machines to add first."""
    tiny: bool = False
    commit: str = ""
    results: Path = Path("benchmarks/results/parl.json")


def name_of(settings: Settings) -> str:
    return "-".join([settings.arm, settings.recipe, *_beside(settings), str(settings.seed)])


def _beside(settings: Settings) -> list[str]:
    """What is not as in the arm of the bars."""
    looser = [] if settings.trained_cap == 1 else [f"cap{settings.trained_cap:g}"]
    return looser if settings.mix is None else [settings.mix, *looser]


def start_of(settings: Settings) -> str:
    return f"sft-{settings.recipe}-{mix_of(settings)}-{settings.seed}"


def arm_of(settings: Settings) -> str:
    """As rows name it: one that starts from other traces, or trains at another cap, is not the arm of the bars."""
    return ", ".join([settings.arm, *_beside(settings)])


def mix_of(settings: Settings) -> Mix:
    return settings.mix or ("well-formed" if settings.arm == "control" else "mostly-serial")


def wide_search(settings: Settings, cap: float = 1.0) -> WideSearch:
    more: dict[str, Any] = {"critical_steps": max(1, round(CRITICAL_STEPS * cap))}
    if settings.arm == "serial":
        more["main_tools"] = SERIAL_TOOLS
    # Where the cap of wide tasks is changed, that of the others stays: they ask whether spawning is left alone.
    return environment_of(tiny=settings.tiny, spare_steps=settings.spare_steps, **more)


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
        tasks=settings.tasks,
        seed=settings.seed,
        rollout=replace(base.rollout, group_size=settings.samples),
        learner=replace(base.learner, optimizer=OptimizerConfig(lr=settings.lr, weight_decay=0.0)),
        parl=rewarded,
        checkpoint_every=0,
    )
    if settings.tiny:
        engine = replace(base.engine, max_sequences=8, token_budget=512, max_length=2048, num_pages=256)
        talk = replace(base.rollout.talk, max_tokens=48, max_turns=3)
        rollout = replace(config.rollout, talk=talk, workers=talk)
        config = replace(config, engine=engine, worker_engine=engine, pool=8, rollout=rollout)
    elif torch.cuda.is_available():
        # Few and long rows: each costs the host some thousand launches.
        memory = settings.memory_gib
        config = replace(config, engine=replace(base.engine, memory_gib=memory), worker_engine=replace(
            base.worker_engine or base.engine, memory_gib=memory), learner=replace(config.learner, row_tokens=65_536),
        )  # fmt: skip
    return config


# Training -------------------------------------------------------------------------------------------------------------


def iterations_done(settings: Settings) -> int:
    """Of the last complete checkpoint."""
    return saved_step(settings.out / name_of(settings))


def train(settings: Settings) -> None:
    """SystemExit AGAIN where the call's time was over first."""
    folder = settings.out / name_of(settings)
    if not is_there(settings.out, start := start_of(settings)):
        made = f"python benchmarks/parl_models.py sft --mix {mix_of(settings)} --recipe {settings.recipe}"
        raise SystemExit(f"{str(settings.out)!r} has no {start} that is whole: {made} --seed {settings.seed} makes it")
    device = _device(settings)
    say(f"{name_of(settings)}: opening {start_of(settings)}")
    model, tokenizer, run = load_run(settings.out / start_of(settings), device=device)
    config, run = rl_config(settings), replace(run, name=name_of(settings), start_from=None)
    folder.mkdir(parents=True, exist_ok=True)
    create(folder, run, tokenizer, device=device, fresh=False)
    seconds = asyncio.run(_train(settings, config, model, tokenizer, run, folder))
    say(f"{name_of(settings)}: {seconds:.1f} s of training, judging its episodes again")
    if not (folder / RECORDS).exists():
        raise SystemExit(f"no iteration was over after {settings.seconds:g} s: give it more --seconds")
    records = [json.loads(line) for line in (folder / RECORDS).read_text().splitlines()]
    fifth = records[-max(1, len(records) // 5) :]
    kinds = sorted({kind for record in records for kind in record.get("kinds") or ()})
    audit = replay_folder(folder, {"wide_search": wide_search(settings)})
    began = [record["parl"]["began"] for record in records if record.get("parl")]
    row = {
        "row": "train", "name": name_of(settings), "arm": arm_of(settings), "iterations": len(records),
        "wanted": settings.iterations, "episodes": audit["episodes"], "replayed_equal": audit["equal"],
        "faded_from": began[-1] if began else None,
        "last_fifth": {kind: _means([(each.get("kinds") or {}).get(kind) or {} for each in fifth]) for kind in kinds},
        "curves": {
            kind: {name: [_short(((each.get("kinds") or {}).get(kind) or {}).get(name)) for each in records]
                   for name in CURVES}
            for kind in kinds
        },
        "share": [_short((record.get("parl") or {}).get("share")) for record in records],
        "gap": _short(sum(record["gap"] for record in records) / len(records)),
        "seconds_an_iteration": _short(sum(record["seconds"] for record in records) / len(records)),
        "failures": sum(sum(record["failures"].values()) for record in records),
        "tasks": settings.tasks, "samples": settings.samples, "lr": settings.lr, "over": settings.over,
    }  # fmt: skip
    _record(settings, row, seconds)
    if len(records) < settings.iterations:
        say(f"{len(records)} of {settings.iterations} iterations: the same command goes on")
        if not settings.now:
            raise SystemExit(AGAIN)


async def _train(
    settings: Settings, config: RLConfig, model: Decoder, tokenizer: Tokenizer, run: RunConfig, folder: Path
) -> float:
    """Until the time of this call is over; what was trained before is continued."""
    about = {"config": to_plain(run), "tokenizer_fingerprint": tokenizer.fingerprint}
    resume = checkpoint.find(folder / CHECKPOINTS) is not None
    environments = {"wide_search": wide_search(settings, settings.trained_cap)}
    async with Loop(model, tokenizer, environments, config, folder=folder, resume=resume, about=about) as loop:
        if not resume:
            await loop.save()
        say(f"{name_of(settings)}: engines are there, iteration {loop.iteration}/{config.iterations}")
        began = saved = time.monotonic()
        while loop.iteration < config.iterations and time.monotonic() - began < settings.seconds:
            record = await loop.step()
            say(_line(settings, record))
            if time.monotonic() - saved > 60:  # a call that is cut off loses a minute at most
                await loop.save()
                saved = time.monotonic()
        await loop.save()
        return time.monotonic() - began


def _line(settings: Settings, record: Mapping[str, Any]) -> str:
    kinds = "  ".join(
        f"{kind}: spawn {numbers['spawn']:.2f} F1 {numbers['outcome']:.2f} width {numbers['width']:.1f}"
        for kind, numbers in (record.get("kinds") or {}).items()
    )
    return (
        f"{name_of(settings)} {record['iteration']}/{settings.iterations}  {record['seconds']:.1f} s "
        f"({record['rollout_seconds']:.1f} play, {record['learn_seconds']:.1f} learn)  "
        f"reward {record.get('reward', 0.0):.2f}  "
        f"equal groups {record['dropped'].get(EQUAL, 0)}/{settings.tasks}  {kinds}"
    )


# Testing --------------------------------------------------------------------------------------------------------------


async def play(
    settings: Settings,
    caps: Sequence[float],
    tell: Callable[[float, Collected, float], None],
    *,
    samples: int = 1,
    temperature: float = 0.0,
) -> None:
    """Test tasks by the trained arm at every cap; `tell` hears of each: its episodes and the seconds they took."""
    device, config = _device(settings), rl_config(settings)
    if not (done := iterations_done(settings)):
        raise SystemExit(f"{str(settings.out)!r} has no {name_of(settings)}: train the arm first")
    if done < settings.iterations and not settings.now:
        raise SystemExit(
            f"{name_of(settings)} has {done} of {settings.iterations} iterations: train it to its end, or test it as "
            "it is with --now"
        )
    model, tokenizer, _ = load_run(settings.out / name_of(settings), device=device)
    frozen, frozen_tokenizer, _ = load_run(settings.out / start_of(settings), device=device)
    talk = replace(config.rollout.talk, temperature=temperature)
    if settings.arm == "serial" and not settings.tiny:  # without a cap it reads on and on
        talk = replace(talk, max_tokens=8192, max_turns=128)
    told = replace(config.rollout.workers, temperature=temperature)
    engine = AsyncEngine(Engine(model, tokenizer, replace(config.engine, max_queue=1 << 20), device=device))
    if settings.arm == "joint":
        workers = Workers(engine=engine, tokenizer=tokenizer, config=told)
    else:
        workers = frozen_workers(frozen, frozen_tokenizer, config.worker_engine or config.engine, told, device=device)
    say(f"{name_of(settings)}: engines are there")
    try:
        for cap in caps:
            environment = wide_search(settings, cap)
            rollouts = Rollouts(
                engine, tokenizer, {"wide_search": environment}, replace(config.rollout, talk=talk), workers=workers
            )
            jobs = [
                Job(environment="wide_search", task=environment.task(number, "test"), sample=sample, seed=settings.seed,
                    iteration=-1)
                for number in range(settings.tested) for sample in range(samples)
            ]  # fmt: skip
            began = time.monotonic()
            tell(cap, await rollouts.collect(jobs, iteration=0), time.monotonic() - began)
    finally:
        await engine.close()
        if workers.engine is not engine:
            await workers.engine.close()


def test(settings: Settings) -> None:
    def tell(cap: float, collected: Collected, seconds: float) -> None:
        wide = [each for each in collected.trajectories if each.task_data["kind"] == "wide"]
        row = {
            "row": "test", "name": name_of(settings), "arm": arm_of(settings), "cap": cap,
            "critical_cap": round(CRITICAL_STEPS * cap), "kinds": by_kind(collected.trajectories),
            "wide_f1": _interval([each.facets["outcome"] for each in wide]), "play_seconds": round(seconds, 2),
            "episodes": len(collected.trajectories), "failures": dict(collected.failures),
            "iterations": iterations_done(settings), "wanted": settings.iterations,
        }  # fmt: skip
        _record(settings, row, seconds)

    asyncio.run(play(settings, SERIAL_CAPS if settings.arm == "serial" else CAPS, tell))


def best_of(settings: Settings) -> None:
    """The best of N serial samples by the outcome itself, which nobody has at test time: more than fair to it."""
    swarm = next((row for row in read_rows(settings.results) if row.get("row") == "test" and row["name"] == name_of(
        replace(settings, arm="full")) and row["cap"] == 1.0 and row["tiny"] == settings.tiny), None)  # fmt: skip
    if swarm is None or "wide" not in swarm["kinds"]:
        raise SystemExit("there is no test of the arm full yet: python benchmarks/parl.py test --arm full")
    serial = replace(settings, arm="serial")
    found: list[tuple[Collected, float]] = []

    def tell(cap: float, collected: Collected, seconds: float) -> None:
        found.append((collected, seconds))

    asyncio.run(play(serial, (1.0,), tell, samples=settings.most, temperature=1.0))
    ((collected, seconds),) = found
    tokens = swarm["kinds"]["wide"]["tokens"] + swarm["kinds"]["wide"]["worker_tokens"]
    groups: dict[str, list[Trajectory]] = {}
    for each in collected.trajectories:
        if each.task_data["kind"] == "wide":
            groups.setdefault(each.task, []).append(each)
    own = [each.facets["tokens"] for group in groups.values() for each in group]
    count = max(1, min(settings.most, round(tokens / max(1.0, sum(own) / max(1, len(own))))))
    best = [max(each.facets["outcome"] for each in group[:count]) for group in groups.values()]
    row = {
        "row": "best-of", "name": name_of(serial), "arm": "serial", "cap": 1.0, "samples_each": count,
        "swarm_tokens": round(tokens, 1), "serial_tokens": round(sum(own) / max(1, len(own)), 1),
        "wide_f1": _interval(best), "swarm_f1": swarm["wide_f1"],
    }  # fmt: skip
    _record(settings, row, seconds)


# ----------------------------------------------------------------------------------------------------------------------


def _device(settings: Settings) -> torch.device:
    return torch.device(pick_device("cpu" if settings.tiny else "auto"))


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for row in rows for name in row})
    known = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: round(sum(values) / len(values), 4) for name, values in known.items()}


def _interval(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = bootstrap_interval(values)
    return {"mean": round(found.mean, 4), "low": round(found.low, 4), "high": round(found.high, 4)}


def _short(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def _record(settings: Settings, row: dict[str, Any], seconds: float) -> None:
    environment = describe_environment(_device(settings))
    row = {
        **row, "seed": settings.seed, "recipe": settings.recipe, "tiny": settings.tiny, "seconds": round(seconds, 1),
        "commit": settings.commit or environment.get("commit", ""), "environment": environment,
    }  # fmt: skip
    add_rows(settings.results, [row], key=KEY)
    shown = {name: value for name, value in row.items() if name not in ("environment", "curves", "share")}
    say(json.dumps(shown))


def small_settings(settings: Settings) -> Settings:
    """Seconds on a CPU; models are made where they are missing."""
    pairs: list[tuple[Recipe, Mix]] = [(settings.recipe, mix_of(settings))]
    if settings.step == "all":
        pairs = [("full", "mostly-serial"), ("full", "well-formed"), ("plain", "mostly-serial")]
    for recipe, mix in pairs:
        models = Models(step="all", tiny=True, out=settings.out, results=settings.results, recipe=recipe, mix=mix)
        if not is_there(settings.out, f"sft-{recipe}-{mix}-{settings.seed}"):
            make_models(replace(models, seed=settings.seed))
    return replace(settings, iterations=2, tasks=2, samples=2, tested=4, most=2)


def main(settings: Settings) -> None:
    sys.setswitchinterval(TURN_SECONDS)
    for path in settings.merge:
        add_rows(settings.results, read_rows(path), key=KEY)
    if settings.tiny and settings.step != "report":
        settings = small_settings(settings)
    if settings.step == "all":
        for name in get_args(ArmName):
            train(replace(settings, arm=name))
            test(replace(settings, arm=name))
        for name in ("serial", "full"):
            train(replace(settings, arm=name, recipe="plain"))
            test(replace(settings, arm=name, recipe="plain"))
        best_of(settings)
    elif settings.step in ("train", "test", "arm"):
        if settings.step == "arm" and iterations_done(settings) >= settings.iterations:
            say(f"{name_of(settings)}: trained already")
        elif settings.step != "test":
            train(settings)
        if settings.step != "train":
            test(settings)
    elif settings.step == "best-of":
        best_of(settings)
    if settings.step in ("report", "all"):
        from parl_bars import bars_text

        print(bars_text(read_rows(settings.results), tiny=settings.tiny))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
