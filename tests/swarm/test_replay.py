"""A replay shows every event once, in order, in the rhythm of the run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.journal.event import Event, canonical
from perilune.swarm.journal.sqlite_reader import SQLiteReader
from perilune.swarm.replay import frames, play
from perilune.swarm.view.state import RunState
from tests.swarm.small_runs import written_run


def events_at(*times: float) -> list[Event]:
    return [
        Event(index, "main", index, "task", canonical({"number": index, "text": "x"}), b"{}", 100.0 + time, b"")
        for index, time in enumerate(times)
    ]


def test_events_of_one_step_share_a_frame_and_long_pauses_are_shortened():
    shown = list(frames(events_at(0.0, 0.01, 0.25, 0.29, 1.0, 86400.0), step=0.1, longest_pause=2.0))
    assert [[event.index for event in frame.events] for frame in shown] == [[0, 1], [2, 3], [4], [5]]
    assert [round(frame.seconds, 3) for frame in shown] == [0.01, 0.29, 1.0, 86400.0]
    assert [round(frame.wait, 3) for frame in shown] == [0.01, 0.28, 0.71, 2.0]


def test_the_last_frame_is_the_state_of_the_whole_run(tmp_path):
    with SQLiteReader(written_run(tmp_path)) as reader:
        whole = RunState()
        whole.apply(reader.events())
        counts = []
        for frame in frames(reader.events(), step=1.0):
            counts.append(len(frame.state.agents))
    assert frame.state.snapshot() == whole.snapshot() and counts[0] == 0 and counts[-1] == 2


@given(
    gaps=st.lists(st.floats(-1, 100), max_size=20),
    step=st.floats(0.01, 5),
    speed=st.floats(0.1, 50),
    drawing=st.floats(0, 3),
)
def test_playing_shows_all_in_order_at_the_chosen_speed(gaps, step, speed, drawing):
    """Also where clocks of several writers went back, and when drawing takes longer than the run did."""
    now, slept = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        assert seconds > 0
        slept.append(seconds)
        now += seconds

    def clock() -> float:
        return now

    times = [sum(gaps[:count]) for count in range(len(gaps) + 1)]
    seen = []
    for frame in play(events_at(*times), speed=speed, step=step, clock=clock, sleep=sleep):
        seen += [event.index for event in frame.events]
        now += drawing
    assert seen == list(range(len(times)))
    assert sum(slept) <= (2.0 * len(times)) / speed + 1e-6


@pytest.mark.parametrize("options", [{"step": 0.0}, {"step": float("nan")}, {"speed": 0.0}, {"speed": -1.0}])
def test_a_speed_or_step_that_is_not_positive_is_refused(options):
    with pytest.raises(ValueError, match="expected a positive number"):
        next(play(events_at(0.0), **options))


def test_a_journal_without_events_has_no_frames():
    assert list(frames([])) == []
