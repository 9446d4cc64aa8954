"""A step of decodes alone on a CPU: the layers of a model with their weights at hand.

Such a step is short, and going through the modules would take as long as its arithmetic: names are looked up, weights
that lie side by side found again (side_by_side.py), arguments checked, places of slots and pages worked out, in every
layer. `bind` does this once for all steps, and `DecodePlaces` once for all layers of a step. What is kept are views of
the weights and a few numbers derived from them; `is_current` tells whether they are still those of the model. (It sees
copies into the weights and weights that moved, not modules that were exchanged or got hooks: those are bound anew.)

What this promises: hidden states as from `Decoder.step` up to the last bits, with any residual path and any layer. A
sublayer it does not know (experts, adapters, decays per head) is called as the module it is.

Shape letters: D decodes, T tokens of the longest sequence, H heads, R rank of the latents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perilune.kernels.kda.decode import decode_at, step_weights
from perilune.kernels.mla_decode.dense import attend_rows
from perilune.kernels.norm.few_rows import norm_few_rows
from perilune.model.decoder import Decoder, DecoderLayer
from perilune.model.kda import KimiDeltaAttention
from perilune.model.linear import RMSNorm, SwiGLU, are_plain, has_hooks, whole_of
from perilune.model.mla import LatentAttention
from perilune.model.paged import LatentPool, PagedBatch, PagedCache, StatePool
from perilune.model.rope import rotate, rotation

Attend = Callable[[Tensor, PagedBatch, Any], Tensor]
"""[D, hidden], the step and the pool of the layer -> [D, hidden]"""
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    module: DecoderLayer
    norm_before: Map
    attend: Attend
    norm_between: Map
    mlp: Callable[[Tensor, PagedBatch], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecodeStep:
    """Made by `bind`."""

    model: Decoder
    layers: tuple[_Layer, ...]
    norm: Map
    parameters: tuple[tuple[Tensor, int, int], ...]
    """Each with its address and its count of changes when it was bound."""

    def is_current(self) -> bool:
        return all(
            tensor.data_ptr() == address and tensor._version == version for tensor, address, version in self.parameters
        )

    @torch.no_grad()
    def __call__(self, batch: PagedBatch, cache: PagedCache) -> Tensor:
        """Hidden states [wanted rows, hidden] of a step with `places` and without chunks; the pools move on."""
        assert batch.places is not None and batch.chunks is None
        stream = self.model.open_stream(batch.tokens[0])
        for layer, pool in zip(self.layers, cache.layers, strict=True):
            if layer.module.res_scalars is not None:
                stream = stream.rescaled(layer.module.res_scalars)
            h, stream = stream.read()
            stream = stream.write(layer.attend(layer.norm_before(h), batch, pool))
            h, stream = stream.read()
            stream = stream.write(layer.mlp(layer.norm_between(h), batch))
        h, _ = stream.read()
        return self.norm(h if batch.wanted is None else h.index_select(0, batch.wanted))


def bind(model: Decoder) -> DecodeStep | None:
    """None where the modules have to be gone through: elsewhere than on a CPU, in half precision, or with hooks."""
    parameters = list(model.parameters())
    dtype = model.compute_dtype
    if any(map(has_hooks, model.modules())):
        return None
    if any(each.device.type != "cpu" or each.dtype != dtype or each.is_inference() for each in parameters):
        return None
    with torch.no_grad():
        return DecodeStep(
            model=model,
            layers=tuple(_bound(layer) for layer in model.layers if isinstance(layer, DecoderLayer)),
            norm=_norm(model.norm),
            parameters=tuple((each, each.data_ptr(), each._version) for each in parameters),
        )


def _bound(layer: DecoderLayer) -> _Layer:
    attention = layer.self_attn
    attend = None
    if isinstance(attention, KimiDeltaAttention):
        attend = _delta_attention(attention)
    elif isinstance(attention, LatentAttention):
        attend = _latent_attention(attention)
    return _Layer(
        module=layer,
        norm_before=_norm(layer.input_layernorm),
        attend=attend or (lambda x, batch, pool: attention(x.unsqueeze(0), batch, pool)[0]),
        norm_between=_norm(layer.post_attention_layernorm),
        mlp=_mlp(layer),
    )


def _norm(module: nn.Module) -> Map:
    if not isinstance(module, RMSNorm) or not are_plain(module):
        return module
    weight, eps = module.weight.detach(), module.eps
    return lambda x: norm_few_rows(x, weight, eps)


def _mlp(layer: DecoderLayer) -> Callable[[Tensor, PagedBatch], Tensor]:
    module, index = layer.mlp, layer.expert_index

    def as_module(x: Tensor, batch: PagedBatch) -> Tensor:
        if batch.routes is None or index is None:
            return module(x.unsqueeze(0))[0]
        return module(x.unsqueeze(0), batch.routes.layer(index))[0]

    if not isinstance(module, SwiGLU) or not are_plain(module.down_proj):
        return as_module
    whole = whole_of(module.gate_proj, module.up_proj)
    if whole is None:
        return as_module
    down, sizes = module.down_proj.weight.detach(), (module.gate_proj.out_features, module.up_proj.out_features)

    def mlp(x: Tensor, batch: PagedBatch) -> Tensor:
        gate, up = F.linear(x, whole).split_with_sizes(sizes, dim=-1)
        return F.linear(F.silu(gate).mul_(up), down)

    return mlp


def _delta_attention(layer: KimiDeltaAttention) -> Attend | None:
    """The layer of kda.py for one token of every sequence."""
    config, maps = layer.config, layer.maps_of_input()
    seconds = (layer.f_b_proj, layer.o_proj, *(() if config.use_full_rank_gate else (layer.g_b_proj,)))
    whole = whole_of(*maps)
    if whole is None or config.decay != "channel" or not are_plain(layer.o_norm, *seconds):
        return None
    sizes = (3 * maps[0].out_features, *(linear.out_features for linear in maps[3:]))
    to_decay, to_output = layer.f_b_proj.weight.detach(), layer.o_proj.weight.detach()
    to_gate = None if config.use_full_rank_gate else layer.g_b_proj.weight.detach()
    weights = step_weights(
        config.num_heads, conv_weight=layer.conv_weight, norm_weight=layer.o_norm.weight, gate=layer.gate(),
        norm_eps=layer.o_norm.eps, scale=config.head_dim**-0.5, beta_scale=layer.beta_max, dtype=whole.dtype,
    )  # fmt: skip

    def attend(x: Tensor, batch: PagedBatch, pool: StatePool) -> Tensor:
        assert batch.places is not None
        qkv, decay, gate, beta = F.linear(x, whole).split_with_sizes(sizes, dim=-1)
        if to_gate is not None:
            gate = F.linear(gate, to_gate)
        gated = decode_at(
            qkv, F.linear(decay, to_decay), beta, gate, pool.conv, pool.state, batch.places.slots, weights
        )  # fmt: skip
        return F.linear(gated, to_output)

    return attend


def _latent_attention(layer: LatentAttention) -> Attend | None:
    """The layer of mla.py for one token of every sequence, absorbed."""
    config, maps = layer.config, layer.maps_of_input()
    whole = whole_of(*maps)
    if whole is None or not are_plain(layer.kv_a_layernorm, layer.kv_b_proj, layer.o_proj):
        return None
    sizes = (maps[0].out_features, config.kv_lora_rank, config.qk_rope_head_dim)
    query_sizes = (config.qk_nope_head_dim, config.qk_rope_head_dim)
    norm, rope, scale = _norm(layer.kv_a_layernorm), config.rope, layer.scale
    up_k, up_v = (each.detach() for each in layer.up_projections(whole.dtype))
    up_v, to_output = up_v.mT, layer.o_proj.weight.detach()

    def attend(x: Tensor, batch: PagedBatch, pool: LatentPool) -> Tensor:
        places = batch.places
        assert places is not None
        q, latent, k_rope = F.linear(x, whole).split_with_sizes(sizes, dim=-1)
        q_nope, q_rope = layer.per_head(q).split_with_sizes(query_sizes, dim=-1)
        if rope is not None:
            assert batch.positions is not None
            cos, sin = rotation(rope, batch.positions[0], config.qk_rope_head_dim)
            q_rope = rotate(q_rope, cos, sin, interleaved=rope.interleaved)
            k_rope = rotate(k_rope.unsqueeze(-2), cos, sin, interleaved=rope.interleaved).squeeze(-2)
        rows = pool.rows
        rows.index_copy_(0, batch.write_rows, torch.cat((norm(latent), k_rope), dim=-1))
        cached_DTR = rows.index_select(0, places.rows.view(-1)).view(*places.rows.shape, -1)
        absorbed = torch.bmm(q_nope.transpose(0, 1), up_k).transpose(0, 1)
        o_DHR = attend_rows(
            torch.cat((absorbed, q_rope), dim=-1), cached_DTR, places.outside, latent_dim=config.kv_lora_rank,
            scale=scale,
        )  # fmt: skip
        o = torch.bmm(o_DHR.transpose(0, 1), up_v).transpose(0, 1)
        return F.linear(o.reshape(x.shape[0], -1), to_output)

    return attend
