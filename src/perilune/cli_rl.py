"""`perilune rl RECIPE`: reinforcement learning; `perilune rl replay FOLDER` judges what was played again, and
`perilune rl compare RUN RUN ...` sets runs of PARL beside each other.

The run's folder is that of an ordinary run too: `perilune generate NAME`, `serve`, `export` and `sft` open the newest
checkpoint of its weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from perilune.cli import (
    UserError,
    _early_flags,
    _nearest,
    _parse,
    _parse_run,
    _positional,
    _print_json,
    _resumed_place,
    _run_folder,
    _with_set,
)

if TYPE_CHECKING:
    import torch

    from perilune.data.tokenizer import Tokenizer
    from perilune.model import Decoder
    from perilune.rl.parl import ParlConfig
    from perilune.rl.run import Policy
    from perilune.rl.run_config import RLRunConfig

EXAMPLE = "perilune rl micro_copy"


@dataclass(kw_only=True)
class RLFlags:
    source: Annotated[str, tyro.conf.arg(name="from")] = ""
    """The run or model folder whose weights it begins with, by name or folder."""
    resume: bool = False
    """Continue the run of this name from its last checkpoint."""
    overwrite: bool = False
    """Replace the run of this name."""
    toggle: bool = False
    """Alternate between budgeted and free phases (--groups.toggle.period and others set it)."""
    arm: str = ""
    """Rewards of an arm of PARL: full, outcome, no_finish, instantiation, blog or economy; --parl.* sets them."""
    runs: str = "runs"
    """Folder that holds runs."""
    set: tuple[str, ...] = ()
    """Fields by path with a JSON value, for what has no flag: --set 'environments.logic={"people": 4}'"""
    json: bool = False
    """Print the summary as JSON."""
    quiet: bool = False
    """No progress bar and no lines in between."""


def rl_verb(arguments: list[str]) -> None:
    """Reinforcement learning with verifiable rewards; every field of the recipe is a flag."""
    if arguments[:1] == ["replay"]:
        replay_verb(arguments[1:])
        return
    if arguments[:1] == ["compare"]:
        compare_verb(arguments[1:])
        return
    from perilune.recipes.rl import RL_RECIPES

    expected = f"one of {', '.join(RL_RECIPES)}, a run to resume, replay, or compare"
    name, rest = _positional(arguments, "RECIPE", expected, EXAMPLE, helps=True)
    early = _early_flags(RLFlags, rest)
    default, runs = _default(name, early)
    from perilune.rl.run import train_policy
    from perilune.rl.run_config import RLRunConfig, check

    flags, config = _parse_run(
        f"perilune rl {name}",
        "Reinforcement learning with verifiable rewards; every field of the recipe is a flag.\n\n"
        f"example: perilune rl {name} --iterations 20 --learner.optimizer.lr 1e-3",
        RLFlags,
        RLRunConfig,
        _with_set(default, early.set),
        rest,
    )
    if flags.source:
        config = replace(config, start_from=str(_run_folder(flags.source, runs)))
    check(config, config.environments.chosen())  # before a large model is read
    folder = Path(runs) / config.name
    config, policy = _policy(config, folder, resume=flags.resume, quiet=flags.quiet or flags.json)
    workers = None if flags.resume else _workers(config, runs, policy)
    summary = train_policy(
        config,
        policy,
        folder,
        resume=flags.resume,
        overwrite=flags.overwrite,
        quiet=flags.quiet or flags.json,
        workers=workers,
    )
    _print_json(summary) if flags.json else print(summary_text(summary))


def _default(name: str, flags: RLFlags) -> tuple["RLRunConfig", str]:
    """A recipe's config, or when resuming that of the run itself; and the folder that holds the run."""
    from perilune.recipes.rl import RL_RECIPES, rl_recipe
    from perilune.rl.lengths import ToggleConfig
    from perilune.rl.run import RL_CONFIG
    from perilune.rl.run_config import read_config

    config, runs = None, flags.runs
    if flags.resume:
        for folder in (Path(flags.runs) / name, Path(name)):
            if config is None and (folder / RL_CONFIG).exists():
                own_name, runs = _resumed_place(folder)
                config = replace(read_config(folder / RL_CONFIG), name=own_name)
    if config is None and flags.resume and name not in RL_RECIPES:
        raise UserError(
            f"there is no run {name!r} in {flags.runs!r} to resume{_nearest(name, RL_RECIPES)}: one that was stopped "
            "before its first line has to be started again, without --resume"
        )
    if config is None:
        config = rl_recipe(name)
    if flags.toggle and config.rl.groups.toggle is None:
        groups = replace(config.rl.groups, toggle=ToggleConfig())
        config = replace(config, rl=replace(config.rl, groups=groups))
    if flags.arm:
        config = replace(config, rl=replace(config.rl, parl=_arm(name, flags.arm, config.rl.parl)))
    return config, runs


def _arm(recipe: str, name: str, parl: "ParlConfig | None") -> "ParlConfig":
    from perilune.rl.parl import ARMS, arm

    if parl is None:
        raise UserError(f"--arm {name} is for recipes of PARL, and {recipe} is none: take micro_parl or parl")
    found = next((each for each in ARMS if each == name.replace("-", "_")), None)
    if found is None:
        raise UserError(f"--arm is {name!r}, expected one of {', '.join(ARMS)}")
    return arm(found, parl)


def _workers(config: "RLRunConfig", runs: str, policy: "Policy") -> "tuple[Decoder, Tokenizer] | None":
    """The model of frozen workers, where it is not that of the policy."""
    if config.rl.parl is None or not config.rl.parl.workers_from:
        return None
    from perilune.cli_hub import open_model

    opened = open_model(config.rl.parl.workers_from, runs=runs, device=policy.model.embed_tokens.weight.device)
    return opened.model, opened.tokenizer


