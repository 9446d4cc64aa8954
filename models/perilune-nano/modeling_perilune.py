"""A model trained with Perilune, for transformers: plain torch, nothing of Perilune is imported.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

This file lies beside the weights, with its settings (configuration_perilune.py) and the tower that looks at pictures
(vision_perilune.py). One idea after the other:

    cache                 what decoding remembers: a matrix per KDA head, a latent vector per MLA token
    Kimi Delta Attention  arXiv 2510.26692: a linear-time delta rule with a decay for every channel
    latent attention      arXiv 2405.04434: softmax attention over compressed keys; no positions, RoPE or YaRN
    experts               arXiv 2412.19437: sigmoid scores, a bias that only selects
    residual path         plain sums, or Attention Residuals (arXiv 2603.15031), full or in blocks
    model                 all of it, with `generate`, padding on the left and the loss of next tokens

Shapes: B rows, T tokens, S tokens with those of the cache, H heads, d width of the model, P patches of pictures.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_perilune import KimiK25Config, PeriluneConfig, Settings
from .vision_perilune import Projector, VisionTower

# ---------------------------------------------------------------------------------------------------------------------
# Cache


@dataclass
class LayerCache:
    state: Tensor | None = None
    """KDA: [B, H, K, V]"""
    inputs: dict[str, Tensor] = field(default_factory=dict)
    """KDA: the last inputs of the three convolutions, [B, channels, width - 1] each"""
    latents: Tensor | None = None
    """MLA: [B, S, rank + shared key]"""


@dataclass
class PeriluneCache:
    layers: list[LayerCache]
    length: int = 0

    def get_seq_length(self) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row b goes on from what was row beam_idx[b]."""
        for layer in self.layers:
            layer.state = None if layer.state is None else layer.state[beam_idx]
            layer.latents = None if layer.latents is None else layer.latents[beam_idx]
            layer.inputs = {name: tensor[beam_idx] for name, tensor in layer.inputs.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Parts of every layer


def wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wide(x), self.weight.shape, wide(self.weight), self.eps).to(x.dtype)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); `names` are those of gate, up and down."""

    def __init__(self, dim: int, inner: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")):
        super().__init__()
        self.names = names
        for name, sizes in zip(names, ((dim, inner), (dim, inner), (inner, dim)), strict=True):
            self.add_module(name, nn.Linear(*sizes, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        return down(F.silu(gate(x)) * up(x))


# ---------------------------------------------------------------------------------------------------------------------
# Kimi Delta Attention


class KimiDeltaAttention(nn.Module):
    """
    q, k, v = silu(conv(W x))            causal and per channel; q and k then have unit length per head
    g       = gate(W_fb W_fa x)          log of the decay, per channel or per head: softplus, or bounded below
    beta    = sigmoid(W_b x)             how much is written (twice that with allow_neg_eigval)
    y       = W_o (RMSNorm(delta_rule(q, k, v, g, beta)) * sigmoid(output gate))
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        linear, dim = settings.linear, settings.hidden_size
        self.heads, self.head_dim = linear["num_heads"], linear["head_dim"]
        self.width = linear["short_conv_kernel_size"]
        self.lower_bound = linear.get("gate_lower_bound")
        self.beta_max = 2.0 if linear.get("allow_neg_eigval") else 1.0
        channels = self.heads * self.head_dim
        decays = self.heads if linear.get("decay") == "head" else channels
        for name in ("q", "k", "v"):
            self.add_module(f"{name}_proj", nn.Linear(dim, channels, bias=False))
            self.add_module(f"{name}_conv1d", nn.Conv1d(channels, channels, self.width, groups=channels, bias=False))
        self.f_a_proj = nn.Linear(dim, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, decays, bias=False)
        self.A_log = nn.Parameter(torch.zeros(1, 1, self.heads, 1))
        self.dt_bias = nn.Parameter(torch.zeros(decays))
        self.b_proj = nn.Linear(dim, self.heads, bias=False)
        self.full_rank = bool(linear.get("use_full_rank_gate"))
        if self.full_rank:
            self.g_proj = nn.Linear(dim, channels, bias=False)
        else:
            self.g_a_proj = nn.Linear(dim, self.head_dim, bias=False)
            self.g_b_proj = nn.Linear(self.head_dim, channels, bias=False)
        self.o_norm = RMSNorm(self.head_dim, settings.rms_norm_eps)
        self.o_proj = nn.Linear(channels, dim, bias=False)

    def forward(self, x: Tensor, tokens: "Tokens", cache: LayerCache | None) -> Tensor:
        if tokens.is_text is not None:  # without input, padding before a text writes nothing to the state
            x = x * tokens.is_text[..., None].to(x.dtype)
        q, k, v = (wide(self.convolved(x, name, cache)).unflatten(-1, (self.heads, -1)) for name in "qkv")
        q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (q, k))
        g = self.log_decay(x).expand(q.shape)
        beta = self.beta_max * torch.sigmoid(wide(self.b_proj(x)))
        o, state = delta_rule(q * self.head_dim**-0.5, k, v, g, beta, None if cache is None else cache.state)
        if cache is not None:
            cache.state = state
        gate = self.g_proj(x) if self.full_rank else self.g_b_proj(self.g_a_proj(x))
        gated = self.o_norm(o) * torch.sigmoid(wide(gate).unflatten(-1, (self.heads, -1)))
        return self.o_proj(gated.flatten(-2).to(x.dtype))

    def convolved(self, x: Tensor, name: str, cache: LayerCache | None) -> Tensor:
        rows = self.get_submodule(f"{name}_proj")(x).mT
        before = None if cache is None else cache.inputs.get(name)
        if before is None:
            before = rows.new_zeros(*rows.shape[:2], self.width - 1)
        rows = torch.cat([before, rows], dim=-1)
        if cache is not None:
            cache.inputs[name] = rows[..., rows.shape[-1] - self.width + 1 :]
        return F.silu(self.get_submodule(f"{name}_conv1d")(rows)).mT

    def log_decay(self, x: Tensor) -> Tensor:
        """[B, T, H, K], or [B, T, H, 1] where a head has one decay; at most 0"""
        shifted = wide(self.f_b_proj(self.f_a_proj(x))) + wide(self.dt_bias)
        shifted, rate = shifted.unflatten(-1, (self.heads, -1)), wide(self.A_log).exp()
        if self.lower_bound is None:
            return -rate * F.softplus(shifted)
        return self.lower_bound * torch.sigmoid(rate * shifted)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, chunk: int = 16
) -> tuple[Tensor, Tensor]:
    """The recurrence over tokens, a chunk at a time; inputs [B, T, H, D] and beta [B, T, H].

    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t

    Inside a chunk, with G the running sum of g and X_ij = exp(G_i - G_j), what the tokens write solves a triangular
    system: (I + L) W = beta (V - (K exp G) S), L_ij = beta_i k_i . (X_ij k_j) for j < i. No exponent is above 0.
    """
    if state is None:
        state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    outputs = []
    heads_first = (part.transpose(1, 2).split(chunk, dim=2) for part in (q, k, v, g, beta))
    for q, k, v, g, beta in zip(*heads_first, strict=True):
        total = g.cumsum(2)
        size = total.shape[2]
        earlier = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        pairs = (total[:, :, :, None] - total[:, :, None]).masked_fill(~earlier[..., None], -math.inf).exp()
        reach = k[:, :, None] * pairs
        lower = (beta[..., None] * (k[:, :, :, None] * reach).sum(-1)).tril(-1)
        decay = total.exp()
        wanted = beta[..., None] * (v - (k * decay) @ state)
        written = torch.linalg.solve_triangular(lower, wanted, upper=False, unitriangular=True)
        outputs.append((q * decay) @ state + (q[:, :, :, None] * reach).sum(-1) @ written)
        last = total[:, :, -1:]
        state = last.exp().mT * state + (k * (last - total).exp()).mT @ written
    return torch.cat(outputs, dim=2).transpose(1, 2), state


