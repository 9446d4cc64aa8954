"""What the ranks of one world do, one scenario after the other; the tests look at what they return."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from perilune.model import Decoder
from perilune.optim import Adam, ColumnBlocks, MuonClip, RowBlocks, Stacked, Whole, bucket_step, clip_grad_norm_
from perilune.optim.owned_state import OwnedMomentum
from perilune.optim.sharded import ShardedMuonClip
from tests.distributed.decoder_runs import (
    CONFIG,
    OPTIONS,
    STEPS,
    Counted,
    backward,
    counting,
    counts_of,
    finish_step,
    own_rows,
    rows_of,
    shard_model,
    weights_of,
    whole,
)

SMALL_BUCKETS = 6_000


def every_scenario(rank: int) -> dict[str, Any]:
    world = dist.get_world_size()
    results = {
        "fsdp": fsdp(torch.float32, bucket_bytes=SMALL_BUCKETS),
        "fsdp_bf16": fsdp(torch.bfloat16, bucket_bytes=SMALL_BUCKETS),
        "fsdp_one_bucket": fsdp(torch.float32, steps=1),
        "ddp_alone": ddp(torch.float32, stacks_of_one=True),
        "ddp_bf16": ddp(torch.bfloat16),
        "reduced_to_owners": ddp(torch.float32, reduce_to_owners=True),
        "none_gradients": none_gradients(),
        "heads": heads_whole_on_their_rank(),
        "odd": blocks_across_borders(),
    }
    if world == 2:
        results["expert_rows"] = fsdp(torch.float32, experts_by_rows=True)
    if world == 4:
        results["hsdp"] = fsdp(torch.float32, mesh_shape=(2, 2), bucket_bytes=SMALL_BUCKETS)
        results["hsdp_bf16"] = fsdp(torch.bfloat16, mesh_shape=(2, 2))
        results["fsdp_tp"] = fsdp_times_tensor_parallel()
    return results


def fsdp(
    payload: torch.dtype,
    *,
    mesh_shape: tuple[int, ...] | None = None,
    experts_by_rows: bool = False,
    steps: int = STEPS,
    **options: Any,
) -> dict[str, Any]:
    """Each rank computes the loss of its own rows; FSDP2 averages the gradients into shards."""
    world = dist.get_world_size()
    names = ("replicate", "shard") if mesh_shape else ("shard",)
    mesh = init_device_mesh("cpu", mesh_shape or (world,), mesh_dim_names=names)
    model = Decoder(CONFIG, seed=0)
    shard_model(model, mesh, experts_by_rows=experts_by_rows)
    optimizer = ShardedMuonClip.for_model(model, payload_dtype=payload, **{**OPTIONS, **options})
    clipped, counted = 0, (Counted(), Counted())
    for step in range(steps):
        backward(model, own_rows(step), scale=world)
        if step == 0:
            with counting() as clipping:
                optimizer.clip_grad_norm_(float("inf"))
            with counting() as stepping:
                clipped += finish_step(model, optimizer)
            counted = (clipping, stepping)
        else:
            clipped += finish_step(model, optimizer)
    kinds = [bucket.kind for bucket in optimizer.buckets()]
    # Copies of shards must agree bit for bit; full_tensor reads only one of them.
    local = {name: tensor.to_local().clone() for name, tensor in model.state_dict().items() if _is_sharded(tensor)}
    return {
        "weights": weights_of(model),
        "local": local,
        "clipped": clipped,
        "counted": counted,
        "kinds": kinds,
        "muon_elements": sum(matrix.num_elements for matrix in optimizer.ownership.matrices),
        "exchanged": sum(each.num_elements for each in optimizer.ownership.matrices if each.kind == "exchanged"),
        "empty_shards": sum(not tensor.numel() for tensor in local.values()),
        "state_elements": state_elements(optimizer),
    }


def _is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def ddp(
    payload: torch.dtype, *, stacks_of_one: bool = False, reduce_to_owners: bool = False, steps: int = STEPS
) -> dict[str, Any]:
    """Replicated weights. Every rank computes the gradient of all rows, so that no sum over ranks is rounded; or of its
    own, and `reduce_gradients` adds them up on the owners."""
    world = dist.get_world_size()
    model = Decoder(CONFIG, seed=0)
    optimizer = ShardedMuonClip.for_model(model, payload_dtype=payload, bucket_bytes=SMALL_BUCKETS, **OPTIONS)
    usual, clipped = bucket_step.STACK_ELEMENTS, 0
    bucket_step.STACK_ELEMENTS = 1 if stacks_of_one else usual
    for step in range(steps):
        if reduce_to_owners:
            backward(model, own_rows(step), scale=world)
            optimizer.reduce_gradients()
        else:
            backward(model, rows_of(step))
            if dist.get_rank() > 0:
                # All ranks counted all rows; what is summed over ranks must be counted once.
                for counts in counts_of(model):
                    counts.zero_()
        with counting() as counted:
            clipped += finish_step(model, optimizer)
    bucket_step.STACK_ELEMENTS = usual
    return {
        "weights": weights_of(model),
        "clipped": clipped,
        "counted": counted,
        "num_buckets": len([bucket for bucket in optimizer.buckets() if bucket.kind != "home"]),
        "muon_elements": sum(matrix.num_elements for matrix in optimizer.ownership.matrices),
        "state_elements": state_elements(optimizer),
    }


def state_elements(optimizer: ShardedMuonClip) -> int:
    """Elements of momentum on this rank."""
    total = 0
    for name, value in optimizer.checkpoint_tensors().items():
        if name.endswith("momentum_buffer"):
            if isinstance(value, OwnedMomentum):
                total += sum(block.numel() for block in value.blocks.values())
            else:
                total += (value.to_local() if isinstance(value, DTensor) else value).numel()
    return total


class Loose(nn.Module):
    """Parameters with layouts, and no forward: gradients are put in by hand."""

    def __init__(self, layouts: dict[str, Any], **tensors: Tensor) -> None:
        super().__init__()
        self.layouts = layouts
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))

    def logical_matrices(self) -> dict[str, Any]:
        return self.layouts


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def none_gradients() -> dict[str, Any]:
    """Gradients on rank 0 only after the first step: a matrix, a vector, whole experts; one matrix without any."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    layouts = {
        "vector": Adam(weight_decay=True),
        "experts": Stacked(),
        **{name: RowBlocks((7,)) for name in ("m", "n")},
    }
    start = {
        "vector": random(5, seed=1),
        "experts": random(4, 3, 5, seed=2),
        "m": random(7, 4, seed=3),
        "n": random(7, 4, seed=4),
    }
    gradients = {"vector": random(5, seed=5), "experts": random(4, 3, 5, seed=6), "m": random(7, 4, seed=7)}
    alone = Loose(layouts, **{name: tensor.clone() for name, tensor in start.items()})
    spread = Loose(layouts, **{name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in start.items()})
    options = {"lr": 0.1, "qk_clip_tau": None, "orthogonalize_dtype": torch.float32}
    reference = MuonClip.for_model(alone, **options)
    optimizer = ShardedMuonClip.for_model(spread, payload_dtype=torch.float32, **options)
    for step in range(3):
        for name, gradient in gradients.items():
            seen = gradient.clone()
            if step > 0:
                # What one process would see: the rows of rank 0, zero elsewhere, where the momentum decays.
                seen[-(-gradient.shape[0] // world) :] = 0
            getattr(alone, name).grad = seen
            sharded = distribute_tensor(gradient, mesh, [Shard(0)])
            getattr(spread, name).grad = sharded if rank == 0 or step == 0 else None
        reference.step()
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # no gradient anywhere: nothing moves
    return {
        "weights": {name: whole(parameter) for name, parameter in spread.named_parameters()},
        "expected": {name: whole(parameter) for name, parameter in alone.named_parameters()},
        "start": start,
    }


def heads_whole_on_their_rank() -> dict[str, Any]:
    """Tensor parallel: two heads a rank, q by rows and o by columns, orthogonalised head by head."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    size = 3
    layouts = {"q": RowBlocks((size,) * 2 * world), "o": ColumnBlocks((size,) * 2 * world)}
    shards = {"q": Shard(0), "o": Shard(1)}
    shapes = {"q": (2 * world * size, 7), "o": (5, 2 * world * size)}
    return against_one_process(mesh, layouts, shapes, shards, per_head=True)


def blocks_across_borders() -> dict[str, Any]:
    """Fused matrices whose borders are not those of the shards; columns sharded; a replicated one; fewer rows than
    ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layouts = {
        "qkv": RowBlocks((5, 2, 2), fused=True),
        "columns": RowBlocks((6,)),
        "everywhere": RowBlocks((3,)),
        "short": RowBlocks((1,)),
        "experts": Stacked(row_sizes=(2, 3)),
    }
    shards = {"qkv": Shard(0), "columns": Shard(1), "everywhere": Replicate(), "short": Shard(0), "experts": Shard(2)}
    shapes = {"qkv": (9, 6), "columns": (6, 5), "everywhere": (3, 8), "short": (1, 9), "experts": (3, 5, 6)}
    return against_one_process(mesh, layouts, shapes, shards, per_head=False)


def fsdp_times_tensor_parallel() -> dict[str, Any]:
    """The first matrix is cut by rows twice (strided shards of DTensor), the second by columns and by rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    alone, spread = (nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 7, bias=False)) for _ in range(2))
    with torch.no_grad():
        for number, (one, other) in enumerate(zip(alone.parameters(), spread.parameters(), strict=True)):
            one.copy_(random(*one.shape, seed=number))
            other.copy_(one)
    start = {name: whole(parameter) for name, parameter in alone.named_parameters()}
    parallelize_module(spread, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(spread, mesh=mesh["data"])
    layouts = {"*.weight": Whole()}
    options = {"lr": 0.1, "qk_clip_tau": None, "orthogonalize_dtype": torch.float32, "overrides": layouts}
    reference = MuonClip.for_model(alone, **options)
    optimizer = ShardedMuonClip.for_model(spread, payload_dtype=torch.float32, **options)
    norms = []
    for step in range(3):
        inputs = random(9, 6, seed=10 + step)
        for model, each in ((alone, reference), (spread, optimizer)):
            model(inputs).square().mean().backward()
            norms.append(float(clip_grad_norm_(each, 1.0)))
            each.step()
            each.zero_grad()
    return {
        "weights": {name: whole(parameter) for name, parameter in spread.named_parameters()},
        "expected": {name: whole(parameter) for name, parameter in alone.named_parameters()},
        "start": start,
        "norms": norms,
    }


def against_one_process(mesh, layouts, shapes, shards, *, per_head: bool) -> dict[str, Any]:
    start = {name: random(*shape, seed=number) for number, (name, shape) in enumerate(shapes.items())}
    alone = Loose(layouts, **{name: tensor.clone() for name, tensor in start.items()})
    spread = Loose(
        layouts, **{name: distribute_tensor(each.clone(), mesh, [shards[name]]) for name, each in start.items()}
    )
    options = {"lr": 0.1, "qk_clip_tau": None, "orthogonalize_dtype": torch.float32, "per_head": per_head}
    reference = MuonClip.for_model(alone, **options)
    optimizer = ShardedMuonClip.for_model(spread, payload_dtype=torch.float32, **options)
    for step in range(3):
        for number, (name, shape) in enumerate(shapes.items()):
            gradient = random(*shape, seed=100 * step + number)
            getattr(alone, name).grad = gradient
            getattr(spread, name).grad = distribute_tensor(gradient, mesh, [shards[name]])
        reference.step()
        with counting() as counted:
            optimizer.step()
    return {
        "weights": {name: whole(parameter) for name, parameter in spread.named_parameters()},
        "expected": {name: whole(parameter) for name, parameter in alone.named_parameters()},
        "start": start,
        "counted": counted,
    }
