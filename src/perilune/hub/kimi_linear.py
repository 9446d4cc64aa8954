"""Weights and config to and from the public Kimi-Linear format, with Kimi K3's keys for what Kimi-Linear lacks.

Units and names that differ from ours, all of them here:
- `linear_attn_config` lists layers from 1; ours are a tuple of kinds.
- `attn_res_block_size` counts transformer layers, `block_sublayers` counts sublayers (two per layer); an odd number of
  them is written as `attn_res_block_sublayers`.
- convolutions are three tensors [P, 1, width], ours is one [3 P, width]; A_log is [1, 1, H, 1], ours is [H].
- experts are one tensor each (w1 gate, w3 up, w2 down), ours are stacked.
- a residual site is a norm weight [d] and a projection [1, d] (`self_attention_res_norm`, `self_attention_res_proj`).
- `mla_use_nope` is the absence of a rope config.
- transformers' own configs say `layer_types`, `mlp_layer_types`, `linear_head_dim`, ... instead of the lists above.
- transformers never ties a Kimi-Linear head, so a tied one is written out as `lm_head.weight` too.
transformers 5.22 writes the dense MLP of a Kimi-Linear model under `block_sparse_moe.` too; both are read.
"""

from typing import Any

import torch
from torch import Tensor

from perilune.hub.entries import (
    Entry,
    FormatError,
    check_supported,
    expert_entries,
    renamed,
    require,
    reshaped,
    top_entries,
)
from perilune.model import KDAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from perilune.model.config import LayerType

PUBLIC_TYPE = "kimi_linear"
OWN_TYPE = "perilune"
"""Written for models that no public type holds (residual mixes, bounded gates, a tower beside KDA layers, ...)."""


def why_not(config: ModelConfig) -> list[str]:
    """What of a model the public type cannot say; transformers would compute something else."""
    reasons = []
    if config.vision is not None:
        reasons.append("it has a vision tower (model.vision), and Kimi-Linear reads text only")
    if config.residual != "plain":
        reasons.append(f"model.residual={config.residual!r}, and Kimi-Linear adds plain sums")
    if "kda" in config.layer_pattern():
        for name, value in (
            ("gate_lower_bound", None),
            ("use_full_rank_gate", False),
            ("allow_neg_eigval", False),
            ("decay", "channel"),
        ):
            if getattr(config.kda, name) != value:
                reasons.append(f"model.kda.{name}={getattr(config.kda, name)!r}, and Kimi-Linear has {value!r}")
    if config.mla.rope is not None and "mla" in config.layer_pattern():
        reasons.append("its latent attention has rotary positions (model.mla.rope), and Kimi-Linear has none")
    if config.moe is not None and config.moe.num_shared_experts == 0:
        reasons.append("model.moe.num_shared_experts=0, and Kimi-Linear has at least one")
    return reasons


def to_public(config: ModelConfig) -> dict[str, Any]:
    """Its keys, and ours for what they cannot say."""
    pattern = config.layer_pattern()
    public: dict[str, Any] = {
        "model_type": PUBLIC_TYPE,
        "architectures": ["KimiLinearForCausalLM"],
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
        "mla_use_nope": config.mla.rope is None,
        "rms_norm_eps": config.rms_norm_eps,
        "initializer_range": config.initializer_range,
        "tie_word_embeddings": config.tie_word_embeddings,
        "hidden_act": "silu",
        "linear_attn_config": {
            "head_dim": config.kda.head_dim,
            "num_heads": config.kda.num_heads,
            "short_conv_kernel_size": config.kda.short_conv_kernel_size,
            "kda_layers": [i + 1 for i, kind in enumerate(pattern) if kind == "kda"],
            "full_attn_layers": [i + 1 for i, kind in enumerate(pattern) if kind == "mla"],
        },
        **_moe_to_public(config),
    }
    extra = _own_keys(config)
    public["linear_attn_config"] |= extra.pop("linear_attn_config", {})
    return public | extra


