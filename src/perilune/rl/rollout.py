"""Many episodes at once: every one a coroutine, all of them decoding in one engine.

    rollouts = Rollouts(engine, tokenizer, {"arithmetic": Arithmetic()}, RolloutConfig(group_size=8))
    collected = await rollouts.collect([Job(...), ...], iteration=3)

What is promised: an environment that raises, hangs or asks Python to exit, a judge that raises or says NaN costs its
own episode, is counted by its kind and told with an example, and nothing else is lost: of an episode that could not be
judged, tokens and transcript are kept, so that it can be judged when the judge is mended. The outcome of an episode
depends on its job and the weights alone, not on what runs beside it. Trajectories come back in the order of the jobs.

All episodes share one thread, as coroutines do: one that computes or sleeps without `await` holds up the others, and no
limit of time reaches it.

Partial rollouts (arXiv 2501.12599): with `iteration_tokens` an episode may sample so many tokens per iteration; one
that is not over then comes back as parked, and is continued by giving its job again.
"""

import _thread
import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from perilune.data.tokenizer import Tokenizer
from perilune.rl.environment import Environment, EpisodeOver, Task, judged, reward_of
from perilune.rl.judge_processes import is_judged_apart, judged_apart
from perilune.rl.talk import EngineTalk, EpisodeParked, TalkConfig, TalkError, Turn, Workers
from perilune.rl.trajectory import Trajectory
from perilune.serve.async_engine import AsyncEngine, EngineDead
from perilune.serve.sessions import Sessions

if TYPE_CHECKING:
    from perilune.rl.gateway import Gateway

