"""Streams that wait for their end: the same events as few, one for each version of the weights, and errors as ever."""

import asyncio

from perilune.serve.async_engine import AsyncEngine
from perilune.serve.request import Output, Request
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
