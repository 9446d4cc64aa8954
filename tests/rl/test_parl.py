"""Rewards for parallel work: what each arm pays, when it fades, that its state is all there is, and what is counted."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.rl.environment import OUTCOME, Task, reward_of
from perilune.rl.parl import ARMS, Parl, ParlConfig, arm, by_kind
from perilune.rl.trajectory import Trajectory


def episode(kind="wide", *, assigned=4.0, finished=4.0, spawned=None, unused=0.0, **facets) -> Trajectory:
    spawned = assigned if spawned is None else spawned
    numbers = {"outcome": 0.5, "assigned": assigned, "finished": finished, "spawned": spawned,
               "unused_workers": unused, **facets}  # fmt: skip
    return Trajectory(
        environment="e", task="t", task_data={"kind": kind}, weights={}, sample=0, seed=0, iteration=0, branches=(),
        messages=(), facets=numbers, reward=0.0, finish="stop",
    )  # fmt: skip


def test_the_reported_form_pays_the_three_rewards_and_others_only_the_outcome():
    parl = Parl(ParlConfig())
    task = Task(name="t", data={"kind": "wide"})
    assert reward_of(parl.weighted(task, 0), {OUTCOME: 0.4, "parallel": 0.5, "finish": 1.0, "width": 9.0}) == (
        pytest.approx(0.5 * 0.5 + 0.5 * 1.0 + 0.4)
    )
    narrow = parl.weighted(Task(name="t", data={"kind": "narrow"}), 0)
    assert reward_of(narrow, {OUTCOME: 0.4, "parallel": 1.0, "finish": 1.0}) == 0.4
    everywhere = Parl(ParlConfig(kinds=())).weighted(Task(name="t", data={}), 0)
    assert everywhere.weights == {"finish": 0.5, OUTCOME: 1.0, "parallel": 0.5}


def test_the_blogs_form_weighs_instantiation_against_success():
    parl = Parl(arm("blog", ParlConfig(anneal="clock", over=10)))
    assert parl.weights(0, "wide") == {"parallel": 0.1, "success": 0.9}
    assert parl.weights(5, "wide") == {"parallel": pytest.approx(0.05), "success": pytest.approx(0.95)}
    assert parl.weights(10, "wide") == {"parallel": 0.0, "success": 1.0}


def test_arms_pay_what_they_are_called():
    paid = {name: Parl(arm(name)).weights(0, "wide") for name in ARMS}
    assert paid["full"] == {"finish": 0.5, OUTCOME: 1.0, "parallel": 0.5}
    assert paid["outcome"] == {"finish": 0.0, OUTCOME: 1.0, "parallel": 0.0}
    assert paid["no_finish"] == {"finish": 0.0, OUTCOME: 1.0, "parallel": 0.5}
    assert paid["instantiation"] == {"finish": 0.0, OUTCOME: 0.0, "parallel": 0.5}
    assert paid["economy"] == {**paid["full"], "economy": 0.1}
    assert Parl(arm("economy")).weights(0, "narrow") == {"finish": 0.0, OUTCOME: 1.0, "parallel": 0.0, "economy": 0.1}
    with pytest.raises(ValueError, match="unknown arm 'half': known are full"):
        arm("half")  # pyrefly: ignore[bad-argument-type]


def test_weights_fade_once_assigned_tasks_are_finished_and_not_for_a_few_lucky_ones():
    parl = Parl(ParlConfig(over=4, window=2, finish_rate=0.8, least_assigned=1.0))
    parl.record([episode(assigned=0.0, finished=0.0)] * 9 + [episode(assigned=2.0, finished=2.0)], 0)
    assert parl.finish_rate is None and parl.began is None  # 0.2 tasks an episode
    parl.record([episode(finished=3.0)] * 10, 1)
    assert parl.finish_rate == pytest.approx(32 / 42) and parl.share(2) == 1.0
    parl.record([episode(finished=4.0)] * 10, 2)  # the window has forgotten the first
    assert parl.finish_rate == pytest.approx(70 / 80) and parl.began == 3
    assert [parl.share(iteration) for iteration in range(3, 9)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    parl.record([episode(finished=0.0)] * 10, 3)
    assert parl.began == 3  # it does not come back


def test_episodes_that_are_not_paid_for_finishing_do_not_start_the_fading():
    parl = Parl(ParlConfig(window=1))
    parl.record([episode("narrow")] * 8, 0)
    assert parl.began is None
    parl.record([episode("wide")] * 8, 1)
    assert parl.began == 2


@given(
    st.lists(st.tuples(st.integers(0, 8), st.floats(0, 1)), min_size=1, max_size=12), st.integers(1, 4),
    st.integers(0, 11),
)  # fmt: skip
def test_a_state_that_was_saved_anywhere_goes_on_as_if_it_had_not_been(seen, window, cut):
    settings = ParlConfig(window=window, over=3, finish_rate=0.6)
    whole, resumed = Parl(settings), Parl(settings)
    for iteration, (assigned, share) in enumerate(seen):
        for parl in (whole, resumed):
            parl.record([episode(assigned=float(assigned), finished=assigned * share)], iteration)
        if iteration == cut:
            saved = json.loads(json.dumps(resumed.state()))
            resumed = Parl(settings)
            resumed.load_state(saved)
        assert resumed.weights(iteration, "wide") == whole.weights(iteration, "wide")
        assert 0.0 <= whole.share(iteration) <= 1.0
    assert resumed.state() == whole.state()


@pytest.mark.parametrize(
    "wrong,told",
    [({"parallel": -1.0}, "parl.parallel is -1.0"), ({"finish_rate": 0.0}, "parl.finish_rate is 0.0"),
     ({"over": 0}, "parl.over is 0"), ({"window": 0}, "parl.window is 0"),
     ({"form": "blog", "parallel": 1.5}, "at most 1 in the blog's form"),
     ({"workers": "joint", "workers_from": "other"}, "leave one of the two out")],
)  # fmt: skip
def test_wrong_settings_are_named(wrong, told):
    with pytest.raises(ValueError, match=told):
        ParlConfig(**wrong)


def test_numbers_are_means_by_kind_and_shares_are_of_all_workers():
    found = by_kind([
        episode(assigned=4.0, finished=2.0, spawned=4.0, unused=2.0, width=4.0),
        episode(assigned=0.0, finished=0.0, unused=0.0, width=0.0),
        episode("narrow", assigned=0.0, finished=0.0, width=0.0),
    ])  # fmt: skip
    assert found["wide"]["spawn"] == 0.5 and found["wide"]["width"] == 2.0 and found["wide"]["episodes"] == 2.0
    assert found["wide"]["unused"] == 0.5 and found["wide"]["finished"] == 0.5
    assert found["narrow"]["spawn"] == 0.0 and "unused" not in found["narrow"]
    assert by_kind([]) == {}
