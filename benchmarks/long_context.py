"""What a long context is worth to each kind of attention: trained at 4K, extended to 32K, read to 64K, asked to 128K.

    python benchmarks/long_context.py hybrid --corpus .cache/corpus         on a GPU; one arm a call
    python benchmarks/long_context.py hybrid --tiny                         a miniature for a CPU

Arms: hybrid (KDA to MLA 3:1), mla (no positions), mla_rope (rotary positions, extended by YaRN), kda. All are the rung
of width 256 of the ladder, on the same rows in the same order, for equal steps. An arm is trained, extended by
recipes/extend.py, and writes two rows to benchmarks/results/long_context.json, of before and after the extension: loss
by position, and how often the value of a key is found in a long text, with one key and with several; before the
extension only in texts up to the length that it is extended to. A length that does not fit into memory is written down
as such.

Records of the corpus need the fields `split` and `domain`: neighbours of one domain are joined into long documents.
"""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from perilune.data import CorpusConfig
from perilune.eval.held_out import held_out
from perilune.eval.needle import needle_accuracy
from perilune.eval.positions import loss_by_position
from perilune.ladder.dial import run_at
from perilune.model import RopeConfig
from perilune.recipes.extend import CHARACTERS_PER_TOKEN, extend
from perilune.recipes.ladders import ALL_KDA, ALL_MLA, THREE_TO_ONE
from perilune.recipes.pretrain import micro
from perilune.train import RunConfig, ScheduleConfig, load_run, train
from perilune.train.config_file import to_plain
from perilune.train.environment import describe_environment
from perilune.train.trainer import pick_device

Arm = Literal["hybrid", "mla", "mla_rope", "kda"]
PATTERNS = {"hybrid": THREE_TO_ONE, "mla": ALL_MLA, "mla_rope": ALL_MLA, "kda": ALL_KDA}
WIDTH = 256
STEPS = 2400
VALIDATIONS = 4
MOST_TOKENS = 2**21
"""Of texts of one length with needles: attention over 128K tokens takes its time."""
MEASURED_STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Settings:
    arm: tyro.conf.Positional[Arm]
    steps: int | None = None
    """At the shorter length; 2,400 when not given."""
    seconds: float | None = None
    """In place of steps: as many as fit, by a short measurement. Arms differ in speed, so they are not compared."""
    extra_steps: int | None = None
    """Of the extension; a tenth when not given."""
    length: int = 4096
    extended: int = 32_768
    read: int = 65_536
    """Longest rows for loss by position."""
    asked: tuple[int, ...] = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
    """Lengths of texts with needles."""
    needles: tuple[int, ...] = (1, 8)
    texts: int = 32
    """With needles, of each length; of the longest fewer, see MOST_TOKENS."""
    corpus: str = ".cache/corpus"
    seed: int = 0
    lr: float | None = None
    """Of the dial when not given."""
    tiny: bool = False
    commit: str = ""
    results: Path = Path("benchmarks/results/long_context.json")


