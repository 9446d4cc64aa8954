"""The loop of reinforcement learning: draw tasks, play them, learn, hand the weights to the engine, again.

    async with Loop(model, tokenizer, {"arithmetic": Arithmetic()}, RLConfig(...), folder="runs/rl") as loop:
        async for record in loop.run(): ...

The engine has a copy of the model, in this process or in each of `processes` others; after every iteration it gets the
new weights in place, and their version is stamped on what it samples. Log-probs are recorded when tokens are sampled,
never recomputed: how far trainer and engine differ is in every record (`gap`; 0 with a deterministic engine on a CPU).

A run is a function of its config, seed and starting weights. Tasks, seeds of replies and the order of everything follow
from counters; what waits (parked episodes, incomplete groups, success rates, budgets) is in the checkpoint. With a
deterministic engine a run that is killed and resumed gives the same bits.

With `overlap` the engine plays the episodes of the next iteration while the learner trains on those of this one. Their
weights are then one version behind, never more: the engine gets new weights between two iterations only. A checkpoint
waits for what is under way and holds it, so that a resumed run learns from the very same episodes.
"""

import asyncio
import contextlib
import gc
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from perilune.data.chat_rows import ChatRows
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.rl.environment import OUTCOME, Environment, Split, Task
from perilune.rl.groups import GroupConfig, Groups, means
from perilune.rl.learner import Learner, LearnerConfig, Sample, Update
from perilune.rl.parl import Parl, ParlConfig, by_kind
from perilune.rl.priorities import Priorities, PriorityConfig
from perilune.rl.remote_engines import RemoteEngines
from perilune.rl.remote_rollouts import rollouts_on
from perilune.rl.rollout import Collected, Job, RolloutConfig
from perilune.rl.talk import Workers
from perilune.rl.trajectory import Trajectory, load_trajectories, save_trajectories
from perilune.rl.workers import QUEUE, frozen_copy, frozen_workers, load_workers, save_workers
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine, EngineConfig
from perilune.train import checkpoint, random_state

RECORDS = "records.jsonl"
CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
NOT_MADE = "task not made"
"""What is counted beside episodes that were lost."""
UNJUDGED = "unjudged"
"""Episodes that were played and could not be judged, by iteration."""
WAITING = "waiting.jsonl"
AHEAD = "ahead.jsonl"
"""Episodes of the next iteration, with overlap."""


