"""Which public type a model is written as, and why it cannot be another.

    kimi_linear    KDA and latent attention without positions, plain residuals, text
    deepseek_v3    latent attention with rotary positions, plain residuals, text (the language model of Kimi K2)
    kimi_k25       the same with a vision tower
    perilune       every model, under the names of whichever of these is nearest, with keys of our own for the rest

transformers, vLLM and SGLang know the first three. The last is read by transformers with the code that an export brings
along (modeling_perilune.py), and by Perilune.
"""

from types import ModuleType
from typing import Any, Literal, get_args

from perilune.hub import deepseek_v3, kimi_k25, kimi_linear
from perilune.hub.entries import FormatError
from perilune.model import ModelConfig

Target = Literal["kimi_linear", "deepseek_v3", "kimi_k25", "perilune"]
TARGETS: tuple[Target, ...] = get_args(Target)

CODE_FILES = ("configuration_perilune.py", "modeling_perilune.py", "vision_perilune.py")
CONFIG_CLASSES: dict[Target, str] = {
    "kimi_linear": "KimiLinearConfig",
    "deepseek_v3": "DeepseekV3Config",
    "kimi_k25": "KimiK25Config",
    "perilune": "PeriluneConfig",
}
"""In configuration_perilune.py"""


def why_not(target: Target, config: ModelConfig) -> list[str]:
    """Reasons for which a target cannot hold a model; none: it can."""
    if target == "kimi_linear":
        return kimi_linear.why_not(config)
    if target == "kimi_k25":
        return kimi_k25.why_not(config)
    if target == "deepseek_v3":
        tower = (
            [] if config.vision is None else ["it has a vision tower (model.vision), and DeepSeek-V3 reads text only"]
        )
        return tower + deepseek_v3.why_not(config)
    return []


def choose(config: ModelConfig, asked: str | None = None) -> Target:
    """The target that was asked for, or the public type that fits, or our own; FormatError says why one cannot be."""
    if asked is None:
        return next(target for target in TARGETS if not why_not(target, config))
    for target in TARGETS:
        if target == asked:
            reasons = why_not(target, config)
            if reasons:
                fitting = choose(config)
                code = ", which transformers reads with trust_remote_code=True" if fitting == "perilune" else ""
                raise FormatError(f"{target} cannot hold this model: {'; '.join(reasons)}. Use --to {fitting}{code}")
            return target
    raise FormatError(f"the target {asked!r} is not known: expected one of {', '.join(TARGETS)}")


def format_of(config: ModelConfig) -> ModuleType:
    """The names under which a model's weights and keys are written; the same for every target that can hold it."""
    if config.vision is not None:
        return kimi_k25
    return deepseek_v3 if deepseek_v3.fits(config) else kimi_linear


def format_from(public: dict[str, Any]) -> ModuleType:
    """The names in which a folder with this config.json is written."""
    kind = public.get("model_type")
    if kind == kimi_k25.PUBLIC_TYPE or (kind == kimi_linear.OWN_TYPE and "vision_config" in public):
        return kimi_k25
    if kind in deepseek_v3.PUBLIC_TYPES or (kind == kimi_linear.OWN_TYPE and deepseek_v3.are_keys(public)):
        return deepseek_v3
    if kind in (kimi_linear.PUBLIC_TYPE, kimi_linear.OWN_TYPE):
        return kimi_linear
    if kind is None:
        raise FormatError(
            "config.json names no model_type: expected that of a released or exported model; the folder of a run is "
            "used as it is, and written for others with `perilune export`"
        )
    known = (kimi_linear.PUBLIC_TYPE, kimi_linear.OWN_TYPE, *deepseek_v3.PUBLIC_TYPES, kimi_k25.PUBLIC_TYPE)
    raise FormatError(f"model_type {kind!r} is not supported: expected one of {', '.join(known)}")


def public_config(config: ModelConfig, target: Target) -> dict[str, Any]:
    """config.json, with the way to the code that lies beside it."""
    public = format_of(config).to_public(config)
    if target == "perilune":
        public |= {"model_type": "perilune", "architectures": ["PeriluneForCausalLM"]}
        if "text_config" in public:
            public["text_config"] |= {"model_type": "perilune", "architectures": ["PeriluneForCausalLM"]}
    public["auto_map"] = {
        "AutoConfig": f"configuration_perilune.{CONFIG_CLASSES[target]}",
        "AutoModelForCausalLM": f"modeling_perilune.{'KimiK25' if target == 'kimi_k25' else 'Perilune'}ForCausalLM",
    }
    return public
