"""Deterministic mode: the same bits however documents are packed, cut, decoded or continued from copied states."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.model import Decoder, MediaInput, VisionConfig
from perilune.model.deterministic import KEYS, TILE, token_log_probs
from perilune.model.paged import PagedCache, new_paged_cache
from perilune.model.paged_tiles import run_tiles
from perilune.model.side_by_side import lay_side_by_side
from tests.model.paged_sequences import Tokens
from tests.model.small_models import BASE, VARIANTS, build, random_tokens

PAGE = TILE


@cache
def model_of(name: str) -> Decoder:
    """In float32, where the order of sums shows."""
    model = build(replace(VARIANTS[name], compute_dtype="float32")).eval()
    model.deterministic = True
    return model


@cache
def prompt(name: str, length: int, seed: int) -> tuple[int, ...]:
    return tuple(random_tokens(model_of(name), length, seed=seed).tolist())


@cache
def trained(name: str, length: int, seed: int) -> Tensor:
    """What the trainer sees, with gradients on as in training."""
    return model_of(name).hidden(torch.tensor([prompt(name, length, seed)]))[0].detach()


def same_bits(ours: Tensor, right: Tensor) -> bool:
    return ours.shape == right.shape and torch.equal(ours.view(torch.int32), right.view(torch.int32))


class Server:
    """Sequences over pools; every piece of work replays from the last border, as plans of the scheduler do."""

    def __init__(self, model: Decoder, num_sequences: int, longest: int) -> None:
        self.model = model
        self.each = -(-longest // PAGE)
        self.cache: PagedCache = new_paged_cache(
            model.config, num_pages=num_sequences * self.each, page_size=PAGE, num_slots=num_sequences + 1
        )

    def run(self, index: int, tokens: tuple[int, ...], start: int, end: int) -> Tensor:
        """Hidden states of tokens start .. end."""
        border = start - start % TILE
        pages = tuple(reversed(range(index * self.each, (index + 1) * self.each)))
        run = Tokens(start=border, tokens=tokens[border:end], pages=pages[: -(-end // PAGE)], slot=index)
        return run_tiles(self.model, run, self.cache)[start - border :]


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_any_cut_into_chunks_and_decodes_gives_the_bits_of_training(name: str, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from([1, 5, TILE, TILE + 1, 2 * TILE + 9]), min_size=1, max_size=3))
    server = Server(model_of(name), len(lengths), max(lengths))
    done, found = [0] * len(lengths), [[] for _ in lengths]
    while waiting := [index for index, length in enumerate(lengths) if done[index] < length]:
        index = data.draw(st.sampled_from(waiting))
        left = lengths[index] - done[index]
        count = min(left, data.draw(st.sampled_from([1, 1, 7, TILE, left])))
        tokens = prompt(name, lengths[index], index)
        found[index].append(server.run(index, tokens, done[index], done[index] + count))
        done[index] += count
    for index, length in enumerate(lengths):
        assert same_bits(torch.cat(found[index]), trained(name, length, index))


@pytest.mark.parametrize("name", ["block_attnres", "experts"])
def test_a_document_has_the_same_bits_alone_packed_and_in_a_batch(name: str) -> None:
    model = model_of(name)
    lengths = (70, 3, 130)
    rows = [torch.tensor([prompt(name, length, index)]) for index, length in enumerate(lengths)]
    packed = model.hidden(torch.cat(rows, dim=1), cu_seqlens=torch.tensor([0, 70, 73, 203]))[0].detach()
    for index, (length, part) in enumerate(zip(lengths, packed.split(lengths))):
        assert same_bits(part, trained(name, length, index))
    batched = model.hidden(torch.cat([rows[0], rows[0].flip(1)])).detach()
    assert same_bits(batched[0], trained(name, 70, 0))


def test_a_prefix_has_the_same_bits_whatever_follows_it() -> None:
    model = model_of("block_attnres")
    whole = trained("block_attnres", 150, 0)
    for length in (1, 63, 64, 65, 149):
        tokens = torch.tensor([prompt("block_attnres", 150, 0)[:length]])
        assert same_bits(model.hidden(tokens)[0].detach(), whole[:length])


def test_more_keys_than_one_product_reads_are_attended_to() -> None:
    exact = build(VARIANTS["mla_only_tied"]).eval()
    tokens = random_tokens(exact, 1, KEYS + 2 * TILE + 5)
    with torch.no_grad():
        right = exact.hidden(tokens)
        exact.deterministic = True
        torch.testing.assert_close(exact.hidden(tokens), right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_and_gradients_are_those_of_the_ordinary_mode(name: str) -> None:
    model = build(VARIANTS[name])
    tokens, targets = random_tokens(model, 1, 100), random_tokens(model, 1, 100, seed=1)
    targets[0, 3] = -100
    borders = torch.tensor([0, 20, 100])
    results = []
    for mode in (False, True):
        model.deterministic = mode
        model.zero_grad()
        model.discard_step_statistics()
        loss = model.loss(tokens, targets, borders)
        loss.backward()
        gradients = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        counts = [router.counts.clone() for router in model._routers()]
        results.append((loss.detach(), gradients, counts, model.max_logits().clone()))
    (loss, gradients, counts, logits), (ours, our_gradients, our_counts, our_logits) = results
    torch.testing.assert_close(ours, loss, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(our_gradients, gradients, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(our_counts, counts, rtol=0, atol=0)
    torch.testing.assert_close(our_logits, logits, rtol=1e-6, atol=1e-6)


def test_logits_and_log_probs_of_a_row_do_not_depend_on_its_neighbours() -> None:
    model = model_of("plain")
    hidden = trained("plain", 70, 0)
    with torch.no_grad():
        logits = model.logits(hidden)
        ids = logits.argmax(-1)
        scores = token_log_probs(logits, ids)
        for row in (0, 13, 69):
            alone = model.logits(hidden[row : row + 1])
            assert same_bits(alone, logits[row : row + 1])
            assert same_bits(token_log_probs(alone, ids[row : row + 1]), scores[row : row + 1])
    torch.testing.assert_close(scores, logits.log_softmax(-1).amax(-1), rtol=1e-5, atol=1e-6)


def test_weights_laid_side_by_side_change_no_bit() -> None:
    model = build(replace(VARIANTS["plain"], compute_dtype="float32")).eval()
    model.deterministic = True
    tokens = random_tokens(model, 1, 70)
    with torch.no_grad():
        right = model.hidden(tokens)
        lay_side_by_side(model)
        assert same_bits(model.hidden(tokens), right)


def test_pictures_have_the_same_bits_one_at_a_time_and_together() -> None:
    vision = VisionConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    model = build(replace(BASE, vision=vision, compute_dtype="float32")).eval()
    model.deterministic = True
    grids = ((1, 2, 4), (1, 6, 2), (1, 2, 4))
    pixels = torch.randint(256, (28, 3, 14, 14), dtype=torch.uint8)
    with torch.no_grad():
        together = model.vision_features(pixels, grids)
        apart = [model.vision_features(part, (grid,)) for part, grid in zip(pixels.split([8, 12, 8]), grids)]
        assert same_bits(torch.cat(apart), together)
        tokens = random_tokens(model, 1, 80)
        positions = torch.tensor([1, 2, 62, 63, 64, 70, 71])
        right = model.hidden(tokens, media=MediaInput(positions=positions, pixels=pixels, grids=grids))
        given_features = model.hidden(tokens, media=MediaInput(positions=positions, features=together))
    assert same_bits(given_features, right)


def test_a_cache_of_single_steps_is_refused() -> None:
    model = model_of("plain")
    with pytest.raises(ValueError, match="decodes through the engine"):
        model.hidden(torch.tensor([[1]]), cache=model.new_cache())


def test_a_run_that_begins_inside_a_tile_is_refused() -> None:
    server = Server(model_of("plain"), 1, TILE)
    run = Tokens(start=3, tokens=(1, 2), pages=(0,), slot=0)
    with pytest.raises(ValueError, match="a tile begins at 3 with 2 tokens"):
        run_tiles(server.model, run, server.cache)
