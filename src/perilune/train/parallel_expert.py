"""Expert parallel: every rank owns some of the experts, and tokens travel to the experts they chose.

    choose -> sort rows by owner -> all-to-all -> own experts -> all-to-all back -> weigh and add

The E experts of a layer are cut in (ranks of `ep`) x (ranks of `tp`) equal runs. Ranks of `ep` read different tokens,
so rows travel between them. Ranks of `tp` read the same tokens, so each just leaves the rows of the others alone, and
the sum over `tp` (parallel_tensor.py) completes the result. Rows reach an expert ordered by the rank they come from,
and return to the places they were taken from: the result does not depend on who owns which expert.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from perilune.kernels.collectives import exchanged
from perilune.model import Decoder, MixtureOfExperts
from perilune.train.parallel_tensor import LocalParameters, become, decoder_layers, local, shard_parameter


def split_experts(model: Decoder, mesh: DeviceMesh) -> None:
    """Split the experts of every layer over the 2-D `mesh` (ep, tp), in place."""
    if mesh.size() == 1:
        return
    owners = mesh if min(mesh.shape) > 1 else mesh["ep" if mesh.size(0) > 1 else "tp"]
    for layer in decoder_layers(model):
        if isinstance(layer.mlp, MixtureOfExperts):
            names = ("gate_up_proj", "down_proj")
            for name in names:
                shard_parameter(layer.mlp.experts, name, owners, (0,) * owners.ndim)
            become(layer.mlp.experts, LocalParameters, uses=dict.fromkeys(names, local))
            become(layer.mlp, Dispatching, ep=mesh["ep"], tp=mesh["tp"])


class Dispatching:
    """A mixture whose rows go to the ranks that own their experts."""

    ep: DeviceMesh
    tp: DeviceMesh

    def owners(self) -> tuple[int, int, ProcessGroup]:
        """(ranks of ep, ranks of tp, the group of ep)"""
        return self.ep.size(), self.tp.size(), self.ep.get_group()

    def forward(self, x_BTD: Tensor) -> Tensor:
        assert isinstance(self, MixtureOfExperts)
        ep, tp = self.ep, self.tp
        group = ep.get_group()
        top_k, num_experts = self.config.num_experts_per_token, self.config.num_experts
        owned = num_experts // (ep.size() * tp.size())
        x_ND = x_BTD.flatten(0, 1)
        weights, experts = self.gate(x_ND)

        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        if tp.size() > 1:
            order = order[(chosen[order] // owned) % tp.size() == tp.get_local_rank()]
        counts = torch.bincount(chosen, minlength=num_experts).view(ep.size(), tp.size(), owned)
        to_send = counts[:, tp.get_local_rank()]
        received = torch.empty_like(to_send)
        dist.all_to_all_single(received, to_send.contiguous(), group=group)
        # The one wait for the device: both sides of an all-to-all have to know its sizes.
        sent, arrived = torch.stack([to_send.sum(1), received.sum(1)]).tolist()

        rows = exchanged(x_ND[order // top_k], send=sent, receive=arrived, group=group)
        # Rows come rank by rank; the experts want them expert by expert.
        expert_of_row = torch.arange(owned, device=chosen.device).repeat(ep.size())
        by_expert = expert_of_row.repeat_interleave(received.flatten()).argsort(stable=True)
        outputs = self.experts(rows[by_expert], received.sum(0))
        back = torch.empty_like(outputs).index_copy(0, by_expert, outputs)
        returned = exchanged(back, send=arrived, receive=sent, group=group)

        chosen_NKD = returned.new_zeros(chosen.numel(), x_ND.shape[1]).index_copy(0, order, returned)
        chosen_NKD = chosen_NKD.unflatten(0, (-1, top_k))
        y = (chosen_NKD * weights[..., None].to(chosen_NKD.dtype)).sum(dim=1).view_as(x_BTD)
        return y if self.shared_experts is None else y + self.shared_experts(x_BTD)
