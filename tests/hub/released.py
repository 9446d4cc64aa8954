"""Folders laid out as Moonshot AI releases them, with tiny random tensors: written by hand, from what is public about
the checkpoints, so that nothing of the code under test decides what they look like."""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import Regex, models, pre_tokenizers, trainers
from torch import Tensor

from perilune.data.tokenizer import KIMI_PATTERN

NAMES = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 10: "<|im_system|>",
         11: "<|tool_calls_section_begin|>", 12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>",
         14: "<|tool_call_argument_begin|>", 15: "<|tool_call_end|>", 17: "<|im_middle|>"}  # fmt: skip
"""Special tokens of Kimi-Linear, counted from the first; the last two ids are [UNK] and [PAD]."""

TEXTS = (
    "The model reads and writes; the reader writes, the writer reads. 'Tis isn't it's we'll they'd",
    "月之暗面的模型会读中文，也会写中文。模型，中文，月面。",
    "def read(self, text):\n        return self.write(text)\n\n\n    # read and write\n",
    "🚀🚀 emoji 🚀 naïve café 12345 67890 12345",
    Path(json.__file__).read_text(encoding="utf-8"),
)


def train_ranks(texts: Iterable[str], size: int) -> dict[bytes, int]:
    """A vocabulary in tiktoken's sense: merges learned from texts, tokens by rank."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(KIMI_PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    assert core.get_vocab_size() == size, "more text is needed"
    ordered = sorted(core.get_vocab().items(), key=lambda item: item[1])
    return {bytes(byte_of[character] for character in token): rank for rank, (token, _) in enumerate(ordered)}


def write_vocabulary(
    folder: Path, ranks: dict[bytes, int], vocab_size: int, extra: dict[int, str] | None = None
) -> None:
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / "tiktoken.model").write_text("".join(lines))
    first = len(ranks)
    names = {first + place: name for place, name in {**NAMES, **(extra or {})}.items()}
    names |= {vocab_size - 2: "[UNK]", vocab_size - 1: "[PAD]"}
    settings = {
        "added_tokens_decoder": {str(number): {"content": name, "special": True} for number, name in names.items()},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator) * 0.2
        if name.endswith(("norm.weight", "layernorm.weight", "norm0.weight", "norm1.weight")):
            value = value + 1
        exact = name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        found[name] = value if exact else value.to(torch.bfloat16)
    return found


def write_shards(folder: Path, tensors: dict[str, Tensor], shards: int = 3) -> None:
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for number in range(shards):
        file = f"model-{number + 1}-of-{shards}.safetensors"
        held = names[number::shards]
        save_file({name: tensors[name] for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


# ---------------------------------------------------------------------------------------------------------------------
# Kimi-Linear-48B-A3B

VOCAB = 512
LINEAR = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 480, "dtype": "bfloat16", "eos_token_id": 482, "first_k_dense_replace": 1, "head_dim": 8,
    "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02, "intermediate_size": 48, "kv_lora_rank": 16,
    "linear_attn_config": {
        "full_attn_layers": [4, 5], "head_dim": 8, "kda_layers": [1, 2, 3], "num_heads": 4, "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "model_type": "kimi_linear", "moe_intermediate_size": 16,
    "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 4,
    "num_expert_group": 1, "num_experts": 8, "num_experts_per_token": 2, "num_hidden_layers": 5,
    "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 511,
    "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False, "topk_group": 1,
    "use_cache": True, "use_grouped_topk": True, "v_head_dim": 8, "vocab_size": VOCAB,
}  # fmt: skip


def linear_shapes(conv: tuple[int, ...] = (32, 1, 4)) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint, for LINEAR."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, 32), "model.norm.weight": (32,), "lm_head.weight": (VOCAB, 32),
    }  # fmt: skip
    for layer in range(5):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}input_layernorm.weight": (32,), f"{at}post_attention_layernorm.weight": (32,)}
        own = f"{at}self_attn."
        if layer < 3:
            for part in "qkv":
                shapes |= {f"{own}{part}_proj.weight": (32, 32), f"{own}{part}_conv1d.weight": conv}
            shapes |= {
                f"{own}f_a_proj.weight": (8, 32), f"{own}f_b_proj.weight": (32, 8), f"{own}b_proj.weight": (4, 32),
                f"{own}g_a_proj.weight": (8, 32), f"{own}g_b_proj.weight": (32, 8), f"{own}A_log": (1, 1, 4, 1),
                f"{own}dt_bias": (32,), f"{own}o_norm.weight": (8,), f"{own}o_proj.weight": (32, 32),
            }  # fmt: skip
        else:
            shapes |= mla_shapes(own, hidden=32, heads=4, rank=16, nope=8, shared=4, value=8)
            shapes |= {f"{own}q_proj.weight": (48, 32)}
        if layer == 0:
            shapes |= swiglu_shapes(f"{at}mlp.", 32, 48)
            continue
        sparse = f"{at}block_sparse_moe."
        shapes |= {f"{sparse}gate.weight": (8, 32), f"{sparse}gate.e_score_correction_bias": (8,)}
        shapes |= swiglu_shapes(f"{sparse}shared_experts.", 32, 16)
        for expert in range(8):
            shapes |= {f"{sparse}experts.{expert}.{part}.weight": (16, 32) for part in ("w1", "w3")}
            shapes |= {f"{sparse}experts.{expert}.w2.weight": (32, 16)}
    return shapes


def mla_shapes(own: str, *, hidden: int, heads: int, rank: int, nope: int, shared: int, value: int) -> dict[str, Any]:
    return {
        f"{own}kv_a_proj_with_mqa.weight": (rank + shared, hidden),
        f"{own}kv_a_layernorm.weight": (rank,),
        f"{own}kv_b_proj.weight": (heads * (nope + value), rank),
        f"{own}o_proj.weight": (hidden, heads * value),
    }


def swiglu_shapes(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    up = {f"{at}{part}_proj.weight": (inner, hidden) for part in ("gate", "up")}
    return {**up, f"{at}down_proj.weight": (hidden, inner)}


def kimi_linear(folder: Path) -> dict[str, Tensor]:
    """Write a tiny Kimi-Linear-48B; its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LINEAR))
    write_vocabulary(folder, train_ranks(TEXTS, 480), VOCAB)
    tensors = random_tensors(linear_shapes())
    write_shards(folder, tensors)
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Kimi K2.5

