"""MuonClip in somebody's plain PyTorch model: declare the heads, feed the largest logit, train as ever."""

import torch
from torch import nn

from perilune.optim import MaxLogitRecorder, MuonClip, mha_heads


class Attention(nn.Module):
    def __init__(self, width: int = 64, num_heads: int = 4):
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.max_logit = MaxLogitRecorder(num_heads, self)

    def qk_heads(self):  # all that QK-Clip asks for
        return mha_heads(self.q.weight, self.k.weight, num_heads=self.num_heads, recorder=self.max_logit)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        logits = q @ k.mT * q.shape[-1] ** -0.5
        logits = logits + torch.full(logits.shape[-2:], -torch.inf).triu(1)
        self.max_logit.update(logits.amax(dim=(0, 2, 3)))
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(64, 64), Attention(), nn.Linear(64, 64))
optimizer = MuonClip.for_model(model, lr=0.02, qk_clip_tau=1.0)
print(optimizer.table())
for step in range(60):  # the task: repeat the token before
    tokens = torch.randint(64, (16, 32))
    loss = nn.functional.cross_entropy(model(tokens)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        seen = optimizer.qk_report
        print(f"step {step + 1}  loss {loss:.3f}  max logit {seen.max_logits.max():.2f}  clipped {seen.num_clipped}")
