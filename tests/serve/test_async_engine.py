"""The engine behind asyncio: whoever leaves, sleeps or fails, the others are served and nobody waits for ever."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager

import pytest

from perilune.serve.async_engine import MAX_FAILURES, AsyncEngine, EngineDead, merged
from perilune.serve.grammar import Grammar
from perilune.serve.request import Output, QueueFull, Request, RequestError, SamplingParams
from perilune.serve.text_stream import Piece

LONG_ENOUGH = 60


class ScriptedEngine:
    """Every request gets its number of tokens, one in each step. `gate` holds back steps, `faults` make them fail."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.wanted: dict[str, int] = {}
        self.cancelled: list[str] = []
        self.faults: list[Exception] = []
        self.broken_for_good = False
        self.gate = threading.Event()
        self.gate.set()
        self.version = 0
        self.steps = 0
        self.prepared_in: str | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def prepare(self, request: Request) -> None:
        self.prepared_in = threading.current_thread().name

    def add(self, request: Request) -> None:
        if request.request_id in self.live:
            raise RequestError("request_id", f"{request.request_id!r} is already under way")
        if request.prompt == (13,):
            raise QueueFull("13 wait")
        self.live[request.request_id] = 0
        self.wanted[request.request_id] = request.params.max_tokens

    def cancel(self, request_id: str) -> None:
        if self.live.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def step(self) -> list[Output]:
        assert self.gate.wait(LONG_ENOUGH)
        self.steps += 1
        if self.faults:
            raise self.faults.pop(0)
        outputs = []
        for name in list(self.live):
            self.live[name] += 1
            number, is_last = self.live[name], self.live[name] == self.wanted[name]
            if is_last:
                del self.live[name]
            reason = "length" if is_last else None
            pieces = (Piece(f"{name}{number} ", None),)
            outputs.append(
                Output(
                    request_id=name,
                    token_ids=(number,),
                    pieces=pieces,
                    finish_reason=reason,
                    weight_version=self.version,
                )
            )
        return outputs

    def reset(self, error: str) -> list[Output]:
        gone, self.live = self.live, {}
        return [Output(request_id=name, finish_reason="error", error=error) for name in gone]

    def probe(self) -> None:
        if self.broken_for_good:
            raise RuntimeError("still broken")

    def stats(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_weights(self, weights: object, version: int) -> None:
        self.version = version


def ask(name: str, tokens: int = 5, prompt: tuple[int, ...] = (1,)) -> Request:
    return Request(request_id=name, prompt=prompt, params=SamplingParams(max_tokens=tokens))


async def collect(served: AsyncEngine, request: Request) -> list[Output]:
    return [output async for output in served.stream(request)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LONG_ENOUGH):
        while not condition():
            await asyncio.sleep(0.001)


@contextmanager
def serving() -> Iterator[tuple[ScriptedEngine, Callable[[Callable[[AsyncEngine], Awaitable[None]]], None]]]:
    """An engine, and a way to run a test against it within a limit of time."""
    engine = ScriptedEngine()

    def run(scenario: Callable[[AsyncEngine], Awaitable[None]]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(LONG_ENOUGH), AsyncEngine(engine) as served:
                try:
                    await scenario(served)
                finally:
                    engine.gate.set()

        asyncio.run(limited())

    yield engine, run


def tokens(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_streams_at_once_get_each_its_own_events() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            answers = await asyncio.gather(*(collect(served, ask(str(n), tokens=n + 1)) for n in range(20)))
            for n, outputs in enumerate(answers):
                assert tokens(outputs) == list(range(1, n + 2))
                assert "".join(output.text() for output in outputs).split() == [f"{n}{k}" for k in range(1, n + 2)]
                assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]

        run(scenario)
        assert not engine.live and not engine.cancelled


def test_leaving_the_loop_cancels() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            async with aclosing(served.stream(ask("a", tokens=10**6))) as outputs:
                async for _ in outputs:
                    break
            await until(lambda: engine.cancelled == ["a"])

        run(scenario)


@pytest.mark.parametrize("while_being_added", (True, False))
def test_a_client_that_vanishes_is_cancelled(while_being_added: bool) -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            other = asyncio.create_task(collect(served, ask("other", tokens=3)))
            await until(lambda: engine.steps > 0 or other.done())
            if while_being_added:
                engine.gate.clear()  # a step is under way, or will be, and the request waits behind it
                keep = asyncio.create_task(collect(served, ask("keep", tokens=10**6)))
                await asyncio.sleep(0.01)
            gone = asyncio.create_task(collect(served, ask("gone", tokens=10**6)))
            if not while_being_added:
                await until(lambda: "gone" in engine.live)
            await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            engine.gate.set()
            await other
            if while_being_added:
                keep.cancel()
            await until(lambda: not engine.live)

        run(scenario)
        assert "gone" not in engine.live


def test_a_reader_that_sleeps_holds_nothing_and_finds_everything_later() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            async with aclosing(served.stream(ask("slow", tokens=500))) as slow:
                first = await anext(slow)
                for n in range(20):
                    assert tokens(await collect(served, ask(f"quick{n}", tokens=3))) == [1, 2, 3]
                await until(lambda: not engine.live)  # done, though nobody reads
                rest = [output async for output in slow]
            assert tokens([first, *rest]) == list(range(1, 501))
            assert len(rest) < 20, "what gathered is read as few events"

        run(scenario)


def test_a_blocked_event_loop_is_woken_once_however_many_events_wait() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            loop = asyncio.get_running_loop()
            calls = 0
            call_soon = loop.call_soon_threadsafe

            def counted(*arguments: object, **options: object) -> object:
                nonlocal calls
                calls += 1
                return call_soon(*arguments, **options)  # pyrefly: ignore

            engine.gate.clear()
            reader = asyncio.create_task(collect(served, ask("a", tokens=400)))
            await until(lambda: "a" in engine.live)
            await asyncio.sleep(0.01)
            loop.call_soon_threadsafe = counted  # pyrefly: ignore
            engine.gate.set()
            moment = threading.Event()
            while engine.live:  # this blocks the event loop on purpose
                moment.wait(0.001)
            assert calls <= 2
            assert tokens(await reader) == list(range(1, 401))

        run(scenario)


def test_a_failed_step_reaches_every_stream_and_the_engine_starts_again() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            engine.gate.clear()
            waiting = [asyncio.create_task(collect(served, ask(str(n), tokens=100))) for n in range(3)]
            await until(lambda: len(engine.live) >= 1)
            engine.faults.append(RuntimeError("out of memory"))
            engine.gate.set()
            for outputs in await asyncio.gather(*waiting):
                last = outputs[-1]
                assert last.finish_reason in ("error", "length")
                if last.finish_reason == "error":
                    assert last.error is not None and "out of memory" in last.error
            assert served.health().alive and served.health().failures == 1
            assert tokens(await collect(served, ask("next", tokens=4))) == [1, 2, 3, 4]

        run(scenario)


def test_an_engine_that_does_not_come_back_is_dead_and_says_why() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            engine.broken_for_good = True
            engine.faults.append(RuntimeError("device lost"))
            outputs = await collect(served, ask("a"))
            assert outputs[-1].finish_reason == "error"
            await until(lambda: not served.health().alive)
            reason = served.health().reason
            assert reason is not None and "device lost" in reason and "still broken" in reason
            with pytest.raises(EngineDead, match="device lost"):
                await collect(served, ask("b"))

        run(scenario)


def test_an_engine_that_fails_again_and_again_is_dead() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            for n in range(MAX_FAILURES):
                assert served.health().alive
                engine.faults.append(RuntimeError(f"fault {n}"))
                assert (await collect(served, ask(str(n))))[-1].finish_reason == "error"
            await until(lambda: not served.health().alive)

        run(scenario)


def test_an_engine_that_fails_now_and_then_lives_on() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            for n in range(2 * MAX_FAILURES):
                engine.faults.append(RuntimeError(f"fault {n}"))
                assert (await collect(served, ask(f"bad{n}")))[-1].finish_reason == "error"
                assert (await collect(served, ask(f"good{n}")))[-1].finish_reason == "length"
            assert served.health().alive and served.health().failures == 2 * MAX_FAILURES

        run(scenario)


def test_a_refusal_is_raised_where_it_belongs() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            with pytest.raises(QueueFull):
                await collect(served, ask("full", prompt=(13,)))
            first = asyncio.create_task(collect(served, ask("name", tokens=10**9)))
            await until(lambda: "name" in engine.live)
            with pytest.raises(RequestError) as refused:
                await collect(served, ask("name", tokens=2))
            assert refused.value.field == "request_id"
            await collect(served, ask("another", tokens=2))  # by now a mistaken cancellation would have come through
            assert "name" in engine.live and not engine.cancelled
            first.cancel()

        run(scenario)


def test_what_takes_long_is_prepared_outside_the_thread_of_the_engine() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            params = SamplingParams(max_tokens=1, grammar=Grammar.regex("a"))
            await collect(served, Request(request_id="a", prompt=(1,), params=params))

        run(scenario)
        assert engine.prepared_in not in (None, "perilune-engine", threading.main_thread().name)


def test_new_weights_are_stamped_from_the_next_step_on() -> None:
    with serving() as (engine, run):

        async def scenario(served: AsyncEngine) -> None:
            stream = served.stream(ask("a", tokens=2000))
            outputs = [await anext(stream)]
            await served.load_weights({}, version=3)
            outputs += [output async for output in stream]
            assert tokens(outputs) == list(range(1, 2001))
            versions = [output.weight_version for output in outputs]
            assert versions == sorted(versions) and set(versions) <= {0, 3}
            assert served.stats() == {"steps": engine.steps}

        run(scenario)


def test_closing_waits_for_what_runs_and_takes_nothing_new() -> None:
    engine = ScriptedEngine()

    async def scenario() -> None:
        served = AsyncEngine(engine)
        running = asyncio.create_task(collect(served, ask("a", tokens=50)))
        await until(lambda: "a" in engine.live or running.done())
        closing = asyncio.create_task(served.close(drain_seconds=LONG_ENOUGH))
        await asyncio.sleep(0)
        with pytest.raises(EngineDead):
            await collect(served, ask("b"))
        assert tokens(await running) == list(range(1, 51))
        await closing

    asyncio.run(scenario())


def test_closing_without_patience_ends_streams_with_an_error() -> None:
    engine = ScriptedEngine()

    async def scenario() -> None:
        served = AsyncEngine(engine)
        running = asyncio.create_task(collect(served, ask("a", tokens=10**9)))
        await until(lambda: "a" in engine.live)
        await served.close()
        last = (await running)[-1]
        assert last.finish_reason == "error" and last.error == "the engine was closed"
        assert engine.cancelled == ["a"]
        await served.close()  # again does nothing

    asyncio.run(scenario())


def test_readers_of_a_closed_event_loop_are_cancelled() -> None:
    engine = ScriptedEngine()
    served = AsyncEngine(engine)
    stream = served.stream(ask("a", tokens=10**9))

    async def leave() -> None:
        await anext(stream)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()

    async def come() -> None:
        async with asyncio.timeout(LONG_ENOUGH):
            await until(lambda: engine.cancelled == ["a"])
            assert tokens(await collect(served, ask("b", tokens=3))) == [1, 2, 3]
            await served.close()

    asyncio.run(come())


def test_merged_events_lose_nothing_and_keep_versions_apart() -> None:
    events = [Output(request_id="a", token_ids=(n,), weight_version=n // 3) for n in range(6)]
    events.append(Output(request_id="a", weight_version=1, finish_reason="error", error="broken"))
    joined = merged(events)
    assert [output.token_ids for output in joined] == [(0, 1, 2), (3, 4, 5), ()]
    assert [output.weight_version for output in joined] == [0, 1, 1]
    assert [output.finish_reason for output in joined] == [None, None, "error"]
