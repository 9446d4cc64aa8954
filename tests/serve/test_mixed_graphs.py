"""Steps of decodes and chunks in the shape of a bucket, and their recordings: what steps without padding give."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import perilune.serve.graphs as graphs
import perilune.serve.mixed_graphs as mixed_graphs
from perilune.model.paged import LatentPool, PagedBatch, StatePool
from perilune.model.paged_batch import MOST_JOINED_KEYS
from perilune.serve.mixed_graphs import MixedGraphs, growing, key_buckets, token_buckets
from perilune.serve.plan import Share, StepPlan
from perilune.serve.runner import Runner
from tests.serve.engines import SMALL, answers, ask, generated, make_engine, tokens
from tests.serve.tiny import model, prompt_with_pictures

PAGE = 4
# float64 sums over a few dozen tokens, in another order.
EXACT = {"rtol": 1e-9, "atol": 1e-9}
PLACES = 5
PAGES_EACH = 10


def runner_of(name: str, *, use_graphs: bool, **options) -> Runner:
    sizes = {"num_pages": PLACES * PAGES_EACH, "page_size": PAGE, "num_slots": PLACES, "max_sequences": PLACES}
    return Runner(model(name), **{**sizes, **options}, use_graphs=use_graphs)


def share(place: int, start: int, ids: tuple[int, ...], **more) -> Share:
    """Tokens of the sequence that owns this slot, and every PLACES-th page from this one on, backwards."""
    count = -(-(start + len(ids)) // PAGE)
    pages = tuple(PLACES * (PAGES_EACH - 1 - index) + place for index in range(count))
    return Share(**{
        "request_id": str(place), "start": start, "tokens": ids, "pages": pages, "slot": place, "want": "last",
        "samples": True, **more,
    })  # fmt: skip


def pools(runner: Runner) -> list[Tensor]:
    """Everything that sequences own: no scratch."""
    found = []
    for pool in runner.cache.layers:
        if isinstance(pool, LatentPool):
            found.append(pool.pages[: runner.num_pages])
        elif isinstance(pool, StatePool):
            found += [pool.state[: runner.num_slots], pool.conv[: runner.num_slots]]
    return found


def used_of(runner: Runner, plan: StepPlan) -> list[Tensor]:
    """For every tensor of `pools`: which pages, or slots, belong to a share of the plan."""
    pages = torch.zeros(runner.num_pages, dtype=torch.bool)
    slots = torch.zeros(runner.num_slots, dtype=torch.bool)
    for each in plan.shares:
        pages[list(each.pages)] = True
        slots[each.slot] = True
    return [pages if len(tensor) == runner.num_pages else slots for tensor in pools(runner)]


@dataclass(frozen=True, kw_only=True)
class Step:
    plan: StepPlan
    late_ids: Tensor | None
    begin: tuple[int, ...]
    """Slots of sequences that begin anew."""


@st.composite
def histories(draw: st.DrawFn) -> list[Step]:
    """Steps in which some of several sequences go on by one token or a chunk, or begin again in the same slot."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    done, steps = [0] * PLACES, []
    for _ in range(draw(st.integers(1, 4))):
        shares, late, begin = [], [], []
        for place in draw(st.lists(st.integers(0, PLACES - 1), min_size=1, unique=True)):
            if done[place] and draw(st.integers(0, 4)) == 0:
                done[place] = 0
            if not done[place]:
                begin.append(place)
            most = min(PAGE * PAGES_EACH - done[place], 14)
            count = draw(st.sampled_from([1, min(2, most), most]) | st.integers(1, most))
            ids = tuple(random.integers(300, size=count).tolist())
            late_row = None
            if done[place] and draw(st.booleans()):
                late_row, ids = len(late), (*ids[:-1], -1)
                late.append(int(random.integers(300)))
            want = draw(st.sampled_from(["last", "last", "none"]))
            shares.append(share(place, done[place], ids, want=want, samples=want == "last", late_row=late_row))
            done[place] = (done[place] + count) % (PAGE * PAGES_EACH)
        shares.sort(key=lambda each: len(each.tokens) > 1)
        late_ids = torch.tensor(late) if late else None
        steps.append(Step(plan=StepPlan(shares=tuple(shares)), late_ids=late_ids, begin=tuple(begin)))
    return steps


