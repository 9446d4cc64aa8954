"""The runner: plans of a scheduler become logits, whatever is batched with what."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from perilune.model import Decoder, MediaInput
from perilune.serve.graphs import batch_buckets, bucket_of, width_of
from perilune.serve.pictures import FeatureStore
from perilune.serve.plan import Share, StepPlan, Want
from perilune.serve.request import Picture
from perilune.serve.runner import Runner
from tests.serve.tiny import fresh_model, model, picture, prompt_with_pictures

PAGE = 8
# float64 sums over a few dozen tokens, in another order.
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def tokens_of(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(300, (length,), generator=generator).tolist())


def runner_of(name: str = "hybrid", **options) -> Runner:
    sizes = {"num_pages": 24, "page_size": PAGE, "num_slots": 8, "max_sequences": 6}
    return Runner(model(name), **{**sizes, **options})


def share(name: str, tokens: tuple[int, ...], start: int, stop: int, *, want: Want = "last", place: int = 0, **more):
    """Tokens start .. stop of a sequence that owns every third page from `place` on, backwards, and slot `place`."""
    pages = tuple(21 + place - 3 * index for index in range(-(-stop // PAGE)))
    return Share(
        request_id=name, start=start, tokens=tokens[start:stop], pages=pages, slot=place, want=want,
        samples=want != "none", **more,
    )  # fmt: skip


def expected(decoder: Decoder, tokens: tuple[int, ...], media: MediaInput | None = None) -> Tensor:
    with torch.no_grad():
        return decoder(torch.tensor([tokens]), media=media)[0]


@pytest.mark.parametrize("use_graphs", [False, True])
@pytest.mark.parametrize("name", ["hybrid", "mla", "kda", "block_attnres", "experts"])
def test_rows_come_in_the_order_of_the_plan_and_equal_the_whole_forward(name: str, use_graphs: bool) -> None:
    runner = runner_of(name, use_graphs=use_graphs)
    first, second, third = tokens_of(30, 1), tokens_of(20, 2), tokens_of(9, 3)
    right = [expected(runner.model, tokens) for tokens in (first, second, third)]
    found = runner.run(StepPlan(shares=(share("a", first, 0, 12, want="none"), share("b", second, 0, 9, place=1))))
    torch.testing.assert_close(found, right[1][8:9], **EXACT)
    plan = StepPlan(
        shares=(
            share("b", second, 9, 10, want="none", place=1),
            share("a", first, 12, 13, want="all"),
            share("c", third, 0, 9, want="all", place=2),
        )
    )
    torch.testing.assert_close(runner.run(plan), torch.cat([right[0][12:13], right[2]]), **EXACT)
    plan = StepPlan(shares=(share("b", second, 10, 11, place=1), share("a", first, 13, 14)))
    torch.testing.assert_close(runner.run(plan), torch.cat([right[1][10:11], right[0][13:14]]), **EXACT)
    plan = StepPlan(shares=(share("b", second, 11, 12, want="none", place=1), share("a", first, 14, 15)))
    torch.testing.assert_close(runner.run(plan), right[0][14:15], **EXACT)


def decode_steps(runner: Runner, sequences: list[tuple[int, ...]], start: int) -> Iterator[Tensor]:
    """Prefill up to `start`, then one token at a time for all of them."""
    runs = list(enumerate(sequences))
    yield runner.run(StepPlan(shares=tuple(share(str(i), tokens, 0, start, place=i) for i, tokens in runs)))
    for at in range(start, len(sequences[0])):
        yield runner.run(StepPlan(shares=tuple(share(str(i), tokens, at, at + 1, place=i) for i, tokens in runs)))


def test_padded_steps_of_every_bucket_equal_steps_without_padding() -> None:
    for count in (1, 2, 3):
        sequences = [tokens_of(28, seed) for seed in range(count)]
        padded, plain = runner_of(use_graphs=True), runner_of(use_graphs=False)
        for ours, right in zip(decode_steps(padded, sequences, 5), decode_steps(plain, sequences, 5), strict=True):
            torch.testing.assert_close(ours, right, **EXACT)


def test_late_tokens_are_read_from_the_ids_of_the_step_before() -> None:
    for use_graphs in (True, False):
        runner = runner_of(use_graphs=use_graphs)
        tokens = tokens_of(12, 0)
        runner.run(StepPlan(shares=(share("a", tokens, 0, 6),)))
        late = Share(request_id="a", start=6, tokens=(-1,), pages=(21,), slot=0, want="last", samples=True, late_row=1)
        found = runner.run(StepPlan(shares=(late,)), torch.tensor([5, tokens[6]]))
        torch.testing.assert_close(found, expected(runner.model, tokens)[6:7], **EXACT)


def test_pages_that_moved_after_a_preemption_are_read_where_they_are_now() -> None:
    runner = runner_of(use_graphs=True)
    tokens = tokens_of(20, 0)
    runner.run(StepPlan(shares=(share("a", tokens, 0, 9),)))
    runner.run(StepPlan(shares=(share("a", tokens, 9, 10),)))
    runner.clear_state(0)
    moved = {"place": 1, "want": "last"}
    runner.run(StepPlan(shares=(share("a", tokens, 0, 9, **moved),)))
    found = [runner.run(StepPlan(shares=(share("a", tokens, at, at + 1, **moved),))) for at in range(9, 20)]
    torch.testing.assert_close(torch.cat(found), expected(runner.model, tokens)[9:], **EXACT)


def test_a_snapshot_continues_where_it_was_taken() -> None:
    runner = runner_of()
    stem, tail = tokens_of(16, 0), tokens_of(5, 1)
    runner.run(StepPlan(shares=(share("a", stem, 0, 16),)))
    runner.copy_state(0, 7)
    runner.run(StepPlan(shares=(share("a", stem + tail, 16, 21),)))
    runner.copy_state(7, 3)
    again = Share(
        request_id="b", start=16, tokens=tail, pages=(21, 18, 4), slot=3, want="all", samples=True
    )  # fmt: skip
    torch.testing.assert_close(runner.run(StepPlan(shares=(again,))), expected(runner.model, stem + tail)[16:], **EXACT)


def test_an_empty_plan_gives_no_rows() -> None:
    assert runner_of().run(StepPlan()).shape == (0, model().config.vocab_size)


# Pictures -------------------------------------------------------------------------------------------------------------


def test_a_chunk_may_begin_and_end_inside_a_picture_and_the_tower_looks_once() -> None:
    tokens, pictures = prompt_with_pictures((5, 6), (0, 1, 0))
    runner = runner_of("pictures")
    decoder = runner.model
    positions = torch.cat([torch.arange(item.start, item.end) for item in pictures])
    pixels = torch.cat([torch.from_numpy(item.pixels) for item in pictures])
    media = MediaInput(positions=positions, pixels=pixels, grids=tuple(item.grid for item in pictures))
    right = expected(decoder, tokens, media)
    cut = pictures[0].start + 1  # inside the first picture
    first = share("a", tokens, 0, cut, want="all", pictures=pictures[:1])
    second = share("a", tokens, cut, cut + 1, want="all", pictures=pictures[:1])
    rest = share("a", tokens, cut + 1, len(tokens), want="all", pictures=pictures[1:])
    found = torch.cat([runner.run(StepPlan(shares=(part,))) for part in (first, second, rest)])
    torch.testing.assert_close(found, right, **EXACT)
    assert runner.pictures.num_looks == 2


def test_features_are_dropped_oldest_first_when_they_take_too_many_bytes() -> None:
    decoder = model("pictures")
    one = 2 * decoder.config.hidden_size * 8
    store = FeatureStore(decoder, max_bytes=2 * one)
    shown = [Picture.of(picture(seed), 0) for seed in range(3)]
    store.features(shown[0])
    store.features(shown[1])
    store.features(shown[0])
    store.features(shown[2])
    assert len(store) == 2 and store.num_bytes == 2 * one and store.num_looks == 3
    store.features(shown[0])
    assert store.num_looks == 3
    store.features(shown[1])
    assert store.num_looks == 4


def test_one_picture_larger_than_the_limit_is_still_served() -> None:
    store = FeatureStore(model("pictures"), max_bytes=1)
    shown = Picture.of(picture(0), 0)
    assert store.features(shown) is store.features(shown)


# Weights --------------------------------------------------------------------------------------------------------------


def test_new_weights_are_copied_in_place_and_used_by_the_next_step() -> None:
    old, new = fresh_model("pictures", seed=0), fresh_model("pictures", seed=1)
    runner = Runner(old, num_pages=4, page_size=PAGE, num_slots=2, max_sequences=2)
    storage = {name: tensor.data_ptr() for name, tensor in runner.model.state_dict().items()}
    shown = Picture.of(picture(0), 0)
    before = runner.pictures.features(shown)
    runner.load_weights(new)
    assert storage == {name: tensor.data_ptr() for name, tensor in runner.model.state_dict().items()}
    plan = StepPlan(
        shares=(Share(request_id="a", start=0, tokens=(1, 2, 3), pages=(0,), slot=0, want="all", samples=True),)
    )
    torch.testing.assert_close(runner.run(plan), expected(new, (1, 2, 3)), **EXACT)
    assert not torch.equal(runner.pictures.features(shown), before)


def test_decodes_use_new_weights_after_they_were_loaded() -> None:
    new, tokens = fresh_model(seed=1), tokens_of(6, 1)
    runner = Runner(fresh_model(seed=0), num_pages=24, page_size=PAGE, num_slots=2, max_sequences=2)
    runner.run(StepPlan(shares=(share("a", tokens, 0, 4),)))
    runner.run(StepPlan(shares=(share("a", tokens, 4, 5),)))
    runner.load_weights(new)
    runner.clear_state(0)
    runner.run(StepPlan(shares=(share("a", tokens, 0, 5),)))
    torch.testing.assert_close(
        runner.run(StepPlan(shares=(share("a", tokens, 5, 6),))), expected(new, tokens)[5:], **EXACT
    )


def test_slots_in_any_order_give_the_rows_of_the_plan() -> None:
    runner = runner_of(use_graphs=False)
    sequences = [tokens_of(8, seed) for seed in range(3)]
    places = (2, 0, 1)
    runner.run(StepPlan(shares=tuple(share(str(i), tokens, 0, 7, place=i) for i, tokens in enumerate(sequences))))
    plan = StepPlan(shares=tuple(share(str(i), sequences[i], 7, 8, place=i) for i in places))
    right = torch.cat([expected(runner.model, sequences[i])[7:] for i in places])
    torch.testing.assert_close(runner.run(plan), right, **EXACT)


def test_weights_that_do_not_fit_are_refused_and_change_nothing() -> None:
    runner = Runner(fresh_model(), num_pages=4, page_size=PAGE, num_slots=2, max_sequences=2)
    kept = {name: tensor.clone() for name, tensor in runner.model.state_dict().items()}
    other = fresh_model(seed=3).state_dict()
    for wrong, message in (
        ({name: tensor for name, tensor in other.items() if name != "norm.weight"}, "lack 'norm.weight'"),
        ({**other, "extra": torch.zeros(1)}, "hold 'extra'"),
        ({**other, "norm.weight": torch.zeros(3)}, r"weights\['norm.weight'\] is \(3,\), expected \(32,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.load_weights(wrong)
    for name, tensor in runner.model.state_dict().items():
        assert torch.equal(tensor, kept[name]), name


# Errors and sizes -----------------------------------------------------------------------------------------------------


def test_shares_that_cannot_run_are_refused_by_name() -> None:
    runner = runner_of()
    good = share("a", tokens_of(9, 0), 0, 9)
    for wrong, message in (
        (replace(good, slot=8), "slot is 8, expected 0 .. 7"),
        (replace(good, pages=(1,)), "share of 'a' has 1 pages of 8 tokens, expected enough for 9"),
        (replace(good, tokens=()), "share of 'a' has no tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.run(StepPlan(shares=(wrong,)))


def test_buckets_double_up_to_the_most_sequences() -> None:
    assert batch_buckets(1) == (1,)
    assert batch_buckets(6) == (1, 2, 4, 6)
    assert [bucket_of(count, (1, 2, 4, 6)) for count in (1, 2, 3, 5)] == [1, 2, 4, 6]
    with pytest.raises(ValueError, match="at most max_sequences=6"):
        bucket_of(7, (1, 2, 4, 6))
    assert [width_of(pages) for pages in (0, 16, 17, 65)] == [16, 16, 64, 256]


def test_a_model_in_half_precision_has_its_matrices_rounded_once_and_the_same_logits() -> None:
    decoder = fresh_model("experts", "bfloat16")
    right = expected(decoder, (1, 2, 3))
    runner = Runner(decoder, num_pages=4, page_size=PAGE, num_slots=2, max_sequences=2)
    assert decoder.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    assert decoder.layers[0].self_attn.A_log.dtype == torch.float32
    assert decoder.layers[1].mlp.gate.weight.dtype == torch.float32
    plan = StepPlan(
        shares=(Share(request_id="a", start=0, tokens=(1, 2, 3), pages=(0,), slot=0, want="all", samples=True),)
    )
    # Products with more columns may round the last of 8 bits differently.
    torch.testing.assert_close(runner.run(plan), right, rtol=0.05, atol=0.05)
    runner.load_weights(fresh_model("experts", "bfloat16", seed=1))
    assert decoder.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16


def test_a_page_that_was_exchanged_between_the_first_and_the_last_is_noticed() -> None:
    runner = runner_of(use_graphs=True)
    tokens = tokens_of(2 * PAGE + 4, 0)
    common = {"request_id": "a", "slot": 0, "want": "last", "samples": True}
    for pages in ((1, 2, 3), (1, 9, 3)):  # pre-empted in between, and computed anew
        runner.clear_state(0)
        runner.run(StepPlan(shares=(Share(start=0, tokens=tokens[:-1], pages=pages, **common),)))
        if 2 not in pages:
            runner.cache.layers[-1].pages[2] = 0.5  # another sequence's by now
        found = runner.run(StepPlan(shares=(Share(start=len(tokens) - 1, tokens=tokens[-1:], pages=pages, **common),)))
    torch.testing.assert_close(found, expected(runner.model, tokens)[-1:], **EXACT)
