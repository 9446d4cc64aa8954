"""What a small model learns to see: pictures as code, and when pictures should enter training. One arm a call.

    python benchmarks/vision.py scenes --seconds 480                      on a GPU: image -> SVG, held-out scenes
    python benchmarks/vision.py icons --icons icons.jsonl.zst             train on Tabler and Feather, test on Lucide
    python benchmarks/vision.py fusion-late --seed 1 --seconds 240        the same rows of both, entering late
    python benchmarks/vision.py html --rescore                            score saved pages where there is a browser
    python benchmarks/vision.py scenes --tiny                             a miniature for a CPU, to see that it works

An arm trains a run of recipes/vision.py for about `--seconds` (steps follow from a short measurement, so that the
schedule ends with the time), draws held-out pictures greedily and writes a row to benchmarks/results/vision.json. A row
has the share of answers that parse, pixel similarity, shape F1 and their sum, the same against other pictures, with 95%
intervals; text bits per byte; for the fusion arms the dip: by how much validation on text is worse after pictures enter
than before. Answers are kept beside it, so that pages can be scored on a machine with Chromium.
"""

import fcntl
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from perilune.data import CorpusConfig, FusionConfig, Tokenizer, VisionRows
from perilune.data.hostile import HostileInput, RendererMissing
from perilune.data.html_guard import clean_html
from perilune.data.media import MediaPrompt
from perilune.data.picture_scores import PictureScore, bootstrap_interval, paired_scores, score_source
from perilune.data.vision_documents import Exercise, ask, pictures
from perilune.model import Decoder
from perilune.recipes.pretrain import micro
from perilune.recipes.vision import fused, fusion_early, text_control, vision_small
from perilune.train import RunConfig, load_run, train
from perilune.train.config_file import from_plain, to_plain
from perilune.train.drawing import answers
from perilune.train.environment import describe_environment
from perilune.train.pictures import draw_held_out
from perilune.train.trainer import pick_device

