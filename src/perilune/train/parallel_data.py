"""Sharded data parallel: FSDP2 with groups that suit this decoder.

    group                         weights travel as        why it is one
    a layer: attention and MLP    param_dtype              gathered when the layer runs, freed after it
    routed experts of a layer     param_dtype              they live on fewer ranks (parallel_expert.py)
    router of a layer             float32                  selects; half precision would change the choice
    embedding, head               param_dtype
    the root: everything small    float32                  norms, decays, convolutions and residual queries; the
                                                           queries of all layers are read before the first one runs

Gradients are added over the ranks, not averaged: the loss is divided by the number of targets of all ranks. They are
reduced in float32. Residual scalars (0-d, which FSDP does not take) stay whole, their gradients are all-reduced.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from perilune.model import Decoder, MixtureOfExperts
from perilune.model.linear import Linear
from perilune.train.parallel_tensor import become, decoder_layers

FORWARD_METHODS = ("loss", "vision_features")
"""What training calls instead of forward. (Not `hidden`, which these call: one entry should not be inside another.)"""


class GatheredHead:
    """A decoder whose head is gathered when its weight is asked for: nothing ever calls the head itself."""

    def head_weight(self) -> Tensor:
        assert isinstance(self, Decoder)
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if isinstance(head, FSDPModule):
            head.unshard()
        return head.weight


def shard_data(
    model: Decoder,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None,
    reshard_after_forward: bool = True,
) -> None:
    """Shard the parameters in place over `mesh`, those of routed experts over `expert_mesh`.

    Both are 1-D, or 2-D with copies first (HSDP). param_dtype None: weights travel in the dtype they have. A rank that
    shares with nobody keeps its parameters as they are: FSDP2 would copy each of them for nobody's sake. (A loop with
    it took one GPU 7.4% longer, not all of it for that.)
    """
    if mesh.size() == expert_mesh.size() == 1:
        return
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    policy = exact
    if param_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    scalars = {parameter for parameter in model.parameters() if parameter.ndim == 0}
    large = _large(model)
    # From the root down, unlike usual: what a layer's group leaves to the root has to be the root's by then.
    become(model, GatheredHead)
    fully_shard(model, mesh=mesh, mp_policy=exact, reshard_after_forward=False, ignored_params=large | scalars)
    everywhere = {parameter for parameter in model.parameters() if parameter not in large}
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "ignored_params": everywhere,
    }
    for layer in decoder_layers(model):
        if isinstance(layer.mlp, MixtureOfExperts):
            _shard_experts(layer.mlp.experts, expert_mesh, policy, reshard_after_forward)
            fully_shard(layer.mlp.gate, mesh=mesh, mp_policy=exact, reshard_after_forward=reshard_after_forward)
        fully_shard([layer.self_attn, layer.mlp], mp_policy=policy, **options)
    for module, how in (
        (model.vision_tower, exact),
        (model.mm_projector, exact),
        (model.embed_tokens, policy),
        (model.lm_head, policy),
    ):
        if module is not None:  # also the first and the last stage of a pipeline lack some
            fully_shard(module, mp_policy=how, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    for method in FORWARD_METHODS:
        register_fsdp_forward_method(model, method)
    for parameter in scalars:
        parameter.register_hook(lambda gradient: _added(gradient, mesh))


def _large(model: Decoder) -> set[nn.Parameter]:
    """Matrices and everything else with a group of its own. What remains is small, and exact."""
    large: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, Linear | nn.Embedding):
            large.update(module.parameters(recurse=False))
        elif isinstance(module, MixtureOfExperts):
            large.update(module.experts.parameters(), module.gate.parameters())
    for module in (model.vision_tower, model.mm_projector):
        if module is not None:
            large.update(module.parameters())
    return large


def _shard_experts(
    experts: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard_after_forward: bool
) -> None:
    """Whole matrices where there are enough of them, else rows of each."""
    ranks = mesh.size(mesh.ndim - 1)

    def placement(parameter: nn.Parameter) -> Shard:
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(0) if own.shape[0] % ranks == 0 or own.shape[1] % ranks else Shard(1)

    fully_shard(
        experts,
        mesh=mesh,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=placement,
    )


def _added(gradient: Tensor, mesh: DeviceMesh) -> Tensor:
    summed = gradient.clone()
    for group in mesh.get_all_groups():
        dist.all_reduce(summed, group=group)
    return summed
