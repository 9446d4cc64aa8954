"""Judging what was played again: every stored episode of a run, from its transcript, compared bit by bit.

A judge that has learnt to say more since is compared by what it said then.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perilune.rl.environment import Environment
from perilune.rl.evaluation import EPISODES, evaluated
from perilune.rl.loop import TRAJECTORIES
from perilune.rl.rollout import replayed
from perilune.rl.run_config import RLRunError, read_config
from perilune.rl.trajectory import load_trajectories

SHOWN = 5


def replay_folder(folder: Path, environments: Mapping[str, Environment] | None = None) -> dict[str, Any]:
    """Counts of episodes and of equal verdicts, with examples of what differs; RLRunError without anything stored."""
    known = evaluated(read_config(folder / "rl.json").environments.chosen() if environments is None else environments)
    files = sorted([*(folder / TRAJECTORIES).glob("*.jsonl"), *(folder / EPISODES).glob("*.jsonl")])
    if not files:
        raise RLRunError(f"{str(folder)!r} holds no trajectories: the run kept none (keep_trajectories)")
    episodes, equal, examples = 0, 0, []
    for path in files:
        for trajectory in load_trajectories(path):
            episodes += 1
            place = f"{path.name}: {trajectory.environment}/{trajectory.task}, sample {trajectory.sample}"
            environment = known.get(trajectory.environment)
            if environment is None:
                examples.append(f"{place}: the run has no such environment")
                continue
            try:
                facets, reward = replayed(environment, trajectory)
            except Exception as error:  # a judge is anybody's code
                examples.append(f"{place}: {type(error).__name__}: {error}")
                continue
            unlike = [name for name, value in trajectory.facets.items() if facets.get(name) != value]
            if not unlike and reward == trajectory.reward:
                equal += 1
            elif reward != trajectory.reward:
                examples.append(f"{place}: reward {trajectory.reward!r} then, {reward!r} now")
            else:
                then, now = trajectory.facets[unlike[0]], facets.get(unlike[0])
                examples.append(f"{place}: {unlike[0]} {then!r} then, {now!r} now")
    return {"files": len(files), "episodes": episodes, "equal": equal, "examples": examples[:SHOWN]}
