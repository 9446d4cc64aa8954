"""Streams that wait for their end: the same events as few, one for each version of the weights, and errors as ever."""

import asyncio
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from perilune.serve.async_engine import ENOUGH_STEPS, MAX_FAILURES, AsyncEngine, merged
from perilune.serve.request import Output, Request, SamplingParams
from tests.serve import tiny
from tests.serve.engines import SMALL, check_nothing_is_held, make_engine
from tests.serve.test_async_engine import ask, serving, tokens, until


async def whole(served: AsyncEngine, request: Request) -> list[Output]:
    return [output async for output in served.stream(request, whole=True)]


def test_a_whole_answer_is_one_event_with_all_its_tokens() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            answers = await asyncio.gather(*(whole(served, ask(str(n), tokens=n + 1)) for n in range(20)))
            for n, (output,) in enumerate(answers):
                assert tokens([output]) == list(range(1, n + 2)) and output.finish_reason == "length"
                assert output.text().split() == [f"{n}{k}" for k in range(1, n + 2)]

        run(scenario)
        assert not engine.live and not engine.cancelled


def test_weights_that_change_under_way_are_told_apart() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            reading = asyncio.create_task(whole(served, ask("a", tokens=50_000)))
            await until(lambda: engine.steps > 2)
            await served.load_weights({}, 1)
            first, second = await reading
            assert (first.weight_version, second.weight_version) == (0, 1)
            assert tokens([first, second]) == list(range(1, 50_001))

        run(scenario)


def test_leaving_early_cancels_and_a_failure_is_told_at_once() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            gone = asyncio.create_task(whole(served, ask("gone", tokens=10**9)))
            await until(lambda: engine.live.get("gone", 0) > 3)
            gone.cancel()
            await until(lambda: engine.cancelled == ["gone"])
            failing = asyncio.create_task(whole(served, ask("failing", tokens=10**9)))
            await until(lambda: engine.live.get("failing", 0) > 3)
            engine.faults.append(RuntimeError("the device is tired"))
            *_, last = await failing
            assert last.finish_reason == "error" and "tired" in str(last.error)

        run(scenario)


def test_steps_that_give_nothing_but_go_well_count_as_recovery() -> None:
    """Whole answers give nothing for many steps: an engine that fails now and then is not given up because of that."""
    with serving() as (engine, run):
        say = engine.step
        engine.step = lambda: [output for output in say() if output.finished or not output.token_ids]

        async def scenario(served: AsyncEngine) -> None:
            for n in range(2 * MAX_FAILURES):
                failing = asyncio.create_task(whole(served, ask(f"bad{n}", tokens=10**9)))
                steps = engine.steps
                await until(lambda steps=steps: engine.steps > steps + ENOUGH_STEPS + 2)
                engine.faults.append(RuntimeError(f"fault {n}"))
                assert (await failing)[-1].finish_reason == "error"
            assert served.health().alive and served.health().failures == 2 * MAX_FAILURES

        run(scenario)


def played(requests: list[Request], *, asynchronous: bool, changes: int | None) -> dict[str, list[Output]]:
    """Events of all requests, with other weights after so many steps."""
    engine = make_engine(tiny.fresh_model(seed=0), replace(SMALL, asynchronous=asynchronous))
    for request in requests:
        engine.add(request)
    found: dict[str, list[Output]] = {}
    for step in range(2000):
        if step == changes:
            engine.load_weights(tiny.model(seed=1), version=3)
        if not engine.has_work:
            break
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    check_nothing_is_held(engine)
    return found


params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 14), temperature=st.sampled_from((0.0, 1.0, 2.0)), seed=st.integers(0, 99),
    logprobs=st.sampled_from((None, 0, 2)), stop_ids=st.sets(st.integers(0, 319), max_size=120).map(frozenset),
    stop=st.sampled_from(((), ("e",), ("th", " the"))), prompt_logprobs=st.sampled_from((None, 0)),
)  # fmt: skip


@given(
    of_requests=st.lists(st.tuples(params, st.lists(st.integers(0, 319), min_size=1, max_size=9)), max_size=6),
    asynchronous=st.booleans(),
    changes=st.one_of(st.none(), st.integers(0, 12)),
)
def test_the_engine_itself_gives_the_same_whole_and_in_parts(
    of_requests: list[tuple[SamplingParams, list[int]]], asynchronous: bool, changes: int | None
) -> None:
    forbidden = tiny.tokenizer().special_ids["<|media_pad|>"]
    requests = [
        Request(request_id=str(n), prompt=tuple(token for token in prompt if token != forbidden) or (1,), params=each)
        for n, (each, prompt) in enumerate(of_requests)
    ]
    parts = played(requests, asynchronous=asynchronous, changes=changes)
    wholes = played([replace(each, whole=True) for each in requests], asynchronous=asynchronous, changes=changes)
    assert parts.keys() == wholes.keys()
    for request in requests:
        expected, given_ = merged(parts[request.request_id]), wholes[request.request_id]
        if not request.params.stop:
            assert len(given_) == len(expected)
        given_ = merged(given_)
        assert [said(each) for each in given_] == [said(each) for each in expected]
        assert [replace(each, pieces=()) for each in given_] == [replace(each, pieces=()) for each in expected]


def said(output: Output) -> list[str]:
    """Texts between special tokens, however they were cut into pieces."""
    texts = [""]
    for piece in output.pieces:
        texts[-1] += piece.text
        texts += [] if piece.special is None else [piece.special, ""]
    return texts
