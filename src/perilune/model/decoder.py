"""The decoder: embedding, layers of KDA or MLA with SwiGLU or experts, a residual path over depth, norm, head.

Each sublayer reads from the residual stream through its pre-norm and writes back; what "reads" means (plain sum, full
or block Attention Residuals) is the business of residual.py. Names of weights follow the public Kimi-Linear
checkpoints.

With `config.vision` the decoder owns a vision tower and its projector (vision.py): the features of pictures take the
places of the <|media_pad|> embeddings, and from there on a picture is a run of tokens like any other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor, nn

from perilune.kernels.embedding import embed
from perilune.model.cache import DecodeCache, KDACache, MLACache
from perilune.model.config import ComputeDtype, ModelConfig
from perilune.model.decode_stream import DecodeStream, decode_stream
from perilune.model.deterministic import hidden_of_documents, logits_of_rows, token_log_probs
from perilune.model.documents import Packing, positions_of
from perilune.model.head import IGNORED, cross_entropy_sum
from perilune.model.kda import KimiDeltaAttention
from perilune.model.linear import Linear, RMSNorm, SwiGLU, at_least_float32, has_hooks
from perilune.model.mla import LatentAttention
from perilune.model.moe import Experts, MixtureOfExperts, Router
from perilune.model.paged import LatentPool, PagedBatch, PagedCache, StatePool
from perilune.model.residual import AttentionResidual, ResidualScalars, Stream, attnres_stream, plain_stream
from perilune.model.routes import Routes, check_routes
from perilune.model.vision import MediaInput, MoonViT3D, PositionGrid, Projector, normalized
from perilune.model.vision_grids import Grid
from perilune.optim.matrices import Adam, Layout


class DecoderLayer(nn.Module):
    """Two sublayers: attention and MLP."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.kind = config.layer_pattern()[index]
        self.self_attn: KimiDeltaAttention | LatentAttention
        if self.kind == "kda":
            self.self_attn = KimiDeltaAttention(config.hidden_size, config.kda, norm_eps=config.rms_norm_eps)
        else:
            self.self_attn = LatentAttention(config.hidden_size, config.mla)
        self.mlp: SwiGLU | MixtureOfExperts
        self.expert_index: int | None = None
        """Its place among the layers of experts."""
        if config.moe is not None and config.is_moe_layer(index):
            self.mlp = MixtureOfExperts(config.hidden_size, config.moe)
            self.expert_index = index - config.moe.first_k_dense_replace
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.res_scalars = ResidualScalars() if config.residual == "scalars" else None
        if config.residual in ("attnres", "block_attnres"):
            self.attn_res = AttentionResidual(config.hidden_size, eps=config.rms_norm_eps)
            self.mlp_res = AttentionResidual(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, stream: Stream, packing: Packing, cache: KDACache | MLACache | LatentPool | StatePool | None = None
    ) -> Stream:
        if self.res_scalars is not None:
            stream = stream.rescaled(self.res_scalars)
        h, stream = stream.read(self.input_layernorm)
        stream = stream.write(self.self_attn(h, packing, cache))
        h, stream = stream.read(self.post_attention_layernorm)
        if packing.routes is None or self.expert_index is None:
            return stream.write(self.mlp(h))
        return stream.write(self.mlp(h, packing.routes.layer(self.expert_index)))


