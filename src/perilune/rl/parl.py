"""PARL: rewards that teach an orchestrator to work in parallel, and how they fade (arXiv 2602.02276).

    r = l1 r_parallel + l2 r_finish + r_perf          form "report": l1, l2 -> 0 during training
    R = l r_parallel + (1 - l) 1[success] Q           form "blog": l from 0.1 to 0

    r_parallel   facet `parallel`: workers that were started, against half of the items; fights serial collapse
    r_finish     facet `finish`: share of assigned tasks that ended with a result; fights workers for show
    r_perf       facet `outcome`; 1[success] Q is facet `success`

`economy` is our own, and 0 unless it is asked for: a share of the outcome for those who came to it with no more steps
of everybody than one agent needs. Where work is as good alone as shared out, such as that on three things, nothing else
says that workers are not worth it.

Facets are raw and stay in the trajectory, and so do the weights of the moment: a stored episode is judged again with
the same result though the weights have moved on since. All samples of a group have the weights of the iteration in
which it was drawn.

The weights fade linearly over `over` iterations. When that begins is decided by what has been learnt ("finish": the
running finish rate of assigned tasks has reached `finish_rate`, with at least `least_assigned` tasks an episode, so
that a few lucky ones do not count), by the clock ("clock": iteration `start`), or never. Weights that fade before the
skill is there leave nothing behind; after them, the cap of critical steps keeps parallel work worthwhile.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from perilune.rl.environment import OUTCOME, Task
from perilune.rl.trajectory import Trajectory

PARALLEL, FINISH, SUCCESS, ECONOMY = "parallel", "finish", "success", "economy"
Arm = Literal["full", "outcome", "no_finish", "instantiation", "blog", "economy"]
ARMS: tuple[Arm, ...] = ("full", "outcome", "no_finish", "instantiation", "blog", "economy")


@dataclass(frozen=True, kw_only=True)
class ParlConfig:
    form: Literal["report", "blog"] = "report"
    parallel: float = 0.5
    """l1 at the start; in the blog's form l."""
    finish: float = 0.5
    """l2 at the start; the blog's form has none."""
    outcome: float = 1.0
    """What the outcome counts for, throughout; 0 only to see what the other rewards teach by themselves."""
    economy: float = 0.0
    """What few steps of everybody count for, throughout and on all kinds of tasks."""
    kinds: tuple[str, ...] = ("wide",)
    """Kinds of tasks (data["kind"]) on which l1 and l2 count; empty: all. Elsewhere the outcome alone is paid."""
    anneal: Literal["finish", "clock", "never"] = "finish"
    finish_rate: float = 0.8
    least_assigned: float = 1.0
    """Tasks assigned in an episode, on average, below which the finish rate says nothing yet."""
    window: int = 5
    """Iterations that the running finish rate looks back."""
    start: int = 0
    """With "clock": the iteration in which the weights begin to fade."""
    over: int = 50
    """Iterations from full weights to none."""
    workers: Literal["frozen", "joint"] = "frozen"
    """Frozen: the weights the run began with (or those of workers_from), never trained. Joint: the policy itself."""
    workers_from: str = ""
    """Run or model folder of the frozen workers; empty: the weights the run begins with."""

    def __post_init__(self) -> None:
        for name in ("parallel", "finish", "outcome", "economy", "least_assigned"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"parl.{name} is {getattr(self, name)!r}, expected 0 or more")
        if self.form == "blog" and self.parallel > 1:
            raise ValueError(f"parl.parallel is {self.parallel!r}, expected at most 1 in the blog's form")
        if not 0 < self.finish_rate <= 1:
            raise ValueError(f"parl.finish_rate is {self.finish_rate!r}, expected a share above 0, at most 1")
        for name, least in (("window", 1), ("over", 1), ("start", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"parl.{name} is {getattr(self, name)!r}, expected at least {least}")
        if self.workers == "joint" and self.workers_from:
            raise ValueError(
                f"parl.workers_from is {self.workers_from!r} and parl.workers is 'joint': jointly trained workers are "
                "the policy itself; leave one of the two out"
            )


def arm(name: Arm, config: ParlConfig | None = None) -> ParlConfig:
    """The rewards of an arm of the experiment, everything else as in `config`."""
    config = config or ParlConfig()
    if name == "full":
        return replace(config, form="report")
    if name == "outcome":
        return replace(config, form="report", parallel=0.0, finish=0.0)
    if name == "no_finish":
        return replace(config, form="report", finish=0.0)
    if name == "instantiation":  # nothing but workers is paid for: for contrast
        return replace(config, form="report", finish=0.0, outcome=0.0, anneal="never")
    if name == "blog":
        return replace(config, form="blog", parallel=0.1, finish=0.0)
    if name == "economy":
        return replace(config, form="report", economy=0.1)
    raise ValueError(f"unknown arm {name!r}: known are {', '.join(ARMS)}")


@dataclass
class Parl:
    """The weights of a run as they fade. `state` goes into a checkpoint: a resumed run has the same weights."""

    config: ParlConfig
    began: int | None = None
    """The iteration in which they begin to fade, once that is known."""
    recent: list[tuple[float, float, int]] = field(default_factory=list)
    """Finished tasks, assigned tasks and episodes of the last iterations."""

    def __post_init__(self) -> None:
        if self.config.anneal == "clock":
            self.began = self.config.start

    def share(self, iteration: int) -> float:
        """What is left of the weights: 1 at first, 0 at the end."""
        if self.began is None:
            return 1.0
        return min(1.0, max(0.0, 1.0 - (iteration - self.began) / self.config.over))

    def weights(self, iteration: int, kind: str | None = None) -> dict[str, float]:
        """Of the facets, for a task of this kind."""
        config, share = self.config, self.share(iteration)
        counts = not config.kinds or kind in config.kinds
        parallel, finish = (share * config.parallel, share * config.finish) if counts else (0.0, 0.0)
        economy = {ECONOMY: config.economy} if config.economy else {}
        if config.form == "blog":
            return {PARALLEL: parallel, SUCCESS: config.outcome * (1.0 - parallel), **economy}
        return {FINISH: finish, OUTCOME: config.outcome, PARALLEL: parallel, **economy}

    def weighted(self, task: Task, iteration: int) -> Task:
        """The task as it is paid for in this iteration."""
        return replace(task, weights=self.weights(iteration, task.data.get("kind")))

    @property
    def finish_rate(self) -> float | None:
        """Of the tasks assigned lately; None while there are too few."""
        finished, assigned, episodes = (sum(each[place] for each in self.recent) for place in range(3))
        if not episodes or not assigned or assigned < self.config.least_assigned * episodes:
            return None
        return finished / assigned

    def record(self, trajectories: Sequence[Trajectory], iteration: int) -> None:
        """Look at an iteration's episodes: of the tasks that l2 is paid on."""
        kinds = self.config.kinds
        seen = [each for each in trajectories if not kinds or each.task_data.get("kind") in kinds]
        finished = sum(each.facets.get("finished", 0.0) for each in seen)
        assigned = sum(each.facets.get("assigned", 0.0) for each in seen)
        self.recent = [*self.recent, (finished, assigned, len(seen))][-self.config.window :]
        rate = self.finish_rate
        is_open = self.config.anneal == "finish" and self.began is None
        if is_open and rate is not None and rate >= self.config.finish_rate:
            self.began = iteration + 1

    def state(self) -> dict[str, Any]:
        return {"began": self.began, "recent": [list(each) for each in self.recent]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.began = state["began"]
        self.recent = [(float(done), float(given), int(count)) for done, given, count in state["recent"]]

    def told(self, iteration: int) -> dict[str, Any]:
        """For the record of an iteration."""
        return {"share": self.share(iteration), "finish_rate": self.finish_rate, "began": self.began}


# ---------------------------------------------------------------------------------------------------------------------
# What episodes of a swarm were like


SHOWN = ("outcome", "parallel", "finish", "width", "critical_steps", "total_steps", "tokens", "worker_tokens")


def by_kind(trajectories: Sequence[Trajectory]) -> dict[str, dict[str, float]]:
    """Means over the episodes of each kind of task; {} where no episode has a swarm.

    spawn: share of episodes with at least one worker. unused: workers of whose answer nothing is in the final one, of
    all workers. finished: tasks that ended with a result, of all that were assigned.
    """
    kinds: dict[str, list[Trajectory]] = {}
    for each in trajectories:
        if "spawned" in each.facets:
            kinds.setdefault(str(each.task_data.get("kind", "all")), []).append(each)
    found: dict[str, dict[str, float]] = {}
    for kind, episodes in sorted(kinds.items()):
        count = len(episodes)
        facets = [each.facets for each in episodes]
        spawned = sum(each["spawned"] for each in facets)
        assigned = sum(each.get("assigned", 0.0) for each in facets)
        numbers = {"episodes": float(count), "spawn": sum(each["spawned"] > 0 for each in facets) / count}
        numbers |= {name: sum(each[name] for each in facets) / count for name in SHOWN if name in facets[0]}
        if spawned:
            numbers["unused"] = sum(each.get("unused_workers", 0.0) for each in facets) / spawned
        if assigned:
            numbers["finished"] = sum(each.get("finished", 0.0) for each in facets) / assigned
        found[kind] = numbers
    return found
