"""Work done ahead in other processes: the same answers, reasons for failures, and nobody left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from perilune.data.rows_ahead import Ahead, WorkerError


@dataclass(frozen=True)
class Square:
    """Importable in a worker as tests.data.test_rows_ahead, so its answers can travel."""

    fails_at: int = -1

    def __call__(self, number: int) -> tuple[int, int]:
        if number == self.fails_at:
            raise ValueError(f"number {number} cannot be squared")
        print("noise on standard output must not reach the pipe")
        return number * number, os.getpid()


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under importlib mode a test module is found from the repository's root."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_answers_are_those_of_the_function_in_any_order_of_asking(num_workers):
    with Ahead(Square(), num_workers=num_workers) as ahead:
        numbers = [0, 1, 2, 3, 9, 10, 4, 5]
        answers = [ahead.get(number) for number in numbers]
    assert [value for value, _ in answers] == [number * number for number in numbers]
    elsewhere = {process for _, process in answers} - {os.getpid()}
    assert bool(elsewhere) == (num_workers > 0)


def test_a_failure_is_told_when_its_number_is_asked_for():
    with Ahead(Square(fails_at=2), num_workers=1) as ahead:
        assert ahead.get(0)[0] == 0
        with pytest.raises(WorkerError, match="number 2 cannot be squared"):
            ahead.get(1), ahead.get(2)


@pytest.mark.parametrize("number", [2, 3, 9])
def test_after_a_failure_every_question_has_the_same_answer_and_none_waits(number):
    with Ahead(Square(fails_at=1), num_workers=1) as ahead:
        for asked in (1, number):
            with pytest.raises(WorkerError, match="number 1 cannot be squared"):
                ahead.get(asked)


def test_a_worker_that_was_killed_is_told_by_its_status():
    with Ahead(Square(), num_workers=1) as ahead:
        os.kill(ahead.get(0)[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"exit status -9\): something killed it") as told:
            [ahead.get(number) for number in range(1, 9)]
    assert "Warning" not in str(told.value)


def test_what_is_jumped_over_is_not_kept():
    """As a rank does whose rows lie between those of others."""
    with Ahead(Square(), num_workers=2) as ahead:
        assert [ahead.get(number)[0] for number in range(0, 40, 2)] == [number**2 for number in range(0, 40, 2)]
        assert ahead.num_waiting <= 4


PARENT = """
import os, signal
from perilune.data.rows_ahead import Ahead
from tests.data.test_rows_ahead import Square
ahead = Ahead(Square(), num_workers=1)
print(ahead.get(0)[1], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_of_a_killed_run_end_by_themselves():
    done = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    worker = int(done.stdout)
    deadline = time.monotonic() + 60
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _alive(worker)


def _alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
