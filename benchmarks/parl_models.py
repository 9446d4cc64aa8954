"""The models that benchmarks/parl.py starts from: a base, pre-trained here, and what it becomes after traces.

    python benchmarks/parl_models.py prepare --out DIR                      texts, traces and their tokens: no GPU
    python benchmarks/parl_models.py base --out DIR                         pages of other libraries, and --corpus
    python benchmarks/parl_models.py base --recipe plain --out DIR          AdamW, MLA with RoPE, plain residuals
    python benchmarks/parl_models.py sft --out DIR                          9 in 10 serial, few good delegations
    python benchmarks/parl_models.py sft --recipe nano --out DIR            the same from models/perilune-nano
    python benchmarks/parl_models.py sft --mix well-formed --out DIR        the control: all delegations are good
    python benchmarks/parl_models.py sft --mix all-at-once --out DIR        good ones hand out everything at once
    python benchmarks/parl_models.py worker --out DIR                       single lookups: 90% in 8 steps?
    python benchmarks/parl_models.py all --out DIR                          base, sft and worker
    python benchmarks/parl_models.py all --out DIR --pieces FOLDER          the same; a model that is whole is packed,
                                                                            one that lies there packed is not trained
    python benchmarks/parl_models.py pack --name sft-full-mostly-serial-0 --pieces FOLDER --out DIR    small files
    python benchmarks/parl_models.py unpack --name sft-full-mostly-serial-0 --pieces FOLDER --out DIR
    python benchmarks/parl_models.py all --tiny --out DIR                   everything, on a CPU

One model is orchestrator and worker. What it is taught has the form of the library's pages and none of its facts: pages
and tasks of libraries with other seeds (parl_texts.py, parl_traces.py), so that nothing can be answered without
looking. How long a model is trained is a number of steps: what it has learnt does not depend on how busy a machine was.
Packed weights are rounded to bfloat16, with which engines and forward passes compute anyway.
--seconds and --as-long are for models that are compared after equal time. A step whose result is there is skipped.
Training that is not over after --limit seconds of a call is saved, and the call ends with exit code 75: the same
command goes on. Rows go to benchmarks/results/parl.json.
"""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import parl_texts
import parl_traces
import torch
import tyro
from parl_time import as_long, keep_seconds, seconds_before, steps_as_long, steps_for
from parl_traces import Mix, environment_of
from rl_base import is_there, pack, saved_step, unpack, with_steps
from rl_rows import add_rows, read_rows, say

from perilune.data import Corpus, CorpusConfig, Tokenizer
from perilune.data.chat_rows import ChatDataConfig, ChatRows
from perilune.hub.opened import open_tokenizer
from perilune.model import KDAConfig, MLAConfig, ModelConfig, RopeConfig
from perilune.recipes.pretrain import micro, small
from perilune.recipes.sft import sft
from perilune.released import named_in_vain, released_model
from perilune.rl.environments.wide_search_lookups import ENOUGH, look_up, lookups
from perilune.rl.talk import TalkConfig
from perilune.rl.workers import frozen_workers
from perilune.serve.engine import EngineConfig
from perilune.train import DataConfig, OptimizerConfig, RunConfig, load_run, train
from perilune.train.batches import RunData, open_data
from perilune.train.environment import describe_environment
from perilune.train.interrupt import Interrupted
from perilune.train.run_folder import read_config
from perilune.train.trainer import pick_device

