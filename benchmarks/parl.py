"""PARL on one GPU: serial collapse, its cure, and what a swarm buys and costs. A piece a call, each can be continued.

    python benchmarks/parl_models.py all --out DIR                first: a base, fine-tuned by traces
    python benchmarks/parl.py arm --arm full --out DIR            train an arm, test it, judge its episodes again
    python benchmarks/parl.py train --arm full --out DIR          train it only
    python benchmarks/parl.py test --arm full --out DIR           test tasks at half, once and twice the cap
    python benchmarks/parl.py audit --arm full --out DIR          judge every stored episode again
    python benchmarks/parl.py best-of --out DIR                   the serial agent, N samples, as many tokens
    python benchmarks/parl.py served --arm full --out DIR         seconds of all wide tasks at once, nothing beside them
    python benchmarks/parl.py one-by-one --arm full --out DIR     seconds that one wide task takes, nothing beside it
    python benchmarks/parl.py report                              every bar with what was measured
    python benchmarks/parl.py report --lr 1e-4                    the same, with that arm in the place of full
    python benchmarks/parl.py all --tiny --out DIR                everything in miniature, on a CPU

On two CPU cores, from the released model, in an hour and a half, a thread for each arm (OMP_NUM_THREADS=1):

    python benchmarks/parl_models.py sft --recipe nano --orchestrators 5000 --workers 9000 --told 900 --limit 3000
    python benchmarks/parl.py arm --recipe nano --tasks 4 --iterations 40 --over 8 --cooldown 12 --lr 3e-4 --tested 32
                                  --shown 8 --seconds 6000 --arm full           and beside it --arm outcome
    python benchmarks/parl.py report --recipe nano

An arm has as many iterations as the recipe; how long they take is nothing that results depend on. --seconds is all of a
call: what does not fit is saved or not begun, and the call ends with exit code 75: the same command goes on, and leaves
out what has its row. An arm is tested when it is trained to its end, or as it is with --now.

    arm             rewards                                     workers           starts from
    full            instantiation, finish and outcome, fading   frozen            9 of 10 traces serial
    economy         as full, and few steps of everybody         frozen            the same
    outcome         the outcome alone                           frozen            the same
    instantiation   workers alone are paid for                  frozen            the same
    no-finish       instantiation and outcome                   frozen            the same
    blog            the blog's form                             frozen            the same
    joint           as full                                     trained with it   the same
    control         as full                                     frozen            traces without a bad delegation
    serial          the outcome; it has no tools for workers    -                 9 of 10 traces serial

Beside the 9,000 traces of the first kind lie 1,500 whose prompt says to hand out everything at once (parl_models.py
--told): they teach how, and the arms when.

The claim of a product, {AdamW + MLA + plain residuals, full recipe} x {single agent, swarm}: train and test the arms
serial and full with --recipe plain too, from models that were trained for as many seconds as those of the full recipe
(parl_models.py --as-long); and `served` of one seed of all four cells, when nothing else runs. Rows go to --results;
beside it, for every arm, parl-NAME.html (the report of `perilune rl`, with timelines before and after) and
parl-NAME.jsonl (these episodes). The folder of an arm is that of a run: `perilune swarm audit DIR/full-full-0` and
`perilune rl replay DIR/full-full-0` read it.
"""

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
import tyro
from parl_arms import (
    CURVES,
    ArmName,
    Settings,
    arm_of,
    device_of,
    given,
    iterations_done,
    left,
    means,
    mix_of,
    models_of,
    name_of,
    optimizer_of,
    record,
    run_config,
    short,
    start_of,
    stop_here,
    traces_of,
    workers_of,
)
from parl_models import KEY, Recipe, gather_rows
from parl_models import Settings as Models
from parl_models import main as make_models
from parl_play import best_of, one_by_one, served, test
from parl_traces import Mix
from rl_base import is_there
from rl_rows import add_rows, read_rows, say

from perilune.data.chat_rows import ChatRows
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.report.rl import write_rl_report
from perilune.rl.evaluation import EPISODES, EVALUATIONS, evaluate, read_evaluations
from perilune.rl.loop import CHECKPOINTS, RECORDS, Loop, keep_records
from perilune.rl.replay import replay_folder
from perilune.rl.run import RL_CONFIG, check_continued
from perilune.rl.run_config import RLRunConfig, RLRunError, plain_config
from perilune.rl.trajectory import Trajectory, load_trajectories, save_trajectories
from perilune.train import RunConfig, checkpoint, load_run
from perilune.train.config_file import to_plain
from perilune.train.run_folder import create

