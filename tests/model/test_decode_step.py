"""Decodes through bound weights: what Decoder.step gives, for every kind of layer, and never from old weights."""

import random
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.model import Decoder
from perilune.model.decode_step import DecodeStep, bind
from perilune.model.paged import LatentPool, PagedCache
from perilune.model.side_by_side import lay_apart, lay_side_by_side
from tests.model.paged_sequences import Pool, alone
from tests.model.small_models import BASE, VARIANTS, build, random_tokens

# float64 sums over a few dozen tokens and eight sublayers, in another order.
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def laid(name: str) -> Decoder:
    model = build(VARIANTS[name]).eval()
    lay_side_by_side(model)
    return model


laid_once = cache(laid)


def bound(model: Decoder) -> DecodeStep:
    step = bind(model)
    assert step is not None
    return step


def prompts_of(model: Decoder, lengths: list[int]) -> list[tuple[int, ...]]:
    return [tuple(random_tokens(model, length, seed=seed).tolist()) for seed, length in enumerate(lengths)]


def decoded(step: DecodeStep, pool: Pool, count: int) -> list[Tensor]:
    """[count, hidden] of every sequence, one token of each at a time."""
    rows = []
    for _ in range(count):
        batch = pool.batch([pool.take(sequence, 1) for sequence in pool.sequences])
        rows.append(step(batch, pool.cache))
    return list(torch.stack(rows, dim=1))


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=5, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=st.integers(0, 99), in_a_row=st.booleans())
def test_every_sequence_gets_what_it_would_get_alone(
    name: str, lengths: list[int], seed: int, in_a_row: bool
) -> None:  # fmt: skip
    model = laid_once(name)
    prompts = prompts_of(model, [length + 4 for length in lengths])
    pool = Pool.of(model, prompts, page_size=4, seed=seed)
    if in_a_row:
        for slot, sequence in enumerate(pool.sequences, start=seed % 3):
            sequence.slot = slot
    model.step(pool.batch([pool.take(each, n) for each, n in zip(pool.sequences, lengths)]), pool.cache)
    for found, tokens in zip(decoded(bound(model), pool, 4), prompts, strict=True):
        torch.testing.assert_close(found, alone(model, tokens)[-4:], **EXACT)


def spoil_what_is_past_the_end(cache: PagedCache, pool: Pool) -> None:
    owned = [page * 4 + row for each in pool.sequences for page in each.pages for row in range(4)]
    written = [
        each.pages[place // 4] * 4 + place % 4 for each in pool.sequences for place in range(each.done)
    ]  # fmt: skip
    for layer in cache.layers:
        if isinstance(layer, LatentPool):
            layer.rows[sorted(set(owned) - set(written))] = torch.nan


def test_rows_past_the_end_of_a_sequence_may_hold_anything() -> None:
    model = laid_once("plain")
    prompts = prompts_of(model, [11, 6])
    pool = Pool.of(model, prompts, page_size=4, seed=0)
    model.step(pool.batch([pool.take(pool.sequences[0], 9), pool.take(pool.sequences[1], 4)]), pool.cache)
    batch = pool.batch([pool.take(each, 1) for each in pool.sequences])
    spoil_what_is_past_the_end(pool.cache, pool)
    found = bound(model)(batch, pool.cache)
    torch.testing.assert_close(found, torch.stack([alone(model, prompts[0])[9], alone(model, prompts[1])[4]]), **EXACT)


def test_slots_of_others_are_left_alone() -> None:
    model = laid_once("kda_only")
    pool = Pool.of(model, prompts_of(model, [4, 4, 4]), page_size=4, seed=2)
    model.step(pool.batch([pool.take(each, 2) for each in pool.sequences]), pool.cache)
    last = pool.sequences.pop(random.Random(0).randrange(3))
    kept = [(layer.state[last.slot].clone(), layer.conv[last.slot].clone()) for layer in pool.cache.layers]
    decoded(bound(model), pool, 2)
    for layer, (state, conv) in zip(pool.cache.layers, kept, strict=True):
        assert torch.equal(layer.state[last.slot], state) and torch.equal(layer.conv[last.slot], conv)


def test_wanted_rows_come_in_the_order_they_were_asked_for() -> None:
    model = laid_once("plain")
    prompts = prompts_of(model, [5, 5, 5])
    pool = Pool.of(model, prompts, page_size=4, seed=0)
    model.step(pool.batch([pool.take(each, 4) for each in pool.sequences]), pool.cache)
    batch = pool.batch([pool.take(each, 1) for each in pool.sequences], wanted=[2, 0])
    right = torch.stack([alone(model, prompts[2])[-1], alone(model, prompts[0])[-1]])
    torch.testing.assert_close(bound(model)(batch, pool.cache), right, **EXACT)


@pytest.mark.parametrize("name", ["plain", "block_attnres"])
def test_any_weight_that_changes_makes_it_outdated(name: str) -> None:
    model = laid(name)
    for parameter in model.parameters():
        step = bound(model)
        assert step.is_current()
        with torch.no_grad():
            parameter.copy_(parameter.clone())
        assert not step.is_current()


def test_weights_that_moved_make_it_outdated() -> None:
    model = laid("plain")
    step = bound(model)
    lay_apart(model)
    assert not step.is_current()


def test_weights_that_lie_apart_are_called_through_their_modules() -> None:
    model = build(BASE).eval()
    prompts = prompts_of(model, [7])
    pool = Pool.of(model, prompts, page_size=4, seed=0)
    model.step(pool.batch([pool.take(pool.sequences[0], 4)]), pool.cache)
    torch.testing.assert_close(decoded(bound(model), pool, 3)[0], alone(model, prompts[0])[-3:], **EXACT)


def test_hooks_and_half_precision_are_left_to_the_modules() -> None:
    model = laid("plain")
    handle = model.layers[0].self_attn.o_proj.register_forward_hook(lambda *_: None)
    assert bind(model) is None
    handle.remove()
    assert bind(model) is not None
    model.set_compute_dtype("bfloat16")
    assert bind(model) is None
