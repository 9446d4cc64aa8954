"""What a mesh costs before there is one: memory and traffic of every rank, from the real model without devices.

The model is built on the meta device, spread over a mesh of `fake` process groups (parallel.py) and run once, forward
and backward, on tensors without values (FakeTensorMode), with stand-ins for kernels and routing (stand_ins.py).
Counted are the bytes of this rank's shards, of everything autograd keeps, and of every collective that is called.

    memory of a rank = parameters + gradients + optimizer + gathered weights + activations
    parameters 4 bytes, gradients 4, Muon's momentum 4 (AdamW 8), weights that travel 2:   14 bytes a parameter of Muon

What is not counted: the layer that is computed again and the whole gradients of the layer at work (a few more layers'
worth), the allocator's fragments, buffers of communication libraries, workspaces of kernels.
Traffic is what a rank sends in one micro-batch: (w - 1) / w of a gathered, reduced or exchanged buffer, twice that for
an all-reduce. FSDP gathers and reduces once per micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from perilune.model import Decoder, ModelConfig
from perilune.optim import Adam
from perilune.optim.plan import plan_parameters
from perilune.train.parallel import Meshes, ParallelConfig, spread
from perilune.train.parallel_pipeline import keep_stage, stage_layers, wire_tensors
from perilune.train.stand_ins import stand_ins

PER_PARAMETER = 4 + 4 + 4 + 2
"""Master weight, gradient, momentum, travelling copy."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    axis: str
    operation: str
    calls: int
    num_bytes: int
    """Sent by one rank in one micro-batch."""


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One rank of one pipeline stage; all ranks of a stage cost the same."""

    stage: int
    num_parameters: int
    """Of the whole stage."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    """Whole weights that exist at one time: the root group, the vocabulary, and two layers, one of them ahead."""
    activation_bytes: int
    """Kept for the backward pass by one micro-batch."""
    in_flight: int
    """Micro-batches whose activations are kept at one time."""
    traffic: tuple[Traffic, ...]

    @property
    def total_bytes(self) -> int:
        state = self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
        return state + self.gathered_bytes + self.activation_bytes * self.in_flight

    @property
    def traffic_bytes(self) -> int:
        return sum(each.num_bytes for each in self.traffic)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    world_size: int
    parallel: ParallelConfig
    row_tokens: int
    num_parameters: int
    stages: tuple[StageCost, ...]

    @property
    def state_bytes(self) -> float:
        """Measured, mean of ranks: weights, gradients, optimizer, and half of the weights again (they travel)."""
        halves = [2.5 * cost.parameter_bytes + cost.optimizer_bytes for cost in self.stages]
        return sum(halves) / len(halves)

    @property
    def expected_state_bytes(self) -> float:
        """By hand: 14 bytes a parameter, spread over all ranks that share it, on average over ranks."""
        return PER_PARAMETER * self.num_parameters * self.parallel.dp_replicate / self.world_size

    def table(self) -> str:
        sizes = " x ".join(f"{name} {getattr(self.parallel, name)}" for name in ("pp", "dp_replicate", "dp_shard", "cp",
                                                                               "tp"))  # fmt: skip
        lines = [
            f"{self.num_parameters:,} parameters on {self.world_size} ranks: {sizes}, ep {self.parallel.ep}; "
            f"rows of {self.row_tokens:,} tokens, recompute {self.parallel.recompute}",
            f"{'stage':>5} {'weights':>9} {'gradients':>9} {'optimizer':>9} {'gathered':>9} {'activations':>14} "
            f"{'total':>9} {'sent a micro-batch':>19}",
        ]
        for cost in self.stages:
            kept = f"{cost.in_flight} x {_gib(cost.activation_bytes)}"
            lines.append(
                f"{cost.stage:>5} {_gib(cost.parameter_bytes):>9} {_gib(cost.gradient_bytes):>9} "
                f"{_gib(cost.optimizer_bytes):>9} {_gib(cost.gathered_bytes):>9} {kept:>14} "
                f"{_gib(cost.total_bytes):>9} {_gib(cost.traffic_bytes):>19}"
            )
        lines.append(
            f"state and a travelling copy of own weights: {_gib(self.state_bytes)} a rank; "
            f"by hand, {PER_PARAMETER} bytes a parameter: {_gib(self.expected_state_bytes)}"
        )
        lines.append("all in GiB; sent by the first stage:")
        lines += [
            f"  {each.axis:<13} {each.operation:<15} {each.calls:>5} calls {_gib(each.num_bytes):>9}"
            for each in self.stages[0].traffic
        ]
        return "\n".join(lines)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f}"


def dry_run(
    model: ModelConfig, parallel: ParallelConfig, *, world_size: int, row_tokens: int, micro_batches: int = 1
) -> DryRun:
    """Costs of training `model` on `world_size` ranks with micro-batches of one row of `row_tokens`.

    Uses the default process group of this process, which must not have one.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without ranks: it makes up its own; run it outside of torchrun")
    config = parallel.check(model, world_size)
    if row_tokens % config.cp:
        raise ValueError(f"row_tokens={row_tokens} cannot be cut into parallel.cp={config.cp} equal parts")
    stages = []
    for stage in range(config.pp):
        with _pretended_ranks(rank=stage * world_size // config.pp, world_size=world_size):
            stages.append(_stage_cost(model, config, stage, row_tokens, micro_batches))
    return DryRun(
        world_size=world_size,
        parallel=config,
        row_tokens=row_tokens,
        num_parameters=sum(cost.num_parameters for cost in stages),
        stages=tuple(stages),
    )


@contextmanager
def _pretended_ranks(*, rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _stage_cost(
    model_config: ModelConfig, config: ParallelConfig, stage: int, row_tokens: int, micro_batches: int
) -> StageCost:
    meshes = Meshes.of(config, "cpu")
    with torch.device("meta"):
        model = Decoder(model_config)
    if config.pp > 1:
        keep_stage(model, stage, config.pp)
    own_tokens = row_tokens // config.cp
    with stand_ins():
        # Meshes have values, so the model is spread before the mode without values begins.
        spread(model, config, meshes)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            for router in model._routers():
                router.eval()  # counting what was chosen needs values
            collectives, kept = _Collectives(_axes(meshes)), _Kept()
            with collectives:
                with kept, kept.what_checkpoints_keep():
                    outputs = _forward(model, config, stage, own_tokens)
                torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    traffic = collectives.found()
    if stage < config.pp - 1:
        traffic += (_wire(model_config, config, stage, own_tokens),)
    state = _state_bytes(model)
    return StageCost(
        stage=stage,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameter_bytes=state[0],
        gradient_bytes=state[0],
        optimizer_bytes=state[1],
        gathered_bytes=_gathered_bytes(model),
        activation_bytes=kept.num_bytes,
        in_flight=min(micro_batches, config.pp - stage),
        traffic=traffic,
    )


def _forward(model: Decoder, config: ParallelConfig, stage: int, tokens: int) -> list[Tensor]:
    row = torch.zeros(1, tokens, dtype=torch.int64)
    if config.pp == 1:
        return [model.loss(row, row)]
    given = [row]
    if stage > 0:
        first = stage_layers(model.config.num_hidden_layers, config.pp)[stage].start
        shape = (1, tokens, model.config.hidden_size)
        given = [
            torch.empty(shape, dtype=model.compute_dtype, requires_grad=True)
            for _ in range(wire_tensors(model.config, first))
        ]
    outputs = model(*given, targets=row if stage == config.pp - 1 else None)
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _wire(model: ModelConfig, config: ParallelConfig, stage: int, tokens: int) -> Traffic:
    tensors = wire_tensors(model, stage_layers(model.num_hidden_layers, config.pp)[stage].stop)
    num_bytes = tensors * tokens * model.hidden_size * model.dtype().itemsize
    return Traffic(axis="pp", operation="send", calls=tensors, num_bytes=num_bytes)


# ---------------------------------------------------------------------------------------------------------------------
# What is counted


def _state_bytes(model: Decoder) -> tuple[int, int]:
    """(parameters, optimizer) of this rank."""
    parameters = optimizer = 0
    for entry in plan_parameters(model):
        local = entry.parameter.to_local() if isinstance(entry.parameter, DTensor) else entry.parameter
        size = local.numel() * local.element_size()
        parameters += size
        optimizer += 2 * size if isinstance(entry.layout, Adam) else size
    return parameters, optimizer


def _gathered_bytes(model: Decoder) -> int:
    layers = []
    for layer in model.layers:
        groups = [module for module in layer.modules() if isinstance(module, FSDPModule)]
        # Attention and MLP are one group; parameters of nested groups are counted once.
        layers.append(_whole_bytes({parameter for module in groups for parameter in module.parameters()}, model))
    everything = set(model.parameters())
    others = everything - {parameter for layer in model.layers for parameter in layer.parameters()}
    return _whole_bytes(others, model) + sum(sorted(layers)[-2:])


def _whole_bytes(parameters: set[nn.Parameter], model: Decoder) -> int:
    """As layers see them: gathered over data ranks, still split over tp and ep; matrices in the compute dtype."""
    total = 0
    for parameter in parameters:
        size = parameter.numel()
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            for dim, name in enumerate(names):
                if name in ("tp", "ep") and not parameter.placements[dim].is_replicate():
                    size //= parameter.device_mesh.size(dim)
        total += size * (model.compute_dtype.itemsize if parameter.ndim > 1 else parameter.element_size())
    return total


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd keeps: every storage once, parameters not at all."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._storages: dict[int, Any] = {}
        super().__init__(self._keep, lambda kept: kept)

    def _keep(self, tensor: Tensor) -> Tensor:
        self._count(tensor)
        return tensor

    @contextmanager
    def what_checkpoints_keep(self) -> Iterator[None]:
        """A checkpoint keeps its arguments, which are no results that autograd saves."""

        def counted(function: Any, *args: Any, **options: Any) -> Any:
            for leaf in tree_leaves(args):
                if isinstance(leaf, Tensor):
                    self._count(leaf)
            return checkpoint(function, *args, **options)

        with mock.patch("perilune.train.recompute.checkpoint", counted):
            yield

    def _count(self, tensor: Tensor) -> None:
        owner = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        if not isinstance(owner, nn.Parameter) and storage._cdata not in self._storages:
            self._storages[storage._cdata] = storage  # held, so that no other can take its number
            self.num_bytes += storage.nbytes()


def _axes(meshes: Meshes) -> dict[str, str]:
    """Name of a process group -> name of its axis. A group of all ranks of two axes has the name of the wider one."""
    found: dict[str, str] = {}
    for mesh in (meshes.tokens, meshes.experts, meshes.dense):
        for name in mesh.mesh_dim_names or ():
            found[mesh.get_group(name).group_name] = name
    return found


SENT = {
    "allreduce_": ("all-reduce", 2),
    "_allgather_base_": ("all-gather", 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
}
"""Operator -> what it is, and how often its buffer is sent."""


class _Collectives(TorchDispatchMode):
    """Counts calls of collectives by axis and kind, and the bytes a rank sends in them."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.axes = axes
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self.sent: dict[tuple[str, str], int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("c10d::")
        if func.namespace == "c10d" and name in SENT:
            kind, passes = SENT[name]
            group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            ranks = group.size()
            tensors = [tensor for arg in args for tensor in (arg if isinstance(arg, list) else [arg])
                       if isinstance(tensor, Tensor)]  # fmt: skip
            largest = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            key = (self.axes.get(group.group_name, "world"), kind)
            if ranks > 1:
                self.calls[key] += 1
                self.sent[key] += passes * largest * (ranks - 1) // ranks
        return func(*args, **(kwargs or {}))

    def found(self) -> tuple[Traffic, ...]:
        return tuple(
            Traffic(axis=axis, operation=kind, calls=calls, num_bytes=self.sent[axis, kind])
            for (axis, kind), calls in sorted(self.calls.items())
        )
