"""The peer of a training step: a plain full-attention transformer in the best torch has to offer.

Pre-norm RMSNorm, rotary positions, causal scaled_dot_product_attention (cuDNN or flash), SwiGLU, an untied head,
float32 weights cast at use; every layer compiled. The loss is the same fused one as ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from perilune.kernels.cross_entropy import linear_cross_entropy_sum

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Parameter(torch.randn(3 * width, width) * 0.02)
        self.out = nn.Parameter(torch.randn(width, width) * 0.02)
        self.gate_up = nn.Parameter(torch.randn(2 * intermediate, width) * 0.02)
        self.down = nn.Parameter(torch.randn(width, intermediate) * 0.02)
        self.norms = nn.ParameterList([torch.ones(width), torch.ones(width)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = F.rms_norm(x.float(), (width,), self.norms[0], 1e-5).to(x.dtype)
        qkv = F.linear(normed, self.qkv.to(x.dtype)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        o = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + F.linear(o.transpose(1, 2).flatten(2), self.out.to(x.dtype))
        normed = F.rms_norm(x.float(), (width,), self.norms[1], 1e-5).to(x.dtype)
        gate, up = F.linear(normed, self.gate_up.to(x.dtype)).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down.to(x.dtype))


class GPT(nn.Module):
    def __init__(self, *, vocabulary: int, width: int, layers: int, heads: int, intermediate: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, intermediate) for _ in range(layers))
        self.norm = nn.Parameter(torch.ones(width))
        self.head = nn.Parameter(torch.randn(vocabulary, width) * 0.02)
        self.head_dim = width // heads

    def compile_layers(self) -> None:
        """One compilation serves all layers: they differ in their weights only."""
        for layer in self.layers:
            layer.compile(dynamic=False)

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Summed cross entropy."""
        x = self.embedding(tokens).bfloat16()
        frequency = 10000.0 ** (-torch.arange(0, self.head_dim, 2, device=x.device) / self.head_dim)
        angle = torch.arange(tokens.shape[1], device=x.device)[:, None] * frequency
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        with sdpa_kernel(BACKENDS, set_priority=True):
            for layer in self.layers:
                x = layer(x, cos, sin)
        hidden = F.rms_norm(x.float(), (x.shape[-1],), self.norm, 1e-5).to(x.dtype)
        return linear_cross_entropy_sum(hidden.flatten(0, 1), self.head, targets.flatten())

    def num_parameters(self) -> int:
        """All but the embedding."""
        return sum(p.numel() for p in self.parameters()) - self.embedding.weight.numel()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
