"""Kimi Delta Attention in somebody's plain PyTorch model: one function, linear in length, trained to recall tokens."""

import torch
from torch import nn

from perilune.kernels.kda import SoftplusGate, kda
from perilune.kernels.short_conv import short_conv


class KDALayer(nn.Module):
    def __init__(self, width: int = 64, num_heads: int = 2):
        super().__init__()
        self.heads = (num_heads, width // num_heads)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.conv = nn.Parameter(torch.randn(3 * width, 4) * 0.5)
        self.forget, self.strength = nn.Linear(width, width, bias=False), nn.Linear(width, num_heads)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(num_heads)), nn.Parameter(torch.full((width,), -4.0))
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        h = self.norm(x)
        mixed, _ = short_conv(self.qkv(h), self.conv)
        q, k, v = (part.unflatten(-1, self.heads) for part in mixed.chunk(3, dim=-1))
        gate = SoftplusGate(self.A_log, self.dt_bias)
        beta = self.strength(h).sigmoid()
        o, _ = kda(q, k, v, self.forget(h).unflatten(-1, self.heads), beta, gate=gate, qk_l2norm=True)
        return x + self.out(o.flatten(2))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 64), KDALayer(), KDALayer(), nn.RMSNorm(64), nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(120):  # the task: say the last half of the row again what the first half said
    tokens = torch.randint(32, (16, 8)).repeat(1, 2)
    loss = nn.functional.cross_entropy(model(tokens)[:, 7:-1].flatten(0, 1), tokens[:, 8:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 19:
        print(f"step {step + 1}  loss {loss:.3f}")
