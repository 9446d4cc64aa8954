"""Groups of samples: what completes them, how rewards are shaped, and what is too old to learn from."""

import pytest

from perilune.rl.environment import OUTCOME, Task
from perilune.rl.groups import GroupConfig, Groups
from perilune.rl.lengths import ToggleConfig, length_rewards
from perilune.rl.rollout import Job
from perilune.rl.trajectory import Recording, Trajectory


def trajectory(sample: int, reward: float, *, length: int = 3, versions: tuple[int, ...] | None = None) -> Trajectory:
    recording = Recording()
    sampled = versions or (0,) * length
    recording.add([1, 2], list(range(10, 10 + len(sampled))), [-0.5] * len(sampled), sampled)
    return Trajectory(
        environment="e", task="t", task_data={}, weights={OUTCOME: 1.0}, sample=sample, seed=0, iteration=0,
        branches=tuple(recording.branches), messages=(), facets={OUTCOME: reward}, reward=reward, finish="stop",
    )  # fmt: skip


def groups(size: int = 2, **config) -> Groups:
    return Groups(GroupConfig(**config), size)


def test_tokens_of_older_weights_than_allowed_are_context_and_samples_of_nothing_else_are_dropped():
    made = groups(max_staleness=2)
    group = [trajectory(0, 1.0, versions=(1, 1, 4)), trajectory(1, 0.0, versions=(1, 2, 2))]
    (kept,) = made.samples([group], iteration=5, version=5)
    assert kept.num_trained == 1 and kept.advantage == 0.5
    assert made.dropped == {"samples too stale or empty": 1}
    fresh, old = groups(max_staleness=4).samples([group], iteration=5, version=5)
    assert (fresh.num_trained, old.num_trained) == (3, 3) and old.advantage == -0.5


def test_toggle_takes_the_reward_of_long_answers_in_its_budgeted_phase_alone():
    toggle = ToggleConfig(period=1, threshold=0.5, percentile=50.0, min_answers=2)
    made = groups(toggle=toggle)
    group = [trajectory(0, 1.0, length=2), trajectory(1, 1.0, length=9)]
    assert made.shaped(group, iteration=0) == [1.0, 0.0]  # the budget is the shorter length
    assert made.shaped(group, iteration=1) == [1.0, 1.0]
    assert len(made.samples([group], iteration=2, version=0)) == 2  # and now there is something to learn
    assert not made.samples([group], iteration=3, version=0)
    assert groups().shaped(group, iteration=0) == [1.0, 1.0]


def test_the_length_reward_is_added_by_its_weight_once_it_has_begun():
    made = groups(length_reward=0.1, length_reward_after=2)
    group = [trajectory(0, 1.0, length=2), trajectory(1, 1.0, length=4), trajectory(2, 0.0, length=3)]
    extra = length_rewards([2, 4, 3], [True, True, False])
    assert made.shaped(group, iteration=1) == [1.0, 1.0, 0.0]
    assert made.shaped(group, iteration=2) == pytest.approx([r + 0.1 * e for r, e in zip([1.0, 1.0, 0.0], extra)])


def test_a_group_is_complete_when_every_sample_has_ended_or_was_lost():
    made = groups(size=3)
    job = Job(environment="e", task=Task(name="t", data={}), sample=2, seed=0, iteration=0)
    assert made.add([trajectory(1, 1.0)]) == []
    ((first, second),) = made.add([trajectory(0, 0.0)], [job])
    assert (first.sample, second.sample) == (0, 1) and not made.waiting and not made.lost


def test_groups_with_equal_rewards_teach_nothing_and_are_counted():
    made = groups()
    assert made.samples([[trajectory(0, 1.0), trajectory(1, 1.0)], [trajectory(0, 1.0)]], iteration=0, version=0) == []
    assert made.dropped == {"groups with equal rewards": 2}
