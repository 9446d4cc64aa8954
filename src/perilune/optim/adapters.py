"""MuonClip for transformers models as they are: Llama (GQA) and DeepSeek-V3 (MLA, experts).

Their attention modules do not report logits. Both call whatever `ALL_ATTENTION_FUNCTIONS.get_interface(...)` of their
modeling file returns, with q and k as the softmax sees them (after RoPE) and the scaling; there a thin layer records
the maximum of scaling * q . k over the pairs the mask allows, then calls the model's own function unchanged. The cost
is the q k^T product a second time, in float32 and in tiles of queries, for watched modules in training mode only.

transformers is never imported here: a module can only be one of its classes if somebody else imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from perilune.optim.heads import MaxLogitRecorder, QKHeads, gqa_heads, mla_heads
from perilune.optim.matrices import ColumnBlocks, Layout, RowBlocks, Stacked, Whole

LLAMA = "transformers.models.llama.modeling_llama"
DEEPSEEK_V3 = "transformers.models.deepseek_v3.modeling_deepseek_v3"
QUERY_TILE = 256

# Where a watched module keeps its recorder: a plain attribute, so that copies of the module watch for themselves.
ATTRIBUTE = "_perilune_max_logit"


class WatchedLogits(MaxLogitRecorder):
    """A recorder fed by the layer under `modeling`'s attention functions, which it lays again where it is unpickled."""

    def __init__(self, num_heads: int, modeling: str) -> None:
        super().__init__(num_heads)
        self.modeling = modeling

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.modeling in sys.modules:
            _record_calls(self.modeling)


def _is_a(module: nn.Module, modeling: str, class_name: str) -> bool:
    file = sys.modules.get(modeling)
    return file is not None and isinstance(module, getattr(file, class_name, ()))


