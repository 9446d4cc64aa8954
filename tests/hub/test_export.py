"""An exported folder is complete, says what is true, comes back bit for bit; what a target cannot hold is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from perilune import hub
from perilune.data import Tokenizer
from perilune.data.images import ProcessorConfig, image_media
from perilune.data.media import media_tokens, pad_positions
from perilune.hub import model_card, tensor_files
from perilune.hub.export import generation_config
from perilune.hub.model_card import RunFacts
from perilune.hub.opened import is_chat_run
from perilune.model import Decoder, KDAConfig, MediaInput, ModelConfig, RopeConfig, SamplingConfig, generate
from tests.hub.released import TEXTS
from tests.hub.test_modeling import KINDS, MLA_ROPE, VISION, randomized
from tests.model.small_models import BASE, MOE, random_tokens

transformers = pytest.importorskip("transformers")

TOKENIZER = Tokenizer.train(TEXTS, 400)


def small(config: ModelConfig) -> ModelConfig:
    return replace(config, vocab_size=400, compute_dtype="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_export_and_import_bring_back_every_bit(kind: str, tmp_path: Path) -> None:
    model = randomized(small(KINDS[kind]))
    exported = hub.export_model(model, tmp_path / "out", tokenizer=TOKENIZER, max_shard_bytes=30_000)
    imported = hub.import_folder(tmp_path / "out", tmp_path / "in", max_shard_bytes=50_000)
    assert imported.target == exported.target and imported.num_parameters == model.num_parameters()
    opened = hub.open_folder(tmp_path / "in")
    expected = replace(model.config, layer_types=model.config.layer_pattern())
    found = opened.model.config
    assert replace(found, layer_types=found.layer_pattern()) == _as_written(expected)
    for name, value in model.state_dict().items():
        assert torch.equal(opened.model.state_dict()[name], value), name
    assert opened.tokenizer.fingerprint == TOKENIZER.fingerprint
    names = [
        {name for file in (tmp_path / part).glob("*.safetensors") for name in load_file(file)} for part in ("out", "in")
    ]
    assert names[0] == names[1]


def _as_written(config: ModelConfig) -> ModelConfig:
    """Without what a folder need not say: sizes of blocks, or of KDA layers, where there are none."""
    if config.residual != "block_attnres":
        config = replace(config, block_sublayers=ModelConfig.block_sublayers)
    return replace(config, kda=KDAConfig()) if hub.choose(config) in ("deepseek_v3", "kimi_k25") else config


def test_the_folder_holds_everything_transformers_asks_for(tmp_path: Path) -> None:
    model = Decoder(small(replace(BASE, vision=VISION)), seed=0)
    hub.export_model(
        model, tmp_path / "out", tokenizer=TOKENIZER, chat_template=hub.builtin_template(), card="# card\n",
        processor=ProcessorConfig(max_patches=64, max_patches_per_side=16),
    )  # fmt: skip
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "README.md", "chat_template.jinja", "config.json", "configuration_perilune.py", "generation_config.json",
        "model.safetensors", "modeling_perilune.py", "preprocessor_config.json", "special_tokens_map.json",
        "tokenizer.json", "tokenizer_config.json", "video_preprocessor_config.json", "vision_perilune.py",
    }  # fmt: skip
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    text = "<|im_user|>def f():\n  中文<|im_end|>"
    assert theirs.encode(text, add_special_tokens=False) == TOKENIZER.encode(text, allow_special=True)
    assert theirs("import os")["input_ids"] == [TOKENIZER.bos_id, *TOKENIZER.encode("import os")], "as it was trained"
    chat = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=True)["input_ids"]
    assert TOKENIZER.bos_id not in chat
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("[BOS]", "[EOS]", "[PAD]")
    turn = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert turn.startswith("<|im_user|>user<|im_middle|>hi<|im_end|>")
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert settings.eos_token_id == [TOKENIZER.eos_id, TOKENIZER.special_ids["<|im_end|>"]]
    opened = hub.open_folder(tmp_path / "out")
    assert opened.processor == ProcessorConfig(max_patches=64, max_patches_per_side=16)
    assert opened.chat_template is None, "our own template needs no sandbox"
    assert opened.stop_ids == set(generation_config(TOKENIZER)["eos_token_id"])


@pytest.mark.parametrize("kind", ["seeing_kda_attnres", "seeing_deepseek"])
def test_the_card_shows_how_transformers_looks_at_a_picture(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The program of the card, run as it stands; what it prints is what Perilune says about the picture."""
    pytest.importorskip("torchvision")
    model = randomized(small(KINDS[kind]))
    target = hub.choose(model.config)
    card = model_card.model_card("seeing", model, target, RunFacts())
    settings = ProcessorConfig(max_patches=64, max_patches_per_side=16)
    hub.export_model(model, tmp_path / "out", tokenizer=TOKENIZER, processor=settings, card=card)
    monkeypatch.chdir(tmp_path / "out")
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save("picture.png")
    program = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), flags=re.DOTALL)[0]
    exec(compile(program, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    media = image_media(pixels, settings)
    prompt = [TOKENIZER.bos_id, *media_tokens(TOKENIZER, media), *TOKENIZER.encode("What is this?")]
    positions = torch.from_numpy(pad_positions(prompt, TOKENIZER))
    shown = MediaInput(positions=positions, pixels=torch.from_numpy(media.pixels), grids=(media.grid,))
    ends = set(generation_config(TOKENIZER)["eos_token_id"])
    answer = list(generate(model, prompt, SamplingConfig(max_new_tokens=64, temperature=0.0), media=shown))
    stop = next((place + 1 for place, token in enumerate(answer) if token in ends), len(answer))
    assert printed.rstrip("\n").endswith(TOKENIZER.decode(answer[:stop]).rstrip("\n"))


REFUSALS = {
    "kimi_linear": {
        "vision tower": replace(BASE, vision=VISION),
        "residual='block_attnres'": KINDS["block_attnres"],
        "residual='scalars'": KINDS["scalars"],
        "kda.decay='head'": KINDS["one_decay_a_head"],
        "kda.gate_lower_bound=-5.0": KINDS["bounded_full_rank_gate"],
        "rotary positions": MLA_ROPE,
        "num_shared_experts=0": KINDS["no_shared_experts_in_groups"],
    },
    "kimi_k25": {
        "no vision tower": MLA_ROPE,
        "KDA layers": replace(BASE, vision=VISION),
        "no positions": replace(BASE, layer_types=("mla",) * 4, vision=VISION),
        "residual='attnres'": replace(MLA_ROPE, vision=VISION, residual="attnres"),
        "square": replace(MLA_ROPE, vision=replace(VISION, pos_emb_width=4)),
    },
    "deepseek_v3": {"vision tower": replace(MLA_ROPE, vision=VISION), "KDA layers": BASE},
}


@pytest.mark.parametrize(
    ("target", "reason"), [(target, reason) for target, reasons in REFUSALS.items() for reason in reasons]
)
def test_a_target_that_cannot_hold_a_model_says_why_and_what_can(target: str, reason: str, tmp_path: Path) -> None:
    model = Decoder(small(REFUSALS[target][reason]))
    with pytest.raises(
        hub.FormatError, match=f"{target} cannot hold this model: .*{re.escape(reason)}.* Use --to (.*)"
    ) as e:
        hub.export_model(model, tmp_path / "out", target=target, tokenizer=TOKENIZER)
    assert not (tmp_path / "out").exists()
    fitting = re.findall(r"Use --to (\w+)", str(e.value))[0]
    assert hub.export_model(model, tmp_path / "out", target=fitting, tokenizer=TOKENIZER).target == fitting


def test_every_target_is_chosen_by_default_where_it_fits() -> None:
    chosen = {kind: hub.choose(config) for kind, config in KINDS.items()}
    assert chosen["plain"] == chosen["experts"] == "kimi_linear"
    assert chosen["deepseek"] == "deepseek_v3" and chosen["seeing_deepseek"] == "kimi_k25"
    assert chosen["attnres"] == chosen["seeing_kda_attnres"] == chosen["one_decay_a_head"] == "perilune"
    with pytest.raises(hub.FormatError, match="'llama' is not known"):
        hub.choose(BASE, "llama")


@pytest.mark.parametrize("kind", ["plain", "deepseek"])
def test_our_own_type_holds_what_a_public_one_holds_too(kind: str, tmp_path: Path) -> None:
    model = randomized(small(KINDS[kind]))
    hub.export_model(model, tmp_path / "out", target="perilune", tokenizer=TOKENIZER)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    tokens = random_tokens(model, 1, 12)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)
    assert torch.equal(hub.from_pretrained(tmp_path / "out")(tokens), model(tokens))


def test_an_older_export_of_another_kind_leaves_nothing_behind(tmp_path: Path) -> None:
    seeing = Decoder(small(replace(BASE, vision=VISION)))
    hub.export_model(seeing, tmp_path / "out", tokenizer=TOKENIZER, card="old", max_shard_bytes=20_000)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    hub.export_model(Decoder(small(BASE)), tmp_path / "out", tokenizer=TOKENIZER)
    left = {file.name for file in (tmp_path / "out").iterdir()}
    assert "notes.txt" in left and len([name for name in left if name.endswith(".safetensors")]) == 1
    assert not left & {"README.md", "preprocessor_config.json", tensor_files.INDEX}


def test_weights_of_a_folder_go_into_the_same_model_only(tmp_path: Path) -> None:
    model = randomized(small(KINDS["experts"]))
    hub.export_model(model, tmp_path / "out", tokenizer=TOKENIZER)
    fresh = Decoder(small(KINDS["experts"]), seed=3)
    hub.load_folder(fresh, tmp_path / "out")
    tokens = random_tokens(model, 1, 9)
    assert torch.equal(fresh.eval()(tokens), model(tokens))
    rope = replace(BASE.mla, rope=RopeConfig())
    hub.load_folder(Decoder(small(replace(KINDS["experts"], mla=rope))), tmp_path / "out")  # positions have no weights
    with pytest.raises(hub.FormatError, match="holds another model"):
        hub.load_folder(Decoder(small(BASE)), tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------------------
# The card

RUN = RunFacts(
    config={
        "name": "nano", "seed": 7, "start_from": None, "optimizer": {"kind": "muonclip", "lr": 0.003},
        "data": {"corpus": {"source": ["a|b.jsonl"], "valid_fraction": 0.05}, "vocab_size": 4096, "seq_len": 512},
        "trainer": {"steps": 20, "precision": "bf16"},
    },
    records=(
        {"kind": "train", "step": 10, "loss": 3.5, "bits_per_byte": 1.75, "tokens": 1234567},
        {"kind": "valid", "step": 10, "loss": 3.25, "bits_per_byte": 1.625},
    ),
    environment={"machine": "x86_64, 2 cores", "commit": "abc1234"},
)  # fmt: skip


def test_the_card_says_what_the_run_says_and_no_other_number() -> None:
    model = Decoder(small(replace(BASE, moe=MOE)))
    card = model_card.model_card("nano", model, "kimi_linear", RUN)
    for part in ("## Data", "## Recipe", "## Results", "## Limits", "1,234,567", "3.2500", "1.6250", "10 of 20",
                 "muonclip", "0.003", "abc1234", "512 tokens", "`a\\|b.jsonl`", "| vLLM | same names, not run here |",
                 "| SGLang | same names, not run here |", f"{model.num_parameters():,}"):  # fmt: skip
        assert part in card, part
    known = (
        json.dumps([RUN.config, RUN.records, RUN.environment]) + f"{model.num_parameters():,}{model.config!r}" + "5.0%"
    )
    known += (
        f"{model.num_parameters(active=True):,} 1,234,567 3.2500 1.6250 3.5000 1.7500 {model.config.layer_pattern()!r}"
    )
    body = re.sub(r"```.*?```", "", card, flags=re.DOTALL)
    for number in re.findall(r"\d[\d,.]*\d|\d", body):
        layers = str(len(model.config.layer_pattern())), "3", "1"
        assert number in known or number in layers, f"{number} is nowhere in the run's files"


def test_a_card_without_records_says_that_nothing_was_measured() -> None:
    card = model_card.model_card("x", Decoder(small(KINDS["attnres"])), "perilune", RunFacts())
    assert "Nothing was measured." in card and "not exported from a run" in card
    assert "| vLLM | has no such type; not run here |" in card and "trust_remote_code=True" in card


def test_facts_of_a_broken_folder_are_what_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "valid", "loss": 1.0}\n{"kind": "va')
    found = RunFacts.of(tmp_path)
    assert found.config == {} and found.last("valid") == {"kind": "valid", "loss": 1.0}


# --- dtype and chat ---------------------------------------------------------------------------------------------------


def test_weights_stored_in_half_precision_are_opened_so_bit_for_bit_and_in_float32_by_default(tmp_path: Path) -> None:
    model = randomized(small(replace(BASE, moe=MOE)))
    hub.export_model(model, tmp_path / "wide", tokenizer=TOKENIZER)
    stored = {
        name: tensor.to(torch.bfloat16) for name, tensor in load_file(tmp_path / "wide/model.safetensors").items()
    }
    save_file(stored, tmp_path / "wide/model.safetensors")
    wide, half = (hub.open_folder(tmp_path / "wide", dtype=dtype).model for dtype in ("float32", "bfloat16"))
    assert {each.dtype for each in wide.parameters()} == {torch.float32}
    assert (wide.compute_dtype, half.compute_dtype) == (torch.float32, torch.bfloat16)
    kinds = {name: each.dtype for name, each in half.named_parameters()}
    assert kinds["embed_tokens.weight"] == kinds["layers.1.mlp.experts.down_proj"] == torch.bfloat16
    assert kinds["layers.1.mlp.gate.weight"] == kinds["norm.weight"] == torch.float32  # as a server keeps them
    halves = {dtype: sum(p.numel() for p in half.parameters() if p.dtype == dtype) for dtype in set(kinds.values())}
    assert halves[torch.bfloat16] > 20 * halves[torch.float32]
    for name, value in wide.state_dict().items():
        assert torch.equal(half.state_dict()[name].float(), value), name
    with torch.no_grad():
        tokens = random_tokens(model, 1, 9)
        wide.set_compute_dtype("bfloat16")
        assert torch.equal(half(tokens), wide(tokens))  # rounded once, or at every use


@pytest.mark.parametrize("is_chat", [True, False])
def test_an_export_says_whether_it_was_trained_to_chat_and_an_import_of_it_too(is_chat: bool, tmp_path: Path) -> None:
    model = Decoder(small(BASE), seed=0)
    template = hub.builtin_template()
    hub.export_model(model, tmp_path / "out", tokenizer=TOKENIZER, chat_template=template, is_chat=is_chat)
    hub.import_folder(tmp_path / "out", tmp_path / "in")
    for folder in ("out", "in"):
        opened = hub.open_folder(tmp_path / folder)
        assert opened.is_chat == is_chat and opened.chat_template is None
        assert transformers.AutoTokenizer.from_pretrained(tmp_path / folder, trust_remote_code=True).chat_template
    (tmp_path / "in" / "chat_template.jinja").write_text("{{ messages }}")
    assert hub.open_folder(tmp_path / "in").is_chat, "whoever brings a template of its own chats"


def test_the_card_of_a_chat_model_says_so_and_its_program_asks_with_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = randomized(small(KINDS["plain"]))
    config = {"data": {"chat": {"sources": ["chats.jsonl"]}}}
    facts = RunFacts(config=config, is_chat=True)
    card = model_card.model_card("talker", model, "kimi_linear", facts)
    assert "- conversational" in card and "A chat model of" in card and "perilune chat ." in card
    assert "not to follow instructions" not in card
    plain = model_card.model_card("reader", model, "kimi_linear", RunFacts(config={"data": {}}))
    assert "conversational" not in plain and "not to follow instructions" in plain
    hub.export_model(
        model, tmp_path / "out", tokenizer=TOKENIZER, chat_template=hub.builtin_template(), card=card, is_chat=True
    )  # fmt: skip
    monkeypatch.chdir(tmp_path / "out")
    program = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)[0]
    exec(compile(program, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("<|im_user|>user<|im_middle|>Hello<|im_end|>")


def test_runs_of_dialogues_and_of_rewards_are_chat_runs(tmp_path: Path) -> None:
    assert not is_chat_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"data": {"chat": None}}))
    assert not is_chat_run(tmp_path) and not RunFacts.of(tmp_path).is_chat
    (tmp_path / "config.json").write_text(json.dumps({"data": {"chat": {"sources": []}}}))
    assert is_chat_run(tmp_path) and RunFacts.of(tmp_path).is_chat
    (tmp_path / "config.json").write_text("broken")
    assert not is_chat_run(tmp_path)
    (tmp_path / "rl.json").write_text("{}")
    assert is_chat_run(tmp_path)
