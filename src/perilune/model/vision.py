"""MoonViT-3D and its projector: pictures and short chunks of video at their own resolution as tokens of the decoder.

    x = W_patch pixels + b + resized grid (+ time table when t > 1)
    x = x + attention(LayerNorm(x));  x = x + W_1 gelu_tanh(W_0 LayerNorm(x))      for every block
    y = mean over frames of LayerNorm(x), neighbours 2x2 side by side
    feature = W_out gelu(W_in concat(LayerNorm(y_00), LayerNorm(y_01), LayerNorm(y_10), LayerNorm(y_11)))

Attention is bidirectional over all t * h * w patches of one item; items never see each other, so packing changes
nothing. Pictures and video share all weights; t frames cost the tokens of one. Source: arXiv 2602.02276; weights carry
the names of its released checkpoint. The attention logits of the tower are not clipped: QK-Clip watches the language
model, and LayerNorm with a gain that decays bounds what the tower's heads see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.model.linear import HALF, Linear, at_least_float32
from perilune.model.rope import rotate
from perilune.model.vision_grids import MERGE, Arrangement, Grid, arrange, host_grids, tokens_of
from perilune.model.vision_positions import resized, rotary_tables, time_table
from perilune.optim.matrices import Adam, ColumnBlocks, Layout, RowBlocks, Whole

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # not in every build of torch
    varlen_attn = None

EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The tower; keys follow the public vt_* keys. The default is SIZES["mini"]."""

    hidden_size: int = 128
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    intermediate_size: int = 512
    patch_size: int = 14
    pos_emb_height: int = 16
    """Rows of the learned grid, which is resized to every picture."""
    pos_emb_width: int = 16
    pos_emb_time: int = 4
    """Frames in a chunk of video, at most."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"model.vision.{name} must be at least 1, got {getattr(self, name)!r}")
        if self.hidden_size % (4 * self.num_attention_heads):
            raise ValueError(
                f"model.vision.hidden_size is {self.hidden_size!r}, expected a multiple of 4 * num_attention_heads = "
                f"{4 * self.num_attention_heads}: rotary positions need two pairs, a column's and a row's, in a head"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


SIZES: Mapping[str, VisionConfig] = {
    "mini": VisionConfig(),
    "small": VisionConfig(hidden_size=256, num_hidden_layers=6, intermediate_size=1024),
    "medium": VisionConfig(
        hidden_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        intermediate_size=2048,
        pos_emb_height=32,
        pos_emb_width=32,
    ),
    "large": VisionConfig(
        hidden_size=768,
        num_hidden_layers=16,
        num_attention_heads=12,
        intermediate_size=2880,
        pos_emb_height=64,
        pos_emb_width=64,
    ),
    "k25": VisionConfig(
        hidden_size=1152,
        num_hidden_layers=27,
        num_attention_heads=16,
        intermediate_size=4304,
        pos_emb_height=64,
        pos_emb_width=64,
    ),
}
"""Towers of 1M, 5M, 39M, 112M and, as released, 417M parameters."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MediaInput:
    """The pictures of a batch: patches to look at, or features that were computed before; and where they belong."""

    positions: Tensor
    """[N] flat indices of the <|media_pad|> tokens in [B * T], in the order of the features."""
    features: Tensor | None = None
    """[N, hidden]"""
    pixels: Tensor | None = None
    """[P, 3, 14, 14]: uint8, or float and normalised already"""
    grids: tuple[Grid, ...] = ()
    """(t, h, w) of every item, numbers on the host"""

    def __post_init__(self) -> None:
        if (self.features is None) == (self.pixels is None):
            raise ValueError("media needs features or pixels with grids: expected exactly one of the two")
        object.__setattr__(self, "grids", host_grids(self.grids))
        tokens = sum(map(tokens_of, self.grids)) if self.features is None else self.features.shape[0]
        if self.positions.ndim != 1 or self.positions.is_floating_point() or self.positions.shape[0] != tokens:
            given = f"{self.positions.dtype} {tuple(self.positions.shape)}"
            raise ValueError(
                f"media.positions is {given}, expected integers [{tokens}]: one <|media_pad|> for each of the {tokens} "
                "features"
            )

    @property
    def num_patches(self) -> int:
        return sum(map(prod, self.grids))

    def with_features(self, features: Tensor) -> Self:
        """The same places, with features in the place of pixels."""
        return replace(self, features=features, pixels=None)

    def to(self, device: torch.device | str) -> Self:
        moved = {name: getattr(self, name) for name in ("positions", "features", "pixels")}
        return replace(self, **{name: None if held is None else held.to(device) for name, held in moved.items()})


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with float32 gain and bias, computed in the dtype of its input."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, eps=EPS)

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(
            input, self.normalized_shape, self.weight.to(input.dtype), self.bias.to(input.dtype), self.eps
        )


