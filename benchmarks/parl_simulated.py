"""Will an orchestrator collapse to working alone, or learn to delegate? Three decisions say, before a GPU is asked.

    python benchmarks/parl_simulated.py                          arms x mixes x learning rates, 40 seeds: 6 minutes
    python benchmarks/parl_simulated.py --mixes mostly-serial --arms outcome full --lrs 0.3 --seeds 200

Scripted policies play training tasks of wide search through the real runtime once, in every manner that traces show
(rl/environments/wide_search_traces.py). A simulated policy then draws manners and is paid what the episode earned, with
the weights of rl/parl.py and groups, tasks and iterations as in benchmarks/parl.py. What it decides, one after the
other, as a model does token by token:

    work alone, or begin with a worker?      begun well, or in a clumsy way?      how many at a time?

Each decision is a softmax over the sum of a logit that all kinds of tasks share and one of the kind's own, moved by
REINFORCE with the group's mean as baseline and Adam. It begins with the shares of the mix. So it shows what the rewards
pull towards, from where traces leave off; how fast a language model follows, or what it shares between kinds of tasks,
is not in it. Writes benchmarks/results/parl_simulated.json.

Mixes are those of benchmarks/parl_traces.py.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import torch
import tyro
from parl_bars import SIDE_BY_SIDE
from parl_traces import MIXES, Mix
from rl_rows import say

from perilune.recipes.parl import parl
from perilune.rl.environment import OUTCOME
from perilune.rl.environments.wide_search import WideSearch
from perilune.rl.environments.wide_search_play import played
from perilune.rl.environments.wide_search_policies import CLUMSY, Policy, clumsy, in_groups, serial, unsure
from perilune.rl.environments.wide_search_questions import TaskKind
from perilune.rl.environments.wide_search_traces import WIDTHS
from perilune.rl.parl import Arm, Parl, arm
from perilune.rl.trajectory import Trajectory
from perilune.train.environment import describe_environment

KINDS: tuple[TaskKind, ...] = ("wide", "narrow", "chain")
FACETS = ("outcome", "parallel", "finish", "economy", "spawned", "width", "assigned", "finished", "critical_steps")
DELEGATED = 0.1
WORTH = 0.8
"""F1 of wide tasks above which workers are worth it: alone has 0.71, two at a time 0.75."""
LEAST = 1e-3
"""A model gives even what it never saw some probability."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    mixes: tuple[Mix, ...] = get_args(Mix)
    arms: tuple[Arm, ...] = ("outcome", "full", "no_finish")
    lrs: tuple[float, ...] = (0.1, 0.3, 0.6, 1.0)
    """Of Adam, on logits. At 0.1 half of the wide tasks have workers after ten iterations, at the others after two to
    four; arms on a GPU take eleven to sixteen."""
    seeds: int = 40
    iterations: int = parl().rl.iterations
    tasks: int = parl().rl.tasks
    samples: int = parl().rl.rollout.group_size
    played: int = 64
    """Tasks of each kind that are drawn from."""
    lost: float = 0.06
    """Of the workers that find nothing."""
    results: Path = Path("benchmarks/results/parl_simulated.json")


# What episodes earn ---------------------------------------------------------------------------------------------------


def manners() -> dict[str, Policy]:
    """Alone, the clumsy ways, the widths: in this order, by name."""
    wide = {f"{width or 'all'} at a time": in_groups(width) for width in WIDTHS}
    return {"alone": serial, **{f"clumsy, {way}": clumsy(way) for way in CLUMSY}, **wide}


def earned(settings: Settings) -> dict[str, np.ndarray]:
    """kind -> [tasks, manners, FACETS]."""

    async def all_of(kind: TaskKind) -> np.ndarray:
        environment = WideSearch(kinds=(kind,), spare_steps=1)
        table = np.zeros((settings.played, len(manners()), len(FACETS)))
        for number in range(settings.played):
            task = environment.task(number, "train")
            for place, policy in enumerate(manners().values()):
                facets = (await played(environment, task, policy, unsure(settings.lost))).facets
                table[number, place] = [facets.get(name, 0.0) for name in FACETS]
        return table

    return {kind: asyncio.run(all_of(kind)) for kind in KINDS}


# The policy -----------------------------------------------------------------------------------------------------------


