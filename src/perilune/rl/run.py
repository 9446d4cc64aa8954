"""A run of reinforcement learning from its config to its report, in a folder that every other verb opens.

    runs/NAME/rl.json            the config of this run
              config.json        that of an ordinary run with the same model: generate, serve, export and sft open NAME
              tokenizer.json  environment.json
              records.jsonl      one line an iteration        trajectories/000000.jsonl   its episodes
              unjudged/000000.jsonl  episodes whose judge failed: they can be judged again when it is mended
              evaluations.jsonl  one line an evaluation       evaluations/000000.jsonl    their episodes
              checkpoints/       step_..., latest             report.html
              .lock              held while a process trains

Ctrl-C and SIGTERM finish the iteration, save, and say how to go on; a second Ctrl-C stops at once. A checkpoint of the
starting weights is written first, so that a run can be resumed from its first second on.
"""

import asyncio
import contextlib
import json
import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from perilune.data.chat_rows import ChatRows
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.report.rl import read_rl_run, swarm_notes_of, write_rl_report
from perilune.rl.environment import Environment
from perilune.rl.evaluation import EPISODES, EVALUATIONS, evaluate, read_evaluations
from perilune.rl.loop import CHECKPOINTS, RECORDS, TRAJECTORIES, UNJUDGED, Loop, RLConfig, keep_records
from perilune.rl.progress import RLProgress
from perilune.rl.run_config import RLRunConfig, RLRunError, check, check_model, plain_config
from perilune.rl.workers import WORKERS
from perilune.serve.engine import EngineConfig
from perilune.train import checkpoint
from perilune.train.config_file import differences, from_plain, to_plain
from perilune.train.interrupt import Interrupted, StopRequest
from perilune.train.run_config import RunConfig
from perilune.train.run_folder import CONFIG, ENVIRONMENT, TOKENIZER, create, write_json
from perilune.train.run_lock import locked

