"""Train, measure and export `perilune-nano`, the model that is released with the code, on machines that forget.

    python benchmarks/nano_release.py prepare --corpus FILE --licences "..."     dialogues, tokenizer, tokens; no GPU
    python benchmarks/nano_release.py train --corpus FILE --licences "..."       a GPU; again while its status is 75
    python benchmarks/nano_release.py pack --pieces FOLDER                       what was trained, as a few small files
    python benchmarks/nano_release.py export --pieces FOLDER --out models/perilune-nano       anywhere
    python benchmarks/nano_release.py all --tiny                                 everything on a CPU, within a minute

`prepare` writes FOLDER/prepared.tar.zst (23 MiB), for a machine with a GPU; without it `train` makes the same there.
`train` pre-trains, then fine-tunes. A call trains until --seconds are over, saves, and says that it has to be given
again. Steps follow from --pretrain-seconds and --sft-seconds and the median speed of a few. With --pieces it begins
where those end, so that fine-tuning may follow on another machine. `export` writes weights in bfloat16, measures
abilities on test tasks, asks the safety probes and writes the card: what is said there of the training is in the
pieces. `--start RUN` exports another run as the release: one that went on with reinforcement learning. Everything lies
in --folder.
"""

import json
import shutil
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from nano_measure import measure, probe_safety
from nano_pieces import (
    STAGES,
    TEXTS,
    bundle,
    done_stages,
    pack,
    read_stage,
    stage_folder,
    unbundle,
    unpack,
    write_json,
    write_stage,
)
from rl_base import with_steps
from rl_rows import say

from perilune import hub
from perilune.cli_hub import open_model
from perilune.data.chat_rows import ChatDataConfig, ChatRows
from perilune.hub.export import check_writable
from perilune.hub.safety_section import write_section
from perilune.recipes.nano_card import release_card
from perilune.recipes.nano_dialogues import DialogueCounts, write_dialogues, write_texts
from perilune.recipes.nano_release import (
    MOST_BYTES,
    NAME,
    SFT_TOKENS,
    TINY_COUNTS,
    nano_release,
    nano_release_sft,
    stdlib,
    tiny,
)
from perilune.recipes.sft import processor_of
from perilune.train import RunConfig, train
from perilune.train.batches import RunData, open_data
from perilune.train.interrupt import Interrupted
from perilune.train.run_folder import CHECKPOINTS, ENVIRONMENT, METRICS