Recipe = Literal["full", "plain", "nano"]
"""nano: the released model is the base, and a CPU is enough."""
KEY = ("row", "name", "seed", "cap", "tiny")
VOCAB, TINY_VOCAB = 8192, 640
PAGES_FOR_WORDS = 8000
"""Documents of pages, of some seventy thousand, that the tokenizer learns from."""
BASE_STEPS = 1000
"""131M tokens, six for every parameter: three to four times what seven libraries and the corpus hold."""
SFT_STEPS = 2400
"""Seven times through the dialogues without those that are told: a worker that is right in 255 of 256 lookups."""
NANO_STEPS = 200
"""The released model knows both roles, and delegates nine wide questions in ten: it is to learn to work alone."""
NANO_LR = 8e-4
"""Two thirds of what it was fine-tuned with."""
WORKER_GIB = 1.5
"""For 64 sequences of 4,096 tokens 0.4 GiB are needed."""
WRONG_SHOWN = 12
TRACES_GIVEN = ("mix", "orchestrators", "workers", "told", "seed")
AGAIN = 75
"""Exit code of a call that has to be given again: EX_TEMPFAIL."""
CALLED = time.monotonic()
ROW_TOKENS = 16_384
"""Of fine-tuning. Dialogues within the cap have some 2,000 tokens, those that go on to the last of 16 items of two hops
up to 8,700, and none is to be left out."""
SFT_TOKENS = 65_536
"""In a step."""
NANO_ROW_TOKENS, NANO_TOKENS = 4096, 8192
"""The same of the released model: the longest rows that it knows."""
ROWS = "rows.json"
"""In --out: the rows of this machine, for calls whose --results lies in a folder that is empty each time."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    step: tyro.conf.Positional[Literal["prepare", "base", "sft", "worker", "pack", "unpack", "all"]]
    recipe: Recipe = "full"
    mix: Mix = "mostly-serial"
    name: str = ""
    """For pack and unpack: a model in --out."""
    pieces: Path | None = None
    """Where packed models lie. With base, sft and all: one that lies there is unpacked in place of being trained, and
    one that is whole is packed there, also where the call ends before the next one is."""
    out: Path = Path("runs/parl")
    base_steps: int = BASE_STEPS
    sft_steps: int | None = None
    """None: as many as the recipe has."""
    seconds: float | None = None
    """For each training, in place of a number of steps: as many as fit at the rate of its first ones. Preparing text
    comes on top."""
    as_long: bool = False
    """With --recipe plain: for as long as the same model of the full recipe, whose steps the rows know, would take at
    the speeds of both, measured turn about before training: on a card with nothing else to do, or always as much."""
    limit: float = 540.0
    """Seconds of a call after which training stops, saved."""
    libraries: int = 7
    """Of 20,000 pages each: 5M tokens."""
    corpus: str = "stdlib"
    """Text beside the pages: a path, stdlib or generated."""
    megabytes: float = 20.0
    """Of it that are read."""
    orchestrators: int = 9000
    workers: int = 15_000
    """Dialogues of each role."""
    told: int = 1500
    """Dialogues whose prompt says to hand out everything at once (parl_traces.py)."""
    lookups: int = 256
    seed: int = 0
    tiny: bool = False
    """A miniature on the CPU."""
    again: bool = False
    """Also when the result is there."""
    commit: str = ""
    results: Path = Path("benchmarks/results/parl.json")


def base_name(settings: Settings) -> str:
    return f"base-{settings.recipe}-{settings.seed}"


def sft_name(settings: Settings) -> str:
    return f"sft-{settings.recipe}-{settings.mix}-{settings.seed}"


# The base -------------------------------------------------------------------------------------------------------------


def text_files(settings: Settings) -> tuple[Path, Path]:
    """Text of the corpus, and pages: each is written where it is missing."""
    texts, pages = (settings.out / f"{name}-{settings.seed}.jsonl" for name in ("texts", "pages"))
    wanted = parl_texts.Settings(
        file=pages, libraries=settings.libraries, pages=400 if settings.tiny else 20_000, seed=settings.seed
    )  # fmt: skip
    if not pages.exists():
        _write(parl_texts, wanted, given=("libraries", "pages", "seed"), here=settings.tiny)
    if not texts.exists():
        partial = texts.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(_corpus_lines(settings))
        partial.replace(texts)
    return texts, pages


def tokenizer_file(settings: Settings, files: tuple[Path, Path]) -> Path:
    """Learnt from the corpus and a part of the pages: there are no other words in the rest. Digits are tokens: with
    groups of three, which the pages teach all of, 21M parameters read names and misread numbers."""
    path = settings.out / f"tokenizer-{settings.seed}.json"
    if not path.exists():
        with files[0].open(encoding="utf-8") as texts, files[1].open(encoding="utf-8") as pages:
            read = (json.loads(line)["text"] for line in chain(texts, islice(pages, PAGES_FOR_WORDS)))
            Tokenizer.train(read, TINY_VOCAB if settings.tiny else VOCAB, digits=1).save(path)
    return path


def _corpus_lines(settings: Settings) -> Iterator[str]:
    left = settings.megabytes * 1e6
    corpus = Corpus(CorpusConfig(source=settings.corpus, num_documents=40 if settings.tiny else 1000))
    for number, document in enumerate(corpus.documents("train")):
        if left <= 0:
            return
        left -= len(document.text)
        split = "valid" if number % parl_texts.VALID_EVERY == 0 else "train"
        yield json.dumps({"id": f"text-{number}", "split": split, "text": document.text}) + "\n"


def _write(script: ModuleType, wanted: Any, *, given: tuple[str, ...], here: bool) -> None:
    """By a process of its own, whose processes import no torch, unless there is little to do."""
    if here:
        script.write(wanted)
        return
    subprocess.run(_command(script, wanted, given=given), check=True)


def _command(script: ModuleType, wanted: Any, *, given: tuple[str, ...]) -> list[str]:
    options = [str(part) for name in given for part in (f"--{name}", getattr(wanted, name))]
    return [sys.executable, str(script.__file__), str(wanted.file), *options]


def recipe_of(recipe: Recipe) -> tuple[ModelConfig, OptimizerConfig]:
    model = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=384,
        num_hidden_layers=8,
        kda=KDAConfig(num_heads=6, head_dim=64),
        mla=MLAConfig(num_attention_heads=6, kv_lora_rank=192, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
        intermediate_size=1024,
        residual="block_attnres",
        block_sublayers=4,
    )
    if recipe == "full":
        return model, OptimizerConfig(lr=3e-3)
    # Without KDA nothing else says where things are.
    pattern, heads = ("mla",) * model.num_hidden_layers, replace(model.mla, rope=RopeConfig())
    return replace(model, layer_types=pattern, mla=heads, residual="plain"), OptimizerConfig(kind="adamw", lr=2e-3)


def base_config(settings: Settings, files: tuple[Path, Path]) -> RunConfig:
    run = small()
    model, optimizer = recipe_of(settings.recipe)
    data = DataConfig(
        corpus=CorpusConfig(source=tuple(map(str, files)), split_field="split"), vocab_size=VOCAB, seq_len=1024,
        cache_dir=str(settings.out / "cache"), tokenizer=str(tokenizer_file(settings, files)),
    )  # fmt: skip
    trainer = replace(
        run.trainer, report=False, tensorboard=False, eval_every=0, keep_last=1, log_every=10,
        global_batch_rows=128, micro_batch_rows=64, sample_prompts=(),
    )  # fmt: skip
    config = replace(
        run, name=base_name(settings), seed=settings.seed, model=model, data=data, optimizer=optimizer, trainer=trainer
    )  # fmt: skip
    return tiny(config) if settings.tiny else config


def tiny(run: RunConfig, *, seq_len: int = 256) -> RunConfig:
    """The same code on a CPU within seconds."""
    small_model = micro().model
    model = replace(
        small_model, vocab_size=TINY_VOCAB, layer_types=None, residual=run.model.residual,
        mla=replace(small_model.mla, rope=run.model.mla.rope),
    )  # fmt: skip
    if run.model.layer_types is not None:
        model = replace(model, layer_types=("mla",) * model.num_hidden_layers)
    trainer = replace(
        run.trainer, precision="float32", global_batch_rows=4, micro_batch_rows=4, eval_rows=2, device="cpu"
    )  # fmt: skip
    return replace(run, model=model, data=replace(run.data, vocab_size=TINY_VOCAB, seq_len=seq_len), trainer=trainer)


def make_base(settings: Settings) -> None:
    config = base_config(settings, text_files(settings))
    say("texts are there")
    data = open_data(config.data, seed=config.seed)
    say("tokens are there")
    config, summary, seconds = trained(config, data, settings, steps=settings.base_steps, warmup_share=10)
    rows = config.trainer.steps * config.trainer.global_batch_rows
    _record(settings, config, seconds, {
        "row": "base", "bits_per_byte": summary["valid_bits_per_byte"], "tokens": summary["tokens"],
        "epochs": round(rows / max(1.0, data.train.rows_per_epoch), 2), "parameters": summary["parameters"],
    })  # fmt: skip


def prepare(settings: Settings) -> None:
    """All that the steps below read, made before a GPU is asked; they find it in --out by its content."""
    if settings.recipe == "nano":
        tokenizer = open_tokenizer(base_of(settings))
    else:
        data = open_data(base_config(settings, text_files(settings)).data, seed=settings.seed)
        say(f"{data.train.rows_per_epoch:,.0f} rows of text")
        tokenizer = data.tokenizer
    lessons = ChatRows(
        ChatDataConfig(sources=(str(traces_file(settings)),)), tokenizer, seq_len=sft_length(settings),
        seed=settings.seed, cache_dir=str(settings.out / "cache"),
    )  # fmt: skip
    say(f"{lessons.num_dialogues:,} dialogues in {lessons.num_rows:,} rows")


# Training -------------------------------------------------------------------------------------------------------------


def trained(
    config: RunConfig, data: RunData, settings: Settings, *, steps: int, warmup_share: int
) -> tuple[RunConfig, dict[str, Any], float]:
    """The run to its end, or as much of it as the call has time for: Interrupted then. Its config with its number of
    steps, its summary, and the seconds of all its calls. One that was begun is gone on with."""
    folder = settings.out / config.name
    begun = 0 if settings.again else saved_step(folder)
    if begun:
        steps = read_config(folder).trainer.steps
    elif settings.as_long:
        wanted = full_steps(config, settings)
        steps = steps_as_long(config, as_full(config, settings), data, full_steps=wanted, folder=folder)
    elif settings.seconds is not None:
        steps = steps_for(config, settings.seconds, data)
    config = with_steps(config, steps, warmup_share=warmup_share)
    say(f"{config.name}: {'goes on at' if begun else 'training, step'} {begun}/{steps}")
    began, before = time.monotonic(), seconds_before(folder, begun)

    def stop_in_time(phase: str) -> None:
        if phase != "step:logged":
            return
        keep_seconds(folder, {**before, begun: time.monotonic() - began})  # also of a call that is cut off
        # Within a step, where the trainer hears it, and saves.
        if time.monotonic() - CALLED > settings.limit:
            signal.raise_signal(signal.SIGTERM)

    try:
        summary = train(
            config, runs_folder=settings.out, resume=begun > 0, overwrite=not begun, data=data, on_phase=stop_in_time
        )
    finally:
        spent = {**before, begun: time.monotonic() - began}
        keep_seconds(folder, spent)
    say(f"{config.name}: trained")
    return config, summary, sum(spent.values())


def full_steps(config: RunConfig, settings: Settings) -> int:
    """Of the same model of the full recipe, as a row tells them."""
    other = config.name.replace(f"-{settings.recipe}-", "-full-", 1)
    for row in read_rows(settings.results):
        if (row.get("name"), row.get("tiny")) == (other, settings.tiny) and row["row"] in ("base", "sft"):
            return row["train_steps"]
    raise SystemExit(
        f"--as-long: {str(settings.results)!r} has no row of {other}: train the model of the full recipe first"
    )


def as_full(config: RunConfig, settings: Settings) -> RunConfig:
    """The same training of the full recipe's model, from scratch: for its speed."""
    model, optimizer = recipe_of("full")
    full = replace(config, name=f"{config.name}-speed", model=model, optimizer=optimizer, start_from=None)
    return tiny(full, seq_len=config.data.seq_len) if settings.tiny else full


