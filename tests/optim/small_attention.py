"""Attention modules small enough to recompute every logit in float64: MHA, GQA and MLA, causal, with rotary positions.

`logits(x)` returns scale * q . k [batch, heads, T, T] with -inf where the causal mask forbids the pair.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from perilune.optim import MaxLogitRecorder, QKHeads, gqa_heads, mla_heads


def rotate(x_BHTD: Tensor) -> Tensor:
    """Rotary positions: pairs of channels turn by an angle proportional to the position."""
    length, dim = x_BHTD.shape[-2:]
    frequency = 1.0 / 100.0 ** (torch.arange(0, dim, 2, dtype=x_BHTD.dtype) / dim)
    angle = torch.arange(length, dtype=x_BHTD.dtype)[:, None] * frequency
    even, odd = x_BHTD[..., 0::2], x_BHTD[..., 1::2]
    turned = (even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos())
    return torch.stack(turned, dim=-1).flatten(-2)


class _Attention(nn.Module):
    num_heads: int
    recorder: MaxLogitRecorder

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def logits(self, x: Tensor) -> Tensor:
        q, k = self.queries_and_keys(x)
        length = x.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(future, -torch.inf)

    def max_logit(self, x: Tensor) -> Tensor:
        return self.logits(x).detach().amax(dim=(0, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x)
        self.recorder.update(logits.amax(dim=(0, 2, 3)))
        mixed = logits.softmax(-1) @ x.unsqueeze(1)
        return mixed.mean(1)


class GroupedAttention(_Attention):
    """MHA when num_kv_heads == num_heads."""

    def __init__(self, width: int, num_heads: int, num_kv_heads: int, head_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.q_proj = nn.Linear(width, num_heads * head_dim, bias=bias)
        self.k_proj = nn.Linear(width, num_kv_heads * head_dim, bias=bias)
        self.recorder = MaxLogitRecorder(num_heads, self)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim)).transpose(1, 2)
        return rotate(q), rotate(k).repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    def qk_heads(self) -> QKHeads:
        return gqa_heads(
            self.q_proj.weight,
            self.k_proj.weight,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            recorder=self.recorder,
            q_bias=self.q_proj.bias,
            k_bias=self.k_proj.bias,
        )


class LatentAttention(_Attention):
    def __init__(self, width: int, num_heads: int, nope: int, rope: int, v_dim: int, q_lora_rank: int | None) -> None:
        super().__init__()
        self.num_heads, self.nope, self.rope, self.v_dim = num_heads, nope, rope, v_dim
        self.q_a_proj = nn.Identity() if q_lora_rank is None else nn.Linear(width, q_lora_rank, bias=False)
        self.q_b_proj = nn.Linear(q_lora_rank or width, num_heads * (nope + rope), bias=False)
        self.kv_a_proj = nn.Linear(width, 8 + rope, bias=False)
        self.kv_b_proj = nn.Linear(8, num_heads * (nope + v_dim), bias=False)
        self.recorder = MaxLogitRecorder(num_heads, self)

    def queries_and_keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.q_b_proj(self.q_a_proj(x)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        latent, k_rope = self.kv_a_proj(x).split([8, self.rope], dim=-1)
        k_nope = self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)[..., : self.nope]
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        k_rope = rotate(k_rope.unsqueeze(1)).expand(-1, self.num_heads, -1, -1)
        return torch.cat([q_nope, rotate(q_rope)], -1), torch.cat([k_nope, k_rope], -1)

    def values(self, x: Tensor) -> Tensor:
        latent = self.kv_a_proj(x)[..., :8]
        return self.kv_b_proj(latent).unflatten(-1, (self.num_heads, -1))[..., self.nope :]

    def qk_heads(self) -> QKHeads:
        return mla_heads(
            self.q_b_proj.weight, self.kv_b_proj.weight, self.num_heads, self.nope, self.rope, self.v_dim, self.recorder
        )
