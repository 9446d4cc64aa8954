"""A decoder with a tower: features stand in the places of the pads, and nothing else changes."""

from dataclasses import replace

import pytest
import torch

from perilune.model import Decoder, MediaInput, SamplingConfig, VisionConfig, generate
from perilune.optim.matrices import Adam, RowBlocks, Whole
from perilune.optim.plan import plan_parameters
from tests.model.small_models import BASE, build, random_tokens, relative_error

SAME = 1e-10
VISION = VisionConfig(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40, pos_emb_height=4, pos_emb_width=4
)
CONFIG = replace(BASE, vision=VISION, residual="block_attnres")
GRIDS = ((1, 4, 6), (2, 2, 4))
POSITIONS = torch.tensor([2, 3, 4, 5, 6, 7, 12, 13])


def media_of(seed: int = 0) -> MediaInput:
    pixels = torch.randint(256, (40, 3, 14, 14), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return MediaInput(positions=POSITIONS, pixels=pixels, grids=GRIDS)


def test_features_overwrite_the_embeddings_of_the_pads() -> None:
    model, media = build(CONFIG), media_of()
    tokens = random_tokens(model, 1, 16)
    logits = model(tokens, media=media)
    others = tokens.clone()
    others[0, POSITIONS] = (others[0, POSITIONS] + 1) % CONFIG.vocab_size
    assert torch.equal(model(others, media=media), logits)
    assert relative_error(model(tokens, media=media_of(1)), logits) > 1e-3
    features = model.vision_features(media.pixels, GRIDS)
    assert torch.equal(model(tokens, media=media.with_features(features)), logits)
    # As a table would: the features are the rows of tokens that nobody else uses.
    wide = build(replace(CONFIG, vocab_size=CONFIG.vocab_size + 8, vision=None))
    with torch.no_grad():
        shared = {name: value for name, value in model.state_dict().items() if name in wide.state_dict()}
        table = torch.cat([shared.pop("embed_tokens.weight"), features])
        head = torch.cat([shared.pop("lm_head.weight"), torch.zeros_like(features)])
        wide.load_state_dict({**shared, "embed_tokens.weight": table, "lm_head.weight": head})
    named = tokens.clone()
    named[0, POSITIONS] = CONFIG.vocab_size + torch.arange(8)
    assert relative_error(wide(named)[..., : CONFIG.vocab_size], logits) < SAME


def test_positions_count_over_all_rows_of_a_batch() -> None:
    model, media = build(CONFIG), media_of()
    tokens = random_tokens(model, 2, 16)
    shifted = replace(media, positions=POSITIONS + 16)
    logits = model(tokens, media=shifted)
    assert relative_error(logits[1:], model(tokens[1:], media=media)) < SAME
    assert relative_error(logits[:1], model(tokens[:1])) < SAME


def test_gradients_reach_the_tower_and_not_the_overwritten_rows() -> None:
    model = build(CONFIG)
    tokens = torch.full((1, 16), 7)
    tokens[0, POSITIONS] = 60
    model.loss(tokens, random_tokens(model, 1, 16), media=media_of()).backward()
    for name, parameter in model.named_parameters():
        if name.startswith(("vision_tower.", "mm_projector.")):
            assert parameter.grad is not None and parameter.grad.any(), name
    gradient = model.embed_tokens.weight.grad
    assert gradient is not None and gradient[7].any() and not gradient[60].any()


def test_text_is_the_same_with_a_tower_and_without() -> None:
    with_tower, without = Decoder(CONFIG, seed=3), Decoder(replace(CONFIG, vision=None), seed=3)
    tokens = random_tokens(without, 1, 9)
    assert torch.equal(with_tower(tokens), without(tokens))
    extra = with_tower.num_parameters() - without.num_parameters()
    towers = (with_tower.vision_tower, with_tower.mm_projector)
    assert extra == sum(parameter.numel() for part in towers for parameter in part.parameters()) > 0


def test_the_same_seed_gives_the_same_tower() -> None:
    torch.manual_seed(1)
    first = Decoder(CONFIG, seed=3).state_dict()
    torch.manual_seed(2)
    second = Decoder(CONFIG, seed=3).state_dict()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
    assert not first["vision_tower.encoder.blocks.0.wqkv.bias"].any()
    assert first["vision_tower.patch_embed.pos_emb.weight"].any()


def test_muon_gets_the_matrices_of_the_tower_and_adam_the_rest() -> None:
    layouts = {entry.name: entry.layout for entry in plan_parameters(build(CONFIG))}
    block = "vision_tower.encoder.blocks.0."
    assert layouts[block + "wqkv.weight"] == RowBlocks((24, 24, 24), fused=True)
    muon = {name for name, layout in layouts.items() if not isinstance(layout, Adam) and "vision" in name}
    maps = ("wqkv", "wo", "mlp.fc0", "mlp.fc1")
    assert muon == {f"vision_tower.encoder.blocks.{index}.{name}.weight" for index in range(2) for name in maps}
    assert layouts["mm_projector.proj.0.weight"] == layouts["mm_projector.proj.2.weight"] == Whole()
    for name in ("vision_tower.patch_embed.proj.weight", "vision_tower.patch_embed.pos_emb.weight"):
        assert layouts[name] == Adam(weight_decay=True)
    assert layouts["mm_projector.proj.2.bias"] == layouts[block + "norm0.bias"] == Adam()


def test_a_projector_as_wide_as_the_vocabulary_is_no_output_head() -> None:
    model = Decoder(replace(CONFIG, vocab_size=CONFIG.hidden_size, tie_word_embeddings=True))
    layouts = {entry.name: entry.layout for entry in plan_parameters(model)}
    assert layouts["mm_projector.proj.2.weight"] == Whole()


def test_generation_sees_the_picture_and_decodes_as_the_full_forward() -> None:
    model, media = build(CONFIG).eval(), media_of()
    prompt = random_tokens(model, 16).tolist()
    greedy = SamplingConfig(max_new_tokens=6, temperature=0.0)
    produced = list(generate(model, prompt, greedy, media=media))
    assert len(produced) == 6
    tokens = list(prompt)
    for token in produced:
        assert token == int(model(torch.tensor([tokens]), media=media)[0, -1].argmax())
        tokens.append(token)
    answers = {tuple(generate(model, prompt, greedy, media=media_of(seed))) for seed in range(4)}
    assert len(answers) > 1


def test_wrong_media_are_named() -> None:
    model, media = build(CONFIG), media_of()
    tokens = random_tokens(model, 1, 16)
    with pytest.raises(ValueError, match=r"positions is torch.int64 \(7,\), expected integers \[8\]"):
        replace(media, positions=POSITIONS[:7])
    with pytest.raises(ValueError, match="expected integers"):
        replace(media, positions=POSITIONS.float())
    with pytest.raises(ValueError, match="exactly one of the two"):
        MediaInput(positions=POSITIONS)
    with pytest.raises(ValueError, match=r"features is \(8, 5\), expected \[N, 32\]"):
        model(tokens, media=media.with_features(torch.zeros(8, 5)))
    with pytest.raises(ValueError, match="model.vision is None"):
        build(BASE)(tokens, media=media)
    with pytest.raises(ValueError, match="positions reaches 13, expected indices into the 5 tokens"):
        next(generate(model, [1, 2, 3, 4, 5], SamplingConfig(), media=media))
