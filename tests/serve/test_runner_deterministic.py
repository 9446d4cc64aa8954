"""The deterministic runner: logits and log-probs have the bits of the training forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from perilune.model import MediaInput
from perilune.model.deterministic import TILE, token_log_probs
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner
from tests.serve.tiny import fresh_model, prompt_with_pictures

LONGEST = 2 * TILE + 20
PAGES = -(-LONGEST // TILE)
NAMES = ("hybrid", "block_attnres", "experts", "pictures")
MODELS = {name: fresh_model(name, "float32") for name in NAMES}


def same_bits(ours: Tensor, right: Tensor) -> bool:
    return ours.shape == right.shape and torch.equal(ours.view(torch.int32), right.view(torch.int32))


def trained(name: str, tokens: tuple[int, ...], media: MediaInput | None = None) -> Tensor:
    model = MODELS[name]
    model.deterministic = True
    try:
        return model.logits(model.hidden(torch.tensor([tokens]), media=media)[0]).detach()
    finally:
        model.deterministic = False


def share(index: int, tokens: tuple[int, ...], start: int, end: int, **more) -> Share:
    """Tokens start .. end, begun at the border before them; only the last row is wanted."""
    border = start - start % TILE
    return Share(
        request_id=str(index), start=border, tokens=tokens[border:end], slot=index, want="last", samples=True,
        pages=tuple(index + 3 * page for page in range(-(-end // TILE))), **more,
    )  # fmt: skip


def tokens_of(length: int, seed: int) -> tuple[int, ...]:
    return tuple(torch.randint(300, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@pytest.mark.parametrize("name", ["hybrid", "block_attnres", "experts"])
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_steps_of_several_requests_have_the_bits_of_training(name: str, data: st.DataObject) -> None:
    runner = Runner(MODELS[name], num_pages=3 * PAGES, page_size=TILE, num_slots=4, max_sequences=3, deterministic=True)
    sequences = [tokens_of(length, seed) for seed, length in enumerate((LONGEST, TILE, 30))]
    right = [trained(name, tokens) for tokens in sequences]
    done = [0, 0, 0]
    for _ in range(8):
        waiting = [index for index in range(3) if done[index] < len(sequences[index])]
        if not waiting:
            break
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True))
        shares = []
        for index in chosen:
            left = len(sequences[index]) - done[index]
            end = done[index] + min(left, data.draw(st.sampled_from([1, 1, 20, TILE, left])))
            shares.append(share(index, sequences[index], done[index], end))
            done[index] = end
        logits = runner.run(StepPlan(shares=tuple(shares)))
        for row, index in zip(logits.split(1), chosen, strict=True):
            expected = right[index][done[index] - 1 : done[index]]
            assert same_bits(row, expected)
            ids = torch.tensor([7])
            assert same_bits(token_log_probs(row, ids), token_log_probs(expected, ids))


def test_a_snapshot_at_a_page_border_continues_with_the_bits_of_training() -> None:
    runner = Runner(MODELS["hybrid"], num_pages=9, page_size=TILE, num_slots=4, max_sequences=3, deterministic=True)
    stem, tail = tokens_of(TILE, 0), tokens_of(9, 1)
    runner.run(StepPlan(shares=(share(0, stem, 0, TILE),)))
    runner.copy_state(0, 3)
    runner.run(StepPlan(shares=(share(0, stem + tokens_of(9, 2), TILE, TILE + 9),)))
    again = Share(
        request_id="b", start=TILE, tokens=tail, pages=(0, 8), slot=3, want="all", samples=True
    )  # fmt: skip
    assert same_bits(runner.run(StepPlan(shares=(again,))), trained("hybrid", stem + tail)[TILE:])


def test_pictures_have_the_bits_of_training() -> None:
    tokens, pictures = prompt_with_pictures(tokens_of(TILE - 4, 0), (0, 1))
    positions = torch.cat([torch.arange(item.start, item.end) for item in pictures])
    pixels = torch.cat([torch.from_numpy(item.pixels) for item in pictures])
    media = MediaInput(positions=positions, pixels=pixels, grids=tuple(item.grid for item in pictures))
    right = trained("pictures", tokens, media)
    runner = Runner(MODELS["pictures"], num_pages=9, page_size=TILE, num_slots=4, max_sequences=3, deterministic=True)
    inside = pictures[0].start + 1
    for start, end in ((0, inside - 1), (inside - 1, inside), (inside, inside + 1), (inside + 1, len(tokens))):
        found = runner.run(StepPlan(shares=(share(0, tokens, start, end, pictures=pictures),)))
        assert same_bits(found, right[end - 1 : end])


def test_pages_that_tiles_do_not_fill_are_refused() -> None:
    with pytest.raises(ValueError, match=f"page_size is 48, expected a multiple of {TILE}"):
        Runner(MODELS["hybrid"], num_pages=9, page_size=48, num_slots=4, max_sequences=3, deterministic=True)


def test_late_tokens_are_refused() -> None:
    runner = Runner(MODELS["hybrid"], num_pages=9, page_size=TILE, num_slots=4, max_sequences=3, deterministic=True)
    late = Share(request_id="a", start=0, tokens=(-1,), pages=(0,), slot=0, want="last", samples=True, late_row=0)
    with pytest.raises(ValueError, match="wait for their ids"):
        runner.run(StepPlan(shares=(late,)), torch.tensor([1]))
