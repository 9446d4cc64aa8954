"""Released folders become folders of ours: names, keys, four bits, vocabulary; whatever is wrong is named."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from perilune import hub
from perilune.hub import kimi_k25, packed_int4, tensor_files
from perilune.hub.weights import model_config, open_tensors, read_config
from perilune.model import Decoder
from tests.hub import released
from tests.model.small_models import random_tokens, relative_error

transformers = pytest.importorskip("transformers")

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A released Kimi-Linear, and beside it, in `imported`, what we make of it."""
    folder = tmp_path_factory.mktemp("linear") / "Kimi-Linear-48B-A3B-Instruct"
    released.kimi_linear(folder)
    (folder / "README.md").write_text("# What its authors say\n")
    (folder / "modeling_kimi.py").write_text("raise SystemExit('run')\n")
    hub.import_folder(folder, folder.parent / "imported")
    return folder


@pytest.fixture(scope="module")
def k25(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("k25") / "Kimi-K2.5"
    plain = released.kimi_k25(folder)
    hub.import_folder(folder, folder.parent / "imported")
    return folder, plain


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_an_imported_kimi_linear_computes_what_transformers_computes_of_the_released_one(linear: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(linear, dtype=torch.float32, attn_implementation="eager")
    opened = hub.open_folder(linear.parent / "imported")
    assert opened.model.config.layer_pattern() == ("kda", "kda", "kda", "mla", "mla")
    tokens = random_tokens(opened.model, 2, 40)
    with torch.no_grad():
        assert relative_error(opened.model(tokens), theirs(tokens).logits) < 1e-5


def test_every_number_of_a_released_kimi_linear_arrives_with_its_dtype(linear: Path) -> None:
    before, after = stored(linear), stored(linear.parent / "imported")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    config = read_config(linear.parent / "imported")
    assert config["model_type"] == "kimi_linear" and config["dtype"] == "bfloat16"
    assert config["model_max_length"] == 1048576 and config["eos_token_id"] == 482


def test_what_belongs_to_the_model_comes_along_and_its_code_does_not(linear: Path) -> None:
    imported = linear.parent / "imported"
    assert (imported / "README.md").read_text() == "# What its authors say\n"
    assert "{{ m.role }}" in (imported / "chat_template.jinja").read_text()
    assert not (imported / "modeling_kimi.py").exists()
    opened = hub.open_folder(imported)
    assert opened.chat_template is not None and 482 in opened.stop_ids
    assert opened.tokenizer.special_ids["<|im_middle|>"] == 497 and opened.tokenizer.pad_id == 511
    text = "月之暗面 reads 🚀\n\n  it's"
    assert opened.tokenizer.decode(opened.tokenizer.encode(text)) == text
    theirs = transformers.AutoTokenizer.from_pretrained(imported)
    assert theirs.encode(text, add_special_tokens=False) == opened.tokenizer.encode(text)


def test_the_imported_folder_runs_in_transformers_both_ways(linear: Path) -> None:
    imported = linear.parent / "imported"
    native = transformers.AutoModelForCausalLM.from_pretrained(imported, dtype=torch.float32)
    carried = transformers.AutoModelForCausalLM.from_pretrained(imported, dtype=torch.float32, trust_remote_code=True)
    assert type(native) is not type(carried)
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        assert relative_error(carried(tokens).logits, native(tokens).logits) < 1e-5


def test_keys_as_transformers_writes_them_and_flat_convolutions_are_imported(linear: Path, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(linear, dtype=torch.float32)
    theirs.save_pretrained(tmp_path / "theirs")
    assert "layer_types" in read_config(tmp_path / "theirs")
    hub.import_folder(tmp_path / "theirs", tmp_path / "imported")
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "config.json").write_text(json.dumps(released.LINEAR))
    tensors = stored(linear)
    save_file({n: t.squeeze(1) if "conv1d" in n else t for n, t in tensors.items()}, flat / "model.safetensors")
    hub.import_folder(flat, tmp_path / "from_flat")
    tokens = torch.arange(20)[None]
    ours = hub.from_pretrained(linear.parent / "imported")(tokens)
    assert torch.equal(hub.from_pretrained(tmp_path / "imported")(tokens), ours)
    assert torch.equal(hub.from_pretrained(tmp_path / "from_flat")(tokens), ours)


# ---------------------------------------------------------------------------------------------------------------------
# Kimi K2.5, four bits


def test_experts_in_four_bits_are_unpacked_and_nothing_else_changes(k25: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, plain = k25
    after = stored(folder.parent / "imported")
    assert set(after) == set(plain)
    for name, tensor in plain.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    config = read_config(folder.parent / "imported")
    assert config["model_type"] == "kimi_k25" and config["image_token_id"] == released.PAD
    assert config["media_placeholder_token_id"] == released.PAD
    assert "quantization_config" not in config and "quantization_config" not in config["text_config"]


def test_an_imported_k25_computes_what_transformers_computes_of_it(k25: tuple[Path, dict[str, torch.Tensor]]) -> None:
    imported = k25[0].parent / "imported"
    kind = transformers.AutoModelForImageTextToText
    theirs = kind.from_pretrained(imported, dtype=torch.float32, attn_implementation="eager")
    opened = hub.open_folder(imported)
    assert opened.processor.max_patches == 4096 and opened.processor.max_patches_per_side == 256
    tokens = random_tokens(opened.model, 1, 30) % 400
    with torch.no_grad():
        assert relative_error(opened.model(tokens), theirs(tokens).logits) < 1e-5


def test_a_released_folder_in_four_bits_is_also_read_as_it_is(k25: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, _ = k25
    tokens = torch.arange(25)[None]
    assert torch.equal(hub.from_pretrained(folder)(tokens), hub.from_pretrained(folder.parent / "imported")(tokens))


def test_released_sizes_have_the_released_numbers_of_tensors_and_parameters() -> None:
    """Kimi K2.5: 208,550 tensors. Kimi-Linear-48B-A3B: 49.123 billion parameters, 3.107 of them active."""
    k25 = json.loads(json.dumps(released.K25))
    k25["text_config"] |= {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 384,
        "num_experts_per_tok": 8, "vocab_size": 163840,
    }  # fmt: skip
    k25["vision_config"] |= {"vt_hidden_size": 1152, "vt_num_hidden_layers": 27, "vt_num_attention_heads": 16}
    names = [names[0] for entry in kimi_k25.entries(model_config(k25)) for names in entry.public]
    assert len(names) + 2 * sum(".experts." in name for name in names) == 208_550
    full = [4, 8, 12, 16, 20, 24, 27]
    linear = released.LINEAR | {
        "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27,
        "num_attention_heads": 32, "num_key_value_heads": 32, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256, "num_experts_per_token": 8, "vocab_size": 163840,
        "linear_attn_config": {
            "full_attn_layers": full, "kda_layers": sorted(set(range(1, 28)) - set(full)), "head_dim": 128,
            "num_heads": 32, "short_conv_kernel_size": 4,
        },
    }  # fmt: skip
    with torch.device("meta"):
        model = Decoder(model_config(linear))
    assert round(model.num_parameters() / 1e9, 3) == 49.123
    assert round(model.num_parameters(active=True, embedding=False) / 1e9, 3) == 3.107


def test_unpacking_gives_back_every_number_of_four_bits() -> None:
    numbers = torch.arange(-8, 8).repeat(2, 4)
    weight = numbers * torch.tensor([0.5, 2.0])[:, None]
    parts, meant = released.pack(weight, group=64)
    scale = torch.tensor([[0.5], [2.0]])
    found = packed_int4.unpack(parts["weight_packed"], scale, (2, 64), 64)
    assert found.dtype == scale.dtype and meant.shape == found.shape
    exact = packed_int4.unpack(_pack_exactly(numbers), scale, (2, 64), 64)
    assert torch.equal(exact, weight)


def _pack_exactly(numbers: torch.Tensor) -> torch.Tensor:
    words = [sum((int(n) + 8) << (4 * place) for place, n in enumerate(row[i : i + 8]))
             for row in numbers.tolist() for i in range(0, len(row), 8)]  # fmt: skip
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(len(numbers), -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "fp8"}, "quant_method='fp8' is not supported"),
        ({"format": "int-quantized"}, "format='int-quantized' is not supported"),
        ({"config_groups": {}}, "0 config_groups"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": 32}}}}, "num_bits=8"),
        ({"config_groups": {"group_0": {"weights": {"symmetric": False, "group_size": 32}}}}, "symmetric=False"),
        ({"config_groups": {"group_0": {"weights": {"actorder": "group", "group_size": 32}}}}, "actorder='group'"),
        ({"config_groups": {"group_0": {"weights": {"group_size": None}}}}, "group_size=None"),
    ],
)
def test_another_quantisation_is_refused(change: dict, message: str) -> None:
    text = json.loads(json.dumps(released.K25["text_config"]))
    text["quantization_config"] |= change
    with pytest.raises(hub.FormatError, match=re.escape(message)):
        packed_int4.group_size_of({"text_config": text})


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong is named


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = stored(folder)
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink(missing_ok=True)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


NAME = "model.layers.2.block_sparse_moe.experts.5.w3.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(NAME), f"the weights lack {NAME!r}"),
        (lambda tensors: tensors.update({NAME: torch.zeros(16, 31)}), f"{NAME!r} has shape (16, 31)"),
        (lambda tensors: tensors.update({"model.extra": torch.zeros(1)}), "'model.extra'"),
        (lambda tensors: tensors.update({NAME: torch.zeros(16, 32, dtype=torch.int8)}), f"{NAME!r} is stored as"),
        (
            lambda tensors: tensors.update({NAME: torch.zeros(16, 32).to(torch.float8_e4m3fn)}),
            f"{NAME!r} is stored as torch.float8_e4m3fn",
        ),
    ],
)
def test_a_missing_extra_or_misshapen_tensor_is_named(
    edit: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    released.kimi_linear(tmp_path / "model")
    edit_tensors(tmp_path / "model", edit)
    with pytest.raises(hub.FormatError, match=re.escape(message)):
        hub.import_folder(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_truncated_file_names_the_tensor_at_every_length(linear: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    whole = (linear / "model-1-of-3.safetensors").read_bytes()
    places = tensor_files.read_header(linear / "model-1-of-3.safetensors")
    header = min(place.begin for place in places.values())
    for length in (header, header + 1, (header + len(whole)) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(hub.FormatError, match="is cut off") as caught:
            tensor_files.read_header(file)
        cut = [name for name, place in places.items() if place.begin + place.num_bytes > length]
        first = min(cut, key=lambda name: places[name].begin)
        assert repr(first) in str(caught.value)
    for length in (0, 5, 8, header - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(hub.FormatError, match="cannot be read"):
            tensor_files.read_header(file)


def with_header(header: object, numbers: bytes = b"\0" * 64) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + numbers


@pytest.mark.parametrize(
    "content",
    [
        with_header([]),
        with_header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 15]}}),
        with_header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, -16]}}),
        with_header({"a": {"dtype": "F32", "shape": [4.0], "data_offsets": [0, 16]}}),
        with_header({"a": {"dtype": "Q5", "shape": [4], "data_offsets": [0, 16]}}),
        with_header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [60, 76]}}),
        with_header({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}),
        with_header({"a": [1, 2]}),
        (2**63).to_bytes(8, "little") + b"{}",
        b"\xff" * 40,
    ],
)
def test_a_header_that_lies_is_one_clear_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(hub.FormatError, match=r"model\.safetensors"):
        tensor_files.TensorFolder(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "a/../../outside.safetensors",
        "..\\outside.safetensors",
        "config.json",
        "model.bin",
    ],
)
def test_an_index_cannot_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(hub.FormatError, match="inside the folder"):
        tensor_files.TensorFolder(folder)


