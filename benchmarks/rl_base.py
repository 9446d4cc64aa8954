"""The models that the experiments of benchmarks/rl_experiments.py start from: a base for each attention, and three arms
of fine-tuning. Each step is one call, skipped when its result is there, and gone on with when it was cut off.

    python benchmarks/rl_base.py prepare --corpus .cache/corpus                 texts and dialogues; needs no GPU
    python benchmarks/rl_base.py base --corpus .cache/corpus                    the hybrid 3:1
    python benchmarks/rl_base.py base --pattern mla --corpus .cache/corpus      all MLA, as many steps
    python benchmarks/rl_base.py sft --kind zero_vision                         also text_image, none
    python benchmarks/rl_base.py pack --name base-hybrid --pieces FOLDER        weights as small files
    python benchmarks/rl_base.py unpack --name base-hybrid --pieces FOLDER
    python benchmarks/rl_base.py mini                                           word problems and tools, on one core
    python benchmarks/rl_base.py all --tiny --out FOLDER                        everything, untaught, on a CPU

The base is `vision_small` (30M parameters, a tower of 6 layers): half of its rows are pictures with their SVG,
captions, counts, boxes, places and colours, the others are text of the corpus and generated text (rl_texts.py). So
pictures as code belong to pre-training, as in Kimi K2.5; chat, and in the arm zero_vision what is done to pictures in
it, is learnt from text alone. A second base takes as many steps as the first that is in --out.

Steps are fixed numbers, never what a busy card leaves time for. How often each source is read is printed; no text is
read more than MAX_EPOCHS times, and pictures are new without end.

`mini` is a model of numbers alone, from dialogues alone, that arms of text start from on a CPU (--mini there).

Runs lie in --out as ordinary run folders (`perilune chat OUT/sft-hybrid-zero_vision`). `pack` writes the weights in
bfloat16, losslessly compressed, in files of at most 15 MiB; `unpack` makes a run folder of them. A row for every model
goes to benchmarks/results/rl_base.json.
"""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from rl_rows import add_rows, say
from rl_texts import LESSONS, SCENES, texts, write_dialogues, write_mini

from perilune.data import Corpus, CorpusConfig, FusionConfig, Tokenizer
from perilune.data.chat_rows import ChatDataConfig, ChatRows
from perilune.data.picture_dialogues import KINDS, Kind
from perilune.model import Decoder, RopeConfig
from perilune.recipes.pretrain import micro
from perilune.recipes.sft import sft
from perilune.recipes.vision import vision_small
from perilune.train import RunConfig, checkpoint, load_run, train
from perilune.train.batches import RunData, open_data
from perilune.train.config_file import from_plain, to_plain
from perilune.train.environment import describe_environment
from perilune.train.run_folder import CHECKPOINTS, CONFIG, create, read_config
from perilune.train.trainer import pick_device

Pattern = Literal["hybrid", "mla"]
PATTERNS: tuple[Pattern, ...] = ("hybrid", "mla")
TASKS = (*("svg",) * 4, "caption", "count", "box", "spatial", "colour")
"""What is asked about a picture: its SVG as often as all else together, which is three of four tokens."""
BASE_STEPS = 600
"""Of 64 rows with 1024 tokens: 39M tokens, half of them with pictures."""
MAX_EPOCHS = 4.0
"""More readings of the same text teach it by heart."""
SAVES = 8
"""Of one training: a call that is cut off loses an eighth."""
PIECE_BYTES = 15 << 20
MINI = "sft-mini"
MINI_STEPS = 700
"""Of 4 rows with 1024 tokens."""
MINI_VOCABULARY, MINI_READ = 512, 4000
"""Tokens, and the dialogues that its tokenizer is trained on."""
KEY = ("name", "seed", "tiny")