# ---------------------------------------------------------------------------------------------------------------------
# Latent attention


class LatentAttention(nn.Module):
    """
    c = RMSNorm(W_kva x)[:R], k_r = rest      all that is kept of a token; k_r is shared by the heads, and rotated
    k_h = [W_uk,h c ; k_r],  v_h = W_uv,h c   rows of kv_b_proj, per head the key's and then the value's
    y = W_o concat softmax(s q_h k_h^T) v_h   one token after others: q W_uk meets the latents themselves
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings, dim, self.heads = settings, settings.hidden_size, settings.num_attention_heads
        self.rank, self.nope = settings.kv_lora_rank, settings.qk_nope_head_dim
        self.shared, self.value = settings.qk_rope_head_dim, settings.v_head_dim
        if settings.q_lora_rank is None:
            self.q_proj = nn.Linear(dim, self.heads * (self.nope + self.shared), bias=False)
        else:
            self.q_a_proj = nn.Linear(dim, settings.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(settings.q_lora_rank, 1e-6)
            self.q_b_proj = nn.Linear(settings.q_lora_rank, self.heads * (self.nope + self.shared), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, self.rank + self.shared, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, 1e-6)
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, dim, bias=False)
        self.scale = (self.nope + self.shared) ** -0.5 * softmax_factor(settings.rope)

    def forward(self, x: Tensor, tokens: "Tokens", cache: LayerCache | None) -> Tensor:
        q = self.q_proj(x) if self.settings.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        latent, k_shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.shared], dim=-1)
        latent = self.kv_a_layernorm(latent)
        if self.settings.rope is not None:
            cos, sin = rotation(self.settings.rope, tokens.positions, self.shared)
            interleaved = self.settings.keys.get("rope_interleave", True)
            rotated = rotate(q[..., self.nope :], cos[:, None], sin[:, None], interleaved)
            q = torch.cat([q[..., : self.nope], rotated], dim=-1)
            k_shared = rotate(k_shared, cos, sin, interleaved)
        kept = torch.cat([latent, k_shared], dim=-1)
        if cache is not None:
            kept = kept if cache.latents is None else torch.cat([cache.latents, kept], dim=1)
            cache.latents = kept
        attend = self.absorbed if x.shape[1] == 1 else self.expanded
        return self.o_proj(attend(q, kept, tokens).transpose(1, 2).flatten(-2))

    def expanded(self, q: Tensor, kept: Tensor, tokens: "Tokens") -> Tensor:
        """Keys and values of every head."""
        latent, k_shared = kept.split([self.rank, self.shared], dim=-1)
        up = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = up.split([self.nope, self.value], dim=-1)
        k = torch.cat([k, k_shared[:, None].expand(-1, self.heads, -1, -1)], dim=-1)
        return tokens.attention(q, k, v, self.scale)

    def absorbed(self, q: Tensor, kept: Tensor, tokens: "Tokens") -> Tensor:
        """Decoding expands nothing: one key for all heads, the latent with the shared part."""
        up_k, up_v = self.kv_b_proj.weight.unflatten(0, (self.heads, -1)).split([self.nope, self.value], dim=1)
        q = torch.cat([q[..., : self.nope] @ up_k, q[..., self.nope :]], dim=-1)
        k = kept[:, None].expand(-1, self.heads, -1, -1)
        return tokens.attention(q, k, k[..., : self.rank], self.scale) @ up_v.mT


def magnitude(rope: dict[str, Any], name: str) -> float:
    """What YaRN multiplies with for longer contexts; `name` is mscale or mscale_all_dim."""
    return 0.1 * rope.get(name, 1.0) * math.log(rope["factor"]) + 1.0


def softmax_factor(rope: dict[str, Any] | None) -> float:
    if rope is None or rope["rope_type"] != "yarn" or not rope.get("mscale_all_dim"):
        return 1.0
    return magnitude(rope, "mscale_all_dim") ** 2


def rotation(rope: dict[str, Any], positions: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin [B, T, dim / 2]; YaRN (arXiv 2309.00071) slows the pairs that turn less than once in training."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions.device) / dim
    frequency = 1.0 / rope["rope_theta"] ** exponent
    factor = 1.0
    if rope["rope_type"] == "yarn":
        context = rope["original_max_position_embeddings"]

        def pair_turning(rotations: float) -> float:
            return dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

        low = max(math.floor(pair_turning(rope["beta_fast"])), 0)
        high = min(math.ceil(pair_turning(rope["beta_slow"])), dim - 1)
        pair = torch.arange(dim // 2, dtype=torch.float32, device=positions.device)
        slow = ((pair - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
        frequency = frequency * (1.0 - slow) + frequency / rope["factor"] * slow
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            factor = magnitude(rope, "mscale") / magnitude(rope, "mscale_all_dim")
        else:
            factor = 0.1 * math.log(rope["factor"]) + 1.0
    angle = positions[..., None].float() * frequency
    return angle.cos() * factor, angle.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Pairs are neighbours or halves of x; they leave as halves, in queries and keys alike."""
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Experts


