"""Length reward and Toggle against their definitions."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.rl.lengths import Toggle, ToggleConfig, length_rewards, percentile

GROUPS = st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=1, max_size=16)


def test_the_shortest_right_answer_gains_most_and_no_wrong_one_gains():
    assert length_rewards([10, 20, 30], [True, True, True]) == [0.5, 0.0, -0.5]
    assert length_rewards([10, 20, 30], [False, False, True]) == [0.0, 0.0, -0.5]
    assert length_rewards([7, 7], [True, False]) == [0.0, 0.0]
    assert length_rewards([], []) == []


@given(GROUPS)
def test_length_rewards_never_prefer_the_longer_of_two_right_answers(group):
    lengths, right = [length for length, _ in group], [verdict for _, verdict in group]
    found = length_rewards(lengths, right)
    assert all(-0.5 <= each <= 0.5 for each in found)
    for first, (length, is_right) in zip(found, group):
        for second, (other, other_right) in zip(found, group):
            if is_right and other_right and length < other:
                assert first > second
            if not is_right:
                assert first <= 0


def test_phases_alternate_and_begin_with_the_budget():
    toggle = Toggle(ToggleConfig(period=2))
    assert [toggle.is_budgeted(iteration) for iteration in range(6)] == [True, True, False, False, True, True]


def test_before_it_begins_every_reward_counts_and_no_budget_is_estimated():
    toggle = Toggle(ToggleConfig(period=1, threshold=0.0, min_answers=1, after=3))
    lucky, worked = ([1.0, 1.0], [3, 40], [True, True]), ([1.0, 1.0], [30, 40], [True, True])
    assert [toggle.is_budgeted(iteration) for iteration in range(7)] == [False, False, False, True, False, True, False]
    assert toggle.rewards("a", *lucky, iteration=2) == [1.0, 1.0] and not toggle.budgets and not toggle.seen
    assert toggle.rewards("a", *worked, iteration=3) == [1.0, 0.0] and toggle.budgets == {"a": 30}


def test_over_budget_counts_nothing_only_in_the_budgeted_phase_and_once_the_prompt_is_solved():
    toggle = Toggle(ToggleConfig(period=1, threshold=0.75, percentile=50, min_answers=2))
    group = {"rewards": [1.0, 1.0, 1.0, 0.0], "lengths": [10, 20, 90, 5], "right": [True, True, True, False]}
    assert toggle.rewards("a", **group, iteration=0) == [1.0, 1.0, 0.0, 0.0]
    assert toggle.budgets == {"a": 20}
    assert toggle.rewards("a", **group, iteration=1) == group["rewards"]
    hard = {**group, "rewards": [1.0, 0.0, 0.0, 0.0], "right": [True, False, False, False]}
    assert toggle.rewards("a", **hard, iteration=2) == hard["rewards"]


def test_a_budget_is_estimated_once_and_only_from_right_answers():
    toggle = Toggle(ToggleConfig(period=1, min_answers=3, percentile=100))
    toggle.rewards("a", [1.0, 0.0], [50, 1], [True, False], iteration=0)
    assert toggle.budgets == {} and toggle.seen == {"a": [50]}
    toggle.rewards("a", [1.0, 1.0], [40, 60], [True, True], iteration=0)
    assert toggle.budgets == {"a": 60} and toggle.seen == {}
    toggle.rewards("a", [1.0, 1.0], [1, 900], [True, True], iteration=0)
    assert toggle.budgets == {"a": 60}


@given(st.lists(GROUPS, max_size=6), st.integers(0, 5))
def test_a_toggle_goes_on_from_its_saved_state(groups, cut):
    config = ToggleConfig(period=1, min_answers=3)

    def feed(toggle: Toggle, group, iteration: int) -> list[float]:
        lengths, right = [length for length, _ in group], [verdict for _, verdict in group]
        return toggle.rewards("p", [float(each) for each in right], lengths, right, iteration=iteration)

    whole, first = Toggle(config), Toggle(config)
    expected = [feed(whole, group, number) for number, group in enumerate(groups)]
    found = [feed(first, group, number) for number, group in enumerate(groups[:cut])]
    second = Toggle(config)
    second.load_state(json.loads(json.dumps(first.state())))
    found += [feed(second, group, number) for number, group in enumerate(groups[cut:], start=len(groups[:cut]))]
    assert found == expected


@given(st.lists(st.integers(0, 99), min_size=1), st.floats(0, 100))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values, share):
    found = percentile(values, share)
    covered = sum(value <= found for value in values) / len(values)
    assert found in values and covered >= share / 100 - 1e-12
    assert all(sum(value <= other for value in values) / len(values) < share / 100 for other in values if other < found)


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: ToggleConfig(period=0), "at least 1"),
        (lambda: ToggleConfig(threshold=2.0), "a share"),
        (lambda: ToggleConfig(after=-1), "toggle.after is -1"),
        (lambda: ToggleConfig(percentile=101.0), "0 to 100"),
        (lambda: length_rewards([1], []), "one each"),
        (lambda: Toggle(ToggleConfig()).rewards("a", [1.0], [], [], iteration=0), "expected as many"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
