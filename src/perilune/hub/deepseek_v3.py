"""Weights and config to and from the public DeepSeek-V3 format (also Kimi K2's language model): MLA with RoPE."""

from collections.abc import Mapping
from typing import Any

from perilune.hub.entries import (
    Entry,
    check_supported,
    expert_entries,
    renamed,
    require,
    top_entries,
)
from perilune.hub.kimi_linear import (
    LAYER_NORMS,
    max_positions,
    mla_entries,
    mla_from_public,
    rope_from_public,
    rope_to_public,
)
from perilune.model import ModelConfig, MoEConfig

PUBLIC_TYPES = ("deepseek_v3", "kimi_k2")


def why_not(config: ModelConfig) -> list[str]:
    """What of a language model DeepSeek-V3 cannot say; the vision tower beside it is the business of kimi_k25."""
    reasons = []
    if "kda" in config.layer_pattern():
        reasons.append("it has KDA layers (model.layer_types), and DeepSeek-V3 has latent attention in every layer")
    if config.mla.rope is None:
        reasons.append("its latent attention has no positions (model.mla.rope is None), and DeepSeek-V3 rotates")
    if config.residual != "plain":
        reasons.append(f"model.residual={config.residual!r}, and DeepSeek-V3 adds plain sums")
    if config.moe is not None and config.moe.num_shared_experts == 0:
        reasons.append("model.moe.num_shared_experts=0, and DeepSeek-V3 has at least one")
    return reasons


def are_keys(public: Mapping[str, Any]) -> bool:
    """Whether a config says it in the words of DeepSeek-V3, under its own type or ours."""
    return public.get("model_type", "deepseek_v3") in PUBLIC_TYPES or "n_routed_experts" in public


def fits(config: ModelConfig) -> bool:
    """Whether a language model is a DeepSeek-V3."""
    return not why_not(config)


def to_public(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe or MoEConfig(first_k_dense_replace=config.num_hidden_layers)
    assert config.mla.rope is not None
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "dtype": "float32",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.mla.num_attention_heads,
        "num_key_value_heads": config.mla.num_attention_heads,
        "q_lora_rank": config.mla.q_lora_rank,
        "kv_lora_rank": config.mla.kv_lora_rank,
        "qk_nope_head_dim": config.mla.qk_nope_head_dim,
        "qk_rope_head_dim": config.mla.qk_rope_head_dim,
        "v_head_dim": config.mla.v_head_dim,
        "rope_interleave": config.mla.rope.interleaved,
        "rope_parameters": rope_to_public(config.mla.rope),
        "max_position_embeddings": max_positions(config.mla.rope),
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.num_experts_per_token,
        "n_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "norm_topk_prob": moe.moe_renormalize,
        "n_group": moe.num_expert_group,
        "topk_group": moe.topk_group,
        "num_nextn_predict_layers": 0,
        "router_bias_update_rate": moe.bias_update_rate,
    }


SUPPORTED = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
}
"""Keys that change what the model computes, and the values it can compute."""


def from_public(public: dict[str, Any]) -> ModelConfig:
    check_supported(public, SUPPORTED)
    layers = require(public, "num_hidden_layers")
    dense = public.get("first_k_dense_replace", 0)
    moe = None
    if dense < layers:
        moe = MoEConfig(
            num_experts=require(public, "n_routed_experts"),
            num_experts_per_token=require(public, "num_experts_per_tok"),
            num_shared_experts=public.get("n_shared_experts", 1),
            moe_intermediate_size=require(public, "moe_intermediate_size"),
            first_k_dense_replace=dense,
            routed_scaling_factor=public.get("routed_scaling_factor", 1.0),
            moe_renormalize=public.get("norm_topk_prob", True),
            num_expert_group=public.get("n_group") or 1,
            topk_group=public.get("topk_group") or 1,
            bias_update_rate=public.get("router_bias_update_rate", MoEConfig.bias_update_rate),
        )
    return ModelConfig(
        vocab_size=require(public, "vocab_size"),
        hidden_size=require(public, "hidden_size"),
        num_hidden_layers=layers,
        layer_types=("mla",) * layers,
        mla=mla_from_public(public, rope=rope_from_public(public)),
        intermediate_size=require(public, "intermediate_size"),
        moe=moe,
        residual="plain",
        rms_norm_eps=public.get("rms_norm_eps", 1e-6),
        initializer_range=public.get("initializer_range", 0.02),
        tie_word_embeddings=public.get("tie_word_embeddings", False),
    )


def entries(config: ModelConfig) -> list[Entry]:
    result = top_entries(config)
    for index in range(config.num_hidden_layers):
        ours, public = f"layers.{index}.", f"model.layers.{index}."
        result += [renamed(ours + norm, public + norm) for norm in LAYER_NORMS]
        result += mla_entries(ours, public, config.mla)
        if config.moe is not None and config.is_moe_layer(index):
            result += expert_entries(ours + "mlp.", public, config.moe, "mlp.", "gate_proj", "up_proj", "down_proj")
        else:
            parts = ("gate_proj", "up_proj", "down_proj")
            result += [renamed(f"{ours}mlp.{part}.weight", f"{public}mlp.{part}.weight") for part in parts]
    return result