RL_CONFIG = "rl.json"
OWN_FILES = (
    RL_CONFIG, CONFIG, TOKENIZER, ENVIRONMENT, RECORDS, TRAJECTORIES, UNJUDGED, EVALUATIONS, EPISODES, CHECKPOINTS,
    WORKERS, "report.html",
)  # fmt: skip
MAY_CHANGE = (
    "name", "device", "start_from", "evaluation", "rl.iterations", "rl.checkpoint_every", "rl.keep_trajectories",
    "rl.rollout.concurrency", "rl.rollout.episode_seconds", "rl.rollout.judge_seconds", "rl.processes",
    "rl.process_gpus", "engine_share",
)  # fmt: skip
"""What a resumed run may change: nothing of it changes what is learnt. More or fewer iterations do where a cooldown has
begun, which `check_continued` refuses."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """What a run begins with."""

    model: Decoder
    tokenizer: Tokenizer
    run: RunConfig
    """The config of an ordinary run that has this model."""


def check_free(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """RLRunError unless this run may write to `folder`. Changes nothing."""
    if resume and overwrite:
        raise RLRunError("a run is either resumed or overwritten: give one of --resume and --overwrite")
    if resume and not (folder / RL_CONFIG).exists():
        raise RLRunError(f"there is no run of reinforcement learning in {str(folder)!r}: start it without --resume")
    if (folder / CONFIG).exists() and not resume and not overwrite:
        known = (folder / RL_CONFIG).exists()
        go_on = f"continue it with `{resume_command(folder)}`, replace it with --overwrite" if known else "leave it"
        raise RLRunError(f"{str(folder)!r} already holds a run: {go_on}, or give this one another --name")
    if overwrite and (folder / CONFIG).exists() and not (folder / RL_CONFIG).exists():
        raise RLRunError(f"{str(folder)!r} holds a run of another kind, which is not replaced: give another --name")


def resume_command(folder: Path) -> str:
    """What to type to continue the run in `folder`."""
    command = ["perilune", "rl", folder.name, "--resume"]
    return shlex.join(command if folder.parent == Path("runs") else [*command, "--runs", str(folder.parent)])


def train_policy(
    config: RLRunConfig,
    policy: Policy,
    folder: Path,
    *,
    environments: Mapping[str, Environment] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    workers: tuple[Decoder, Tokenizer] | None = None,
) -> dict[str, Any]:
    """The summary of the finished run. Interrupted (a SystemExit) when it was asked to stop, and saved.

    `environments` are those of the config unless others are given. `workers`: the model of frozen workers, where an
    environment has some; None: that of `policy`.
    """
    chosen = config.environments.chosen() if environments is None else dict(environments)
    if environments is None:
        check(config, chosen)
    check_free(folder, resume=resume, overwrite=overwrite)
    longest = check_model(config, chosen, policy.model, policy.tokenizer)
    ptx = _supervised(config, policy.tokenizer)
    with locked(folder), RLProgress(iterations=config.rl.iterations, quiet=quiet) as progress:
        check_free(folder, resume=resume, overwrite=overwrite)  # another process may have begun since
        _prepare(config, policy, folder, resume=resume)
        progress.say(_introduction(config, policy, longest))
        if ptx is not None and ptx.broken.count:
            progress.say(f"dialogues: {ptx.broken}")
        for name, count in broken_rows(chosen).items():
            progress.say(f"{name}: {count} rows of its file are broken and left out")

        def asked(name: str) -> None:
            progress.say(f"{name}: finishing the iteration and saving; again to stop at once")

        with StopRequest(asked) as stop:
            work = _Work(config, policy, folder, chosen, ptx, progress, stop, workers)
            asyncio.run(work.run(resume=resume))
        report = write_rl_report(folder)
        if stop.signal_number is not None and not work.is_over:
            progress.say(f"saved at iteration {work.iteration}; go on with `{resume_command(folder)}`")
            raise Interrupted(stop.signal_number)
        for note in swarm_notes_of(read_rl_run(folder)):
            progress.say(note)
    return _summary(config, folder, report, work.seconds)


@dataclass
class _Work:
    """The loop with evaluations in between."""

    config: RLRunConfig
    policy: Policy
    folder: Path
    environments: Mapping[str, Environment]
    ptx: ChatRows | None
    progress: RLProgress
    stop: StopRequest
    workers: tuple[Decoder, Tokenizer] | None = None
    iteration: int = 0
    is_over: bool = False
    seconds: float = 0.0

    async def run(self, *, resume: bool) -> None:
        config, policy = self.config, self.policy
        about = {
            "config": to_plain(policy.run),
            "tokenizer_fingerprint": policy.tokenizer.fingerprint,
            "rl": plain_config(config),
        }
        settings = _with_memory(config.rl, policy.model, self.environments, config.engine_share)
        began = time.perf_counter()
        async with Loop(
            policy.model, policy.tokenizer, self.environments, settings,
            folder=self.folder, resume=resume, ptx=self.ptx, about=about, workers=self.workers,
        ) as loop:  # fmt: skip
            keep_records(self.folder / EVALUATIONS, loop.iteration)  # of weights that this run does not have
            self.iteration = loop.iteration
            self.progress.start_at(loop.iteration)
            if not resume:
                await loop.save()
            await self._evaluate(loop)
            if self.stop.signal_number is None:
                async for record in loop.run():
                    self.iteration = loop.iteration
                    self.progress.record(record)
                    every = config.evaluation.every
                    if loop.iteration == settings.iterations or (every and loop.iteration % every == 0):
                        await self._evaluate(loop)
                    if self.stop.signal_number is not None:
                        break
            self.is_over = loop.iteration >= settings.iterations
            if not self.is_over:
                await loop.save()
        self.seconds = time.perf_counter() - began

    async def _evaluate(self, loop: Loop) -> None:
        """Unless these weights were evaluated already, or nobody asked for it."""
        every, last = self.config.evaluation.every, self.config.rl.iterations
        is_due = loop.iteration in (0, last) or bool(every and loop.iteration % every == 0)
        known = {record["iteration"] for record in read_evaluations(self.folder)}
        if self.config.evaluation.tasks and is_due and loop.iteration not in known:
            record = await evaluate(loop, self.environments, self.config.evaluation, self.folder)
            self.progress.evaluation(record)
            write_rl_report(self.folder)


def broken_rows(environments: Mapping[str, Environment]) -> dict[str, int]:
    """How many rows of their files environments had to leave out, where some did."""
    found = {name: getattr(environment, "num_broken", 0) for name, environment in environments.items()}
    return {name: count for name, count in found.items() if count}


def _prepare(config: RLRunConfig, policy: Policy, folder: Path, *, resume: bool) -> None:
    if resume:
        check_continued(config, folder)
    else:
        for name in OWN_FILES:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    device = policy.model.embed_tokens.weight.device
    write_json(folder / RL_CONFIG, plain_config(config))
    create(folder, policy.run, policy.tokenizer, device=device, fresh=False)


def check_continued(config: RLRunConfig, folder: Path) -> None:
    """RLRunError where the run in `folder` cannot go on as `config` says: it would not have come to where it is."""
    found = checkpoint.find(folder / CHECKPOINTS)
    if found is None:
        return
    saved = found.state.get("rl", {})
    _check_same(saved, plain_config(config))
    before, now = from_plain(RLRunConfig, saved, "rl").rl, config.rl
    for iteration in range(found.state["iteration"]):
        if (had := before.rate(iteration)) != (has := now.rate(iteration)):
            raise RLRunError(
                f"cannot resume with rl.iterations {before.iterations} -> {now.iterations}: the learning rate falls "
                f"over the last rl.cooldown = {now.cooldown} iterations, and iteration {iteration}, which is over, had "
                f"{had:.2f} of it and would have {has:.2f}; keep the number, or start a new run"
            )


def _check_same(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    with contextlib.suppress(ValueError):  # a field that is gone since is told below
        saved = json.loads(json.dumps(plain_config(from_plain(RLRunConfig, saved, "rl"))))  # fields added since
    changed = [
        line
        for line in differences(saved, json.loads(json.dumps(now)))
        if not any(line.split(":")[0] == name or line.split(":")[0].startswith(f"{name}.") for name in MAY_CHANGE)
    ]
    if changed:
        raise RLRunError(
            f"cannot resume with a different configuration: {'; '.join(changed)} (checkpoint -> now); use the values "
            "of the checkpoint, or start a new run"
        )


def _with_memory(
    config: RLConfig, model: Decoder, environments: Mapping[str, Environment], share: float
) -> RLConfig:  # fmt: skip
    """Engines that leave the learner its memory; frozen workers get as much as the policy."""
    has_workers = any(getattr(each, "uses_asides", False) for each in environments.values())
    if not has_workers or (config.parl is not None and config.parl.workers == "joint"):
        return replace(config, engine=_engine(config.engine, model, share))
    policy = _engine(config.engine, model, share / 2)
    return replace(
        config, engine=policy, worker_engine=_engine(config.worker_engine or config.engine, model, share / 2)
    )


def _engine(config: EngineConfig, model: Decoder, share: float) -> EngineConfig:
    """On a GPU the engine takes most of what is free, unless it is told; here a learner needs its share."""
    device = model.embed_tokens.weight.device
    if device.type != "cuda" or config.num_pages is not None or config.memory_gib is not None:
        return config
    free, _ = torch.cuda.mem_get_info(device)
    return replace(config, memory_gib=max(0.25, share * free / 2**30))


def _supervised(config: RLRunConfig, tokenizer: Tokenizer) -> ChatRows | None:
    if not config.ptx.sources:
        return None
    return ChatRows(config.ptx, tokenizer, seq_len=config.rl.learner.row_tokens, seed=config.rl.seed)


def _introduction(config: RLRunConfig, policy: Policy, longest: Mapping[str, int]) -> str:
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    rl = config.rl
    prompts = ", ".join(
        f"{name} (prompts of about {length} tokens)" if length else name for name, length in longest.items()
    )  # fmt: skip
    where = f", played by {rl.processes} process{'es' * (rl.processes > 1)}" if rl.processes else ""
    return (
        f"{config.name}: {parameters:,} parameters from {config.start_from or 'a tiny model of its own'}, on "
        f"{policy.model.embed_tokens.weight.device}\n"
        f"{prompts}; {rl.tasks} tasks of {rl.rollout.group_size} samples an iteration, objective "
        f"{rl.learner.objective.kind}{', overlapped' if rl.overlap else ''}{where}"
    )


def _summary(config: RLRunConfig, folder: Path, report: Path, seconds: float) -> dict[str, Any]:
    evaluations = read_evaluations(folder)
    records = [json.loads(line) for line in (folder / RECORDS).read_text(encoding="utf-8").splitlines()]
    failures: dict[str, int] = {}
    for record in records:
        for kind, count in record["failures"].items():
            failures[kind] = failures.get(kind, 0) + count

    def rewards(record: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: {key: numbers.get(key) for key in ("count", "reward", "gain", "looking")}
            for name, numbers in record["environments"].items()
        }

    return {
        "name": config.name,
        "folder": str(folder),
        "iterations": len(records),
        "first_reward": records[0].get("reward") if records else None,
        "last_reward": records[-1].get("reward") if records else None,
        "before": rewards(evaluations[0]) if evaluations else None,
        "after": rewards(evaluations[-1]) if evaluations else None,
        "failures": failures,
        "seconds": round(seconds, 1),
        "report": str(report),
    }
