"""MoonViT-3D (arXiv 2602.02276), the tower of a model trained with Perilune that looks at pictures, for transformers.

    x = patches through one map + resized grid of positions (+ a wave for every frame of a video)
    x = x + attention(LayerNorm(x));  x = x + MLP(LayerNorm(x))        for every block, among the patches of one item
    feature = Projector(mean over frames of LayerNorm(x), neighbours 2x2 side by side)

An item is a picture, or a chunk of at most four frames of video; it becomes h w / 4 tokens of the language model.
modeling_perilune.py beside this file puts them in their places.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VisionBlock(nn.Module):
    """Attention among all patches of one item, then an MLP, each behind its LayerNorm."""

    def __init__(self, dim: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm0, self.norm1 = nn.LayerNorm(dim, eps=1e-5), nn.LayerNorm(dim, eps=1e-5)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.ModuleDict({"fc0": nn.Linear(dim, inner), "fc1": nn.Linear(inner, dim)})

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.wqkv(self.norm0(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        q, k = (rotated(part, cos, sin) for part in (q, k))
        x = x + self.wo(F.scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1).flatten(1))
        return x + self.mlp["fc1"](F.gelu(self.mlp["fc0"](self.norm1(x)), approximate="tanh"))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring pairs of x [H, P, D] turned by their angles, in float32 at least; pairs leave as halves."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin, first, second = (part.to(dtype) for part in (cos, sin, x[..., 0::2], x[..., 1::2]))
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class PositionGrid(nn.Module):
    def __init__(self, height: int, width: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(height, width, dim))


class PatchEmbed(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        dim, side = vision["hidden_size"], vision["patch_size"]
        self.proj = nn.Conv2d(3, dim, side, stride=side)
        self.pos_emb = PositionGrid(vision["pos_emb_height"], vision["pos_emb_width"], dim)


class Encoder(nn.Module):
    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        sizes = (vision["hidden_size"], vision["num_attention_heads"], vision["intermediate_size"])
        self.blocks = nn.ModuleList(VisionBlock(*sizes) for _ in range(vision["num_hidden_layers"]))
        self.final_layernorm = nn.LayerNorm(vision["hidden_size"], eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.final_layernorm(x)


class VisionTower(nn.Module):
    """Patches [P, 3, 14, 14] of one item (t, h, w) -> [h w / 4, 4, d]: frames averaged, neighbours 2x2 side by side."""

    def __init__(self, vision: dict[str, Any]) -> None:
        super().__init__()
        self.head_dim = vision["hidden_size"] // vision["num_attention_heads"]
        self.patch_embed, self.encoder = PatchEmbed(vision), Encoder(vision)

    def forward(self, pixels: Tensor, frames: int, height: int, width: int) -> Tensor:
        x = self.patch_embed.proj(pixels).flatten(1)
        x = x + self.positions(frames, height, width).to(x.dtype)
        x = self.encoder(x, *self.angles(frames, height, width, x.device))
        x = x.view(frames, height // 2, 2, width // 2, 2, -1).mean(0)
        return x.transpose(1, 2).reshape(-1, 4, x.shape[-1])

    def positions(self, frames: int, height: int, width: int) -> Tensor:
        """[P, d]: the learned grid resized to the picture; with several frames, a fixed wave for each of them."""
        grid = self.patch_embed.pos_emb.weight
        grid = grid.to(torch.promote_types(grid.dtype, torch.float32))
        dim, device = grid.shape[2], grid.device
        if grid.shape[:2] != (height, width):
            planes = grid.permute(2, 0, 1)[None]
            grid = F.interpolate(planes, (height, width), mode="bicubic", align_corners=False)[0].permute(1, 2, 0)
        if frames == 1:
            return grid.reshape(-1, dim)
        speed = 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        angle = torch.arange(frames, dtype=torch.float64, device=device)[:, None] * speed
        waves = torch.cat([angle.sin(), angle.cos()], dim=1).to(grid.dtype)
        return (grid.reshape(1, -1, dim) + waves[:, None]).flatten(0, 1)

    def angles(self, frames: int, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """[P, head_dim / 2]: neighbouring pairs turn with the column, the row, the column, ..."""
        speed = 10_000.0 ** (-torch.arange(0, self.head_dim, 4, dtype=torch.float64, device=device) / self.head_dim)
        row, column = torch.meshgrid(
            *(torch.arange(side, dtype=torch.float64, device=device) for side in (height, width)), indexing="ij"
        )
        angle = torch.stack([column[..., None] * speed, row[..., None] * speed], dim=-1).flatten(0, 1).flatten(1)
        angle = angle.repeat(frames, 1)
        return angle.cos(), angle.sin()


class Projector(nn.Module):
    """[N, 4, width of the tower] -> [N, d]"""

    def __init__(self, vision_dim: int, dim: int) -> None:
        super().__init__()
        self.pre_norm = nn.LayerNorm(vision_dim, eps=1e-5)
        self.proj = nn.Sequential(nn.Linear(4 * vision_dim, 4 * vision_dim), nn.GELU(), nn.Linear(4 * vision_dim, dim))

    def forward(self, groups: Tensor) -> Tensor:
        return self.proj(self.pre_norm(groups).flatten(1))
