"""Parity with transformers' kimi_k25: same weights, same pictures, same features, logits and gradients.

Weights travel by every way there is: a folder we write, a folder transformers writes, and the state of its modules.
Both compute in float32. Pictures only: transformers 5.22 cannot run a chunk of video.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from perilune import hub
from perilune.hub import kimi_k25
from perilune.hub.entries import FormatError
from perilune.model import Decoder, KDAConfig, MediaInput, ModelConfig, VisionConfig, vision
from perilune.model.vision import SIZES
from tests.model.small_models import build, random_tokens, relative_error
from tests.peers.test_transformers_models import DEEPSEEK, KIMI_LINEAR

transformers = pytest.importorskip("transformers")

PAD = 90
VISION = VisionConfig(
    hidden_size=48, num_hidden_layers=3, num_attention_heads=3, intermediate_size=80, pos_emb_height=8, pos_emb_width=8
)
CONFIG = replace(DEEPSEEK, vision=VISION)
GRIDS = ((1, 4, 6), (1, 2, 2), (1, 8, 8), (1, 10, 2), (1, 6, 4), (1, 2, 18))
"""Smaller and larger than the learned grid, as large, wide and tall; two of the same number of patches."""


def pictures(seed: int = 0) -> Tensor:
    patches = sum(height * width for _, height, width in GRIDS)
    return torch.randn(patches, 3, 14, 14, generator=torch.Generator().manual_seed(seed))


def randomized(config: ModelConfig) -> Decoder:
    """Every parameter of the tower random, also those that begin as zeros and ones."""
    model = build(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("vision_tower.", "mm_projector.")):
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, "transformers.PreTrainedModel", Path]:
    """Our model, transformers' reading of the folder we write, and the folder."""
    folder = tmp_path_factory.mktemp("k25") / "model"
    ours = randomized(CONFIG)
    hub.save_pretrained(ours, folder, media_token_ids=(PAD - 1, PAD, PAD + 1))
    kind = transformers.Kimi_K25ForConditionalGeneration
    theirs, info = kind.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not any(info.values()), info
    return ours, theirs, folder


def their_features(model: "transformers.PreTrainedModel", pixels: Tensor) -> Tensor:
    return torch.cat(model.get_image_features(pixels, torch.tensor(GRIDS)).pooler_output)


def test_features_of_packed_pictures_equal_transformers(both) -> None:
    ours, theirs, _ = both
    features = ours.vision_features(pictures(), GRIDS)
    assert relative_error(features, their_features(theirs, pictures())) < 1e-5


def swapped_axes(height: int, width: int, *rest) -> tuple[Tensor, Tensor]:
    """The angles of a picture whose columns are taken for rows."""
    tables = ROTARY_TABLES(width, height, *rest)
    return tuple(table.unflatten(0, (width, height)).transpose(0, 1).flatten(0, 1) for table in tables)


ROTARY_TABLES = vision.rotary_tables

WRONG: dict[str, tuple[str, Callable]] = {
    "rotary axes swapped": ("rotary_tables", swapped_axes),
    "rotary halves": ("rotate", lambda x, cos, sin, interleaved: vision_rotate(x, cos, sin, interleaved=False)),
    "grid resized bilinearly": ("resized", lambda grid, height, width: bilinear(grid, height, width)),
    "grid transposed": ("resized", lambda grid, height, width: vision_resized(grid.transpose(0, 1), height, width)),
}
vision_rotate, vision_resized = vision.rotate, vision.resized


def bilinear(grid: Tensor, height: int, width: int) -> Tensor:
    found = torch.nn.functional.interpolate(grid.permute(2, 0, 1)[None], (height, width), mode="bilinear")
    return found[0].flatten(1).T


