"""Streams of a real engine with a tiny model: answers equal those of `generate`, whoever leaves in between."""

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace

import pytest

from perilune.serve.async_engine import AsyncEngine
from perilune.serve.grammar import Grammar
from perilune.serve.request import Output, Request, RequestError
from tests.serve import tiny
from tests.serve.engines import SMALL, ask, check_nothing_is_held, generated, make_engine, text, tokens

PROMPTS = tuple(tuple((17 * n * k + n) % 250 for n in range(1, 4 + 3 * k)) for k in range(1, 9))
LONG_ENOUGH = 120


async def collect(served: AsyncEngine, request: Request) -> list[Output]:
    return [output async for output in served.stream(request)]


@pytest.mark.parametrize("asynchronous", (False, True))
def test_streams_equal_generate_while_others_leave(asynchronous: bool) -> None:
    engine = make_engine(tiny.model("mla"), replace(SMALL, num_pages=24, asynchronous=asynchronous))

    async def leave(served: AsyncEngine, request: Request) -> None:
        async with aclosing(served.stream(request)) as outputs:
            async for _ in outputs:
                return

    async def scenario() -> None:
        async with asyncio.timeout(LONG_ENOUGH), AsyncEngine(engine) as served:
            stay = [ask(f"stay{n}", prompt, seed=n) for n, prompt in enumerate(PROMPTS)]
            go = [ask(f"go{n}", prompt, seed=n, max_tokens=60) for n, prompt in enumerate(PROMPTS)]
            answers = asyncio.gather(*(collect(served, request) for request in stay))
            await asyncio.gather(*(leave(served, request) for request in go))
            for request, outputs in zip(stay, await answers):
                assert tokens(outputs) == generated(tiny.model("mla"), request)
            while engine.has_work:
                await asyncio.sleep(0.001)
            check_nothing_is_held(engine)

    asyncio.run(scenario())


def test_a_failed_step_is_an_error_for_those_under_way_and_nothing_for_those_after() -> None:
    engine = make_engine(tiny.model("mla"))
    run, calls = engine._runner.run, 0

    def once(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise RuntimeError("the device is tired")
        return run(*arguments)  # pyrefly: ignore

    engine._runner.run = once  # pyrefly: ignore

    async def scenario() -> None:
        async with asyncio.timeout(LONG_ENOUGH), AsyncEngine(engine) as served:
            asked = (ask(str(n), PROMPTS[7], seed=n, max_tokens=40, ignore_eos=True) for n in range(4))
            for outputs in await asyncio.gather(*(collect(served, request) for request in asked)):
                assert outputs[-1].finish_reason == "error" and "tired" in (outputs[-1].error or "")
            request = ask("after", PROMPTS[3], seed=1)
            assert tokens(await collect(served, request)) == generated(tiny.model("mla"), request)
            assert served.health().alive and served.health().failures == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("asynchronous", (False, True))
def test_constrained_answers_are_what_the_schema_admits(asynchronous: bool) -> None:
    engine = make_engine(tiny.model("hybrid"), replace(SMALL, asynchronous=asynchronous))
    schema = {
        "type": "object",
        "properties": {"far": {"type": "boolean"}, "at": {"enum": ["moon", "earth"]}},
        "required": ["far", "at"],
        "additionalProperties": False,
    }

    async def scenario() -> None:
        async with asyncio.timeout(LONG_ENOUGH), AsyncEngine(engine) as served:
            strict = [
                ask(f"strict{n}", PROMPTS[2], seed=n, max_tokens=100, grammar=Grammar.json_schema(schema))
                for n in range(2)
            ]
            free = [ask(f"free{n}", prompt, seed=n) for n, prompt in enumerate(PROMPTS[:3])]
            found = await asyncio.gather(*(collect(served, request) for request in (*strict, *free)))
            for outputs in found[: len(strict)]:
                assert set(json.loads(text(outputs))) == {"far", "at"}
                assert outputs[-1].finish_reason == "stop"
            for request, outputs in zip(free, found[len(strict) :]):
                assert tokens(outputs) == generated(tiny.model("hybrid"), request)
            with pytest.raises(RequestError) as refused:
                await collect(served, ask("wrong", PROMPTS[0], grammar=Grammar.regex("(")))
            assert refused.value.field == "grammar"
        engine.grammars.close()

    asyncio.run(scenario())