class Decoder(nn.Module):
    """tokens [B, T] -> logits [B, T, vocabulary]. Packed documents: B = 1 and `cu_seqlens` [N + 1], their borders."""

    def __init__(self, config: ModelConfig, *, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.residual in ("attnres", "block_attnres"):
            self.out_res = AttentionResidual(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)
        # In the order they were made, which is reading order; a plain list, so nothing is registered twice.
        self._sites = [module for module in self.modules() if isinstance(module, AttentionResidual)]
        # Last, so that a seed gives the language model the same weights with a tower and without.
        self.vision_tower = None if config.vision is None else MoonViT3D(config.vision)
        self.mm_projector = None if config.vision is None else Projector(config.vision, config.hidden_size)
        self.compute_dtype = config.dtype()
        self.deterministic = False
        """Bits that do not depend on batches, chunks and caches: see deterministic.py."""
        if config.compute_dtype == "float64":
            self.double()
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.reset_parameters(generator)

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Matrices and embeddings N(0, initializer_range); gates as Kimi Delta Attention asks; queries, biases zero.

        The vision tower's position grid is N(0, 1), as published: it learns more from the same steps (lab log).
        """
        std = self.config.initializer_range
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | Router):
                module.weight.normal_(0.0, std, generator=generator)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, PositionGrid):
                module.weight.normal_(generator=generator)
            elif isinstance(module, Experts):
                module.gate_up_proj.normal_(0.0, std, generator=generator)
                module.down_proj.normal_(0.0, std, generator=generator)
            elif isinstance(module, KimiDeltaAttention):
                module.reset_gate(generator)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cache: DecodeCache | None = None,
        media: MediaInput | None = None,
    ) -> Tensor:
        return self.logits(self.hidden(tokens_BT, cu_seqlens=cu_seqlens, cache=cache, media=media))

    def hidden(
        self,
        tokens_BT: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        cache: DecodeCache | None = None,
        media: MediaInput | None = None,
        routes: Routes | None = None,
    ) -> Tensor:
        """Final normed hidden states [B, T, hidden]. The features of `media` overwrite the embeddings at its places.

        `routes`, one row per token of the batch, records the experts of every token or has them taken again.
        """
        self._check(tokens_BT, cu_seqlens, cache)
        if routes is not None:
            check_routes(routes, self.config, tokens_BT.numel())
        if self.deterministic:
            if cache is not None:
                raise ValueError("a deterministic model decodes through the engine; drop the cache")
            return hidden_of_documents(self, tokens_BT, cu_seqlens, media, routes)
        start = 0 if cache is None else cache.length
        rotates = self.config.mla.rope is not None
        positions = positions_of(tokens_BT, cu_seqlens, start) if rotates else None
        packing = Packing(cu_seqlens=cu_seqlens, positions=positions, routes=routes)
        stream = self.open_stream(tokens_BT, media)
        for index, layer in enumerate(self.layers):
            stream = layer(stream, packing, None if cache is None else cache.layers[index])
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        h, _ = stream.read(self.norm)
        return h

    @torch.no_grad()
    def step(self, batch: PagedBatch, cache: PagedCache, *, media: MediaInput | None = None) -> Tensor:
        """Hidden states [wanted rows, hidden] of one step of many sequences over pools (paged.py), which move on.

        `media` holds features and their rows in the step.
        """
        embedding = self._with_media(self._embedded(batch.tokens), media)
        stream = self._open_for_decodes(embedding) if batch.chunks is None else None
        stream = self._open(embedding) if stream is None else stream
        for layer, pool in zip(self.layers, cache.layers, strict=True):
            stream = layer(stream, batch, pool)
        h, _ = stream.read(self.norm)
        return h[0] if batch.wanted is None else h[0].index_select(0, batch.wanted)

    def logits(self, hidden: Tensor) -> Tensor:
        """In at least float32, whatever the compute dtype."""
        if self.deterministic:
            return at_least_float32(logits_of_rows(hidden, self.head_weight()))
        logits = nn.functional.linear(hidden, self.head_weight().to(hidden.dtype))
        return at_least_float32(logits)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        cu_seqlens: Tensor | None = None,
        media: MediaInput | None = None,
    ) -> Tensor:
        """Sum over valid targets (!= -100) of the cross entropy in nats; a float32 scalar."""
        hidden = self.hidden(tokens_BT, cu_seqlens=cu_seqlens, media=media)
        if self.deterministic:
            valid = targets_BT.flatten() != IGNORED
            return -token_log_probs(self.logits(hidden.flatten(0, 1)[valid]), targets_BT.flatten()[valid]).sum()
        return cross_entropy_sum(hidden.flatten(0, 1), self.head_weight(), targets_BT.flatten())

    def vision_features(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[N, hidden]: what the language model reads of media items, uint8 or normalised pixels [P, 3, 14, 14]."""
        if self.vision_tower is None or self.mm_projector is None:
            raise ValueError("media holds pixels, but model.vision is None: expected a model with a vision tower")
        pixels = normalized(pixels, self.compute_dtype)
        if self.deterministic and len(grids) > 1:
            items = zip(pixels.split([prod(grid) for grid in grids]), grids, strict=True)
            return torch.cat([self.mm_projector(self.vision_tower(item.clone(), (grid,))) for item, grid in items])
        return self.mm_projector(self.vision_tower(pixels, grids))

    def head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def new_cache(self) -> DecodeCache:
        return DecodeCache([KDACache() if kind == "kda" else MLACache() for kind in self.config.layer_pattern()])

    def set_compute_dtype(self, name: ComputeDtype) -> None:
        self.config = replace(self.config, compute_dtype=name)
        self.compute_dtype = self.config.dtype()

    def max_logits(self) -> Tensor:
        """[MLA layers, heads]: largest attention logit since the recorders were reset; -inf where none was seen.

        Below the threshold of a QKClip it may be an upper bound.
        """
        recorders = [layer.self_attn.max_logit for layer in self.layers if isinstance(layer.self_attn, LatentAttention)]
        if not recorders:
            return torch.empty(0, self.config.mla.num_attention_heads)
        device = self.embed_tokens.weight.device
        return torch.stack([recorder.value.to(device, torch.float32) for recorder in recorders])

    def after_optimizer_step(self) -> Tensor | None:
        """Move router biases towards balance; returns the worst load imbalance over layers, None without experts."""
        imbalances = [router.update_bias() for router in self._routers()]
        return torch.stack(imbalances).max() if imbalances else None

    def discard_step_statistics(self) -> None:
        """Forget what a skipped step counted."""
        for router in self._routers():
            router.discard_counts()

    def num_parameters(self, *, active: bool = False, embedding: bool = True) -> int:
        """All parameters, or those a token meets (its experts only)."""
        total = sum(parameter.numel() for parameter in self.parameters())
        if not embedding and self.lm_head is not None:
            total -= self.embed_tokens.weight.numel()
        if active and self.config.moe is not None:
            moe = self.config.moe
            experts = sum(p.numel() for m in self.modules() if isinstance(m, Experts) for p in m.parameters())
            total -= experts - experts * moe.num_experts_per_token // moe.num_experts
        return total

    def logical_matrices(self) -> Mapping[str, Layout]:
        embedding: dict[str, Layout] = {"embed_tokens.weight": Adam(weight_decay=True)}
        return embedding if self.lm_head is None else {**embedding, "lm_head.weight": Adam(weight_decay=True)}

    def _routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def open_stream(self, tokens_BT: Tensor, media: MediaInput | None = None) -> Stream:
        """The residual path before the first layer: embeddings, those of pictures overwritten by their features."""
        return self._open(self._with_media(self._embedded(tokens_BT), media))

    def _embedded(self, tokens_BT: Tensor) -> Tensor:
        table = self.embed_tokens
        if _only_reads_rows(table):
            return embed(tokens_BT, table.weight, self.compute_dtype)
        return table(tokens_BT).to(self.compute_dtype)

    def _with_media(self, embedding_BTd: Tensor, media: MediaInput | None) -> Tensor:
        if media is None:
            return embedding_BTd
        features = media.features
        if features is None:
            assert media.pixels is not None
            features = self.vision_features(media.pixels, media.grids)
        if features.ndim != 2 or features.shape[1] != embedding_BTd.shape[2]:
            raise ValueError(
                f"media.features is {tuple(features.shape)}, expected [N, {embedding_BTd.shape[2]}]: "
                "the width of the language model"
            )
        rows = embedding_BTd.flatten(0, 1).index_copy(0, media.positions, features.to(embedding_BTd.dtype))
        return rows.view_as(embedding_BTd)

    def _open_for_decodes(self, embedding: Tensor) -> DecodeStream | None:
        """None where the usual stream does as well."""
        if self.config.residual != "block_attnres":
            return None
        return decode_stream(embedding, self._sites, block_sublayers=self.config.block_sublayers)

    def _open(self, embedding: Tensor) -> Stream:
        if self.config.residual in ("plain", "scalars"):
            return plain_stream(embedding, scalars=self.config.residual == "scalars")
        block = 1 if self.config.residual == "attnres" else self.config.block_sublayers
        return attnres_stream(embedding, self._sites, block_sublayers=block)

    @staticmethod
    def _check(tokens_BT: Tensor, cu_seqlens: Tensor | None, cache: DecodeCache | None) -> None:
        if tokens_BT.ndim != 2:
            raise ValueError(f"tokens must be [batch, time], got shape {tuple(tokens_BT.shape)}")
        if cu_seqlens is not None and tokens_BT.shape[0] != 1:
            raise ValueError(
                f"cu_seqlens describes one packed row, so tokens must be [1, time], got {tuple(tokens_BT.shape)}: "
                "flatten the batch into one row"
            )
        if cu_seqlens is not None and cache is not None:
            raise ValueError("a decode cache holds one sequence per batch row; drop cu_seqlens or the cache")


def _only_reads_rows(table: nn.Module) -> bool:
    """Whether a call of the embedding reads rows of its matrix and nothing more: no adapter, no hook, no option."""
    if type(table) is not nn.Embedding or has_hooks(table):
        return False
    return table.padding_idx is None and table.max_norm is None and not table.scale_grad_by_freq and not table.sparse
