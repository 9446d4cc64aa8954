"""Reinforcement learning on one GPU, an arm a call: what it buys, what controls say, what attention changes.

    python benchmarks/rl_experiments.py vision --seconds 420    on a GPU, after benchmarks/rl_base.py
    python benchmarks/rl_experiments.py report                  the bars and what was measured
    python benchmarks/rl_experiments.py report --merge FILE     with rows of another machine

    arm                starts from (rl_base.py)   learns
    vision             hybrid, zero_vision        picture -> SVG
    vision-text-image  hybrid, text_image         the same
    vision-none        hybrid, none               the same
    vision-mla         mla, zero_vision           the same
    words              hybrid, zero_vision        the same pictures told in words: equal steps of text
    shuffled           hybrid, zero_vision        the same with the picture of another task
    sums               hybrid, zero_vision        word problems
    joint              hybrid, zero_vision        pictures and word problems, half of the samples each
    sums-toggle        hybrid, zero_vision        word problems under Toggle
    sums-rigid         hybrid, zero_vision        word problems under a budget that is never lifted
    tools              hybrid, zero_vision        calculations over several turns with a calculator

Arms take the same number of iterations and samples. Before and after, each plays the same test tasks greedily (pictures
also with those of other tasks) and answers the spatial probe, which nothing trains on (eval/spatial.py). A row with
intervals, curves and a few samples goes to benchmarks/results/rl.json. What does not fit into --seconds is saved under
--out and continued by the same command; its row says how far it is. `--tiny` needs nothing and runs on a CPU.
"""

import asyncio
import json
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import tyro
from rl_base import is_there
from rl_base import main as make_models
from rl_rows import add_rows, read_rows
from rl_texts import PROBLEMS, SCENES

from perilune.data.tokenizer import Tokenizer
from perilune.eval.spatial import COUNT, spatial_items, spatial_score
from perilune.model import Decoder
from perilune.recipes.sft import processor_of
from perilune.rl.environment import Environment, Message, Split, Talk, Task
from perilune.rl.environments.drawing import Drawing
from perilune.rl.environments.tool_use import ToolUse
from perilune.rl.evaluation import OTHER_PICTURES, EvaluationConfig, evaluate, read_evaluations, task_of
from perilune.rl.groups import GroupConfig
from perilune.rl.learner import LearnerConfig
from perilune.rl.lengths import ToggleConfig
from perilune.rl.loop import CHECKPOINTS, RECORDS, Loop, RLConfig
from perilune.rl.rollout import RolloutConfig
from perilune.rl.talk import TalkConfig
from perilune.serve.engine import EngineConfig
from perilune.train import OptimizerConfig, RunConfig, checkpoint, load_run
from perilune.train.environment import describe_environment
from perilune.train.trainer import pick_device

ArmName = Literal[
    "vision", "vision-text-image", "vision-none", "vision-mla", "words", "shuffled", "sums", "joint", "sums-toggle",
    "sums-rigid", "tools",
]  # fmt: skip
ARMS: tuple[ArmName, ...] = get_args(ArmName)
KEY = ("arm", "seed", "tiny")
CURVES = ("reward", "length", "gap", "clipped", "finished", "facet.valid", "facet.called", "seconds", "learn_seconds")
KEPT_TEXT = 600
STARTED = "arm.json"
PROBES = "probes.json"
TOGGLE = ToggleConfig(period=10, threshold=0.8, percentile=25.0, min_answers=4)
RIGID = ToggleConfig(period=1 << 40, threshold=0.0, percentile=25.0, min_answers=4)
"""Toggle that never leaves its budgeted phase and asks for no accuracy first."""
PICTURES = Drawing(scenes=SCENES, max_tokens=256)
IN_WORDS = replace(PICTURES, name="words", ask="words")
SUMS = replace(PROBLEMS, name="sums", max_tokens=256)
TOOLS = ToolUse(name="tools", max_turns=4, max_tokens=96)


@dataclass(frozen=True, kw_only=True)
class Arm:
    start: str = "hybrid-zero_vision"
    trained: Mapping[str, Environment]
    evaluated: Mapping[str, Environment] = field(
        default_factory=lambda: {"drawing": PICTURES, "words": IN_WORDS, "sums": SUMS}
    )
    toggle: ToggleConfig | None = None