@dataclass(frozen=True, kw_only=True)
class Settings:
    step: tyro.conf.Positional[Literal["prepare", "base", "sft", "mini", "pack", "unpack", "all"]]
    pattern: Pattern = "hybrid"
    kind: Kind = "zero_vision"
    name: str = ""
    """For pack and unpack: base-PATTERN or sft-PATTERN-KIND."""
    out: Path = Path("runs/rl")
    pieces: Path = Path("pieces")
    steps: int | None = None
    """None: BASE_STEPS for a base, --epochs for fine-tuning."""
    corpus: str = "stdlib"
    """Text of the base: a path, stdlib or generated."""
    megabytes: float = 32.0
    """Of it that are read: 9.4M tokens."""
    texts: int = 64_000
    """Generated documents beside it: 9.5M tokens."""
    share: float = 0.5
    """Of the base's rows, with pictures."""
    dialogues: int = 24_000
    epochs: float = 2.0
    """Of the dialogues."""
    workers: int = 12
    """Processes that make pictures."""
    seed: int = 0
    tiny: bool = False
    """A miniature on the CPU."""
    again: bool = False
    """Also when the result is there."""
    commit: str = ""
    results: Path = Path("benchmarks/results/rl_base.json")


# The base -------------------------------------------------------------------------------------------------------------


def corpus_file(settings: Settings) -> Path:
    """Text of the corpus and generated text in one file, written once: both bases read the same."""
    path = settings.out / f"texts-{settings.megabytes:g}-{settings.texts}-{settings.seed}.jsonl"
    if path.exists():
        return path
    settings.out.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        for number, (name, text) in enumerate(_documents(settings)):
            split = "valid" if number % 50 == 0 else "train"
            file.write(json.dumps({"id": f"{name}-{number}", "split": split, "text": text}) + "\n")
    partial.replace(path)
    return path


def _documents(settings: Settings) -> Iterator[tuple[str, str]]:
    generated = ((f"made-{settings.seed}", text) for text in texts(settings.seed, settings.texts))
    left = settings.megabytes * 1e6
    corpus = Corpus(CorpusConfig(source=settings.corpus, num_documents=60 if settings.tiny else 1000))
    for document in corpus.documents("train"):
        if left <= 0:
            break
        left -= len(document.text)
        yield "corpus", document.text
    yield from generated


def base_config(settings: Settings, corpus: Path) -> RunConfig:
    """The run of a base, before its number of steps is known."""
    run = vision_small()
    vision = run.data.vision
    assert vision is not None
    pattern, rope = None, None  # in a hybrid, KDA says where things are
    if settings.pattern == "mla":
        pattern, rope = ("mla",) * run.model.num_hidden_layers, RopeConfig()
    run = replace(
        run,
        name=f"base-{settings.pattern}",
        seed=settings.seed,
        model=replace(run.model, layer_types=pattern, mla=replace(run.model.mla, rope=rope)),
        data=replace(
            run.data,
            corpus=CorpusConfig(source=str(corpus), split_field="split"),
            cache_dir=str(settings.out / "cache"),
            vision=replace(
                vision, scenes=SCENES, tasks=TASKS, fusion=FusionConfig(share=settings.share),
                workers=settings.workers, samples=0,
            ),
        ),
        trainer=replace(
            run.trainer, report=False, tensorboard=False, eval_every=0, checkpoint_every=0, keep_last=1, log_every=10
        ),
    )  # fmt: skip
    return tiny(run) if settings.tiny else run


def tiny(run: RunConfig) -> RunConfig:
    """The same code on a CPU within seconds."""
    small, vision = micro().model, run.data.vision
    assert vision is not None and run.model.vision is not None
    tower = replace(run.model.vision, hidden_size=16, num_hidden_layers=1, intermediate_size=32)
    pattern = None if run.model.layer_types is None else ("mla",) * small.num_hidden_layers
    mla = replace(small.mla, rope=run.model.mla.rope)
    return replace(
        run,
        model=replace(small, vocab_size=640, vision=tower, layer_types=pattern, mla=mla),
        data=replace(
            run.data, vocab_size=640, seq_len=512, vision=replace(vision, workers=0, dialect_texts=200)
        ),
        trainer=replace(
            run.trainer, precision="float32", global_batch_rows=4, micro_batch_rows=4, eval_rows=2, device="cpu"
        ),
    )  # fmt: skip


def make_base(settings: Settings) -> None:
    began = time.monotonic()
    config = base_config(settings, corpus_file(settings))
    config = with_steps(config, base_steps(settings, config), warmup_share=10)
    data = open_data(config.data, seed=config.seed)
    epochs = text_epochs(config, data)
    prepared = time.monotonic() - began
    say(f"{config.name}: texts are there and will be read {epochs:.2f} times, pictures are new without end")
    checked_epochs(epochs, "texts", "raise --texts or --megabytes, or lower --steps")
    summary, seconds = trained(settings, config, data)
    row = {
        "prepared_seconds": round(prepared, 1),
        "text_epochs": round(epochs, 3),
        "text_bits_per_byte": summary["valid_bits_per_byte"],
        "vision_loss": summary.get("valid_vision_loss"),
    }
    _record(settings, config, summary, seconds, row)


