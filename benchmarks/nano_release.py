"""Train, measure and export `perilune-nano`, the model that is released with the code, in pieces of a few minutes.

    python benchmarks/nano_release.py --seconds 450 --corpus .cache/corpus    on a GPU; give it again until it says done
    python benchmarks/nano_release.py --tiny                                  all stages on a CPU, in less than a minute

Stages: data (dialogues and texts), pretrain, sft, export (weights in bfloat16, abilities on test tasks, safety probes,
card). A call trains for at most --seconds, saves, and says what comes next; the next call goes on there. Steps follow
from --pretrain-seconds and --sft-seconds and the speed of the first few. Everything lies in --folder; the released
folder goes to --out. `--start RUN` exports another run as the release: one that went on with reinforcement learning.
"""

import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro
from rl_rows import say

from perilune import hub
from perilune.cli_hub import open_model
from perilune.cli_serve import served_inside
from perilune.data.picture_scores import bootstrap_interval
from perilune.eval.safety import SafetyConfig, load_probes, run_probes, write_reports
from perilune.hub.export import check_writable
from perilune.hub.safety_section import write_section
from perilune.recipes.nano_card import release_card
from perilune.recipes.nano_dialogues import SCENES, DialogueCounts, write_dialogues, write_texts
from perilune.recipes.nano_release import MOST_BYTES, NAME, TINY_COUNTS, nano_release, nano_release_sft, stdlib, tiny
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
from perilune.train import RunConfig, train
from perilune.train.batches import RunData, open_data
from perilune.train.interrupt import Interrupted
from perilune.train.trainer import pick_device

