"""Steps of many sequences over pages and slots: every sequence gets what it would get alone."""

import copy
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.kernels.kda.decode import kda_decode
from perilune.kernels.mla_decode import mla_decode
from perilune.kernels.triton_support import INTERPRETED
from perilune.model import Decoder, MediaInput, VisionConfig
from perilune.model.paged import PagedCache, bytes_per_page, bytes_per_slot, new_paged_cache
from perilune.model.paged_batch import decode_batch, decode_numbers, mixed_batch, page_table
from tests.model.paged_sequences import Pool, Tokens, alone, in_row_order
from tests.model.small_models import BASE, VARIANTS, build, random_tokens

# float64 sums over a few dozen tokens and eight sublayers, in another order.
EXACT = {"rtol": 1e-9, "atol": 1e-9}


@cache
def model_of(name: str) -> Decoder:
    return build(VARIANTS[name]).eval()


@cache
def prompt(model_name: str, length: int, seed: int) -> tuple[int, ...]:
    return tuple(random_tokens(model_of(model_name), length, seed=seed).tolist())


@cache
def expected(model_name: str, length: int, seed: int) -> Tensor:
    return alone(model_of(model_name), prompt(model_name, length, seed))


def run_all(pool: Pool, plan: list[list[tuple[int, int]]]) -> list[Tensor]:
    """Steps of (sequence, tokens); the hidden states of every sequence in order."""
    found: list[list[Tensor]] = [[] for _ in pool.sequences]
    for shares in plan:
        runs = [pool.take(pool.sequences[index], count) for index, count in shares]
        owner = {id(run): index for run, (index, _) in zip(runs, shares)}
        hidden = pool.model.step(pool.batch(runs), pool.cache)
        ordered = in_row_order(runs)
        for run, rows in zip(ordered, hidden.split([len(run.tokens) for run in ordered])):
            found[owner[id(run)]].append(rows)
    return [torch.cat(rows) for rows in found]


@st.composite
def mixes(draw: st.DrawFn, num_sequences: int = 4, longest: int = 40) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Lengths of sequences, and steps that take one token or a chunk of some of them until all are done."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=num_sequences))
    left, plan = list(lengths), []
    while any(left):
        waiting = [index for index, rest in enumerate(left) if rest]
        chosen = draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        shares = [(index, draw(st.one_of(st.just(1), st.integers(1, left[index])))) for index in chosen]
        for index, count in shares:
            left[index] -= count
        plan.append(shares)
    return lengths, plan


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=8, deadline=None)
@given(mix=mixes(), page_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 5))
def test_any_mix_of_decodes_and_chunks_equals_every_sequence_alone(
    name: str, mix: tuple[list[int], list[list[tuple[int, int]]]], page_size: int, seed: int
) -> None:
    lengths, plan = mix
    prompts = [prompt(name, length, index) for index, length in enumerate(lengths)]
    found = run_all(Pool.of(model_of(name), prompts, page_size=page_size, seed=seed), plan)
    for index, length in enumerate(lengths):
        torch.testing.assert_close(found[index], expected(name, length, index), **EXACT)