class Router(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(settings.num_experts, settings.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(settings.num_experts), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, d] -> weights and numbers of the chosen experts, [N, k] each"""
        settings = self.settings
        scores = torch.sigmoid(F.linear(wide(x), wide(self.weight)))
        biased = scores.detach() + self.e_score_correction_bias
        if settings.num_expert_group > 1:  # only experts of the best groups
            grouped = biased.unflatten(1, (settings.num_expert_group, -1))
            best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1).topk(settings.topk_group).indices
            kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
            biased = grouped.masked_fill(~kept[..., None], -math.inf).flatten(1)
        experts = biased.topk(settings.num_experts_per_token, dim=-1).indices
        weights = scores.gather(1, experts)
        if settings.moe_renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * settings.routed_scaling_factor, experts


class MixtureOfExperts(nn.Module):
    """y = shared(x) + sum over the chosen experts of weight * expert(x)"""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        dim, inner = settings.hidden_size, settings.moe_intermediate_size
        names = ("gate_proj", "up_proj", "down_proj") if settings.deepseek_names else ("w1", "w3", "w2")
        self.gate = Router(settings)
        self.experts = nn.ModuleList(SwiGLU(dim, inner, names) for _ in range(settings.num_experts))
        shared = inner * settings.num_shared_experts
        self.shared_experts = SwiGLU(dim, shared) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, experts = self.gate(rows)
        y = torch.zeros_like(rows)
        for number in experts.unique().tolist():
            row, choice = (experts == number).nonzero(as_tuple=True)
            found = self.experts[number](rows[row]) * weights[row, choice, None].to(rows.dtype)
            y = y.index_add(0, row, found)
        return y.view_as(x) if self.shared_experts is None else y.view_as(x) + self.shared_experts(x)


# ---------------------------------------------------------------------------------------------------------------------
# Layers and the residual path over depth


class Stream:
    """What sublayers read from and write to.

    Plain: one sum. Attention Residuals: h = sum_i a_i v_i with a = softmax_i(proj(norm(v_i))) over the embedding, the
    sums of finished blocks and the running sum of the open one; a block is finished before its next reader mixes.
    """

    def __init__(self, embedding: Tensor, block: int) -> None:
        self.embedding = embedding
        self.running: Tensor | None = embedding
        self.bank: list[Tensor] = []
        self.block, self.reads = block, 0

    def read(self, site: "tuple[RMSNorm, nn.Linear] | None") -> Tensor:
        if site is None:
            assert self.running is not None
            return self.running
        if self.reads % self.block == 0:
            self.bank, self.running = [*self.bank, *self.open()], None
        self.reads += 1
        values = torch.stack([*self.bank, *self.open()])
        norm, proj = site
        shares = F.linear(norm(wide(values)), wide(proj.weight)).softmax(dim=0)
        return (shares * wide(values)).sum(0).to(values.dtype)

    def open(self) -> list[Tensor]:
        """The sum of the open block, if something was written to it."""
        return [] if self.running is None else [self.running]

    def write(self, output: Tensor) -> None:
        self.running = output if self.running is None else self.running + output


class ResidualScalars(nn.Module):
    """Before a layer reads: sum_scale * sum + embedding_scale * embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.sum_scale = nn.Parameter(torch.ones(()))
        self.embedding_scale = nn.Parameter(torch.zeros(()))

    def forward(self, total: Tensor, embedding: Tensor) -> Tensor:
        return self.sum_scale * total + self.embedding_scale * embedding


def add_site(module: nn.Module, name: str, settings: Settings) -> None:
    """A reader of Attention Residuals: NAME_norm and NAME_proj."""
    if settings.residual == "attnres":
        module.add_module(f"{name}_norm", RMSNorm(settings.hidden_size, settings.rms_norm_eps))
        module.add_module(f"{name}_proj", nn.Linear(settings.hidden_size, 1, bias=False))


def site_of(module: nn.Module, name: str) -> Any:
    return (
        (getattr(module, f"{name}_norm"), getattr(module, f"{name}_proj")) if hasattr(module, f"{name}_proj") else None
    )


class Layer(nn.Module):
    """Attention, then a dense MLP or experts, each behind its norm."""

    def __init__(self, settings: Settings, index: int) -> None:
        super().__init__()
        dim, eps = settings.hidden_size, settings.rms_norm_eps
        self.self_attn = (KimiDeltaAttention if settings.kinds[index] == "kda" else LatentAttention)(settings)
        sparse = index >= settings.first_k_dense_replace
        self.mlp_name = "block_sparse_moe" if sparse and not settings.deepseek_names else "mlp"
        mlp = MixtureOfExperts(settings) if sparse else SwiGLU(dim, settings.intermediate_size)
        self.add_module(self.mlp_name, mlp)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(dim, eps), RMSNorm(dim, eps)
        self.res_scalars = ResidualScalars() if settings.residual == "scalars" else None
        add_site(self, "self_attention_res", settings)
        add_site(self, "mlp_res", settings)

    def forward(self, stream: Stream, tokens: "Tokens", cache: LayerCache | None) -> None:
        if self.res_scalars is not None:
            stream.running = self.res_scalars(stream.read(None), stream.embedding)
        h = self.input_layernorm(stream.read(site_of(self, "self_attention_res")))
        stream.write(self.self_attn(h, tokens, cache))
        h = self.post_attention_layernorm(stream.read(site_of(self, "mlp_res")))
        stream.write(self.get_submodule(self.mlp_name)(h))


@dataclass
class Tokens:
    """What the layers are told about the tokens they see."""

    positions: Tensor
    """[B, T]"""
    is_text: Tensor | None
    """[B, T], false for padding; None: there is none"""
    mask: Tensor | None
    """[B, 1, T, S], which keys a token may see; None: those up to itself, when the first token is the first of all"""

    @classmethod
    def of(cls, ids: Tensor, attention_mask: Tensor | None, start: int) -> "Tokens":
        rows, count = ids.shape[:2]
        index = torch.arange(start, start + count, device=ids.device)
        if attention_mask is None or bool(attention_mask.all()):
            if start == 0 or count == 1:
                return cls(positions=index.expand(rows, -1), is_text=None, mask=None)
            attention_mask = torch.ones(rows, start + count, dtype=torch.bool, device=ids.device)
        present = attention_mask.bool()
        keys = torch.arange(start + count, device=ids.device)
        # Padding looks at itself: a row of attention that may look nowhere would not be a number.
        mask = ((keys <= index[:, None]) & present[:, None]) | (keys == index[:, None])
        positions = (present.long().cumsum(1) - 1).clamp(min=0)[:, start:]
        return cls(positions=positions, is_text=present[:, start:], mask=mask[:, None])

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        causal = self.mask is None and q.shape[2] > 1
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=causal, scale=scale)


