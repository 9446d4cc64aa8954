"""Reinforcement learning on one GPU, an arm a call: what it buys, what controls say, what attention changes.

    python benchmarks/rl_experiments.py probe                   after benchmarks/rl_base.py: what the models start with
    python benchmarks/rl_experiments.py vision                  on a GPU
    python benchmarks/rl_experiments.py report                  the bars and what was measured, as .md and .html
    python benchmarks/rl_experiments.py report --merge FILE     with rows of another machine

    arm                starts from (rl_base.py)   learns
    vision             hybrid, zero_vision        picture -> SVG
    vision-kinds       hybrid, zero_vision        the same, paid for shapes of the right kinds too
    vision-ptx         hybrid, zero_vision        the same, with the loss of its dialogues added
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

Tasks are as hard as suits the model that arms start from: `probe` plays every level, says what it earns and chooses
(rl_levels.py); an arm that finds no choice does so itself. `probe --start hybrid-none` looks at another model and
chooses nothing. Arms take the same number of iterations and samples. Before and after, each plays the same test tasks
greedily (pictures also with those of other tasks) and answers two probes in text alone: spatial questions in forms that
nothing trains on (eval/spatial.py), and questions as pre-training asks them, about pictures that are held out and told
in text (eval/told_pictures.py). A row with intervals, curves and a few samples goes to benchmarks/results/rl.json. What
does not fit into --seconds is saved under --out and continued by the same command, as is a call that was told to stop
or killed; a row says how far it is.
`--tiny` needs nothing and runs on a CPU: it shows that the script works. `--mini` learns, in minutes on one core, and
writes its rows beside the others:

    python benchmarks/rl_base.py mini
    python benchmarks/rl_experiments.py sums --mini             also sums-toggle, sums-rigid, tools
    python benchmarks/rl_experiments.py report --mini
"""

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from rl_arms import PTX_TOKENS, Arm, ArmName, arm_of, of_numbers, shortened, start_of
from rl_base import is_there
from rl_base import main as make_models
from rl_levels import MINI_LEVELS, Levels, choose_levels, kept_levels, look, tell, tools
from rl_rows import add_rows, read_rows, say

from perilune.data.chat_rows import ChatRows
from perilune.data.tokenizer import Tokenizer
from perilune.eval import told_pictures
from perilune.eval.spatial import COUNT, spatial_items, spatial_score
from perilune.model import Decoder
from perilune.recipes.sft import processor_of
from perilune.rl.evaluation import (
    OTHER_PICTURES,
    EvaluationConfig,
    evaluate,
    evaluated,
    read_evaluations,
    task_of,
)
from perilune.rl.groups import GroupConfig
from perilune.rl.learner import LearnerConfig
from perilune.rl.lengths import ToggleConfig
from perilune.rl.loop import CHECKPOINTS, RECORDS, Loop, RLConfig
from perilune.rl.priorities import PriorityConfig
from perilune.rl.progress import evaluation_line
from perilune.rl.rollout import RolloutConfig
from perilune.rl.talk import TalkConfig
from perilune.serve.engine import EngineConfig
from perilune.train import OptimizerConfig, RunConfig, checkpoint, load_run
from perilune.train.environment import describe_environment
from perilune.train.interrupt import Interrupted, StopRequest
from perilune.train.trainer import pick_device