def config_of(settings: Settings) -> RunConfig:
    """The run at the shorter length, before its number of steps is known."""
    run = run_at(WIDTH, source=settings.corpus)
    characters = CHARACTERS_PER_TOKEN * settings.length
    corpus = CorpusConfig(
        source=settings.corpus, split_field="split", max_characters=characters, join_characters=characters
    )
    rows = max(1, run.trainer.global_batch_rows * run.data.seq_len // settings.length)
    model = replace(run.model, layer_types=PATTERNS[settings.arm])
    if settings.arm == "mla_rope":
        model = replace(model, mla=replace(model.mla, rope=RopeConfig()))
    run = replace(
        run,
        name=f"{settings.arm}-{settings.seed}",
        seed=settings.seed,
        model=model,
        data=replace(run.data, seq_len=settings.length, corpus=corpus),
        optimizer=replace(run.optimizer, lr=settings.lr or run.optimizer.lr),
        trainer=replace(
            run.trainer, global_batch_rows=rows, micro_batch_rows=rows, eval_rows=max(1, 2**20 // settings.length),
            report=False, tensorboard=False,
        ),
    )  # fmt: skip
    return tiny(run) if settings.tiny else run


def tiny(run: RunConfig) -> RunConfig:
    small = micro()
    heads = replace(small.model.mla, rope=run.model.mla.rope)
    pattern = run.model.layer_types
    assert pattern is not None
    return replace(
        run,
        model=replace(small.model, residual="plain", mla=heads, layer_types=pattern[-small.model.num_hidden_layers :]),
        data=replace(run.data, vocab_size=small.model.vocab_size),
        trainer=replace(
            run.trainer, precision="float32", device="cpu", global_batch_rows=4, micro_batch_rows=4, eval_rows=2
        ),
    )  # fmt: skip


def steps_for(config: RunConfig, seconds: float) -> int:
    """Optimizer steps that fit, from the last tokens per second of a few."""
    few = replace(config, trainer=replace(config.trainer, steps=MEASURED_STEPS, eval_every=0, log_every=1))
    with tempfile.TemporaryDirectory() as folder:
        rate = train(few, runs_folder=folder, quiet=True)["tokens_per_s"] or 1.0
    return max(MEASURED_STEPS, int(seconds * rate / (config.trainer.global_batch_rows * config.data.seq_len)))


def run_arm(settings: Settings, runs: Path) -> Iterator[dict[str, Any]]:
    """Train, look, extend, look again: two rows of the results, each as soon as it is there."""
    config = config_of(settings)
    steps = settings.steps or STEPS
    if settings.seconds is not None:
        steps = steps_for(config, settings.seconds)
    schedule = ScheduleConfig(kind="wsd", warmup_steps=max(1, steps // 10), decay_fraction=0.2)
    short = replace(
        config, schedule=schedule, trainer=replace(config.trainer, steps=steps, eval_every=max(1, steps // VALIDATIONS))
    )
    asked = tuple(length for length in settings.asked if length <= settings.extended)
    yield _trained_and_read(short, replace(settings, asked=asked), runs, None)
    folder = runs / short.name
    long = extend(short, folder, length=settings.extended, steps=settings.extra_steps)
    long = replace(long, trainer=replace(long.trainer, eval_rows=max(1, short.trainer.eval_rows // 8)))
    yield _trained_and_read(long, settings, runs, settings.extended)


def _trained_and_read(config: RunConfig, settings: Settings, runs: Path, extended: int | None) -> dict[str, Any]:
    began = time.monotonic()
    summary = train(config, runs_folder=runs, overwrite=True)
    device = pick_device(config.trainer.device)
    environment = describe_environment(device)
    return {
        "arm": settings.arm,
        "seed": settings.seed,
        "tiny": settings.tiny,
        "extended": extended,
        "steps": config.trainer.steps,
        "lr": config.optimizer.lr,
        "seconds": round(time.monotonic() - began, 1),
        "tokens": summary["tokens"],
        "tokens_per_s": summary["tokens_per_s"],
        "parameters": summary["parameters"],
        "valid_bits_per_byte": summary["valid_bits_per_byte"],
        **read(runs / config.name, settings, device),
        "commit": settings.commit or environment.get("commit", ""),
        "environment": environment,
        "config": without_folder(to_plain(config), runs),
    }


def without_folder(plain: dict[str, Any], runs: Path) -> dict[str, Any]:
    """The config as if it had been run in `runs/`: the folder of a measurement is gone when it is read."""
    return json.loads(json.dumps(plain).replace(json.dumps(str(runs))[1:-1], "runs"))


def read(folder: Path, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Loss by position and needles found, of the run in `folder`."""
    model, tokenizer, run = load_run(folder, device=device)
    longest = max(settings.read, *settings.asked, 0)
    # The same held-out text for both rows of an arm, whatever length it was trained at.
    characters = CHARACTERS_PER_TOKEN * settings.length
    text = held_out(replace(run.data.corpus, max_characters=characters, join_characters=characters), tokenizer)
    found: dict[str, Any] = {"held_out_tokens": len(text.text), "longest": longest, "positions": None, "needles": []}
    rows = max(1, 2**20 // settings.read)
    try:
        found["positions"] = loss_by_position(model, text, length=settings.read, rows=rows, device=device)
    except torch.cuda.OutOfMemoryError:
        found["positions"] = "does not fit into memory"
    for needles in settings.needles:
        for length in settings.asked:
            try:
                found["needles"].append(
                    needle_accuracy(
                        model,
                        tokenizer,
                        text,
                        length=length,
                        needles=needles,
                        rows=min(settings.texts, max(1, MOST_TOKENS // length)),
                        device=device,
                        seed=settings.seed,
                    )
                )
            except torch.cuda.OutOfMemoryError:
                found["needles"].append({"length": length, "needles": needles, "error": "does not fit into memory"})
    return found


def add_rows(path: Path, new: list[dict[str, Any]]) -> None:
    """Rows among the others; those of the same arm, seed and length are replaced."""

    def key(row: dict[str, Any]) -> tuple[str, int, bool, int]:
        return row["arm"], row["seed"], row["tiny"], row["extended"] or 0

    fresh = {key(row) for row in new}
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # arms run side by side
        rows = json.loads(path.read_text()) if path.exists() else []
        kept = sorted([*(row for row in rows if key(row) not in fresh), *new], key=key)
        path.write_text(json.dumps(kept, indent=1) + "\n")
    finally:
        os.close(folder)


def main(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as runs:
        for row in run_arm(settings, Path(runs)):
            add_rows(settings.results, [row])
            show(row)


def show(row: dict[str, Any]) -> None:
    print(f"{row['arm']}, {'extended to ' + str(row['extended']) if row['extended'] else 'as trained'}")
    for bucket in row["positions"] or ():
        if isinstance(bucket, dict):
            print(f"  tokens {bucket['from']:>6} to {bucket['to']:>6}: {bucket['nats']:.3f} nats")
    for needle in row["needles"]:
        found = needle.get("error") or f"{needle['exact']:.1%} found among all tokens"
        if needle["needles"] > 1 and "ranked" in needle:  # a lone value always ranks first
            found += f", {needle['ranked']:.1%} among the values in the text (chance {needle['chance']:.1%})"
        print(f"  {needle['needles']} in {needle['length']:>6}: {found}")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
