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
from perilune.train.flight_recorder import Operation, Recorded
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


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before_and_the_run_resumes(uninterrupted, cache, tmp_path):
    with pytest.raises(AssertionError):
        run(2, killed, the_run(cache), tmp_path, "save:begin", 2)
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
        assert "rank 1 is in fall_asleep" in said
        assert "'step:begin'; ranks [0] wait for it in all_reduce of 3 Long (number " in said


def stopping(rank: int, root: Path, config: RunConfig) -> None:
    os.dup2(os.open(root / f"said{rank}", os.O_CREAT | os.O_WRONLY), 2)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=3)
    halt = At(rank, "step:begin", 2, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    train(config, runs_folder=root / "runs", quiet=True, on_phase=halt)


@pytest.mark.long
def test_a_process_that_answers_nobody_is_named_by_the_barrier(cache, tmp_path):
    config = the_run(cache, hang_timeout_s=8.0)
    processes = [forks.Process(target=stopping, args=(rank, tmp_path, config)) for rank in range(3)]
    for process in processes:
        process.start()
    for rank in (0, 2):
        processes[rank].join(200)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [EXIT_CODE, None, EXIT_CODE]
    said = (tmp_path / "said0").read_text()
    assert "rank 0, in all_reduce of 3 Long (number " in said and "waits for ranks that do not answer" in said
    assert "1" in said.partition("do not answer")[2], said


STANDS = Standing(rank=0, moved=False, phase="step:begin", waits=True, where="all_reduce (x.py:1)")
GATHER = Operation(group="group 5 mesh_fsdp", members=(0, 1), name="all_gather", number=7, sizes="12 Float")


def came(operation: Operation, *, number: int | None = None) -> Recorded:
    """A recorder of a rank that waits in the operation, or has begun only so many of its group."""
    begun = {(operation.group, operation.members): operation.number if number is None else number}
    return Recorded(pending=(operation,) if number is None else (), begun=begun)


def test_a_rank_that_moved_calls_the_alarm_off():
    assert verdict_of([STANDS, replace(STANDS, rank=1, moved=True)], 1.0) is None
    assert "rank 1 is in" in (verdict_of([STANDS, replace(STANDS, rank=1, waits=False)], 1.0) or "")


def test_the_recorder_names_who_has_not_come_where_stacks_do_not_tell():
    # As on GPUs: no main thread is inside torch.distributed; they wait for their devices.
    ahead = replace(STANDS, waits=False, where="tolist (trainer.py:1)", recorded=came(GATHER))
    behind = replace(ahead, rank=1, recorded=came(GATHER, number=6))
    elsewhere = replace(ahead, rank=2, recorded=Recorded(begun={}))
    verdict = verdict_of([ahead, behind, elsewhere], 1.0) or ""
    assert ": rank 1 is in tolist" in verdict
    assert "ranks [0, 2] wait for it in all_gather of 12 Float (number 7 of group 5 mesh_fsdp)" in verdict
    stuck = verdict_of([replace(ahead, waits=True), replace(ahead, rank=1, waits=True)], 1.0) or ""
    assert "all have come to all_gather of 12 Float" in stuck
