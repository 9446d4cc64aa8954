"""Context parallel: every row of tokens is cut into equal parts, one per rank of `cp`.

    layer                 what crosses a cut
    KDA convolution       the last rows before it (kernels/short_conv/context.py)
    KDA recurrence        one affine map of the state per head (kernels/kda/context.py)
    MLA                   latents and shared key parts of all ranks, R + E numbers a token; each rank expands the keys
                          of the documents it has (kernels/attention/context.py)

Everything else works token by token. Documents may be cut anywhere; `cu_seqlens` stays that of the whole row, so a
model is called with its own tokens and everybody's borders. Parts are contiguous: in MLA layers later ranks have more
keys to look at, while KDA layers, most of them, are balanced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from perilune.kernels.attention.context import context_attention
from perilune.kernels.collectives import gathered
from perilune.kernels.context import context_part
from perilune.kernels.kda.context import context_kda
from perilune.kernels.short_conv.context import context_short_conv
from perilune.model import Decoder, KimiDeltaAttention, LatentAttention
from perilune.model.cache import KDACache, MLACache
from perilune.model.documents import Packing, positions_of
from perilune.train.parallel_tensor import become, decoder_layers


def split_context(model: Decoder, mesh: DeviceMesh) -> None:
    """Attention layers work together over the 1-D `mesh`, in place."""
    if mesh.size() == 1:
        return
    for layer in decoder_layers(model):
        kind = ContextKDA if isinstance(layer.self_attn, KimiDeltaAttention) else ContextMLA
        become(layer.self_attn, kind, context_group=mesh.get_group())


def cut_context(rows_BT: Sequence[Tensor], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    """This rank's part of each row [B, R T]."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    for row in rows_BT:
        if row.shape[1] % ranks:
            raise ValueError(
                f"rows of {row.shape[1]} tokens cannot be cut into parallel.cp={ranks} equal parts: "
                f"make data.seq_len a multiple of {ranks}"
            )
    return tuple(row.chunk(ranks, dim=1)[rank] for row in rows_BT)


class ContextKDA:
    """A KDA layer of which this rank has a part of the tokens."""

    context_group: ProcessGroup

    def forward(self, x_BTD: Tensor, packing: Packing, cache: KDACache | None = None) -> Tensor:
        assert isinstance(self, KimiDeltaAttention)
        _refuse(cache)
        part = context_part(x_BTD, packing.cu_seqlens, self.context_group)
        heads = (*x_BTD.shape[:2], self.config.num_heads, self.config.head_dim)
        qkv, gate_input, beta, output_gate = self._projected(x_BTD)
        qkv = context_short_conv(qkv, self.conv_weight, part=part)
        q, k, v = (x.reshape(heads) for x in qkv.chunk(3, dim=-1))
        o = context_kda(
            q, k, v, gate_input.view(heads), beta, part=part, gate=self.gate(), qk_l2norm=True, beta_max=self.beta_max
        )  # fmt: skip
        return self._output(o, output_gate.view(heads), x_BTD.dtype)


class ContextMLA:
    """An MLA layer of which this rank has a part of the tokens."""

    context_group: ProcessGroup

    def forward(self, x_BTD: Tensor, packing: Packing, cache: MLACache | None = None) -> Tensor:
        assert isinstance(self, LatentAttention)
        _refuse(cache)
        part = context_part(x_BTD, packing.cu_seqlens, self.context_group)
        stop = part.start + part.num_tokens
        if self.config.rope is not None:
            row = x_BTD[..., 0].new_empty(()).expand(x_BTD.shape[0], part.num_tokens * part.group.size())
            positions = positions_of(row, packing.cu_seqlens, 0)[:, part.start : stop]
            packing = Packing(cu_seqlens=packing.cu_seqlens, positions=positions)
        q, latent, k_rope = self.compressed(x_BTD, packing)
        # Own latents too are taken from what was gathered: then every rank takes part in the backward of the gathering.
        everyone = gathered(torch.cat([latent, k_rope], dim=-1), part.group).transpose(0, 1).flatten(1, 2)
        seen = everyone[:, part.start - part.before : stop]
        latent, k_rope = seen.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        k, v = self._expand(latent, k_rope)
        o, max_logit, is_bound = context_attention(
            q, k, v, part=part, scale=self.scale,
            clip_threshold=self.max_logit.clip_threshold if self.training else None,
        )  # fmt: skip
        self.max_logit.update(max_logit, is_bound)
        return self.o_proj(o.flatten(-2))


def _refuse(cache: object) -> None:
    if cache is not None:
        raise ValueError("a decode cache holds whole sequences: generate with a model that is not split by parallel.cp")