def base_steps(settings: Settings, config: RunConfig) -> int:
    """As told; else those of the training that was begun, or of the other base; else BASE_STEPS."""
    if settings.steps:
        return settings.steps
    others = [f"base-{pattern}" for pattern in PATTERNS if pattern != settings.pattern]
    known = [settings.out / name for name in others if is_there(settings.out, name)]
    if saved_step(settings.out / config.name) and not settings.again:
        known = [settings.out / config.name]
    return read_config(known[0]).trainer.steps if known else BASE_STEPS


def text_epochs(config: RunConfig, data: RunData) -> float:
    """How often a base reads each of its texts."""
    fusion = config.fusion()
    rows = config.trainer.steps * config.trainer.global_batch_rows
    pictures = 0 if fusion is None else fusion.vision_before(rows)
    return (rows - pictures) / data.train.rows_per_epoch


def checked_epochs(epochs: float, name: str, fix: str) -> None:
    if epochs > MAX_EPOCHS:
        raise SystemExit(f"the {name} would be read {epochs:.1f} times, expected at most {MAX_EPOCHS:g}: {fix}")


def with_steps(config: RunConfig, steps: int, *, warmup_share: int) -> RunConfig:
    """Warm-up and saves follow from the number of steps."""
    warmup = min(config.schedule.warmup_steps, max(1, steps // warmup_share))
    trainer = replace(config.trainer, steps=steps, checkpoint_every=max(1, -(-steps // SAVES)), keep_last=1)
    return replace(config, schedule=replace(config.schedule, warmup_steps=warmup), trainer=trainer)


def trained(settings: Settings, config: RunConfig, data: RunData | None = None) -> tuple[dict[str, Any], float]:
    """The summary and the seconds of this call; a training that was begun and cut off is gone on with."""
    folder = settings.out / config.name
    step = 0 if settings.again else saved_step(folder)
    resume = 0 < step < config.trainer.steps and read_config(folder) == config
    say(f"{config.name}: {'goes on at' if resume else 'training, step'} {step if resume else 0}/{config.trainer.steps}")
    began = time.monotonic()
    summary = train(config, runs_folder=settings.out, resume=resume, overwrite=not resume, data=data)
    seconds = time.monotonic() - began
    say(f"{config.name}: trained in {seconds:.1f} s")
    return summary, seconds


# Fine-tuning ----------------------------------------------------------------------------------------------------------


def dialogues_file(settings: Settings, kind: Kind) -> Path:
    """What was prepared from other lessons has another name."""
    path = settings.out / f"dialogues-{LESSONS}-{kind}-{settings.dialogues}-{settings.seed}.jsonl"
    return path if path.exists() else write_dialogues(kind, path, count=settings.dialogues, seed=settings.seed)


def make_arm(settings: Settings) -> None:
    """The base of `pattern` after dialogues of `kind`."""
    source = dialogues_file(settings, settings.kind)
    config = sft(settings.out / f"base-{settings.pattern}", sources=(str(source),))
    rows = max(1, min(16, config.trainer.global_batch_rows))
    trainer = replace(config.trainer, global_batch_rows=rows, micro_batch_rows=rows, eval_every=0, report=False)
    config = replace(config, name=f"sft-{settings.pattern}-{settings.kind}", seed=settings.seed, trainer=trainer)
    data = open_data(config.data, seed=config.seed)
    lessons = data.train
    assert isinstance(lessons, ChatRows)
    steps = settings.steps or max(1, round(settings.epochs * lessons.num_rows / rows))
    config = with_steps(config, steps, warmup_share=4)
    epochs = steps * rows / lessons.num_rows
    say(f"{config.name}: {lessons.num_dialogues:,} dialogues will be read {epochs:.2f} times")
    checked_epochs(epochs, "dialogues", "raise --dialogues, or lower --epochs or --steps")
    summary, seconds = trained(settings, config, data)
    row = {
        "epochs": round(epochs, 3),
        "dialogues": lessons.num_dialogues,
        "with_pictures": lessons.num_with_pictures,
        "left_out": lessons.broken.count,
        "chat_loss": summary.get("valid_loss"),
    }
    _record(settings, config, summary, seconds, row)


def make_mini(settings: Settings) -> None:
    """A small model that has read nothing but dialogues about numbers."""
    source = settings.out / f"dialogues-{LESSONS}-mini-{settings.dialogues}-{settings.seed}.jsonl"
    if not source.exists():
        write_mini(source, count=settings.dialogues, seed=settings.seed)
    tokenizer = settings.out / f"tokenizer-mini-{settings.seed}.json"
    lines = source.read_text(encoding="utf-8").splitlines()[:MINI_READ]
    tokenizer.write_text(Tokenizer.train(map(_all_said, lines), MINI_VOCABULARY).to_json(), encoding="utf-8")
    run = micro()
    config = replace(
        run, name=MINI, seed=settings.seed,
        model=replace(run.model, vocab_size=MINI_VOCABULARY),
        data=replace(
            run.data, vocab_size=MINI_VOCABULARY, tokenizer=str(tokenizer), seq_len=1024,
            chat=ChatDataConfig(sources=(str(source),)), cache_dir=str(settings.out / "cache"),
        ),
        optimizer=replace(run.optimizer, lr=6e-3),
        schedule=replace(run.schedule, warmup_steps=20, decay_fraction=0.6),
        trainer=replace(
            run.trainer, global_batch_rows=4, micro_batch_rows=4, eval_every=0, eval_rows=8, log_every=50, report=False,
            tensorboard=False, device="cpu",
        ),
    )  # fmt: skip
    config = with_steps(config, settings.steps or MINI_STEPS, warmup_share=10)
    data = open_data(config.data, seed=config.seed)
    lessons = data.train
    assert isinstance(lessons, ChatRows)
    epochs = config.trainer.steps * config.trainer.global_batch_rows / lessons.num_rows
    checked_epochs(epochs, "dialogues", "raise --dialogues, or lower --steps")
    summary, seconds = trained(settings, config, data)
    row = {"epochs": round(epochs, 3), "dialogues": lessons.num_dialogues, "chat_loss": summary.get("valid_loss")}
    _record(settings, config, summary, seconds, row)


def _all_said(line: str) -> str:
    messages = json.loads(line)["messages"]
    return "\n".join(f"{message['content']} {json.dumps(message.get('tool_calls', []))}" for message in messages)


def _record(settings: Settings, config: RunConfig, summary: dict[str, Any], seconds: float, more: dict) -> None:
    environment = describe_environment(pick_device(config.trainer.device))
    row = {
        "name": config.name, "seed": settings.seed, "tiny": settings.tiny,
        "steps": config.trainer.steps, "seconds": round(seconds, 1), "tokens": summary["tokens"],
        "tokens_per_s": summary["tokens_per_s"], "parameters": summary["parameters"], **more,
        "commit": settings.commit or environment.get("commit", ""), "environment": environment,
    }  # fmt: skip
    add_rows(settings.results, [row], key=KEY)
    say(json.dumps({name: value for name, value in row.items() if name != "environment"}))


# Weights as small files -----------------------------------------------------------------------------------------------


def pack(folder: Path, pieces: Path) -> list[Path]:
    """The weights of a run in bfloat16: one compressed stream, cut into pieces."""
    import zstandard

    model, tokenizer, config = load_run(folder)
    tensors = {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    head = {
        "config": to_plain(config),
        "tokenizer": tokenizer.to_json(),
        "tensors": [[name, list(tensor.shape)] for name, tensor in tensors.items()],
    }
    text = json.dumps(head).encode()
    numbers = np.concatenate([tensor.flatten().view(torch.int16).numpy() for tensor in tensors.values()])
    planes = numbers.view(np.uint8).reshape(-1, 2).T  # exponents apart from mantissas: only the former compress
    raw = len(text).to_bytes(8, "little") + text + np.ascontiguousarray(planes).tobytes()
    content = zstandard.ZstdCompressor(level=3).compress(raw)
    pieces.mkdir(parents=True, exist_ok=True)
    for old in pieces.glob(f"{folder.name}.[0-9][0-9]"):
        old.unlink()
    written = []
    for number, start in enumerate(range(0, len(content), PIECE_BYTES)):
        path = pieces / f"{folder.name}.{number:02d}"
        path.write_bytes(content[start : start + PIECE_BYTES])
        written.append(path)
    return written


def unpack(pieces: Path, name: str, out: Path) -> Path:
    """A run folder, weights alone, of what `pack` wrote."""
    import zstandard

    found = sorted(pieces.glob(f"{name}.[0-9][0-9]"))
    if not found:
        raise SystemExit(f"--pieces {str(pieces)!r} holds no {name}.00: give the folder that `pack` wrote to")
    content = zstandard.ZstdDecompressor().decompress(b"".join(path.read_bytes() for path in found))
    length = int.from_bytes(content[:8], "little")
    head = json.loads(content[8 : 8 + length])
    planes = np.frombuffer(content[8 + length :], dtype=np.uint8).reshape(2, -1)
    numbers = torch.from_numpy(np.ascontiguousarray(planes.T).view(np.int16)[:, 0]).view(torch.bfloat16)
    config, tokenizer = from_plain(RunConfig, head["config"]), Tokenizer.from_json(head["tokenizer"])
    model, start = Decoder(config.model), 0
    for tensor_name, shape in head["tensors"]:
        size = int(np.prod(shape, dtype=np.int64))
        model.state_dict()[tensor_name].copy_(numbers[start : start + size].view(shape))
        start += size
    return save_policy(out / name, model, tokenizer, config)


def save_policy(folder: Path, model: Decoder, tokenizer: Tokenizer, config: RunConfig) -> Path:
    """A run folder with weights alone."""
    create(folder, config, tokenizer, device=torch.device("cpu"), fresh=True)
    state = {"config": to_plain(config), "tokenizer_fingerprint": tokenizer.fingerprint}
    checkpoint.save(
        folder / CHECKPOINTS, step=config.trainer.steps, tensors=checkpoint.model_tensors(model), state=state,
        keep_last=1,
    )  # fmt: skip
    return folder


def is_there(out: Path, name: str) -> bool:
    """Whether a model is trained to its end."""
    folder = out / name
    return (folder / CONFIG).exists() and saved_step(folder) >= read_config(folder).trainer.steps


def saved_step(folder: Path) -> int:
    """Of the last complete checkpoint of a run; 0 where there is none."""
    root = folder / CHECKPOINTS
    found = checkpoint.find(root) if root.is_dir() else None
    return 0 if found is None else int(found.folder.name.removeprefix(checkpoint.PREFIX))


def main(settings: Settings) -> None:
    if settings.tiny:
        settings = replace(
            settings, texts=min(settings.texts, 120), megabytes=0.1, corpus="generated", workers=0,
            dialogues=min(settings.dialogues, 96), steps=settings.steps or 8,
        )  # fmt: skip
    if settings.step in ("pack", "unpack"):
        if not settings.name:
            raise SystemExit("--name is missing: base-hybrid, base-mla or sft-PATTERN-KIND")
        if settings.step == "unpack":
            print(unpack(settings.pieces, settings.name, settings.out))
            return
        for path in pack(settings.out / settings.name, settings.pieces):
            print(f"{path} {path.stat().st_size / 2**20:.1f} MiB")
        return
    if settings.step == "prepare":
        for path in (corpus_file(settings), *(dialogues_file(settings, kind) for kind in KINDS)):
            say(f"{path} {path.stat().st_size / 1e6:.1f} MB")
        return
    steps = [settings]
    if settings.step == "all":
        bases = [replace(settings, step="base", pattern=pattern) for pattern in PATTERNS]
        arms = [replace(settings, step="sft", kind=kind) for kind in KINDS]
        steps = [*bases, *arms, replace(settings, step="sft", pattern="mla")]
    for step in steps:
        name = {"base": f"base-{step.pattern}", "mini": MINI}.get(step.step, f"sft-{step.pattern}-{step.kind}")
        if step.step == "sft" and not is_there(step.out, f"base-{step.pattern}"):
            raise SystemExit(f"{step.out} holds no base-{step.pattern}: run `rl_base.py base --pattern {step.pattern}`")
        if is_there(step.out, name) and not step.again:
            print(f"{name} is there; --again trains it again")
            continue
        {"base": make_base, "mini": make_mini}.get(step.step, make_arm)(step)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
