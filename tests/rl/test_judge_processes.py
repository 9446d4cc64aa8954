"""Judges in other processes: the same facets, and what goes wrong in one costs its own episode."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from perilune.data.scenes import ScenesConfig
from perilune.rl.environment import Message, Split, Talk, Task
from perilune.rl.environments.drawing import Drawing
from perilune.rl.judge_processes import JudgeFailed, JudgeProcesses, cores, judged_apart

DRAWING = Drawing(scenes=ScenesConfig(sizes=((56, 56),), max_shapes=2))
SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Odd:
    """Judges by what its task says."""

    name: str = "odd"

    def task(self, number: int, split: Split) -> Task:
        return Task(name=str(number), data={})

    async def episode(self, task: Task, talk: Talk) -> None: ...

    def judge(self, task: Task, messages: Sequence[Message]) -> Mapping[str, float]:
        do = task.data["do"]
        if do == "raise":
            raise ValueError("no such thing")
        if do == "die":
            os._exit(3)
        if do == "sleep":
            time.sleep(600)
        if do == "exit":
            sys.exit("enough")
        if do == "print":
            print("a judge that prints")
        return {"outcome": 0.5, "process": float(os.getpid())}


def _said(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _task(do: str) -> Task:
    return Task(name=do, data={"do": do})


@pytest.fixture
def processes():
    found = JudgeProcesses(2)
    yield found
    found.close()


def test_a_drawing_is_judged_as_in_this_process(processes: JudgeProcesses) -> None:
    for number in range(4):
        task = DRAWING.task(number, "train")
        for text in (task.data["svg"], DRAWING.task(number + 1, "train").data["svg"], "no source"):
            apart = processes.judged(DRAWING, task, _said(text), (), seconds=SECONDS)
            assert apart == DRAWING.judge(task, _said(text))
    assert judged_apart(DRAWING, task, _said(task.data["svg"]), (), seconds=SECONDS)["outcome"] == pytest.approx(1.0)


def test_processes_are_kept_and_never_more_than_allowed(processes: JudgeProcesses) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: processes.judged(Odd(), _task("fine"), (), (), seconds=SECONDS), range(40)))
    assert len({each["process"] for each in found}) <= 2 and processes.count <= 2
    assert all(each["process"] != os.getpid() for each in found)


@pytest.mark.parametrize("do, message", [("raise", "ValueError: no such thing"), ("die", "died")])
def test_a_judge_that_fails_says_why_and_the_next_is_not_hurt(processes: JudgeProcesses, do: str, message: str) -> None:
    with pytest.raises(JudgeFailed, match=message):
        processes.judged(Odd(), _task(do), (), (), seconds=SECONDS)
    assert processes.judged(Odd(), _task("print"), (), (), seconds=SECONDS)["outcome"] == 0.5


def test_judges_that_hang_are_ended_and_use_up_no_process(processes: JudgeProcesses) -> None:
    processes.judged(Odd(), _task("fine"), (), (), seconds=SECONDS)  # started, so that the time below is the judge's
    for _ in range(3):
        with pytest.raises(TimeoutError):
            processes.judged(Odd(), _task("sleep"), (), (), seconds=0.3)
    assert processes.count == 0
    assert processes.judged(Odd(), _task("fine"), (), (), seconds=SECONDS)["outcome"] == 0.5


def test_a_judge_that_hangs_costs_none_of_those_that_wait_for_its_process() -> None:
    one = JudgeProcesses(1)
    try:
        one.judged(Odd(), _task("fine"), (), (), seconds=SECONDS)
        with ThreadPoolExecutor(9) as threads:
            hung = threads.submit(one.judged, Odd(), _task("sleep"), (), (), seconds=2.0)
            time.sleep(0.2)  # it has the process
            waiting = [threads.submit(one.judged, Odd(), _task("fine"), (), (), seconds=60.0) for _ in range(8)]
            assert [each.result()["outcome"] for each in waiting] == [0.5] * 8
            with pytest.raises(TimeoutError):
                hung.result()
        assert one.count == 1
    finally:
        one.close()


def test_a_judge_that_reads_nothing_is_given_up_however_long_the_question(processes: JudgeProcesses) -> None:
    processes.judged(Odd(), _task("fine"), (), (), seconds=SECONDS)
    (judge,) = processes._idle
    os.kill(judge._process.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        processes.judged(Odd(), _task("fine"), _said("x" * (1 << 20)), (), seconds=0.3)
    assert processes.judged(Odd(), _task("fine"), _said("x" * (1 << 20)), (), seconds=SECONDS)["outcome"] == 0.5


def test_an_environment_that_does_not_ask_for_it_is_judged_here() -> None:
    assert judged_apart(Odd(), _task("fine"), (), (), seconds=SECONDS)["process"] == os.getpid()


def test_what_cannot_be_sent_costs_its_own_episode(processes: JudgeProcesses) -> None:
    task: Any = Task(name="strange", data={"do": lambda: None})
    with pytest.raises(Exception, match="(?i)pickle"):
        processes.judged(Odd(), task, (), (), seconds=SECONDS)
    assert processes.judged(Odd(), _task("fine"), (), (), seconds=SECONDS)["outcome"] == 0.5


def test_a_judging_process_imports_no_torch() -> None:
    program = "import sys, perilune.rl.judge_processes, perilune.rl.environments.drawing; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes to cores")
def test_a_run_that_may_use_some_cores_counts_those(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert cores() == 3
