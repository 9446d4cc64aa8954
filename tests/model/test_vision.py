"""The vision tower: items never see each other, positions and time are where they belong, wrong shapes are named.

Values against another implementation: tests/peers/test_kimi_k25.py. Here in float64, where anything above 1e-10 is
another computation and not rounding.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from perilune.model import MoonViT3D, Projector, VisionConfig
from perilune.model.vision import SIZES, normalized
from perilune.model.vision_grids import MAX_SIDE, Grid, tokens_of
from perilune.model.vision_positions import resized, time_table
from tests.model.small_models import relative_error

SAME = 1e-10
CONFIG = VisionConfig(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, pos_emb_height=5, pos_emb_width=6
)
MIXED: tuple[Grid, ...] = ((1, 4, 6), (4, 2, 4), (1, 2, 12), (1, 4, 6), (2, 8, 2), (3, 2, 2), (1, 10, 2))

GRID = st.tuples(st.integers(1, 4), st.sampled_from([2, 4, 6, 10]), st.sampled_from([2, 4, 6, 12]))


def tower_of(config: VisionConfig = CONFIG, seed: int = 0) -> MoonViT3D:
    """Every parameter random, so that each one matters."""
    tower = MoonViT3D(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return tower


def pixels_of(grids: tuple[Grid, ...], seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(map(math.prod, grids)), 3, 14, 14, generator=generator, dtype=torch.float64)


@settings(max_examples=25)
@given(grids=st.lists(GRID, min_size=1, max_size=7).map(tuple))
def test_packed_items_equal_items_alone(grids: tuple[Grid, ...]) -> None:
    tower, pixels = tower_of(), pixels_of(grids)
    packed = tower(pixels, grids)
    pieces = pixels.split([math.prod(grid) for grid in grids])
    alone = [tower(piece, [grid]) for piece, grid in zip(pieces, grids, strict=True)]
    assert [len(found) for found in alone] == [tokens_of(grid) for grid in grids]
    assert relative_error(packed, torch.cat(alone)) < SAME


def layer_norm(x: Tensor, norm: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def by_hand(tower: MoonViT3D, pixels: Tensor, grid: Grid) -> Tensor:
    """The tower on one item, patch by patch and head by head, in the words of the docstrings."""
    frames, height, width = grid
    heads, dim = tower.config.num_attention_heads, tower.config.hidden_size
    head_dim = dim // heads
    where = [(t, y, x) for t in range(frames) for y in range(height) for x in range(width)]
    learned = F.interpolate(
        tower.patch_embed.pos_emb.weight.permute(2, 0, 1)[None], (height, width), mode="bicubic", align_corners=False
    )[0]
    rows = []
    for patch, (t, y, x) in zip(pixels, where, strict=True):
        kernel = tower.patch_embed.proj.weight.view(dim, 3, 14, 14)
        row = F.conv2d(patch[None], kernel, tower.patch_embed.proj.bias, stride=14).flatten() + learned[:, y, x]
        if frames > 1:
            angles = [t / 10_000 ** (2 * i / dim) for i in range(dim // 2)]
            row = row + torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=row.dtype)
        rows.append(row)
    hidden = torch.stack(rows)

    def turned(vector: Tensor, y: int, x: int) -> Tensor:
        pairs = torch.view_as_complex(vector.reshape(-1, 2).contiguous())
        angles = []
        for i in range(head_dim // 4):
            frequency = 10_000 ** (-4 * i / head_dim)
            angles += [x * frequency, y * frequency]
        return torch.view_as_real(pairs * torch.polar(torch.ones(len(angles)).double(), torch.tensor(angles).double()))

    for block in tower.encoder.blocks:
        q, k, v = (layer_norm(hidden, block.norm0) @ block.wqkv.weight.T + block.wqkv.bias).chunk(3, dim=-1)
        mixed = []
        for head in range(heads):
            part = slice(head * head_dim, (head + 1) * head_dim)
            queries = torch.stack([turned(row[part], y, x).flatten() for row, (_, y, x) in zip(q, where, strict=True)])
            keys = torch.stack([turned(row[part], y, x).flatten() for row, (_, y, x) in zip(k, where, strict=True)])
            mixed.append((queries @ keys.T / math.sqrt(head_dim)).softmax(-1) @ v[:, part])
        hidden = hidden + torch.cat(mixed, dim=-1) @ block.wo.weight.T + block.wo.bias
        wide = layer_norm(hidden, block.norm1) @ block.mlp["fc0"].weight.T + block.mlp["fc0"].bias
        wide = 0.5 * wide * (1 + (math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)).tanh())
        hidden = hidden + wide @ block.mlp["fc1"].weight.T + block.mlp["fc1"].bias
    hidden = layer_norm(hidden, tower.encoder.final_layernorm)

    at = {place: row for place, row in zip(where, hidden, strict=True)}
    groups = []
    for y in range(0, height, 2):
        for x in range(0, width, 2):
            four = [(y, x), (y, x + 1), (y + 1, x), (y + 1, x + 1)]
            groups.append(torch.stack([sum(at[t, *place] for t in range(frames)) / frames for place in four]))
    return torch.stack(groups)


@pytest.mark.parametrize("grid", [(4, 4, 2), (3, 2, 4), (1, 4, 6)])
def test_a_chunk_equals_a_computation_by_hand(grid: Grid) -> None:
    tower, pixels = tower_of(), pixels_of((grid,))
    assert relative_error(tower(pixels, [grid]), by_hand(tower, pixels, grid)) < SAME


def test_the_projector_equals_a_computation_by_hand() -> None:
    projector = Projector(CONFIG, 10).double()
    groups = torch.randn(5, 4, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    wide = torch.cat([layer_norm(groups[:, place], projector.pre_norm) for place in range(4)], dim=-1)
    wide = wide @ projector.proj[0].weight.T + projector.proj[0].bias
    wide = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
    expected = wide @ projector.proj[2].weight.T + projector.proj[2].bias
    assert relative_error(projector(groups), expected) < SAME


def test_time_moves_video_and_leaves_pictures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = tower_of()
    picture, video = ((1, 4, 6),), ((2, 4, 6),)
    before = tower(pixels_of(picture), picture), tower(pixels_of(video), video)
    monkeypatch.setattr("perilune.model.vision.time_table", lambda *args: 5 * time_table(*args) + 1)
    assert torch.equal(tower(pixels_of(picture), picture), before[0])
    assert relative_error(tower(pixels_of(video), video), before[1]) > 1e-3


def test_the_order_of_frames_and_of_patches_matters() -> None:
    tower, pixels = tower_of(), pixels_of(((2, 4, 4),))
    features = tower(pixels, [(2, 4, 4)])
    first, second = pixels.chunk(2)
    assert relative_error(tower(torch.cat([second, first]), [(2, 4, 4)]), features) > 1e-3
    assert relative_error(tower(pixels.flip(0), [(2, 4, 4)]).flip(0).flip(1), features) > 1e-3


@settings(max_examples=40)
@given(full=st.tuples(st.integers(1, 9), st.integers(1, 9)), size=st.tuples(st.integers(1, 20), st.integers(1, 20)))
def test_the_grid_is_resized_as_interpolate_does(full: tuple[int, int], size: tuple[int, int]) -> None:
    grid = torch.randn(*full, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = F.interpolate(grid.permute(2, 0, 1)[None], size, mode="bicubic", align_corners=False)
    torch.testing.assert_close(resized(grid, *size), expected[0].flatten(1).T, rtol=0, atol=1e-12)


def test_gradients_reach_every_parameter_and_are_those_of_the_definition() -> None:
    config = replace(CONFIG, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    tower, grids = tower_of(config), ((2, 2, 2), (1, 2, 4), (1, 4, 2))
    pixels = pixels_of(grids)
    names, values = zip(*tower.named_parameters(), strict=True)

    def features(*parameters: Tensor) -> Tensor:
        return torch.func.functional_call(tower, dict(zip(names, parameters, strict=True)), (pixels, grids)).sin()

    features(*values).sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
    assert torch.autograd.gradcheck(features, values, fast_mode=True)


class Reads(TorchDispatchMode):
    """Fails where the host waits for a number of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_from_the_device() -> None:
    tower, pixels = tower_of(), pixels_of(MIXED).requires_grad_()
    with Reads():
        tower(pixels, MIXED).sum().backward()