class LoopError(RuntimeError):
    """A run that cannot begin or go on; the message says why."""


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    iterations: int = 100
    tasks: int = 16
    """New groups in an iteration, over all environments."""
    pool: int = 1024
    """Tasks of each environment that training draws from."""
    updates: int = 1
    """Optimizer steps in an iteration: its samples are cut into so many parts."""
    warmup: int = 5
    """Iterations until the full learning rate."""
    cooldown: int = 0
    """Iterations at the end, at most half of them all, in which the learning rate falls to 0: updates of a fixed size,
    such as Muon's, are noise of that size where there is little left to learn."""
    overlap: bool = False
    """Play the next iteration while this one is learnt from: weights are one version behind."""
    processes: int = 0
    """That play episodes, through Ray, each with an engine; 0: this one alone. Ray needs the extra 'scale'."""
    process_gpus: float = 1.0
    """Of a GPU, for each of them, where the model is on one."""
    seed: int = 0
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    groups: GroupConfig = field(default_factory=GroupConfig)
    priorities: PriorityConfig = field(default_factory=PriorityConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    worker_engine: EngineConfig | None = None
    """That of frozen workers, where an environment has some; None: like `engine`."""
    parl: ParlConfig | None = None
    """Rewards for working in parallel, and who the workers are; None: environments pay as they like."""
    checkpoint_every: int = 25
    """Iterations; 0: only at the end."""
    keep_trajectories: bool = True

    def __post_init__(self) -> None:
        for name in ("iterations", "tasks", "pool", "updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"rl.{name} is {getattr(self, name)!r}, expected at least 1")
        for name in ("warmup", "cooldown", "checkpoint_every", "processes", "process_gpus"):
            if getattr(self, name) < 0:
                raise ValueError(f"rl.{name} is {getattr(self, name)!r}, expected 0 or more")
        if self.overlap and self.groups.max_staleness < 1:
            raise ValueError(
                f"rl.overlap is True and groups.max_staleness is {self.groups.max_staleness!r}: expected at least 1, "
                "since overlapped episodes are one version behind"
            )

    def rate(self, iteration: int) -> float:
        """Which share of the learning rate an iteration has."""
        rise = (iteration + 1) / self.warmup if self.warmup else 1.0
        cooldown = min(self.cooldown, self.iterations // 2)
        fall = (self.iterations - iteration) / (cooldown + 1) if cooldown else 1.0
        return max(0.0, min(1.0, rise, fall))


@dataclass(frozen=True, kw_only=True)
class Rolled:
    """The episodes of one iteration, as they came back."""

    jobs: list[Job]
    collected: Collected
    seconds: float

    def plain(self) -> dict[str, Any]:
        """JSON, for a checkpoint; trajectories lie beside it."""
        found = self.collected
        return {
            "jobs": [job.plain() for job in self.jobs], "parked": [job.plain() for job in found.parked],
            "failures": dict(found.failures), "examples": list(found.examples), "empty": found.num_empty,
            "again": found.num_again, "seconds": self.seconds,
        }  # fmt: skip

    @staticmethod
    def of(plain: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> "Rolled":
        collected = Collected(
            trajectories=tuple(trajectories), parked=tuple(map(Job.of, plain["parked"])),
            failures=Counter(plain["failures"]), examples=tuple(plain["examples"]), num_empty=plain["empty"],
            num_again=plain["again"],
        )  # fmt: skip
        return Rolled(jobs=[Job.of(each) for each in plain["jobs"]], collected=collected, seconds=plain["seconds"])


class Loop:
    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        environments: Mapping[str, Environment],
        config: RLConfig,
        *,
        folder: str | Path,
        resume: bool = False,
        ptx: ChatRows | None = None,
        about: Mapping[str, Any] | None = None,
        workers: tuple[Decoder, Tokenizer] | None = None,
    ) -> None:
        """`ptx`: supervised rows, one for every update. `about` goes into the state of every checkpoint. `workers`: the
        model of frozen workers, where an environment has some; None: as `model` is now."""
        if not environments:
            raise LoopError("there is no environment to train in")
        self.config, self.folder = config, Path(folder)
        self._environments, self._tokenizer = dict(environments), tokenizer
        self._ptx, self._about = ptx, dict(about or {})
        model.deterministic = config.engine.deterministic
        self.learner = Learner(model, config.learner)
        engine, rollout = config.engine, config.rollout
        if config.learner.routing_replay or rollout.talk.record_routes:
            engine = replace(engine, record_routes=True)
            rollout = replace(rollout, talk=replace(rollout.talk, record_routes=True))
        has_workers = any(getattr(each, "uses_asides", False) for each in environments.values())
        is_joint = config.parl is not None and config.parl.workers == "joint"
        if has_workers and is_joint:
            engine = replace(engine, max_queue=QUEUE)
        self.engine: AsyncEngine | RemoteEngines
        if config.processes:
            self.engine = RemoteEngines(
                model, tokenizer, engine,
                processes=config.processes, device=self.learner.device, gpus=config.process_gpus,
            )  # fmt: skip
        else:
            self.engine = AsyncEngine(Engine(frozen_copy(model), tokenizer, engine, device=self.learner.device))
        self._frozen: tuple[Decoder, Tokenizer] | None = None
        """What the run has to keep of its workers, until it has."""
        self._workers: Workers | None = None
        if has_workers and is_joint:
            served: Any = self.engine
            self._workers = Workers(engine=served, tokenizer=tokenizer, config=rollout.workers, trained=True)
        elif has_workers:
            self._frozen = self._frozen_model(model, workers, resume=resume)
            self._workers = frozen_workers(
                *self._frozen, config.worker_engine or config.engine, rollout.workers, device=self.learner.device,
                remote=self.engine if isinstance(self.engine, RemoteEngines) else None,
            )  # fmt: skip
        self._rollouts = rollouts_on(self.engine, tokenizer, environments, rollout, workers=self._workers)
        self.groups = Groups(
            config.groups, config.rollout.group_size, scale=config.learner.objective.kind == "grpo"
        )  # fmt: skip
        self.priorities = {name: Priorities(config.priorities) for name in environments}
        self.iteration = 0
        self.parl = None if config.parl is None else Parl(config.parl)
        self._served_version = 0
        self._parked: list[Job] = []
        self._tasks: dict[str, list[Task]] = {}
        self._not_made: list[str] = []
        """Why tasks could not be made, since the last record."""
        self._ahead: asyncio.Future[Rolled] | None = None
        """The next iteration's episodes, under way or done, with overlap."""
        self._started = False
        self._resume = resume

    def _frozen_model(
        self, model: Decoder, given: tuple[Decoder, Tokenizer] | None, *, resume: bool
    ) -> tuple[Decoder, Tokenizer]:
        if not resume:
            return given or (frozen_copy(model), self._tokenizer)
        try:
            return load_workers(self.folder)
        except FileNotFoundError as error:
            raise LoopError(f"the run cannot be resumed: {error}") from error

    async def __aenter__(self) -> Self:
        if self._resume:
            await self._load()
        elif (self.folder / RECORDS).exists():
            raise LoopError(f"{str(self.folder)!r} already holds a run: resume it, or give another folder")
        elif self._frozen is not None:
            save_workers(self.folder, *self._frozen)
        self._frozen = None
        self.folder.mkdir(parents=True, exist_ok=True)
        self._started = True
        # Tokens are small objects, and many: collections would walk through all that torch has made, several times an
        # iteration (0.4 of 2.4 s on the host with 256 samples). What is here now is left alone until the loop is over.
        gc.collect()
        gc.freeze()
        return self

    async def __aexit__(self, *_: object) -> None:
        gc.unfreeze()
        if self._ahead is not None:
            self._ahead.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._ahead
        await self.engine.close()
        if self._workers is not None and not self._workers.trained:
            await self._workers.engine.close()

    async def run(self) -> AsyncIterator[dict[str, Any]]:
        """A record for every iteration. A checkpoint is written every now and then, and after the last."""
        assert self._started, "enter the loop with `async with` first"
        while self.iteration < self.config.iterations:
            record = await self.step()
            every = self.config.checkpoint_every
            if self.iteration == self.config.iterations or (every and self.iteration % every == 0):
                await self.save()
            yield record

    async def step(self) -> dict[str, Any]:
        """One iteration."""
        began = time.perf_counter()
        rolled = await (self._ahead or self._roll(self.iteration))
        self._ahead = None
        collected, waited = rolled.collected, time.perf_counter()
        self._parked = list(collected.parked)
        if self.parl is not None:
            self.parl.record(collected.trajectories, self.iteration)
        groups = self.groups.add(collected.trajectories, self._lost(rolled.jobs, collected))
        for group in groups:
            outcomes = [min(1.0, max(0.0, trajectory.facets.get(OUTCOME, 0.0))) for trajectory in group]
            self.priorities[group[0].environment].record(group[0].task, outcomes)
        samples = self.groups.samples(groups, iteration=self.iteration, version=self.iteration)
        if self.config.overlap:
            await self._hand_over()
            if self.iteration + 1 < self.config.iterations:
                self._ahead = asyncio.create_task(self._roll(self.iteration + 1))
        learning = time.perf_counter()
        updates = await asyncio.to_thread(self._learn, samples) if self.config.overlap else self._learn(samples)
        learnt = time.perf_counter()
        self.iteration += 1
        if not self.config.overlap:
            await self._hand_over()
        spent = {
            "seconds": time.perf_counter() - began,
            "wait_seconds": waited - began,
            "rollout_seconds": rolled.seconds,
            "learn_seconds": learnt - learning,
        }
        record = self._record(collected, updates, samples, spent)
        name = f"{self.iteration - 1:06d}.jsonl"
        if self.config.keep_trajectories:
            save_trajectories(self.folder / TRAJECTORIES / name, collected.trajectories)
        if collected.unjudged:
            save_trajectories(self.folder / UNJUDGED / name, collected.unjudged)
        with (self.folder / RECORDS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        return record

    async def evaluate(
        self,
        count: int | Mapping[str, int],
        *,
        split: Split = "test",
        temperature: float = 0.0,
        environments: Mapping[str, Environment] | None = None,
    ) -> Collected:
        """Episodes of the first `count` tasks of every environment, or of each by its name, not trained on, with the
        newest weights."""
        if self._ahead is not None:
            await asyncio.wait([self._ahead])  # they are to be all of one version
        await self._hand_over()
        config = self.config.rollout
        config = replace(config, talk=replace(config.talk, temperature=temperature), iteration_tokens=None)
        played = self._environments if environments is None else dict(environments)
        workers = self._workers
        if workers is not None:
            workers = replace(workers, config=replace(workers.config, temperature=temperature))
        rollouts = rollouts_on(self.engine, self._tokenizer, played, config, workers=workers)
        # An environment may have fewer tasks than asked for: each is played once.
        counts = {name: count if isinstance(count, int) else count[name] for name in played}
        tasks = {
            (name, task.name): task for name, each in played.items() for task in self._made(each, counts[name], split)
        }
        jobs = [
            Job(environment=name, task=task, sample=0, seed=self.config.seed, iteration=-1)
            for (name, _), task in tasks.items()
        ]
        return await rollouts.collect(jobs, iteration=self.iteration)

    # --- parts of an iteration ----------------------------------------------------------------------------------------

    async def _roll(self, iteration: int) -> Rolled:
        """Play on what is parked, and new tasks."""
        began = time.perf_counter()
        jobs = [*self._parked, *self._new_jobs(iteration)]
        collected = await self._rollouts.collect(jobs, iteration=iteration)
        return Rolled(jobs=jobs, collected=collected, seconds=time.perf_counter() - began)

    async def _hand_over(self) -> None:
        """The learner's weights to the engine, in place, unless it has them."""
        if self._served_version != self.iteration:
            await self.engine.load_weights(self.learner.model, self.iteration)
            self._served_version = self.iteration

    def _pool(self, name: str) -> list[Task]:
        """The tasks that training draws from: they never change."""
        if name not in self._tasks:
            self._tasks[name] = self._made(self._environments[name], self.config.pool, "train")
        return self._tasks[name]

    def _made(self, environment: Environment, count: int, split: Split) -> list[Task]:
        """The first tasks of a split; one that cannot be made is counted and left out. LoopError where none can."""
        tasks = []
        for number in range(count):
            try:
                tasks.append(environment.task(number, split))
            except Exception as error:
                why = f"{environment.name}, number {number} of {split}: {type(error).__name__}: {error}"
                self._not_made.append(why)
        if not tasks:
            raise LoopError(f"an environment makes no task: {self._not_made[-count]}")
        return tasks

    def _new_jobs(self, iteration: int) -> list[Job]:
        """K samples of each task drawn; environments take turns."""
        names = sorted(self._environments)
        jobs = []
        for place, name in enumerate(names):
            count = len(range(place, self.config.tasks, len(names)))
            tasks = self._pool(name)
            numbers = self.priorities[name].draw(
                [task.name for task in tasks], count, seed=self.config.seed, iteration=iteration
            )  # fmt: skip
            jobs += [
                Job(environment=name, task=task, sample=sample, seed=self.config.seed, iteration=iteration)
                for task in {tasks[number].name: self._paid(tasks[number], iteration) for number in numbers}.values()
                for sample in range(self.config.rollout.group_size)
            ]
        return jobs

    def _paid(self, task: Task, iteration: int) -> Task:
        return task if self.parl is None else self.parl.weighted(task, iteration)

    def _lost(self, jobs: Sequence[Job], collected: Collected) -> list[Job]:
        kept = {(each.environment, each.task, each.iteration, each.sample) for each in collected.trajectories}
        kept |= {(each.environment, each.task.name, each.iteration, each.sample) for each in collected.parked}
        return [job for job in jobs if (job.environment, job.task.name, job.iteration, job.sample) not in kept]

    def _learn(self, samples: Sequence[Sample]) -> list[Update]:
        parts = max(1, min(self.config.updates, len(samples)))
        scale = self.config.rate(self.iteration)
        updates = []
        for part in range(parts):
            row = self.iteration * self.config.updates + part
            ptx = None if self._ptx is None else self._ptx.batch(row, 1)
            updates.append(self.learner.update(samples[part::parts], ptx=ptx, lr_scale=scale))
        return updates

    def _record(
        self, collected: Collected, updates: Sequence[Update], samples: Sequence[Sample], spent: Mapping[str, float]
    ) -> dict[str, Any]:
        tokens = sum(update.tokens for update in updates)
        rolled = sum(trajectory.num_trained for trajectory in collected.trajectories)

        def mean(name: str) -> float:
            return sum(getattr(update, name) * update.tokens for update in updates) / tokens if tokens else 0.0

        not_made, self._not_made = self._not_made, []
        lost = collected.failures + Counter({NOT_MADE: len(not_made)})
        return {
            "iteration": self.iteration,
            **means(collected.trajectories),
            **({"kinds": kinds} if (kinds := by_kind(collected.trajectories)) else {}),
            **({} if self.parl is None else {"parl": self.parl.told(self.iteration - 1)}),
            "episodes": len(collected.trajectories),
            "parked": len(collected.parked),
            "failures": dict(lost),
            "examples": [*collected.examples, *(f"[{NOT_MADE}] {why}" for why in not_made[:1])],
            "empty": collected.num_empty,
            **({"played_again": collected.num_again} if self.config.processes else {}),
            "dropped": dict(self.groups.dropped),
            "trained_tokens": tokens,
            "loss": sum(update.loss for update in updates),
            "gap": mean("gap"),
            "largest_gap": max((update.largest_gap for update in updates), default=0.0),
            "clipped": mean("clipped"),
            "rate": self.config.rate(self.iteration - 1),
            "grad_norm": max((update.grad_norm for update in updates), default=0.0),
            "skipped": sum(update.skipped for update in updates),
            **({} if self._ptx is None else {"ptx_loss": _mean_of([update.ptx_loss for update in updates])}),
            "staleness": max((_staleness(sample, self.iteration - 1) for sample in samples), default=0),
            **{name: round(seconds, 4) for name, seconds in spent.items()},
            "waiting": round(1 - min(1.0, spent["learn_seconds"] / max(1e-9, spent["seconds"])), 4),
            "rollout_tokens_per_s": round(rolled / max(1e-9, spent["rollout_seconds"]), 1),
            "learn_tokens_per_s": round(tokens / max(1e-9, spent["learn_seconds"]), 1),
        }

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def save(self) -> None:
        """Weights, optimizer and everything that waits; complete or absent. What is being played ahead is waited for:
        it is part of the run."""
        ahead = None if self._ahead is None else await asyncio.shield(self._ahead)
        optimizer = self.learner.optimization.optimizer
        model = self.learner.model
        waiting = [trajectory for group in self.groups.waiting.values() for trajectory in group]
        kept = self.folder / CHECKPOINTS / f"{self.iteration:06d}-{WAITING}"
        save_trajectories(kept, waiting)
        played = kept.with_name(f"{self.iteration:06d}-{AHEAD}")
        if ahead is not None:
            save_trajectories(played, ahead.collected.trajectories)
        checkpoint.save(
            self.folder / CHECKPOINTS,
            step=self.iteration,
            tensors={
                **checkpoint.model_tensors(model),
                **checkpoint.optimizer_tensors(model, optimizer),
                **self.learner.optimization.clip_tensors(),
                **random_state.tensors(),
            },
            state={
                **self._about,
                "iteration": self.iteration,
                "optimizer_scalars": checkpoint.optimizer_scalars(model, optimizer),
                "parked": [job.plain() for job in self._parked],  # with overlap: what the next iteration began with
                "lost": [[*key, count] for key, count in self.groups.lost.items()],
                "waiting": kept.name,
                "ahead": None if ahead is None else {**ahead.plain(), "trajectories": played.name},
                "priorities": {name: each.state() for name, each in self.priorities.items()},
                "toggle": None if self.groups.toggle is None else self.groups.toggle.state(),
                "parl": None if self.parl is None else self.parl.state(),
            },
            keep_last=2,
            beside=[kept, *([] if ahead is None else [played])],
        )
        for name in (WAITING, AHEAD):
            for old in sorted(kept.parent.glob(f"*-{name}"))[:-2]:
                old.unlink()

    async def _load(self) -> None:
        found = await asyncio.to_thread(checkpoint.find, self.folder / CHECKPOINTS)
        if found is None:
            raise LoopError(f"{str(self.folder)!r} holds no checkpoint to resume from")
        state = found.state
        optimization = self.learner.optimization
        loaded = checkpoint.restore(found.folder, state, self.learner.model, optimization.optimizer)
        optimization.load_clip_tensors(loaded)
        self.iteration = state["iteration"]
        self._parked = [Job.of(plain) for plain in state["parked"]]
        self.groups.lost.update({(name, task, int(began)): count for name, task, began, count in state["lost"]})
        self.groups.add(load_trajectories(self.folder / CHECKPOINTS / state["waiting"]))
        for name, plain in state["priorities"].items():
            self.priorities[name].load_state(plain)
        if self.groups.toggle is not None and state["toggle"] is not None:
            self.groups.toggle.load_state(state["toggle"])
        if self.parl is not None and state.get("parl") is not None:
            self.parl.load_state(state["parl"])
        keep_records(self.folder / RECORDS, self.iteration)
        self._served_version = -1  # the engine still has what the model began with
        await self._hand_over()
        if (ahead := state.get("ahead")) is not None and self.config.overlap:
            trajectories = load_trajectories(self.folder / CHECKPOINTS / ahead["trajectories"])
            self._ahead = asyncio.get_running_loop().create_future()
            self._ahead.set_result(Rolled.of(ahead, trajectories))


def keep_records(path: Path, iteration: int) -> None:
    """Forget what came after an iteration, and a line that a kill left half-written."""
    kept = []
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["iteration"] <= iteration:
                kept.append(line)
    partial = path.with_name(f".{path.name}")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)


def _staleness(sample: Sample, version: int) -> int:
    """Versions that the oldest trained token of a sample is behind the weights that are trained."""
    return max(version - int(branch.versions[branch.mask].min()) for branch in sample.branches if branch.num_trained)


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
