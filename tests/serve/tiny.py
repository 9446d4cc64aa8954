"""Tiny models, a tokenizer and pictures for the serving tests: every kind of layer the engine must serve."""

from dataclasses import replace
from functools import cache

import numpy as np
import torch

from perilune.data.media import Media, media_tokens
from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, MoEConfig, VisionConfig
from perilune.model.config import ComputeDtype
from perilune.serve.request import Picture

TEXTS = (
    "The moon turns around the earth, and the point of its orbit that is closest is called perilune.\n",
    '{"name": "search", "arguments": {"query": "how far is the moon"}}\n',
    "Ein kurzer Satz mit Umlauten: über, schön, größer. Γειά σου Κόσμε. 你好，世界。 🌒\n",
)
VOCAB_SIZE = 320

BASE = ModelConfig(
    vocab_size=VOCAB_SIZE + 5,  # ids that the tokenizer does not have
    hidden_size=32,
    num_hidden_layers=4,
    kda=KDAConfig(num_heads=2, head_dim=8),
    mla=MLAConfig(num_attention_heads=2, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    intermediate_size=48,
    residual="plain",
    initializer_range=0.2,
)
VARIANTS: dict[str, ModelConfig] = {
    "hybrid": BASE,
    "mla": replace(BASE, num_hidden_layers=2, layer_types=("mla",) * 2),
    "kda": replace(BASE, num_hidden_layers=2, layer_types=("kda",) * 2),
    "block_attnres": replace(BASE, residual="block_attnres", block_sublayers=3),
    "experts": replace(
        BASE, moe=MoEConfig(num_experts=4, num_experts_per_token=2, moe_intermediate_size=24, routed_scaling_factor=1.5)
    ),
    "pictures": replace(
        BASE,
        num_hidden_layers=2,
        layer_types=("kda", "mla"),
        vision=VisionConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=24,
            pos_emb_height=4,
            pos_emb_width=4,
        ),
    ),
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, VOCAB_SIZE)


@cache
def model(name: str = "hybrid", dtype: ComputeDtype = "float64", seed: int = 0) -> Decoder:
    """Shared between tests: do not change its weights (build one with `fresh_model`)."""
    return fresh_model(name, dtype, seed)


def fresh_model(name: str = "hybrid", dtype: ComputeDtype = "float64", seed: int = 0) -> Decoder:
    """Residual queries are not zero, so that mixes over depth matter."""
    built = Decoder(replace(VARIANTS[name], compute_dtype=dtype), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter_name, parameter in built.named_parameters():
            if parameter_name.endswith((".query", ".gain")):
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise, alpha=0.5)
    return built.eval()


@cache
def picture(seed: int = 0) -> Media:
    """Two by four patches: two tokens."""
    pixels = np.random.default_rng(seed).integers(256, size=(8, 3, 14, 14), dtype=np.uint8)
    return Media(pixels=pixels, grid=(1, 2, 4))


def prompt_with_pictures(
    before: tuple[int, ...], seeds: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """`before`, then each picture of `seeds`: the prompt and its pictures at their places."""
    tokens, pictures = list(before), []
    for seed in seeds:
        media = picture(seed)
        ids = media_tokens(tokenizer(), media)
        pictures.append(Picture.of(media, len(tokens) + ids.index(tokenizer().special_ids["<|media_pad|>"])))
        tokens += ids
    return tuple(tokens), tuple(pictures)
