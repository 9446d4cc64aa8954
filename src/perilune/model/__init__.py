"""The model: Kimi Linear (KDA and MLA layers), experts, Attention Residuals. One idea a file."""

from perilune.model.cache import DecodeCache
from perilune.model.config import ModelConfig
from perilune.model.decoder import Decoder
from perilune.model.generate import SamplingConfig, generate
from perilune.model.kda import KDAConfig, KimiDeltaAttention
from perilune.model.mla import LatentAttention, MLAConfig
from perilune.model.moe import MixtureOfExperts, MoEConfig
from perilune.model.residual import AttentionResidual
from perilune.model.rope import RopeConfig

__all__ = [
    "AttentionResidual",
    "DecodeCache",
    "Decoder",
    "KDAConfig",
    "KimiDeltaAttention",
    "LatentAttention",
    "MLAConfig",
    "MixtureOfExperts",
    "MoEConfig",
    "ModelConfig",
    "RopeConfig",
    "SamplingConfig",
    "generate",
]
