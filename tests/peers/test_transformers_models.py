"""Parity with transformers' kimi_linear and deepseek_v3: same weights, same logits, same gradients, same decoding.

Weights travel through folders written by one side and read by the other. Both compute in float32: logits agree to 1e-5
and gradients to 1e-4 of their norm, which a few hundred float32 roundings explain.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from perilune import hub
from perilune.hub import export
from perilune.model import Decoder, KDAConfig, MLAConfig, ModelConfig, MoEConfig, RopeConfig
from tests.model.small_models import VARIANTS, build, random_tokens, relative_error

transformers = pytest.importorskip("transformers")

KIMI_LINEAR = ModelConfig(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=5,
    layer_types=("kda", "kda", "mla", "kda", "mla"),
    kda=KDAConfig(num_heads=4, head_dim=8),
    mla=MLAConfig(num_attention_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    intermediate_size=64,
    moe=MoEConfig(num_experts=8, num_experts_per_token=2, moe_intermediate_size=16, routed_scaling_factor=2.446),
    residual="plain",
    initializer_range=0.1,
)
YARN = RopeConfig(theta=50_000.0, factor=4.0, original_max_position_embeddings=32)
DEEPSEEK = replace(
    KIMI_LINEAR,
    layer_types=("mla",) * 5,
    kda=KDAConfig(),
    mla=replace(KIMI_LINEAR.mla, q_lora_rank=24, rope=YARN),
    moe=replace(KIMI_LINEAR.moe, num_expert_group=4, topk_group=2),
    rms_norm_eps=1e-6,
)
PEERS = {
    "kimi_linear": KIMI_LINEAR,
    "kimi_linear_dense": replace(KIMI_LINEAR, moe=None),
    "kimi_linear_query_compression": replace(KIMI_LINEAR, mla=replace(KIMI_LINEAR.mla, q_lora_rank=24)),
    "deepseek_v3_yarn": DEEPSEEK,
    "deepseek_v3_rope_no_query_compression": replace(
        DEEPSEEK, mla=replace(DEEPSEEK.mla, q_lora_rank=None, rope=RopeConfig(theta=1000.0))
    ),
    "deepseek_v3_halves": replace(DEEPSEEK, mla=replace(DEEPSEEK.mla, rope=replace(YARN, interleaved=False))),
}


def exported(config: ModelConfig, folder: Path) -> tuple[Decoder, "transformers.PreTrainedModel"]:
    """Our model, and transformers' reading of the folder we write."""
    ours = build(config)
    with torch.no_grad():
        for name, buffer in ours.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    hub.save_pretrained(ours, folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return ours, theirs


@pytest.mark.parametrize("peer", PEERS)
def test_logits_and_gradients_equal_transformers(peer: str, tmp_path: Path) -> None:
    ours, theirs = exported(PEERS[peer], tmp_path / "model")
    tokens = random_tokens(ours, 2, 70)
    logits = ours(tokens)
    assert relative_error(logits, theirs(tokens).logits) < 1e-5
    targets = random_tokens(ours, 2, 70, seed=1)
    ours.loss(tokens, targets).backward()
    torch.nn.functional.cross_entropy(
        theirs(tokens).logits.flatten(0, 1), targets.flatten(), reduction="sum"
    ).backward()
    # The gradients of transformers' modules, carried to our names through the same folder format.
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    theirs.save_pretrained(tmp_path / "gradients")
    gradients = hub.from_pretrained(tmp_path / "gradients")
    for (name, ours_p), theirs_p in zip(ours.named_parameters(), gradients.parameters(), strict=True):
        assert relative_error(ours_p.grad, theirs_p) < 1e-4, name


@pytest.mark.parametrize("peer", ["kimi_linear", "deepseek_v3_yarn"])
def test_decoding_with_a_cache_equals_transformers(peer: str, tmp_path: Path) -> None:
    ours, theirs = exported(PEERS[peer], tmp_path / "model")
    tokens = random_tokens(ours, 2, 12)
    cache = ours.eval().new_cache()
    their_cache = None
    with torch.no_grad():
        for piece in (tokens[:, :6], *tokens[:, 6:].split(1, dim=1)):
            output = theirs(piece, past_key_values=their_cache, use_cache=True)
            their_cache = output.past_key_values
            assert relative_error(ours(piece, cache=cache), output.logits) < 1e-5


@pytest.mark.parametrize("peer", PEERS)
def test_folders_round_trip_bit_for_bit_both_ways(peer: str, tmp_path: Path) -> None:
    ours, theirs = exported(PEERS[peer], tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    back = hub.from_pretrained(tmp_path / "theirs")
    assert replace(back.config, layer_types=ours.config.layer_pattern()) == replace(
        ours.config, layer_types=ours.config.layer_pattern()
    )
    for name, tensor in ours.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


@pytest.mark.parametrize("variant", ["block_attnres_even", "attnres", "bounded_full_rank_gate", "rope_halves"])
def test_what_kimi_linear_cannot_say_survives_our_own_round_trip(variant: str, tmp_path: Path) -> None:
    variants = {**VARIANTS, "block_attnres_even": replace(VARIANTS["block_attnres"], block_sublayers=4)}
    model = build(replace(variants[variant], compute_dtype="float32"))
    hub.save_pretrained(model, tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "perilune"
    back = hub.from_pretrained(tmp_path / "model")
    tokens = random_tokens(model, 1, 9)
    assert torch.equal(back(tokens), model(tokens))


def test_block_size_is_written_in_layers_and_an_odd_one_in_sublayers(tmp_path: Path) -> None:
    even = Decoder(replace(KIMI_LINEAR, residual="block_attnres", block_sublayers=6))
    hub.save_pretrained(even, tmp_path / "even")
    assert json.loads((tmp_path / "even" / "config.json").read_text())["attn_res_block_size"] == 3
    names = load_file(tmp_path / "even" / "model.safetensors")
    assert names["model.layers.0.self_attention_res_proj.weight"].shape == (1, 32)
    odd = Decoder(replace(KIMI_LINEAR, residual="block_attnres", block_sublayers=3))
    hub.save_pretrained(odd, tmp_path / "odd")
    assert json.loads((tmp_path / "odd" / "config.json").read_text())["attn_res_block_sublayers"] == 3
    assert hub.from_pretrained(tmp_path / "odd").config.block_sublayers == 3


def test_sharded_folders_are_read(tmp_path: Path) -> None:
    ours = build(KIMI_LINEAR)
    hub.save_pretrained(ours, tmp_path / "model", max_shard_bytes=20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    tokens = random_tokens(ours, 1, 5)
    assert relative_error(ours(tokens), theirs(tokens).logits) < 1e-5
    assert torch.equal(hub.from_pretrained(tmp_path / "model")(tokens), ours(tokens))


def test_broken_folders_give_one_clear_error(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    with pytest.raises(hub.FormatError, match=r"no config\.json"):
        hub.from_pretrained(folder)
    hub.save_pretrained(Decoder(KIMI_LINEAR), folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(hub.FormatError, match="too short for its header"):
        hub.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(hub.FormatError, match="'llama' is not supported"):
        hub.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(hub.FormatError, match="not valid JSON"):
        hub.from_pretrained(folder)


def test_folders_of_a_fresh_transformers_model_are_read(tmp_path: Path) -> None:
    """Their own keys only: layer_types, mlp_layer_types, linear_head_dim; nothing that we wrote."""
    config = transformers.KimiLinearConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=12, num_local_experts=8, num_experts_per_tok=2, linear_head_dim=8, linear_num_heads=4,
        layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
        mlp_layer_types=["dense", "dense", "sparse", "sparse"], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.KimiLinearForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    assert "linear_attn_config" not in json.loads((tmp_path / "config.json").read_text())
    ours = hub.from_pretrained(tmp_path)
    assert ours.config.layer_pattern() == ("kda", "mla", "kda", "mla")
    assert [ours.config.is_moe_layer(index) for index in range(4)] == [False, False, True, True]
    tokens = random_tokens(ours, 1, 40)
    assert relative_error(ours(tokens), theirs(tokens).logits) < 1e-5


@pytest.mark.parametrize("peer", ["kimi_linear", "deepseek_v3_yarn"])
def test_tied_heads_stay_tied_on_both_sides(peer: str, tmp_path: Path) -> None:
    ours, theirs = exported(replace(PEERS[peer], tie_word_embeddings=True), tmp_path / "ours")
    tokens = random_tokens(ours, 1, 20)
    assert relative_error(ours(tokens), theirs(tokens).logits) < 1e-5
    theirs.save_pretrained(tmp_path / "theirs")
    back = hub.from_pretrained(tmp_path / "theirs")
    assert back.lm_head is None
    assert torch.equal(back(tokens), ours(tokens))


@pytest.mark.parametrize(
    ("peer", "change", "message"),
    [
        ("kimi_linear", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense"] * 2 + ["sparse"]}, "mlp_layer_types"),
        ("kimi_linear", {"layer_types": ["sliding"] * 5}, "layer_types is"),
        ("deepseek_v3_yarn", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (
            "deepseek_v3_yarn",
            {"rope_parameters": {"rope_type": "yarn", "attention_factor": 1.3}},
            "attention_factor=1.3",
        ),
        ("deepseek_v3_yarn", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ],
)
def test_configs_that_ask_for_another_computation_are_refused(
    peer: str, change: dict, message: str, tmp_path: Path
) -> None:
    hub.save_pretrained(Decoder(PEERS[peer]), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(hub.FormatError, match=message):
        hub.from_pretrained(tmp_path)


@pytest.mark.parametrize(("mscale", "mscale_all_dim"), [(1.0, 0.0), (0.707, 0.707), (0.707, 1.0)])
def test_yarn_magnitudes_equal_transformers(mscale: float, mscale_all_dim: float, tmp_path: Path) -> None:
    rope = replace(YARN, mscale=mscale, mscale_all_dim=mscale_all_dim)
    ours, theirs = exported(replace(DEEPSEEK, mla=replace(DEEPSEEK.mla, rope=rope)), tmp_path)
    tokens = random_tokens(ours, 1, 60)
    assert relative_error(ours(tokens), theirs(tokens).logits) < 1e-5


def test_a_run_or_foreign_folder_is_never_overwritten_and_an_older_export_is(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"name": "nano"}')
    with pytest.raises(hub.FormatError, match="other than an exported model"):
        hub.save_pretrained(Decoder(KIMI_LINEAR), run)
    assert [path.name for path in run.iterdir()] == ["config.json"]
    hub.save_pretrained(Decoder(KIMI_LINEAR, seed=0), tmp_path / "model")
    hub.save_pretrained(Decoder(DEEPSEEK, seed=1), tmp_path / "model")
    assert hub.from_pretrained(tmp_path / "model").config.mla.rope is not None


def test_a_save_that_breaks_off_leaves_no_folder_that_looks_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.save_pretrained(Decoder(KIMI_LINEAR, seed=0), tmp_path / "model")
    real = export.os.replace
    monkeypatch.setattr(export.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(hub.FormatError, match="No space left"):
        hub.save_pretrained(Decoder(KIMI_LINEAR, seed=1), tmp_path / "model")
    with pytest.raises(hub.FormatError, match=r"no config\.json"):
        hub.from_pretrained(tmp_path / "model")
    monkeypatch.setattr(export.os, "replace", real)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "temporary files were left behind"