@pytest.mark.parametrize("name", ["hybrid", "mla", "kda", "block_attnres", "experts"])
@settings(max_examples=25)
@given(history=histories())
def test_padded_steps_equal_steps_without_padding_and_touch_nobody_else(name: str, history: list[Step]) -> None:
    padded, plain = runner_of(name, use_graphs=True), runner_of(name, use_graphs=False)
    for step in history:
        for slot in step.begin:
            padded.clear_state(slot)
            plain.clear_state(slot)
        before = [tensor.clone() for tensor in pools(padded)]
        found, right = (runner.run(step.plan, step.late_ids) for runner in (padded, plain))
        torch.testing.assert_close(found, right, **EXACT)
        used = used_of(padded, step.plan)
        for mine, other, kept, own in zip(pools(padded), pools(plain), before, used, strict=True):
            torch.testing.assert_close(mine, other, **EXACT)
            assert torch.equal(mine[~own], kept[~own])
    has_chunks = any(len(each.tokens) > 1 for step in history for each in step.plan.shares)
    assert padded._mixed_graphs is not None and bool(len(padded._mixed_graphs)) == has_chunks


def test_answers_of_an_engine_with_padded_steps_are_those_of_generate() -> None:
    for name in ("hybrid", "block_attnres"):
        engine = make_engine(model(name))
        engine._runner = Runner(
            model(name), num_pages=SMALL.num_pages, page_size=SMALL.page_size, max_sequences=SMALL.max_sequences,
            num_slots=engine._scheduler.states.num_slots, token_budget=SMALL.token_budget, use_graphs=True,
        )  # fmt: skip
        trunk = tuple((7 * n * n + 3 * n) % 250 for n in range(1, 60))
        asked = [ask(str(n), trunk[n : 5 * n + 3], temperature=0.0, max_tokens=4 + 3 * n) for n in range(8)]
        found = answers(engine, *asked)
        for request in asked:
            assert tokens(found[request.request_id]) == generated(model(name), request)
        assert len(engine._runner._mixed_graphs) > 1


# Which steps ----------------------------------------------------------------------------------------------------------


