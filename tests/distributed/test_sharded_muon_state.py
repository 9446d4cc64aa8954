"""A checkpoint of four ranks continues on any other number of them, and in one process, in either mode."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from perilune.model import Decoder
from perilune.optim import MuonClip
from perilune.optim.sharded import ShardedMuonClip
from tests.distributed.decoder_runs import (
    CONFIG,
    OPTIONS,
    STEPS,
    backward,
    counts_of,
    finish_step,
    largest_change_error,
    one_process,
    own_rows,
    rows_of,
    shard_model,
    weights_of,
)
from tests.distributed.gloo import run

pytestmark = pytest.mark.distributed
SAVED_AFTER = 3


def build(mode: str) -> tuple[Decoder, ShardedMuonClip]:
    model = Decoder(CONFIG, seed=0)
    if mode == "fsdp":
        shard_model(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, ShardedMuonClip.for_model(model, payload_dtype=torch.float32, **OPTIONS)


def train(mode: str, model: Decoder, optimizer: ShardedMuonClip, start: int, stop: int) -> None:
    for step in range(start, stop):
        if mode == "fsdp":
            backward(model, own_rows(step), scale=dist.get_world_size())
        else:
            backward(model, rows_of(step))
            if dist.get_rank() > 0:
                for counts in counts_of(model):
                    counts.zero_()
        finish_step(model, optimizer)


def tensors_of(model: Decoder, optimizer: Any) -> dict[str, Any]:
    if isinstance(optimizer, ShardedMuonClip):
        state = optimizer.checkpoint_tensors()
    else:
        state = {
            f"{name}.{entry}": value
            for name, parameter in model.named_parameters()
            for entry, value in optimizer.state[parameter].items()
        }
    return {
        **{f"model.{name}": tensor for name, tensor in model.state_dict().items()},
        **{f"optimizer.{name}": tensor for name, tensor in state.items()},
    }


def save_and_continue(rank: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    results = {}
    for mode in ("fsdp", "ddp"):
        model, optimizer = build(mode)
        train(mode, model, optimizer, 0, SAVED_AFTER)
        dcp.save(tensors_of(model, optimizer), checkpoint_id=folder / mode)
        train(mode, model, optimizer, SAVED_AFTER, STEPS)
        results[mode] = weights_of(model)
    return results


def load_and_continue(rank: int, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    results = {}
    for saved in ("fsdp", "ddp"):
        for mode in ("fsdp", "ddp"):
            model, optimizer = build(mode)
            dcp.load(tensors_of(model, optimizer), checkpoint_id=folder / saved)
            train(mode, model, optimizer, SAVED_AFTER, STEPS)
            results[f"{saved} to {mode}"] = weights_of(model)
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("checkpoints")
    uninterrupted = run(4, save_and_continue, folder)[0]
    start = one_process(steps=0)["start"]
    return folder, {mode: {"start": start, "weights": weights} for mode, weights in uninterrupted.items()}


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(8, marks=pytest.mark.long)])
def test_a_checkpoint_of_four_ranks_continues_on_another_number(saved, world):
    folder, uninterrupted = saved
    for way, weights in run(world, load_and_continue, folder)[0].items():
        error, name = largest_change_error(weights, uninterrupted[way.split()[0]])
        assert error < 1e-3, (way, name)


@pytest.mark.parametrize("mode", ["fsdp", "ddp"])
def test_a_checkpoint_of_four_ranks_continues_in_a_plain_process(saved, mode):
    folder, uninterrupted = saved
    model = Decoder(CONFIG, seed=0)
    optimizer = MuonClip.for_model(model, **OPTIONS)
    dcp.load(tensors_of(model, optimizer), checkpoint_id=folder / mode, no_dist=True)
    for step in range(SAVED_AFTER, STEPS):
        backward(model, rows_of(step))
        finish_step(model, optimizer)
    error, name = largest_change_error(weights_of(model), uninterrupted[mode])
    assert error < 1e-3, name


def state_round_trip(rank: int) -> dict[str, Any]:
    """A rank's own state_dict, and the whole momentum of one process, into a new optimizer."""
    model, optimizer = build("ddp")
    train("ddp", model, optimizer, 0, 1)
    other_model, other = build("ddp")
    other.load_state_dict(optimizer.state_dict())
    whole: dict[str, Any] = optimizer.state_dict()
    for parameter, number in zip(
        (each for group in optimizer.param_groups for each in group["params"]),
        (each for group in whole["param_groups"] for each in group["params"]),
        strict=True,
    ):
        if "momentum_buffer" in whole["state"][number]:
            whole["state"][number] = {"momentum_buffer": torch.full_like(parameter, 2.0)}
    third_model, third = build("ddp")
    third.load_state_dict(whole)
    key = next(name for name in optimizer.checkpoint_tensors() if name.endswith("experts.down_proj.momentum_buffer"))
    return {
        name: [block.clone() for block in each.checkpoint_tensors()[key].blocks.values()]
        for name, each in (("first", optimizer), ("other", other), ("third", third))
    }


def test_state_of_a_rank_and_of_a_whole_process_load_into_replicated_parameters():
    ranks = run(2, state_round_trip)
    assert sum(len(rank["first"]) for rank in ranks) == 4
    for rank in ranks:
        assert rank["first"]
        for first, other, third in zip(rank["first"], rank["other"], rank["third"], strict=True):
            assert first.equal(other) and first.any()
            assert third.eq(2.0).all()