# Fine-tuning ----------------------------------------------------------------------------------------------------------


def traces_file(settings: Settings) -> Path:
    """Dialogues of both roles; those of another seed are of other tasks."""
    wanted = _wanted_traces(settings)
    if not wanted.file.exists():
        _write(parl_traces, wanted, given=TRACES_GIVEN, here=settings.tiny)
    return wanted.file


def _wanted_traces(settings: Settings) -> parl_traces.Settings:
    return parl_traces.Settings(
        file=settings.out / f"traces-{settings.mix}-{settings.seed}.jsonl", mix=settings.mix,
        orchestrators=settings.orchestrators, workers=settings.workers, told=settings.told, seed=settings.seed,
        tiny=settings.tiny,
    )  # fmt: skip


def traces_ahead(settings: Settings) -> "subprocess.Popen[bytes] | None":
    """Dialogues are written while the base is trained, which leaves the cores alone."""
    wanted = _wanted_traces(settings)
    if settings.tiny or wanted.file.exists() or is_there(settings.out, sft_name(settings)):
        return None
    return subprocess.Popen(_command(parl_traces, wanted, given=TRACES_GIVEN))


def sft_length(settings: Settings) -> int:
    if settings.tiny:
        return 1024
    return NANO_ROW_TOKENS if settings.recipe == "nano" else ROW_TOKENS