def counted(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[PagedBatch]:
    """The batches with chunks that the model is given, from now on."""
    seen, step = [], runner.model.step

    def counting(batch: PagedBatch, *a, **b) -> Tensor:
        seen.append(batch)
        return step(batch, *a, **b)

    monkeypatch.setattr(runner.model, "step", counting)
    return seen


def test_steps_that_graphs_do_not_take_run_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("hybrid", use_graphs=True, token_budget=64)
    seen = counted(runner, monkeypatch)
    monkeypatch.setattr(mixed_graphs, "MOST_JOINED_KEYS", 130)
    long = tuple(range(1, 40))
    refused = {
        "all rows": StepPlan(shares=(share(0, 0, long, want="all"),)),
        "more tokens than the budget": StepPlan(shares=(share(0, 0, long), share(1, 0, long))),
        "more keys than are joined": StepPlan(shares=tuple(share(place, 29, (1, 2, 3, 4, 5)) for place in range(4))),
    }
    for reason, plan in refused.items():
        runner.run(plan)
        assert seen[-1].chunks is not None and seen[-1].chunks.lengths is not None, reason
    assert len(runner._mixed_graphs) == 0
    runner.run(StepPlan(shares=(share(0, 0, long), share(1, 0, (1, 2), want="none"))))
    assert seen[-1].chunks.lengths is None
    assert len(runner._mixed_graphs) == 1


def test_pictures_run_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, pictures = prompt_with_pictures((5, 6), (0,))
    runner = runner_of("pictures", use_graphs=True)
    seen = counted(runner, monkeypatch)
    runner.run(StepPlan(shares=(share(0, 0, ids, pictures=pictures),)))
    assert seen[-1].chunks.lengths is not None
    runner.run(StepPlan(shares=(share(0, len(ids), (1, 2)),)))
    assert seen[-1].chunks.lengths is None


def test_without_graphs_and_in_deterministic_mode_there_is_no_padding_and_no_slot_for_it() -> None:
    for options in ({"use_graphs": False}, {"use_graphs": True, "deterministic": True, "page_size": 64}):
        runner = runner_of("hybrid", **options)
        assert runner._mixed_graphs is None
        assert runner.cache.by_slot[0].shape[1] == PLACES
    assert runner_of("hybrid", use_graphs=True).cache.by_slot[0].shape[1] == PLACES + 1


def test_the_slot_of_padding_belongs_to_no_sequence() -> None:
    runner = runner_of("hybrid", use_graphs=True)
    with pytest.raises(ValueError, match=f"slot is {PLACES}, expected 0 .. {PLACES - 1}"):
        runner.run(StepPlan(shares=(replace(share(0, 0, (1, 2, 3)), slot=PLACES),)))
    with pytest.raises(ValueError, match=f"slot is {PLACES}"):
        runner.clear_state(PLACES)


# Buckets and recordings -----------------------------------------------------------------------------------------------


def graphs_of(step: Callable[[PagedBatch], Tensor] | None = None, **options) -> MixedGraphs:
    sizes = {
        "page_size": PAGE, "scratch_row": 400, "scratch_slot": 40, "max_sequences": 40, "max_tokens": 2000,
        "has_latents": True, "device": torch.device("cpu"), "capture": False,
    }  # fmt: skip
    rows = (lambda batch: batch.tokens[0, batch.wanted, None].double()) if step is None else step
    return MixedGraphs(rows, **{**sizes, **options})


def test_buckets_grow_to_the_sizes_of_the_engine() -> None:
    assert growing(64, 2000, factor=2) == (64, 128, 256, 512, 1024, 2048)
    assert growing(64, 3000, factor=2)[-2:] == (2048, 3008)
    assert token_buckets(2000) == (64, 128, 256, 512, 1024, 1536, 2048)
    assert token_buckets(16) == (64,)
    assert all(size % 4 == 0 for most in range(1, 9000, 77) for size in token_buckets(most))
    assert growing(8, 40, factor=4) == (8, 32, 40)
    assert key_buckets(64) == key_buckets(2048) == (2048, 16_384) and key_buckets(4096) == (4096, 16_384)
    assert growing(8, 1, factor=4) == (8,)
    assert growing(2048, 16_384, factor=4) == (2048, 8192, 16_384)
    with pytest.raises(ValueError, match="most is 0, expected at least 1"):
        growing(8, 0, factor=4)


def test_a_step_gets_the_smallest_bucket_that_holds_it() -> None:
    graphs = graphs_of()
    fresh = [share(0, 0, tuple(range(60))), share(1, 0, (1, 2, 3, 4, 5))]
    bucket = graphs.bucket([], fresh, [])
    assert bucket is not None
    assert (bucket.tokens, bucket.runs, bucket.decodes, bucket.keys, bucket.width) == (128, 8, 0, 2048, 0)
    decodes = [replace(share(2, 30, (1,)), slot=place) for place in range(9)]
    later = [share(0, 100, tuple(range(60)))]
    bucket = graphs.bucket(decodes, later, [np.arange(20)] * 9)
    assert bucket is not None
    assert (bucket.tokens, bucket.runs, bucket.decodes, bucket.keys, bucket.width) == (64, 8, 40, 2048, 64)
    assert graphs.bucket(decodes, later * 41, [np.arange(20)] * 9) is None
    assert graphs.bucket(decodes * 5, later, [np.arange(20)] * 45) is None
    assert graphs.bucket([], [share(0, 16_350, tuple(range(40)))], []) is None
    without = graphs_of(has_latents=False)
    bucket = without.bucket(decodes, [share(0, 99_000, tuple(range(40)))], [np.arange(20)] * 9)
    assert bucket is not None and (bucket.keys, bucket.width) == (0, 0)


def test_few_recordings_are_kept_and_the_one_unused_for_longest_goes() -> None:
    graphs = graphs_of(most_recordings=2)
    small, medium, large = ([share(0, 0, tuple(range(length)))] for length in (10, 100, 300))
    for chunks in (small, medium, small, large):
        rows = graphs.run([], chunks, [], wanted=[len(chunks[0].tokens) - 1])
        assert rows is not None and rows.tolist() == [[len(chunks[0].tokens) - 1]]
    assert [bucket.tokens for bucket in graphs._recordings] == [64, 512]


def test_a_recording_that_went_has_to_be_asked_for_again_and_again(on_paper: list[Exception]) -> None:
    graphs = graphs_of(capture=True, most_recordings=1)
    small, large = [share(0, 0, (1, 2, 3))], [share(0, 0, tuple(range(100)))]
    found = [
        graphs.run([], chunks, [], wanted=[1]) is not None for chunks in (small, small, large, large, small, small)
    ]
    assert found == [False, True, False, True, False, True]


class PaperGraph:
    """Replays by running the step again, as a graph would: with whatever its buffers hold."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self.replay = step


@pytest.fixture
def on_paper(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Recording without a GPU; what is put into the list is raised instead, the last first."""
    failures: list[Exception] = []

    def recorded(step: Callable[[], Tensor], **_) -> tuple[PaperGraph, Tensor]:
        if failures:
            raise failures.pop()
        return PaperGraph(step), step()

    monkeypatch.setattr(mixed_graphs, "recorded", recorded)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return failures


def test_a_bucket_is_recorded_when_it_is_asked_for_again(on_paper: list[Exception]) -> None:
    graphs = graphs_of(capture=True)
    for length, is_recorded in ((10, False), (11, True), (12, True), (100, False), (13, True), (101, True)):
        rows = graphs.run([], [share(0, 0, tuple(range(length)))], [], wanted=[length - 1])
        assert (rows is not None) == is_recorded
        assert rows is None or rows.tolist() == [[length - 1]]
    assert len(graphs) == 2


def test_usual_steps_are_recorded_before_anybody_asks(on_paper: list[Exception]) -> None:
    graphs = graphs_of(capture=True)
    graphs.record_usual()
    assert len(graphs) == len(graphs.token_buckets) * len(graphs.decode_buckets) <= mixed_graphs.MOST_RECORDINGS
    decode = replace(share(2, 30, (1,)), slot=7)
    for decodes in ([], [decode] * 9):
        for length in (2, 70, 300, 1999):
            chunk = share(0, 0, tuple(range(length)))
            rows = graphs.run(decodes, [chunk], [np.arange(20)] * len(decodes), wanted=[len(decodes) + length - 1])
            assert rows is not None and rows.tolist() == [[length - 1]]
    assert len(graphs) == len(graphs.token_buckets) * len(graphs.decode_buckets)
    few = graphs_of(capture=True, most_recordings=2)
    few.record_usual()
    assert len(few) == 2


def test_a_runner_that_warms_up_changes_no_sequence_and_needs_no_further_shapes() -> None:
    runner, plain = (runner_of("hybrid", use_graphs=use_graphs, token_budget=64) for use_graphs in (True, False))
    first = StepPlan(shares=(share(0, 0, (1, 2, 3)), share(1, 0, (4, 5))))
    for each in (runner, plain):
        each.run(first)
    before = [pool.clone() for pool in pools(runner)]
    count = runner.record_usual_steps()
    assert all(torch.equal(now, then) for now, then in zip(pools(runner), before, strict=True))
    assert count == len(runner._graphs) + len(runner._mixed_graphs) > 2
    later = StepPlan(shares=(share(1, 2, (6,)), share(0, 3, (7, 8))))
    torch.testing.assert_close(runner.run(later), plain.run(later), **EXACT)
    assert len(runner._graphs) + len(runner._mixed_graphs) == count
    assert plain.record_usual_steps() == 0


def test_decodes_whose_recording_breaks_run_padded_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_, **__) -> None:
        raise RuntimeError("capture was invalidated")

    monkeypatch.setattr(graphs, "recorded", broken)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    decodes = graphs.DecodeGraphs(
        lambda batch: batch.tokens[0, :, None].double(), page_size=PAGE, scratch_row=400, max_sequences=4,
        device=torch.device("cpu"),
    )  # fmt: skip
    asked = [share(0, 5, (7,)), share(1, 5, (8,))]
    with pytest.warns(UserWarning, match="run without CUDA graphs from now on: capture was invalidated"):
        assert decodes.run(asked, [np.arange(2)] * 2).tolist() == [[7], [8]]
    assert decodes.run(asked[:1], [np.arange(2)]).tolist() == [[7]]