KEY = ("arm", "seed", "tiny")
CURVES = (
    "reward",
    "length",
    "gap",
    "clipped",
    "finished",
    "facet.valid",
    "facet.kinds",
    "facet.called",
    "seconds",
    "learn_seconds",
)
KEPT_TEXT = 600
SAVE_SECONDS = 120.0
"""A call that is cut off loses no more."""
LOOK_SECONDS = (15.0, 60.0)
"""What the last look may take, which comes after the iterations: as long as the first, within these bounds, since the
first also compiles, and a call that goes on has none."""
STARTED = "arm.json"
PROBES = "probes.json"
FINER = 4
LEVELS_FROM = "hybrid-zero_vision"
"""The model whose rewards say how hard tasks are (rl_levels.py), where it is there."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    arm: tyro.conf.Positional[Literal[ArmName, "probe", "report"]]
    seed: int = 0
    seconds: float = 1500.0
    """For this call, all of it: what is not done then is gone on with. Iterations are what an arm is measured by."""
    iterations: int = 100
    tasks: int = 32
    """In an iteration."""
    samples: int = 8
    """Of a task."""
    pool: int = 1024
    """Tasks that are drawn from."""
    lr: float = 2e-4
    """Of MuonClip: a fifteenth of the base's. About that share, a quarter of the samples: one small model drew better,
    but another lost a third of its greedy reward on word problems, and less with a third of it. Not swept."""
    drawing_level: Literal[1, 2, 3, 4, 5] | None = None
    """How hard pictures are; None: as suits the model at the start (rl_levels.py)."""
    sums_level: Literal[1, 2, 3, 4] | None = None
    """The same of word problems."""
    tools_level: Literal[1, 2, 3] | None = None
    """The same of calculations."""
    played: int = 64
    """Tasks of each level, to choose them."""
    start: str = LEVELS_FROM
    """For probe: the model that plays."""
    tag: str = ""
    """Keeps a trial with other settings apart: a run and a row of its own, which the bars leave alone."""
    evaluated: int = 256
    """Test tasks of each environment; four times as many word problems in arms that differ by a hundredth there."""
    items: int = COUNT
    """Of the spatial probe."""
    told: int = told_pictures.COUNT
    """Questions about pictures that are told in text."""
    max_length: int = 1536
    """Tokens of an episode that the engine makes room for; with `sequences` it bounds the engine's memory."""
    sequences: int = 256
    memory_gib: float = 4.0
    """The most that the engine's pages and states may take of the card, which other arms share. All sequences at their
    longest fill 1.1 GiB of a hybrid and 3.4 of all MLA; the rest remembers prefixes."""
    row_tokens: int = 16_384
    """Of a forward and backward pass. Each takes at most 0.4 MiB of the card (what is saved for the backward on a CPU),
    which makes 7 GiB, and a process less than 14: six arms fit side by side."""
    overlap: bool = False
    """Play the next iteration while this one is learnt from."""
    out: Path = Path("runs/rl")
    tiny: bool = False
    """A miniature on the CPU, which also makes its models."""
    mini: bool = False
    """From the model of `rl_base.py mini`, on a CPU."""
    again: bool = False
    """Start anew where a run was begun."""
    merge: tuple[Path, ...] = ()
    """For report: rows of other machines to take in."""
    png: Path | None = None
    """For report: where curves of reward go, beside the page."""
    commit: str = ""
    results: Path = Path("benchmarks/results/rl.json")