PAD = 480 + 21
K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
    "bos_token_id": 480, "dtype": "bfloat16", "eos_token_id": 481, "ignore_index": -100,
    "media_placeholder_token_id": PAD, "model_type": "kimi_k25", "pad_token_id": 511, "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48, "kv_lora_rank": 16,
        "max_position_embeddings": 256, "model_type": "kimi_k2", "moe_intermediate_size": 64, "moe_layer_freq": 1,
        "n_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 4,
        "num_experts_per_tok": 2, "num_hidden_layers": 3, "num_key_value_heads": 4, "num_nextn_predict_layers": 0,
        "q_lora_rank": 24, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "rms_norm_eps": 1e-05, "rope_theta": 50000.0,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 64, "type": "yarn",
        },
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
        "v_head_dim": 8, "vocab_size": VOCAB,
        "quantization_config": {
            "config_groups": {"group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                    "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
                },
            }},
            "format": "pack-quantized",
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        },
    },
    "vision_config": {
        "init_pos_emb_height": 6, "init_pos_emb_time": 4, "init_pos_emb_width": 6, "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool", "mm_hidden_size": 24, "mm_projector_type": "patchmerger", "patch_size": 14,
        "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu", "projector_ln_eps": 1e-05,
        "text_hidden_size": 32, "video_attn_type": "spatial_temporal", "vt_hidden_size": 24,
        "vt_intermediate_size": 40, "vt_num_attention_heads": 2, "vt_num_hidden_layers": 2,
    },
}  # fmt: skip