def arm_of(name: ArmName) -> Arm:
    if name.startswith("vision"):
        start = {
            "vision-mla": "mla-zero_vision",
            "vision-text-image": "hybrid-text_image",
            "vision-none": "hybrid-none",
        }
        return Arm(start=start.get(name, "hybrid-zero_vision"), trained={"drawing": PICTURES})
    if name.startswith("sums"):
        toggle = {"sums-toggle": TOGGLE, "sums-rigid": RIGID}.get(name)
        return Arm(trained={"sums": SUMS}, toggle=toggle)
    if name == "tools":
        return Arm(trained={"tools": TOOLS}, evaluated={"tools": TOOLS, "sums": SUMS})
    trained: dict[str, dict[str, Environment]] = {
        "words": {"words": IN_WORDS},
        "shuffled": {"drawing": replace(PICTURES, ask="shuffled")},
        "joint": {"drawing": PICTURES, "sums": SUMS},
    }
    return Arm(trained=trained[name])


@dataclass(frozen=True, kw_only=True)
class Settings:
    arm: tyro.conf.Positional[Literal[ArmName, "report"]]
    seed: int = 0
    seconds: float = 420.0
    """For this call, all of it."""
    iterations: int = 150
    tasks: int = 32
    """In an iteration."""
    samples: int = 8
    """Of a task."""
    pool: int = 1024
    """Tasks that are drawn from."""
    lr: float = 3e-4
    tag: str = ""
    """Keeps a trial with other settings apart: a run and a row of its own, which the bars leave alone."""
    evaluated: int = 256
    """Test tasks of each environment."""
    items: int = COUNT
    """Of the spatial probe."""
    max_length: int = 1536
    """Tokens of an episode that the engine makes room for; with `sequences` it bounds the engine's memory."""
    sequences: int = 256
    memory_gib: float = 16.0
    """The most that the engine's pages and states may take of the card, which other arms share."""
    overlap: bool = False
    """Play the next iteration while this one is learnt from."""
    out: Path = Path("runs/rl")
    tiny: bool = False
    """A miniature on the CPU, which also makes its models."""
    again: bool = False
    """Start anew where a run was begun."""
    merge: tuple[Path, ...] = ()
    """For report: rows of other machines to take in."""
    commit: str = ""
    results: Path = Path("benchmarks/results/rl.json")


def rl_config(settings: Settings, arm: Arm, run: RunConfig) -> RLConfig:
    start = Path(settings.out) / f"sft-{arm.start}"
    talk = TalkConfig(max_tokens=480, max_turns=TOOLS.max_turns, processor=processor_of(run, start))
    return RLConfig(
        iterations=settings.iterations,
        tasks=settings.tasks,
        pool=settings.pool,
        overlap=settings.overlap,
        seed=settings.seed,
        rollout=RolloutConfig(group_size=settings.samples, concurrency=settings.sequences, talk=talk),
        learner=LearnerConfig(optimizer=OptimizerConfig(lr=settings.lr, weight_decay=0.0), row_tokens=16_384),
        groups=GroupConfig(toggle=arm.toggle),
        engine=EngineConfig(
            max_sequences=settings.sequences, token_budget=max(4096, 2 * settings.sequences),
            max_length=settings.max_length, memory_gib=settings.memory_gib, num_snapshots=64,
        ),
        checkpoint_every=0,
        keep_trajectories=False,
    )  # fmt: skip


def name_of(settings: Settings) -> str:
    return f"{settings.arm}.{settings.tag}" if settings.tag else settings.arm


# One arm --------------------------------------------------------------------------------------------------------------


def run_arm(settings: Settings) -> dict[str, Any]:
    """Train as far as the time allows and give the row of what there is."""
    began = time.monotonic()
    assert settings.arm != "report"
    arm, folder = arm_of(settings.arm), settings.out / f"rl-{name_of(settings)}-{settings.seed}"
    start = settings.out / f"sft-{arm.start}"
    if not is_there(settings.out, start.name):
        raise SystemExit(
            f"{settings.out} holds no {start.name}: run benchmarks/rl_base.py base, then sft, with --out {settings.out}"
        )
    device = pick_device("auto")
    model, tokenizer, run = load_run(start, device=device)
    config = rl_config(settings, arm, run)
    if settings.tiny:
        arm = shortened(arm)
    resume = _begun(settings, folder)
    work = Work(
        settings=settings, arm=arm, folder=folder, model=model, tokenizer=tokenizer, end=began + settings.seconds
    )
    asyncio.run(work.run(config, resume=resume))
    return row_of(settings, arm, folder, config, device, seconds=time.monotonic() - began)


