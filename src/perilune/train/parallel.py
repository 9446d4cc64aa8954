"""Training on many ranks: from one ParallelConfig to a mesh of devices and a model that is spread over it.

    name           what is split                     file                    what travels
    dp_replicate   tokens (copies of the shards)     parallel_data.py        gradients of shards
    dp_shard       tokens, and parameters            parallel_data.py        weights of a layer, gradients
    cp             each row of tokens, parameters    parallel_context.py     a state and a few rows; small latents
    tp             heads, MLP columns, experts       parallel_tensor.py      activations, twice a sublayer each way
    ep             experts, among dp_shard and cp    parallel_expert.py      rows to experts and back
    pp             layers                            parallel_pipeline.py    the residual stream between stages

World = pp x dp_replicate x dp_shard x cp x tp, the last one varying fastest: its ranks sit next to each other. `ep` is
not a factor: experts are spread over ranks that already split tokens, so it divides dp_shard x cp.

The loss of a rank is a sum over its own targets, and gradients are sums over ranks: a step is that of one process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from perilune.model import Decoder, ModelConfig
from perilune.model.moe import Router
from perilune.train.parallel_context import cut_context, split_context
from perilune.train.parallel_data import shard_data
from perilune.train.parallel_expert import split_experts
from perilune.train.parallel_pipeline import Pipeline, Schedule, keep_stage
from perilune.train.parallel_tensor import decoder_layers, split_tensors
from perilune.train.ranks import Part
from perilune.train.recompute import Recompute, recompute_layers

AXES = ("dp_replicate", "dp_shard", "tp", "ep", "cp", "pp")


class ParallelError(ValueError):
    """Ranks and model cannot be put together as asked; the message says why and what would do."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    dp_replicate: int = 1
    """Copies of the sharded model (HSDP): only gradients travel between them."""
    dp_shard: int | None = None
    """Ranks that share out parameters and tokens (FSDP2). None: all that the other sizes leave."""
    tp: int = 1
    """Ranks that share out heads, MLP columns and experts, and read the same tokens. Keep it inside a node."""
    ep: int = 1
    """Ranks that share out experts; a divisor of dp_shard x cp, not a factor of the world."""
    cp: int = 1
    """Ranks that share out every row of tokens."""
    pp: int = 1
    """Stages of layers."""
    schedule: Schedule = "1f1b"
    """Order of micro-batches in the stages of pp: "1f1b" keeps few of them, "gpipe" all forwards first."""
    recompute: Recompute = "none"
    """Activations computed again in the backward pass: none, selective (all but products), full (all of a layer)."""
    param_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """In which weights travel. "auto": the model's compute dtype. Gradients are always reduced in float32."""
    reshard_after_forward: bool = True
    """Free a layer's weights between its forward and its backward."""

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if (size is None and name != "dp_shard") or (size is not None and size < 1):
                raise ParallelError(f"parallel.{name} is {size!r}, expected at least 1")
        if self.param_dtype not in ("auto", "float32", "bfloat16"):
            raise ParallelError(
                f'parallel.param_dtype is {self.param_dtype!r}, expected "auto", "float32" or "bfloat16"'
            )

    def resolved(self, world_size: int) -> ParallelConfig:
        """With dp_shard as a number; ParallelError unless the sizes multiply to the world."""
        others = self.pp * self.dp_replicate * self.cp * self.tp
        named = f"pp={self.pp} x dp_replicate={self.dp_replicate} x cp={self.cp} x tp={self.tp}"
        if self.dp_shard is None:
            if world_size % others:
                raise ParallelError(
                    f"parallel: {named} = {others} does not divide the {world_size} ranks of this run; "
                    f"start a multiple of {others} ranks, or lower one of them"
                )
            return replace(self, dp_shard=world_size // others)
        if others * self.dp_shard != world_size:
            raise ParallelError(
                f"parallel: {named} x dp_shard={self.dp_shard} = {others * self.dp_shard}, but this run has "
                f"{world_size} ranks; start {others * self.dp_shard}, or leave dp_shard None to take what is left"
            )
        return self

    def check(self, model: ModelConfig, world_size: int) -> ParallelConfig:
        """`resolved`, and refuses what this model cannot be cut into."""
        config = self.resolved(world_size)
        assert config.dp_shard is not None
        pattern = set(model.layer_pattern())
        if config.tp > 1:
            sizes = {"intermediate_size": model.intermediate_size}
            if "kda" in pattern:
                sizes["kda.num_heads"] = model.kda.num_heads
            if "mla" in pattern:
                sizes["mla.num_attention_heads"] = model.mla.num_attention_heads
            if model.moe is not None and model.moe.num_shared_experts:
                sizes["shared experts' width"] = model.moe.moe_intermediate_size * model.moe.num_shared_experts
            for name, size in sizes.items():
                if size % config.tp:
                    raise ParallelError(
                        f"parallel.tp={config.tp} cannot split {name}={size} evenly: "
                        f"take a divisor of it, such as {_nearest_divisor(size, config.tp)}"
                    )
            if model.vision is not None:
                raise ParallelError(
                    f"parallel.tp={config.tp} with a vision tower: the tower is not split by heads; use dp_shard"
                )
        if config.ep > 1 and model.moe is None:
            raise ParallelError(f"parallel.ep={config.ep}, but the model has no experts: leave ep at 1")
        if (config.dp_shard * config.cp) % config.ep:
            raise ParallelError(
                f"parallel.ep={config.ep} must divide dp_shard x cp = {config.dp_shard * config.cp}, whose ranks own "
                f"the experts: take {_nearest_divisor(config.dp_shard * config.cp, config.ep)}"
            )
        if model.moe is not None and model.moe.num_experts % (config.ep * config.tp):
            raise ParallelError(
                f"parallel: ep={config.ep} x tp={config.tp} owners cannot share moe.num_experts="
                f"{model.moe.num_experts} evenly: make the product a divisor of it"
            )
        if config.cp > 1 and model.vision is not None:
            raise ParallelError(
                f"parallel.cp={config.cp} with a vision tower: pictures would have to be cut with their tokens, "
                "which is not built; use dp_shard"
            )
        if config.pp > model.num_hidden_layers:
            raise ParallelError(
                f"parallel.pp={config.pp} stages need at least as many layers, model.num_hidden_layers is "
                f"{model.num_hidden_layers}: lower pp"
            )
        if config.pp > 1 and model.tie_word_embeddings:
            raise ParallelError(
                f"parallel.pp={config.pp} with tie_word_embeddings: first and last stage would own one matrix; "
                "untie it or leave pp at 1"
            )
        if config.pp > 1 and model.vision is not None:
            raise ParallelError(f"parallel.pp={config.pp} with a vision tower is not built; leave pp at 1")
        return config


def _nearest_divisor(number: int, wanted: int) -> int:
    return max(divisor for divisor in range(1, min(number, wanted) + 1) if number % divisor == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Meshes:
    """The same ranks, as each kind of work sees them."""

    dense: DeviceMesh
    """pp, dp_replicate, fsdp (dp_shard and cp as one), tp"""
    experts: DeviceMesh
    """pp, dp_replicate, efsdp, ep, tp: the ranks of fsdp as owners of the same experts and of different ones"""
    tokens: DeviceMesh
    """pp, dp_replicate, dp_shard, cp, tp"""
    stages: DeviceMesh
    """pp, stage: all ranks that have the same layers as one"""

    @classmethod
    def of(cls, config: ParallelConfig, device_type: str) -> Meshes:
        assert config.dp_shard is not None
        fsdp = config.dp_shard * config.cp

        def mesh(**sizes: int) -> DeviceMesh:
            shape = (config.pp, *sizes.values())
            return init_device_mesh(device_type, shape, mesh_dim_names=("pp", *sizes))

        copies = config.dp_replicate
        return cls(
            dense=mesh(dp_replicate=copies, fsdp=fsdp, tp=config.tp),
            experts=mesh(dp_replicate=copies, efsdp=fsdp // config.ep, ep=config.ep, tp=config.tp),
            tokens=mesh(dp_replicate=copies, dp_shard=config.dp_shard, cp=config.cp, tp=config.tp),
            stages=mesh(stage=copies * fsdp * config.tp),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Parallel:
    """A model spread over ranks, and which tokens are this rank's."""

    config: ParallelConfig
    model: Decoder
    """What of it is on this rank."""
    meshes: Meshes
    num_parameters: int
    """Of the whole model."""
    pipeline: Pipeline | None = None
    """With pp > 1, what takes the place of model.loss and backward."""

    @property
    def num_data_ranks(self) -> int:
        """How many parts the rows of a global batch are cut into; ranks of cp, tp and pp share theirs."""
        assert self.config.dp_shard is not None
        return self.config.dp_replicate * self.config.dp_shard

    @property
    def data_rank(self) -> int:
        assert self.config.dp_shard is not None
        replica = self.meshes.tokens.get_local_rank("dp_replicate")
        return replica * self.config.dp_shard + self.meshes.tokens.get_local_rank("dp_shard")

    def row_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups to sum what is counted by rows over, one after another (ranks of cp have the same rows)."""
        return tuple(self.meshes.tokens.get_group(name) for name in ("dp_replicate", "dp_shard"))

    def loss_groups(self) -> tuple[ProcessGroup, ...]:
        """Groups to sum losses of own tokens over, one after another; ranks of tp have the same ones."""
        return tuple(self.meshes.dense.get_group(name) for name in ("dp_replicate", "fsdp"))

    def stage_group(self) -> ProcessGroup:
        """All ranks that have the same layers: those an optimizer works with."""
        return self.meshes.stages.get_group("stage")

    def stages(self) -> ProcessGroup | None:
        """Ranks that have the same place in the other stages, first stage first; None where there is one stage."""
        return self.meshes.dense.get_group("pp") if self.config.pp > 1 else None

    def summed_by_rows(self, counts: Tensor) -> Tensor:
        """What was counted by rows, summed in place over all of them."""
        return _summed(counts, self.row_groups())

    def summed_by_tokens(self, losses: Tensor) -> Tensor:
        """What was summed over own tokens, summed in place over all of them."""
        return _summed(losses, self.loss_groups())

    @property
    def part(self) -> Part:
        """Which rows of a global batch are this rank's."""
        return Part(number=self.data_rank, count=self.num_data_ranks)

    def reshard(self) -> None:
        """Free weights that a forward pass without a backward left gathered: until then names stand for the copies."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def own_tokens(self, *rows_BT: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of tokens and targets of a row; document borders stay those of the whole row."""
        return cut_context(rows_BT, self.meshes.tokens["cp"])


def _summed(values: Tensor, groups: tuple[ProcessGroup, ...]) -> Tensor:
    for group in groups:
        dist.all_reduce(values, group=group)
    return values


def parallelize(model: Decoder, config: ParallelConfig, *, device_type: str, world_size: int) -> Parallel:
    """Spread `model`, built the same on every rank (or on meta), over the ranks of the default process group.

    Changes the model in place: modules and names stay, parameters become DTensors.
    """
    config = config.check(model.config, world_size)
    meshes = Meshes.of(config, device_type)
    num_parameters = model.num_parameters()
    if config.pp > 1:
        keep_stage(model, meshes.dense.get_local_rank("pp"), config.pp)
    spread(model, config, meshes)
    pipeline = None
    if config.pp > 1:
        device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else "cpu"
        pipeline = Pipeline(model=model, mesh=meshes.dense["pp"], device=torch.device(device), schedule=config.schedule)
    return Parallel(config=config, model=model, meshes=meshes, num_parameters=num_parameters, pipeline=pipeline)


def spread(model: Decoder, config: ParallelConfig, meshes: Meshes) -> None:
    """Everything that happens to the layers of one stage. The order matters: each step wraps those before it."""
    for module in model.modules():
        if isinstance(module, Router):
            module.count_groups = (meshes.dense.get_group("dp_replicate"), meshes.dense.get_group("fsdp"))
    split_context(model, meshes.tokens["cp"])
    split_experts(model, meshes.experts["ep", "tp"])
    split_tensors(model, meshes.dense["tp"])
    recompute_layers(decoder_layers(model), config.recompute)
    copies = ("dp_replicate",) if config.dp_replicate > 1 else ()
    shard_data(
        model,
        meshes.dense[(*copies, "fsdp")] if copies else meshes.dense["fsdp"],
        meshes.experts[(*copies, "efsdp")] if copies else meshes.experts["efsdp"],
        # A rank that shares with nobody has nothing to send: weights stay as they are, as in a single process, and
        # are not freed only to be copied again.
        param_dtype=_param_dtype(config, model) if meshes.dense["fsdp"].size() > 1 else None,
        reshard_after_forward=config.reshard_after_forward and meshes.dense["fsdp"].size() > 1,
    )


def _param_dtype(config: ParallelConfig, model: Decoder) -> torch.dtype | None:
    wanted = model.compute_dtype if config.param_dtype == "auto" else getattr(torch, config.param_dtype)
    return wanted if wanted in (torch.bfloat16, torch.float16) else None