SHOWN_FAILURES = 5
PATIENCE = 1.0
"""Seconds that an episode which is ended has to leave."""
JUDGES = 16
"""That judge at a time."""
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    group_size: int = 8
    """Samples of one task: K."""
    concurrency: int = 256
    """Episodes at a time."""
    episode_seconds: float = 600.0
    """Longer ones have hung. Time in the engine counts, so leave room for a busy one."""
    judge_seconds: float = 60.0
    iteration_tokens: int | None = None
    """Tokens an episode may sample in one iteration before it is parked; None: all it wants."""
    talk: TalkConfig = field(default_factory=TalkConfig)
    workers: TalkConfig = field(default_factory=TalkConfig)
    """Of one worker in an episode that has some."""

    def __post_init__(self) -> None:
        for name in ("group_size", "concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} is {getattr(self, name)!r}, expected at least 1")
        for name in ("episode_seconds", "judge_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"rollout.{name} is {getattr(self, name)!r}, expected more than 0")
        if self.iteration_tokens is not None and self.iteration_tokens < 1:
            raise ValueError(f"rollout.iteration_tokens is {self.iteration_tokens!r}, expected at least 1, or None")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One episode that is to be played, or played on."""

    environment: str
    task: Task
    sample: int
    seed: int
    iteration: int
    """In which it began: with `task` it names the group."""
    turns: tuple[Turn, ...] = ()
    """What the policy has said already."""
    asides: Mapping[str, tuple[Turn, ...]] = field(default_factory=dict)
    """What its workers have said, by name."""

    @property
    def name(self) -> str:
        return f"{self.environment}/{self.task.name}/{self.iteration}/{self.sample}"

    def plain(self) -> dict[str, Any]:
        """JSON, for a checkpoint."""
        task = {"name": self.task.name, "data": dict(self.task.data), "weights": dict(self.task.weights)}
        return {
            "environment": self.environment, "task": task, "sample": self.sample, "seed": self.seed,
            "iteration": self.iteration, "turns": [turn.plain() for turn in self.turns],
            "asides": {name: [turn.plain() for turn in turns] for name, turns in self.asides.items()},
        }  # fmt: skip

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "Job":
        return Job(
            environment=plain["environment"],
            task=Task(**plain["task"]),
            sample=plain["sample"],
            seed=plain["seed"],
            iteration=plain["iteration"],
            turns=tuple(Turn.of(turn) for turn in plain["turns"]),
            asides={name: tuple(map(Turn.of, turns)) for name, turns in plain.get("asides", {}).items()},
        )


@dataclass(frozen=True, kw_only=True)
class Collected:
    trajectories: tuple[Trajectory, ...]
    parked: tuple[Job, ...]
    failures: Counter[str]
    """Episodes lost, by what went wrong."""
    examples: tuple[str, ...]
    """The first of each kind and some more, in words: "[kind] episode: what happened"."""
    unjudged: tuple[Trajectory, ...] = ()
    """Of the episodes lost, those that were played and could not be judged: without facets, their reward 0."""
    num_empty: int = 0
    """Episodes in which the policy said nothing: kept, and judged as what they are."""
    num_again: int = 0
    """Episodes that were played again because the process that had them was lost (remote_engines.py)."""


class Failure(Exception):
    def __init__(self, kind: str, detail: str, played: Trajectory | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.played = played
        """The episode, where it was played to its end and not judged."""

    def __reduce__(self) -> tuple[type["Failure"], tuple[str, str, Trajectory | None]]:
        return Failure, (self.kind, str(self), self.played)  # it may have happened in another process


class Rollouts:
    def __init__(
        self,
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        environments: Mapping[str, Environment],
        config: RolloutConfig | None = None,
        *,
        workers: Workers | None = None,
    ) -> None:
        """`workers` play the asides of episodes, where an environment has them."""
        self._engine, self._tokenizer, self._workers = engine, tokenizer, workers
        self._environments = dict(environments)
        self._config = config or RolloutConfig()
        self._judges = asyncio.Semaphore(JUDGES)
        self._gateway: Gateway | None = None

    async def collect(self, jobs: Sequence[Job], *, iteration: int) -> Collected:
        """Play all of them. Raises EngineDead when the engine has stopped for good."""
        gate = asyncio.Semaphore(self._config.concurrency)

        async def one(job: Job) -> Trajectory | Job | Failure:
            async with gate:
                return await self.play(job)

        try:
            return collected(jobs, await asyncio.gather(*(one(job) for job in jobs)))
        finally:
            await self.close()

    async def close(self) -> None:
        """End what was opened for programs, if anything; it opens again when it is needed."""
        closing, self._gateway = self._gateway, None
        if closing is not None:
            await closing.close()

    async def play(self, job: Job) -> "Trajectory | Job | Failure":
        """One episode: how it went, where it was parked, or what went wrong."""
        try:
            return await self._episode(job)
        except Failure as failure:
            return failure

    def _opened_gateway(self) -> "Gateway":
        """Made when the first episode has a program to serve: others do without a server."""
        if self._gateway is None:
            from perilune.rl.gateway import Gateway

            talk = self._config.talk
            self._gateway = Gateway(
                self._engine, self._tokenizer, thinking=talk.thinking, processor=talk.processor
            )  # fmt: skip
        return self._gateway

    async def _episode(self, job: Job) -> Trajectory | Job:
        config = self._config
        environment = self._environments[job.environment]
        # Sessions of its own: a store for all would drop the oldest when there are many, and looks at each of them.
        talk = EngineTalk(
            self._engine, Sessions(self._tokenizer), self._tokenizer, config.talk,
            name=job.name, seed=job.seed, turns=job.turns, allowance=config.iteration_tokens,
            workers=self._workers, asides=job.asides, gateway=self._opened_gateway,
        )  # fmt: skip
        try:
            await limited(self._played(environment, job, talk), config.episode_seconds)
        except EpisodeParked:
            pass
        finally:
            talk.close()
        if talk.is_parked:  # also where the environment took the exception for one of its own
            return replace(job, turns=tuple(talk.turns), asides=talk.aside_turns)
        trajectory = Trajectory(
            environment=job.environment,
            task=job.task.name,
            task_data=job.task.data,
            weights=job.task.weights,
            sample=job.sample,
            seed=job.seed,
            iteration=job.iteration,
            branches=talk.branches,
            messages=tuple(talk.messages),
            facets={},
            reward=0.0,
            finish="length" if talk.finish == "length" else "stop",
            events=tuple(talk.events),
        )
        try:
            facets, reward = await self._judged(environment, job, talk)
        except Failure as failure:
            raise Failure(failure.kind, str(failure), trajectory) from failure
        return replace(trajectory, facets=facets, reward=reward)

    async def _played(self, environment: Environment, job: Job, talk: EngineTalk) -> None:
        try:
            await environment.episode(job.task, talk)
        except (EpisodeOver, EngineDead) as passing:
            if isinstance(passing, EpisodeOver) and not isinstance(passing, EpisodeParked):
                return
            raise
        except TalkError as error:
            raise Failure("engine" if "engine failed" in str(error) else "not repeatable", str(error)) from error
        except (Exception, SystemExit) as error:
            raise Failure("environment", f"{type(error).__name__}: {error}") from error

    async def _judged(self, environment: Environment, job: Job, talk: EngineTalk) -> tuple[dict[str, float], float]:
        """In a thread: a judge may compute long. One that hangs keeps its thread, and costs nothing else."""
        seconds = self._config.judge_seconds
        # A judge in a process of its own has a clock there, which does not count how long it waited for a process.
        limit = None if is_judged_apart(environment) else seconds
        hung = Failure("judge hung", f"no verdict after {seconds:g} s")
        clock = asyncio.timeout(limit)
        try:
            async with self._judges, clock:
                facets = await in_thread(
                    lambda: judged_apart(environment, job.task, talk.messages, talk.events, seconds=seconds)
                )
            reward = reward_of(job.task, facets)
        except TimeoutError as error:
            if limit is None or clock.expired():
                raise hung from None
            raise Failure("judge", f"{type(error).__name__}: {error}") from error  # one of the judge's own
        except Exception as error:
            raise Failure("judge", f"{type(error).__name__}: {error}") from error
        if not math.isfinite(reward) or not all(math.isfinite(value) for value in facets.values()):
            raise Failure("reward", f"the reward is {reward!r} with facets {facets!r}, expected finite numbers")
        return facets, reward


async def limited(work: Coroutine[Any, Any, None], seconds: float) -> None:
    """Wait for it, at most so long; Failure "hung" then, also where it does not let itself be cancelled: it is left
    behind, and what it asks for is not answered any more."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE)
        raise
    if not done:
        task.cancel()
        await asyncio.wait({task}, timeout=PATIENCE)
        if task.done() and not task.cancelled():
            task.exception()  # seen, so that nobody is warned about it
        raise Failure("hung", f"not over after {seconds:g} s")
    if task.cancelled():  # by the environment itself: nobody else had a reason to
        raise Failure("environment", "CancelledError: it cancelled itself")
    task.result()


def collected(jobs: Sequence[Job], found: Sequence[Trajectory | Job | Failure]) -> Collected:
    """What became of jobs, in their order."""
    failures = [(job, each) for job, each in zip(jobs, found, strict=True) if isinstance(each, Failure)]
    trajectories = tuple(each for each in found if isinstance(each, Trajectory))
    return Collected(
        trajectories=trajectories,
        parked=tuple(each for each in found if isinstance(each, Job)),
        failures=Counter(failure.kind for _, failure in failures),
        unjudged=tuple(failure.played for _, failure in failures if failure.played is not None),
        examples=_examples(failures),
        num_empty=sum(said_nothing(trajectory) for trajectory in trajectories),
    )


def _examples(failures: Sequence[tuple[Job, Failure]]) -> tuple[str, ...]:
    first = {failure.kind: (job, failure) for job, failure in reversed(failures)}
    others = [pair for pair in failures if pair not in first.values()]
    chosen = [*first.values(), *others[: max(0, SHOWN_FAILURES - len(first))]]
    return tuple(f"[{failure.kind}] {job.name}: {failure}" for job, failure in chosen)


async def in_thread(call: Callable[[], Result]) -> Result:
    """What `call` returns, from a thread of its own. One that never ends is left behind, also when the process ends;
    a pool would run out of threads, and wait for them at its end."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_exception(error) if error is not None else answer.set_result(result)  # pyrefly: ignore

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except BaseException as problem:
            # Neither may reach the loop as it is: a StopIteration cannot be set, and a SystemExit would end the run.
            is_plain = isinstance(problem, Exception) and not isinstance(problem, StopIteration)
            error = problem if is_plain else RuntimeError(f"{type(problem).__name__}: {problem}")
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits any more
            loop.call_soon_threadsafe(settle, result, error)

    # Not threading.Thread: its start waits until the thread runs, and every episode with it while others compute.
    _thread.start_new_thread(work, ())
    return await answer


def said_nothing(trajectory: Trajectory) -> bool:
    """Whether the policy wrote no text and called no tool: it was not asked, or ended its turn at once."""
    said = [message for message in trajectory.messages if message.get("role") == "assistant"]
    return not any(message.get("content") or message.get("tool_calls") for message in said)


def replayed(environment: Environment, trajectory: Trajectory) -> tuple[dict[str, float], float]:
    """Facets and reward of a stored trajectory, judged again from what is stored: the same bits."""
    task = Task(name=trajectory.task, data=trajectory.task_data, weights=trajectory.weights)
    facets = judged(environment, task, trajectory.messages, trajectory.events)
    return facets, reward_of(task, facets)
