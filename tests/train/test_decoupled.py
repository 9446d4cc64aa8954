"""The decoupled step of the tower: same losses and gradients as the plain step, in even pieces."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.model import Decoder, MediaInput, ModelConfig, VisionConfig
from perilune.train.batches import MicroBatch
from perilune.train.decoupled import balanced, decoupled_backward
from tests.model.small_models import BASE, MOE, build, relative_error

VISION = VisionConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, pos_emb_height=4, pos_emb_width=4
)
CONFIG = replace(BASE, vision=VISION, residual="block_attnres", moe=MOE)
# In float32 with weights as small as a run begins with: the large ones of BASE magnify rounding.
FLOAT32 = replace(CONFIG, compute_dtype="float32", initializer_range=0.05)

Grids = tuple[tuple[int, int, int], ...]
UNEVEN: tuple[Grids, ...] = (((1, 4, 4), (1, 2, 6), (4, 2, 2)), (), ((1, 8, 4),), ((2, 2, 4), (1, 2, 2)))


def micro_batch(grids: Grids, seed: int) -> MicroBatch:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(height * width // 4 for _, height, width in grids)
    patches = sum(frames * height * width for frames, height, width in grids)
    length = num_tokens + 6 + seed
    tokens = torch.randint(BASE.vocab_size, (1, length), generator=generator)
    media = None
    if grids:
        pixels = torch.randint(256, (patches, 3, 14, 14), generator=generator, dtype=torch.uint8)
        media = MediaInput(positions=torch.arange(2, 2 + num_tokens), pixels=pixels, grids=grids)
    return MicroBatch(
        tokens_BT=tokens,
        targets_BT=torch.randint(BASE.vocab_size, (1, length), generator=generator),
        cu_seqlens=torch.tensor([0, length]),
        num_targets=length,
        num_bytes=length,
        media=media,
    )


def plain_backward(model: Decoder, batches: list[MicroBatch], num_targets: int) -> list[torch.Tensor]:
    losses = []
    for batch in batches:
        loss = model.loss(batch.tokens_BT, batch.targets_BT, batch.cu_seqlens, media=batch.media)
        (loss / num_targets).backward()
        losses.append(loss.detach())
    return losses


def check_equal(config: ModelConfig, cases: tuple[Grids, ...], patches_per_group: int, tolerance: float) -> None:
    batches = [micro_batch(grids, seed) for seed, grids in enumerate(cases)]
    num_targets = sum(batch.num_targets for batch in batches)
    plain, decoupled = build(config), build(config)
    expected = plain_backward(plain, batches, num_targets)
    losses = decoupled_backward(decoupled, batches, num_targets, patches_per_group=patches_per_group)
    torch.testing.assert_close(losses, expected)
    for prefix in ("vision_tower.", "mm_projector.", "layers.", ""):
        pairs = [
            (ours.grad, theirs.grad)
            for (name, ours), theirs in zip(decoupled.named_parameters(), plain.parameters(), strict=True)
            if name.startswith(prefix)
        ]
        assert [ours is None for ours, _ in pairs] == [theirs is None for _, theirs in pairs]
        known = [
            (ours.flatten(), theirs.flatten()) for ours, theirs in pairs if ours is not None and theirs is not None
        ]
        if known:
            ours, theirs = (torch.cat(side) for side in zip(*known, strict=True))
            assert relative_error(ours, theirs) < tolerance, prefix


@pytest.mark.parametrize("patches_per_group", [1, 16, 40, 10_000])
def test_gradients_equal_end_to_end(patches_per_group: int) -> None:
    check_equal(FLOAT32, UNEVEN, patches_per_group, tolerance=1e-5)


@pytest.mark.parametrize("cases", [((), ()), (((1, 2, 2),),), ((), ((1, 4, 2),))], ids=["none", "one", "only last"])
def test_micro_batches_without_media_keep_their_gradients(cases: tuple[Grids, ...]) -> None:
    check_equal(FLOAT32, cases, 64, tolerance=1e-5)


def test_gradients_equal_end_to_end_in_float64() -> None:
    check_equal(CONFIG, UNEVEN, 30, tolerance=1e-12)


def test_the_tower_keeps_nothing_while_the_language_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(CONFIG)
    seen: list[tuple[str, bool, int]] = []
    look, loss = model.vision_features, model.loss

    def looking(pixels, grids):
        seen.append(("look", torch.is_grad_enabled(), len(pixels)))
        return look(pixels, grids)

    def training(*args, media=None):
        seen.append(("loss", media is not None and media.features is not None and media.features.is_leaf, 0))
        return loss(*args, media=media)

    monkeypatch.setattr(model, "vision_features", looking)
    monkeypatch.setattr(model, "loss", training)
    decoupled_backward(model, [micro_batch(grids, 0) for grids in UNEVEN], 10, patches_per_group=40)
    looks = [entry for entry in seen if entry[0] == "look"]
    groups = len(looks) // 2
    assert groups == 3
    assert [kind for kind, _, _ in seen] == ["look"] * groups + ["loss"] * len(UNEVEN) + ["look"] * groups
    assert [grad for _, grad, _ in looks] == [False] * groups + [True] * groups
    assert [leaf for kind, leaf, _ in seen if kind == "loss"] == [True, False, True, True]
    assert [size for _, _, size in looks[:groups]] == [size for _, _, size in looks[groups:]]
    assert max(size for _, _, size in looks) <= 44  # 96 patches of six items in three groups


def test_wrong_input_is_refused() -> None:
    model = build(CONFIG)
    batch = micro_batch(((1, 2, 2),), 0)
    with pytest.raises(ValueError, match="patches_per_group is 0"):
        decoupled_backward(model, [batch], 1, patches_per_group=0)
    assert batch.media is not None
    ready = replace(batch, media=batch.media.with_features(torch.zeros(1, BASE.hidden_size)))
    with pytest.raises(ValueError, match="micro-batch 0 hold features"):
        decoupled_backward(model, [ready], 1)


@settings(max_examples=200)
@given(sizes=st.lists(st.integers(1, 16_384), min_size=1, max_size=40), groups=st.integers(1, 12))
def test_groups_hold_every_item_once_and_are_balanced(sizes: list[int], groups: int) -> None:
    found = balanced(sizes, groups)
    assert sorted(item for group in found for item in group) == list(range(len(sizes)))
    assert len(found) == min(groups, len(sizes)) and all(found)
    sums = [sum(sizes[item] for item in group) for group in found]
    # Longest first: what came last to a group is its smallest item, and came when that group had least.
    for group, total in zip(found, sums, strict=True):
        assert total - min(sizes[item] for item in group) <= min(sums)


def test_no_items_are_no_groups() -> None:
    assert balanced([], 3) == []
