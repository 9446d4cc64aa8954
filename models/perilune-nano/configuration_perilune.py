"""config.json of a model trained with Perilune, for transformers; modeling_perilune.py beside it is the model.

The keys are those of Kimi-Linear, DeepSeek-V3 or Kimi K2.5, whichever the model's type says, with a few more for what
these cannot say. `Settings` brings them under one set of names.
"""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig


class PeriluneConfig(PretrainedConfig):
    """The keys of config.json as they are. The parts of a model with a vision tower are configs of their own."""

    model_type = "perilune"

    def __init__(self, **keys: Any) -> None:
        if isinstance(keys.get("text_config"), dict):
            keys["text_config"] = type(self)(**keys["text_config"])
        super().__init__(**keys)

    def settings(self) -> "Settings":
        text = getattr(self, "text_config", self)
        return Settings.of(text.to_dict(), vision=getattr(self, "vision_config", None))


class KimiLinearConfig(PeriluneConfig):
    model_type = "kimi_linear"


class DeepseekV3Config(PeriluneConfig):
    model_type = "deepseek_v3"


class KimiK25Config(PeriluneConfig):
    model_type = "kimi_k25"

    def __init__(self, **keys: Any) -> None:  # transformers 5 would write one of its own here
        super().__init__(**keys)


DEEPSEEK_KEYS = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the modules ask for, under one set of names."""

    kinds: tuple[str, ...]
    """"kda" or "mla", for every layer"""
    keys: dict[str, Any]
    linear: dict[str, Any]
    rope: dict[str, Any] | None
    residual: str
    block: int
    """Sublayers in a block of Attention Residuals"""
    deepseek_names: bool
    """Experts are called mlp.experts.N.gate_proj, not block_sparse_moe.experts.N.w1"""
    vision: dict[str, Any] | None

    def __getattr__(self, name: str) -> Any:
        try:
            return self.keys[name]
        except KeyError:
            raise AttributeError(f"config.json lacks {name!r}") from None

    @classmethod
    def of(cls, keys: dict[str, Any], *, vision: dict[str, Any] | None) -> "Settings":
        deepseek = "n_routed_experts" in keys
        linear = keys.get("linear_attn_config") or {}
        kda_layers = set(linear.get("kda_layers", ()))  # they count from 1
        kinds = tuple("kda" if layer + 1 in kda_layers else "mla" for layer in range(keys["num_hidden_layers"]))
        residual, block = "plain", 1
        if keys.get("residual_scalars"):
            residual = "scalars"
        elif keys.get("attn_res_full"):
            residual = "attnres"
        elif keys.get("attn_res_block_sublayers") or keys.get("attn_res_block_size"):
            residual, block = "attnres", keys.get("attn_res_block_sublayers") or 2 * keys["attn_res_block_size"]
        return cls(
            kinds=kinds,
            keys={DEEPSEEK_KEYS.get(name, name): value for name, value in keys.items()},
            linear=linear,
            rope=None if keys.get("mla_use_nope", False) else keys["rope_parameters"],
            residual=residual,
            block=block,
            deepseek_names=deepseek,
            vision=vision,
        )