MEASURED_STEPS = 16
"""The later half of them says how long one takes: the first ones make kernels and graphs."""
SECONDS_TO_BEGIN = 60.0
"""Less of them are no time to begin a stage in."""
AGAIN = 75
"""Exit status of a call that has to be given again: EX_TEMPFAIL."""
LICENCES = {"stdlib": "Python's standard library, PSF licence", "own": "texts of our own dialogues, made by Perilune"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    step: tyro.conf.Positional[Literal["prepare", "train", "pack", "export", "all"]]
    seconds: float = 520.0
    """Of one call of train."""
    pretrain_seconds: float = 420.0
    """In all."""
    sft_seconds: float = 200.0
    """In all; on an H200 that is about fifteen times through the dialogues, by estimate."""
    corpus: tuple[str, ...] = ()
    """Files or folders of text with known licences; none: the standard library alone."""
    licences: tuple[str, ...] = ()
    """What the card says of each of them, in the same order: whose text it is, and its licence."""
    license: str = "apache-2.0"
    """Of the weights, as the Hub spells it, for the card."""
    folder: Path = Path("runs/nano_release")
    pieces: Path | None = None
    """Folder of pieces: pack writes them, export and train begin with them."""
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
    commit: str = ""
    """For the card, where there is no git."""
    tiny: bool = False

    def __post_init__(self) -> None:
        if len(self.licences) != len(self.corpus):
            raise ValueError(
                f"--corpus has {len(self.corpus)} entries and --licences {len(self.licences)}: say for each, in the "
                "same order, whose text it is and its licence, as in --licences 'MDN, CC-BY-SA-2.5'"
            )
        for name in ("seconds", "pretrain_seconds", "sft_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)!r}, expected more than 0")
        if not self.license.strip():
            raise ValueError("--license is empty, expected that of the weights, as in apache-2.0")
        if self.step == "pack" and self.pieces is None:
            raise ValueError("--pieces is missing: the folder that pack writes to")

    @property
    def released(self) -> Path:
        return self.out or self.folder / NAME

    @property
    def described(self) -> list[str]:
        """The text, as the card names it."""
        given = [f"{Path(path).name}: {licence}" for path, licence in zip(self.corpus, self.licences, strict=True)]
        return [*(given or [LICENCES["stdlib"]]), LICENCES["own"]]


class OutOfTime(Exception):
    """The seconds of this call are over; what was trained is saved."""


# Data -----------------------------------------------------------------------------------------------------------------


def make_dialogues(settings: Settings) -> tuple[str, ...]:
    counts = TINY_COUNTS if settings.tiny else DialogueCounts()
    processes = 1 if settings.tiny else settings.processes
    return write_dialogues(settings.folder / "dialogues", counts, seed=settings.seed, processes=processes)


def prepare(settings: Settings, dialogues: tuple[str, ...]) -> tuple[RunConfig, RunData]:
    """The pre-training and its data. Tokens of the dialogues are made too, so that no GPU waits for them later."""
    config = pretrain_config(settings, dialogues)
    data = open_data(config.data, seed=config.seed)
    say("pre-training: tokens are there")
    chat = ChatDataConfig(sources=dialogues, processor=processor_of(config, settings.folder))
    rows = ChatRows(
        chat, data.tokenizer, seq_len=SFT_TOKENS, seed=settings.seed, cache_dir=config.data.cache_dir
    )  # fmt: skip
    say(f"fine-tuning: tokens of {rows.num_dialogues:,} dialogues are there; {rows.broken}")
    return config, data


def pretrain_config(settings: Settings, dialogues: tuple[str, ...]) -> RunConfig:
    own = write_texts(settings.folder / "dialogues", dialogues)
    sources = settings.corpus or ((f"{stdlib()}/json",) if settings.tiny else (stdlib(),))
    run = nano_release((*sources, own))
    return _placed(tiny(run) if settings.tiny else run, settings)


def sft_config(settings: Settings, dialogues: tuple[str, ...]) -> RunConfig:
    run = nano_release_sft(stage_folder(settings.folder, "pretrain"), dialogues)
    return _placed(tiny(run) if settings.tiny else run, settings)


def _placed(run: RunConfig, settings: Settings) -> RunConfig:
    device = "cpu" if settings.tiny else settings.device
    return replace(
        run,
        seed=settings.seed,
        data=replace(run.data, cache_dir=str(settings.folder / "cache")),
        trainer=replace(run.trainer, device=device, report=not settings.tiny, tensorboard=False),
    )


# Training -------------------------------------------------------------------------------------------------------------


def train_stages(settings: Settings, deadline: float) -> None:
    """All stages that are left, or as much of them as fits."""
    if settings.pieces is not None:
        unpack(settings.pieces, settings.folder)
    if len(done_stages(settings.folder)) == len(STAGES):
        return
    write_json(settings.folder / TEXTS, {"texts": settings.described})
    dialogues = make_dialogues(settings)
    say("dialogues are there")
    if not read_stage(stage_folder(settings.folder, "pretrain")).get("done"):
        config, data = prepare(settings, dialogues)
        train_stage(config, data, settings.pretrain_seconds, settings, deadline)
    config = sft_config(settings, dialogues)
    train_stage(config, open_data(config.data, seed=config.seed), settings.sft_seconds, settings, deadline)


def train_stage(config: RunConfig, data: RunData, seconds: float, settings: Settings, deadline: float) -> None:
    """The rest of a stage, or as much as fits before the deadline."""
    folder = settings.folder / config.name
    stage = read_stage(folder)
    left = deadline - time.monotonic()
    if left <= (0 if stage or settings.tiny else SECONDS_TO_BEGIN):
        raise OutOfTime(config.name)
    if not stage:
        steps = config.trainer.steps if settings.tiny else steps_for(config, seconds, data)
        write_stage(folder, steps=steps, seconds=0.0, done=False)
        stage = read_stage(folder)
    config = with_steps(config, stage["steps"], warmup_share=10)
    began = time.monotonic()
    left = deadline - began
    say(f"{config.name}: {stage['steps']} steps, {left:.0f} s left in this call, {stage['seconds']:.0f} s before it")

    def stop_in_time(phase: str) -> None:
        # Within a step, where the trainer hears it, and saves.
        if phase == "step:logged" and time.monotonic() > deadline:
            signal.raise_signal(signal.SIGTERM)

    resume = (folder / CHECKPOINTS / "latest").exists()
    try:
        train(
            config,
            runs_folder=settings.folder,
            resume=resume,
            overwrite=not resume,  # what is there without a checkpoint was cut off before its first
            quiet=settings.tiny,
            data=data,
            on_phase=stop_in_time,
        )
    except Interrupted as stopped:
        write_stage(folder, seconds=round(stage["seconds"] + time.monotonic() - began, 1))
        if stopped.signal_number != signal.SIGTERM:  # a person's Ctrl-C
            raise
        raise OutOfTime(config.name) from None
    if settings.commit:
        facts = json.loads((folder / ENVIRONMENT).read_text(encoding="utf-8"))
        write_json(folder / ENVIRONMENT, facts | {"commit": settings.commit})
    write_stage(folder, seconds=round(stage["seconds"] + time.monotonic() - began, 1), done=True)
    say(f"{config.name}: trained")


def steps_for(config: RunConfig, seconds: float, data: RunData) -> int:
    """Optimizer steps that fit, at the median rate of the later half of a few."""
    say(f"{config.name}: {MEASURED_STEPS} steps to see how long one takes")
    few = replace(
        config, trainer=replace(config.trainer, steps=MEASURED_STEPS, eval_every=0, checkpoint_every=0, log_every=1)
    )
    if few.data.vision is not None:
        few = replace(few, data=replace(few.data, vision=replace(few.data.vision, samples=0)))
    with tempfile.TemporaryDirectory() as folder:
        train(few, runs_folder=folder, quiet=True, data=data)
        lines = (Path(folder) / few.name / METRICS).read_text(encoding="utf-8").splitlines()
    found = [record["tokens_per_s"] for record in map(json.loads, lines) if record["kind"] == "train"]
    rate = statistics.median(found[len(found) // 2 :])
    say(f"{config.name}: {rate:,.0f} tokens/s in steps {len(found) // 2 + 1} to {len(found)}")
    return max(MEASURED_STEPS, int(seconds * rate / (config.trainer.global_batch_rows * config.data.seq_len)))


# Export --------------------------------------------------------------------------------------------------------------


def export(settings: Settings) -> dict[str, Any]:
    if settings.pieces is not None:
        unpack(settings.pieces, settings.folder)
    stages = done_stages(settings.folder)
    source = settings.start or str(stage_folder(settings.folder, "sft"))
    if settings.start is None and len(stages) < len(STAGES):
        done = ", ".join(run.name for run in stages) or "nothing"
        raise SystemExit(f"{str(settings.folder)!r} has {done} that is done, expected all stages: train the rest first")
    opened = open_model(source, runs=str(settings.folder))
    started = next((place for place in (Path(source), settings.folder / source) if place.exists()), Path(source))
    if started.resolve() not in [run.resolve() for run in stages]:
        stages.append(started)
    said = settings.folder / TEXTS
    texts = json.loads(said.read_text(encoding="utf-8"))["texts"] if said.exists() else settings.described
    device = "cpu" if settings.tiny else settings.device
    target = hub.choose(opened.model.config, None)
    making = settings.folder / ".making"
    shutil.rmtree(making, ignore_errors=True)
    made = making / NAME  # under its own name, which is what its reports call it
    making.mkdir(parents=True)
    written = {
        "tokenizer": opened.tokenizer, "processor": opened.processor, "is_chat": True,
        "chat_template": opened.chat_template or hub.builtin_template(),
    }  # fmt: skip
    hub.export_model(opened.model.to(torch.bfloat16), made, target=target, card="# measuring\n", **written)
    size = sum(path.stat().st_size for path in made.glob("*.safetensors"))
    if size > MOST_BYTES:
        raise SystemExit(f"the weights take {size:,} bytes, expected at most {MOST_BYTES:,}: make the model smaller")
    say(f"exported, {size:,} bytes of weights")
    tasks = 2 if settings.tiny else settings.tasks
    results = measure(made, tasks=tasks, device=device, seed=settings.seed, tiny=settings.tiny)
    say("abilities are measured")
    card = release_card(NAME, opened.model, target, stages, results, texts, license=settings.license)
    (made / "README.md").write_text(card, encoding="utf-8")
    safety = probe_safety(made, device=device, tiny=settings.tiny)
    say("safety probes are answered")
    write_section(made, safety)
    released = settings.released
    released.parent.mkdir(parents=True, exist_ok=True)
    if released.exists():
        check_writable(released)
        shutil.rmtree(released)
    shutil.move(made, released)  # perhaps to another disk
    shutil.rmtree(making)
    return {"folder": str(released), "bytes": size, "parameters": opened.model.num_parameters(), "results": results,
            "safety": {name: score["rate"] for name, score in safety["scores"].items()}}  # fmt: skip


def main(settings: Settings) -> None:
    deadline = time.monotonic() + settings.seconds
    settings.folder.mkdir(parents=True, exist_ok=True)
    if unbundle(settings.folder):
        say("prepared data are laid out")
    if settings.step == "prepare":
        prepare(settings, make_dialogues(settings))[1].close()
        path = bundle(settings.folder)
        say(f"{path} {path.stat().st_size / 2**20:.1f} MiB")
    if settings.step in ("train", "all"):
        try:
            train_stages(settings, deadline)
        except OutOfTime as stage:
            say(f"time is up in {stage}, and what was trained is saved: the same command goes on")
            raise SystemExit(AGAIN) from None
        say("all stages are trained")
    if settings.pieces is not None and settings.step == "pack":
        for path in pack(settings.folder, settings.pieces):
            say(f"{path} {path.stat().st_size / 2**20:.1f} MiB")
    if settings.step in ("export", "all"):
        found = export(settings)
        write_json(settings.folder / "release.json", found)
        print(json.dumps(found, indent=1))
    print("done")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