def rl_config(
    settings: Settings, run: RunConfig, start: Path, toggle: ToggleConfig | None = None, *, ptx_weight: float = 0.0
) -> RLConfig:
    talk = TalkConfig(max_tokens=480, max_turns=tools(1).max_turns, processor=processor_of(run, start))
    return RLConfig(
        iterations=settings.iterations,
        tasks=settings.tasks,
        pool=settings.pool,
        overlap=settings.overlap,
        seed=settings.seed,
        rollout=RolloutConfig(group_size=settings.samples, concurrency=settings.sequences, talk=talk),
        learner=LearnerConfig(
            optimizer=OptimizerConfig(lr=settings.lr, weight_decay=0.0), row_tokens=settings.row_tokens,
            ptx_weight=ptx_weight,
        ),
        groups=GroupConfig(toggle=toggle),
        priorities=PriorityConfig(hopeless_after=2 * settings.samples),
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
    assert settings.arm not in ("report", "probe")
    folder = settings.out / f"rl-{name_of(settings)}-{settings.seed}"
    start = model_folder(settings, "mini" if settings.mini else start_of(settings.arm))
    device = pick_device("auto")
    say(f"{name_of(settings)}: start, on {device}")
    levels = levels_of(settings, device)
    arm = arm_of(settings.arm, levels, settings.iterations)
    arm = shortened(arm) if settings.tiny else of_numbers(arm) if settings.mini else arm
    threading.Thread(target=_make_tests, args=(settings, arm), daemon=True).start()
    model, tokenizer, run = load_run(start, device=device)
    say(f"{start.name} is loaded, {model.num_parameters():,} parameters")
    config = rl_config(settings, run, start, arm.toggle, ptx_weight=arm.ptx_weight)
    ptx = None
    if arm.ptx_weight:
        assert run.data.chat is not None, f"{start} was not fine-tuned on dialogues"
        length = run.data.seq_len if settings.tiny else PTX_TOKENS
        ptx = ChatRows(run.data.chat, tokenizer, seq_len=length, seed=settings.seed, cache_dir=run.data.cache_dir)
    resume = _begun(settings, levels, folder)
    with StopRequest(lambda name: say(f"{name}: finishing the iteration and saving")) as stop:
        work = Work(
            settings=settings, arm=arm, folder=folder, model=model, tokenizer=tokenizer, ptx=ptx, stop=stop,
            end=began + settings.seconds,
        )  # fmt: skip
        asyncio.run(work.run(config, resume=resume))
    if stop.signal_number is not None:
        say("saved: the same command goes on")
        raise Interrupted(stop.signal_number)
    row = row_of(settings, arm, folder, config, device, seconds=time.monotonic() - began)
    return row | {"levels": asdict(levels)}


told_items = lru_cache(maxsize=1)(told_pictures.told_items)
"""Asked before and after."""


def _make_tests(settings: Settings, arm: Arm) -> None:
    """Pictures that are held out take many milliseconds to find: they are found while the engine compiles."""
    told_items(settings.told)
    told = evaluation_config(settings, arm)
    for name, environment in evaluated(arm.evaluated).items():
        for number in range(told.count_of(name)):
            environment.task(number, "test")


def evaluation_config(settings: Settings, arm: Arm) -> EvaluationConfig:
    more = {"sums": FINER * settings.evaluated} if set(arm.trained) == {"sums"} else {}
    return EvaluationConfig(tasks=settings.evaluated, tasks_of=more, samples=3)


def model_folder(settings: Settings, start: str) -> Path:
    folder = settings.out / f"sft-{start}"
    if not is_there(settings.out, folder.name):
        made = "mini" if settings.mini else "base, then sft,"
        raise SystemExit(
            f"--out {settings.out} holds no {folder.name}: run benchmarks/rl_base.py {made} with that --out"
        )
    return folder


def probe(settings: Settings) -> None:
    """What a model earns on every level; that of LEVELS_FROM also chooses them for the arms to come."""
    folder, device = model_folder(settings, settings.start), pick_device("auto")
    say(f"{folder.name} plays, on {device}")
    model, tokenizer, run = load_run(folder, device=device)
    config, path = rl_config(settings, run, folder), levels_file(settings)
    kept = kept_levels(path)
    if settings.start == LEVELS_FROM and (kept is None or settings.again):
        path.unlink(missing_ok=True)
        say(f"levels in {path}: {asdict(choose_levels(path, model, tokenizer, config, tasks=settings.played))}")
    else:
        tell(look(model, tokenizer, config, tasks=settings.played), kept or Levels())


def levels_file(settings: Settings) -> Path:
    return settings.out / "levels.json"


def levels_of(settings: Settings, device: torch.device) -> Levels:
    """As told; else those of the folder of models, chosen now where nobody has."""
    told = {"drawing": settings.drawing_level, "sums": settings.sums_level, "tools": settings.tools_level}
    given = {name: level for name, level in told.items() if level is not None}
    if settings.mini:
        return replace(MINI_LEVELS, **given)
    if settings.tiny or len(given) == len(told):
        return Levels(**given)
    path = levels_file(settings)
    if (kept := kept_levels(path)) is not None:
        return replace(kept, **given)
    known = is_there(settings.out, f"sft-{LEVELS_FROM}")
    assert settings.arm not in ("report", "probe")
    start = settings.out / f"sft-{LEVELS_FROM if known else start_of(settings.arm)}"
    model, tokenizer, run = load_run(start, device=device)
    say(f"levels are chosen by {start.name}")
    config = rl_config(settings, run, start)
    return replace(choose_levels(path, model, tokenizer, config, tasks=settings.played), **given)


def _begun(settings: Settings, levels: Levels, folder: Path) -> bool:
    """Whether there is a run to go on with; one with other settings is refused."""
    decides = ("arm", "seed", "tasks", "samples", "pool", "lr", "overlap", "tiny", "mini", "evaluated", "items")
    asked = {name: getattr(settings, name) for name in decides} | {"levels": asdict(levels)}
    if settings.arm in ("sums-toggle", "sums-rigid"):
        asked["iterations"] = settings.iterations  # phases follow from it
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
    ptx: ChatRows | None
    stop: StopRequest
    end: float
    """When the call has to be over."""

    async def run(self, config: RLConfig, *, resume: bool) -> None:
        settings = self.settings
        async with Loop(
            self.model, self.tokenizer, self.arm.trained, config, folder=self.folder, resume=resume, ptx=self.ptx
        ) as loop:  # fmt: skip
            say(f"engine ready, iteration {loop.iteration} of {settings.iterations}")
            looked = await self._look(loop)
            if not resume:
                await loop.save()  # so that what was seen before is there, whatever happens
            kept = min(max(looked, LOOK_SECONDS[0]), LOOK_SECONDS[1])
            last_save = time.monotonic()
            while loop.iteration < settings.iterations and self.stop.signal_number is None:
                longest = max((record["seconds"] for record in _records(self.folder)[-20:]), default=0.0)
                if time.monotonic() + longest + kept + 5 > self.end and loop.iteration:
                    break
                record = await loop.step()
                if loop.iteration in (1, 2, 3, 5) or loop.iteration % 10 == 0 or settings.tiny:
                    say(_line(settings, record))
                if time.monotonic() - last_save > SAVE_SECONDS:
                    await loop.save()
                    last_save = time.monotonic()
            await loop.save()
            say(f"saved at iteration {loop.iteration}")
            if self.stop.signal_number is None:
                await self._look(loop)

    async def _look(self, loop: Loop) -> float:
        """Test tasks and the probe, unless these weights were looked at; the seconds it took."""
        began = time.monotonic()
        if loop.iteration not in {record["iteration"] for record in read_evaluations(self.folder)}:
            told = evaluation_config(self.settings, self.arm)
            found = await evaluate(loop, self.arm.evaluated, told, self.folder)
            for name, numbers in found["environments"].items():
                say(f"evaluated at {loop.iteration}: {name} {evaluation_line(numbers)}")
        probes = _probes(self.folder)
        if str(loop.iteration) not in probes:
            score = spatial_score(loop.learner.model, self.tokenizer, spatial_items(self.settings.items))
            probes[str(loop.iteration)] = score.plain()
            chance = f"{score.chance:.3f} by chance"
            say(f"spatial probe at {loop.iteration}: {score.accuracy:.3f} of {len(score.right)} items, {chance}")
            items = told_items(self.settings.told)
            known = told_pictures.told_score(loop.learner.model, self.tokenizer, items).plain()
            probes[str(loop.iteration)]["told"] = known
            (self.folder / PROBES).write_text(json.dumps(probes) + "\n")
            say(f"pictures told in text: {known['accuracy']:.3f} right, {known['log_prob']:.3f} nats an answer")
        return time.monotonic() - began


def _records(folder: Path) -> list[dict[str, Any]]:
    path = folder / RECORDS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _probes(folder: Path) -> dict[str, Any]:
    path = folder / PROBES
    return json.loads(path.read_text()) if path.exists() else {}


def _equal(settings: Settings, record: Mapping[str, Any]) -> float:
    """The share of groups whose samples all earned the same: nothing is learnt from them."""
    return record["dropped"].get("groups with equal rewards", 0) / settings.tasks


def _line(settings: Settings, record: Mapping[str, Any]) -> str:
    return (
        f"{name_of(settings)} {record['iteration']}/{settings.iterations}  reward {record.get('reward', 0):.3f}  "
        f"length {record.get('length', 0):.0f}  gap {record['gap']:.4f}  clipped {record['clipped']:.3f}  "
        f"equal groups {_equal(settings, record):.0%}  "
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
    steady, known = records[len(records) // 4 :], {name for record in records for name in record}
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
            **{name: [_short(record.get(name)) for record in records] for name in CURVES if name in known},
            "equal_groups": [_short(_equal(settings, record)) for record in records],
        },
        "examples": {
            when: [_kept(each, pictures=each["environment"] in arm.trained) for each in found["samples"]]
            for when, found in (("before", first), ("after", last))
        },
        "engine": {"sequences": config.engine.max_sequences, "memory_gib": config.engine.memory_gib},
        "commit": settings.commit or environment.get("commit", ""),
        "environment": environment,
    }  # fmt: skip


def _numbers(arm: Arm, settings: Settings, evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Of every environment; rewards in the order of the tasks, None for a lost one, so that arms can be paired."""
    told = evaluation_config(settings, arm)
    names = {
        name: [task_of(environment.task(number, "test").name) for number in range(told.count_of(name))]
        for name, environment in arm.evaluated.items()
    }
    numbers = {}
    for name, found in evaluation["environments"].items():
        rewards = [found["rewards"].get(task) for task in names[name.removesuffix(OTHER_PICTURES)]]
        numbers[name] = found | {"rewards": [_short(reward) for reward in rewards]}
    return numbers


def _kept(sample: Mapping[str, Any], *, pictures: bool) -> dict[str, Any]:
    """Pictures of what an arm learns, and no others: they are most of a row."""
    cut = {name: value[:KEPT_TEXT] for name, value in sample.items() if name in ("prompt", "text", "problem")}
    shown = {name: sample[name] for name in ("image", "drawn") if pictures and name in sample}
    return {
        **cut,
        **shown,
        "environment": sample["environment"],
        "task": sample["task"][:80],
        "reward": sample["reward"],
    }


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _mean(records: list[dict[str, Any]], name: str) -> float | None:
    return round(sum(record[name] for record in records) / len(records), 4) if records else None


def tiny(settings: Settings) -> Settings:
    """Seconds on a CPU; models are made where they are missing."""
    from rl_base import Settings as Models

    settings = replace(
        settings, iterations=min(settings.iterations, 2), tasks=min(settings.tasks, 3), pool=min(settings.pool, 8),
        samples=min(settings.samples, 2), evaluated=min(settings.evaluated, 2), items=min(settings.items, 12),
        told=min(settings.told, 10),
        played=min(settings.played, 2), sequences=8, memory_gib=0.25,
    )  # fmt: skip
    assert settings.arm != "report"
    if not is_there(settings.out, f"sft-{settings.start if settings.arm == 'probe' else start_of(settings.arm)}"):
        make_models(Models(step="all", tiny=True, out=settings.out, results=settings.out / "rl_base.json"))
    return settings


def mini(settings: Settings) -> Settings:
    """What fits into one core; rows go beside those of a GPU."""
    results = settings.results
    return replace(
        settings, evaluated=min(settings.evaluated, 256), items=min(settings.items, 60), max_length=1024, sequences=128,
        told=min(settings.told, 10), memory_gib=0.5, row_tokens=8192, start="mini",
        results=results.with_name("rl_mini.json") if results == Settings(arm="report").results else results,
    )  # fmt: skip


def main(settings: Settings) -> None:
    settings = mini(settings) if settings.mini else settings
    for path in settings.merge:
        add_rows(settings.results, read_rows(path), key=KEY)
    if settings.arm == "report":
        from rl_page import write_rl_page
        from rl_report import write_report

        print(write_report(settings.results, settings.results.with_name("rl_throughput.json")))
        if rows := [row for row in read_rows(settings.results) if not row["tiny"]]:
            write_rl_page(rows, settings.results.with_suffix(".html"), settings.png)
        return
    settings = tiny(settings) if settings.tiny else settings
    if settings.arm == "probe":
        probe(settings)
        return
    row = run_arm(settings)
    add_rows(settings.results, [row], key=KEY)
    say(f"row of {row['arm']} in {settings.results}")
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