@pytest.mark.parametrize("name", ["mla_only_tied", "query_compression_yarn"])
def test_keys_of_a_long_prefix_are_expanded_piece_by_piece(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perilune.kernels.attention.continued.PIECE", 5)
    prompts = [prompt(name, 40, 0), prompt(name, 23, 1)]
    plan = [[(0, 9), (1, 3)], [(0, 12), (1, 7)], [(0, 1), (1, 13)], [(0, 18)]]
    found = run_all(Pool.of(model_of(name), prompts, page_size=4, seed=3), plan)
    for index, tokens in enumerate(prompts):
        torch.testing.assert_close(found[index], expected(name, len(tokens), index), **EXACT)


@pytest.mark.parametrize("name", ["block_attnres", "experts", "query_compression_yarn"])
def test_float32_steps_stay_within_1e_4_of_the_log_probs_of_float64(name: str) -> None:
    exact = model_of(name)
    rounded = Decoder(replace(VARIANTS[name], compute_dtype="float32")).eval()
    rounded.load_state_dict(exact.state_dict())
    prompts = [prompt(name, length, index) for index, length in enumerate((33, 20, 7))]
    plan = [[(0, 20), (1, 13)], [(0, 1), (1, 7), (2, 6)], [(0, 10), (2, 1)], [(0, 1)], [(0, 1)]]
    found = run_all(Pool.of(rounded, prompts, page_size=4, seed=0), plan)
    for index, tokens in enumerate(prompts):
        right = exact.logits(expected(name, len(tokens), index)).log_softmax(-1)
        assert (rounded.logits(found[index]).log_softmax(-1).double() - right).abs().max() < 1e-4


def test_layers_may_keep_what_they_derive_from_the_borders_of_chunks() -> None:
    runs = [Tokens(start=0, tokens=(1, 2, 3), pages=(0,), slot=0), Tokens(start=4, tokens=(1, 2), pages=(1, 2), slot=1)]
    with torch.inference_mode():
        batch = mixed_batch([], runs, page_size=4, scratch_row=12)
    assert batch.chunks is not None and batch.chunks.cu_seqlens.tolist() == [0, 3, 5]
    assert not batch.chunks.cu_seqlens.is_inference()  # an inference tensor has no version to recognize it by


def test_only_wanted_rows_come_back_and_in_the_order_asked() -> None:
    prompts = [prompt("plain", 9, 0), prompt("plain", 5, 1)]
    pool = Pool.of(model_of("plain"), prompts, page_size=4, seed=0)
    runs = [pool.take(sequence, len(sequence.tokens)) for sequence in pool.sequences]
    hidden = pool.model.step(pool.batch(runs, wanted=[13, 0, 8]), pool.cache)
    right = torch.cat([expected("plain", 9, 0), expected("plain", 5, 1)])
    torch.testing.assert_close(hidden, right[[13, 0, 8]], **EXACT)


@pytest.mark.parametrize("name", ["block_attnres", "experts", "kda_only", "mla_only_tied"])
def test_padding_rows_change_neither_the_other_rows_nor_any_page_or_slot(name: str) -> None:
    model = model_of(name)
    prompts = [prompt(name, 12, 0), prompt(name, 9, 1)]
    pool = Pool.of(model, prompts, page_size=4, seed=1)
    model.step(pool.batch([pool.take(sequence, 8) for sequence in pool.sequences]), pool.cache)
    runs = [pool.take(sequence, 1) for sequence in pool.sequences]
    before = contents(pool.cache)
    plain = model.step(pool.batch(runs), pool.cache)
    after = contents(pool.cache)
    restore(pool.cache, before)

    limits = {"page_size": 4, "scratch_row": pool.cache.scratch_row}
    numbers = torch.from_numpy(decode_numbers(runs, **limits, num_rows=8))
    padded = model.step(decode_batch(numbers, torch.from_numpy(page_table(runs, num_rows=8, width=7))), pool.cache)
    torch.testing.assert_close(padded[:2], plain, **EXACT)
    for ours, right in zip(contents(pool.cache), after, strict=True):
        torch.testing.assert_close(ours, right, **EXACT)


def contents(cache: PagedCache) -> list[Tensor]:
    """Everything a sequence may read: the scratch page is nobody's."""
    tensors = []
    for pool in cache.layers:
        tensors += [pool.pages[:-1]] if hasattr(pool, "pages") else [pool.state, pool.conv]
    return [tensor.clone() for tensor in tensors]


def restore(cache: PagedCache, kept: list[Tensor]) -> None:
    for pool in cache.layers:
        for tensor in [pool.pages[:-1]] if hasattr(pool, "pages") else [pool.state, pool.conv]:
            tensor.copy_(kept.pop(0))


def test_a_copied_state_and_shared_pages_continue_as_two_sequences() -> None:
    model = model_of("plain")
    stem, tails = prompt("plain", 8, 0), [prompt("plain", 6, 7), prompt("plain", 6, 8)]
    cache = new_paged_cache(model.config, num_pages=8, page_size=4, num_slots=4)
    limits = {"page_size": 4, "scratch_row": cache.scratch_row}
    model.step(mixed_batch([], [Tokens(start=0, tokens=stem, pages=(5, 2), slot=1)], **limits), cache)
    cache.copy_state(1, 3)
    runs = [
        Tokens(start=8, tokens=tails[0], pages=(5, 2, 7, 0), slot=1),
        Tokens(start=8, tokens=tails[1], pages=(5, 2, 6, 1), slot=3),
    ]
    found = model.step(mixed_batch([], runs, **limits), cache).split([6, 6])
    for rows, tail in zip(found, tails):
        torch.testing.assert_close(rows, alone(model, stem + tail)[8:], **EXACT)


def test_a_cleared_slot_has_forgotten_its_last_sequence() -> None:
    model = model_of("kda_only")
    first, second = prompt("kda_only", 8, 0), prompt("kda_only", 8, 1)
    cache = new_paged_cache(model.config, num_pages=2, page_size=8, num_slots=2)
    limits = {"page_size": 8, "scratch_row": cache.scratch_row}
    model.step(mixed_batch([], [Tokens(start=0, tokens=first, pages=(0,), slot=1)], **limits), cache)
    cache.clear_state(1)
    found = model.step(mixed_batch([], [Tokens(start=0, tokens=second, pages=(0,), slot=1)], **limits), cache)
    torch.testing.assert_close(found, alone(model, second), **EXACT)


def test_late_tokens_are_read_from_the_ids_of_the_step_before() -> None:
    tokens = prompt("plain", 12, 0)
    pool = Pool.of(model_of("plain"), [tokens, tokens], page_size=4, seed=0)
    pool.model.step(pool.batch([pool.take(sequence, 8) for sequence in pool.sequences]), pool.cache)
    runs = [
        replace(pool.take(pool.sequences[0], 1), tokens=(-1,), late_row=1),
        replace(pool.take(pool.sequences[1], 2), tokens=(tokens[8], -1), late_row=0),
    ]
    late = torch.tensor([tokens[9], tokens[8]])
    batch = mixed_batch(
        runs[:1], runs[1:], page_size=4, scratch_row=pool.cache.scratch_row, late_ids=late, wanted=[0, 2]
    )
    right = expected("plain", 12, 0)
    torch.testing.assert_close(pool.model.step(batch, pool.cache), right[[8, 9]], **EXACT)


def test_pictures_may_lie_across_the_border_of_two_chunks() -> None:
    vision = VisionConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        pos_emb_height=4,
        pos_emb_width=4,
    )
    model = build(replace(BASE, vision=vision)).eval()
    tokens = tuple(random_tokens(model, 12).tolist())
    features = torch.randn(4, model.config.hidden_size, dtype=torch.float64)
    places = torch.tensor([3, 4, 5, 6])
    right = model.hidden(torch.tensor([tokens]), media=MediaInput(positions=places, features=features))[0].detach()
    pool = Pool.of(model, [tokens], page_size=4, seed=0)
    found = []
    for start, count in ((0, 5), (5, 1), (6, 6)):
        run = pool.take(pool.sequences[0], count)
        inside = (places >= start) & (places < start + count)
        media = MediaInput(positions=places[inside] - start, features=features[inside])
        found.append(model.step(pool.batch([run]), pool.cache, media=media))
    torch.testing.assert_close(torch.cat(found), right, **EXACT)


