"""Muon's parameters of published models by shape, from their configs: what the planner is measured on.

Both models are latent attention with a mixture of experts. Embeddings, head and norms are AdamW's and left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from perilune.optim.matrices import Layout, Stacked, Whole


@dataclass(frozen=True, kw_only=True)
class ParameterShape:
    name: str
    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class LatentMoEShape:
    """The keys of a DeepSeek-V3 style config that decide shapes."""

    num_hidden_layers: int
    first_k_dense_replace: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128


MOONLIGHT_16B = LatentMoEShape(
    num_hidden_layers=27,
    first_k_dense_replace=1,
    hidden_size=2048,
    intermediate_size=11264,
    moe_intermediate_size=1408,
    n_routed_experts=64,
    n_shared_experts=2,
    num_attention_heads=16,
    q_lora_rank=None,
    kv_lora_rank=512,
)
KIMI_K2 = LatentMoEShape(
    num_hidden_layers=61,
    first_k_dense_replace=1,
    hidden_size=7168,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=384,
    n_shared_experts=1,
    num_attention_heads=64,
    q_lora_rank=1536,
    kv_lora_rank=512,
)


def moonlight_shapes() -> list[ParameterShape]:
    """moonshotai/Moonlight-16B-A3B (arXiv 2502.16982)."""
    return latent_moe_shapes(MOONLIGHT_16B)


def k2_shapes() -> list[ParameterShape]:
    """moonshotai/Kimi-K2 (arXiv 2507.20534); the text model of K2.5 has the same."""
    return latent_moe_shapes(KIMI_K2)


def latent_moe_shapes(config: LatentMoEShape) -> list[ParameterShape]:
    shapes: list[ParameterShape] = []
    for layer in range(config.num_hidden_layers):
        shapes += [
            ParameterShape(name=f"layers.{layer}.{name}", shape=shape, layout=layout)
            for name, shape, layout in (*_attention(config), *_mlp(config, dense=layer < config.first_k_dense_replace))
        ]
    return shapes


def _attention(config: LatentMoEShape) -> list[tuple[str, tuple[int, ...], Layout]]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    queries: list[tuple[str, tuple[int, ...], Layout]]
    if config.q_lora_rank is None:
        queries = [("q_proj", (query, hidden), Whole())]
    else:
        rank = config.q_lora_rank
        queries = [("q_a_proj", (rank, hidden), Whole()), ("q_b_proj", (query, rank), Whole())]
    return [
        *queries,
        ("kv_a_proj", (config.kv_lora_rank + config.qk_rope_head_dim, hidden), Whole()),
        ("kv_b_proj", (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank), Whole()),
        ("o_proj", (hidden, heads * config.v_head_dim), Whole()),
    ]


def _mlp(config: LatentMoEShape, *, dense: bool) -> list[tuple[str, tuple[int, ...], Layout]]:
    hidden = config.hidden_size
    if dense:
        return _swiglu("mlp", hidden, config.intermediate_size)
    inner, experts = config.moe_intermediate_size, config.n_routed_experts
    return [
        ("gate", (experts, hidden), Whole()),
        ("experts.gate_up_proj", (experts, 2 * inner, hidden), Stacked(row_sizes=(inner, inner))),
        ("experts.down_proj", (experts, hidden, inner), Stacked()),
        *_swiglu("shared_experts", hidden, inner * config.n_shared_experts),
    ]


def _swiglu(name: str, hidden: int, inner: int) -> list[tuple[str, tuple[int, ...], Layout]]:
    return [
        (f"{name}.gate_proj", (inner, hidden), Whole()),
        (f"{name}.up_proj", (inner, hidden), Whole()),
        (f"{name}.down_proj", (hidden, inner), Whole()),
    ]