TURN_SECONDS = 5e-4
"""For which a thread may keep the interpreter while another waits for it; Python's own 5 ms are several decoding steps:
an engine whose numbers are there would wait as long for the episodes, which compute all the time."""
EQUAL = "groups with equal rewards"
PTX_TOKENS = 16_384
"""Of workers' dialogues in an update, beside some 60,000 that are sampled."""
SAVED_EVERY = 60.0
"""Seconds of training that a call loses at most when it is cut off."""
JUDGED_A_SECOND = 100
"""Stored episodes, read and judged again; one core does more."""
SHOWN_TASKS = 2
"""Wide tasks whose episodes before and after training are kept beside the rows."""
SHOWN_BYTES = 1_000_000
"""Of them at most; the page is about as much."""


# Training -------------------------------------------------------------------------------------------------------------


def train(settings: Settings) -> None:
    """SystemExit AGAIN where the call's time was over first."""
    folder = settings.out / name_of(settings)
    if not is_there(settings.out, start := start_of(settings)):
        made = f"sft --mix {mix_of(settings)} --recipe {settings.recipe} --seed {models_of(settings)}"
        raise SystemExit(
            f"{str(settings.out)!r} has no {start} that is whole: python benchmarks/parl_models.py {made} makes it"
        )
    device = device_of(settings)
    say(f"{name_of(settings)}: opening {start_of(settings)}")
    model, tokenizer, run = load_run(settings.out / start_of(settings), device=device)
    config, run = checked_config(settings), replace(run, name=name_of(settings), start_from=None)
    folder.mkdir(parents=True, exist_ok=True)
    create(folder, run, tokenizer, device=device, fresh=False)
    (folder / RL_CONFIG).write_text(json.dumps(plain_config(config), indent=2) + "\n", encoding="utf-8")
    ptx = None if not settings.ptx else kept_dialogues(settings, config, tokenizer)
    asyncio.run(_train(settings, config, model, tokenizer, run, folder, ptx))
    if not (folder / RECORDS).exists():
        raise SystemExit(f"no iteration was over after {settings.seconds:g} s: give it more --seconds")
    row = train_row(settings)
    record(settings, row, row["train_seconds"])
    keep_report(settings)
    if row["iterations"] < settings.iterations and not settings.now:
        stop_here(settings, f"{row['iterations']} of {settings.iterations} iterations")


def checked_config(settings: Settings) -> RLRunConfig:
    """SystemExit where the arm's folder holds one that was begun with other settings."""
    config, folder = run_config(settings), settings.out / name_of(settings)
    try:
        check_continued(config, folder)
    except RLRunError as error:
        raise SystemExit(f"{str(folder)!r} is another arm: {error}") from None
    return config


def kept_dialogues(settings: Settings, config: RLRunConfig, tokenizer: Tokenizer) -> ChatRows:
    """Those of workers, of the traces."""
    traces, workers = traces_of(settings), workers_of(settings)
    if not traces.exists():
        raise SystemExit(f"--ptx needs {str(traces)!r}, which parl_models.py sft writes: lay it there")
    with traces.open(encoding="utf-8") as file:
        lines = [line for line in file if json.loads(line)["kind"] == "worker"]
    partial = workers.with_suffix(f".{os.getpid()}")  # arms side by side write the same
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(workers)
    length = 1024 if settings.tiny else PTX_TOKENS
    rows = ChatRows(config.ptx, tokenizer, seq_len=length, seed=settings.seed, cache_dir=str(settings.out / "cache"))
    say(f"{rows.num_dialogues:,} dialogues of workers are learnt from beside")
    return rows


