"""Plain residuals with two learned numbers a layer: the baseline that Attention Residuals have to beat."""

from dataclasses import replace

import pytest
import torch

from perilune import hub
from perilune.hub.entries import FormatError
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig
from perilune.optim.plan import plan_parameters

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    kda=KDAConfig(num_heads=1, head_dim=16),
    mla=MLAConfig(num_attention_heads=1, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16),
    intermediate_size=64,
    residual="scalars",
    compute_dtype="float64",
)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(64, (2, 12))


def test_the_network_starts_as_the_plain_one(tokens: torch.Tensor):
    ours, plain = Decoder(CONFIG, seed=0), Decoder(replace(CONFIG, residual="plain"), seed=0)
    assert torch.equal(ours(tokens), plain(tokens))
    assert ours.num_parameters() - plain.num_parameters() == 2 * CONFIG.num_hidden_layers


def test_every_layer_rescales_the_sum_and_adds_the_embedding(tokens: torch.Tensor):
    model = Decoder(CONFIG, seed=0)
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            layer.res_scalars.sum_scale.fill_(1.0 + 0.1 * number)
            layer.res_scalars.embedding_scale.fill_(0.5 - 0.2 * number)
    embedding = model.embed_tokens(tokens)
    from perilune.model.documents import Packing

    packing, h = Packing(cu_seqlens=None, positions=None), embedding
    for number, layer in enumerate(model.layers):
        h = (1.0 + 0.1 * number) * h + (0.5 - 0.2 * number) * embedding
        h = h + layer.self_attn(layer.input_layernorm(h), packing)
        h = h + layer.mlp(layer.post_attention_layernorm(h))
    torch.testing.assert_close(model(tokens), model.logits(model.norm(h)), rtol=1e-12, atol=1e-12)


def test_adam_trains_the_scalars_without_decay(tokens: torch.Tensor):
    model = Decoder(CONFIG, seed=0)
    found = [entry for entry in plan_parameters(model) if "res_scalars" in entry.name]
    assert len(found) == 8 and not any(entry.layout.weight_decay for entry in found)
    model.loss(tokens, tokens).backward()
    assert all(layer.res_scalars.embedding_scale.grad.abs() > 0 for layer in model.layers)


def test_no_public_format_has_them(tmp_path):
    with pytest.raises(FormatError, match="scalars"):
        hub.save_pretrained(Decoder(CONFIG, seed=0), tmp_path / "out", target="kimi_linear")
    assert not (tmp_path / "out").exists()
