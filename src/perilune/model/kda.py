"""The Kimi Delta Attention layer (arXiv 2510.26692, section 4), head dimension D, H heads, P = H * D.

    q, k, v = silu(conv4(W x))                 depthwise causal convolution; q and k then L2-normalised per head
    g       = gate(W_fb W_fa x)                log decay per channel: softplus, or bounded below
    beta    = sigmoid(W_b x)                   write strength per head (twice that with allow_neg_eigval)
    o       = kda(q, k, v, g, beta)            the delta-rule recurrence of kernels/kda
    y       = W_o (RMSNorm_D(o) * w_o * sigmoid(W_gb W_ga x))

With `decay="head"` one number per head decides the decay of all its channels (the gate of Mamba-2 and Gated DeltaNet):
what the decay per channel buys is measured against it.

A_log, dt_bias, the convolutions and the output norm stay float32 in every precision.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from perilune.kernels.gated_norm import gated_rms_norm
from perilune.kernels.kda import BoundedGate, SoftplusGate, kda, kda_step
from perilune.kernels.kda.decode import kda_decode
from perilune.kernels.kda.slots import kda_at_slots, takes_slots
from perilune.kernels.short_conv import short_conv, short_conv_step
from perilune.kernels.triton_support import why_not_triton
from perilune.model.cache import KDACache
from perilune.model.documents import Packing
from perilune.model.kda_inputs import KDAInputs, kda_inputs
from perilune.model.linear import Linear, RMSNorm, are_plain, at_least_float32, side_by_side, takes_one_product
from perilune.model.paged import Chunks, PagedBatch, StatePool
from perilune.optim.matrices import Adam, ColumnBlocks, Layout, RowBlocks

Decay = Literal["channel", "head"]


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
    decay: Decay = "channel"
    """Whether every key channel forgets at its own rate, or all of a head at one: an ablation. Exported under our own
    type only."""

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"kda.{name} must be at least 1, got {getattr(self, name)!r}")
        if self.gate_lower_bound is not None and not self.gate_lower_bound < 0:
            raise ValueError(
                f"kda.gate_lower_bound must be negative (a bound on the log decay, e.g. -5.0) or None for the softplus "
                f"gate, got {self.gate_lower_bound!r}"
            )
        if self.decay not in get_args(Decay):
            raise ValueError(f"kda.decay is {self.decay!r}, expected one of {', '.join(get_args(Decay))}")


class KimiDeltaAttention(nn.Module):
    """x [B, T, hidden] -> [B, T, hidden]; causal, linear in T, constant state in decoding."""

    def __init__(self, hidden_size: int, config: KDAConfig, *, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.config = config
        self.beta_max = 2.0 if config.allow_neg_eigval else 1.0
        dim = config.num_heads * config.head_dim
        self.q_proj = Linear(hidden_size, dim)
        self.k_proj = Linear(hidden_size, dim)
        self.v_proj = Linear(hidden_size, dim)
        self.conv_weight = nn.Parameter(torch.empty(3 * dim, config.short_conv_kernel_size))
        self.f_a_proj = Linear(hidden_size, config.head_dim)
        num_decays = dim if config.decay == "channel" else config.num_heads
        self.f_b_proj = Linear(config.head_dim, num_decays)
        self.A_log = nn.Parameter(torch.empty(config.num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_decays))
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
        bias = self._per_channel(self.dt_bias)
        if self.config.gate_lower_bound is None:
            return SoftplusGate(A_log=self.A_log, dt_bias=bias)
        return BoundedGate(A_log=self.A_log, dt_bias=bias, lower_bound=self.config.gate_lower_bound)

    def _per_channel(self, rows: Tensor) -> Tensor:
        """[H * D, ...] from [H, ...] where a head has one decay: its channels get the same numbers, and one gradient.

        So every path of the operator, and its kernels, compute it without knowing.
        """
        return rows if self.config.decay == "channel" else rows.repeat_interleave(self.config.head_dim, dim=0)

    def forward(self, x_BTD: Tensor, packing: Packing, cache: KDACache | StatePool | None = None) -> Tensor:
        if isinstance(cache, StatePool):
            assert isinstance(packing, PagedBatch), "a pool is read by the steps of a PagedBatch"
            return self._paged(x_BTD, packing, cache)
        if cache is not None and cache.state is not None and cache.conv is not None and x_BTD.shape[1] == 1:
            return self._step(x_BTD, cache)
        heads = (*x_BTD.shape[:2], self.config.num_heads, self.config.head_dim)
        before = self._inputs_at_once if self._takes_inputs_at_once(x_BTD, cache) else self._inputs
        inputs = before(x_BTD, packing.cu_seqlens, cache)
        o, state = kda(
            inputs.q.view(heads), inputs.k.view(heads), inputs.v.view(heads), inputs.gate_input.view(heads),
            inputs.beta,
            initial_state=None if cache is None else cache.state,
            output_final_state=cache is not None,
            cu_seqlens=packing.cu_seqlens,
            gate=self.gate(),
            qk_l2norm=True,
            beta_max=self.beta_max,
        )  # fmt: skip
        if cache is not None:
            cache.conv, cache.state = inputs.conv_state, state
        return self._output(o, inputs.output_gate.view(heads), x_BTD.dtype)

    def _step(self, x_BTD: Tensor, cache: KDACache) -> Tensor:
        """One token after others."""
        heads = (x_BTD.shape[0], self.config.num_heads, self.config.head_dim)
        assert cache.conv is not None and cache.state is not None
        qkv, gate_input, beta, output_gate = self._projected(x_BTD)
        qkv, cache.conv = short_conv_step(qkv[:, 0], cache.conv, self.conv_weight, activation="silu")
        q, k, v = (part.view(heads) for part in qkv.chunk(3, dim=-1))
        o, cache.state = kda_step(
            q, k, v, gate_input.view(heads), self.beta_max * torch.sigmoid(at_least_float32(beta[:, 0])), cache.state,
            gate=self.gate(), qk_l2norm=True,
        )  # fmt: skip
        heads = (*x_BTD.shape[:2], *heads[1:])
        return self._output(o.view(heads), output_gate.view(heads), x_BTD.dtype)

    def _paged(self, x_1TD: Tensor, batch: PagedBatch, pool: StatePool) -> Tensor:
        """One token of some sequences and chunks of others; their slots move on."""
        qkv, gate_input, beta, output_gate = (part[0] for part in self._projected(x_1TD))
        first = batch.num_decodes
        parts = []
        if first:
            parts.append(
                kda_decode(
                    qkv[:first], gate_input[:first], beta[:first], output_gate[:first],
                    pool.conv, pool.state, batch.slots,
                    conv_weight=self.conv_weight,
                    norm_weight=self.o_norm.weight,
                    gate=self.gate(),
                    norm_eps=self.o_norm.eps,
                    beta_scale=self.beta_max,
                )
            )  # fmt: skip
        if batch.chunks is not None:
            later = (qkv[first:], gate_input[first:], beta[first:], output_gate[first:])
            parts.append(self._chunks(*later, batch.chunks, pool))
        gated = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.o_proj(gated.unsqueeze(0))

    def _chunks(
        self, qkv_TC: Tensor, gate_input: Tensor, beta: Tensor, output_gate: Tensor, chunks: Chunks, pool: StatePool
    ) -> Tensor:
        if takes_slots(qkv_TC, pool.conv, pool.state):
            return kda_at_slots(
                qkv_TC, gate_input, beta, output_gate, pool.conv, pool.state, chunks.slots,
                cu_seqlens=chunks.cu_seqlens,
                origins=chunks.origins,
                conv_weight=self.conv_weight,
                norm_weight=self.o_norm.weight,
                gate=self.gate(),
                norm_eps=self.o_norm.eps,
                beta_scale=self.beta_max,
            )  # fmt: skip
        heads = (1, qkv_TC.shape[0], self.config.num_heads, self.config.head_dim)
        mixed, conv = short_conv(
            qkv_TC.unsqueeze(0),
            self.conv_weight,
            cu_seqlens=chunks.cu_seqlens,
            initial_state=pool.conv[chunks.slots],
            output_final_state=True,
            activation="silu",
        )
        q, k, v = mixed.chunk(3, dim=-1)
        o, state = kda(
            q.view(heads), k.view(heads), v.view(heads), gate_input.view(heads), beta.unsqueeze(0),
            initial_state=pool.state[chunks.slots],
            output_final_state=True,
            cu_seqlens=chunks.cu_seqlens,
            gate=self.gate(),
            qk_l2norm=True,
            beta_max=self.beta_max,
        )  # fmt: skip
        assert conv is not None and state is not None
        pool.conv[chunks.slots] = conv.to(pool.conv.dtype)
        pool.state[chunks.slots] = state.to(pool.state.dtype)
        return self._gated(o, output_gate.view(heads), qkv_TC.dtype)[0]

    def _projected(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q, k and v side by side before the convolution, gate input, beta's logits, output gate)"""
        maps = self.maps_of_input()
        products = side_by_side(x_BTD, *maps)
        if products is None:
            q, k, v, decay, gate, beta = (linear(x_BTD) for linear in maps)
            qkv = torch.cat([q, k, v], dim=-1)
        else:
            width = self.q_proj.out_features
            sizes = (3 * width, *(linear.out_features for linear in maps[3:]))
            qkv, decay, gate, beta = products.split(sizes, dim=-1)
        gate_input = self.f_b_proj(decay)
        if self.config.decay == "head":
            gate_input = gate_input.repeat_interleave(self.config.head_dim, dim=-1)
        return qkv, gate_input, beta, gate if self.config.use_full_rank_gate else self.g_b_proj(gate)

    def maps_of_input(self) -> tuple[Linear, ...]:
        """The six maps that read x: q, k, v, the first half of the decay's, the output gate's (first half), beta's."""
        gate = self.g_proj if self.config.use_full_rank_gate else self.g_a_proj
        return self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, gate, self.b_proj

    def _inputs(self, x_BTD: Tensor, cu_seqlens: Tensor | None, cache: KDACache | None) -> KDAInputs:
        """Product by product: any device, any dtype, gradients everywhere."""
        qkv, gate_input, beta, output_gate = self._projected(x_BTD)
        qkv, conv_state = short_conv(
            qkv,
            self.conv_weight,
            cu_seqlens=cu_seqlens,
            initial_state=None if cache is None else cache.conv,
            output_final_state=cache is not None,
            activation="silu",
        )
        q, k, v = qkv.chunk(3, dim=-1)
        return KDAInputs(
            q=q, k=k, v=v, gate_input=gate_input, output_gate=output_gate, beta=beta, conv_state=conv_state
        )  # fmt: skip

    def _takes_inputs_at_once(self, x_BTD: Tensor, cache: KDACache | None) -> bool:
        """Where the one operator runs. It gives no gradient to states, which only decoding has."""
        gates = (self.g_proj,) if self.config.use_full_rank_gate else (self.g_a_proj, self.g_b_proj)
        fused = (self.q_proj, self.k_proj, self.v_proj, self.f_a_proj, self.f_b_proj, self.b_proj, *gates)
        return (
            are_plain(*fused)
            and takes_one_product(x_BTD, *(linear.weight for linear in fused))
            and why_not_triton(x_BTD) is None
            and self.config.short_conv_kernel_size <= 8
            and (cache is None or not torch.is_grad_enabled())
        )

    def _inputs_at_once(self, x_BTD: Tensor, cu_seqlens: Tensor | None, cache: KDACache | None) -> KDAInputs:
        full_rank = self.config.use_full_rank_gate
        gates = (self.g_proj.weight,) if full_rank else (self.g_a_proj.weight, self.g_b_proj.weight)
        return kda_inputs(
            x_BTD,
            qkv_weights=(self.q_proj.weight, self.k_proj.weight, self.v_proj.weight),
            conv_weight=self.conv_weight,
            gate_weights=(self.f_a_proj.weight, self._per_channel(self.f_b_proj.weight)),
            output_gate_weights=gates,
            beta_weight=self.b_proj.weight,
            cu_seqlens=cu_seqlens,
            conv_state=None if cache is None else cache.conv,
            output_conv_state=cache is not None,
        )

    def _output(self, o_BTHD: Tensor, gate_BTHD: Tensor, dtype: torch.dtype) -> Tensor:
        return self.o_proj(self._gated(o_BTHD, gate_BTHD, dtype))

    def _gated(self, o_BTHD: Tensor, gate_BTHD: Tensor, dtype: torch.dtype) -> Tensor:
        if o_BTHD.is_cuda:
            gated = gated_rms_norm(o_BTHD, gate_BTHD, self.o_norm.weight, self.o_norm.eps)
        else:
            gated = self.o_norm(at_least_float32(o_BTHD)) * torch.sigmoid(at_least_float32(gate_BTHD))
        return gated.flatten(-2).to(dtype)

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
