"""Groups of samples of one task: when they are complete, what their rewards become, what the learner gets.

A group is complete when each of its K samples has ended or was lost; with partial rollouts that may take several
iterations, and samples wait here. Rewards are then shaped (length reward, Toggle) and compared with their mean. A group
whose rewards are all equal teaches nothing and is dropped, as is one with a single sample left.

Staleness: tokens that weights older than `max_staleness` versions sampled become context; a sample without any other is
dropped. Counts of everything that was dropped are kept.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from perilune.rl.environment import OUTCOME
from perilune.rl.learner import Sample
from perilune.rl.lengths import Toggle, ToggleConfig, length_rewards
from perilune.rl.objective import advantages
from perilune.rl.rollout import Job
from perilune.rl.trajectory import Trajectory

Key = tuple[str, str, int]
"""(environment, task, iteration in which it began)"""


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    max_staleness: int = 4
    """Versions of the weights that a token may be behind."""
    right_from: float = 0.5
    """Outcome from which on an answer counts as right, for length reward and Toggle."""
    length_reward: float = 0.0
    """What k1.5's length reward counts for; 0: nothing."""
    length_reward_after: int = 0
    """Iterations before it begins."""
    toggle: ToggleConfig | None = None

    def __post_init__(self) -> None:
        if self.max_staleness < 0 or self.length_reward_after < 0:
            raise ValueError(
                f"groups.max_staleness={self.max_staleness!r} and length_reward_after={self.length_reward_after!r}: "
                "expected 0 or more"
            )
        if not 0 <= self.length_reward < float("inf"):
            raise ValueError(f"groups.length_reward is {self.length_reward!r}, expected 0 or more")


@dataclass
class Groups:
    """Samples that wait for the rest of their group. `waiting` and `lost` go into a checkpoint."""

    config: GroupConfig
    group_size: int
    scale: bool = False
    """Divide advantages by the group's standard deviation (grpo)."""
    waiting: dict[Key, list[Trajectory]] = field(default_factory=dict)
    lost: Counter[Key] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    """Of this iteration, by reason."""

    def __post_init__(self) -> None:
        self.toggle = None if self.config.toggle is None else Toggle(self.config.toggle)

    def add(self, trajectories: Iterable[Trajectory], lost: Iterable[Job] = ()) -> list[list[Trajectory]]:
        """Groups that are complete now, in a fixed order, their samples by number."""
        self.dropped = Counter()
        for trajectory in trajectories:
            key = (trajectory.environment, trajectory.task, trajectory.iteration)
            self.waiting.setdefault(key, []).append(trajectory)
        for job in lost:
            key = (job.environment, job.task.name, job.iteration)
            self.lost[key] += 1
            self.waiting.setdefault(key, [])
        complete = [key for key, found in self.waiting.items() if len(found) + self.lost[key] >= self.group_size]
        groups = []
        for key in sorted(complete, key=lambda key: (key[2], key[0], key[1])):
            self.lost.pop(key, None)
            groups.append(sorted(self.waiting.pop(key), key=lambda trajectory: trajectory.sample))
        return [group for group in groups if group]

    def samples(self, groups: Sequence[Sequence[Trajectory]], *, iteration: int, version: int) -> list[Sample]:
        """What the learner gets of complete groups; `version` is that of the weights about to be trained."""
        found = []
        for group in groups:
            rewards = self.shaped(group, iteration=iteration)
            if len(group) < 2 or len(set(rewards)) == 1:
                self.dropped["groups with equal rewards"] += 1
                continue
            relative = advantages(torch.tensor(rewards, dtype=torch.float64), scale=self.scale).tolist()
            for trajectory, advantage in zip(group, relative, strict=True):
                branches = [branch.since(version - self.config.max_staleness) for branch in trajectory.branches]
                sample = Sample(branches=branches, advantage=advantage)
                if sample.num_trained:
                    found.append(sample)
                else:
                    self.dropped["samples too stale or empty"] += 1
        return found

    def shaped(self, group: Sequence[Trajectory], *, iteration: int) -> list[float]:
        """The rewards of a group as they count."""
        config = self.config
        rewards = [trajectory.reward for trajectory in group]
        lengths = [trajectory.num_trained for trajectory in group]
        right = [trajectory.facets.get(OUTCOME, 0.0) >= config.right_from for trajectory in group]
        if self.toggle is not None:
            name = f"{group[0].environment}/{group[0].task}"
            rewards = self.toggle.rewards(name, rewards, lengths, right, iteration=iteration)
        if config.length_reward and iteration >= config.length_reward_after:
            extra = length_rewards(lengths, right)
            rewards = [reward + config.length_reward * more for reward, more in zip(rewards, extra, strict=True)]
        return rewards


def means(trajectories: Sequence[Trajectory]) -> Mapping[str, float]:
    """What a progress line and a report show of an iteration."""
    if not trajectories:
        return {}
    names = sorted({name for trajectory in trajectories for name in trajectory.facets})
    count = len(trajectories)
    found = {
        "reward": sum(trajectory.reward for trajectory in trajectories) / count,
        "finished": sum(trajectory.finish == "stop" for trajectory in trajectories) / count,
        "length": sum(trajectory.num_trained for trajectory in trajectories) / count,
    }
    for name in names:
        values = [trajectory.facets[name] for trajectory in trajectories if name in trajectory.facets]
        found[f"facet.{name}"] = sum(values) / len(values)
    return found