async def _train(
    settings: Settings, config: RLRunConfig, model: Decoder, tokenizer: Tokenizer, run: RunConfig, folder: Path,
    ptx: ChatRows | None,
) -> None:  # fmt: skip
    """Until the time of this call is over; what was trained before is continued."""
    about = {"config": to_plain(run), "tokenizer_fingerprint": tokenizer.fingerprint, "rl": plain_config(config)}
    resume = checkpoint.find(folder / CHECKPOINTS) is not None
    environments = config.environments.chosen()

    async def shown(loop: Loop) -> None:
        known = {found["iteration"] for found in read_evaluations(folder)}
        if loop.iteration in (0, settings.iterations) and loop.iteration not in known and config.evaluation.tasks:
            await evaluate(loop, environments, config.evaluation, folder)

    async with Loop(
        model, tokenizer, environments, config.rl, folder=folder, resume=resume, about=about, ptx=ptx
    ) as loop:  # fmt: skip
        keep_records(folder / EVALUATIONS, loop.iteration)
        if not resume:
            await loop.save()
        say(f"{name_of(settings)}: engines are there, iteration {loop.iteration}/{settings.iterations}")
        if left(settings) > 0:
            await shown(loop)
        saved, needed = time.monotonic(), 0.0
        while loop.iteration < settings.iterations and left(settings) > needed:
            found = await loop.step()
            torch.cuda.empty_cache()  # a dozen arms share a card: they need not learn at the same time
            needed = 1.5 * found["seconds"]
            say(_line(settings, found))
            if time.monotonic() - saved > SAVED_EVERY:
                await loop.save()
                saved = time.monotonic()
        await loop.save()
        await shown(loop)