def test_attention_is_called_once_for_items_of_equal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    sdpa = F.scaled_dot_product_attention

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(tuple(q.shape))
        return sdpa(q, k, v)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    grids = ((1, 4, 6), (1, 2, 2), (1, 12, 2), (2, 2, 6), (1, 2, 2))
    tower_of(replace(CONFIG, num_hidden_layers=1))(pixels_of(grids), grids)
    assert calls == [(2, 2, 4, 12), (3, 2, 24, 12)]


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        (((5, 2, 2),), r"item 0 has the grid \(5, 2, 2\).*at most 4 frames"),
        (((1, 2, 2), (1, 3, 2)), r"item 1 has the grid \(1, 3, 2\).*even h and w"),
        (((1, 2, 7),), "even h and w"),
        (((1, 2, MAX_SIDE + 2),), "at most 512 patches a side"),
        (((0, 2, 2),), "at least one frame"),
        (((2, 2),), r"\(t, h, w\)"),
        (torch.tensor([[1, 2, 2]]), "grids.tolist"),
    ],
)
def test_wrong_grids_are_named(grids, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tower_of()(torch.zeros(4, 3, 14, 14, dtype=torch.float64), grids)


@pytest.mark.parametrize(
    "pixels",
    [torch.zeros(5, 3, 14, 14), torch.zeros(4, 588), torch.zeros(4, 3, 16, 16), torch.zeros(4, 3, 14, 14).byte()],
    ids=["count", "flat", "patch size", "bytes"],
)
def test_wrong_pixels_are_named(pixels: Tensor) -> None:
    with pytest.raises(ValueError, match=r"pixels is .* expected floating-point \(4, 3, 14, 14\)"):
        tower_of()(pixels, [(1, 2, 2)])


def test_nothing_to_see_is_no_features() -> None:
    assert tower_of()(torch.zeros(0, 3, 14, 14, dtype=torch.float64), ()).shape == (0, 4, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden_size": 20}, "hidden_size is 20"), ({"pos_emb_time": 0}, "pos_emb_time must be at least 1, got 0")],
)
def test_a_config_that_cannot_be_built_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"model.vision.{message}"):
        replace(CONFIG, **change)


