"""What happens to a run on two ranks when one of them is killed, asked to stop, computes nonsense, or hangs."""

import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from perilune.train import RunConfig, step, train
from perilune.train.interrupt import Interrupted
from perilune.train.run_folder import CHECKPOINTS
from perilune.train.watchdog import EXIT_CODE, Standing, verdict_of
from tests.distributed.gloo import run
from tests.distributed.test_trained_runs import TOLERANCE
from tests.distributed.trained_runs import losses_of, trained, worst_difference
from tests.train.killable_runs import forks
from tests.train.tiny_runs import tiny_run

pytestmark = pytest.mark.distributed

STEPS = 5


def the_run(cache: Path, **trainer: Any) -> RunConfig:
    settings = {"steps": STEPS, "micro_batch_rows": 1, "eval_every": 0, "checkpoint_every": 2, "sample_prompts": ()}
    return tiny_run(cache, trainer={**settings, **trainer})


@pytest.fixture(scope="module")
def uninterrupted(cache, tmp_path_factory) -> Path:
    runs = tmp_path_factory.mktemp("uninterrupted")
    trained(the_run(cache), runs, world=None)
    return runs / "tiny"


class At:
    """Does something on rank 1 when it reaches the count-th of the phases of one name."""

    def __init__(self, rank: int, phase: str, count: int, act) -> None:
        self.left, self.phase, self.act = count if rank == 1 else -1, phase, act

    def __call__(self, phase: str) -> None:
        self.left -= phase == self.phase
        if self.left == 0:
            self.left = -1
            self.act()


def killed(rank: int, config: RunConfig, runs: Path, phase: str, count: int) -> None:
    on_phase = At(rank, phase, count, lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(config, runs_folder=runs, quiet=True, on_phase=on_phase)


@pytest.mark.parametrize("phase,count", [("step:backward", 4), ("save:begin", 2)])
def test_a_run_whose_rank_was_killed_resumes_to_the_losses_of_the_uninterrupted_one(
    uninterrupted, cache, tmp_path, phase, count
):
    with pytest.raises(AssertionError):
        run(2, killed, the_run(cache), tmp_path, phase, count)
    assert (tmp_path / "tiny" / CHECKPOINTS / "latest").read_text().strip() == "step_00000002"
    trained(the_run(cache), tmp_path, world=2)
    assert worst_difference(losses_of(tmp_path / "tiny"), losses_of(uninterrupted)) <= TOLERANCE


def terminated(rank: int, config: RunConfig, runs: Path) -> int:
    on_phase = At(rank, "step:backward", 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    try:
        train(config, runs_folder=runs, quiet=True, on_phase=on_phase)
    except Interrupted as stopped:
        return stopped.signal_number
    return 0


def test_one_rank_that_is_asked_to_stop_makes_all_save_and_stop(uninterrupted, cache, tmp_path):
    assert run(2, terminated, the_run(cache), tmp_path) == [signal.SIGTERM, signal.SIGTERM]
    assert (tmp_path / "tiny" / CHECKPOINTS / "latest").read_text().strip() == "step_00000003"
    trained(the_run(cache), tmp_path, world=2)
    assert worst_difference(losses_of(tmp_path / "tiny"), losses_of(uninterrupted)) <= TOLERANCE


def poisoned(rank: int, config: RunConfig, runs: Path) -> dict[str, Any]:
    """The loss of the last micro-batch of step 3 is not a number, on the rank that has it."""
    real, calls = step.backward, []
    per_step = config.trainer.global_batch_rows // (dist.get_world_size() if dist.is_initialized() else 1)
    has_it = not dist.is_initialized() or rank == 1

    def backward(*arguments):
        calls.append(0)
        loss = real(*arguments)
        return loss * math.nan if has_it and len(calls) == 3 * per_step else loss

    step.backward = backward
    try:
        return train(config, runs_folder=runs, quiet=True)
    finally:
        step.backward = real


def test_nonsense_on_one_rank_skips_the_step_on_all(cache, tmp_path):
    alone = poisoned(0, the_run(cache), tmp_path / "alone")
    together = run(2, poisoned, the_run(cache), tmp_path / "together")[0]
    assert together["skipped_steps"] == alone["skipped_steps"] == 1
    expected, found = (losses_of(tmp_path / name / "tiny") for name in ("alone", "together"))
    assert found[2][0] is None, "not a number has no other name in JSON"
    del expected[2], found[2]
    assert worst_difference(found, expected) <= TOLERANCE


def hanging(rank: int, root: Path, config: RunConfig) -> None:
    os.dup2(os.open(root / f"said{rank}", os.O_CREAT | os.O_WRONLY), 2)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    train(config, runs_folder=root / "runs", quiet=True, on_phase=At(rank, "step:begin", 2, fall_asleep))


def fall_asleep() -> None:
    time.sleep(1000)


def test_a_rank_that_hangs_is_named_and_the_run_ends(cache, tmp_path):
    config = replace(the_run(cache, hang_timeout_s=8.0), name="tiny")
    processes = [forks.Process(target=hanging, args=(rank, tmp_path, config)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [EXIT_CODE, EXIT_CODE]
    for rank in range(2):
        said = (tmp_path / f"said{rank}").read_text()
        assert "rank 1 is in fall_asleep" in said and "'step:begin'; ranks [0] wait for it" in said


def test_a_rank_that_moved_calls_the_alarm_off():
    stands = Standing(rank=0, moved=False, phase="step:begin", waits=True, where="all_reduce (x.py:1)")
    assert verdict_of([stands, replace(stands, rank=1, moved=True)], 1.0) is None
    assert "rank 1 is in" in (verdict_of([stands, replace(stands, rank=1, waits=False)], 1.0) or "")
