"""MuonClip on transformers' Llama (GQA) and DeepSeek-V3 (MLA, experts), tiny and unmodified."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

from perilune.optim import Adam, ColumnBlocks, MuonClip, QKClip, RowBlocks, Stacked, Whole
from perilune.optim.plan import plan_parameters

VOCAB = 61
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}


def llama(**options) -> LlamaForCausalLM:
    config = LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=2, **options)
    return LlamaForCausalLM(config)


def deepseek(q_lora_rank: int | None = 24) -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )
    return DeepseekV3ForCausalLM(config)


MODELS = {
    "llama_gqa": llama,
    "llama_with_bias": lambda: llama(attention_bias=True),
    "deepseek_v3": deepseek,
    "deepseek_v3_full_query": lambda: deepseek(None),
}


def enlarge_logits(model: nn.Module, factor: float) -> None:
    """Larger q and k projections than any sane initialisation, so that logits start far above tau."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "q_b_proj.weight", "k_proj.weight", "kv_b_proj.weight")):
                parameter.mul_(factor)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


class Capture:
    """The q, k, mask and scale every attention call of `model` gets, through transformers' public registry."""

    def __init__(self, model: nn.Module) -> None:
        self.logits: dict[nn.Module, torch.Tensor] = {}
        AttentionInterface.register("capture", self)
        AttentionMaskInterface.register("capture", sdpa_mask)
        model.set_attn_implementation("capture")

    def __call__(self, module, query, key, value, mask, *, scaling, **options):
        logits = query.double() @ key.double().repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT * scaling
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool).tril() if mask is None else mask
        self.logits[module] = logits.masked_fill(~allowed, -torch.inf).amax(dim=(0, 2, 3)).detach()
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)

    def max_logits(self, model: nn.Module) -> torch.Tensor:
        return torch.stack([self.logits[module] for module in attention_modules(model)])


