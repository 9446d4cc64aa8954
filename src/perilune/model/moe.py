"""Mixture of experts with sigmoid scores and bias-corrected selection (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    s_e     = sigmoid(w_e . x)                              float32
    chosen  = top-k of s_e + b_e                            b only selects; it never weighs and gets no gradient
    y       = shared(x) + scaling * sum_{e chosen} s_e / (sum_chosen s + 1e-20) * expert_e(x)
    b_e    += rate * sign(mean count - count_e)             once per optimizer step, counts over all its micro-batches

Where routes are replayed (routes.py), `chosen` is what was recorded; everything else stays. No auxiliary loss. Counts
grow in training forwards only; evaluation and the recomputation of activation checkpointing leave them alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.model.linear import SwiGLU, at_least_float32
from perilune.model.routes import Routes
from perilune.optim.matrices import Layout, Stacked, Whole


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    num_experts: int = 8
    num_experts_per_token: int = 2
    num_shared_experts: int = 1
    moe_intermediate_size: int = 64
    first_k_dense_replace: int = 1
    """The first k layers keep a dense MLP."""
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    """Group-limited routing: experts come from the best `topk_group` of `num_expert_group` groups."""
    bias_update_rate: float = 1e-3

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"moe.num_experts_per_token must be between 1 and num_experts={self.num_experts}, "
                f"got {self.num_experts_per_token!r}"
            )
        if self.num_experts % self.num_expert_group or not 1 <= self.topk_group <= self.num_expert_group:
            raise ValueError(
                f"moe.num_expert_group must divide num_experts={self.num_experts} and topk_group lie in "
                f"1..num_expert_group, got num_expert_group={self.num_expert_group!r}, topk_group={self.topk_group!r}"
            )
        if self.topk_group * (self.num_experts // self.num_expert_group) < self.num_experts_per_token:
            raise ValueError(
                f"moe.topk_group={self.topk_group!r} groups hold fewer experts than "
                f"num_experts_per_token={self.num_experts_per_token!r}: raise topk_group"
            )


class Router(nn.Module):
    """x [N, hidden] -> (weights [N, k], experts [N, k]); owns the selection bias and the expert counts."""

    e_score_correction_bias: Tensor
    counts: Tensor
    count_groups: tuple[dist.ProcessGroup | None, ...] = (None,)
    """Ranks that read tokens for this layer, group by group; None is all of them."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))
        self.register_buffer("counts", torch.zeros(config.num_experts), persistent=False)

    def forward(self, x_ND: Tensor, given_NK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`given_NK`: experts that were chosen before, and are taken again."""
        config = self.config
        wide = at_least_float32(x_ND)
        with torch.autocast(wide.device.type, enabled=False):
            scores = torch.sigmoid(F.linear(wide, self.weight.to(wide.dtype)))
        experts = self._select(scores.detach() + self.e_score_correction_bias) if given_NK is None else given_NK
        weights = scores.gather(1, experts)
        if config.moe_renormalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        if self.training and not is_recomputing():
            self.counts += torch.bincount(experts.flatten(), minlength=config.num_experts)
        return weights * config.routed_scaling_factor, experts

    def _select(self, biased_NE: Tensor) -> Tensor:
        config = self.config
        if config.num_expert_group > 1:
            grouped = biased_NE.unflatten(1, (config.num_expert_group, -1))
            best_two = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(best_two, dtype=torch.bool)
            kept.scatter_(1, best_two.topk(config.topk_group, dim=-1).indices, True)
            biased_NE = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        return biased_NE.topk(config.num_experts_per_token, dim=-1).indices

    @torch.no_grad()
    def update_bias(self) -> Tensor:
        """Move the bias one step towards balance; returns the load imbalance, max count / mean count."""
        if dist.is_available() and dist.is_initialized():
            for group in self.count_groups:
                dist.all_reduce(self.counts, group=group)
        mean = self.counts.mean()
        self.e_score_correction_bias += self.config.bias_update_rate * torch.sign(mean - self.counts)
        imbalance = self.counts.max() / mean.clamp(min=1e-20)
        self.counts.zero_()
        return imbalance

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Moves like any module, but the bias and the counts stay float32: a bf16 bias soon stops moving by 1e-3."""
        bias, counts = self.e_score_correction_bias, self.counts
        super()._apply(fn, recurse)
        for name, kept in (("e_score_correction_bias", bias), ("counts", counts)):
            moved = getattr(self, name)
            if moved.dtype in (torch.bfloat16, torch.float16):
                setattr(self, name, kept.to(moved.device))
        return self

    def discard_counts(self) -> None:
        self.counts.zero_()

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"weight": Whole()}


