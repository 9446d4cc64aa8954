"""Weights and config to and from Kimi K2.5: a vision tower, a projector and a language model in one folder.

Two sets of names are read. The released checkpoint's (`vision_tower.encoder.blocks.N.wqkv`, `mm_projector.proj.0`,
`language_model.model.layers.N...`), which are written, and which transformers reads and writes too; and those of the
modules inside transformers (`model.vision_tower.layers.N.attn.q_proj`, `model.mm_projector.in_proj`,
`model.language_model.layers.N...`), as `state_dict()` of its model hands them out.

Units and names that differ from ours, all of them here:
- the patch embedding is a convolution [d, 3, 14, 14], ours a matrix [d, 588];
- the released config says vt_hidden_size, init_pos_emb_height, ..., transformers' says hidden_size, pos_emb_height,
  ...: both are written, either is read;
- transformers splits wqkv in three and moves the pairs of rotary positions in q and k from neighbours to halves.

The language model inside is DeepSeek-V3 for the public type. Any other is written as text_config of our own type.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from perilune.hub import deepseek_v3, kimi_linear
from perilune.hub.entries import Entry, FormatError, check_supported, renamed, reshaped
from perilune.model import ModelConfig, VisionConfig
from perilune.model.vision import EPS, SIZES
from perilune.model.vision_grids import MERGE

PUBLIC_TYPE = "kimi_k25"

RELEASED_KEYS = {
    "hidden_size": "vt_hidden_size",
    "num_hidden_layers": "vt_num_hidden_layers",
    "num_attention_heads": "vt_num_attention_heads",
    "intermediate_size": "vt_intermediate_size",
    "patch_size": "patch_size",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
    "pos_emb_time": "init_pos_emb_time",
}
"""Our keys, which are transformers', and those of the released config."""

SUPPORTED = {
    "hidden_act": ("gelu_pytorch_tanh",),
    "merge_kernel_size": ([MERGE, MERGE], (MERGE, MERGE)),
    "merge_type": ("sd2_tpool",),
    "mm_projector_type": ("patchmerger",),
    "pos_emb_type": ("divided_fixed",),
    "video_attn_type": ("spatial_temporal",),
    "projector_ln_eps": (EPS,),
}
"""Keys of vision_config that change what the tower computes, and the values it can compute."""


def why_not(config: ModelConfig) -> list[str]:
    """What of a model the public type cannot say."""
    vision, reasons = (
        config.vision,
        [reason.replace("DeepSeek-V3", "Kimi K2.5") for reason in deepseek_v3.why_not(config)],
    )
    if vision is None:
        return ["it has no vision tower (model.vision is None), and Kimi K2.5 has one", *reasons]
    if vision.pos_emb_height != vision.pos_emb_width:
        reasons.append(
            f"model.vision.pos_emb_height={vision.pos_emb_height!r} and pos_emb_width={vision.pos_emb_width!r} differ, "
            "and transformers reads a square grid"
        )
    return reasons


def _text_format(config: ModelConfig) -> ModuleType:
    return deepseek_v3 if deepseek_v3.fits(config) else kimi_linear


