"""The code that an export brings along computes what Perilune computes, for every kind of model.

In float64, so that agreement to 1e-9 leaves no room for a wrong formula; float32 is held to 1e-5, the promise.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from perilune import hub
from perilune.model import Decoder, MediaInput, ModelConfig, RopeConfig, SamplingConfig, VisionConfig, generate
from tests.model.small_models import BASE, MOE, VARIANTS, YARN, random_tokens, relative_error

transformers = pytest.importorskip("transformers")

MLA_ROPE = replace(BASE, layer_types=("mla",) * 4, mla=replace(BASE.mla, rope=YARN, q_lora_rank=16))
VISION = VisionConfig(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, pos_emb_height=6, pos_emb_width=6
)
PAD = 7
KINDS: dict[str, ModelConfig] = {
    **VARIANTS,
    "scalars": replace(BASE, residual="scalars"),
    "block_attnres_even_experts": replace(BASE, residual="block_attnres", block_sublayers=4, moe=MOE),
    "attnres_tied": replace(BASE, residual="attnres", tie_word_embeddings=True),
    "no_shared_experts_in_groups": replace(
        BASE,
        moe=replace(
            MOE,
            num_shared_experts=0,
            num_experts=8,
            num_expert_group=4,
            topk_group=2,
            moe_renormalize=False,
            first_k_dense_replace=0,
        ),
    ),
    "deepseek": replace(MLA_ROPE, moe=MOE),
    "deepseek_dense_tied": replace(MLA_ROPE, tie_word_embeddings=True),
    "rope_attnres": replace(MLA_ROPE, residual="attnres", moe=MOE),
    "yarn_magnitudes": replace(MLA_ROPE, mla=replace(MLA_ROPE.mla, rope=replace(YARN, mscale=0.7, mscale_all_dim=0.0))),
    "no_shared_key": replace(BASE, mla=replace(BASE.mla, qk_rope_head_dim=0)),
    "short_convolution": replace(BASE, kda=replace(BASE.kda, short_conv_kernel_size=1)),
    "seeing_kda_attnres": replace(BASE, residual="block_attnres", vision=VISION, moe=MOE),
    "seeing_deepseek": replace(MLA_ROPE, moe=MOE, vision=VISION),
    "seeing_wide_grid": replace(BASE, vision=replace(VISION, pos_emb_width=4)),
}


def randomized(config: ModelConfig) -> Decoder:
    """Every parameter off the values at which its term vanishes."""
    model = Decoder(config, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith((".query", ".gain", "bias", "_scale", "norm.weight")) or name.startswith("vision_tower"):
                tensor.add_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return model


def opened(model: Decoder, folder: Path, dtype: torch.dtype | None = None) -> Any:
    """transformers' reading of the folder we write, by its own code alone."""
    media = (PAD - 1, PAD, PAD + 1) if model.config.vision is not None else None
    hub.save_pretrained(model, folder, bos_token_id=0, eos_token_id=1, pad_token_id=2, media_token_ids=media)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=dtype or torch.float64, output_loading_info=True
    )
    assert type(theirs).__module__.startswith("transformers_modules."), "not the code of the folder"
    assert not any(info.values()), info
    return theirs.eval()


def greedy(model: Decoder, prompt: list[int], tokens: int, media: MediaInput | None = None) -> list[int]:
    return list(generate(model, prompt, SamplingConfig(max_new_tokens=tokens, temperature=0.0), media=media))


def continued(theirs: Any, prompt: torch.Tensor, tokens: int, **given: Any) -> list[list[int]]:
    """What transformers' own generate appends; nothing ends it, and no token of the prompt counts as padding."""
    given = {"attention_mask": torch.ones_like(prompt), "do_sample": False, **given}
    found = theirs.generate(prompt, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0, **given)
    return found[:, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_text_are_those_of_perilune(kind: str, tmp_path: Path) -> None:
    ours = randomized(KINDS[kind])
    theirs = opened(ours, tmp_path / "model")
    tokens = random_tokens(ours, 2, 37)
    with torch.no_grad():
        assert relative_error(theirs(tokens).logits, ours(tokens)) < 1e-9
    prompt = tokens[:1, :21]
    assert continued(theirs, prompt, 12) == [greedy(ours, prompt[0].tolist(), 12)]


@pytest.mark.parametrize("kind", ["experts", "block_attnres", "deepseek"])
def test_float32_is_within_the_promise(kind: str, tmp_path: Path) -> None:
    ours = randomized(replace(KINDS[kind], compute_dtype="float32"))
    theirs = opened(ours, tmp_path / "model", torch.float32)
    tokens = random_tokens(ours, 1, 50)
    with torch.no_grad():
        logits = ours(tokens)
        assert float((theirs(tokens).logits - logits).abs().max()) < 1e-5 * float(logits.abs().max())


@pytest.mark.parametrize("kind", ["block_attnres", "bounded_full_rank_gate", "scalars", "deepseek"])
def test_half_precision_runs_and_stays_near(kind: str, tmp_path: Path) -> None:
    ours = randomized(replace(KINDS[kind], compute_dtype="float32"))
    theirs = opened(ours, tmp_path / "model", torch.bfloat16)
    tokens = random_tokens(ours, 1, 20)
    with torch.no_grad():
        # bfloat16 has 8 bits: each of some twenty roundings on the way to a logit may be off by 2^-9. Half of the
        # tokens, since one that is sent to another expert is elsewhere.
        apart = (theirs(tokens).logits - ours(tokens)).norm(dim=-1) / ours(tokens).norm(dim=-1)
    assert float(apart.median()) < 0.1
    assert len(continued(theirs, tokens, 4)[0]) == 4


GRIDS = ((1, 4, 6), (1, 6, 6), (3, 2, 4), (4, 2, 2))
"""Smaller than the learned grid, as large, and two chunks of video."""


def looked_at(ours: Decoder, *, seed: int = 0) -> tuple[torch.Tensor, MediaInput, dict[str, torch.Tensor]]:
    """Tokens with places for pictures, and the pictures for either side."""
    generator = torch.Generator().manual_seed(seed)
    patches = sum(frames * height * width for frames, height, width in GRIDS)
    pixels = torch.randint(0, 256, (patches, 3, 14, 14), generator=generator, dtype=torch.uint8)
    count = sum(height * width // 4 for _, height, width in GRIDS)
    tokens = random_tokens(ours, 1, count + 9).masked_fill_(random_tokens(ours, 1, count + 9) == PAD, 0)
    tokens[tokens == PAD] = 0
    positions = torch.arange(count) + 3
    tokens[0, positions] = PAD
    media = MediaInput(positions=positions, pixels=pixels, grids=GRIDS)
    return tokens, media, {"pixel_values": pixels, "image_grid_thw": torch.tensor(GRIDS)}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("seeing")])