def train_row(settings: Settings) -> dict[str, Any]:
    """What the records of an arm say, of all its calls. Nothing is claimed about judging its episodes again: `audit`
    does, once it has."""
    lines = (settings.out / name_of(settings) / RECORDS).read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    fifth = records[-max(1, len(records) // 5) :]
    kinds = sorted({kind for each in records for kind in each.get("kinds") or ()})
    began = [each["parl"]["began"] for each in records if each.get("parl")]
    return {
        "row": "train", "name": name_of(settings), "arm": arm_of(settings), "iterations": len(records),
        "episodes": sum(each["episodes"] for each in records), "replayed": None, "replayed_equal": None,
        "faded_from": began[-1] if began else None,
        "last_fifth": {kind: means([(each.get("kinds") or {}).get(kind) or {} for each in fifth]) for kind in kinds},
        "curves": {
            kind: {name: [short(((each.get("kinds") or {}).get(kind) or {}).get(name)) for each in records]
                   for name in CURVES}
            for kind in kinds
        },
        "share": [short((each.get("parl") or {}).get("share")) for each in records],
        "gap": short(sum(each["gap"] for each in records) / len(records)),
        "train_seconds": round(sum(each["seconds"] for each in records), 1),
        "seconds_an_iteration": short(sum(each["seconds"] for each in records) / len(records)),
        "failures": sum(sum(each["failures"].values()) for each in records),
        "optimizer": optimizer_of(settings).kind, **given(settings),
    }  # fmt: skip


def _line(settings: Settings, found: Mapping[str, Any]) -> str:
    kinds = "  ".join(
        f"{kind}: spawn {numbers['spawn']:.2f} F1 {numbers['outcome']:.2f} width {numbers['width']:.1f}"
        for kind, numbers in (found.get("kinds") or {}).items()
    )
    return (
        f"{name_of(settings)} {found['iteration']}/{settings.iterations}  {found['seconds']:.1f} s "
        f"({found['rollout_seconds']:.1f} play, {found['learn_seconds']:.1f} learn)  "
        f"reward {found.get('reward', 0.0):.2f}  "
        f"equal groups {found['dropped'].get(EQUAL, 0)}/{settings.tasks}  {kinds}"
    )


# What is kept of it ---------------------------------------------------------------------------------------------------


def audit(settings: Settings) -> None:
    """Every stored episode judged again; the arm's row then says how many were, and how many had the same reward."""
    folder, row = settings.out / name_of(settings), train_row(settings)
    if any(_has(known, row) and known.get("replayed") is not None for known in read_rows(settings.results)):
        say(f"{name_of(settings)}: judged again already")
        return
    if left(settings) < row["episodes"] / JUDGED_A_SECOND:
        stop_here(settings, f"{left(settings):.0f} s are too few to judge {row['episodes']:,} episodes again")
    say(f"{name_of(settings)}: judging {row['episodes']:,} episodes of training again, and those of evaluations")
    found = replay_folder(folder)
    for example in found["examples"]:
        say(example)
    counts = {"replayed": found["episodes"], "replayed_equal": found["equal"]}
    record(settings, {**row, **counts}, row["train_seconds"])


def _has(known: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return all(known.get(name) == row[name] for name in ("row", "name", "iterations", "episodes", "train_seconds"))


def keep_report(settings: Settings) -> None:
    """The page of the run and a few episodes before and after training, beside the rows, where they come back from a
    machine that hands back one folder."""
    folder, place = settings.out / name_of(settings), settings.results.parent
    place.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(write_rl_report(folder), place / f"parl-{name_of(settings)}.html")
    files = sorted((folder / EPISODES).glob("*.jsonl"))
    for count in range(SHOWN_TASKS, 0, -1):
        kept = place / f"parl-{name_of(settings)}.jsonl"
        save_trajectories(kept, shown_episodes(files, count))
        if kept.stat().st_size <= SHOWN_BYTES:
            return
        kept.unlink()


def shown_episodes(files: Sequence[Path], count: int) -> list[Trajectory]:
    """Of the first wide tasks, from the first file and the last."""
    chosen = dict.fromkeys([*files[:1], *files[-1:]])
    wide = [each for path in chosen for each in load_trajectories(path) if each.task_data["kind"] == "wide"]
    tasks = list(dict.fromkeys(each.task for each in wide))[:count]
    return [each for task in tasks for each in wide if each.task == task]


# ----------------------------------------------------------------------------------------------------------------------


def small_settings(settings: Settings) -> Settings:
    """Seconds on a CPU; models are made where they are missing."""
    pairs: list[tuple[Recipe, Mix]] = [(settings.recipe, mix_of(settings))]
    if settings.step == "all":
        pairs = [("full", "mostly-serial"), ("full", "well-formed"), ("plain", "mostly-serial")]
    for recipe, mix in pairs:
        models = Models(step="all", tiny=True, out=settings.out, results=settings.results, recipe=recipe, mix=mix)
        seed = models_of(settings)
        if not is_there(settings.out, f"sft-{recipe}-{mix}-{seed}"):
            make_models(replace(models, seed=seed))
    return replace(
        settings, iterations=2, tasks=2, samples=2, tested=4, shown=4, most=2, seconds=max(settings.seconds, 3600.0)
    )  # fmt: skip


def main(settings: Settings) -> None:
    sys.setswitchinterval(TURN_SECONDS)
    if settings.step != "report":
        gather_rows(results=settings.results, out=settings.out)
    for path in settings.merge:
        add_rows(settings.results, read_rows(path), key=KEY)
    if settings.tiny and settings.step != "report":
        settings = small_settings(settings)
    if settings.step == "all":
        for name in get_args(ArmName):
            whole_arm(replace(settings, arm=name))
        for name in ("serial", "full"):
            whole_arm(replace(settings, arm=name, recipe="plain"))
        best_of(settings)
        for name in ("serial", "full"):
            served(replace(settings, arm=name))
            served(replace(settings, arm=name, recipe="plain"))
            one_by_one(replace(settings, arm=name))
    elif settings.step == "arm":
        whole_arm(settings)
    elif settings.step != "report":
        pieces = {
            "train": train, "test": test, "audit": audit, "best-of": best_of, "served": served,
            "one-by-one": one_by_one,
        }  # fmt: skip
        pieces[settings.step](settings)
    if settings.step in ("report", "all"):
        from parl_bars import bars_text, plot_spawn, plot_widths

        # The released model's arms have a rate of their own, which the defaults of a report do not name.
        swarm = "full" if settings.recipe == "nano" or settings.step == "all" else arm_of(settings)
        rows = read_rows(settings.results)
        print(bars_text(rows, tiny=settings.tiny, recipe=settings.recipe, swarm=swarm))
        if settings.plot is not None:
            path = settings.plot
            narrow, widths = (path.with_stem(f"{path.stem}_{what}") for what in ("narrow", "width"))
            print(f"\n{plot_spawn(rows, path, recipe=settings.recipe)}")
            print(plot_spawn(rows, narrow, recipe=settings.recipe, kind="narrow"))
            print(plot_widths(rows, widths, recipe=settings.recipe))


def whole_arm(settings: Settings) -> None:
    """Piece after piece, less what is there."""
    if iterations_done(settings) < settings.iterations:
        train(settings)
    else:
        checked_config(settings)
        say(f"{name_of(settings)}: trained already")
        keep_report(settings)
    test(settings)
    audit(settings)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