def logits_of(mix: Mix) -> list[np.ndarray]:
    """Of the three decisions, at the start."""
    well, widths = MIXES[mix]
    begun = [well, *[(1 - well) / len(CLUMSY)] * len(CLUMSY)]
    shares = [1 - DELEGATED, DELEGATED], begun, [widths.get(width, 0.0) for width in WIDTHS]
    return [np.log(np.maximum(share, LEAST)) for share in shares]


@dataclass
class Simulated:
    """Logits [1 + kinds, options] of each decision: the first row is shared. Adam's averages beside them."""

    logits: list[np.ndarray]
    mean: list[np.ndarray]
    square: list[np.ndarray]
    steps: int = 0

    @classmethod
    def begun(cls, mix: Mix) -> "Simulated":
        start = [np.zeros((1 + len(KINDS), len(each))) for each in logits_of(mix)]
        for rows, each in zip(start, logits_of(mix)):
            rows[0] = each
        return cls(start, [np.zeros_like(each) for each in start], [np.zeros_like(each) for each in start])

    def shares(self, decision: int, kind: int) -> np.ndarray:
        rows = self.logits[decision]
        weights = np.exp(rows[0] + rows[1 + kind] - (rows[0] + rows[1 + kind]).max())
        return weights / weights.sum()

    def draw(self, kind: int, dice: np.random.Generator) -> list[tuple[int, int]]:
        """(decision, option) in turn; the last one says what is done."""
        taken = [(0, int(dice.choice(2, p=self.shares(0, kind))))]
        if taken[-1][1]:
            taken.append((1, int(dice.choice(1 + len(CLUMSY), p=self.shares(1, kind)))))
            if taken[-1][1] == 0:
                taken.append((2, int(dice.choice(len(WIDTHS), p=self.shares(2, kind)))))
        return taken

    def update(self, seen: Sequence[tuple[int, list[tuple[int, int]], float]], lr: float) -> None:
        """From (kind, decisions, advantage) of every sample."""
        gradient = [np.zeros_like(each) for each in self.logits]
        for kind, taken, advantage in seen:
            for decision, option in taken:
                push = -self.shares(decision, kind)
                push[option] += 1
                gradient[decision][[0, 1 + kind]] += advantage / len(seen) * push
        self.steps += 1
        for place, each in enumerate(gradient):
            self.mean[place] = 0.9 * self.mean[place] + 0.1 * each
            self.square[place] = 0.99 * self.square[place] + 0.01 * each**2
            unbiased = self.mean[place] / (1 - 0.9**self.steps), self.square[place] / (1 - 0.99**self.steps)
            self.logits[place] = self.logits[place] + lr * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-4)


def place_of(taken: Sequence[tuple[int, int]]) -> int:
    """Among the manners."""
    decision, option = taken[-1]
    return (0, option, 1 + len(CLUMSY) + option)[decision]


def learnt(settings: Settings, table: Mapping[str, np.ndarray], mix: Mix, name: Arm, lr: float, seed: int) -> Any:
    """Spawn rate of wide, narrow and chain tasks in every iteration [iterations, 3], outcomes of wide ones, and how
    many workers they have at a time, where they have any."""
    dice, policy = np.random.default_rng(seed), Simulated.begun(mix)
    rewards = Parl(arm(name, parl().rl.parl))
    turn = [KINDS.index(kind) for kind in WideSearch().kinds]
    spawned, outcomes = np.full((settings.iterations, len(KINDS)), np.nan), np.zeros(settings.iterations)
    widths = np.zeros(settings.iterations)
    for iteration in range(settings.iterations):
        seen, episodes = [], list[Any]()
        for number in range(settings.tasks):
            kind, task = turn[number % len(turn)], int(dice.integers(settings.played))
            taken = [policy.draw(kind, dice) for _ in range(settings.samples)]
            facets = [dict(zip(FACETS, table[KINDS[kind]][task, place_of(each)])) for each in taken]
            weights = rewards.weights(iteration, KINDS[kind])
            paid = np.array([sum(weight * each[facet] for facet, weight in weights.items()) for each in facets])
            seen += [(kind, each, gain) for each, gain in zip(taken, paid - paid.mean())]
            episodes += [SimpleNamespace(facets=each, task_data={"kind": KINDS[kind]}) for each in facets]
        for place, kind in enumerate(KINDS):
            here = [each.facets for each in episodes if each.task_data["kind"] == kind]
            spawned[iteration, place] = np.mean([each["spawned"] > 0 for each in here])
            if kind == "wide":
                outcomes[iteration] = np.mean([each[OUTCOME] for each in here])
                widths[iteration] = np.mean([each["width"] for each in here if each["spawned"]] or [0.0])
        rewards.record(cast(list[Trajectory], episodes), iteration)
        policy.update(seen, lr)
    return spawned, outcomes, widths


