"""Training goes on while a checkpoint is written, and what is written is what was there when the save began."""

import errno
import json
import os
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from perilune.train import CheckpointError, checkpoint, train
from perilune.train.background_save import THREAD, Saves, staged
from perilune.train.metrics import TIMING_FIELDS
from perilune.train.run_folder import CHECKPOINTS, METRICS
from tests.train.tiny_runs import MOE, tiny_run

LONG_ENOUGH_S = 120.0
"""Nothing waits so long but a test that fails."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def saved(root):
    found = checkpoint.find(root)
    assert found is not None
    return found.state["step"], checkpoint.load_tensors(found.folder)


def begin(saves, root, tensor, *, step=1, on_phase=lambda phase: None):
    saves.begin(root, step=step, tensors={"model.x": tensor}, state={"step": step}, keep_last=2, on_phase=on_phase)


class Gate:
    """Holds the thread of a save at one phase until it is opened."""

    def __init__(self, phase):
        self.phase, self.reached, self.opened = phase, threading.Event(), threading.Event()

    def __call__(self, phase):
        if phase == self.phase:
            self.reached.set()
            assert self.opened.wait(LONG_ENOUGH_S), "nobody opened the gate: the loop waited for the save"


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_save_holds_what_the_tensors_were_when_it_began(tmp_path):
    tensor, gate = torch.arange(6.0), Gate("save:begin")
    with Saves() as saves:
        begin(saves, tmp_path, tensor, on_phase=gate)
        tensor.add_(100)
        gate.opened.set()
    step, tensors = saved(tmp_path)
    assert step == 1 and torch.equal(tensors["model.x"], torch.arange(6.0))


def test_the_next_save_waits_for_the_one_before(tmp_path):
    under_way, most = [0], [0]

    def count(phase):
        under_way[0] += {"save:begin": 1, "save:pruned": -1}.get(phase, 0)
        most[0] = max(most[0], under_way[0])

    with Saves() as saves:
        for step in range(1, 5):
            begin(saves, tmp_path, torch.full((3,), float(step)), step=step, on_phase=count)
    assert most == [1] and under_way == [0]
    assert saved(tmp_path)[0] == 4


def test_an_error_is_known_without_waiting_and_raised_once(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_json", full_disk)
    saves = Saves()
    begin(saves, tmp_path, torch.ones(2))
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()
    assert saves.failed()
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"step 1.*the disk is full.*free some space and resume"):
        begin(saves, tmp_path, torch.ones(2), step=2)
    assert not saves.failed()
    begin(saves, tmp_path, torch.ones(2), step=3)
    saves.wait()
    assert saved(tmp_path)[0] == 3


def test_an_error_on_its_way_out_is_not_hidden_by_that_of_the_save(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_write_json", full_disk)

    def fail_after_a_save():
        with Saves() as saves:
            begin(saves, tmp_path, torch.ones(2))
            raise ValueError("mine")

    with pytest.raises(ValueError, match="^mine$"):
        fail_after_a_save()
    assert THREAD not in [thread.name for thread in threading.enumerate()]


def test_a_person_who_wants_out_does_not_wait_for_the_disk(tmp_path):
    gate, waited = Gate("save:begin"), []

    def interrupted():
        with Saves() as saves:
            begin(saves, tmp_path, torch.ones(2), on_phase=gate)
            assert gate.reached.wait(LONG_ENOUGH_S)
            waited.append(saves)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert waited[0].under_way(), "the write goes on, and nobody waited for it"
    gate.opened.set()
    waited[0].wait()


def test_a_shard_stays_a_shard_of_the_same_whole(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.arange(12.0).view(4, 3)
        shard = distribute_tensor(whole, mesh, [Shard(0)])
        copy = staged({"model.x": shard})["model.x"]
        assert isinstance(copy, DTensor) and copy.placements == (Shard(0),) and copy.shape == (4, 3)
        with Saves() as saves:
            begin(saves, tmp_path, shard)
            shard.to_local().zero_()
    finally:
        dist.destroy_process_group()
    assert torch.equal(saved(tmp_path)[1]["model.x"], torch.arange(12.0).view(4, 3))


@pytest.mark.gpu
def test_what_lies_on_a_gpu_is_staged_in_pinned_host_memory():
    tensor = torch.arange(6.0, device="cuda")
    copy = staged({"model.x": tensor})["model.x"]
    tensor.add_(1)
    assert copy.device.type == "cpu" and copy.is_pinned() and torch.equal(copy, torch.arange(6.0))
    dist.init_process_group("cuda:nccl,cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard = distribute_tensor(torch.arange(12.0, device="cuda"), init_device_mesh("cuda", (1,)), [Shard(0)])
        copy = staged({"model.x": shard})["model.x"]
        assert isinstance(copy, DTensor) and copy.to_local().device.type == "cpu"
        assert torch.equal(copy.to_local(), torch.arange(12.0))
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


def untimed(folder):
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMING_FIELDS} for line in lines]


def test_steps_are_taken_while_a_checkpoint_is_written(cache, tmp_path):
    gate, begun = Gate("save:tensors"), []

    def on_phase(phase):
        begun.append(phase)
        # The save of step 2 is let go in step 4: the two steps between do not wait for it.
        if phase == "step:begin" and begun.count(phase) == 4:
            assert gate.reached.wait(LONG_ENOUGH_S)
            assert not (tmp_path / "tiny" / CHECKPOINTS / "latest").exists()
            gate.opened.set()
        gate(phase)

    train(tiny_run(cache), runs_folder=tmp_path, quiet=True, on_phase=on_phase)
    assert gate.reached.is_set()


def test_a_run_that_saves_in_the_background_leaves_what_one_that_waits_leaves(cache, tmp_path):
    found = {}
    for background in (True, False):
        config = tiny_run(cache, model={"moe": MOE}, trainer={"checkpoint_in_background": background})
        train(config, runs_folder=tmp_path / str(background), quiet=True)
        found[background] = (
            untimed(tmp_path / str(background) / "tiny"),
            *saved(tmp_path / str(background) / "tiny" / CHECKPOINTS),
        )
    (records, step, tensors), (other_records, other_step, others) = found[True], found[False]
    assert step == other_step == 6 and records == other_records
    assert set(tensors) == set(others)
    assert all(torch.equal(tensors[name], others[name]) for name in others)


def test_a_full_disk_behind_the_training_ends_the_run_at_the_next_step_and_it_resumes(cache, tmp_path, monkeypatch):
    config = tiny_run(cache, trainer={"steps": 12, "checkpoint_every": 4, "eval_every": 0})
    real, failed = checkpoint._write_tensors, threading.Event()

    def sometimes_full(folder, tensors, group):
        if folder.name.endswith("step_00000008"):
            failed.set()
            full_disk()
        real(folder, tensors, group)

    begun = []

    def on_phase(phase):
        begun.append(phase)
        if phase == "step:begin" and begun.count(phase) == 9:
            assert failed.wait(LONG_ENOUGH_S)
            for thread in threading.enumerate():
                if thread.name == THREAD:
                    thread.join()

    monkeypatch.setattr(checkpoint, "_write_tensors", sometimes_full)
    with pytest.raises(CheckpointError, match=r"step 8.*the disk is full.*earlier checkpoints are untouched"):
        train(config, runs_folder=tmp_path / "broken", quiet=True, on_phase=on_phase)
    monkeypatch.undo()
    folder = tmp_path / "broken" / "tiny"
    assert untimed(folder)[-1]["step"] == 9, "the step after the failure is the last"
    assert sorted(path.name for path in (folder / CHECKPOINTS).iterdir()) == ["latest", "step_00000004"]
    train(config, runs_folder=tmp_path / "broken", resume=True, quiet=True)
    train(config, runs_folder=tmp_path / "alone", quiet=True)
    assert untimed(folder) == untimed(tmp_path / "alone" / "tiny")


def test_the_last_save_is_waited_for(cache, tmp_path):
    gate = Gate("save:manifest")
    timer = threading.Timer(0.5, gate.opened.set)
    timer.start()
    train(tiny_run(cache, trainer={"checkpoint_every": 0}), runs_folder=tmp_path, quiet=True, on_phase=gate)
    assert gate.opened.is_set() and saved(tmp_path / "tiny" / CHECKPOINTS)[0] == 6
