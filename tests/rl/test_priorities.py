"""Which tasks come next."""

import json
from collections import Counter

import pytest

from perilune.rl.priorities import Priorities, PriorityConfig


def test_tasks_that_are_solved_rarely_come_more_often():
    priorities = Priorities(PriorityConfig(floor=0.05))
    priorities.record("easy", [1.0] * 8)
    priorities.record("hard", [1.0, 0.0, 0.0, 0.0])
    assert [priorities.weight(task) for task in ("easy", "hard", "new")] == [0.05, 0.75, 1.0]
    drawn = Counter(
        priorities.draw(["easy", "hard", "new"], 1, seed=0, iteration=iteration)[0] for iteration in range(3000)
    )
    for index, weight in enumerate((0.05, 0.75, 1.0)):
        expected = weight / 1.8
        assert abs(drawn[index] / 3000 - expected) < 5 * (expected * (1 - expected) / 3000) ** 0.5


def test_a_task_that_nobody_solves_rests_and_comes_back_when_it_is_solved():
    priorities = Priorities(PriorityConfig(floor=0.1, hopeless_after=4, memory=0.5))
    priorities.record("a", [0.0, 0.0])
    assert priorities.weight("a") == 1.0
    priorities.record("a", [0.0, 0.0])
    assert priorities.weight("a") == 0.1
    priorities.record("a", [1.0, 0.0])
    assert priorities.weight("a") == pytest.approx(0.75)


def test_draws_do_not_repeat_within_a_step_and_depend_on_seed_and_iteration_alone():
    tasks = [str(number) for number in range(10)]
    priorities = Priorities(PriorityConfig())
    first = priorities.draw(tasks, 10, seed=1, iteration=5)
    assert sorted(first) == list(range(10))
    assert first == priorities.draw(tasks, 10, seed=1, iteration=5)
    assert first != priorities.draw(tasks, 10, seed=1, iteration=6)
    assert Counter(priorities.draw(tasks, 25, seed=0, iteration=0)).most_common()[-1][1] >= 2


def test_priorities_go_on_from_their_saved_state():
    priorities = Priorities(PriorityConfig())
    priorities.record("a", [0.3, 0.1])
    again = Priorities(PriorityConfig())
    again.load_state(json.loads(json.dumps(priorities.state())))
    assert again == priorities


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: PriorityConfig(floor=0.0), "above 0"),
        (lambda: PriorityConfig(hopeless_after=0), "at least 1"),
        (lambda: PriorityConfig(memory=1.0), "below 1"),
        (lambda: Priorities(PriorityConfig()).record("a", [2.0]), "numbers in"),
        (lambda: Priorities(PriorityConfig()).draw([], 1, seed=0, iteration=0), "no task"),
    ],
)
def test_wrong_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