# What came of it ------------------------------------------------------------------------------------------------------


def row_of(settings: Settings, table: Mapping[str, np.ndarray], mix: Mix, name: Arm, lr: float) -> dict[str, Any]:
    runs = [learnt(settings, table, mix, name, lr, seed) for seed in range(settings.seeds)]
    last = max(1, settings.iterations // 5)
    ends = np.array([spawned[-last:].mean(0) for spawned, _, _ in runs])
    widths = np.array([widths[-last:].mean() for _, _, widths in runs])
    worth = np.array([outcomes[-last:].mean() for _, outcomes, _ in runs])
    where = (ends[:, 0] >= 0.8) & (ends[:, 1:] <= 0.2).all(1)
    return {
        "mix": mix, "arm": name, "lr": lr, "seeds": settings.seeds,
        "spawn": dict(zip(KINDS, np.round(ends.mean(0), 4).tolist())),
        "collapsed": float(np.mean(ends[:, 0] < 0.05)),
        "prevented": float(np.mean(where & (widths >= SIDE_BY_SIDE))),
        "worth_it": float(np.mean(where & (worth > WORTH))),
        "one_at_a_time": float(np.mean((ends[:, 0] >= 0.5) & (widths < SIDE_BY_SIDE))),
        "outcome": round(float(np.mean(worth)), 4),
        "half_after": _half_after([spawned[:, 0] for spawned, _, _ in runs]),
        "ends": np.round(np.column_stack([ends, widths, worth]), 3).tolist(),
        "wide_spawn_by_iteration": np.round(np.mean([spawned[:, 0] for spawned, _, _ in runs], axis=0), 3).tolist(),
    }  # fmt: skip


def _half_after(spawned: Sequence[np.ndarray]) -> float | None:
    """Iterations until half of the wide tasks have workers, the median over seeds; None: most never do."""
    found = [int(np.argmax(each >= 0.5)) if (each >= 0.5).any() else np.inf for each in spawned]
    middle = float(np.median(found))
    return middle if np.isfinite(middle) else None


def told(row: Mapping[str, Any]) -> str:
    shares = *row["spawn"].values(), row["collapsed"], row["prevented"], row["worth_it"], row["one_at_a_time"]
    wide, narrow, chain, collapsed, prevented, worth, single = (f"{100 * share:3.0f}%" for share in shares)
    return (
        f"{row['mix']:13} {row['arm']:9} lr {row['lr']:<4g} workers in {wide} of wide, {narrow} of narrow tasks, "
        f"{chain} of chains; collapsed {collapsed}, prevented {prevented}, with F1 above {WORTH:g} {worth}, "
        f"one worker at a time {single} of seeds; half of wide after {row['half_after']}; outcome {row['outcome']:.2f}"
    )


def main(settings: Settings) -> None:
    table = earned(settings)
    means = {
        kind: dict(zip(manners(), (dict(zip(FACETS, each)) for each in np.round(rows.mean(0), 4).tolist())))
        for kind, rows in table.items()
    }
    for name, facets in means["wide"].items():
        say(f"wide, {name:22} " + "  ".join(f"{facet} {facets[facet]:.2f}" for facet in FACETS))
    rows = []
    for mix in settings.mixes:
        for name in settings.arms:
            for lr in settings.lrs:
                rows.append(row_of(settings, table, mix, name, lr))
                say(told(rows[-1]))
    settings.results.parent.mkdir(parents=True, exist_ok=True)
    environment = describe_environment(torch.device("cpu"))
    plain = {"environment": environment, "settings": {**vars(settings), "results": settings.results.name}}
    settings.results.write_text(in_lines({**plain, "episodes": means, "rows": rows}))


def in_lines(plain: Mapping[str, Any]) -> str:
    """JSON with a row on every line."""
    head = json.dumps({name: value for name, value in plain.items() if name != "rows"}, indent=1)
    lines = ",\n".join(f"  {json.dumps(row)}" for row in plain["rows"])
    return f'{head.removesuffix("}").rstrip()},\n "rows": [\n{lines}\n ]\n}}\n'


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
