"""Attention Residuals in a whole network: where they start, what blocks mean, which sources a site sees."""

from dataclasses import replace

import pytest
import torch

from perilune.model import Decoder, ModelConfig
from perilune.model.documents import Packing
from perilune.model.residual import AttentionResidual, attnres_stream, plain_stream
from tests.model.small_models import BASE, MOE, build, random_tokens, relative_error

DEEP = replace(BASE, num_hidden_layers=5, moe=MOE)


def num_sources(config: ModelConfig) -> list[int]:
    """How many sources each site reads, by the definition: the embedding, closed blocks, the open block if begun."""
    block = 1 if config.residual == "attnres" else config.block_sublayers
    sites = 2 * config.num_hidden_layers
    reads = [1 + site // block + (1 if site % block else 0) for site in range(sites)]
    return [*reads, 1 + -(-sites // block)]


def norms_in_reading_order(model: Decoder) -> list[torch.nn.Module]:
    pairs = ((layer.input_layernorm, layer.post_attention_layernorm) for layer in model.layers)
    return [*(norm for pair in pairs for norm in pair), model.norm]


@pytest.mark.parametrize("config", [
    replace(DEEP, residual="attnres"),
    replace(DEEP, residual="block_attnres", block_sublayers=2),
    replace(DEEP, residual="block_attnres", block_sublayers=3),
    replace(DEEP, residual="block_attnres", block_sublayers=4),
    replace(DEEP, residual="block_attnres", block_sublayers=100),
], ids=["full", "blocks_of_2", "blocks_of_3", "blocks_of_4", "one_block"])  # fmt: skip
def test_zero_queries_equal_the_plain_network_with_eps_times_sources_squared(config: ModelConfig) -> None:
    """mean(sources) = sum / n, and RMSNorm_eps(x / n) = RMSNorm_{n^2 eps}(x): in output and all gradients."""
    mixed = Decoder(config, seed=0)
    plain = Decoder(replace(config, residual="plain"), seed=0)
    plain.load_state_dict({k: v for k, v in mixed.state_dict().items() if "_res." not in k})
    for norm, count in zip(norms_in_reading_order(plain), num_sources(config), strict=True):
        norm.eps *= count**2
    tokens, targets = random_tokens(mixed, 2, 11), random_tokens(mixed, 2, 11, seed=1)
    assert relative_error(mixed(tokens), plain(tokens)) < 1e-9
    mixed.loss(tokens, targets).backward()
    plain.loss(tokens, targets).backward()
    ours = dict(mixed.named_parameters())
    for name, parameter in plain.named_parameters():
        assert relative_error(ours[name].grad, parameter.grad) < 1e-9, name


@pytest.mark.parametrize("residual", ["attnres", "block_attnres"])
def test_blocks_of_one_sublayer_and_full_equal_every_sublayer_mixing_all_earlier_outputs(residual: str) -> None:
    """Both against the definition written out over the model's own sublayers, with gradients."""
    model = build(replace(DEEP, residual=residual, block_sublayers=1))
    tokens, targets = random_tokens(model, 2, 7), random_tokens(model, 2, 7, seed=1)
    sources = [model.embed_tokens(tokens)]

    def read(site: AttentionResidual) -> torch.Tensor:
        stacked = torch.stack(sources)
        keys = stacked * (stacked.pow(2).mean(-1, keepdim=True) + site.eps).rsqrt() * site.gain
        return ((keys @ site.query).softmax(0)[..., None] * stacked).sum(0)

    for layer in model.layers:
        sources.append(layer.self_attn(layer.input_layernorm(read(layer.attn_res)), Packing()))
        sources.append(layer.mlp(layer.post_attention_layernorm(read(layer.mlp_res))))
    logits = model.logits(model.norm(read(model.out_res)))
    expected = torch.autograd.grad(
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"),
        list(model.parameters()),
    )
    assert relative_error(model(tokens), logits) < 1e-12
    actual = torch.autograd.grad(model.loss(tokens, targets), list(model.parameters()))
    for (name, _), ours, right in zip(model.named_parameters(), actual, expected, strict=True):
        assert (ours - right).norm() <= 1e-9 * right.norm() + 1e-12, name


@pytest.mark.parametrize("block", [1, 2, 3, 5, 8])
def test_stream_reads_exactly_the_sources_of_the_definition(block: int) -> None:
    """Against the paper's definition written out: all queries of a site over [embedding, block sums, open sum]."""
    torch.manual_seed(0)
    width, sublayers = 6, 8
    sites = [AttentionResidual(width, eps=1e-5).double() for _ in range(sublayers + 1)]
    for site in sites:
        torch.nn.init.normal_(site.query)
        torch.nn.init.normal_(site.gain, mean=1.0, std=0.3)
    embedding = torch.randn(2, 3, width, dtype=torch.float64)
    outputs = [torch.randn(2, 3, width, dtype=torch.float64) for _ in range(sublayers)]
    stream = attnres_stream(embedding, sites, block_sublayers=block)
    for index in range(sublayers + 1):
        h, stream = stream.read()
        blocks = [outputs[start : min(start + block, index)] for start in range(0, index, block)]
        sources = torch.stack([embedding, *(sum(part) for part in blocks)])
        rms = (sources.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        weights = ((sources * rms * sites[index].gain) @ sites[index].query).softmax(0)
        expected = (weights[..., None] * sources).sum(0)
        assert relative_error(h, expected) < 1e-12, index
        if index < sublayers:
            stream = stream.write(outputs[index])


def test_a_site_on_its_own_mixes_like_the_stream() -> None:
    torch.manual_seed(0)
    site = AttentionResidual(6, eps=1e-5).double()
    torch.nn.init.normal_(site.query)
    torch.nn.init.normal_(site.gain, mean=1.0, std=0.3)
    sources = [torch.randn(2, 3, 6, dtype=torch.float64) for _ in range(3)]
    stacked = torch.stack(sources)
    keys = stacked * (stacked.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * site.gain
    expected = ((keys @ site.query).softmax(0)[..., None] * stacked).sum(0)
    assert relative_error(site(sources), expected) < 1e-12


def test_plain_stream_is_the_running_sum() -> None:
    a, b = torch.randn(3), torch.randn(3)
    h, stream = plain_stream(a).read()
    assert torch.equal(h, a)
    assert torch.equal(stream.write(b).read()[0], a + b)
