"""Forward passes whose bits do not depend on how they are cut: trainer and server agree exactly.

A matrix product rounds in an order that depends on its shape, and so do sums and vectorised functions. With other
batches, chunks and caches a server therefore gets other last bits than the trainer, and reinforcement learning sees a
difference of policies where there is none. In this mode every document is cut into tiles of TILE tokens, counted from
its position 0, and the network runs tile by tile, always in the shape [1, TILE]:

    hidden of tile c = f(tokens of the tile, c, states after tile c - 1, latents of tiles 0 .. c - 1)

Every operator then has a shape that depends on c alone. The last tile is filled up with token 0; nothing that comes
later reaches an earlier row, because what a mask excludes is multiplied by an exact zero. To decode a token the server
runs its tile again from the tokens in it, with the states from the tile's beginning, and advances the states when the
tile is full. It is the trainer's function on the trainer's shapes, so the bits are the trainer's:

    KDA        the layer itself over one tile, states carried from tile to tile
    MLA        absorbed (queries meet latents), keys in pieces of at most KEYS counted from position 0
    experts    every expert that some row of the tile chose reads the whole tile; rows pick theirs
    head       one row, one product; log-probs row by row (`token_log_probs`)
    pictures   the tower looks at one picture at a time

`model.deterministic = True` switches `Decoder.hidden`, `.logits`, `.loss` and `.vision_features` to it; gradients flow
as usual. The same bits are promised on one machine with the same version of torch and number of threads, for one
device type. What it costs: benchmarks/deterministic_cost.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from perilune.kernels.documents import document_borders
from perilune.model.cache import KDACache
from perilune.model.documents import Packing
from perilune.model.kda import KimiDeltaAttention
from perilune.model.linear import separate_products
from perilune.model.mla import LatentAttention
from perilune.model.moe import MixtureOfExperts, is_recomputing
from perilune.model.residual import Stream
from perilune.model.routes import Routes
from perilune.model.vision import MediaInput

if TYPE_CHECKING:
    from perilune.model.decoder import Decoder, DecoderLayer

TILE = 64
"""Tokens of a tile."""
KEYS = 1024
"""Latents that one product of attention reads, at most."""


class Latents(Protocol):
    """What an MLA layer remembers of the tiles before this one."""

    def with_tile(self, tile_TD: Tensor) -> Tensor:
        """[tokens before + TILE, R + rope] in memory of its own: the latents so far, then those of the tile."""
        ...


class States(Protocol):
    """What a KDA layer remembers of the tiles before this one."""

    def before(self) -> KDACache: ...

    def after(self, cache: KDACache) -> None:
        """Called with the states after the tile, which count only if the tile was full."""
        ...


Memory = Sequence[Latents | States]
"""One per layer."""


def run_tile(
    model: Decoder,
    tokens: Sequence[int],
    start: int,
    memory: Memory,
    media: MediaInput | None = None,
    routes: Routes | None = None,
) -> Tensor:
    """Hidden states [tokens, hidden] of at most TILE tokens that begin at `start`, a multiple of TILE.

    `media` holds features with positions counted from the tile's first token, `routes` a row for each of `tokens`.
    """
    if start % TILE or not 0 < len(tokens) <= TILE:
        raise ValueError(
            f"a tile begins at {start!r} with {len(tokens)} tokens, expected a multiple of {TILE} and 1 to {TILE}"
        )
    device = model.embed_tokens.weight.device
    filled = torch.tensor([[*tokens, *[0] * (TILE - len(tokens))]], device=device)
    packing = Packing(positions=torch.arange(start, start + TILE, device=device).unsqueeze(0), routes=routes)
    stream = model.open_stream(filled, media)
    with separate_products():
        for layer, remembered in zip(model.layers, memory, strict=True):
            stream = _layer(layer, stream, packing, remembered, len(tokens))  # pyrefly: ignore[bad-argument-type]
    h, _ = stream.read(model.norm)
    return h[0, : len(tokens)]


def hidden_of_documents(
    model: Decoder,
    tokens_BT: Tensor,
    cu_seqlens: Tensor | None,
    media: MediaInput | None,
    routes: Routes | None = None,
) -> Tensor:
    """`Decoder.hidden` in this mode: [B, T, hidden]."""
    batch, num_tokens = tokens_BT.shape
    if cu_seqlens is None:
        borders = tuple(range(0, batch * num_tokens + 1, num_tokens)) if num_tokens else (0,)
    else:
        borders = document_borders(cu_seqlens, batch=batch, num_tokens=num_tokens)
    tokens = tokens_BT.flatten().tolist()
    if media is not None and media.features is None:
        assert media.pixels is not None
        media = media.with_features(model.vision_features(media.pixels, media.grids))
    found = []
    for first, stop in zip(borders[:-1], borders[1:], strict=True):
        memory = [_new_memory(layer, model.compute_dtype) for layer in model.layers]  # pyrefly: ignore[bad-argument-type]
        for at in range(first, stop, TILE):
            end = min(at + TILE, stop)
            own = None if routes is None else routes.between(at, end)
            found.append(run_tile(model, tokens[at:end], at - first, memory, media_between(media, at, end), own))
    width = model.config.hidden_size
    rows = torch.cat(found) if found else model.embed_tokens.weight.new_zeros(0, width, dtype=model.compute_dtype)
    return rows.view(batch, num_tokens, width)


def logits_of_rows(hidden: Tensor, head_weight: Tensor) -> Tensor:
    """[..., vocabulary], each row by a product of its own."""
    rows = hidden.reshape(-1, hidden.shape[-1]).split(1)
    weight = head_weight.to(hidden.dtype)
    products = [F.linear(row.clone(), weight) for row in rows]  # a copy lies in memory as every other copy does
    found = torch.cat(products) if products else hidden.new_zeros(0, weight.shape[0])
    return found.view(*hidden.shape[:-1], weight.shape[0])


def token_log_probs(logits_NV: Tensor, ids_N: Tensor) -> Tensor:
    """[N]: log softmax(logits)[id], row by row. Differentiable; what both sides take log-probs with in this mode."""
    rows = [row.clone() for row in logits_NV.split(1)]
    chosen = [row[0, token] - row.logsumexp(-1)[0] for row, token in zip(rows, ids_N.tolist(), strict=True)]
    return torch.stack(chosen) if chosen else logits_NV.new_zeros(0)


# Layers ---------------------------------------------------------------------------------------------------------------


def _layer(
    layer: DecoderLayer, stream: Stream, packing: Packing, remembered: Latents | States, num_tokens: int
) -> Stream:
    if layer.res_scalars is not None:
        stream = stream.rescaled(layer.res_scalars)
    h, stream = stream.read(layer.input_layernorm)
    if isinstance(layer.self_attn, KimiDeltaAttention):
        cache = remembered.before()  # pyrefly: ignore[missing-attribute]
        y = layer.self_attn(h, packing, cache)
        remembered.after(cache)  # pyrefly: ignore[missing-attribute]
    else:
        y = _attention(layer.self_attn, h, packing, remembered, num_tokens)  # pyrefly: ignore[bad-argument-type]
    h, stream = stream.write(y).read(layer.post_attention_layernorm)
    mlp = layer.mlp
    if not isinstance(mlp, MixtureOfExperts):
        return stream.write(mlp(h))
    assert layer.expert_index is not None
    routes = None if packing.routes is None else packing.routes.layer(layer.expert_index)
    return stream.write(_mixture(mlp, h, num_tokens, routes))


def _attention(layer: LatentAttention, x_1TD: Tensor, packing: Packing, remembered: Latents, num_tokens: int) -> Tensor:
    config = layer.config
    q, latent, k_rope = layer.compressed(x_1TD, packing)
    cached_SD = remembered.with_tile(torch.cat([latent, k_rope], dim=-1)[0])
    up_k, up_v = layer.up_projections(q.dtype)
    q_HTD = layer.absorbing(q[0], up_k).transpose(0, 1).contiguous() * layer.scale
    heads, num_rows, width = q_HTD.shape
    rows = q_HTD.view(heads * num_rows, width)
    # The keys before the tile are open to all its rows; among its own, each row sees up to itself.
    num_before = cached_SD.shape[0] - num_rows
    above = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1).repeat(heads, 1)
    top = rows.new_full((heads * num_rows, 1), float("-inf"))
    total, o = torch.zeros_like(top), rows.new_zeros(heads * num_rows, config.kv_lora_rank)
    pieces = [*cached_SD[:num_before].split(KEYS), cached_SD[num_before:]] if num_before else [cached_SD]
    for index, piece in enumerate(pieces):
        logits = rows @ piece.clone().T
        if index == len(pieces) - 1:
            logits = logits.masked_fill(above, float("-inf"))
        new_top = torch.maximum(top, logits.detach().amax(-1, keepdim=True))
        keep, weights = torch.exp(top - new_top), torch.exp(logits - new_top)
        total = total * keep + weights.sum(-1, keepdim=True)
        o = o * keep + weights @ piece[:, : config.kv_lora_rank].clone()
        top = new_top
    if layer.training:
        layer.record_max_logit(top.view(heads, num_rows)[:, :num_tokens].amax(dim=1))
    o_HTR = (o / total).view(heads, num_rows, -1)
    return layer.o_proj(torch.bmm(o_HTR, up_v.mT).transpose(0, 1).flatten(1).unsqueeze(0))


def _mixture(mixture: MixtureOfExperts, x_1TD: Tensor, num_tokens: int, routes: Routes | None) -> Tensor:
    """Rows past `num_tokens` fill the tile up, and do not count as load."""
    x_TD = x_1TD[0]
    weights, experts = mixture.route(x_TD, routes)
    if mixture.training and not is_recomputing():
        filling = experts[num_tokens:].flatten()
        mixture.gate.counts -= torch.bincount(filling, minlength=mixture.config.num_experts)
    chosen = x_TD.new_zeros(*experts.shape, x_TD.shape[-1])
    for expert in experts.unique().tolist():
        gate, up = F.linear(x_TD, mixture.experts.gate_up_proj[expert].to(x_TD.dtype)).chunk(2, dim=-1)
        y_TD = F.linear(F.silu(gate) * up, mixture.experts.down_proj[expert].to(x_TD.dtype))
        chosen = torch.where((experts == expert).unsqueeze(-1), y_TD.unsqueeze(1), chosen)
    y = (chosen * weights.unsqueeze(-1).to(chosen.dtype)).sum(dim=1).unsqueeze(0)
    return y if mixture.shared_experts is None else y + mixture.shared_experts(x_1TD)


# Memory of one document, with gradients -------------------------------------------------------------------------------


@dataclass
class _DocumentLatents:
    tiles: list[Tensor]

    def with_tile(self, tile_TD: Tensor) -> Tensor:
        self.tiles.append(tile_TD)
        return torch.cat(self.tiles)


@dataclass
class _DocumentStates:
    cache: KDACache

    def before(self) -> KDACache:
        return self.cache

    def after(self, cache: KDACache) -> None:
        """Only the last tile is not full, and nothing follows it."""
        self.cache = cache


def _new_memory(layer: DecoderLayer, dtype: torch.dtype) -> _DocumentLatents | _DocumentStates:
    attention = layer.self_attn
    if not isinstance(attention, KimiDeltaAttention):
        return _DocumentLatents([])
    heads, dim = attention.config.num_heads, attention.config.head_dim
    weight = attention.conv_weight
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = weight.new_zeros(1, heads, dim, dim, dtype=wide)
    return _DocumentStates(
        KDACache(state=state, conv=weight.new_zeros(1, len(weight), weight.shape[1] - 1, dtype=wide))
    )


def media_between(media: MediaInput | None, start: int, end: int) -> MediaInput | None:
    """The features that belong to tokens start .. end, with positions counted from `start`."""
    if media is None:
        return None
    inside = ((media.positions >= start) & (media.positions < end)).nonzero().flatten()
    if not inside.numel():
        return None
    assert media.features is not None
    return MediaInput(positions=media.positions[inside] - start, features=media.features[inside])
