"""What holds for every decoder, whatever its layers: documents are separate, decoding equals the full forward."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from perilune.model import Decoder, ModelConfig, SamplingConfig, generate
from perilune.model.head import cross_entropy_sum
from perilune.optim.plan import plan_parameters
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


def test_hooks_and_options_of_the_embedding_are_kept() -> None:
    model = build(BASE)
    tokens = torch.tensor([[0, 1, 2]])
    plain = model(tokens)
    handle = model.embed_tokens.register_forward_hook(lambda module, inputs, output: 2 * output)
    assert relative_error(model(tokens), plain) > 0.01
    handle.remove()
    assert torch.equal(model(tokens), plain)
    model.embed_tokens.padding_idx = 0
    model(tokens).sum().backward()
    gradient = model.embed_tokens.weight.grad
    assert gradient is not None and not gradient[0].any() and gradient[1].any()


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
    hidden = model.hidden(tokens)
    assert hidden.dtype == torch.bfloat16
    loss = model.loss(tokens, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}
    exact = Decoder(replace(config, compute_dtype="float32"), seed=0).hidden(tokens)
    # Each of 8 sublayers rounds a handful of times to 8 bits: about sqrt(8 * 10) * 2^-9 of the norm, and not less than
    # one rounding, or nothing was computed in bf16.
    assert 2**-9 < relative_error(hidden.float(), exact) < 10 * 2**-8


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

    model = build(VARIANTS["mla_only_tied"]).eval()
    cache = model.new_cache()
    model(random_tokens(model, 1, 500), cache=cache)
    latent_bytes = 8 * (model.config.mla.kv_lora_rank + model.config.mla.qk_rope_head_dim)
    # Four layers; a buffer that doubles holds at most twice what is used, as keys of two heads alone would take.
    assert 4 * 500 * latent_bytes <= cache.num_bytes() <= 2 * 4 * 500 * latent_bytes


def test_inits_follow_kimi_linear() -> None:
    config = replace(BASE, hidden_size=256, kda=replace(BASE.kda, num_heads=16, head_dim=32), initializer_range=0.02)
    for bound in (None, -5.0):
        layer = Decoder(replace(config, kda=replace(config.kda, gate_lower_bound=bound)), seed=0).layers[0]
        attention = layer.self_attn
        rate = attention.A_log.exp()
        if bound is None:
            assert rate.min() >= 1.0 and rate.max() <= 16.0 and rate.std() > 2.0
        else:
            assert not attention.A_log.any()
        time_step = torch.nn.functional.softplus(attention.dt_bias)
        assert time_step.min() >= 1e-4 and time_step.max() <= 0.1 + 1e-6
        # log-uniform between 1e-3 and 1e-1: the median is 1e-2.
        assert 5e-3 < time_step.median() < 2e-2
        assert attention.conv_weight.abs().max() <= 0.5
        assert attention.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert (attention.o_norm.weight == 1).all() and (layer.input_layernorm.weight == 1).all()
    mixed = Decoder(replace(config, residual="attnres"), seed=0)
    queries = [value for name, value in mixed.named_parameters() if name.endswith(".query")]
    assert len(queries) == 2 * config.num_hidden_layers + 1
    assert not any(query.any() for query in queries)


def test_every_parameter_goes_to_the_optimizer_the_recipe_gives_it() -> None:
    config = replace(
        BASE, compute_dtype="float32", moe=MOE, residual="attnres", mla=VARIANTS["query_compression_yarn"].mla
    )
    model = Decoder(config, seed=0)
    plan = {entry.name: type(entry.layout).__name__ for entry in plan_parameters(model)}
    decays = {entry.name for entry in plan_parameters(model) if getattr(entry.layout, "weight_decay", True)}
    kda, mla = "layers.0.self_attn.", "layers.3.self_attn."
    expected = {
        **{f"{kda}{name}_proj.weight": "RowBlocks" for name in "qkv"},
        **{f"{kda}{name}_proj.weight": "Whole" for name in ("f_a", "f_b", "g_a", "g_b", "b")},
        **{f"{kda}{name}": "Adam" for name in ("conv_weight", "A_log", "dt_bias", "o_norm.weight")},
        **{f"{prefix}o_proj.weight": "ColumnBlocks" for prefix in (kda, mla)},
        **{f"{mla}{name}.weight": "RowBlocks" for name in ("q_b_proj", "kv_b_proj")},
        **{f"{mla}{name}.weight": "Whole" for name in ("q_a_proj", "kv_a_proj_with_mqa")},
        **{f"{mla}{name}.weight": "Adam" for name in ("q_a_layernorm", "kv_a_layernorm")},
        "layers.1.mlp.experts.gate_up_proj": "Stacked",
        "layers.1.mlp.experts.down_proj": "Stacked",
        "layers.1.mlp.gate.weight": "Whole",
        "layers.1.mlp.shared_experts.up_proj.weight": "Whole",
        "layers.0.mlp.gate_proj.weight": "Whole",
        "layers.0.attn_res.query": "Adam",
        "out_res.gain": "Adam",
        "embed_tokens.weight": "Adam",
        "lm_head.weight": "Adam",
        "norm.weight": "Adam",
    }
    assert {name: plan[name] for name in expected} == expected
    undecayed = {name.split(".")[-1] for name in plan if name not in decays}
    assert undecayed == {"A_log", "dt_bias", "conv_weight", "query", "gain"}


def test_recorded_max_logits_are_those_of_training_forwards_only() -> None:
    config = replace(VARIANTS["mla_only_tied"], compute_dtype="float32")
    model = build(config)
    tokens = random_tokens(model, 2, 9)
    assert model.max_logits().shape == (4, 2) and (model.max_logits() == -torch.inf).all()
    model.eval()(tokens)
    assert (model.max_logits() == -torch.inf).all()
    model.train()(tokens)
    first_layer = model.layers[0].self_attn
    x = model.layers[0].input_layernorm(model.embed_tokens(tokens))
    q = first_layer._queries(x)
    latent, k_rope = first_layer.kv_a_proj_with_mqa(x).split([12, 4], dim=-1)
    k, _ = first_layer._expand(first_layer.kv_a_layernorm(latent), k_rope)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * first_layer.scale
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = logits.masked_fill(~causal, -torch.inf).amax(dim=(0, 2, 3))
    torch.testing.assert_close(model.max_logits()[0], expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpointed_layers_give_the_same_gradients_counts_and_maxima(variant: str) -> None:
    """Non-reentrant activation checkpointing over whole decoder layers."""
    results = []
    for checkpointed in (False, True):
        model = build(VARIANTS[variant])
        if checkpointed:
            for layer in model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        tokens, targets = random_tokens(model, 1, 24), random_tokens(model, 1, 24, seed=1)
        model.loss(tokens, targets, torch.tensor([0, 10, 24])).backward()
        counts = [router.counts.clone() for router in model._routers()]
        results.append([*(p.grad for p in model.parameters()), model.max_logits(), *counts])
    assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("variant", VARIANTS)
def test_models_cast_as_a_whole_still_run(variant: str, dtype: torch.dtype) -> None:
    model = build(replace(VARIANTS[variant], compute_dtype="float32")).to(dtype)
    model.set_compute_dtype("bfloat16" if dtype == torch.bfloat16 else "float64")
    tokens = random_tokens(model, 1, 20)
    model.loss(tokens, tokens).backward()
    biases = [router.e_score_correction_bias.dtype for router in model._routers()]
    assert all(bias in (torch.float32, torch.float64) for bias in biases)


def test_validation_does_not_pay_for_the_gradients_of_the_head() -> None:
    class CountMatmuls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            CountMatmuls.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
            return func(*args, **(kwargs or {}))

    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    targets = torch.randint(6, (8,))
    with CountMatmuls(), torch.no_grad():
        without = cross_entropy_sum(hidden, weight, targets)
    assert CountMatmuls.count == 1 and not without.requires_grad
    assert torch.equal(without, cross_entropy_sum(hidden, weight, targets).detach())


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
    with pytest.raises(ValueError, match=r"ids in \[0, 61\)"):
        next(generate(model, [61], SamplingConfig()))
    with pytest.raises(ValueError, match="nothing is left to sample"):
        next(generate(model, [1], SamplingConfig(), forbidden=range(61)))
    for field, value in (("residual", "mhc"), ("compute_dtype", "fp32"), ("layer_types", ("kda", "swa", "kda", "mla"))):
        with pytest.raises(ValueError, match=f"model.{field} .* expected"):
            replace(BASE, **{field: value})
    with pytest.raises(ValueError, match=r"kda\.num_heads must be at least 1, got 0"):
        replace(BASE.kda, num_heads=0)
    for setting in ({"temperature": float("nan")}, {"top_p": 0.0}, {"top_k": -1}, {"seed": 2**64}):
        with pytest.raises(ValueError, match=next(iter(setting))):
            SamplingConfig(**setting)
