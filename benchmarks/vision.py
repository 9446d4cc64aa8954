"""What a small model learns to see: pictures as code, and when pictures should enter training. One arm a call.

    python benchmarks/vision.py scenes                                    on a GPU: image -> SVG, held-out scenes
    python benchmarks/vision.py icons --icons icons.jsonl.zst             train on Tabler and Feather, test on Lucide
    python benchmarks/vision.py fusion-late --seed 1 --corpus FOLDER      as many pictures as early, entering late
    python benchmarks/vision.py html --rescore                            score saved pages where there is a browser
    python benchmarks/vision.py scenes --tiny                             a miniature for a CPU, to see that it works

An arm trains a run of recipes/vision.py for its own number of steps (STEPS; a card that does other work too must not
change what is trained), draws held-out pictures greedily and writes a row to benchmarks/results/vision.json. A row has
the share of answers that parse, pixel similarity, shape F1 and the reward made of them (data/picture_scores.py), the
same against other pictures, with 95% intervals; whether they meet the bar (`bar`); of videos the similarity by frame;
text bits per byte; of icons, how many there are and how many were left out for which reason. Answers are kept beside
it, so that pages can be scored on a machine with Chromium.

The fusion arms and the text-only one are a comparison: the same text, the same number of vision rows, equal steps. Text
is validated every fiftieth of the run (`text_curve`); the dip is by how much it is worse after pictures enter than
before. Their pictures are simple (one or two shapes on a grid): a tenth of a short run must be enough to learn to look.
"""

import fcntl
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import tyro

from perilune.data import CorpusConfig, FusionConfig, Tokenizer, VisionRows
from perilune.data.hostile import HostileInput, RendererMissing
from perilune.data.html_guard import clean_html
from perilune.data.media import MediaPrompt
from perilune.data.picture_scores import (
    PictureScore,
    bootstrap_interval,
    paired_scores,
    score_animation,
    score_source,
)
from perilune.data.scenes import icon_pool
from perilune.data.vision_documents import Exercise, ask, pictures
from perilune.model import Decoder
from perilune.recipes.pretrain import micro
from perilune.recipes.vision import fused, fusion_early, text_control, vision_small
from perilune.serve.greedy import greedy_answers
from perilune.train import RunConfig, load_run, train
from perilune.train.config_file import from_plain, to_plain
from perilune.train.environment import describe_environment
from perilune.train.pictures import draw_held_out
from perilune.train.records import VISION_VALID_ROWS
from perilune.train.run_folder import METRICS
from perilune.train.trainer import pick_device