def k25_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint as trained, before its experts were packed, for K25."""
    shapes: dict[str, tuple[int, ...]] = {
        "language_model.model.embed_tokens.weight": (VOCAB, 32), "language_model.model.norm.weight": (32,),
        "language_model.lm_head.weight": (VOCAB, 32), "vision_tower.patch_embed.proj.weight": (24, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (24,), "vision_tower.patch_embed.pos_emb.weight": (6, 6, 24),
        "mm_projector.pre_norm.weight": (24,), "mm_projector.pre_norm.bias": (24,),
        "mm_projector.proj.0.weight": (96, 96), "mm_projector.proj.0.bias": (96,),
        "mm_projector.proj.2.weight": (32, 96), "mm_projector.proj.2.bias": (32,),
        "vision_tower.encoder.final_layernorm.weight": (24,), "vision_tower.encoder.final_layernorm.bias": (24,),
    }  # fmt: skip
    for block in range(2):
        at = f"vision_tower.encoder.blocks.{block}."
        for name, rows, columns in (("wqkv", 72, 24), ("wo", 24, 24), ("mlp.fc0", 40, 24), ("mlp.fc1", 24, 40)):
            shapes |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (rows,)}
        shapes |= {f"{at}{norm}.{part}": (24,) for norm in ("norm0", "norm1") for part in ("weight", "bias")}
    for layer in range(3):
        at = f"language_model.model.layers.{layer}."
        shapes |= {f"{at}input_layernorm.weight": (32,), f"{at}post_attention_layernorm.weight": (32,)}
        own = f"{at}self_attn."
        shapes |= mla_shapes(own, hidden=32, heads=4, rank=16, nope=8, shared=4, value=8)
        shapes |= {
            f"{own}q_a_proj.weight": (24, 32),
            f"{own}q_a_layernorm.weight": (24,),
            f"{own}q_b_proj.weight": (48, 24),
        }
        if layer == 0:
            shapes |= swiglu_shapes(f"{at}mlp.", 32, 48)
            continue
        shapes |= {f"{at}mlp.gate.weight": (4, 32), f"{at}mlp.gate.e_score_correction_bias": (4,)}
        shapes |= swiglu_shapes(f"{at}mlp.shared_experts.", 32, 64)
        for expert in range(4):
            shapes |= swiglu_shapes(f"{at}mlp.experts.{expert}.", 32, 64)
    return shapes


def pack(weight: Tensor, group: int = 32) -> tuple[dict[str, Tensor], Tensor]:
    """The three tensors of a weight in four bits, number by number as the format is described, and what they mean."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // group, group)
    scale = (grouped.abs().amax(-1) / 7.5).to(torch.bfloat16)
    numbers = (grouped / scale.float()[..., None]).round().clamp(-8, 7).view(rows, columns).int()
    words = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for column in range(columns):
        words[:, column // 8] |= (numbers[:, column] + 8).long() << (4 * (column % 8))
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    parts = {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}
    return parts, (numbers.view(grouped.shape) * scale[..., None]).view(rows, columns).to(torch.bfloat16)


def kimi_k25(folder: Path) -> dict[str, Tensor]:
    """Write a tiny Kimi K2.5 with its experts in four bits; its tensors as they are after unpacking."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(K25))
    later = {18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>", 21: "<|media_pad|>",
             22: "<think>", 23: "</think>"}  # fmt: skip
    write_vocabulary(folder, train_ranks(TEXTS, 480), VOCAB, later)
    media = {
        "in_patch_limit": 4096,
        "in_patch_limit_each_frame": 1024,
        "patch_limit_on_one_side": 256,
        "sample_fps": 2.0,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": media}))
    plain, stored = random_tensors(k25_shapes(), seed=1), {}
    for name, tensor in list(plain.items()):
        if ".experts." not in name:
            stored[name] = tensor
            continue
        parts, plain[name] = pack(tensor)
        stored |= {name.replace("weight", part): value for part, value in parts.items()}
    write_shards(folder, stored, shards=2)
    return plain