def test_pictures_and_videos_are_seen_as_perilune_sees_them(kind: str, tmp_path: Path) -> None:
    ours = randomized(KINDS[kind])
    theirs = opened(ours, tmp_path / "model")
    tokens, media, given = looked_at(ours)
    with torch.no_grad():
        logits = ours(tokens, media=media)
        # uint8 pixels are normalised in float32 there and in float64 here.
        assert relative_error(theirs(tokens, **given).logits, logits) < 1e-6
        assert relative_error(theirs(tokens).logits, logits) > 1e-3, "the pictures change nothing"
    assert continued(theirs, tokens, 8, **given) == [greedy(ours, tokens[0].tolist(), 8, media)]
    with pytest.raises(ValueError, match="places for pictures"):
        theirs(tokens[:, :-1] * 0, **given)


@pytest.mark.parametrize("kind", ["plain", "query_compression_yarn", "attnres"])
def test_rows_padded_on_the_left_equal_rows_alone(kind: str, tmp_path: Path) -> None:
    ours = randomized(KINDS[kind])
    theirs = opened(ours, tmp_path / "model")
    rows = [random_tokens(ours, 1, length, seed=length)[0].tolist() for length in (5, 23, 16)]
    longest = max(map(len, rows))
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    together = continued(theirs, padded, 9, attention_mask=mask)
    assert together == [greedy(ours, row, 9) for row in rows]
    code = sys.modules[type(theirs).__module__]
    seen = code.Tokens.of(padded, mask, 0).mask
    assert bool(seen.any(-1).all()), "attention that may look nowhere is not a number on some devices"


def test_beams_run_through_the_cache(tmp_path: Path) -> None:
    ours = randomized(KINDS["block_attnres_even_experts"])
    theirs = opened(ours, tmp_path / "model")
    prompt = random_tokens(ours, 1, 9)
    beams = continued(theirs, prompt, 7, num_beams=3)
    assert beams == continued(theirs, prompt, 7, num_beams=3, use_cache=False)
    assert beams != continued(theirs, prompt, 7), "three beams find what one finds: this prompt shows nothing"


def test_labels_give_the_loss_of_next_tokens_and_gradients(tmp_path: Path) -> None:
    ours = randomized(KINDS["block_attnres"])
    theirs = opened(ours, tmp_path / "model")
    tokens = random_tokens(ours, 1, 12)
    labels = tokens.clone()
    labels[0, :4] = -100
    targets = torch.full_like(tokens, -100)
    targets[0, 3:-1] = tokens[0, 4:]
    found = theirs(tokens, labels=labels).loss
    assert abs(found.item() - ours.loss(tokens, targets).item() / 8) < 1e-6
    found.backward()
    assert all(parameter.grad is not None for parameter in theirs.parameters() if parameter.requires_grad)


def test_transformers_saves_what_it_opened_and_both_read_it(tmp_path: Path) -> None:
    for kind in ("one_decay_a_head", "deepseek_dense_tied", "seeing_kda_attnres"):
        ours = randomized(KINDS[kind])
        opened(ours, tmp_path / kind).save_pretrained(tmp_path / f"{kind}-again")
        back = hub.from_pretrained(tmp_path / f"{kind}-again")
        for name, value in ours.state_dict().items():
            assert torch.equal(back.state_dict()[name], value.float()), (kind, name)


def test_a_rope_without_yarn_and_halves_are_read(tmp_path: Path) -> None:
    rope = RopeConfig(theta=700.0, interleaved=False)
    ours = randomized(replace(MLA_ROPE, mla=replace(MLA_ROPE.mla, rope=rope)))
    theirs = opened(ours, tmp_path / "model")
    tokens = random_tokens(ours, 1, 20)
    with torch.no_grad():
        assert relative_error(theirs(tokens).logits, ours(tokens)) < 1e-9
