"""The Kimi Delta Attention layer (arXiv 2510.26692, section 4), head dimension D, H heads, P = H * D.

    q, k, v = silu(conv4(W x))                 depthwise causal convolution; q and k then L2-normalised per head
    g       = gate(W_fb W_fa x)                log decay per channel: softplus, or bounded below
    beta    = sigmoid(W_b x)                   write strength per head (twice that with allow_neg_eigval)
    o       = kda(q, k, v, g, beta)            the delta-rule recurrence of kernels/kda
    y       = W_o (RMSNorm_D(o) * w_o * sigmoid(W_gb W_ga x))

A_log, dt_bias, the convolutions and the output norm stay float32 in every precision.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perilune.kernels.kda import BoundedGate, SoftplusGate, kda, kda_step
from perilune.kernels.short_conv import short_conv, short_conv_step
from perilune.model.cache import KDACache
from perilune.model.documents import Packing
from perilune.model.linear import Linear, RMSNorm, at_least_float32
from perilune.optim.matrices import Adam, ColumnBlocks, Layout, RowBlocks


@dataclass(frozen=True, kw_only=True)
class KDAConfig:
    num_heads: int = 4
    head_dim: int = 32
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None
    """None: the softplus gate of Kimi-Linear-48B. A negative number: the bounded sigmoid gate (-5 in Kimi K3)."""
    use_full_rank_gate: bool = False
    """Output gate W_g of full rank instead of W_gb W_ga (Kimi K3)."""
    allow_neg_eigval: bool = False
    """beta in [0, 2] instead of [0, 1]."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"kda.{name} must be at least 1, got {getattr(self, name)!r}")
        if self.gate_lower_bound is not None and not self.gate_lower_bound < 0:
            raise ValueError(
                f"kda.gate_lower_bound must be negative (a bound on the log decay, e.g. -5.0) or None for the softplus "
                f"gate, got {self.gate_lower_bound!r}"
            )


class KimiDeltaAttention(nn.Module):
    """x [B, T, hidden] -> [B, T, hidden]; causal, linear in T, constant state in decoding."""

    def __init__(self, hidden_size: int, config: KDAConfig, *, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.config = config
        dim = config.num_heads * config.head_dim
        self.q_proj = Linear(hidden_size, dim)
        self.k_proj = Linear(hidden_size, dim)
        self.v_proj = Linear(hidden_size, dim)
        self.conv_weight = nn.Parameter(torch.empty(3 * dim, config.short_conv_kernel_size))
        self.f_a_proj = Linear(hidden_size, config.head_dim)
        self.f_b_proj = Linear(config.head_dim, dim)
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(dim))
        self.b_proj = Linear(hidden_size, config.num_heads)
        if config.use_full_rank_gate:
            self.g_proj = Linear(hidden_size, dim)
        else:
            self.g_a_proj = Linear(hidden_size, config.head_dim)
            self.g_b_proj = Linear(config.head_dim, dim)
        self.o_norm = RMSNorm(config.head_dim, eps=norm_eps)
        self.o_proj = Linear(dim, hidden_size)
        self.reset_gate()

    @torch.no_grad()
    def reset_gate(self, generator: torch.Generator | None = None) -> None:
        """Initial decays spread over time scales from 10 to 1000 tokens (per unit of A)."""
        bound = 1.0 / math.sqrt(self.config.short_conv_kernel_size)
        self.conv_weight.uniform_(-bound, bound, generator=generator)
        if self.config.gate_lower_bound is None:
            self.A_log.uniform_(1.0, 16.0, generator=generator).log_()
        else:
            self.A_log.zero_()
        dt = torch.empty_like(self.dt_bias).uniform_(math.log(1e-3), math.log(1e-1), generator=generator)
        dt = dt.exp_().clamp_(min=1e-4)
        self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # inverse of softplus

    def gate(self) -> SoftplusGate | BoundedGate:
        if self.config.gate_lower_bound is None:
            return SoftplusGate(A_log=self.A_log, dt_bias=self.dt_bias)
        return BoundedGate(A_log=self.A_log, dt_bias=self.dt_bias, lower_bound=self.config.gate_lower_bound)

    def forward(self, x_BTD: Tensor, packing: Packing, cache: KDACache | None = None) -> Tensor:
        heads = (*x_BTD.shape[:2], self.config.num_heads, self.config.head_dim)
        qkv = torch.cat([self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)], dim=-1)
        gate_input = self.f_b_proj(self.f_a_proj(x_BTD)).view(heads)
        beta = torch.sigmoid(at_least_float32(self.b_proj(x_BTD)))
        if self.config.allow_neg_eigval:
            beta = 2.0 * beta

        if cache is not None and cache.state is not None and cache.conv is not None and x_BTD.shape[1] == 1:
            qkv, cache.conv = short_conv_step(qkv[:, 0], cache.conv, self.conv_weight, activation="silu")
            q, k, v = (part.unflatten(-1, heads[2:]) for part in qkv.chunk(3, dim=-1))
            o, cache.state = kda_step(
                q, k, v, gate_input[:, 0], beta[:, 0], cache.state, gate=self.gate(), qk_l2norm=True
            )
            o = o[:, None]
        else:
            keep = cache is not None
            qkv, conv = short_conv(
                qkv,
                self.conv_weight,
                cu_seqlens=packing.cu_seqlens,
                initial_state=cache.conv if cache is not None else None,
                output_final_state=keep,
                activation="silu",
            )
            q, k, v = (part.view(heads) for part in qkv.chunk(3, dim=-1))
            o, state = kda(
                q, k, v, gate_input, beta,
                initial_state=cache.state if cache is not None else None,
                output_final_state=keep,
                cu_seqlens=packing.cu_seqlens,
                gate=self.gate(),
                qk_l2norm=True,
            )  # fmt: skip
            if cache is not None:
                cache.conv, cache.state = conv, state

        output_gate = self.g_proj(x_BTD) if self.config.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x_BTD))
        gated = self.o_norm(at_least_float32(o)) * torch.sigmoid(at_least_float32(output_gate.view(heads)))
        return self.o_proj(gated.flatten(-2).to(x_BTD.dtype))

    def logical_matrices(self) -> Mapping[str, Layout]:
        per_head = (self.config.head_dim,) * self.config.num_heads
        rows = {f"{name}_proj.weight": RowBlocks(per_head) for name in ("q", "k", "v")}
        return {
            **rows,
            "o_proj.weight": ColumnBlocks(per_head),
            "conv_weight": Adam(),
            "A_log": Adam(),
            "dt_bias": Adam(),
        }