class PositionGrid(nn.Module):
    """The learned grid [H, W, d]."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.pos_emb_height, config.pos_emb_width, config.hidden_size))
        nn.init.normal_(self.weight)

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"weight": Adam(weight_decay=True)}


class PatchEmbedding(nn.Module):
    """Pixels of every patch through one linear map, plus where the patch is."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = Linear(3 * config.patch_size**2, config.hidden_size, bias=True)
        self.pos_emb = PositionGrid(config)

    def forward(self, pixels: Tensor, arrangement: Arrangement) -> Tensor:
        x_Pd = self.proj(pixels.flatten(1))
        grid, dim = self.pos_emb.weight, x_Pd.shape[1]
        parts = x_Pd.split([count * prod(shape) for shape, count in arrangement.runs])
        placed = []
        for part, ((frames, height, width), count) in zip(parts, arrangement.runs, strict=True):
            position = resized(grid, height, width)
            if frames > 1:
                position = position + time_table(frames, dim, grid.device, grid.dtype)[:, None]
            placed.append((part.view(count, frames, -1, dim) + position.to(part.dtype)).view(-1, dim))
        return placed[0] if len(placed) == 1 else torch.cat(placed)

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"proj.weight": Adam(weight_decay=True), "proj.bias": Adam()}


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """What every block asks about a batch."""

    cos: Tensor
    """[P, 1, head_dim / 2], and sin alike"""
    sin: Tensor
    lengths: tuple[tuple[int, int], ...]
    cu_seqlens: Tensor | None
    """Borders of the items as int32 on the device, where attention takes items of several lengths in one call."""