def _begun(settings: Settings, folder: Path) -> bool:
    """Whether there is a run to go on with; one with other settings is refused."""
    decides = ("arm", "seed", "tasks", "samples", "pool", "lr", "overlap", "tiny", "evaluated", "items")
    asked = {name: getattr(settings, name) for name in decides}
    record = folder / STARTED
    is_saved = (folder / CHECKPOINTS).is_dir() and checkpoint.find(folder / CHECKPOINTS) is not None
    if is_saved and record.exists() and not settings.again:
        if (before := json.loads(record.read_text())) != asked:
            raise SystemExit(f"{folder} was begun with {before}, not {asked}: give the same settings, or --again")
        return True
    for name in (RECORDS, PROBES, "evaluations.jsonl"):
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(asked) + "\n")
    return False


@dataclass
class Work:
    settings: Settings
    arm: Arm
    folder: Path
    model: Decoder
    tokenizer: Tokenizer
    end: float
    """When the call has to be over."""

    async def run(self, config: RLConfig, *, resume: bool) -> None:
        settings = self.settings
        async with Loop(
            self.model, self.tokenizer, self.arm.trained, config, folder=self.folder, resume=resume
        ) as loop:  # fmt: skip
            looked = await self._look(loop)
            last_save = time.monotonic()
            while loop.iteration < settings.iterations:
                longest = max((record["seconds"] for record in _records(self.folder)[-20:]), default=0.0)
                # What is left to do after the loop takes about as long as the first look did, and a save.
                if time.monotonic() + longest + 1.3 * looked + 10 > self.end and loop.iteration:
                    break
                record = await loop.step()
                if loop.iteration % 10 == 0 or settings.tiny:
                    print(_line(settings, record), flush=True)
                if time.monotonic() - last_save > 120:  # a call that is cut off loses two minutes at most
                    loop.save()
                    last_save = time.monotonic()
            loop.save()
            await self._look(loop)

    async def _look(self, loop: Loop) -> float:
        """Test tasks and the probe, unless these weights were looked at; the seconds it took."""
        began = time.monotonic()
        if loop.iteration not in {record["iteration"] for record in read_evaluations(self.folder)}:
            told = EvaluationConfig(tasks=self.settings.evaluated, samples=3)
            await evaluate(loop, self.arm.evaluated, told, self.folder)
        probes = _probes(self.folder)
        if str(loop.iteration) not in probes:
            found = spatial_score(loop.learner.model, self.tokenizer, spatial_items(self.settings.items))
            probes[str(loop.iteration)] = found.plain()
            (self.folder / PROBES).write_text(json.dumps(probes) + "\n")
        return time.monotonic() - began


def _records(folder: Path) -> list[dict[str, Any]]:
    path = folder / RECORDS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _probes(folder: Path) -> dict[str, Any]:
    path = folder / PROBES
    return json.loads(path.read_text()) if path.exists() else {}


def _line(settings: Settings, record: Mapping[str, Any]) -> str:
    return (
        f"{name_of(settings)} {record['iteration']}/{settings.iterations}  reward {record.get('reward', 0):.3f}  "
        f"length {record.get('length', 0):.0f}  gap {record['gap']:.4f}  clipped {record['clipped']:.3f}  "
        f"{record['seconds']:.2f} s ({record['rollout_seconds']:.2f} playing, {record['learn_seconds']:.2f} learning)"
    )


# The row --------------------------------------------------------------------------------------------------------------


