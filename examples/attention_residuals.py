"""Attention Residuals in somebody's plain PyTorch model: each sublayer reads a learned mix of all earlier outputs."""

import torch
from torch import nn

from perilune.kernels.attnres import mix


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, attn_mask=torch.full(2 * x.shape[1:2], -torch.inf).triu(1))[0]


class Model(nn.Module):
    def __init__(self, vocab: int = 64, width: int = 64, layers: int = 4):
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        parts = [(SelfAttention(width, 4, batch_first=True), nn.Linear(width, width)) for _ in range(layers)]
        self.sublayers = nn.ModuleList(nn.Sequential(nn.RMSNorm(width), part) for pair in parts for part in pair)
        # One query per sublayer, one for the head. Zeros: at first the same function as with x = x + sublayer(x).
        self.queries = nn.Parameter(torch.zeros(2 * layers + 1, width))

    def forward(self, tokens):
        sources = [self.embedding(tokens)]
        for query, sublayer in zip(self.queries, self.sublayers):
            sources.append(sublayer(mix(sources, query, eps=1e-6)))
        return self.head(nn.functional.rms_norm(mix(sources, self.queries[-1], eps=1e-6), (64,)))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(40):  # the task: a cipher, token x becomes 5 x + 3
    tokens = torch.randint(64, (16, 32))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (5 * tokens + 3).flatten() % 64)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1}  loss {loss:.3f}  largest query {model.queries.abs().max():.3f}")