def sft_steps(settings: Settings) -> int:
    if settings.sft_steps is not None:
        return settings.sft_steps
    return NANO_STEPS if settings.recipe == "nano" else SFT_STEPS


def base_of(settings: Settings) -> Path:
    """What is fine-tuned. SystemExit where it is not there."""
    if settings.recipe == "nano":
        released = released_model()
        if released is None:
            raise SystemExit(f"{named_in_vain() or 'models/perilune-nano is not here'}: nothing to fine-tune")
        return released
    if not is_there(settings.out, name := base_name(settings)) and not unpacked(settings, name):
        raise SystemExit(f"{str(settings.out)!r} has no {name} that is whole: run base first")
    return settings.out / name


def make_sft(settings: Settings) -> None:
    began = time.monotonic()
    source = traces_file(settings)
    say("traces are there")
    base, is_nano = base_of(settings), settings.recipe == "nano"
    config = sft(base, sources=(str(source),))
    length = sft_length(settings)
    rows = 4 if settings.tiny else (NANO_TOKENS if is_nano else SFT_TOKENS) // length
    at_once = 1 if is_nano else min(rows, 4)  # a CPU is no faster with more
    trainer = replace(
        config.trainer, global_batch_rows=rows, micro_batch_rows=at_once, eval_every=0, report=False, tensorboard=False,
        keep_last=1, log_every=10,
    )  # fmt: skip
    # As much as pre-training: a tenth of its rate, the default, is for models that know more than this one.
    optimizer = replace(config.optimizer, lr=NANO_LR if is_nano else 3 * config.optimizer.lr)
    config = replace(config, name=sft_name(settings), seed=settings.seed, trainer=trainer, optimizer=optimizer,
                     data=replace(config.data, seq_len=length, cache_dir=str(settings.out / "cache")))  # fmt: skip
    data = open_data(config.data, seed=config.seed)
    lessons = data.train
    assert isinstance(lessons, ChatRows)
    prepared = time.monotonic() - began
    say(f"{lessons.num_dialogues:,} dialogues in {lessons.num_rows:,} rows")
    config, summary, seconds = trained(config, data, settings, steps=sft_steps(settings), warmup_share=4)
    _record(settings, config, seconds, {
        "row": "sft", "mix": settings.mix, "prepared_seconds": round(prepared, 1), "loss": summary.get("valid_loss"),
        "dialogues": lessons.num_dialogues, "left_out": lessons.broken.count, "row_tokens": length,
        "epochs": round(config.trainer.steps * rows / max(1, lessons.num_rows), 2),
    })  # fmt: skip