def row_of(
    settings: Settings, arm: Arm, folder: Path, config: RLConfig, device: torch.device, *, seconds: float
) -> dict[str, Any]:
    records, evaluations, probes = _records(folder), read_evaluations(folder), _probes(folder)
    first, last = evaluations[0], evaluations[-1]
    done = last["iteration"]
    failures: dict[str, int] = {}
    for record in [*records, *evaluations]:
        for kind, count in record["failures"].items():
            failures[kind] = failures.get(kind, 0) + count
    environment = describe_environment(device)
    steady = records[len(records) // 4 :]
    return {
        "arm": name_of(settings),
        "seed": settings.seed,
        "tiny": settings.tiny,
        "start": arm.start,
        "iterations": done,
        "wanted": settings.iterations,
        "tasks": settings.tasks,
        "samples": settings.samples,
        "lr": settings.lr,
        "overlap": settings.overlap,
        "seconds": round(seconds, 1),
        "seconds_an_iteration": _mean(steady, "seconds"),
        "rollout_tokens_per_s": _mean(steady, "rollout_tokens_per_s"),
        "learn_tokens_per_s": _mean(steady, "learn_tokens_per_s"),
        "before": _numbers(arm, settings, first),
        "after": _numbers(arm, settings, last),
        "probe_before": probes[str(first["iteration"])],
        "probe_after": probes[str(done)],
        "failures": failures,
        "curves": {
            name: [_short(record.get(name)) for record in records] for name in CURVES if any(name in r for r in records)
        },
        "examples": {
            when: [_kept(each) for each in found["samples"]] for when, found in (("before", first), ("after", last))
        },
        "engine": {"sequences": config.engine.max_sequences, "memory_gib": config.engine.memory_gib},
        "commit": settings.commit or environment.get("commit", ""),
        "environment": environment,
    }  # fmt: skip


def _numbers(arm: Arm, settings: Settings, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Of every environment; rewards in the order of the tasks, None for a lost one, so that arms can be paired."""
    names = {
        name: [task_of(environment.task(number, "test").name) for number in range(settings.evaluated)]
        for name, environment in arm.evaluated.items()
    }
    numbers = {}
    for name, found in evaluation["environments"].items():
        rewards = [found["rewards"].get(task) for task in names[name.removesuffix(OTHER_PICTURES)]]
        numbers[name] = found | {"rewards": [_short(reward) for reward in rewards]}
    return numbers


def _kept(sample: Mapping[str, Any]) -> dict[str, Any]:
    cut = {name: value[:KEPT_TEXT] for name, value in sample.items() if name in ("prompt", "text", "problem")}
    pictures = {name: sample[name] for name in ("image", "drawn") if name in sample}
    return {
        **cut,
        **pictures,
        "environment": sample["environment"],
        "task": sample["task"][:80],
        "reward": sample["reward"],
    }


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _mean(records: list[dict[str, Any]], name: str) -> float | None:
    return round(sum(record[name] for record in records) / len(records), 4) if records else None


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


def tiny(settings: Settings) -> Settings:
    """Seconds on a CPU; models are made where they are missing."""
    from rl_base import Settings as Models

    settings = replace(
        settings, iterations=min(settings.iterations, 2), tasks=min(settings.tasks, 3), pool=min(settings.pool, 8),
        samples=min(settings.samples, 2), evaluated=min(settings.evaluated, 2), items=min(settings.items, 12),
        sequences=8, memory_gib=0.25,
    )  # fmt: skip
    if not is_there(settings.out, f"sft-{arm_of(settings.arm).start}"):
        make_models(Models(step="all", tiny=True, out=settings.out, results=settings.out / "rl_base.json"))
    return settings


def main(settings: Settings) -> None:
    for path in settings.merge:
        add_rows(settings.results, read_rows(path), key=KEY)
    if settings.arm == "report":
        from rl_report import write_report

        print(write_report(settings.results, settings.results.with_name("rl_throughput.json")))
        return
    row = run_arm(tiny(settings) if settings.tiny else settings)
    add_rows(settings.results, [row], key=KEY)
    for name, after in row["after"].items():
        before = row["before"][name]
        if name.endswith(OTHER_PICTURES) or not after["count"] or not before["count"]:
            continue
        means = [each["reward"]["mean"] for each in (before, after)]
        print(f"{name}: {means[0]:.3f} before, {means[1]:.3f} after, {after['count']} tasks")
    print(
        f"spatial probe: {row['probe_before']['accuracy']:.3f} before, {row['probe_after']['accuracy']:.3f} after "
        f"(chance {row['probe_after']['chance']:.3f})"
    )
    if row["iterations"] < row["wanted"]:
        print(f"{row['iterations']} of {row['wanted']} iterations: the same command goes on")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