def _policy(
    config: "RLRunConfig", folder: Path, *, resume: bool, quiet: bool
) -> tuple["RLRunConfig", "Policy"]:  # fmt: skip
    """What the run begins with, and the config with the budgets of pictures that belong to it."""
    from perilune.data.tokenizer import Tokenizer
    from perilune.rl import tiny_model, tiny_swarm
    from perilune.rl.run import Policy, check_free
    from perilune.train.progress import DataProgress
    from perilune.train.run_folder import TOKENIZER, build_model, read_config
    from perilune.train.trainer import pick_device

    device = pick_device(config.device, "--device")
    if resume:
        check_free(folder, resume=True, overwrite=False)
        run = read_config(folder)
        return config, Policy(model=build_model(run, device), tokenizer=Tokenizer.load(folder / TOKENIZER), run=run)
    if config.start_from:
        return _opened(config, device)
    seed, letters, gathering = config.rl.seed, config.environments.letters(), config.environments.gathering
    with DataProgress(quiet=quiet) as progress:
        if gathering is not None:
            run, tokenizer = tiny_swarm.tiny_config(config.name, seed=seed), tiny_swarm.tiny_tokenizer()
            model = tiny_swarm.taught(run, tokenizer, environment=gathering, progress=progress)
        else:
            assert letters is not None  # checked before
            run, tokenizer = tiny_model.tiny_config(config.name, seed=seed), tiny_model.tiny_tokenizer()
            model = tiny_model.taught(run, tokenizer, letters, progress=progress)
    return config, Policy(model=model.to(device), tokenizer=tokenizer, run=run)


def _opened(config: "RLRunConfig", device: "torch.device") -> tuple["RLRunConfig", "Policy"]:
    from perilune.cli_hub import open_model
    from perilune.rl.run import Policy
    from perilune.train.run_folder import read_config

    opened = open_model(config.start_from, device=device)
    run = replace(read_config(Path(config.start_from)), name=config.name, model=opened.model.config)
    rollout = config.rl.rollout
    rollout = replace(rollout, talk=replace(rollout.talk, processor=opened.processor))
    config = replace(config, rl=replace(config.rl, rollout=rollout))
    return config, Policy(model=opened.model, tokenizer=opened.tokenizer, run=replace(run, start_from=None))


def summary_text(summary: Mapping[str, Any]) -> str:
    """What a person reads at the end."""
    lines = []
    for name, after in (summary["after"] or {}).items():
        before = summary["before"][name]
        if not after["count"] or not before["count"]:
            continue
        line = f"{name}: {_told(before['reward'])} before, {_told(after['reward'])} after"
        lines.append(f"{line} ({after['count']} test tasks)")
    if summary["failures"]:
        told = ", ".join(f"{count} ({kind})" for kind, count in sorted(summary["failures"].items()))
        lines.append(f"episodes lost: {told}")
    lines.append(f"{summary['iterations']} iterations; report: {summary['report']}")
    lines.append(f"the weights open as a run: perilune serve {_shown_name(summary)}")
    return "\n".join(lines)


def _told(interval: Mapping[str, float]) -> str:
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _shown_name(summary: Mapping[str, Any]) -> str:
    folder = Path(summary["folder"])
    return folder.name if folder.parent == Path("runs") else str(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Replay


@dataclass(kw_only=True)
class ReplayFlags:
    runs: str = "runs"
    """Folder that holds runs."""
    json: bool = False


def replay_verb(arguments: list[str]) -> None:
    """Judge the stored episodes of a run again; exit with 1 unless every reward has the same bits."""
    name, rest = _positional(arguments, "RUN", "a run's name or folder", "perilune rl replay micro_copy")
    flags = _parse(
        f"perilune rl replay {name}",
        "Judge the stored episodes of a run again, from their transcripts, and compare bit by bit.\n\n"
        f"example: perilune rl replay {name}",
        ReplayFlags,
        rest,
    )
    from perilune.rl.replay import replay_folder

    found = replay_folder(_run_folder(name, flags.runs))
    if flags.json:
        _print_json(found)
    else:
        print(f"{found['episodes']:,} episodes in {found['files']:,} files judged again: {found['equal']:,} equal")
        for line in found["examples"]:
            print(f"  {line}")
    if found["equal"] != found["episodes"]:
        raise UserError(f"{found['episodes'] - found['equal']:,} episodes were judged otherwise than when they ran")


# ---------------------------------------------------------------------------------------------------------------------
# Compare


@dataclass(kw_only=True)
class CompareFlags:
    kind: str = "wide"
    """Kind of tasks whose curves are shown."""
    out: str = "arms.html"
    """The page to write."""
    runs: str = "runs"
    """Folder that holds runs."""


def compare_verb(arguments: list[str]) -> None:
    """Runs of PARL beside each other: curves and the last fifth of each, as one page."""
    first_flag = next((place for place, each in enumerate(arguments) if each.startswith("-")), len(arguments))
    names, rest = arguments[:first_flag], arguments[first_flag:]
    flags = _parse(
        "perilune rl compare",
        "Runs of PARL beside each other, as one page: their arms by the names of the runs.\n\n"
        "example: perilune rl compare parl parl-outcome --out arms.html",
        CompareFlags,
        rest,
    )
    if not names:
        raise UserError("give the runs to compare, first: perilune rl compare RUN RUN --out arms.html")
    from perilune.report.parl import write_arms_page

    found = [_run_folder(name, flags.runs) for name in names]
    is_plain = len({folder.resolve().name for folder in found}) == len(found)  # else folders tell them apart
    folders = {folder.resolve().name if is_plain else name: folder for name, folder in zip(names, found)}
    print(write_arms_page(folders, Path(flags.out), kind=flags.kind))