@pytest.mark.parametrize(("name", "millions"), [("mini", 1.1), ("small", 5.0), ("medium", 38.7), ("k25", 416.9)])
def test_sizes_have_the_parameters_they_promise(name: str, millions: float) -> None:
    with torch.device("meta"):
        tower, projector = MoonViT3D(SIZES[name]), Projector(SIZES[name], 7168)
    assert round(sum(parameter.numel() for parameter in tower.parameters()) / 1e6, 1) == millions
    if name == "k25":
        assert round(sum(parameter.numel() for parameter in projector.parameters()) / 1e6, 1) == 54.3


def test_bytes_are_normalised_as_published_and_floats_are_not() -> None:
    values = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(normalized(values, torch.float32), torch.tensor([-1.0, -0.6, 1.0]))
    assert normalized(values, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(normalized(torch.tensor([0.25]), torch.float32), torch.tensor([0.25]))


def test_half_precision_stays_near_full_precision() -> None:
    tower = tower_of().float()
    pixels = pixels_of(MIXED).float()
    half = tower(pixels.bfloat16(), MIXED)
    assert half.dtype == torch.bfloat16
    # Eight bits of mantissa, and errors that add up over two blocks.
    assert relative_error(half.float(), tower(pixels, MIXED)) < 0.05


def test_tables_made_in_inference_serve_training() -> None:
    tower, grids = tower_of(), ((2, 6, 14),)  # a shape no other test has
    with torch.inference_mode():
        tower(pixels_of(grids), grids)
    tower(pixels_of(grids), grids).sum().backward()