Arm = Literal["scenes", "icons", "html", "video", "fusion-early", "fusion-mid", "fusion-late", "text-only"]
KINDS = {
    "scenes": ("scene", "svg"),
    "icons": ("icon", "svg"),
    "html": ("html", "html"),
    "video": ("animation", "video"),
}
SCORES = ("pixel", "f1", "reward")
MEASURED_STEPS = 12
DIP_PART = 0.05
"""Of the run, after pictures enter: where the worst validation is looked for."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    arm: tyro.conf.Positional[Arm]
    seconds: float = 480.0
    """For the training; drawing comes on top."""
    steps: int | None = None
    """In place of --seconds."""
    seed: int = 0
    samples: int = 256
    """Held-out pictures."""
    share: float | None = None
    """Of the rows, with pictures; 0.9 for the arms that draw, 0.1 for the fusion arms."""
    corpus: str = "stdlib"
    """Text beside the pictures: a path, stdlib or generated."""
    icons: str = ""
    """The file or folder of icons, for the arm of that name."""
    workers: int = 12
    """Processes that make pictures."""
    decoupled: bool = False
    """Train with the decoupled encoder step."""
    rescore: bool = False
    """Do not train: score the answers that an earlier call kept."""
    tiny: bool = False
    """A miniature on the CPU."""
    commit: str = ""
    results: Path = Path("benchmarks/results/vision.json")


def config_of(settings: Settings) -> RunConfig:
    """The run of an arm, before its number of steps is known."""
    run = _fusion_run(settings) if settings.arm not in KINDS else _drawing_run(settings)
    vision = run.data.vision
    assert vision is not None
    vision = replace(vision, workers=settings.workers, samples=0)
    trainer = replace(
        run.trainer, report=False, tensorboard=False, checkpoint_every=0, decoupled_vision=settings.decoupled
    )
    data = replace(run.data, vision=vision, corpus=replace(run.data.corpus, source=settings.corpus))
    run = replace(run, seed=settings.seed, data=data, trainer=trainer)
    if settings.tiny:
        run = tiny(run)
    if settings.arm == "text-only":
        run = text_control(run)
    elif settings.arm not in KINDS:
        run = fused(run, settings.arm.removeprefix("fusion-"))
    return replace(run, name=f"{settings.arm}-{settings.seed}")


def _drawing_run(settings: Settings) -> RunConfig:
    kind, task = KINDS[settings.arm]
    run = vision_small()
    vision = run.data.vision
    assert vision is not None
    scenes = replace(
        vision.scenes, kinds=(kind,), icons=settings.icons,
        icon_sets=("tabler", "feather") if kind == "icon" else (),
        icon_held_out_sets=("lucide",) if kind == "icon" else (),
    )  # fmt: skip
    share = 0.9 if settings.share is None else settings.share
    vision = replace(vision, scenes=scenes, tasks=(task,), fusion=FusionConfig(share=share))
    return replace(run, data=replace(run.data, vision=vision))


def _fusion_run(settings: Settings) -> RunConfig:
    run = fusion_early()
    vision = run.data.vision
    assert vision is not None
    share = vision.fusion.share if settings.share is None else settings.share
    return replace(run, data=replace(run.data, vision=replace(vision, fusion=FusionConfig(share=share))))


def tiny(run: RunConfig) -> RunConfig:
    """The same code on a CPU within seconds: a model of width 64, small pictures, a generated corpus."""
    small, vision = micro(), run.data.vision
    assert vision is not None and run.model.vision is not None
    tower = replace(run.model.vision, hidden_size=16, num_hidden_layers=1, intermediate_size=32)
    side = 112 if vision.scenes.kinds != ("scene",) else 56  # pages and animations need room
    scenes = replace(vision.scenes, sizes=((side, side),), max_shapes=2, max_frames=4)
    return replace(
        run,
        model=replace(small.model, vocab_size=640, vision=tower),
        data=replace(
            run.data, vocab_size=640, seq_len=256 if side == 56 else 512,
            corpus=CorpusConfig(source="generated", num_documents=60),
            vision=replace(vision, scenes=scenes, workers=0, dialect_texts=200, sample_tokens=64),
        ),
        trainer=replace(
            run.trainer, precision="float32", global_batch_rows=10, micro_batch_rows=10, eval_rows=4, device="cpu",
        ),
    )  # fmt: skip


def steps_for(config: RunConfig, seconds: float) -> int:
    """Optimizer steps that fit, from the last tokens per second of a few."""
    few = replace(config, trainer=replace(config.trainer, steps=MEASURED_STEPS, eval_every=0, log_every=1))
    with tempfile.TemporaryDirectory() as folder:
        summary = train(few, runs_folder=folder, quiet=True)
    rate = summary["tokens_per_s"] or 1.0
    return max(MEASURED_STEPS, int(seconds * rate / (config.trainer.global_batch_rows * config.data.seq_len)))


def run_arm(settings: Settings, runs: Path) -> dict[str, Any]:
    """Train, draw, score: one row of the results."""
    config = config_of(settings)
    steps = settings.steps or steps_for(config, settings.seconds)
    schedule = replace(config.schedule, warmup_steps=min(config.schedule.warmup_steps, max(1, steps // 10)))
    trainer = replace(config.trainer, steps=steps, eval_every=max(1, steps // 50))
    config = replace(config, schedule=schedule, trainer=trainer)
    began = time.monotonic()
    summary = train(config, runs_folder=runs, overwrite=True, quiet=False)
    seconds = time.monotonic() - began
    device = pick_device(config.trainer.device)
    row = {
        "arm": settings.arm,
        "seed": settings.seed,
        "tiny": settings.tiny,
        "steps": steps,
        "seconds": round(seconds, 1),
        "tokens": summary["tokens"],
        "tokens_per_s": summary["tokens_per_s"],
        "parameters": summary["parameters"],
        "text_bits_per_byte": summary["valid_bits_per_byte"],
        "vision_loss": summary.get("valid_vision_loss"),
        **_dip(runs / config.name / "metrics.jsonl", config),
    }
    kept: dict[str, Any] = {"config": to_plain(config), "texts": []}
    if settings.arm != "text-only":
        model, tokenizer, _ = load_run(runs / config.name, device=device)
        found, kept["texts"] = evaluate(model, tokenizer, config, settings)
        row |= found
    _write_json(_answers_path(settings), kept)
    return {**row, **_made(settings, device)}


def _made(settings: Settings, device: torch.device) -> dict[str, Any]:
    environment = describe_environment(device)
    return {"commit": settings.commit or environment.get("commit", ""), "environment": environment}


def _dip(metrics: Path, config: RunConfig) -> dict[str, float]:
    """How much worse text became when pictures entered: the worst validation shortly after over the last before."""
    fusion = config.fusion()
    if fusion is None or fusion.first_row == 0:
        return {}
    entry = fusion.first_row / config.trainer.global_batch_rows
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    valid = [(line["step"], line["bits_per_byte"]) for line in lines if line["kind"] == "valid"]
    before = [value for step, value in valid if step <= entry]
    after = [value for step, value in valid if entry < step <= entry + max(1, DIP_PART * config.trainer.steps)]
    if not before or not after:
        return {}
    return {"before_entry": before[-1], "after_entry": max(after), "dip": max(after) / before[-1] - 1}


def evaluate(
    model: Decoder, tokenizer: Tokenizer, config: RunConfig, settings: Settings
) -> tuple[dict[str, Any], list[str]]:
    """Scores of held-out pictures with their controls, and the answers themselves."""
    vision = config.data.vision
    assert vision is not None
    rows = VisionRows(vision, tokenizer, seq_len=config.data.seq_len, seed=config.seed, held_out=True)
    began = time.monotonic()
    drawn = draw_held_out(
        model, tokenizer, rows, count=settings.samples, max_new_tokens=vision.sample_tokens, task=vision.tasks[0]
    )
    texts, asked = [each.text for each in drawn], [each.exercise for each in drawn]
    row = {"samples": len(drawn), "drawing_seconds": round(time.monotonic() - began, 1), **scored(texts, asked)}
    if vision.tasks[0] == "video":
        mixed = answers(
            model, tokenizer, [frames_mixed(tokenizer, each) for each in asked], max_new_tokens=vision.sample_tokens
        )
        row["mixed_frames"] = _intervals([score_source(text, each.sample) for text, each in zip(mixed, asked)])
    return row, texts


def frames_mixed(tokenizer: Tokenizer, exercise: Exercise) -> MediaPrompt:
    """The question with the frames of the video in another order: the odd ones first, backwards."""
    frames = exercise.sample.frames
    order = [*range(len(frames))[1::2][::-1], *range(len(frames))[::2]]
    sample = replace(exercise.sample, frames=tuple(frames[number] for number in order))
    _, videos = pictures(sample)
    return ask(tokenizer, exercise.prompt, videos=videos)


def scored(texts: Sequence[str], asked: Sequence[Exercise]) -> dict[str, Any]:
    """Means with intervals, own and against other pictures; only what can be parsed where no browser draws pages."""
    samples = [each.sample for each in asked]
    if asked and asked[0].task == "html":
        valid = sum(_is_page(text, each.sample.size) for text, each in zip(texts, asked)) / len(asked)
        try:
            own, others = paired_scores(texts, samples, score=score_source)
        except RendererMissing as missing:
            return {"parses": valid, "unscored": str(missing)}
        return {"parses": valid, "own": _intervals(own), "shuffled": _intervals(others)}
    own, others = paired_scores(texts, samples, score=score_source)
    parses = sum(score.parses for score in own) / len(own)
    return {"parses": parses, "own": _intervals(own), "shuffled": _intervals(others)}


def _is_page(text: str, size: tuple[int, int]) -> bool:
    try:
        clean_html(text, width=size[0], height=size[1])
    except HostileInput:
        return False
    return True


def _intervals(scores: Sequence[PictureScore]) -> dict[str, list[float]]:
    """name -> [mean, low, high]"""
    found = {}
    for name in SCORES:
        interval = bootstrap_interval([float(getattr(score, name)) for score in scores])
        found[name] = [round(value, 4) for value in (interval.mean, interval.low, interval.high)]
    return found


def rescore(settings: Settings) -> dict[str, Any]:
    """The scores of the answers that an earlier call kept."""
    kept = json.loads(_answers_path(settings).read_text())
    config = from_plain(RunConfig, kept["config"])
    vision = config.data.vision
    assert vision is not None
    # Which pictures were asked about depends on the scenes and the seed, not on the tokenizer.
    rows = VisionRows(vision, Tokenizer.train([], 512), seq_len=config.data.seq_len, seed=config.seed, held_out=True)
    asked = rows.examples(len(kept["texts"]), task=vision.tasks[0])
    return scored(kept["texts"], asked)


def _answers_path(settings: Settings) -> Path:
    size = "-tiny" if settings.tiny else ""
    return settings.results.with_name(f"{settings.results.stem}-{settings.arm}-{settings.seed}{size}.json")


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def add_row(path: Path, row: dict[str, Any]) -> None:
    """The row among the others; one of the same arm, seed and size is replaced, or completed by what is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # arms run side by side
        rows = json.loads(path.read_text()) if path.exists() else []
        key = ("arm", "seed", "tiny")
        same = [each for each in rows if all(each[name] == row[name] for name in key)]
        others = [each for each in rows if each not in same]
        if "steps" not in row and same:
            row = {**{name: value for name, value in same[0].items() if name != "unscored"}, **row}
        _write_json(path, sorted([*others, row], key=lambda each: (each["arm"], each["seed"], each["tiny"])))
    finally:
        os.close(folder)


def main(settings: Settings) -> None:
    if settings.arm == "icons" and not settings.icons:
        raise SystemExit("--icons is missing: the file or folder of icons")
    if settings.rescore:
        row = {"arm": settings.arm, "seed": settings.seed, "tiny": settings.tiny, **rescore(settings)}
    else:
        with tempfile.TemporaryDirectory() as runs:
            row = run_arm(settings, Path(runs))
    add_row(settings.results, row)
    print(json.dumps({name: value for name, value in row.items() if name != "environment"}, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