@pytest.mark.parametrize("mistake", WRONG)
def test_parity_notices_the_mistakes_of_other_ports(both, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs, _ = both
    name, wrong = WRONG[mistake]
    monkeypatch.setattr(vision, name, wrong)
    assert relative_error(ours.vision_features(pictures(), GRIDS), their_features(theirs, pictures())) > 1e-3


def test_logits_and_gradients_of_a_text_with_pictures_equal_transformers(both) -> None:
    ours, theirs, _ = both
    num_tokens = sum(height * width // 4 for _, height, width in GRIDS)
    tokens = random_tokens(ours, 1, num_tokens + 20) % (PAD - 1)
    positions = torch.arange(3, 3 + num_tokens) + torch.arange(num_tokens).div(20, rounding_mode="floor")
    tokens[0, positions] = PAD
    media = MediaInput(positions=positions, pixels=pictures(), grids=GRIDS)
    given = {"pixel_values": pictures(), "image_grid_thw": torch.tensor(GRIDS)}
    logits = ours(tokens, media=media)
    assert relative_error(logits, theirs(tokens, **given).logits) < 1e-5
    targets = random_tokens(ours, *tokens.shape, seed=1)
    ours.loss(tokens, targets, media=media).backward()
    theirs_loss = torch.nn.functional.cross_entropy(theirs(tokens, **given).logits[0], targets[0], reduction="sum")
    theirs_loss.backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.grad is not None}
    for entry in kimi_k25.vision_module_entries(CONFIG):
        own = ours.get_parameter(entry.ours).grad
        assert own is not None and relative_error(entry.read(gradients), own) < 1e-4, entry.ours


def test_state_of_transformers_modules_is_read_and_written(both) -> None:
    ours, theirs, _ = both
    state = theirs.state_dict()
    copy = Decoder(CONFIG)
    hub.load_weights(copy, state)
    for name, value in ours.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value), name
    for entry in kimi_k25.module_entries(CONFIG):
        for name, value in entry.written(ours.state_dict()[entry.ours]).items():
            assert torch.equal(state[name], value), name


def test_a_folder_written_by_transformers_is_read(both, tmp_path: Path) -> None:
    ours, theirs, _ = both
    theirs.save_pretrained(tmp_path)
    copy = hub.from_pretrained(tmp_path)
    assert copy.config.vision == VISION
    for name, value in ours.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value), name


@pytest.mark.parametrize("text", [replace(KIMI_LINEAR, residual="block_attnres"), CONFIG], ids=["own", "kimi_k25"])
def test_a_folder_brings_back_the_same_model(text: ModelConfig, tmp_path: Path) -> None:
    model = randomized(replace(text, vision=VISION))
    hub.save_pretrained(model, tmp_path / "model")
    copy = hub.from_pretrained(tmp_path / "model")
    assert copy.config.vision == model.config.vision and copy.config.residual == model.config.residual
    for name, value in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value), name


def test_released_names_are_written() -> None:
    weights = hub.public_weights(randomized(CONFIG))
    assert weights["vision_tower.patch_embed.proj.weight"].shape == (48, 3, 14, 14)
    assert weights["vision_tower.patch_embed.pos_emb.weight"].shape == (8, 8, 48)
    assert weights["vision_tower.encoder.blocks.2.wqkv.weight"].shape == (144, 48)
    for name in ("norm0", "norm1", "wo", "mlp.fc0", "mlp.fc1"):
        assert f"vision_tower.encoder.blocks.0.{name}.bias" in weights
    for name in ("mm_projector.pre_norm", "mm_projector.proj.0", "mm_projector.proj.2"):
        assert f"{name}.weight" in weights
    assert "vision_tower.encoder.final_layernorm.weight" in weights
    assert "language_model.lm_head.weight" in weights and "language_model.model.norm.weight" in weights


def test_released_and_transformers_keys_of_the_config_are_read() -> None:
    public = kimi_k25.vision_to_public(VISION, 32)
    released = {name: public[name] for name in kimi_k25.RELEASED_KEYS.values()}
    assert kimi_k25.vision_from_public(released) == VISION
    assert kimi_k25.vision_from_public({name: public[name] for name in kimi_k25.RELEASED_KEYS}) == VISION
    assert kimi_k25.vision_from_public({}) == SIZES["k25"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": None}, "vision_config=None"),
        ({"text_config": {"model_type": "llama"}}, "'llama'"),
        ({"projection_layer_norm_eps": 1e-6}, "projection_layer_norm_eps=1e-06"),
        ({"projection_hidden_size": 64}, "projection_hidden_size=64"),
    ],
)
def test_a_config_that_asks_for_something_else_is_refused(change: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        kimi_k25.from_public(kimi_k25.to_public(CONFIG) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"merge_type": "mean"}, "merge_type='mean'"),
        ({"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}, "rope_theta"),
        ({"hidden_size": "wide"}, "vt_hidden_size='wide'"),
        ({"hidden_size": 50}, "hidden_size is 50"),
    ],
)
def test_a_tower_that_computes_something_else_is_refused(change: dict, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        kimi_k25.vision_from_public(kimi_k25.vision_to_public(VISION, 32) | change)


def test_a_grid_that_is_not_square_is_not_written_as_kimi_k25(tmp_path: Path) -> None:
    model = Decoder(replace(CONFIG, kda=KDAConfig(), vision=replace(VISION, pos_emb_width=6)))
    with pytest.raises(FormatError, match="square"):
        hub.save_pretrained(model, tmp_path / "model", target="kimi_k25")
    assert not (tmp_path / "model").exists()
