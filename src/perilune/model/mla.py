"""Multi-head Latent Attention (arXiv 2405.04434), with NoPE (Kimi Linear), RoPE or YaRN (DeepSeek-V3, Kimi K2).

    c   = RMSNorm(W_kva x)[:R]                 one latent of rank R per token: all that decoding has to keep,
    k_r = (W_kva x)[R:]                        together with a small key part shared by all heads (rotated unless NoPE)
    q   = W_q x  or  W_qb RMSNorm(W_qa x)      per head: nope part, then rope part
    k_h = [W_uk,h c ; k_r],  v_h = W_uv,h c    W_kvb holds, per head, the key rows and then the value rows
    y   = W_o concat_h softmax(s q_h k_h^T) v_h

Decoding one token absorbs W_uk into the query and W_uv into the output, so attention runs over the latents themselves
(one shared head of width R + rope) and never expands keys. In training the layer reports the maximum logit per head,
which is what QK-Clip needs: exact above its threshold, on CUDA an upper bound below.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perilune.kernels.attention import attention
from perilune.kernels.attention.continued import attention_in_pieces, attention_of_runs, takes_runs
from perilune.kernels.mla_decode import mla_decode
from perilune.kernels.norm import takes_triton
from perilune.kernels.triton_support import why_not_triton
from perilune.model.cache import MLACache
from perilune.model.documents import Packing
from perilune.model.linear import Linear, RMSNorm, are_plain, side_by_side, takes_one_product
from perilune.model.mla_inputs import mla_inputs
from perilune.model.paged import Chunks, JoinedKeys, LatentPool, PagedBatch
from perilune.model.rope import RopeConfig, rotate, softmax_scale_factor
from perilune.optim.heads import MaxLogitRecorder, QKHeads, mla_heads
from perilune.optim.matrices import ColumnBlocks, Layout, RowBlocks

LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    num_attention_heads: int = 4
    q_lora_rank: int | None = None
    """Rank of the query compression; None: one full projection."""
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    """Width of the key part shared by all heads; rotated only when `rope` is given."""
    v_head_dim: int = 32
    rope: RopeConfig | None = None
    """None is NoPE (`mla_use_nope`)."""

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"mla.{name} must be at least 1, got {getattr(self, name)!r}")
        if self.qk_rope_head_dim < 0:
            raise ValueError(f"mla.qk_rope_head_dim must be at least 0, got {self.qk_rope_head_dim!r}")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(f"mla.q_lora_rank must be at least 1, or None for none, got {self.q_lora_rank!r}")
        if self.rope is not None and self.qk_rope_head_dim % 2:
            raise ValueError(f"mla.qk_rope_head_dim must be even to be rotated, got {self.qk_rope_head_dim!r}")

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class LatentAttention(nn.Module):
    """x [B, T, hidden] -> [B, T, hidden]; causal softmax attention with a latent cache."""

    def __init__(self, hidden_size: int, config: MLAConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.num_attention_heads
        if config.q_lora_rank is None:
            self.q_proj = Linear(hidden_size, heads * config.qk_head_dim)
        else:
            self.q_a_proj = Linear(hidden_size, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = Linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = Linear(hidden_size, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        self.o_proj = Linear(heads * config.v_head_dim, hidden_size)
        self.scale = config.qk_head_dim**-0.5 * softmax_scale_factor(config.rope)
        self.max_logit = MaxLogitRecorder(heads, self)

    def forward(self, x_BTD: Tensor, packing: Packing, cache: MLACache | LatentPool | None = None) -> Tensor:
        if isinstance(cache, LatentPool):
            assert isinstance(packing, PagedBatch), "a pool is read by the steps of a PagedBatch"
            return self._paged(x_BTD, packing, cache)
        if self._takes_inputs_at_once(x_BTD, cache):
            q, k, v = self._inputs_at_once(x_BTD, packing)
        else:
            q, latent, k_rope = self.compressed(x_BTD, packing)
            if cache is not None:
                latent, k_rope = cache.append(torch.cat([latent, k_rope], dim=-1)).split(
                    [self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1
                )
                if x_BTD.shape[1] == 1 and are_plain(self.kv_b_proj):
                    return self.o_proj(self._absorbed(q, latent, k_rope))
            k, v = self._expand(latent, k_rope)
        o, max_logit, is_bound = attention(
            q,
            k,
            v,
            scale=self.scale,
            cu_seqlens=packing.cu_seqlens,
            clip_threshold=self.max_logit.clip_threshold if self.training else None,
        )
        self.max_logit.update(max_logit, is_bound)
        return self.o_proj(o.flatten(-2))

    def _takes_inputs_at_once(self, x_BTD: Tensor, cache: MLACache | None) -> bool:
        """Where the one operator runs: it hands out no latents to keep."""
        fused: list[Linear | RMSNorm] = [self.kv_a_proj_with_mqa, self.kv_a_layernorm, self.kv_b_proj]
        if self.config.q_lora_rank is None:
            fused.append(self.q_proj)
        return (
            cache is None
            and are_plain(*fused)
            and takes_one_product(x_BTD, *(module.weight for module in fused))
            and why_not_triton(x_BTD) is None
        )

    def _inputs_at_once(self, x_BTD: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        angles = None if config.rope is None else packing.angles(config.rope, config.qk_rope_head_dim)
        q, k, v = mla_inputs(
            x_BTD,
            q_weight=self.q_proj.weight if config.q_lora_rank is None else None,
            kv_a_weight=self.kv_a_proj_with_mqa.weight,
            norm_weight=self.kv_a_layernorm.weight,
            kv_b_weight=self.kv_b_proj.weight,
            num_heads=config.num_attention_heads,
            v_head_dim=config.v_head_dim,
            eps=self.kv_a_layernorm.eps,
            angles=angles,
            interleaved=config.rope is None or config.rope.interleaved,
        )
        return (self._rotated(self._queries(x_BTD), packing) if q is None else q), k, v

    def compressed(self, x_BTD: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, T, H, E], latents [B, T, R] and the key part that the heads share, both rotated if positions
        are."""
        config = self.config
        q, latent_and_key = self._products(x_BTD)
        latent, k_rope = latent_and_key.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        if config.rope is not None:
            q = self._rotated(q, packing)
            cos, sin = packing.angles(config.rope, config.qk_rope_head_dim)
            k_rope = rotate(k_rope.unsqueeze(-2), cos, sin, interleaved=config.rope.interleaved).squeeze(-2)
        return q, latent, k_rope

    def _rotated(self, q_BTHE: Tensor, packing: Packing) -> Tensor:
        config = self.config
        if config.rope is None:
            return q_BTHE
        q_nope, q_rope = q_BTHE.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        cos, sin = packing.angles(config.rope, config.qk_rope_head_dim)
        return torch.cat([q_nope, rotate(q_rope, cos, sin, interleaved=config.rope.interleaved)], dim=-1)

    def _products(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, T, H, E], and latents before their norm with the shared key behind them [B, T, R + rope]."""
        products = side_by_side(x_BTD, *self.maps_of_input())
        if products is None:
            return self._queries(x_BTD), self.kv_a_proj_with_mqa(x_BTD)
        q, latent_and_key = products.split([linear.out_features for linear in self.maps_of_input()], dim=-1)
        return self.per_head(q), latent_and_key

    def _queries(self, x_BTD: Tensor) -> Tensor:
        return self.per_head(self.maps_of_input()[0](x_BTD))

    def per_head(self, q: Tensor) -> Tensor:
        """[..., H, E] from the first map of the queries."""
        if self.config.q_lora_rank is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        return q.unflatten(-1, (self.config.num_attention_heads, self.config.qk_head_dim))

    def maps_of_input(self) -> tuple[Linear, Linear]:
        """The two maps that read x: the queries' (first), and that of latent and shared key."""
        return (self.q_proj if self.config.q_lora_rank is None else self.q_a_proj), self.kv_a_proj_with_mqa

    def _expand(self, latent_BTR: Tensor, k_rope_BTE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of every head."""
        config = self.config
        expanded = self.kv_b_proj(latent_BTR).unflatten(-1, (config.num_attention_heads, -1))
        k_nope, v = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
        shared = k_rope_BTE.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)
        return torch.cat([k_nope, shared], dim=-1), v

    def _absorbed(self, q_BTHE: Tensor, latent_BSR: Tensor, k_rope_BSE: Tensor) -> Tensor:
        """One decoding step over the latents: q W_uk instead of W_uk c for every cached token."""
        up_k, up_v = self.up_projections(q_BTHE.dtype)
        q = self.absorbing(q_BTHE, up_k)
        k = torch.cat([latent_BSR, k_rope_BSE], dim=-1).unsqueeze(-2)
        o, _, _ = attention(q, k, latent_BSR.unsqueeze(-2), scale=self.scale, clip_threshold=None)
        return torch.einsum("bthr,hvr->bthv", o, up_v).flatten(-2)

    def record_max_logit(self, exact_H: Tensor) -> None:
        """The largest logit of every head, for QK-Clip."""
        self.max_logit.update(exact_H, torch.zeros_like(exact_H, dtype=torch.bool))

    def up_projections(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """W_uk [H, nope, R] and W_uv [H, v, R]."""
        config = self.config
        per_head = self.kv_b_proj.weight.to(dtype).unflatten(0, (config.num_attention_heads, -1))
        up_k, up_v = per_head.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        return up_k, up_v

    def absorbing(self, q: Tensor, up_k_HNR: Tensor) -> Tensor:
        """Queries [..., H, E] that meet latents instead of keys: [..., H, R + rope]."""
        q_nope, q_rope = q.split([self.config.qk_nope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        # The products of einsum("...hn,hnr->...hr"), without its preparations.
        absorbed = torch.bmm(q_nope.flatten(0, -3).transpose(0, 1), up_k_HNR).transpose(0, 1)
        return torch.cat([absorbed.view(*q_nope.shape[:-1], -1), q_rope], dim=-1)

    def _paged(self, x_1TD: Tensor, batch: PagedBatch, pool: LatentPool) -> Tensor:
        """One token of some sequences (absorbed) and chunks of others (expanded), over all their cached latents."""
        if not are_plain(self.kv_b_proj):
            raise ValueError(
                f"kv_b_proj is {type(self.kv_b_proj).__name__} with an adapter, hook or bias, expected a plain Linear: "
                "decoding over pages absorbs its weight; merge adapters into it first"
            )
        q = self._remember(x_1TD, batch, pool)
        first = batch.num_decodes
        parts = []
        if first:
            up_k, up_v = self.up_projections(q.dtype)
            o, _ = mla_decode(
                self.absorbing(q[0, :first], up_k), pool.pages, batch.block_table, batch.lengths,
                latent_dim=self.config.kv_lora_rank, scale=self.scale,
            )  # fmt: skip
            parts.append(torch.bmm(o.transpose(0, 1), up_v.mT).transpose(0, 1))
        if batch.chunks is not None:
            joined = batch.chunks.joined
            is_padded = batch.chunks.lengths is None
            if joined is not None and (is_padded or takes_runs(q, self.joined_value_width())):
                parts.append(self._joined_chunks(q[0, first:], joined, pool))
            else:
                parts.append(self._chunks(q[:, first:], batch.chunks, pool))
        return self.o_proj((parts[0] if len(parts) == 1 else torch.cat(parts)).flatten(-2).unsqueeze(0))

    def _remember(self, x_1TD: Tensor, batch: PagedBatch, pool: LatentPool) -> Tensor:
        """Queries [1, T, H, E]; the latents of all tokens are in the pool then."""
        norm = self.kv_a_layernorm
        if self.config.rope is None and are_plain(norm) and takes_triton(x_1TD) and x_1TD.shape[1]:
            from perilune.kernels.mla_decode.latents import write_latents

            q, latent_and_key = self._products(x_1TD)
            write_latents(latent_and_key[0], norm.weight, norm.eps, pool.rows, batch.write_rows)
            return q
        q, latent, k_rope = self.compressed(x_1TD, batch)
        pool.rows.index_copy_(0, batch.write_rows, torch.cat([latent, k_rope], dim=-1)[0])
        return q

    def _chunks(self, q_1THE: Tensor, chunks: Chunks, pool: LatentPool) -> Tensor:
        """[T, H, v]: every chunk attends to its own sequence, whose last latents are its own."""
        assert chunks.lengths is not None, "a padded step has its keys joined"
        outputs = []
        for q, rows in zip(q_1THE.split(chunks.lengths, dim=1), chunks.cached_rows, strict=True):

            def keys_and_values(start: int, stop: int, rows: Tensor = rows) -> tuple[Tensor, Tensor]:
                latents = pool.rows.index_select(0, rows[start:stop]).unsqueeze(0)
                return self._expand(*latents.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1))

            o = attention_in_pieces(q, len(rows), keys_and_values, scale=self.scale)
            outputs.append(o[0])
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _joined_chunks(self, q_THE: Tensor, joined: JoinedKeys, pool: LatentPool) -> Tensor:
        """`_chunks` in one call."""
        config = self.config
        latent, k_rope = pool.rows.index_select(0, joined.rows).split(
            [config.kv_lora_rank, config.qk_rope_head_dim], dim=-1
        )
        expanded = self.kv_b_proj(latent).unflatten(-1, (config.num_attention_heads, -1))
        shared = k_rope.unsqueeze(-2).expand(-1, config.num_attention_heads, -1)
        o = attention_of_runs(
            q_THE,
            torch.cat([expanded[..., : config.qk_nope_head_dim], shared], dim=-1),
            # As wide as keys, without a copy: in front of the values stand keys, and what becomes of them is dropped.
            expanded[..., -self.joined_value_width() :],
            query_borders=joined.query_borders,
            key_borders=joined.key_borders,
            most_queries=joined.most_queries,
            most_keys=joined.most_keys,
            scale=self.scale,
        )
        return o[..., -config.v_head_dim :]

    def joined_value_width(self) -> int:
        """That of keys, if values and what stands in front of them in kv_b_proj are so wide, at an aligned place."""
        config = self.config
        before = config.v_head_dim - config.qk_rope_head_dim
        return config.qk_head_dim if before >= 0 and before % 8 == 0 else config.v_head_dim

    def logical_matrices(self) -> Mapping[str, Layout]:
        config = self.config
        heads = config.num_attention_heads
        query = "q_proj.weight" if config.q_lora_rank is None else "q_b_proj.weight"
        return {
            query: RowBlocks((config.qk_head_dim,) * heads),
            "kv_b_proj.weight": RowBlocks((config.qk_nope_head_dim, config.v_head_dim) * heads),
            "o_proj.weight": ColumnBlocks((config.v_head_dim,) * heads),
        }

    def qk_heads(self) -> QKHeads:
        config = self.config
        query = self.q_proj if config.q_lora_rank is None else self.q_b_proj
        return mla_heads(
            q_weight=query.weight,
            kv_b_weight=self.kv_b_proj.weight,
            num_heads=config.num_attention_heads,
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            v_dim=config.v_head_dim,
            recorder=self.max_logit,
        )
