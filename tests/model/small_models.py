"""Tiny decoders that together cover every kind of layer, gate, expert and residual path."""

from dataclasses import replace

import torch

from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig

BASE = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=4,
    kda=KDAConfig(num_heads=2, head_dim=8),
    mla=MLAConfig(num_attention_heads=2, kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8),
    intermediate_size=48,
    residual="plain",
    compute_dtype="float64",
    initializer_range=0.2,
)
MOE = MoEConfig(num_experts=4, num_experts_per_token=2, moe_intermediate_size=24, routed_scaling_factor=1.5)
YARN = RopeConfig(theta=500.0, factor=4.0, original_max_position_embeddings=16)

VARIANTS: dict[str, ModelConfig] = {
    "plain": BASE,
    "experts": replace(BASE, moe=MOE),
    "block_attnres": replace(BASE, residual="block_attnres", block_sublayers=3),
    "attnres": replace(BASE, residual="attnres"),
    "query_compression_yarn": replace(BASE, mla=replace(BASE.mla, q_lora_rank=16, rope=YARN)),
    "rope_halves": replace(BASE, mla=replace(BASE.mla, rope=RopeConfig(interleaved=False))),
    "bounded_full_rank_gate": replace(
        BASE, kda=replace(BASE.kda, gate_lower_bound=-5.0, use_full_rank_gate=True, allow_neg_eigval=True)
    ),
    "mla_only_tied": replace(BASE, layer_types=("mla",) * 4, tie_word_embeddings=True),
    "kda_only": replace(BASE, layer_types=("kda",) * 4),
    "one_decay_a_head": replace(BASE, kda=replace(BASE.kda, decay="head")),
}


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    """A decoder whose residual queries are not zero, so that mixes matter."""
    model = Decoder(config, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".query", ".gain")):
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.5)
    return model


def random_tokens(model: Decoder, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, shape, generator=generator)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).detach().norm() / expected.detach().norm().clamp(min=1e-30))