def test_pools_take_the_bytes_that_were_foretold() -> None:
    for name in ("plain", "kda_only", "mla_only_tied"):
        config = VARIANTS[name]
        cache = new_paged_cache(config, num_pages=5, page_size=4, num_slots=3)
        assert cache.num_bytes() == 6 * bytes_per_page(config, 4) + 3 * bytes_per_slot(config)


def test_pools_of_no_pages_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="num_pages is 0, expected at least 1"):
        new_paged_cache(BASE, num_pages=0, page_size=4, num_slots=1)


def test_an_adapter_on_the_up_projection_is_refused() -> None:
    model = build(BASE).eval()
    pool = Pool.of(model, [prompt("plain", 4, 0)], page_size=4, seed=0)
    model.layers[3].self_attn.kv_b_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="merge adapters"):
        model.step(pool.batch([pool.take(pool.sequences[0], 4)]), pool.cache)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 (set where no GPU is)")
@pytest.mark.parametrize("name", ["plain", "bounded_full_rank_gate", "one_decay_a_head"])
def test_a_decode_through_the_gpu_kernels_equals_that_of_plain_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(replace(VARIANTS[name], compute_dtype="float32")).eval()
    pool = Pool.of(model, [prompt(name, 9, seed) for seed in range(2)], page_size=4, seed=0)
    model.step(pool.batch([pool.take(sequence, 8) for sequence in pool.sequences]), pool.cache)
    # As pools lie on a GPU: the window of every channel in one piece.
    layers = [
        replace(item, conv=item.conv.contiguous()) if hasattr(item, "conv") else item for item in pool.cache.layers
    ]
    on_gpu = copy.deepcopy(replace(pool.cache, layers=tuple(layers)))
    runs = [pool.take(sequence, 1) for sequence in pool.sequences]
    numbers = decode_numbers(runs, page_size=4, scratch_row=pool.cache.scratch_row, num_rows=4)
    batch = decode_batch(torch.from_numpy(numbers), torch.from_numpy(page_table(runs, num_rows=4)))
    right = model.step(batch, pool.cache)[:2]
    monkeypatch.setattr("perilune.model.kda.kda_decode", partial(kda_decode, backend="triton"))
    monkeypatch.setattr("perilune.model.mla.mla_decode", partial(mla_decode, backend="triton"))
    found = model.step(batch, on_gpu)[:2]
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    for ours, expected_tensor in zip(contents(on_gpu), contents(pool.cache), strict=True):
        torch.testing.assert_close(ours, expected_tensor, rtol=1e-4, atol=1e-5)