def batch(padded: bool = False) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, VOCAB, (3, 12))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, 7:] = 0
        mask[2, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens, "use_cache": False}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_recorded_maxima_are_those_of_the_softmax_input(name, padded):
    model = MODELS[name]().train()
    clip, capture = QKClip(model), Capture(model)
    model(**batch(padded))
    expected = capture.max_logits(model)
    # float32 dot products of 12 numbers against float64.
    torch.testing.assert_close(clip.max_logits().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_plain_implementation_is_watched_and_computes_what_it_did(implementation):
    model = llama().train()
    model.set_attn_implementation(implementation)
    inputs = batch()
    before = model(**inputs).logits
    clip = QKClip(model)
    assert torch.equal(model(**inputs).logits, before)
    assert clip.max_logits().isfinite().all()
    assert model.config._attn_implementation == implementation


def test_evaluation_and_unwatched_models_do_not_count():
    watched, other = llama(), llama().train()
    clip = QKClip(watched)
    watched.eval()(**batch())
    other(**batch())
    assert (clip.max_logits() == -torch.inf).all()


def test_two_optimizers_of_one_model_share_one_record():
    model = llama().train()
    first, second = QKClip(model), QKClip(model)
    model(**batch())
    assert torch.equal(first.max_logits(), second.max_logits()) and first.max_logits().isfinite().all()


@pytest.mark.parametrize("gqa", ["query", "balanced"])
@pytest.mark.parametrize("name", MODELS)
def test_clipped_heads_land_on_tau_and_the_others_stay(name, gqa):
    model = MODELS[name]().train()
    enlarge_logits(model, 40.0)
    # The promise is about the weights and inputs that were measured, so no learning step moves the weights here, and
    # every attention module sees its old input again (a clipped layer changes what the next one gets).
    optimizer = MuonClip.for_model(model, lr=0.0, qk_clip_tau=10.0, gqa=gqa)
    calls: dict[nn.Module, tuple] = {}
    for module in attention_modules(model):
        module.register_forward_pre_hook(lambda m, args, kwargs: calls.update({m: (args, kwargs)}), with_kwargs=True)
    model(**batch()).loss.backward()
    optimizer.step()
    with torch.no_grad():
        for module, (args, kwargs) in list(calls.items()):
            module(*args, **kwargs)
    before, after = optimizer.qk_report.max_logits, optimizer.qk_clip.max_logits()
    over = before > 10.0
    assert over.any() and optimizer.qk_report.num_clipped == over.sum()
    assert after.max() <= 10.0 * (1 + 1e-5)
    # float32: a dot product of a few dozen terms, relative to tau.
    torch.testing.assert_close(after[over], torch.full_like(after[over], 10.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(after[~over], before[~over], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_the_cap_holds_in_training(name):
    tau, inputs = 4.0, batch()

    def train(model: nn.Module, tau: float | None) -> tuple[list[float], list[float]]:
        optimizer = MuonClip.for_model(model, lr=1e-3, qk_clip_tau=tau)
        watch = optimizer.qk_clip or QKClip(model)
        losses, largest = [], []
        for _ in range(12):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            largest.append(float(watch.max_logits().max()))
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses, largest

    model = MODELS[name]().train()
    enlarge_logits(model, 40.0)
    _, free = train(copy.deepcopy(model), None)
    losses, capped = train(model, tau)
    assert min(free) > 3 * tau
    assert losses[-1] < losses[0]
    # A controller, not a bound: one step, or the clip of the layer below, may pass tau a little.
    assert max(capped[1:]) <= 1.5 * tau


def test_a_norm_on_q_is_found_by_name_in_modules_that_cannot_declare_it():
    model = llama()
    model.model.layers[1].self_attn.q_norm = nn.RMSNorm(8)
    with pytest.raises(ValueError, match=r"'model.layers.1.self_attn' normalises q or k"):
        QKClip(model)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"]
)
def test_a_copied_model_is_watched_for_its_own_optimizer(duplicate, monkeypatch):
    model = llama().train()
    enlarge_logits(model, 40.0)
    optimizer = MuonClip.for_model(model, lr=1e-3, qk_clip_tau=10.0)
    both = (model, optimizer)
    # A fresh process has transformers' own table of attention functions, not the recording one.
    table = modeling_llama.ALL_ATTENTION_FUNCTIONS._table
    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", table)
    twin, twin_optimizer = duplicate(both)
    inputs = batch()
    for one, its_optimizer in (both, (twin, twin_optimizer)):
        one(**inputs).loss.backward()
        its_optimizer.step()
    assert optimizer.qk_report.num_clipped > 0
    assert torch.equal(optimizer.qk_report.max_logits, twin_optimizer.qk_report.max_logits)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_layouts_of_llama():
    layouts = {entry.name: entry.layout for entry in plan_parameters(llama())}
    assert layouts["model.layers.0.self_attn.q_proj.weight"] == RowBlocks((8,) * 4)
    assert layouts["model.layers.0.self_attn.k_proj.weight"] == RowBlocks((8,) * 2)
    assert layouts["model.layers.1.self_attn.o_proj.weight"] == ColumnBlocks((8,) * 4)
    assert layouts["model.layers.0.mlp.gate_proj.weight"] == Whole()
    assert layouts["model.embed_tokens.weight"] == layouts["lm_head.weight"] == Adam(weight_decay=True)
    assert layouts["model.layers.0.input_layernorm.weight"] == Adam(weight_decay=True)


def test_layouts_of_deepseek_v3():
    layouts = {entry.name: entry.layout for entry in plan_parameters(deepseek())}
    assert layouts["model.layers.0.self_attn.q_b_proj.weight"] == RowBlocks((12,) * 4)
    assert layouts["model.layers.0.self_attn.kv_b_proj.weight"] == RowBlocks((8, 8) * 4)
    assert layouts["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == Whole()
    assert layouts["model.layers.1.mlp.experts.gate_up_proj"] == Stacked(row_sizes=(16, 16))
    assert layouts["model.layers.1.mlp.experts.down_proj"] == Stacked()
    assert layouts["model.layers.1.mlp.gate.weight"] == Whole()
    assert layouts["model.layers.0.self_attn.q_a_layernorm.weight"] == Adam(weight_decay=True)


def test_masks_that_cannot_be_read_are_refused():
    class BlockMask:
        """What flex attention hands over instead of a tensor."""

    AttentionInterface.register("blocks", sdpa_attention_forward)
    AttentionMaskInterface.register("blocks", lambda *sizes, **options: BlockMask())
    model = llama().train()
    QKClip(model)
    model.set_attn_implementation("blocks")
    with pytest.raises(ValueError, match=r"mask of LlamaAttention \(got BlockMask\).*attn_implementation='sdpa'"):
        model(**batch())