# The gate -------------------------------------------------------------------------------------------------------------


def test_worker(settings: Settings) -> None:
    """Single lookups of test things by the fine-tuned model, greedy."""
    device = pick_device("cpu" if settings.tiny else "auto")
    model, tokenizer, config = load_run(settings.out / sft_name(settings), device=device)
    environment = environment_of(tiny=settings.tiny)
    talk = TalkConfig(max_tokens=1024, max_turns=12, temperature=0.0)
    engine = EngineConfig(max_sequences=64, token_budget=4096, max_length=4096, memory_gib=WORKER_GIB)

    async def work() -> list[Any]:
        workers = frozen_workers(model, tokenizer, engine, talk, device=torch.device(device))
        try:
            return await look_up(environment, workers, lookups(environment, settings.lookups))
        finally:
            await workers.engine.close()

    began = time.monotonic()
    found = asyncio.run(work())
    right = sum(each.is_right for each in found) / max(1, len(found))
    _record(settings, config, time.monotonic() - began, {
        "row": "worker", "lookups": len(found), "right": round(right, 4), "bar": ENOUGH,
        "steps": round(sum(each.steps for each in found) / max(1, len(found)), 2),
        "right_one_hop": _share([each.is_right for each in found if each.hops == 1]),
        "right_two_hops": _share([each.is_right for each in found if each.hops > 1]),
        "wrong": [
            {"asked": each.lookup.question.text, "value": each.lookup.value, "did": each.did, "said": each.said[:200]}
            for each in found if not each.is_right
        ][:WRONG_SHOWN],
    })  # fmt: skip