def is_recomputing() -> bool:
    """Inside a backward pass, i.e. a checkpointed forward is being repeated."""
    return torch._C._current_graph_task_id() != -1


class Experts(nn.Module):
    """E SwiGLU experts as stacked weights, applied to rows sorted by expert."""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * config.moe_intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden_size, config.moe_intermediate_size))

    def forward(self, sorted_MD: Tensor, counts_E: Tensor) -> Tensor:
        gate, up = grouped_linear(sorted_MD, self.gate_up_proj, counts_E).chunk(2, dim=-1)
        return grouped_linear(F.silu(gate) * up, self.down_proj, counts_E)

    def logical_matrices(self) -> Mapping[str, Layout]:
        inner = self.down_proj.shape[-1]
        return {"gate_up_proj": Stacked(row_sizes=(inner, inner)), "down_proj": Stacked()}


def grouped_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """Rows [counts_0 | counts_1 | ...] of x, each group times its own weight^T. One grouped kernel on CUDA in bf16."""
    weight = weight_EOI.to(x_MI.dtype)
    if x_MI.is_cuda and x_MI.dtype == torch.bfloat16:
        offsets = counts_E.cumsum(0).to(torch.int32)
        return torch._grouped_mm(x_MI, weight.transpose(-2, -1), offs=offsets)
    if x_MI.is_cuda and torch.cuda.is_current_stream_capturing():
        return every_linear(x_MI, weight, counts_E)
    groups = x_MI.split(counts_E.tolist())
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(groups, weight.unbind(0), strict=True)])


def every_linear(x_MI: Tensor, weight_EOI: Tensor, counts_E: Tensor) -> Tensor:
    """`grouped_linear` without asking the device how long the groups are: every expert reads every row, and a row keeps
    what its own made of it. For float32 in a CUDA graph, where a few rows are decoded."""
    rows = torch.arange(x_MI.shape[0], device=x_MI.device)
    owner_M = torch.searchsorted(counts_E.cumsum(0), rows, right=True)
    y_MO = x_MI.new_zeros(x_MI.shape[0], weight_EOI.shape[1])
    for expert, matrix in enumerate(weight_EOI.unbind(0)):
        y_MO = torch.where((owner_M == expert)[:, None], F.linear(x_MI, matrix), y_MO)
    return y_MO


def _counts(experts_M: Tensor, num_experts: int) -> Tensor:
    """[E] how many rows chose each expert."""
    if not experts_M.is_cuda or torch.is_grad_enabled():
        return torch.bincount(experts_M, minlength=num_experts)
    # bincount makes the host wait, which a decoding step in a CUDA graph must not.
    return experts_M.new_zeros(num_experts).scatter_add_(0, experts_M, torch.ones_like(experts_M))


class MixtureOfExperts(nn.Module):
    """x [B, T, hidden] -> [B, T, hidden]"""

    def __init__(self, hidden_size: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.shared_experts = (
            SwiGLU(hidden_size, config.moe_intermediate_size * config.num_shared_experts)
            if config.num_shared_experts
            else None
        )

    def forward(self, x_BTD: Tensor, routes: Routes | None = None) -> Tensor:
        """`routes` are those of this layer."""
        x_ND = x_BTD.flatten(0, 1)
        top_k = self.config.num_experts_per_token
        weights, experts = self.route(x_ND, routes)
        order = experts.flatten().argsort(stable=True)
        counts = _counts(experts.flatten(), self.config.num_experts)
        outputs = self.experts(x_ND[order // top_k], counts)
        # Undo the sort by a gather with the inverse permutation: deterministic, unlike a scatter-add.
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        chosen_NKD = outputs[inverse].unflatten(0, (-1, top_k))
        y = (chosen_NKD * weights[..., None].to(chosen_NKD.dtype)).sum(dim=1).view_as(x_BTD)
        return y if self.shared_experts is None else y + self.shared_experts(x_BTD)

    def route(self, x_ND: Tensor, routes: Routes | None) -> tuple[Tensor, Tensor]:
        """(weights [N, k], experts [N, k]): chosen and recorded, or taken as they were."""
        if routes is None:
            return self.gate(x_ND)
        weights, experts = self.gate(x_ND, routes.chosen(x_ND.shape[0]))
        routes.record(experts)
        return weights, experts