def transformers_matrices(module: Any) -> Mapping[str, Layout]:
    """Layouts of a transformers module's own parameters; empty for modules not known here."""
    if _is_a(module, LLAMA, "LlamaAttention"):
        size = module.head_dim
        rows = {
            f"{name}.weight": RowBlocks((size,) * (getattr(module, name).out_features // size))
            for name in ("q_proj", "k_proj", "v_proj")
        }
        return {**rows, "o_proj.weight": ColumnBlocks((size,) * (module.o_proj.in_features // size))}
    if _is_a(module, DEEPSEEK_V3, "DeepseekV3Attention"):
        heads = module.num_heads
        query = "q_proj.weight" if module.q_lora_rank is None else "q_b_proj.weight"
        return {
            query: RowBlocks((module.qk_head_dim,) * heads),
            "kv_b_proj.weight": RowBlocks((module.qk_nope_head_dim, module.v_head_dim) * heads),
            "o_proj.weight": ColumnBlocks((module.v_head_dim,) * heads),
        }
    if _is_a(module, DEEPSEEK_V3, "DeepseekV3Experts"):
        inner = module.intermediate_dim
        return {"gate_up_proj": Stacked(row_sizes=(inner, inner)), "down_proj": Stacked()}
    if _is_a(module, DEEPSEEK_V3, "DeepseekV3TopkRouter"):
        return {"weight": Whole()}
    return {}


def transformers_heads(module: Any) -> QKHeads | None:
    """Heads of a transformers attention module, whose logits are recorded from now on; None for modules not known
    here."""
    if _is_a(module, LLAMA, "LlamaAttention"):
        num_heads = module.q_proj.out_features // module.head_dim
        return gqa_heads(
            module.q_proj.weight,
            module.k_proj.weight,
            num_heads=num_heads,
            num_kv_heads=module.k_proj.out_features // module.head_dim,
            recorder=_watch(module, num_heads, LLAMA),
            q_bias=module.q_proj.bias,
            k_bias=module.k_proj.bias,
        )
    if _is_a(module, DEEPSEEK_V3, "DeepseekV3Attention"):
        query = module.q_proj if module.q_lora_rank is None else module.q_b_proj
        return mla_heads(
            query.weight,
            module.kv_b_proj.weight,
            num_heads=module.num_heads,
            nope=module.qk_nope_head_dim,
            rope=module.qk_rope_head_dim,
            v_dim=module.v_head_dim,
            recorder=_watch(module, module.num_heads, DEEPSEEK_V3),
        )
    return None


class _RecordingInterface:
    """Stands in for a modeling file's table of attention functions; records for watched modules, else changes
    nothing."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        function = self._table.get_interface(name, default)

        def recorded(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
            recorder = getattr(module, ATTRIBUTE, None)
            if recorder is not None and module.training:
                recorder.update(_max_logit_of_call(module, query, key, mask, options))
            return function(module, query, key, value, mask, **options)

        return recorded

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._table, attribute)

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __contains__(self, name: object) -> bool:
        return name in self._table


def _watch(module: nn.Module, num_heads: int, modeling: str) -> MaxLogitRecorder:
    _record_calls(modeling)
    if not hasattr(module, ATTRIBUTE):
        setattr(module, ATTRIBUTE, WatchedLogits(num_heads, modeling))
    return getattr(module, ATTRIBUTE)


def _record_calls(modeling: str) -> None:
    file: ModuleType = sys.modules[modeling]
    table = getattr(file, "ALL_ATTENTION_FUNCTIONS", None)
    if not hasattr(table, "get_interface"):
        raise ValueError(
            f"{modeling} of this transformers version lacks ALL_ATTENTION_FUNCTIONS.get_interface, where QK-Clip reads "
            "the attention logits; use transformers >= 5, or pass qk_clip_tau=None"
        )
    if not isinstance(table, _RecordingInterface):
        vars(file)["ALL_ATTENTION_FUNCTIONS"] = _RecordingInterface(table)


def _max_logit_of_call(module: nn.Module, query: Tensor, key: Tensor, mask: Any, options: Mapping[str, Any]) -> Tensor:
    packed = options.get("cu_seq_lens_q") is not None
    if packed or not (mask is None or (isinstance(mask, Tensor) and mask.ndim in (2, 4))):
        kind = "packed sequence lengths" if packed else type(mask).__name__
        raise ValueError(
            f"QK-Clip cannot read the attention mask of {type(module).__name__} (got {kind}); load the model with "
            "attn_implementation='sdpa' or 'eager', or pass qk_clip_tau=None"
        )
    if mask is not None and mask.ndim == 2:  # flash attention: one flag a key, causality apart
        mask = mask[:, None, None, :].bool()
        causal = True
    else:
        causal = mask is None
    if causal:
        flag = options.get("is_causal")
        causal = bool(getattr(module, "is_causal", True) if flag is None else flag)
    scaling = options.get("scaling")
    return max_logit(
        query, key, scale=query.shape[-1] ** -0.5 if scaling is None else scaling, mask=mask, causal=causal
    )


@torch.no_grad()
def max_logit(query: Tensor, key: Tensor, *, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """[heads]: the largest scale * q . k over the batch and the allowed pairs; -inf for none.

    query [B, H, T, D], key [B, H_kv, S, D]. mask is boolean (True: allowed) or added to the logits, and broadcasts to
    [B, H or 1, T, S]; causal aligns the last query with the last key.
    """
    batch, num_heads, length, dim = query.shape
    groups, keys = key.shape[1], key.shape[2]
    dtype = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        q = query.to(dtype).view(batch, groups, num_heads // groups, length, dim) * scale
        k = key.to(dtype).unsqueeze(2).mT
        best = torch.full((num_heads,), -torch.inf, dtype=dtype, device=query.device)
        positions = torch.arange(keys, device=query.device)
        for start in range(0, length, QUERY_TILE):
            stop = min(start + QUERY_TILE, length)
            logits = (q[..., start:stop, :] @ k).reshape(batch, num_heads, stop - start, keys)
            if mask is not None:
                tile = mask[:, :, start:stop, :keys] if mask.shape[2] > 1 else mask[..., :keys]
                logits = logits.masked_fill(~tile, -torch.inf) if tile.dtype == torch.bool else logits + tile
            if causal:
                last_seen = positions[start:stop] + (keys - length)
                logits = logits.masked_fill(positions > last_seen[:, None], -torch.inf)
            best = torch.maximum(best, logits.amax(dim=(0, 2, 3)))
    return best
