"""What holds for every decoder, whatever its layers: documents are separate, decoding equals the full forward."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.model import Decoder, ModelConfig, SamplingConfig, generate
from tests.model.small_models import BASE, MOE, VARIANTS, build, random_tokens, relative_error

# float64 with sums of length <= 64: anything above 1e-10 is another computation, not rounding.
SAME = 1e-10


@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_equal_separate_documents(variant: str) -> None:
    model = build(VARIANTS[variant])
    lengths = [7, 1, 0, 22]
    tokens = random_tokens(model, 1, sum(lengths))
    borders = torch.tensor([0, 7, 8, 8, 30])
    packed = model(tokens, cu_seqlens=borders)
    separate = [model(document[None]) for document in tokens[0].split(lengths) if len(document)]
    assert relative_error(packed, torch.cat(separate, dim=1)) < SAME


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_and_steps_equal_the_full_forward(variant: str) -> None:
    model = build(VARIANTS[variant]).eval()
    tokens = random_tokens(model, 3, 12)
    cache = model.new_cache()
    pieces = [model(tokens[:, :5], cache=cache), model(tokens[:, 5:8], cache=cache)]
    pieces += [model(tokens[:, t : t + 1], cache=cache) for t in range(8, 12)]
    assert relative_error(torch.cat(pieces, dim=1), model(tokens)) < SAME


@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 6), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_any_way_of_feeding_the_cache_gives_the_same_logits(cuts: list[int], seed: int) -> None:
    config = replace(BASE, residual="block_attnres", moe=MOE, mla=VARIANTS["query_compression_yarn"].mla)
    model = build(config, seed).eval()
    tokens = random_tokens(model, 2, sum(cuts), seed=seed)
    cache = model.new_cache()
    pieces = [model(piece, cache=cache) for piece in tokens.split(cuts, dim=1)]
    assert relative_error(torch.cat(pieces, dim=1), model(tokens)) < SAME


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_tokens_do_not_change_earlier_logits(variant: str) -> None:
    model = build(VARIANTS[variant]).eval()
    tokens = random_tokens(model, 1, 20)
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % model.config.vocab_size
    if VARIANTS[variant].moe is None:
        assert torch.equal(model(tokens)[:, :11], model(changed)[:, :11])
    else:
        # Experts see other batches when later tokens move between them: equal up to rounding of a different split.
        assert relative_error(model(changed)[:, :11], model(tokens)[:, :11]) < SAME


@pytest.mark.parametrize("variant", ["plain", "mla_only_tied"])
def test_loss_and_its_gradients_equal_cross_entropy_of_the_logits(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perilune.model.head.CHUNK_ELEMENTS", 61 * 4)  # several chunks
    model = build(VARIANTS[variant])
    tokens, targets = random_tokens(model, 2, 9), random_tokens(model, 2, 9, seed=1)
    targets[0, 3:5] = -100
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    expected_grads = torch.autograd.grad(0.3 * expected, list(model.parameters()))
    loss = model.loss(tokens, targets)
    grads = torch.autograd.grad(0.3 * loss, list(model.parameters()))
    assert relative_error(loss, expected) < SAME
    for ours, theirs in zip(grads, expected_grads, strict=True):
        assert relative_error(ours, theirs) < 1e-9


def test_all_parameters_receive_gradients_in_every_variant() -> None:
    for name, config in VARIANTS.items():
        model = build(config)
        tokens, targets = random_tokens(model, 1, 24), random_tokens(model, 1, 24, seed=1)
        model.loss(tokens, targets).backward()
        missing = [p for p, value in model.named_parameters() if value.grad is None or not value.grad.any()]
        # The first site has one source, the embedding: nothing to choose, so its query learns nothing.
        missing = [p for p in missing if not p.startswith("layers.0.attn_res.")]
        assert not missing, (name, missing)


def test_bf16_computes_in_bf16_and_keeps_float32_parameters_and_gradients() -> None:
    config = replace(BASE, compute_dtype="bfloat16", moe=MOE, residual="block_attnres", initializer_range=0.05)
    model = Decoder(config, seed=0)
    tokens, targets = random_tokens(model, 1, 40), random_tokens(model, 1, 40, seed=1)
    assert model.hidden(tokens).dtype == torch.bfloat16
    loss = model.loss(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
    reference = Decoder(replace(config, compute_dtype="float32"), seed=0)
    # bf16 carries 8 bits of mantissa; 8 sublayers of rounding stay well within 2 %.
    assert loss.item() == pytest.approx(reference.loss(tokens, targets).item(), rel=2e-2)


def test_weights_are_a_function_of_the_seed() -> None:
    first, again, other = Decoder(BASE, seed=3), Decoder(BASE, seed=3), Decoder(BASE, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embed_tokens.weight, other.embed_tokens.weight)


def test_default_pattern_is_three_kda_to_one_mla_with_mla_last() -> None:
    assert ModelConfig(num_hidden_layers=8).layer_pattern() == ("kda", "kda", "kda", "mla") * 2
    assert ModelConfig(num_hidden_layers=6).layer_pattern() == ("kda", "kda", "kda", "mla", "kda", "mla")


def test_kimi_linear_48b_has_its_published_number_of_parameters() -> None:
    """49.123 B in all, 3.107 B active without the embedding, counted on the meta device."""
    config = ModelConfig(
        vocab_size=163840,
        hidden_size=2304,
        num_hidden_layers=27,
        kda=VARIANTS["plain"].kda.__class__(num_heads=32, head_dim=128),
        mla=BASE.mla.__class__(
            num_attention_heads=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        intermediate_size=9216,
        moe=MOE.__class__(num_experts=256, num_experts_per_token=8, moe_intermediate_size=1024),
        residual="plain",
    )
    with torch.device("meta"):
        model = Decoder(config)
    assert model.num_parameters() == pytest.approx(49.123e9, rel=1e-4)
    assert model.num_parameters(active=True, embedding=False) == pytest.approx(3.107e9, rel=1e-3)


def test_decode_memory_of_kda_is_constant_and_of_mla_one_latent_a_token() -> None:
    model = build(VARIANTS["kda_only"]).eval()
    cache = model.new_cache()
    model(random_tokens(model, 1, 4), cache=cache)
    after_four = cache.num_bytes()
    model(random_tokens(model, 1, 60), cache=cache)
    assert cache.num_bytes() == after_four


def test_generation_is_reproducible_stops_and_never_yields_forbidden_tokens() -> None:
    model = build(VARIANTS["block_attnres"])
    sampling = SamplingConfig(max_new_tokens=30, temperature=1.5, top_p=1.0, seed=5)
    first = list(generate(model, [1, 2, 3], sampling))
    assert first == list(generate(model, [1, 2, 3], sampling)) and len(first) == 30
    assert list(generate(model, [1, 2, 3], replace(sampling, seed=6))) != first
    assert list(generate(model, [1, 2, 3], sampling, stop=frozenset([first[4]]))) == first[: first.index(first[4])]
    assert set(generate(model, [1, 2, 3], sampling, forbidden=first)).isdisjoint(first)
    assert model.training


def test_greedy_generation_follows_the_argmax_of_the_full_forward() -> None:
    model = build(VARIANTS["experts"])
    tokens = [7, 8]
    for token in generate(model, tokens, SamplingConfig(max_new_tokens=8, temperature=0.0)):
        assert token == int(model.eval()(torch.tensor([tokens]))[0, -1].argmax())
        tokens = [*tokens, token]


def test_wrong_shapes_and_configs_are_refused_with_the_field_and_value() -> None:
    model = build(BASE)
    with pytest.raises(ValueError, match=r"\[batch, time\]"):
        model(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="one packed row"):
        model(torch.zeros(2, 3, dtype=torch.long), cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="layer_types names 1 layers but num_hidden_layers is 4"):
        replace(BASE, layer_types=("kda",))
    with pytest.raises(ValueError, match=r"gate_lower_bound .* 5\.0"):
        replace(BASE.kda, gate_lower_bound=5.0)
    with pytest.raises(ValueError, match="num_experts_per_token"):
        replace(MOE, num_experts_per_token=9)
    with pytest.raises(ValueError, match="at least one token"):
        next(generate(model, [], SamplingConfig()))