def _share(values: list[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def _record(settings: Settings, config: RunConfig, seconds: float, more: dict[str, Any]) -> None:
    environment = describe_environment(pick_device(config.trainer.device))
    row = {
        "name": config.name, "seed": settings.seed, "tiny": settings.tiny, "recipe": settings.recipe,
        "train_steps": config.trainer.steps, "seconds": round(seconds, 1),
        **as_long(settings.out / config.name), **more,
        "commit": settings.commit or environment.get("commit", ""), "environment": environment,
    }  # fmt: skip
    keep_row(row, results=settings.results, out=settings.out)
    say(json.dumps({name: value for name, value in row.items() if name != "environment"}))


def keep_row(row: dict[str, Any], *, results: Path, out: Path) -> None:
    for path in (out / ROWS, results):
        add_rows(path, [row], key=KEY)


def gather_rows(*, results: Path, out: Path) -> None:
    """What was measured on this machine and is not among the results, too. What is there stays: another arm may have
    said more of itself meanwhile."""
    if known := read_rows(out / ROWS):
        add_rows(results, known, key=KEY, replace=False)


def small_settings(settings: Settings) -> Settings:
    """Everything in seconds."""
    return replace(
        settings, libraries=1, corpus="generated", megabytes=0.05, orchestrators=min(settings.orchestrators, 24),
        workers=min(settings.workers, 32), told=min(settings.told, 4), lookups=min(settings.lookups, 4),
        base_steps=8 if settings.base_steps == BASE_STEPS else settings.base_steps,
        sft_steps=8 if settings.sft_steps is None else settings.sft_steps,
    )  # fmt: skip


def main(settings: Settings) -> None:
    if settings.step in ("pack", "unpack"):
        if not settings.name:
            raise SystemExit("--name is missing: base-RECIPE-SEED or sft-RECIPE-MIX-SEED")
        if settings.pieces is None:
            raise SystemExit("--pieces is missing: the folder of the packed models")
        if settings.step == "pack":
            _pack(settings, settings.name)
        elif is_there(settings.out, settings.name) and not settings.again:
            print(f"{settings.name} is there; --again unpacks it anew")  # arms side by side begin with the same line
        else:
            print(unpack(settings.pieces, settings.name, settings.out))
        return
    if settings.tiny:
        settings = small_settings(settings)
    settings.out.mkdir(parents=True, exist_ok=True)
    gather_rows(results=settings.results, out=settings.out)
    if settings.step == "prepare":
        prepare(settings)
        return
    steps = ("base", "sft", "worker") if settings.step == "all" else (settings.step,)
    if settings.recipe == "nano":
        steps = tuple(step for step in steps if step != "base")  # it is there
    elif settings.step == "all" and not settings.again and _needs_no_base(settings):
        steps = ("sft", "worker")
    ahead = traces_ahead(settings) if settings.step == "all" else None
    try:
        for step in steps:
            if ahead is not None and step == "sft":
                ahead.wait()  # one that failed is tried again, and says why
            name = base_name(settings) if step == "base" else sft_name(settings)
            if step != "worker" and not settings.again and unpacked(settings, name):
                continue
            if step == "base" and (settings.again or not is_there(settings.out, name)):
                make_base(settings)
            elif step == "sft" and (settings.again or not is_there(settings.out, name)):
                make_sft(settings)
            elif step == "worker":
                if not is_there(settings.out, sft_name(settings)):
                    raise SystemExit(f"{str(settings.out)!r} has no {sft_name(settings)} that is whole: run sft first")
                test_worker(settings)
            else:
                say(f"{step}: there already (--again makes it anew)")
            if settings.pieces is not None and step != "worker":
                _pack(settings, name)
    except Interrupted as stopped:
        if stopped.signal_number != signal.SIGTERM:  # a person's Ctrl-C
            raise
        say("time is up, and what was trained is saved: the same command goes on")
        raise SystemExit(AGAIN) from None
    finally:
        if ahead is not None:
            ahead.wait()  # the next call would write the same file


def _needs_no_base(settings: Settings) -> bool:
    """Where there is none, and what would become of it is there or lies packed."""
    if is_there(settings.out, base_name(settings)):
        return False
    return is_there(settings.out, sft_name(settings)) or unpacked(settings, sft_name(settings))


def unpacked(settings: Settings, name: str) -> bool:
    """Whether it was not there and lay packed."""
    if settings.pieces is None or is_there(settings.out, name) or not (settings.pieces / f"{name}.00").exists():
        return False
    say(f"{name}: unpacked to {unpack(settings.pieces, name, settings.out)}")
    return True


def _pack(settings: Settings, name: str) -> None:
    assert settings.pieces is not None
    for path in pack(settings.out / name, settings.pieces):
        print(f"{path} {path.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
