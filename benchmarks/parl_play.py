"""Trained arms of benchmarks/parl.py at test tasks: at every cap, timed on a quiet machine all at once and one question
at a time, and the serial agent with N samples for as many tokens as the swarm writes. No script of its own.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parl_arms import (
    CAPS,
    OPENING_SECONDS,
    SERIAL_CAPS,
    Settings,
    arm_of,
    device_of,
    given,
    interval,
    iterations_done,
    left,
    name_of,
    record,
    rl_config,
    start_of,
    stop_here,
    wide_search,
)
from rl_rows import read_rows, say

from perilune.rl.environment import OUTCOME, Task
from perilune.rl.environments.wide_search import CRITICAL_STEPS, WideSearch
from perilune.rl.parl import by_kind
from perilune.rl.rollout import Collected, Job, Rollouts
from perilune.rl.talk import TalkConfig, Workers
from perilune.rl.trajectory import Trajectory
from perilune.rl.workers import frozen_workers
from perilune.serve.async_engine import AsyncEngine
from perilune.serve.engine import Engine
from perilune.train import load_run

FIRST_SECONDS = 30.0
"""What the first cap of a call is taken to need; each one after that twice as long as the one before, at most the limit
of an episode."""
SERVED_CAPS, SERVED_SERIAL_CAPS = (1.0, 0.5), (1.0, 2.0, 1000.0)
"""Times the cap, at which the seconds of all wide tasks at once are measured."""
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Played:
    """Episodes at one cap. Wide tasks are a batch of their own, the others one after it."""

    cap: float
    trajectories: tuple[Trajectory, ...]
    failures: Counter[str]
    wide_seconds: float
    seconds: float
    each_seconds: tuple[float, ...] = ()
    """Of every wide task, where they were played one after another."""

    @property
    def wide(self) -> list[Trajectory]:
        return [each for each in self.trajectories if each.task_data["kind"] == "wide"]


def tasks_at(settings: Settings, cap: float) -> tuple[list[Task], list[Task]]:
    """Wide test tasks, and the others: the same things are asked at every cap. Where spare steps limit the others they
    have as many steps above the cap as at it, and are not played again."""
    environment = wide_search(settings, cap)
    tasks = [environment.task(number, "test") for number in range(settings.tested)]
    others = [] if cap > 1 and settings.spare_steps is not None else [each for each in tasks if not _is_wide(each)]
    return [each for each in tasks if _is_wide(each)], others


def _is_wide(task: Task) -> bool:
    return task.data["kind"] == "wide"


def tested_talk(settings: Settings, trained: TalkConfig) -> TalkConfig:
    """The cap alone ends an episode: an agent that works alone has as many turns as the cap has steps, and more."""
    return trained if settings.tiny else replace(trained, max_tokens=8192, max_turns=128)


async def play(
    settings: Settings,
    caps: Sequence[float],
    tell: Callable[[Played], None],
    *,
    samples: int = 1,
    temperature: float = 0.0,
    wide_only: bool = False,
    timed: bool = False,
    one_by_one: bool = False,
) -> None:
    """Test tasks by the trained arm at every cap; `tell` hears of each. SystemExit AGAIN before a cap that there is no
    time for. `timed`: at every cap wide tasks are played once before, so that nothing is new to the engine.
    `one_by_one`: wide tasks alone, each when the one before it is over."""
    device, config = device_of(settings), rl_config(settings)
    if not (done := iterations_done(settings)):
        raise SystemExit(f"{str(settings.out)!r} has no {name_of(settings)}: train the arm first")
    if done < settings.iterations and not settings.now:
        raise SystemExit(
            f"{name_of(settings)} has {done} of {settings.iterations} iterations: train it to its end, or test it as "
            "it is with --now"
        )
    if left(settings) < OPENING_SECONDS + FIRST_SECONDS:
        stop_here(settings, f"{left(settings):.0f} s are too few to open it and test")
    model, tokenizer, _ = load_run(settings.out / name_of(settings), device=device)
    frozen, frozen_tokenizer, _ = load_run(settings.out / start_of(settings), device=device)
    talk = replace(tested_talk(settings, config.rollout.talk), temperature=temperature)
    told = replace(config.rollout.workers, temperature=temperature)
    engine = AsyncEngine(Engine(model, tokenizer, replace(config.engine, max_queue=1 << 20), device=device))
    if settings.arm == "joint":
        workers = Workers(engine=engine, tokenizer=tokenizer, config=told)
    else:
        workers = frozen_workers(frozen, frozen_tokenizer, config.worker_engine or config.engine, told, device=device)
    say(f"{name_of(settings)}: engines are there")

    async def batch(environment: WideSearch, tasks: Sequence[Task]) -> tuple[Collected, float]:
        rollouts = Rollouts(
            engine, tokenizer, {"wide_search": environment}, replace(config.rollout, talk=talk), workers=workers
        )
        jobs = [
            Job(environment="wide_search", task=task, sample=sample, seed=settings.seed, iteration=-1)
            for task in tasks for sample in range(samples)
        ]  # fmt: skip
        began = time.monotonic()
        return await rollouts.collect(jobs, iteration=0), time.monotonic() - began

    async def alone(cap: float) -> Played:
        environment, (wide, _) = wide_search(settings, cap), tasks_at(settings, cap)
        for task in {len(task.data["items"]): task for task in wide}.values():
            await batch(environment, [task])  # of every size one: what is new to the engine is recorded and compiled
        played = list[tuple[Collected, float]]()
        for task in wide:
            if played and left(settings) < 3 * max(seconds for _, seconds in played):
                say(f"{name_of(settings)}: {len(played)} of {len(wide)} tasks, there is no time for more")
                break
            played.append(await batch(environment, [task]))
        each = tuple(seconds for _, seconds in played)
        trajectories = tuple(found for collected, _ in played for found in collected.trajectories)
        failures = sum((Counter(collected.failures) for collected, _ in played), Counter[str]())
        return Played(cap=cap, trajectories=trajectories, failures=failures, wide_seconds=sum(each), seconds=sum(each),
                      each_seconds=each)  # fmt: skip

    expected = FIRST_SECONDS
    try:
        if one_by_one:
            for cap in caps:
                tell(await alone(cap))
            return
        for cap in caps:
            if left(settings) < expected:
                stop_here(settings, f"{left(settings):.0f} s are too few to test at {cap:g} times the cap")
            wide, others = tasks_at(settings, cap)
            if timed or (cap == caps[0] and not wide_only):
                # Shapes that are new are recorded and compiled outside of the seconds.
                await batch(wide_search(settings, cap), wide)
            collected, wide_seconds = await batch(wide_search(settings, cap), wide)
            trajectories, failures, seconds = collected.trajectories, Counter(collected.failures), wide_seconds
            if others and not wide_only:
                more, others_seconds = await batch(wide_search(settings, cap), others)
                trajectories, failures = (*trajectories, *more.trajectories), failures + Counter(more.failures)
                seconds += others_seconds
            tell(Played(cap=cap, trajectories=trajectories, failures=failures, wide_seconds=wide_seconds,
                        seconds=seconds))  # fmt: skip
            expected = min(2 * seconds, config.rollout.episode_seconds)
    finally:
        await engine.close()
        if workers.engine is not engine:
            await workers.engine.close()


def is_tested(settings: Settings, cap: float, rows: Sequence[Row]) -> bool:
    """Whether a row says what the arm does at this cap, as it is trained now and with these settings."""
    wanted = {
        "row": "test", "name": name_of(settings), "cap": cap, "tiny": settings.tiny, "tested": settings.tested,
        "iterations": iterations_done(settings), **given(settings),
    }  # fmt: skip
    return any(all(row.get(name) == value for name, value in wanted.items()) for row in rows)


def test(settings: Settings) -> None:
    """At every cap that has no row yet."""
    all_caps, rows = SERIAL_CAPS if settings.arm == "serial" else CAPS, read_rows(settings.results)
    caps = [cap for cap in all_caps if settings.again or not is_tested(settings, cap, rows)]
    if len(caps) < len(all_caps):
        skipped = ", ".join(f"{cap:g}" for cap in all_caps if cap not in caps)
        say(f"{name_of(settings)}: tested already at {skipped} times the cap (--again tests it anew)")
    if not caps:
        return

    def tell(played: Played) -> None:
        row = {
            "row": "test", "name": name_of(settings), "arm": arm_of(settings), "cap": played.cap,
            "critical_cap": round(CRITICAL_STEPS * played.cap), "kinds": by_kind(played.trajectories),
            "wide_f1": interval([each.facets[OUTCOME] for each in played.wide]),
            "wide_f1s": f1s_of(settings, played), "wide_seconds": round(played.wide_seconds, 2),
            "play_seconds": round(played.seconds, 2), "episodes": len(played.trajectories),
            "failures": dict(played.failures), "iterations": iterations_done(settings), "tested": settings.tested,
            **given(settings),
        }  # fmt: skip
        record(settings, row, played.seconds)

    asyncio.run(play(settings, caps, tell))


def f1s_of(settings: Settings, played: Played) -> dict[str, float]:
    """Of the wide tasks, by their place among them: what an interval over tasks is drawn from. A task whose episode was
    lost has none."""
    places = {task.name: place for place, task in enumerate(tasks_at(settings, played.cap)[0])}
    return {str(places[each.task]): round(each.facets[OUTCOME], 4) for each in played.wide}


# On a quiet machine ---------------------------------------------------------------------------------------------------


def served(settings: Settings) -> None:
    """Seconds of all wide tasks at once, at the caps that serving seconds are compared at. Tests of arms that end side
    by side share a card, each in other company: this is to be run alone."""
    caps = SERVED_SERIAL_CAPS if settings.arm == "serial" else SERVED_CAPS

    def tell(played: Played) -> None:
        row = {
            "row": "served", "name": name_of(settings), "arm": arm_of(settings), "cap": played.cap,
            "kinds": by_kind(played.trajectories), "wide_f1": interval([each.facets[OUTCOME] for each in played.wide]),
            "wide_seconds": round(played.wide_seconds, 3), "episodes": len(played.trajectories),
            "failures": dict(played.failures), "iterations": iterations_done(settings), "tested": settings.tested,
            **given(settings),
        }  # fmt: skip
        record(settings, row, played.seconds)

    asyncio.run(play(settings, caps, tell, wide_only=True, timed=True))


def one_by_one(settings: Settings) -> None:
    """How long one who asks has to wait, when nobody else does: wide tasks one after another. The swarm at the cap, the
    serial agent with as many steps as it likes: it takes those to come near. To be run alone on a machine."""
    cap = max(SERIAL_CAPS) if settings.arm == "serial" else 1.0

    def tell(played: Played) -> None:
        row = {
            "row": "one-by-one", "name": name_of(settings), "arm": arm_of(settings), "cap": cap,
            "kinds": by_kind(played.trajectories), "wide_f1": interval([each.facets[OUTCOME] for each in played.wide]),
            "each_seconds": interval(played.each_seconds), "slowest_seconds": round(max(played.each_seconds), 4),
            "episodes": len(played.trajectories), "failures": dict(played.failures),
            "iterations": iterations_done(settings), "tested": settings.tested, **given(settings),
        }  # fmt: skip
        record(settings, row, played.seconds)

    asyncio.run(play(settings, (cap,), tell, wide_only=True, one_by_one=True))


# As many tokens -------------------------------------------------------------------------------------------------------


def best_of(settings: Settings) -> None:
    """The best of N serial samples by the outcome itself, which nobody has at test time: more than fair to it. N
    samples are as many tokens as the swarm, workers included, writes for a wide task."""
    serial = replace(settings, arm="serial")
    swarm_row, serial_row = (_tested_row(replace(settings, arm=arm)) for arm in ("full", "serial"))
    tokens, own = (row["kinds"]["wide"]["tokens"] for row in (swarm_row, serial_row))
    wanted = tokens / max(1.0, own)
    count = max(1, min(settings.most, round(wanted)))
    if count < round(wanted):
        say(
            f"best-of: as many tokens are {wanted:.1f} serial samples, more than --most {settings.most}: {count} played"
        )
    found: list[Played] = []
    asyncio.run(play(serial, (1.0,), found.append, samples=count, temperature=1.0, wide_only=True))
    (played,) = found
    groups: dict[str, list[Trajectory]] = {}
    for each in played.wide:
        groups.setdefault(each.task, []).append(each)
    best = [max(each.facets[OUTCOME] for each in group) for group in groups.values()]
    spent = [sum(each.facets["tokens"] for each in group) for group in groups.values()]
    row = {
        "row": "best-of", "name": name_of(serial), "arm": "serial", "cap": 1.0, "samples_each": count,
        "samples_wanted": round(wanted, 2), "is_clipped": count < round(wanted),
        "swarm_tokens": round(tokens, 1), "serial_tokens": round(own, 1),
        "spent_tokens": round(sum(spent) / max(1, len(spent)), 1),
        "wide_f1": interval(best), "swarm_f1": swarm_row["wide_f1"],
    }  # fmt: skip
    record(settings, row, played.seconds)


def _tested_row(settings: Settings) -> Row:
    wanted = {"row": "test", "name": name_of(settings), "cap": 1.0, "tiny": settings.tiny}
    for row in read_rows(settings.results):
        if all(row.get(name) == value for name, value in wanted.items()) and "wide" in row["kinds"]:
            return row
    raise SystemExit(
        f"there is no test of the arm {settings.arm} yet: python benchmarks/parl.py test --arm {settings.arm}"
    )