def _moe_to_public(config: ModelConfig) -> dict[str, Any]:
    # transformers has no dense Kimi-Linear: with first_k_dense_replace past the last layer it builds no experts.
    moe = config.moe or MoEConfig(first_k_dense_replace=config.num_hidden_layers)
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_token": moe.num_experts_per_token,
        "num_shared_experts": moe.num_shared_experts,
        "moe_intermediate_size": moe.moe_intermediate_size,
        "first_k_dense_replace": moe.first_k_dense_replace,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "moe_renormalize": moe.moe_renormalize,
        "num_expert_group": moe.num_expert_group,
        "topk_group": moe.topk_group,
        "router_bias_update_rate": moe.bias_update_rate,
    }


def _own_keys(config: ModelConfig) -> dict[str, Any]:
    """What transformers' kimi_linear cannot express."""
    extra: dict[str, Any] = {}
    if config.residual == "scalars":
        extra["residual_scalars"] = True
    elif config.residual == "attnres":
        extra["attn_res_full"] = True
    elif config.residual == "block_attnres" and config.block_sublayers % 2:
        extra["attn_res_block_sublayers"] = config.block_sublayers
    elif config.residual == "block_attnres":
        extra["attn_res_block_size"] = config.block_sublayers // 2
    linear: dict[str, Any] = {
        key: True for key in ("use_full_rank_gate", "allow_neg_eigval") if getattr(config.kda, key)
    }
    if config.kda.gate_lower_bound is not None:
        linear["gate_lower_bound"] = config.kda.gate_lower_bound
    if config.kda.decay != "channel":
        linear["decay"] = config.kda.decay
    if linear:
        extra["linear_attn_config"] = linear
    if config.mla.rope is not None:
        rope = config.mla.rope
        extra["rope_interleave"] = rope.interleaved
        extra["rope_parameters"] = rope_to_public(rope)
        extra["max_position_embeddings"] = max_positions(rope)
    return extra


def max_positions(rope: RopeConfig) -> int:
    return int(rope.original_max_position_embeddings * rope.factor)


def rope_to_public(rope: RopeConfig) -> dict[str, Any]:
    if rope.factor == 1.0:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def rope_from_public(public: dict[str, Any]) -> RopeConfig:
    given = public.get("rope_parameters") or {
        **(public.get("rope_scaling") or {}),
        "rope_theta": public.get("rope_theta"),
    }
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("attention_factor") is not None:
        raise FormatError(f"rope attention_factor={given['attention_factor']!r} is not supported: give mscale instead")
    theta = given.get("rope_theta") or 10_000.0
    interleaved = bool(public.get("rope_interleave", True))
    if kind == "default":
        return RopeConfig(theta=theta, interleaved=interleaved)
    if kind != "yarn":
        raise FormatError(f"rope_type {kind!r} is not supported: expected 'default' or 'yarn'")
    return RopeConfig(
        theta=theta,
        interleaved=interleaved,
        factor=given["factor"],
        original_max_position_embeddings=given["original_max_position_embeddings"],
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        mscale=given.get("mscale", 1.0),
        mscale_all_dim=given.get("mscale_all_dim", 0.0),
    )


SUPPORTED = {
    "hidden_act": ("silu",),
    "moe_router_activation_func": ("sigmoid",),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
}
"""Keys that change what the model computes, and the values it can compute."""


def _layer_types(public: dict[str, Any], linear: dict[str, Any]) -> tuple[LayerType, ...]:
    """From transformers' list of names, or from the checkpoint's lists that count from 1."""
    layers = require(public, "num_hidden_layers")
    if public.get("layer_types"):
        kinds: dict[str, LayerType] = {"linear_attention": "kda", "full_attention": "mla"}
        unknown = set(public["layer_types"]) - set(kinds)
        if unknown or len(public["layer_types"]) != layers:
            raise FormatError(
                f"layer_types is {public['layer_types']!r}, expected {layers} names out of {', '.join(kinds)}"
            )
        return tuple(kinds[name] for name in public["layer_types"])
    full, kda = set(require(linear, "full_attn_layers")), set(require(linear, "kda_layers"))
    if full | kda != set(range(1, layers + 1)) or full & kda:
        raise FormatError(
            f"linear_attn_config lists {sorted(full)} and {sorted(kda)}, expected each of 1..{layers} once "
            "(the lists count from 1)"
        )
    return tuple("mla" if index + 1 in full else "kda" for index in range(layers))