Arm = Literal["scenes", "icons", "html", "video", "fusion-early", "fusion-mid", "fusion-late", "text-only"]
KINDS = {
    "scenes": ("scene", "svg"),
    "icons": ("icon", "svg"),
    "html": ("html", "html"),
    "video": ("animation", "video"),
}
FUSION_STEPS = 880
STEPS: dict[str, int] = {
    "scenes": 660, "icons": 1800, "html": 660, "video": 800,
    "fusion-early": FUSION_STEPS, "fusion-mid": FUSION_STEPS, "fusion-late": FUSION_STEPS, "text-only": FUSION_STEPS,
}  # fmt: skip
"""Of 65,536 tokens for the arms that draw, 40,960 for the others."""
TINY_STEPS = 16
SCORES = ("pixel", "f1", "reward")
"""f1 for pictures alone: the shapes of pages and videos are not read, and their reward is the pixels'."""
LEAST_PARSED, LEAST_DROP = 0.95, 0.2
"""The bar: answers that parse, and how much lower the reward is against other pictures."""
MEASURED_STEPS = 16
VALIDATIONS = 50
VALIDATION_SHARE = 0.05
"""Of the rows of a run, at most, for the arms that draw."""
DIP_PART = 0.1
"""Of the run, after pictures enter: where the worst validation is looked for; at least until the next one. In a
miniature of the late arm text was worst after 10% of the run, and still better than before after 5%."""
DRAWING_SHARE = 0.875
DRAWING_ROWS = 64
"""56 rows with pictures and 8 of text in every step: steps of one shape can be replayed as CUDA graphs."""
ICON_SIDE = 168
"""Seven pixels for each of the 24 units that icons are drawn in: what lies on their grid stays on a grid."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    arm: tyro.conf.Positional[Arm]
    steps: int | None = None
    """Those of the arm when not given; of arms that are compared, give all the same."""
    seconds: float | None = None
    """In place of steps: as many as fit, by a short measurement. Drawing comes on top."""
    seed: int = 0
    samples: int = 256
    """Held-out pictures."""
    share: float | None = None
    """Of the rows, with pictures; 0.875 for the arms that draw, 0.1 for the fusion arms."""
    corpus: str = "stdlib"
    """Text beside the pictures: a path, stdlib or generated."""
    icons: str = ""
    """The file or folder of icons, for the arm of that name."""
    workers: int = 12
    """Processes that make pictures."""
    decoupled: bool = False
    """Train with the decoupled encoder step."""
    cuda_graphs: bool | None = None
    """None: steps are CUDA graphs where they can be."""
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
        run.trainer, report=False, tensorboard=False, checkpoint_every=0, decoupled_vision=settings.decoupled,
        sample_prompts=(), cuda_graphs=settings.cuda_graphs,
    )  # fmt: skip
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
        sizes=((ICON_SIDE, ICON_SIDE),) if kind == "icon" else vision.scenes.sizes,
    )  # fmt: skip
    share = DRAWING_SHARE if settings.share is None else settings.share
    vision = replace(vision, scenes=scenes, tasks=(task,), fusion=FusionConfig(share=share))
    # All rows of a kind at once: a small model waits for launches, not for memory.
    trainer = replace(run.trainer, global_batch_rows=DRAWING_ROWS, micro_batch_rows=DRAWING_ROWS)
    return replace(run, data=replace(run.data, vision=vision), trainer=trainer)


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
            run.trainer, precision="float32", global_batch_rows=10, micro_batch_rows=10, eval_rows=1, device="cpu",
        ),
    )  # fmt: skip


def steps_for(config: RunConfig, seconds: float) -> int:
    """Optimizer steps that fit, from the tokens per second of the last of a few."""
    few = replace(config, trainer=replace(config.trainer, steps=MEASURED_STEPS, eval_every=0, log_every=1))
    with tempfile.TemporaryDirectory() as folder:
        train(few, runs_folder=folder, quiet=True)
        lines = [json.loads(line) for line in (Path(folder) / few.name / METRICS).read_text().splitlines()]
    # The first compile kernels and record graphs; one of the others may have waited for whatever.
    rate = median([line["tokens_per_s"] for line in lines if line["kind"] == "train"][-MEASURED_STEPS // 2 :])
    return max(MEASURED_STEPS, int(seconds * rate / (config.trainer.global_batch_rows * config.data.seq_len)))


def steps_between_validations(config: RunConfig, steps: int) -> int:
    """A fiftieth of the run; where nothing depends on the curve, more if validation would take more than its share."""
    trainer = config.trainer
    if config.name.startswith(("fusion", "text")):
        return max(1, steps // VALIDATIONS)
    rows = trainer.eval_rows + (min(trainer.eval_rows, VISION_VALID_ROWS) if config.data.has_pictures else 0)
    # As if a row cost as much as one that is trained on: it has no backward, but is not replayed as a graph either.
    return max(steps // VALIDATIONS, math.ceil(rows / (VALIDATION_SHARE * trainer.global_batch_rows)))


def run_arm(settings: Settings, runs: Path) -> dict[str, Any]:
    """Train, draw, score: one row of the results."""
    config = config_of(settings)
    say(f"{config.name}: begins on {pick_device(config.trainer.device)}")
    steps = settings.steps or (TINY_STEPS if settings.tiny else STEPS[settings.arm])
    if settings.seconds is not None:
        steps = steps_for(config, settings.seconds)
    schedule = replace(config.schedule, warmup_steps=min(config.schedule.warmup_steps, max(1, steps // 10)))
    trainer = replace(config.trainer, steps=steps, eval_every=steps_between_validations(config, steps))
    config = replace(config, schedule=schedule, trainer=trainer)
    say(f"{config.name}: {steps:,} steps, a validation every {trainer.eval_every}")
    began = time.monotonic()
    summary = train(config, runs_folder=runs, overwrite=True, quiet=False)
    seconds = time.monotonic() - began
    say(f"{config.name}: trained for {seconds:.0f} s, {summary['tokens_per_s'] or 0:,.0f} tokens/s at the end")
    device = pick_device(config.trainer.device)
    row = {
        "arm": settings.arm,
        "seed": settings.seed,
        "tiny": settings.tiny,
        "steps": steps,
        "rows": trainer.global_batch_rows,
        "seconds": round(seconds, 1),
        "tokens": summary["tokens"],
        "tokens_per_s": summary["tokens_per_s"],
        "parameters": summary["parameters"],
        "text_bits_per_byte": summary["valid_bits_per_byte"],
        "vision_loss": summary.get("valid_vision_loss"),
        **_text_curve(runs / config.name / METRICS, config),
        **_icons(config),
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


def _text_curve(metrics: Path, config: RunConfig) -> dict[str, Any]:
    """Of the fusion arms and their control: text by step, and how much worse it became when pictures entered."""
    if not config.name.startswith(("fusion", "text")):
        return {}
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    valid = [(line["step"], line["bits_per_byte"]) for line in lines if line["kind"] == "valid"]
    curve = {"text_curve": [[step, round(value, 5)] for step, value in valid]}
    fusion = config.fusion()
    if fusion is None or fusion.first_row == 0:
        return curve
    entry = fusion.first_row / config.trainer.global_batch_rows
    return {**curve, "entry_step": entry, **dip(valid, entry, config.trainer.steps, config.trainer.eval_every)}


def dip(valid: Sequence[tuple[int, float]], entry: float, steps: int, eval_every: int) -> dict[str, float]:
    """The worst validation shortly after the entry over the last before it; below 0 where text got better all along."""
    before = [value for step, value in valid if step <= entry]
    window = max(eval_every, DIP_PART * steps)
    after = [value for step, value in valid if entry < step <= entry + window]
    if not before or not after:
        return {}
    return {"before_entry": before[-1], "after_entry": max(after), "dip": max(after) / before[-1] - 1}


def _icons(config: RunConfig) -> dict[str, Any]:
    vision = config.data.vision
    if vision is None or "icon" not in vision.scenes.kinds:
        return {}
    pool = icon_pool(vision.scenes)
    return {"icons": {"train": len(pool.train), "held_out": len(pool.held_out), "left_out": dict(pool.skipped)}}


def evaluate(
    model: Decoder, tokenizer: Tokenizer, config: RunConfig, settings: Settings
) -> tuple[dict[str, Any], list[str]]:
    """Scores of held-out pictures with their controls, and the answers themselves."""
    vision = config.data.vision
    assert vision is not None
    rows = VisionRows(vision, tokenizer, seq_len=config.data.seq_len, seed=config.seed, held_out=True)
    began = time.monotonic()
    drawn = draw_held_out(
        model, tokenizer, rows, count=settings.samples, max_new_tokens=vision.sample_tokens, task=vision.tasks[0],
        answer=greedy_answers,
    )  # fmt: skip
    texts, asked = [each.text for each in drawn], [each.exercise for each in drawn]
    say(f"{len(drawn)} held-out pictures drawn")
    row = {"samples": len(drawn), "drawing_seconds": round(time.monotonic() - began, 1), **scored(texts, asked)}
    lengths = [len(tokenizer.encode(each.answer)) + 1 for each in asked]
    row |= {"answer_tokens": [min(lengths), round(median(lengths)), max(lengths)],
            "answers_longer_than_sampled": sum(length > vision.sample_tokens for length in lengths)}  # fmt: skip
    if vision.tasks[0] == "video":
        prompts = [frames_mixed(tokenizer, each) for each in asked]
        mixed = greedy_answers(model, tokenizer, prompts, max_new_tokens=vision.sample_tokens)
        row["mixed_frames"] = _intervals([score_source(text, each.sample) for text, each in zip(mixed, asked)], "video")
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
    is_html = bool(asked) and asked[0].task == "html"
    valid = sum(_is_page(text, each.sample.size) for text, each in zip(texts, asked)) / len(asked) if is_html else None
    try:
        own, others = paired_scores(texts, [each.sample for each in asked], score=score_source)
    except RendererMissing as missing:
        return {"parses": valid, "unscored": str(missing)}
    parses = sum(score.parses for score in own) / len(own) if valid is None else valid
    task = asked[0].task
    found = {"parses": parses, "own": _intervals(own, task), "shuffled": _intervals(others, task)}
    by_frame = {"pixel_by_frame": pixel_by_frame(texts, asked)} if task == "video" else {}
    return {**found, **by_frame, "bar": bar(parses, found["own"]["reward"], found["shuffled"]["reward"])}


def pixel_by_frame(texts: Sequence[str], asked: Sequence[Exercise]) -> list[list[float]]:
    """[videos that have such a frame, their mean similarity there], from the first frame on."""
    scores = [[each.pixel for each in score_animation(text, one.sample)] for text, one in zip(texts, asked)]
    columns = [[each[number] for each in scores if number < len(each)] for number in range(max(map(len, scores)))]
    return [[len(column), round(sum(column) / len(column), 4)] for column in columns]


def bar(parses: float, own: Sequence[float], shuffled: Sequence[float]) -> dict[str, bool]:
    """Whether enough parses, and whether other pictures score enough lower, with intervals that are apart."""
    return {
        "parses": parses >= LEAST_PARSED,
        "lower_against_others": own[0] - shuffled[0] >= LEAST_DROP and own[1] > shuffled[2],
    }


def _is_page(text: str, size: tuple[int, int]) -> bool:
    try:
        clean_html(text, width=size[0], height=size[1])
    except HostileInput:
        return False
    return True


def _intervals(scores: Sequence[PictureScore], task: str) -> dict[str, list[float]]:
    """name -> [mean, low, high]"""
    found = {}
    for name in SCORES if task == "svg" else [name for name in SCORES if name != "f1"]:
        interval = bootstrap_interval([float(getattr(score, name)) for score in scores])
        found[name] = [round(value, 4) for value in (interval.mean, interval.low, interval.high)]
    return found


def rescore(settings: Settings) -> dict[str, Any]:
    """The scores of the answers that an earlier call kept."""
    path = _answers_path(settings)
    if not path.exists():
        raise SystemExit(f"{path} is not there: train the arm first, or copy the answers of another machine to it")
    kept = json.loads(path.read_text())
    config = from_plain(RunConfig, kept["config"])
    vision = config.data.vision
    assert vision is not None
    # Which pictures were asked about depends on the scenes and the seed, not on the tokenizer.
    rows = VisionRows(vision, Tokenizer.train([], 512), seq_len=config.data.seq_len, seed=config.seed, held_out=True)
    asked = rows.examples(len(kept["texts"]), task=vision.tasks[0])
    return scored(kept["texts"], asked)


_BEGAN = time.monotonic()


def say(text: str) -> None:
    """For whoever looks at a run that was cut off: where its time went."""
    print(f"[{time.monotonic() - _BEGAN:7.1f} s] {text}", file=sys.stderr, flush=True)


def _answers_path(settings: Settings) -> Path:
    size = "-tiny" if settings.tiny else ""
    return settings.results.with_name(f"{settings.results.stem}-{settings.arm}-{settings.seed}{size}.json")


def _write_json(path: Path, value: Any) -> None:
    """Complete or as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(partial, path)


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
    say("the row is written")
    print(json.dumps({name: value for name, value in row.items() if name != "environment"}, indent=1))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