def test_an_index_that_names_what_is_not_there_says_so(linear: Path, tmp_path: Path) -> None:
    released.kimi_linear(tmp_path)
    (tmp_path / "model-2-of-3.safetensors").unlink()
    with pytest.raises(hub.FormatError, match=r"names 'model-2-of-3\.safetensors', but"):
        open_tensors(tmp_path, released.LINEAR)
    save_file({"a": torch.zeros(1)}, tmp_path / "model-2-of-3.safetensors")
    with pytest.raises(hub.FormatError, match="which does not hold it"):
        open_tensors(tmp_path, released.LINEAR)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(hub.FormatError, match="not an index of tensors"):
        open_tensors(tmp_path, released.LINEAR)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pt", "model.pth"])
def test_pickles_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(released.LINEAR))
    torch.save({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(hub.FormatError, match=f"{re.escape(name)}.*only safetensors are read"):
        hub.import_folder(tmp_path, tmp_path / "out")


def test_a_packed_weight_without_its_parts_names_them(k25: tuple[Path, dict], tmp_path: Path) -> None:
    base = "language_model.model.layers.1.mlp.experts.2.up_proj"
    for edit, message in (
        (lambda tensors: tensors.pop(f"{base}.weight_scale"), f"the weights lack '{base}.weight_scale'"),
        (
            lambda tensors: tensors.update({f"{base}.weight_scale": torch.zeros(64, 3)}),
            f"'{base}.weight_packed' cannot",
        ),
        (lambda tensors: tensors.update({f"{base}.weight_shape": torch.tensor([64])}), "expected two whole numbers"),
        (
            lambda tensors: tensors.update({f"{base}.weight_shape": torch.tensor([64, 64])}),
            f"'{base}.weight' has shape",
        ),
    ):
        folder = tmp_path / message[:8].replace("'", "")
        released.kimi_k25(folder)
        edit_tensors(folder, edit)
        with pytest.raises(hub.FormatError, match=re.escape(message)):
            hub.import_folder(folder, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_import_never_overwrites_a_run_or_its_own_source(linear: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"name": "nano"}')
    with pytest.raises(hub.FormatError, match="other than an exported model"):
        hub.import_folder(linear, tmp_path)
    with pytest.raises(hub.FormatError, match="is the folder to read"):
        hub.import_folder(linear, linear / ".." / linear.name)


# ---------------------------------------------------------------------------------------------------------------------
# Memory

STREAM = """
import resource, sys
from pathlib import Path
from perilune import hub
import perilune.data.tiktoken_vocabulary, torch
torch.zeros(1) @ torch.zeros(1, 1)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
found = hub.import_folder(sys.argv[1], sys.argv[2], max_shard_bytes=32 * 2**20)
print(found.num_bytes, peak() - before)
"""


def test_a_model_larger_than_the_memory_it_may_use_is_imported(tmp_path: Path) -> None:
    """100 MiB of experts; what the process grows by stays far below: about one tensor, and what Python needs."""
    source = tmp_path / "large"
    source.mkdir()
    wide = json.loads(json.dumps(released.LINEAR)) | {"moe_intermediate_size": 8 * 1024}
    (source / "config.json").write_text(json.dumps(wide))
    shapes = {
        name: tuple(8 * 1024 if side == 16 and "block_sparse_moe" in name else side for side in shape)
        for name, shape in released.linear_shapes().items()
    }
    for number in range(3):
        held = list(shapes)[number::3]
        save_file(
            {name: torch.zeros(shapes[name], dtype=torch.float32) for name in held},
            source / f"model-{number}.safetensors",
        )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", STREAM, str(source), str(tmp_path / "out")],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    size, grown = map(int, ran.stdout.split())
    assert size > 100 * 2**20
    assert grown < 32 * 2**20, f"{size / 2**20:.0f} MiB were imported with {grown / 2**20:.0f} MiB more memory"
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