MEASURED_STEPS = 20
LICENCES = {"stdlib": "Python's standard library, PSF licence", "own": "texts of our own dialogues, made by Perilune"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    seconds: float = 450.0
    """Of training in one call."""
    pretrain_seconds: float = 1200.0
    """In all."""
    sft_seconds: float = 400.0
    """In all; on an H200 that is about twenty times through the dialogues, by estimate."""
    corpus: tuple[str, ...] = ()
    """Files or folders of text with known licences; none: the standard library alone."""
    licences: tuple[str, ...] = ()
    """What the card says of each of them."""
    folder: Path = Path("runs/nano_release")
    out: Path | None = None
    """The released folder; default: FOLDER/perilune-nano. The repository's is models/perilune-nano."""
    start: str | None = None
    """Export this run or folder in place of the fine-tuned one."""
    tasks: int = 64
    """Test tasks of each ability."""
    processes: int = 8
    """That write dialogues."""
    device: str = "auto"
    seed: int = 0
    tiny: bool = False

    def __post_init__(self) -> None:
        if len(self.licences) not in (0, len(self.corpus)):
            raise ValueError(f"--licences has {len(self.licences)} entries, expected one for each --corpus")
        for name in ("seconds", "pretrain_seconds", "sft_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)!r}, expected more than 0")

    @property
    def released(self) -> Path:
        return self.out or self.folder / NAME

    @property
    def described(self) -> list[str]:
        """The text, as the card names it."""
        given = [self.licences[at] if self.licences else Path(path).name for at, path in enumerate(self.corpus)]
        return [*(given or [LICENCES["stdlib"]]), LICENCES["own"]]


class OutOfTime(Exception):
    """The seconds of this call are over; what was trained is saved."""


# Stages --------------------------------------------------------------------------------------------------------------


def make_data(settings: Settings) -> tuple[str, ...]:
    counts = TINY_COUNTS if settings.tiny else DialogueCounts()
    place = settings.folder / "dialogues"
    processes = 1 if settings.tiny else settings.processes
    return write_dialogues(place, counts, seed=settings.seed, processes=processes)


def pretrain_config(settings: Settings, dialogues: tuple[str, ...]) -> RunConfig:
    own = write_texts(settings.folder / "dialogues", dialogues)
    sources = settings.corpus or ((f"{stdlib()}/json",) if settings.tiny else (stdlib(),))
    run = nano_release((*sources, own))
    return _placed(tiny(run) if settings.tiny else run, settings)


def sft_config(settings: Settings, dialogues: tuple[str, ...]) -> RunConfig:
    run = nano_release_sft(settings.folder / f"{NAME}-pretrain", dialogues)
    return _placed(tiny(run) if settings.tiny else run, settings)


def _placed(run: RunConfig, settings: Settings) -> RunConfig:
    device = "cpu" if settings.tiny else settings.device
    return replace(
        run,
        seed=settings.seed,
        data=replace(run.data, cache_dir=str(settings.folder / "cache")),
        trainer=replace(run.trainer, device=device, report=not settings.tiny, tensorboard=False),
    )


def steps_for(config: RunConfig, seconds: float, data: RunData | None) -> int:
    """Optimizer steps that fit, from the last tokens per second of a few."""
    few = replace(config, trainer=replace(config.trainer, steps=MEASURED_STEPS, eval_every=0, log_every=1))
    if few.data.vision is not None:
        few = replace(few, data=replace(few.data, vision=replace(few.data.vision, samples=0)))
    with tempfile.TemporaryDirectory() as folder:
        rate = train(few, runs_folder=folder, quiet=True, data=data)["tokens_per_s"] or 1.0
    return max(MEASURED_STEPS, int(seconds * rate / (config.trainer.global_batch_rows * config.data.seq_len)))


def train_stage(config: RunConfig, seconds: float, settings: Settings, deadline: float) -> None:
    """The rest of a stage, or as much as fits before the deadline."""
    folder = settings.folder / config.name
    plan = settings.folder / f"{config.name}.json"
    if (folder / "done").exists():
        return
    # Dialogues take a minute to read: once is enough.
    data = open_data(config.data, seed=config.seed) if config.data.chat is not None else None
    say(f"{config.name}: data are there")
    if not plan.exists():
        steps = config.trainer.steps if settings.tiny else steps_for(config, seconds, data)
        plan.write_text(json.dumps({"steps": steps}) + "\n")
    config = replace(config, trainer=replace(config.trainer, steps=json.loads(plan.read_text())["steps"]))
    left = deadline - time.monotonic()
    if left <= 0:
        raise OutOfTime(config.name)
    say(f"{config.name}: {config.trainer.steps} steps, {left:.0f} s left in this call")

    def stop_in_time(phase: str) -> None:
        # Within a step, where the trainer hears it, and saves.
        if phase == "step:logged" and time.monotonic() > deadline:
            signal.raise_signal(signal.SIGTERM)

    try:
        train(
            config,
            runs_folder=settings.folder,
            resume=(folder / "checkpoints" / "latest").exists(),
            quiet=settings.tiny,
            data=data,
            on_phase=stop_in_time,
        )
    except Interrupted as stopped:
        if stopped.signal_number != signal.SIGTERM:  # a person's Ctrl-C
            raise
        raise OutOfTime(config.name) from None
    (folder / "done").touch()
    say(f"{config.name}: trained")


# Abilities -----------------------------------------------------------------------------------------------------------


def environments(settings: Settings) -> dict[str, Environment]:
    pages = TINY_COUNTS.library_pages if settings.tiny else DialogueCounts().library_pages
    library = LibraryConfig(pages=pages)
    return {
        "drawing": Drawing(scenes=SCENES, max_tokens=384),
        "calculator": Calculator(),
        "wide search, alone": WideSearch(corpus=library, main_tools=SERIAL_TOOLS),
        "wide search, swarm": WideSearch(corpus=library),
    }


def measure(folder: Path, settings: Settings) -> dict[str, Any]:
    """Mean rewards of the exported model on test tasks, greedy."""
    device = torch.device("cpu") if settings.tiny else pick_device(settings.device)
    opened = hub.open_folder(folder, device=device)
    tokens = 16 if settings.tiny else 2048
    talk = TalkConfig(max_tokens=tokens, max_turns=24, temperature=0.0, processor=opened.processor)
    config = RolloutConfig(group_size=1, talk=talk, workers=talk, episode_seconds=300.0)
    asked = environments(settings)

    async def play() -> dict[str, Any]:
        engine = AsyncEngine(Engine(opened.model, opened.tokenizer, EngineConfig(max_sequences=64), device=device))
        try:
            workers = Workers(engine=engine, tokenizer=opened.tokenizer, config=talk)
            rollouts = Rollouts(engine, opened.tokenizer, asked, config, workers=workers)
            jobs = [
                Job(environment=name, task=each.task(number, "test"), sample=0, seed=settings.seed, iteration=-1)
                for name, each in asked.items()
                for number in range(2 if settings.tiny else settings.tasks)
            ]
            collected = await rollouts.collect(jobs, iteration=0)
        finally:
            await engine.close(drain_seconds=1.0)
        found: dict[str, Any] = {}
        for name in asked:
            rewards = [each.reward for each in collected.trajectories if each.environment == name]
            if rewards:
                interval = bootstrap_interval(rewards)
                found[name] = {"count": len(rewards), "reward": vars_of(interval)}
        print(f"episodes lost: {dict(collected.failures)}" if collected.failures else "no episode was lost")
        return found

    return asyncio.run(play())


def vars_of(interval: Any) -> dict[str, float]:
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def probe_safety(folder: Path, settings: Settings) -> Mapping[str, Any]:
    probes = load_probes()
    probes = probes[::17] if settings.tiny else probes
    config = SafetyConfig(max_tokens=8, turns=1) if settings.tiny else SafetyConfig(max_tokens=256)

    async def ask(url: str, key: str) -> Any:
        async with HTTPClient(base_url=f"{url}/v1", api_key_env=None, api_key=Secret(key)) as client:
            return await run_probes(client, folder.name, probes, config)

    device = "cpu" if settings.tiny else settings.device
    with served_inside(str(folder), runs=str(settings.folder), device=device, sequences=8) as (url, key):
        outcome = asyncio.run(ask(url, key))
    write_reports(outcome, folder)
    return outcome.plain()


# Export --------------------------------------------------------------------------------------------------------------


def export(settings: Settings) -> dict[str, Any]:
    source = settings.start or str(settings.folder / f"{NAME}-sft")
    opened = open_model(source, runs=str(settings.folder))
    target = hub.choose(opened.model.config, None)
    stages = [settings.folder / f"{NAME}-{stage}" for stage in ("pretrain", "sft")]
    if settings.start is not None:
        stages.append(Path(source))
    made = settings.folder / f".{NAME}"
    shutil.rmtree(made, ignore_errors=True)
    written = {
        "tokenizer": opened.tokenizer, "processor": opened.processor, "is_chat": True,
        "chat_template": opened.chat_template or hub.builtin_template(),
    }  # fmt: skip
    hub.export_model(opened.model.to(torch.bfloat16), made, target=target, card="# measuring\n", **written)
    size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
    if size > MOST_BYTES:
        raise ValueError(f"the weights take {size:,} bytes, expected at most {MOST_BYTES:,}: make the model smaller")
    say(f"exported, {size:,} bytes of weights")
    results = measure(made, settings)
    say("abilities are measured")
    card = release_card(
        NAME, opened.model, target, [each for each in stages if each.exists()], results, settings.described
    )
    (made / "README.md").write_text(card, encoding="utf-8")
    safety = probe_safety(made, settings)
    say("safety probes are answered")
    write_section(made, safety)
    released = settings.released
    released.parent.mkdir(parents=True, exist_ok=True)
    if released.exists():
        check_writable(released)
        shutil.rmtree(released)
    os.replace(made, released)
    return {"folder": str(released), "bytes": size, "parameters": opened.model.num_parameters(), "results": results,
            "safety": {name: score["rate"] for name, score in safety["scores"].items()}}  # fmt: skip


def main(settings: Settings) -> None:
    deadline = time.monotonic() + settings.seconds
    settings.folder.mkdir(parents=True, exist_ok=True)
    try:
        dialogues = make_data(settings)
        say("dialogues are there")
        train_stage(pretrain_config(settings, dialogues), settings.pretrain_seconds, settings, deadline)
        train_stage(sft_config(settings, dialogues), settings.sft_seconds, settings, deadline)
        if time.monotonic() > deadline and not settings.tiny:
            raise OutOfTime("export")
    except OutOfTime as stage:
        say(f"time is up in {stage}; give the same command again to go on")
        return
    found = export(settings)
    (settings.folder / "release.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    print("done")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