class VisionBlock(nn.Module):
    """Attention among the patches of an item, then an MLP, each behind its LayerNorm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        dim = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.norm0 = LayerNorm(dim)
        self.wqkv = Linear(dim, 3 * dim, bias=True)
        self.wo = Linear(dim, dim, bias=True)
        self.norm1 = LayerNorm(dim)
        self.mlp = nn.ModuleDict(
            {
                "fc0": Linear(dim, config.intermediate_size, bias=True),
                "fc1": Linear(config.intermediate_size, dim, bias=True),
            }
        )

    def forward(self, x_Pd: Tensor, geometry: Geometry) -> Tensor:
        x_Pd = x_Pd + self._attention(self.norm0(x_Pd), geometry)
        inner = F.gelu(self.mlp["fc0"](self.norm1(x_Pd)), approximate="tanh")
        return x_Pd + self.mlp["fc1"](inner)

    def _attention(self, x_Pd: Tensor, geometry: Geometry) -> Tensor:
        qkv_P3HD = self.wqkv(x_Pd).unflatten(-1, (3, self.num_heads, -1))
        turned = rotate(at_least_float32(qkv_P3HD[:, :2]), geometry.cos, geometry.sin, interleaved=True)
        q, k = turned.to(x_Pd.dtype).unbind(1)
        return self.wo(attention_of_items(q, k, qkv_P3HD[:, 2], geometry).flatten(1))

    def logical_matrices(self) -> Mapping[str, Layout]:
        dim, head_dim = self.wo.weight.shape[0], self.wo.weight.shape[0] // self.num_heads
        return {
            "wqkv.weight": RowBlocks((dim, dim, dim), fused=True),
            "wo.weight": ColumnBlocks((head_dim,) * self.num_heads),
            "mlp.fc0.weight": Whole(),
            "mlp.fc1.weight": Whole(),
        }


def attention_of_items(q_PHD: Tensor, k_PHD: Tensor, v_PHD: Tensor, geometry: Geometry) -> Tensor:
    """softmax(q k^T / sqrt(D)) v among the patches of every item, [P, H, D]."""
    if geometry.cu_seqlens is not None and varlen_attn is not None:
        borders, longest = geometry.cu_seqlens, geometry.lengths[-1][0]
        found = varlen_attn(q_PHD, k_PHD, v_PHD.contiguous(), borders, borders, longest, longest)
        return found if isinstance(found, Tensor) else found[0]
    sizes = [length * count for length, count in geometry.lengths]
    found = []
    for q, k, v, (length, count) in zip(
        *(x.split(sizes) for x in (q_PHD, k_PHD, v_PHD)), geometry.lengths, strict=True
    ):
        heads_first = [x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v)]
        found.append(F.scaled_dot_product_attention(*heads_first).transpose(1, 2).flatten(0, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


class Encoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = LayerNorm(config.hidden_size)

    def forward(self, x_Pd: Tensor, geometry: Geometry) -> Tensor:
        for block in self.blocks:
            x_Pd = block(x_Pd, geometry)
        return self.final_layernorm(x_Pd)


class MoonViT3D(nn.Module):
    """pixels [P, 3, 14, 14] and grids -> [N, 4, d]: the four patches of every merged group, averaged over frames."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.encoder = Encoder(config)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        grids = host_grids(grids)
        arrangement = arrange(grids, self.config.pos_emb_time)
        self._check(pixels, grids)
        if not grids:
            return pixels.new_zeros(0, MERGE * MERGE, self.config.hidden_size)
        pixels = arrangement.arranged(pixels, grids)
        x_Pd = self.patch_embed(pixels, arrangement)
        x_Pd = self.encoder(x_Pd, self._geometry(x_Pd, arrangement))
        return arrangement.restored(merged(x_Pd, arrangement), grids)

    def _geometry(self, x_Pd: Tensor, arrangement: Arrangement) -> Geometry:
        head_dim, device = self.config.head_dim, x_Pd.device
        dtype = torch.float64 if x_Pd.dtype == torch.float64 else torch.float32
        cos, sin = [], []
        for (frames, height, width), count in arrangement.runs:
            tables = rotary_tables(height, width, head_dim, device, dtype)
            for parts, table in zip((cos, sin), tables, strict=True):
                parts.append(table.expand(count * frames, -1, -1).reshape(-1, 1, head_dim // 2))
        varied = len(arrangement.lengths) > 1
        return Geometry(
            cos=torch.cat(cos),
            sin=torch.cat(sin),
            lengths=arrangement.lengths,
            cu_seqlens=_borders(arrangement, device) if varied and takes_several_lengths(x_Pd, head_dim) else None,
        )

    def _check(self, pixels: Tensor, grids: tuple[Grid, ...]) -> None:
        patch = self.config.patch_size
        expected = (sum(map(prod, grids)), 3, patch, patch)
        if tuple(pixels.shape) != expected or not pixels.is_floating_point():
            raise ValueError(
                f"pixels is {pixels.dtype} {tuple(pixels.shape)}, expected floating-point {expected}: "
                f"the patches of the {len(grids)} grids, one after the other"
            )


def takes_several_lengths(x: Tensor, head_dim: int) -> bool:
    """Whether attention over items of several lengths is one kernel here: flash attention, half precision on CUDA."""
    return x.is_cuda and x.dtype in HALF and varlen_attn is not None and head_dim % 8 == 0 and head_dim <= 256


def _borders(arrangement: Arrangement, device: torch.device) -> Tensor:
    lengths = [length for length, count in arrangement.lengths for _ in range(count)]
    borders = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return borders.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else borders.to(device)


def merged(x_Pd: Tensor, arrangement: Arrangement) -> Tensor:
    """Mean over the frames of every item, then 2x2 neighbours side by side: [N, 4, d], rows of groups in order."""
    dim = x_Pd.shape[1]
    parts = x_Pd.split([count * prod(shape) for shape, count in arrangement.runs])
    groups = []
    for part, ((frames, height, width), count) in zip(parts, arrangement.runs, strict=True):
        x = part.view(count, frames, height // MERGE, MERGE, width // MERGE, MERGE, dim)
        x = x.mean(1) if frames > 1 else x.squeeze(1)
        groups.append(x.transpose(2, 3).reshape(-1, MERGE * MERGE, dim))
    return groups[0] if len(groups) == 1 else torch.cat(groups)


class Projector(nn.Module):
    """[N, 4, d] -> [N, lm_hidden]: LayerNorm of each of the four, side by side, Linear, GELU, Linear."""

    def __init__(self, config: VisionConfig, lm_hidden: int) -> None:
        super().__init__()
        wide = MERGE * MERGE * config.hidden_size
        self.pre_norm = LayerNorm(config.hidden_size)
        self.proj = nn.Sequential(Linear(wide, wide, bias=True), nn.GELU(), Linear(wide, lm_hidden, bias=True))

    def forward(self, groups_N4d: Tensor) -> Tensor:
        return self.proj(self.pre_norm(groups_N4d).flatten(1))

    def logical_matrices(self) -> Mapping[str, Layout]:
        return {"proj.0.weight": Whole(), "proj.2.weight": Whole()}


def normalized(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 to (x / 255 - 0.5) / 0.5, as the published processor does; floating-point pixels are so already."""
    if pixels.dtype == torch.uint8:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        pixels = (pixels.to(exact) / 255 - 0.5) / 0.5
    return pixels.to(dtype)