def to_public(config: ModelConfig) -> dict[str, Any]:
    assert config.vision is not None, "a model without a tower has a format of its own"
    vision = config.vision
    return {
        "model_type": PUBLIC_TYPE,
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "dtype": "float32",
        "text_config": _text_format(config).to_public(replace(config, vision=None)),
        "vision_config": vision_to_public(vision, config.hidden_size),
        "projection_hidden_size": vision.hidden_size,
        "projection_layer_norm_eps": EPS,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def vision_to_public(vision: VisionConfig, lm_hidden: int) -> dict[str, Any]:
    values = {name: getattr(vision, name) for name in RELEASED_KEYS}
    return {
        "model_type": "kimi_k25_vision",
        **values,
        **{RELEASED_KEYS[name]: value for name, value in values.items()},
        "merge_kernel_size": [MERGE, MERGE],
        "hidden_act": "gelu_pytorch_tanh",
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": vision.hidden_size,
        "text_hidden_size": lm_hidden,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": EPS,
        "pos_emb_type": "divided_fixed",
        "video_attn_type": "spatial_temporal",
    }


def from_public(public: dict[str, Any]) -> ModelConfig:
    text, vision = _part(public, "text_config"), vision_from_public(_part(public, "vision_config"))
    kind = text.get("model_type", "deepseek_v3")
    if kind not in (kimi_linear.PUBLIC_TYPE, kimi_linear.OWN_TYPE, *deepseek_v3.PUBLIC_TYPES):
        raise FormatError(f"text_config.model_type {kind!r} is not supported: expected deepseek_v3 or kimi_linear")
    if public.get("projection_layer_norm_eps", EPS) != EPS:
        raise FormatError(
            f"projection_layer_norm_eps={public['projection_layer_norm_eps']!r} is not supported: expected {EPS}"
        )
    reader = deepseek_v3 if deepseek_v3.are_keys(text) else kimi_linear
    if public.get("projection_hidden_size") not in (None, vision.hidden_size):
        raise FormatError(
            f"projection_hidden_size={public['projection_hidden_size']!r} differs from the hidden_size="
            f"{vision.hidden_size!r} of the tower: the projector normalises what the tower hands over"
        )
    return replace(reader.from_public(text), vision=vision)


def _part(public: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = public.get(name)
    if not isinstance(part, dict):
        raise FormatError(f"config.json has {name}={part!r}, expected the settings of that part as an object")
    return part


def vision_from_public(public: Mapping[str, Any]) -> VisionConfig:
    """From either set of keys. What is left out is as released: transformers writes no defaults."""
    check_supported(public, SUPPORTED)
    rope = public.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") != "axial" or rope.get("rope_theta", 10_000) != 10_000:
        raise FormatError(f"vision_config.rope_parameters={rope!r} is not supported: expected axial with base 10000")
    values = {}
    for ours, released in RELEASED_KEYS.items():
        found = public.get(ours, public.get(released, getattr(SIZES["k25"], ours)))
        if not isinstance(found, int):
            raise FormatError(
                f"vision_config.{released}={found!r}, expected a whole number under this name or {ours!r}"
            )
        values[ours] = found
    try:
        return VisionConfig(**values)
    except ValueError as error:
        raise FormatError(f"vision_config cannot be built: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def entries(config: ModelConfig) -> list[Entry]:
    """How every tensor of the model maps to the released names."""
    text = _text_format(config).entries(replace(config, vision=None))
    prefixed = [_named(entry, lambda name: (f"language_model.{name}",)) for entry in text]
    return [_named(entry, _as_written) for entry in (*prefixed, *vision_entries(config))]


def _as_written(name: str) -> tuple[str, ...]:
    """A released name, and what transformers 5.22 writes for it where its own rules do not turn back."""
    for released, written in MISNAMED.items():
        if name.startswith(released):
            return name, name.replace(released, written, 1)
    return (name,)


MISNAMED = {
    "language_model.model.layers.": "language_model.model.blocks.",
    "mm_projector.pre_norm.": "model.mm_projector.pre_norm.",
    "vision_tower.patch_embed.proj.": "vision_tower.encoder.patch_embed.proj.",
}


def vision_entries(config: ModelConfig) -> list[Entry]:
    """Tower and projector under their released names, which are ours."""
    names = [f"{ours}.{part}" for ours, _ in _maps_and_norms(config) for part in ("weight", "bias")]
    return [_patches(config, PATCHES), *(renamed(name, name) for name in [GRID, PATCHES_BIAS, *names])]


def are_module_names(tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors carry the names of transformers' modules."""
    return any(name.startswith("model.vision_tower.") for name in tensors)


def module_entries(config: ModelConfig) -> list[Entry]:
    """How every tensor of the model maps to the names inside transformers' Kimi_K25ForConditionalGeneration."""
    result = vision_module_entries(config)
    for entry in _text_format(config).entries(replace(config, vision=None)):
        if entry.ours.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            # Stacked there as here: one tensor, under the name of its layer.
            result.append(renamed(entry.ours, f"model.language_model.{entry.ours}"))
        else:
            result.append(_named(entry, _inside))
    return result


def _inside(name: str) -> tuple[str, ...]:
    return (f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name,)


def vision_module_entries(config: ModelConfig) -> list[Entry]:
    """Tower and projector under the names of transformers' modules."""
    assert config.vision is not None
    result = [
        _patches(config, f"model.{PATCHES}"),
        renamed(PATCHES_BIAS, f"model.{PATCHES_BIAS}"),
        renamed(GRID, "model.vision_tower.patch_embed.pos_emb.position_embeddings"),
    ]
    for ours, inside in _maps_and_norms(config):
        for part in ("weight", "bias"):
            if ours.endswith(".wqkv"):
                result.append(_fused(f"{ours}.{part}", f"model.{inside}", part, config.vision.num_attention_heads))
            else:
                result.append(renamed(f"{ours}.{part}", f"model.{inside}.{part}"))
    return result


PATCHES = "vision_tower.patch_embed.proj.weight"
PATCHES_BIAS = "vision_tower.patch_embed.proj.bias"
GRID = "vision_tower.patch_embed.pos_emb.weight"

BLOCK = {
    "norm0": "norm1",
    "wqkv": "attn",
    "wo": "attn.proj",
    "norm1": "norm2",
    "mlp.fc0": "mlp.fc1",
    "mlp.fc1": "mlp.fc2",
}
"""Parts of a block in the released checkpoint, and in transformers."""


def _maps_and_norms(config: ModelConfig) -> list[tuple[str, str]]:
    """Everything with a weight and a bias behind the patch embedding: released name, name inside transformers."""
    assert config.vision is not None
    return [
        *(
            (f"vision_tower.encoder.blocks.{index}.{ours}", f"vision_tower.layers.{index}.{inside}")
            for index in range(config.vision.num_hidden_layers)
            for ours, inside in BLOCK.items()
        ),
        ("vision_tower.encoder.final_layernorm", "vision_tower.final_layernorm"),
        ("mm_projector.pre_norm", "mm_projector.pre_norm"),
        ("mm_projector.proj.0", "mm_projector.in_proj"),
        ("mm_projector.proj.2", "mm_projector.out_proj"),
    ]


def _patches(config: ModelConfig, public: str) -> Entry:
    assert config.vision is not None
    dim, patch = config.vision.hidden_size, config.vision.patch_size
    return reshaped(PATCHES, public, (dim, 3 * patch**2), (dim, 3, patch, patch))


def _named(entry: Entry, names_of: Callable[[str], tuple[str, ...]]) -> Entry:
    """The entry with other names for each of its public names."""
    groups = tuple(tuple(new for name in names for new in names_of(name)) for names in entry.public)
    return replace(entry, public=groups)


def _fused(ours: str, inside: str, part: str, heads: int) -> Entry:
    """wqkv of a block against q, k and v apart."""

    def split(fused: Tensor) -> list[Tensor]:
        q, k, v = fused.chunk(3)
        return [_paired(q, heads, (-1, 2)), _paired(k, heads, (-1, 2)), v]

    def join(parts: list[Tensor]) -> Tensor:
        q, k, v = parts
        return torch.cat([_paired(q, heads, (2, -1)), _paired(k, heads, (2, -1)), v])

    return Entry(ours, tuple((f"{inside}.{letter}_proj.{part}",) for letter in "qkv"), join, split)


def _paired(rows: Tensor, heads: int, pairs: tuple[int, int]) -> Tensor:
    """Rows of every head from neighbours to halves (pairs = (-1, 2)) or back (pairs = (2, -1))."""
    return rows.unflatten(0, (heads, *pairs)).transpose(1, 2).reshape(rows.shape)