def _dense_layers(public: dict[str, Any]) -> int:
    """How many layers, from the first on, have a dense MLP."""
    kinds = public.get("mlp_layer_types")
    if not kinds:
        return public.get("first_k_dense_replace", 1)
    dense = sum(kind == "dense" for kind in kinds)
    if list(kinds) != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
        raise FormatError(f"mlp_layer_types is {kinds!r}: dense layers after the first sparse one are not supported")
    return dense


def from_public(public: dict[str, Any]) -> ModelConfig:
    check_supported(public, SUPPORTED)
    linear = {
        "head_dim": public.get("linear_head_dim"),
        "num_heads": public.get("linear_num_heads"),
        "short_conv_kernel_size": public.get("linear_conv_kernel_dim", 4),
    }
    linear = {name: value for name, value in linear.items() if value is not None}
    linear |= public.get("linear_attn_config") or {}
    layers = require(public, "num_hidden_layers")
    residual, block_sublayers = "plain", 4
    if public.get("residual_scalars"):
        residual = "scalars"
    elif public.get("attn_res_full"):
        residual = "attnres"
    elif public.get("attn_res_block_sublayers"):
        residual, block_sublayers = "block_attnres", public["attn_res_block_sublayers"]
    elif public.get("attn_res_block_size"):
        residual, block_sublayers = "block_attnres", 2 * public["attn_res_block_size"]
    dense = _dense_layers(public)
    return ModelConfig(
        vocab_size=require(public, "vocab_size"),
        hidden_size=require(public, "hidden_size"),
        num_hidden_layers=layers,
        layer_types=_layer_types(public, linear),
        kda=KDAConfig(
            num_heads=require(linear, "num_heads"),
            head_dim=require(linear, "head_dim"),
            short_conv_kernel_size=linear.get("short_conv_kernel_size", 4),
            gate_lower_bound=linear.get("gate_lower_bound", public.get("gate_lower_bound")),
            use_full_rank_gate=linear.get("use_full_rank_gate", False),
            allow_neg_eigval=linear.get("allow_neg_eigval", False),
            decay=linear.get("decay", "channel"),
        ),
        mla=mla_from_public(public, rope=None if public.get("mla_use_nope", True) else rope_from_public(public)),
        intermediate_size=require(public, "intermediate_size"),
        moe=None if dense >= layers else _moe_from_public(public, dense),
        residual=residual,  # type: ignore[arg-type]
        block_sublayers=block_sublayers,
        rms_norm_eps=public.get("rms_norm_eps", 1e-5),
        initializer_range=public.get("initializer_range", 0.02),
        tie_word_embeddings=public.get("tie_word_embeddings", False),
    )


def mla_from_public(public: dict[str, Any], *, rope: RopeConfig | None) -> MLAConfig:
    heads = require(public, "num_attention_heads")
    if public.get("num_key_value_heads") not in (None, heads):
        raise FormatError(
            f"num_key_value_heads={public['num_key_value_heads']!r} differs from num_attention_heads={heads!r}: latent "
            "attention has one key per query head"
        )
    return MLAConfig(
        num_attention_heads=heads,
        q_lora_rank=public.get("q_lora_rank"),
        kv_lora_rank=require(public, "kv_lora_rank"),
        qk_nope_head_dim=require(public, "qk_nope_head_dim"),
        qk_rope_head_dim=require(public, "qk_rope_head_dim"),
        v_head_dim=require(public, "v_head_dim"),
        rope=rope,
    )


