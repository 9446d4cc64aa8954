"""Contracts of the checkpoint folder: complete or absent, verified on load, safe on a full disk."""

import errno
import json
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem

from perilune.train import checkpoint, random_state
from tests.train.full_disks import fill_up


class Toy(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def toy_run(steps: int, seed: int = 0):
    model = Toy(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.count += 1
    return model, optimizer


def save(root, step, *, model=None, optimizer=None, keep_last=3, on_phase=lambda phase: None):
    if model is None:
        model, optimizer = toy_run(2)
    tensors = {
        **checkpoint.model_tensors(model),
        **checkpoint.optimizer_tensors(model, optimizer),
        **random_state.tensors(),
    }
    state = {"step": step, "optimizer_scalars": checkpoint.optimizer_scalars(model, optimizer)}
    return checkpoint.save(root, step=step, tensors=tensors, state=state, keep_last=keep_last, on_phase=on_phase)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_model_optimizer_and_generators_come_back_bit_equal(tmp_path):
    model, optimizer = toy_run(3)
    save(tmp_path, 3, model=model, optimizer=optimizer)
    expected = (random.random(), np.random.rand(), torch.rand(3))

    other, other_optimizer = toy_run(1, seed=1)
    found = checkpoint.find(tmp_path)
    checkpoint.restore(found.folder, found.state, other, other_optimizer)
    assert found.state["step"] == 3
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        state, loaded = optimizer.state.get(ours, {}), other_optimizer.state.get(theirs, {})
        assert set(state) == set(loaded), name
        assert all(torch.equal(state[key], loaded[key]) for key in state), name
    assert (random.random(), np.random.rand()) == expected[:2]
    assert torch.equal(torch.rand(3), expected[2])


def test_keeps_the_newest_and_the_pointer_follows(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step, keep_last=2)
    assert names(tmp_path) == ["latest", "step_00000030", "step_00000040"]
    assert (tmp_path / "latest").read_text() == "step_00000040\n"


@settings(max_examples=20)
@given(keep_last=st.integers(0, 4), steps=st.lists(st.integers(1, 30), min_size=1, max_size=6))
def test_pruning_never_removes_the_checkpoint_latest_points_to(keep_last, steps, tmp_path_factory):
    # Steps in any order: a run that fell back to an older checkpoint writes lower numbers than lie there.
    root = tmp_path_factory.mktemp("checkpoints")
    tensors = {"model.x": torch.ones(1)}
    for step in steps:
        checkpoint.save(root, step=step, tensors=tensors, state={"step": step}, keep_last=keep_last)
        found = checkpoint.find(root)
        assert found.state["step"] == step and found.messages == ()
        present = [path for path in root.iterdir() if path.is_dir()]
        assert 1 <= len(present) <= max(1, keep_last)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the library may run after it, so the save's own tidying is disabled with it."""


@pytest.mark.parametrize(
    "phase",
    ["save:begin", "save:tensors", "save:manifest", "save:renamed", "save:pointer_written", "save:latest"],
)
def test_a_save_killed_in_any_phase_leaves_a_complete_checkpoint(tmp_path, monkeypatch, phase):
    save(tmp_path, 10)

    def kill(reached):
        if reached == phase:
            monkeypatch.setattr(checkpoint, "_remove", lambda path: None)
            raise Killed

    with pytest.raises(Killed):
        save(tmp_path, 20, on_phase=kill)
    monkeypatch.undo()

    checkpoint.clean_leftovers(tmp_path)
    found = checkpoint.find(tmp_path)
    assert found.state["step"] == (20 if phase == "save:latest" else 10)
    assert found.messages == ()
    assert not [name for name in names(tmp_path) if name.startswith(".")]
    save(tmp_path, 20)
    assert checkpoint.find(tmp_path).state["step"] == 20


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGES = {
    "flipped bit": lambda folder: flip_a_byte(next(folder.glob("*.distcp"))),
    "truncated": lambda folder: os.truncate(next(folder.glob("*.distcp")), 10),
    "missing file": lambda folder: (folder / ".metadata").unlink(),
    "edited state": lambda folder: (folder / "state.json").write_text('{"step": 21}'),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "empty manifest": lambda folder: (folder / "manifest.json").write_text(""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_falls_back_to_the_previous_one_with_a_message(tmp_path, damage):
    save(tmp_path, 10)
    folder = save(tmp_path, 20)
    DAMAGES[damage](folder)
    found = checkpoint.find(tmp_path)
    assert found.state["step"] == 10
    assert "step_00000020 is damaged" in found.messages[0]
    assert "step_00000010" in found.messages[1]
    # The run that continues from 10 reaches 20 again and replaces the damaged one.
    save(tmp_path, 20)
    assert checkpoint.find(tmp_path).state["step"] == 20


def test_a_lost_pointer_means_the_newest_complete_checkpoint(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 20)
    for content in ("", "step_00000099\n", "../elsewhere\n"):
        (tmp_path / "latest").write_text(content)
        assert checkpoint.find(tmp_path).state["step"] == 20
    (tmp_path / "latest").unlink()
    assert checkpoint.find(tmp_path).state["step"] == 20


def test_only_damaged_checkpoints_is_an_error_and_none_is_not(tmp_path):
    assert checkpoint.find(tmp_path) is None
    assert checkpoint.find(tmp_path / "absent") is None
    flip_a_byte(next(save(tmp_path, 10).glob("*.distcp")))
    with pytest.raises(checkpoint.CheckpointError, match="no complete checkpoint"):
        checkpoint.find(tmp_path)


@pytest.mark.parametrize("room", [0, 100, 2000])
def test_a_disk_that_gets_full_within_a_tensor_is_the_same_clear_error(tmp_path, monkeypatch, room):
    # torch.save then raises an error about positions in its archive; the system's hangs behind it.
    save(tmp_path, 10)
    before = names(tmp_path)
    # Put back at the end of the test.
    monkeypatch.setattr(FileSystem, "create_stream", FileSystem.create_stream)
    fill_up("step_00000020", room)
    with pytest.raises(checkpoint.CheckpointError, match=r"step 20.*the disk is full"):
        save(tmp_path, 20)
    assert names(tmp_path) == before


@pytest.mark.parametrize("place", ["tensors", "state", "pointer"])
def test_a_full_disk_is_one_clear_error_and_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, place):
    save(tmp_path, 10)
    before = names(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if place == "tensors":
        # Where DCP itself puts bytes on the disk: the error arrives wrapped in DCP's exception.
        monkeypatch.setattr(torch.distributed.checkpoint.filesystem.FileSystem, "create_stream", full)
    elif place == "state":
        monkeypatch.setattr(checkpoint, "_write_json", full)
    else:
        monkeypatch.setattr(checkpoint, "_point_latest", full)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"step 20.*the disk is full.*earlier checkpoints are untouched"
    ):
        save(tmp_path, 20)
    monkeypatch.undo()

    assert checkpoint.find(tmp_path).state["step"] == 10
    # Past the rename the complete folder may lie there, unpointed; nothing half-written ever does.
    assert names(tmp_path) == (before if place != "pointer" else sorted([*before, "step_00000020"]))


def test_nothing_of_ours_is_pickled(tmp_path):
    folder = save(tmp_path, 10)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest) == {".metadata", "__0_0.distcp", "state.json"}
    saved = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    assert {type(entry).__name__ for entry in saved.values()} == {"TensorStorageMetadata"}


def test_another_model_is_refused_by_name(tmp_path):
    save(tmp_path, 10)
    found = checkpoint.find(tmp_path)
    other = nn.Linear(4, 4)
    with pytest.raises(checkpoint.CheckpointError, match=r"does not fit this model.*model\.weight"):
        checkpoint.restore(found.folder, found.state, other, torch.optim.AdamW(other.parameters()))
