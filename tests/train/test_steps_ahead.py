"""Contracts of making ready the rows of the next step."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.train import train, trainer
from perilune.train.steps_ahead import THREAD, StepsAhead
from tests.train.test_trainer import final_tensors, untimed
from tests.train.tiny_runs import tiny_run


class Broken(Exception):
    pass


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD)]


@given(st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 3)), max_size=8), st.booleans())
def test_every_number_gives_what_it_would_give_alone_whatever_was_begun(asked, in_background):
    with StepsAhead(lambda number: number * number, in_background=in_background) as ahead:
        assert [ahead.take(number, then=then) for number, then in asked] == [number**2 for number, _ in asked]
    assert not threads()


def test_the_next_one_is_made_in_a_thread_and_only_once():
    made = []

    def make(number):
        made.append((number, threading.current_thread().name.startswith(THREAD)))
        return number

    with StepsAhead(make) as ahead:
        ahead.take(0, then=1)
        ahead.take(1, then=2)
        ahead.take(2)
    assert made == [(0, False), (1, True), (2, True)]


def test_two_threads_never_make_at_the_same_time():
    busy, met = threading.Lock(), []

    def make(number):
        if not busy.acquire(blocking=False):
            met.append(number)
            busy.acquire()
        time.sleep(0.001)
        busy.release()
        return number

    with StepsAhead(make) as ahead:
        for number in range(50):
            assert ahead.take(number, then=number + 1 + number % 2) == number
    assert not met


def test_an_error_is_raised_by_who_asks_for_what_failed():
    def make(number):
        if number == 1:
            raise Broken(f"row {number}")
        return number

    with StepsAhead(make) as ahead:
        assert ahead.take(0, then=1) == 0
        with pytest.raises(Broken, match="row 1"):
            ahead.take(1, then=2)
        assert ahead.take(2) == 2


def test_an_error_in_what_nobody_asks_for_is_nobodys():
    def make(number):
        if number == 9:
            raise Broken
        return number

    with StepsAhead(make) as ahead:
        ahead.take(0, then=9)
        assert ahead.take(1, then=9) == 1
    assert not threads()


def in_background(monkeypatch):
    monkeypatch.setattr(trainer, "StepsAhead", lambda make, **_: StepsAhead(make, in_background=True))


def test_a_run_that_reads_ahead_has_the_bits_of_one_that_does_not_also_when_it_is_resumed(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    train(tiny_run(cache, name="plain"), runs_folder=tmp_path, quiet=True)
    in_background(monkeypatch)
    train(tiny_run(cache, name="ahead"), runs_folder=tmp_path, quiet=True)
    assert untimed(tmp_path / "ahead") == untimed(tmp_path / "plain")

    def kill(phase):
        if phase == "step:validated" and not killed:
            killed.append(phase)
            raise KeyboardInterrupt

    killed: list[str] = []
    config = tiny_run(cache, name="resumed")
    with pytest.raises(KeyboardInterrupt):
        train(config, runs_folder=tmp_path, quiet=True, on_phase=kill)
    assert killed and not threads()
    train(config, runs_folder=tmp_path, quiet=True, resume=True)
    ours, theirs = final_tensors(tmp_path / "resumed"), final_tensors(tmp_path / "plain")
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_rows_that_cannot_be_read_end_a_run_that_reads_ahead(tmp_path, monkeypatch):
    in_background(monkeypatch)
    real = trainer.packed_rows

    def broken_later(run, first_row):
        if first_row >= 12:
            raise OSError("the disk is gone")
        return real(run, first_row)

    monkeypatch.setattr(trainer, "packed_rows", broken_later)
    with pytest.raises(OSError, match="the disk is gone"):
        train(tiny_run(tmp_path / "cache"), runs_folder=tmp_path, quiet=True)
    assert not threads()