# ---------------------------------------------------------------------------------------------------------------------
# Model


class Decoder(nn.Module):
    """Embeddings [B, T, d] -> final states [B, T, d]"""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList(Layer(settings, index) for index in range(len(settings.kinds)))
        self.norm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        add_site(self, "output_attn_res", settings)

    def forward(self, embeddings: Tensor, tokens: Tokens, cache: PeriluneCache | None) -> Tensor:
        stream = Stream(embeddings, self.settings.block)
        for index, layer in enumerate(self.layers):
            layer(stream, tokens, None if cache is None else cache.layers[index])
        return self.norm(stream.read(site_of(self, "output_attn_res")))


class PeriluneForCausalLM(PreTrainedModel, GenerationMixin):
    """tokens [B, T] -> logits [B, T, vocabulary].

    `pixel_values` [P, 3, 14, 14] are the patches of all pictures and chunks of video, uint8 or normalised, in the order
    of their places (image_token_id) in the text; `image_grid_thw` [N, 3] their frames, rows and columns.
    """

    config_class = PeriluneConfig
    _no_split_modules: ClassVar[list[str]] = ["Layer", "VisionBlock"]
    _keep_in_fp32_modules_strict: ClassVar[list[str]] = ["A_log", "dt_bias", "e_score_correction_bias"]

    def __init__(self, config: PeriluneConfig) -> None:
        super().__init__(config)
        settings, prefix = config.settings(), ""
        text: nn.Module = self
        if settings.vision is not None:
            self.vision_tower = VisionTower(settings.vision)
            self.mm_projector = Projector(settings.vision["hidden_size"], settings.hidden_size)
            self.language_model = text = nn.Module()
            prefix = "language_model."
        text.add_module("model", Decoder(settings))
        text.add_module("lm_head", nn.Linear(settings.hidden_size, settings.vocab_size, bias=False))
        if config.tie_word_embeddings:
            self._tied_weights_keys = {f"{prefix}lm_head.weight": f"{prefix}model.embed_tokens.weight"}
        self.post_init()

    @property
    def text(self) -> Any:
        """What holds `model` and `lm_head`."""
        return self.language_model if hasattr(self, "language_model") else self

    def get_input_embeddings(self) -> nn.Module:
        return self.text.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.text.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.text.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.text.lm_head = new_embeddings

    def get_image_features(self, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """[N, d], the features of all items one after the other"""
        if pixel_values.dtype == torch.uint8:
            pixel_values = (pixel_values.float() / 255 - 0.5) / 0.5
        pixel_values = pixel_values.to(self.mm_projector.pre_norm.weight.dtype)
        grids = image_grid_thw.tolist()
        items = pixel_values.split([frames * height * width for frames, height, width in grids])
        groups = [self.vision_tower(item, *grid) for item, grid in zip(items, grids, strict=True)]
        return self.mm_projector(torch.cat(groups))

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: PeriluneCache | None = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None and image_grid_thw is not None:
            features = self.get_image_features(pixel_values, image_grid_thw).to(inputs_embeds.dtype)
            places = input_ids == self.config.image_token_id
            if int(places.sum()) != len(features):
                raise ValueError(f"the text has {int(places.sum())} places for pictures, which give {len(features)}")
            inputs_embeds = inputs_embeds.masked_scatter(places[..., None], features)
        cache: Any = past_key_values
        if cache is None and use_cache:
            cache = PeriluneCache([LayerCache() for _ in self.text.model.layers])
        tokens = Tokens.of(inputs_embeds, attention_mask, 0 if cache is None else cache.length)
        hidden = self.text.model(inputs_embeds, tokens, cache)
        if cache is not None:
            cache.length += inputs_embeds.shape[1]
        logits: Any = wide(self.text.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden))
        loss: Any = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes the cache

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: PeriluneCache | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        seen = 0 if past_key_values is None else past_key_values.length
        names = ["attention_mask", "use_cache", "logits_to_keep"]
        names += [] if seen else ["inputs_embeds", "pixel_values", "image_grid_thw"]
        given = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        if "inputs_embeds" not in given:
            given["input_ids"] = input_ids[:, seen:]
        return {**given, "past_key_values": past_key_values}


class KimiK25ForCausalLM(PeriluneForCausalLM):
    """The same under the type of Kimi K2.5, which transformers itself does not open as a language model."""

    config_class = KimiK25Config