def test_recordings_go_on_when_there_is_no_memory_for_more(on_paper: list[Exception]) -> None:
    graphs = graphs_of(capture=True)
    small, large = [share(0, 0, (1, 2, 3))], [share(0, 0, tuple(range(100)))]
    for chunks in (small, small, large):
        graphs.run([], chunks, [], wanted=[1])
    on_paper.append(torch.cuda.OutOfMemoryError("for a test"))
    with pytest.warns(UserWarning, match="no step of 128 tokens could be recorded .for a test.: .*lower memory_gib"):
        assert graphs.run([], large, [], wanted=[1]) is None
    assert graphs.run([], large, [], wanted=[1]) is None  # not tried again
    rows = graphs.run([], small, [], wanted=[2])
    assert rows is not None and rows.tolist() == [[3]]


def test_a_recording_that_breaks_is_not_tried_again(on_paper: list[Exception]) -> None:
    graphs = graphs_of(capture=True)
    on_paper.append(RuntimeError("capture was invalidated"))
    chunks = [share(0, 0, (1, 2, 3))]
    assert graphs.run([], chunks, [], wanted=[1]) is None
    with pytest.warns(UserWarning, match="could be recorded .capture was invalidated."):
        assert graphs.run([], chunks, [], wanted=[1]) is None
    assert graphs.run([], chunks, [], wanted=[1]) is None and len(graphs) == 0


def test_steps_with_more_keys_than_are_joined_have_no_buckets() -> None:
    assert graphs_of(max_tokens=65_536).token_buckets[-1] == MOST_JOINED_KEYS
    assert graphs_of(max_tokens=65_536, has_latents=False).token_buckets[-1] == 65_536


def test_late_ids_of_an_earlier_step_are_not_read_again() -> None:
    graphs = graphs_of()
    late = share(0, 3, (7, -1), late_row=1)
    rows = graphs.run([], [late], [], wanted=[0, 1], late_ids=torch.tensor([5, 6]))
    assert rows is not None and rows.tolist() == [[7], [6]]
    rows = graphs.run([], [share(0, 3, (7, 8))], [], wanted=[0, 1])
    assert rows is not None and rows.tolist() == [[7], [8]]
