"""The model: Kimi Linear (KDA and MLA layers), experts, Attention Residuals, MoonViT-3D. One idea a file."""

from perilune.model.cache import DecodeCache
from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder
from perilune.model.generate import SamplingConfig, generate
from perilune.model.kda import KDAConfig, KimiDeltaAttention
from perilune.model.mla import LatentAttention, MLAConfig
from perilune.model.moe import MixtureOfExperts, MoEConfig
from perilune.model.residual import AttentionResidual
from perilune.model.rope import RopeConfig
from perilune.model.vision import MediaInput, MoonViT3D, Projector, VisionConfig

__all__ = [
    "AttentionResidual",
    "DecodeCache",
    "Decoder",
    "KDAConfig",
    "KimiDeltaAttention",
    "LatentAttention",
    "MLAConfig",
    "MediaInput",
    "MixtureOfExperts",
    "MoEConfig",
    "ModelConfig",
    "MoonViT3D",
    "Projector",
    "RopeConfig",
    "SamplingConfig",
    "VisionConfig",
    "generate",
]
