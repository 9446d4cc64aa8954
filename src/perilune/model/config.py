"""Everything that decides a decoder's shape. Keys follow the public Kimi configs where their units agree."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from perilune.model.kda import KDAConfig
from perilune.model.mla import MLAConfig
from perilune.model.moe import MoEConfig
from perilune.model.vision import VisionConfig

LayerType = Literal["kda", "mla"]
ComputeDtype = Literal["float32", "bfloat16", "float64"]
Residual = Literal["plain", "scalars", "attnres", "block_attnres"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab_size: int = 4096
    hidden_size: int = 128
    num_hidden_layers: int = 4
    layer_types: tuple[LayerType, ...] | None = None
    """Kind of every layer. None: three KDA layers, then one MLA layer, repeated, and MLA last."""
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    intermediate_size: int = 384
    """Width of the dense SwiGLU."""
    moe: MoEConfig | None = None
    """None: every layer is dense."""
    vision: VisionConfig | None = None
    """None: text only."""
    residual: Residual = "block_attnres"
    block_sublayers: int = 4
    """Sublayers (two per layer) in one block of block_attnres."""
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    compute_dtype: ComputeDtype = "float32"
    """Dtype of activations and of weights at use. Parameters themselves are float32 (float64 for tests)."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "block_sublayers"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, got {getattr(self, name)!r}")
        for name, choices in (
            ("residual", get_args(Residual)),
            ("compute_dtype", get_args(ComputeDtype)),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"model.{name} is {getattr(self, name)!r}, expected one of {', '.join(choices)}")
        for kind in self.layer_types or ():
            if kind not in get_args(LayerType):
                raise ValueError(f"model.layer_types holds {kind!r}, expected only {', '.join(get_args(LayerType))}")
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"model.layer_types names {len(self.layer_types)} layers but num_hidden_layers is "
                f"{self.num_hidden_layers}: give one of 'kda', 'mla' per layer, or leave it None"
            )

    def layer_pattern(self) -> tuple[LayerType, ...]:
        if self.layer_types is not None:
            return self.layer_types
        last = self.num_hidden_layers - 1
        return tuple("mla" if i % 4 == 3 or i == last else "kda" for i in range(self.num_hidden_layers))

    def is_moe_layer(self, index: int) -> bool:
        return self.moe is not None and index >= self.moe.first_k_dense_replace

    def dtype(self) -> torch.dtype:
        return getattr(torch, self.compute_dtype)