def _moe_from_public(public: dict[str, Any], dense: int) -> MoEConfig:
    return MoEConfig(
        num_experts=require(public, "num_experts"),
        num_experts_per_token=require(public, "num_experts_per_token"),
        num_shared_experts=public.get("num_shared_experts", 1),
        moe_intermediate_size=require(public, "moe_intermediate_size"),
        first_k_dense_replace=dense,
        routed_scaling_factor=public.get("routed_scaling_factor", 1.0),
        moe_renormalize=public.get("moe_renormalize", True),
        num_expert_group=public.get("num_expert_group", 1),
        topk_group=public.get("topk_group", 1),
        bias_update_rate=public.get("router_bias_update_rate", MoEConfig.bias_update_rate),
    )


def entries(config: ModelConfig) -> list[Entry]:
    """How every tensor of the model maps to public tensors."""
    result = top_entries(config)
    mixes = config.residual in ("attnres", "block_attnres")
    if mixes:
        result += _site("out_res", "model.output_attn_res")
    for index, kind in enumerate(config.layer_pattern()):
        ours, public = f"layers.{index}.", f"model.layers.{index}."
        result += [renamed(ours + norm, public + norm) for norm in LAYER_NORMS]
        result += _kda(ours, public, config) if kind == "kda" else mla_entries(ours, public, config.mla)
        if mixes:
            result += _site(ours + "attn_res", public + "self_attention_res")
            result += _site(ours + "mlp_res", public + "mlp_res")
        if config.residual == "scalars":
            result += [renamed(ours + name, public + name) for name in SCALARS]
        if config.moe is not None and config.is_moe_layer(index):
            names = ("block_sparse_moe.", "w1", "w3", "w2")
            result += expert_entries(ours + "mlp.", public, config.moe, *names)
        else:
            for part in ("gate_proj", "up_proj", "down_proj"):
                name = f"mlp.{part}.weight"
                result.append(renamed(ours + name, public + name, public + f"block_sparse_moe.{part}.weight"))
    return result


SCALARS = ("res_scalars.sum_scale", "res_scalars.embedding_scale")
LAYER_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def mla_entries(ours: str, public: str, config: MLAConfig) -> list[Entry]:
    names = ["kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight", "o_proj.weight"]
    query = (
        ["q_proj.weight"]
        if config.q_lora_rank is None
        else ["q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"]
    )
    return [renamed(f"{ours}self_attn.{name}", f"{public}self_attn.{name}") for name in names + query]


def _kda(ours: str, public: str, config: ModelConfig) -> list[Entry]:
    ours, public = ours + "self_attn.", public + "self_attn."
    gate = ["g_proj"] if config.kda.use_full_rank_gate else ["g_a_proj", "g_b_proj"]
    names = ["q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", *gate, "o_norm", "o_proj"]
    result = [renamed(f"{ours}{name}.weight", f"{public}{name}.weight") for name in names]
    dim = config.kda.num_heads * config.kda.head_dim
    width = config.kda.short_conv_kernel_size

    def join_convolutions(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.reshape(dim, width) for part in parts])

    def split_convolutions(joined: Tensor) -> list[Tensor]:
        return [part.unsqueeze(1) for part in joined.split(dim)]

    convolutions = tuple((f"{public}{name}_conv1d.weight",) for name in "qkv")
    result.append(Entry(ours + "conv_weight", convolutions, join_convolutions, split_convolutions))
    result.append(reshaped(ours + "A_log", public + "A_log", (config.kda.num_heads,), (1, 1, config.kda.num_heads, 1)))
    result.append(renamed(ours + "dt_bias", public + "dt_bias"))
    return result


def _site(ours: str, public: str) -> list[Entry]:
    """A residual site: the query is a [1, d] projection, the gain a norm weight."""
    return [
        Entry(
            ours + ".query",
            ((public + "_proj.weight",),),
            lambda parts: parts[0].reshape(-1),
            lambda query: [query[None]],
        ),
        renamed(ours + ".gain", public + "_norm.weight"),
    ]
