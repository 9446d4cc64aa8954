"""The HTTP client against a scripted server, with and without faults."""

import asyncio
import logging
import pickle
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.swarm.client import ModelError, ModelReply, ModelRequest, Usage
from perilune.swarm.http_client import HTTPClient, Limits, Provider, Secret, retry_after
from perilune.swarm.messages import Message
from perilune.swarm.rate import Pace
from perilune.swarm.scripted import FAULTS, Behaviour, Call, Chaos, Reply, Script, ScriptedServer, Turn
from perilune.swarm.scripted.behaviours import constant
from perilune.swarm.scripted.chaos import Fault
from perilune.swarm.scripted.http_protocol import Connection, Request

T = TypeVar("T")
QUICK = Limits(first_pause=0.001, idle_seconds=10, attempt_seconds=30, call_seconds=60)
IMPATIENT = Limits(first_pause=0.001, idle_seconds=0.4, attempt_seconds=30, call_seconds=60)
TOOLS = b'[{"type":"function","function":{"name":"look","parameters":{"type":"object"}}}]'
KEY = "sk-canary-0123456789"


class Recording(ScriptedServer):
    """Keeps the bodies of all requests; `answers` come before the script's."""

    def __init__(self, script: Script, behaviour: Behaviour | None = None, *answers: tuple[int, bytes, bytes]) -> None:
        super().__init__(script, behaviour)
        self.bodies: list[bytes] = []
        self.answers = list(answers)

    @property
    def asked(self) -> list[dict[str, Any]]:
        return [orjson.loads(body) for body in self.bodies]

    def _complete(self, connection: Connection, request: Request) -> None:
        self.bodies.append(request.body)
        if self.answers:
            status, headers, body = self.answers.pop(0)
            return connection.respond(status, body, headers=headers)
        super()._complete(connection, request)


@dataclass(frozen=True, kw_only=True)
class FirstTime(Chaos):
    """One fault in the first attempts at a request, none afterwards."""

    times: int = 1
    share: float = 1.0

    def draw(self, digest: bytes, attempt: int) -> Fault | None:
        return self.faults[0] if attempt < self.times else None


@dataclass
class Ledger:
    """A meter that remembers."""

    most: int = 1000
    begun: list[tuple[int, int]] = field(default_factory=list)
    ended: list[Usage | None] = field(default_factory=list)

    def begin(self, *, prompt_bound: int, max_tokens: int) -> None:
        if len(self.begun) == self.most:
            raise RuntimeError("budget is spent")
        self.begun.append((prompt_bound, max_tokens))

    def end(self, usage: Usage | None) -> None:
        self.ended.append(usage)


def looks_then_answers(turn: Turn) -> Reply:
    if not turn.exchanges and turn.tools:
        return Reply("I look.", (Call("look", {"at": "the moon"}), Call("look", {"at": "the sun"})), "What is there?")
    return Reply("Both are there.")


def request(*extra: Message, agent: str = "main", **fields: Any) -> ModelRequest:
    messages = [Message("system", "Be brief."), Message("user", "What is in the sky? ☾"), *extra]
    return ModelRequest(agent=agent, model="m", messages=messages, tools=TOOLS, **fields)


def with_server(
    server: ScriptedServer, work: Callable[[HTTPClient], Awaitable[T]], *, limits: Limits = QUICK, **options: Any
) -> T:
    async def scenario() -> T:
        async with server:
            options.setdefault("api_key_env", None)
            async with HTTPClient(base_url=server.base_url, limits=limits, **options) as client:
                result = await work(client)
                assert all(state["in_flight"] == 0 == state["waiting"] for state in client.state())
                return result

    return asyncio.run(scenario())


# Requests ------------------------------------------------------------------------------------------------------------


def test_a_request_is_the_join_of_its_messages_with_tools_verbatim() -> None:
    server = Recording(constant())
    oddly_spaced = TOOLS.replace(b":", b" : ")
    sent = request(Message("assistant", "x"), max_tokens=77, temperature=0.5, seed=3, response_format={"type": "text"})
    object.__setattr__(sent, "tools", oddly_spaced)
    with_server(server, lambda client: client.complete(sent))
    [body] = server.bodies
    assert b"[" + b",".join(message.wire for message in sent.messages) + b"]" in body
    assert oddly_spaced in body
    asked = orjson.loads(body)
    assert asked["max_tokens"] == 77 and asked["temperature"] == 0.5 and asked["seed"] == 3
    assert asked["response_format"] == {"type": "text"} and asked["stream_options"] == {"include_usage": True}
    assert "return_token_ids" not in asked and "logprobs" not in asked


def test_max_tokens_is_always_sent_and_an_empty_list_of_tools_never() -> None:
    server = Recording(constant())
    provider = Provider(
        base_url="http://x", max_tokens_field="max_completion_tokens", session_field="user", body={"n": 1}
    )

    async def scenario() -> None:
        async with server:
            providers = [Provider(**vars(provider) | {"base_url": server.base_url})]
            async with HTTPClient(providers=providers, stream=False) as client:
                await client.complete(ModelRequest(agent="a", model="m", messages=[Message("user", "x")], session="s1"))

    asyncio.run(scenario())
    [asked] = server.asked
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "max_completion_tokens": 4096,
        "user": "s1",
        "n": 1,
    }


@pytest.mark.parametrize("stream", [True, False])
def test_replies_are_the_same_with_and_without_streaming(stream: bool) -> None:
    reply = with_server(ScriptedServer(looks_then_answers), lambda client: client.complete(request()), stream=stream)
    assert reply.message.content == "I look." and reply.message.reasoning == "What is there?"
    assert [(call.id, call.arguments) for call in reply.message.tool_calls] == [
        ("functions.look:0", '{"at":"the moon"}'),
        ("functions.look:1", '{"at":"the sun"}'),
    ]
    assert reply.finish_reason == "tool_calls" and reply.attempts == 1 and reply.model == "m"
    assert reply.usage is not None and reply.usage.prompt_tokens > 10
    assert reply.token_ids is None and reply.logprobs is None


def test_token_ids_are_asked_for_by_option_and_make_one_sequence_over_turns() -> None:
    async def two_turns(client: HTTPClient) -> tuple[ModelReply, ModelReply]:
        first = await client.complete(request())
        results = [Message("tool", "yes", (), call.id) for call in first.message.tool_calls]
        return first, await client.complete(request(first.message, *results))

    first, second = with_server(ScriptedServer(looks_then_answers), two_turns, token_ids=True)
    assert first.prompt_token_ids and first.token_ids and first.logprobs and second.prompt_token_ids
    served = first.prompt_token_ids + first.token_ids
    assert second.prompt_token_ids[: len(served)] == served
    assert first.weight_version == "scripted-1"


def test_models_go_to_the_first_provider_that_serves_them() -> None:
    async def scenario() -> tuple[str, str]:
        async with ScriptedServer(constant("near")) as near, ScriptedServer(constant("far")) as far:
            providers = [Provider(base_url=near.base_url, models=("kimi-*",)), Provider(base_url=far.base_url)]
            async with HTTPClient(providers=providers) as client:
                messages = [Message("user", "x")]
                texts = [
                    (await client.complete(ModelRequest(agent="a", model=model, messages=messages))).message.text
                    for model in ("kimi-k2", "other")
                ]
            async with HTTPClient(providers=providers[:1]) as client:
                with pytest.raises(ModelError, match="no provider serves the model 'other'"):
                    await client.complete(ModelRequest(agent="a", model="other", messages=messages))
        return texts[0], texts[1]

    assert asyncio.run(scenario()) == ("near", "far")


# Faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_ends_in_the_scripted_reply(fault: Fault, stream: bool) -> None:
    server = Recording(looks_then_answers, Behaviour(chaos=FirstTime(faults=(fault,))))
    limits = IMPATIENT if fault == "stalled_stream" else QUICK
    reply = with_server(server, lambda client: client.complete(request()), stream=stream, limits=limits)
    assert reply.message.content == "I look."
    assert [call.name for call in reply.message.tool_calls] == ["look", "look"]
    assert server.counts.faulty == 1
    if stream and fault not in ("duplicate_ids", "empty_deltas", "missing_ids", "no_usage", "odd_ids"):
        assert [asked.get("stream", False) for asked in server.asked] in ([True, False], [True, True])
        assert reply.attempts == 2
    arguments = [call.arguments for call in reply.message.tool_calls]
    if stream or fault not in ("bad_arguments", "dropped_calls"):
        assert arguments == ['{"at":"the moon"}', '{"at":"the sun"}']
    else:  # what the model wrote goes to the agent as it is
        assert arguments == ['{"at":"the moon"}', '{"at":"the sun"']


@pytest.mark.parametrize("fault", ["cut_stream", "stalled_stream", "bad_arguments", "dropped_calls", "bad_event"])
def test_after_a_broken_stream_the_same_call_goes_without_streaming(fault: Fault) -> None:
    server = Recording(looks_then_answers, Behaviour(chaos=FirstTime(faults=(fault,))))
    limits = IMPATIENT if fault == "stalled_stream" else QUICK
    with_server(server, lambda client: client.complete(request()), limits=limits)
    assert [asked.get("stream", False) for asked in server.asked] == [True, False]


def test_a_provider_whose_streams_keep_breaking_is_asked_for_bodies() -> None:
    server = Recording(looks_then_answers, Behaviour(chaos=FirstTime(faults=("cut_stream",))))

    async def calls(client: HTTPClient) -> None:
        for number in range(5):
            await client.complete(request(Message("user", f"question {number}")))

    with_server(server, calls)
    streamed = [asked.get("stream", False) for asked in server.asked]
    assert streamed == [True, False] * 3 + [False, False] * 2


def test_a_server_that_only_streams_or_only_sends_bodies_is_understood() -> None:
    stream = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    body = b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}'
    for asks_stream, answer in ((False, stream), (True, body)):
        server = Recording(constant(), None, (200, b"", answer))
        reply = with_server(server, lambda client: client.complete(request()), stream=asks_stream)
        assert reply.message.text == "x" and reply.usage is None


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_refusal_is_final_and_says_what_the_server_said(status: int) -> None:
    server = Recording(constant(), None, (status, b"", b'{"error":{"message":"no such model"}}'))
    with pytest.raises(ModelError, match=f"127.0.0.1: HTTP {status}: no such model") as caught:
        with_server(server, lambda client: client.complete(request()))
    assert (caught.value.kind, caught.value.status, caught.value.attempts) == ("refused", status, 1)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 504, 529])
def test_other_errors_are_tried_again(status: int) -> None:
    server = Recording(constant("at last"), None, (status, b"", b"oops"), (status, b"", b""))
    reply = with_server(server, lambda client: client.complete(request()))
    assert reply.message.text == "at last" and reply.attempts == 3


def test_attempts_are_limited_and_the_error_tells_the_last_one() -> None:
    server = Recording(constant(), None, *[(500, b"", b'{"detail":"boom"}')] * 9)
    limits = Limits(attempts=3, first_pause=0.001)
    with pytest.raises(ModelError, match="HTTP 500: boom after 3 attempts") as caught:
        with_server(server, lambda client: client.complete(request()), limits=limits)
    assert (caught.value.kind, caught.value.status, len(server.bodies)) == ("server", 500, 3)
    assert caught.value.__cause__ is None and caught.value.__context__ is None


def test_refusals_do_not_use_up_attempts() -> None:
    server = Recording(constant("at last"), None, *[(429, b"Retry-After: 0\r\n", b"")] * 20)
    limits = Limits(attempts=1, first_pause=0.001)
    reply = with_server(server, lambda client: client.complete(request()), limits=limits)
    assert reply.message.text == "at last" and reply.attempts == 21


def test_a_spent_quota_is_final() -> None:
    body = b'{"error":{"message":"You exceeded your quota","code":"insufficient_quota"}}'
    with pytest.raises(ModelError, match="quota") as caught:
        with_server(Recording(constant(), None, (429, b"", body)), lambda client: client.complete(request()))
    assert caught.value.kind == "rate_limit" and caught.value.status == 429


def test_a_retry_after_beyond_the_time_of_the_call_fails_at_once() -> None:
    server = Recording(constant(), None, (429, b"Retry-After: 86400\r\n", b"come back tomorrow"))
    with pytest.raises(ModelError, match="come back tomorrow") as caught:
        with_server(server, lambda client: client.complete(request()))
    assert caught.value.kind == "rate_limit" and len(server.bodies) == 1


def test_the_time_of_a_call_is_limited() -> None:
    limits = Limits(call_seconds=0.2, idle_seconds=30)
    server = ScriptedServer(constant(), Behaviour(latency=30))
    with pytest.raises(ModelError, match="within the 0.2 s of a call") as caught:
        with_server(server, lambda client: client.complete(request()), limits=limits)
    assert caught.value.kind == "time"


def test_the_time_of_an_attempt_is_limited_without_streaming_too() -> None:
    limits = Limits(attempt_seconds=0.1, attempts=2, first_pause=0.001)
    server = ScriptedServer(constant(), Behaviour(latency=30))
    with pytest.raises(ModelError) as caught:
        with_server(server, lambda client: client.complete(request()), limits=limits, stream=False)
    assert (caught.value.kind, caught.value.attempts) == ("stalled", 2)


def test_an_endless_reply_is_cut_off() -> None:
    limits = Limits(reply_bytes=2000, attempts=2, first_pause=0.001)
    server = ScriptedServer(constant("x" * 50_000))
    with pytest.raises(ModelError, match="longer than 2000 bytes") as caught:
        with_server(server, lambda client: client.complete(request(max_tokens=99_999)), limits=limits)
    assert caught.value.kind == "malformed"


def test_an_address_where_nothing_listens_fails_for_all_agents_soon() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/v1"

        async def scenario() -> list[Any]:
            limits = Limits(attempts=3, first_pause=0.001, first_patience_seconds=0.2)
            async with HTTPClient(base_url=address, api_key_env=None, limits=limits) as client:
                calls = [client.complete(request(agent=f"a{n}")) for n in range(30)]
                return await asyncio.gather(*calls, return_exceptions=True)

        results = asyncio.run(scenario())
    assert {type(result) for result in results} == {ModelError}
    assert {result.kind for result in results} <= {"network", "circuit_open"}


def test_a_server_that_comes_back_is_used_again() -> None:
    async def scenario() -> list[str]:
        async with ScriptedServer(constant("back")) as server:
            _, port = server._place
            limits = Limits(attempts=50, first_pause=0.01, longest_pause=0.05)
            async with HTTPClient(base_url=server.base_url, api_key_env=None, limits=limits) as client:
                await client.complete(request())
                await server.__aexit__(None, None, None)
                calls = asyncio.gather(*(client.complete(request(agent=f"a{n}")) for n in range(30)))
                await asyncio.sleep(0.1)
                async with ScriptedServer(constant("back"), port=port):
                    return [reply.message.text for reply in await calls]

    assert asyncio.run(scenario()) == ["back"] * 30


# Many at a time ------------------------------------------------------------------------------------------------------


def test_a_limit_of_the_server_is_found_and_nobody_fails() -> None:
    server = ScriptedServer(constant("x"), Behaviour(latency=0.01, max_concurrent=20, retry_after=0.05))

    async def agent(client: HTTPClient, number: int) -> None:
        for _ in range(6):
            assert (await client.complete(request(agent=f"a{number}"))).message.text == "x"

    async def agents(client: HTTPClient) -> list[dict[str, Any]]:
        await asyncio.gather(*(agent(client, number) for number in range(100)))
        return client.state()

    [state] = with_server(server, agents)
    assert server.counts.answered == 600 and server.counts.peak <= 20
    assert state["limit"] <= 20 and state["refused"] == server.counts.refused


def test_chaos_over_many_agents_loses_none() -> None:
    server = ScriptedServer(looks_then_answers, Behaviour(chaos=Chaos(share=0.25, seed=5)))

    async def agent(client: HTTPClient, number: int) -> str:
        first = await client.complete(request(Message("user", f"agent {number}"), agent=f"a{number}"))
        results = [Message("tool", "yes", (), call.id) for call in first.message.tool_calls]
        last = await client.complete(request(Message("user", f"agent {number}"), first.message, *results))
        while last.message.tool_calls:  # a garbled call is made again
            results += [last.message, *(Message("tool", "yes", (), call.id) for call in last.message.tool_calls)]
            last = await client.complete(request(Message("user", f"agent {number}"), first.message, *results))
        return last.message.text

    async def agents(client: HTTPClient) -> list[str]:
        return await asyncio.gather(*(agent(client, number) for number in range(60)))

    limits = Limits(first_pause=0.001, idle_seconds=0.5, attempts=12)
    assert set(with_server(server, agents, limits=limits)) == {"Both are there."}
    assert server.counts.faulty > 20


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.sampled_from([None, 4]), st.sampled_from([0.0, 0.4]))
def test_cancelling_anywhere_leaks_no_place_and_no_connection(seed: int, most: int | None, share: float) -> None:
    chance = random.Random(seed)
    behaviour = Behaviour(
        latency=(0.0, 0.02), seed=seed, max_concurrent=6, retry_after=0.01, chaos=Chaos(share=share, seed=seed)
    )
    ledger = Ledger(most=10**6)

    async def scenario() -> None:
        async with ScriptedServer(looks_then_answers, behaviour) as server:
            limits = Limits(first_pause=0.001, idle_seconds=0.05, attempts=4)
            async with HTTPClient(
                base_url=server.base_url, api_key_env=None, max_concurrent=most, limits=limits
            ) as client:
                calls = [client.complete(request(agent=f"a{n % 5}", meter=ledger)) for n in range(30)]
                tasks = [asyncio.create_task(call) for call in calls]
                for task in chance.sample(tasks, 15):
                    await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01]))
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                unexpected = [
                    each for each in results if not isinstance(each, ModelReply | asyncio.CancelledError | ModelError)
                ]
                assert not unexpected
                [state] = client.state()
                assert state["in_flight"] == 0 == state["waiting"]
                assert len(ledger.begun) == len(ledger.ended)
                [endpoint] = client._endpoints.values()
                assert not endpoint.session.connector._acquired  # pyrefly: ignore[missing-attribute]
            for _ in range(100):
                if not server.counts.in_flight:
                    break
                await asyncio.sleep(0.01)
            assert server.counts.in_flight == 0

    asyncio.run(scenario())


# Budgets -------------------------------------------------------------------------------------------------------------


def test_the_meter_is_asked_before_and_told_after_every_attempt() -> None:
    ledger = Ledger()
    answers = [(429, b"Retry-After: 0\r\n", b""), (500, b"", b""), (503, b"", b""), (200, b"", b'{"choi')]
    server = Recording(constant("done"), None, *answers)
    sent = request(meter=ledger, max_tokens=50)
    reply = with_server(server, lambda client: client.complete(sent))
    bound = sum(len(message.wire) for message in sent.messages) + len(sent.messages) - 1 + len(TOOLS)
    assert ledger.begun == [(bound, 50)] * 5
    # Nothing was computed for a refusal; what a broken attempt cost, nobody knows.
    assert ledger.ended == [Usage(), None, Usage(), None, reply.usage]
    assert reply.usage is not None and reply.usage.prompt_tokens <= bound + 200


def test_nothing_is_sent_when_the_budget_refuses() -> None:
    ledger = Ledger(most=2)
    server = Recording(constant(), None, *[(500, b"", b"")] * 5)
    with pytest.raises(RuntimeError, match="budget is spent"):
        with_server(server, lambda client: client.complete(request(meter=ledger)))
    assert len(server.bodies) == 2 and ledger.ended == [None, None]


def test_a_cancelled_attempt_counts_as_unknown() -> None:
    ledger = Ledger()

    async def cancelled(client: HTTPClient) -> None:
        task = asyncio.create_task(client.complete(request(meter=ledger)))
        while not ledger.begun:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with_server(ScriptedServer(constant(), Behaviour(latency=30)), cancelled)
    assert ledger.ended == [None]


# Keys ----------------------------------------------------------------------------------------------------------------


def test_a_key_from_the_environment_is_sent_and_shown_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("CANARY_KEY", f" {KEY}\n")
    shown: list[str] = []

    async def ask(client: HTTPClient) -> None:
        assert (await client.complete(request())).message.text == "done"
        shown.extend(map(repr, (client, client.providers, client.state(), vars(client), client._endpoints)))
        for endpoint in client._endpoints.values():
            shown.extend(map(repr, vars(endpoint).values()))

    with_server(ScriptedServer(constant(), Behaviour(require_key=KEY)), ask, api_key_env="CANARY_KEY")
    server = ScriptedServer(constant(), Behaviour(require_key="another"))
    with pytest.raises(ModelError, match="wrong key") as caught:
        with_server(server, ask, api_key_env="CANARY_KEY")
    shown += [str(caught.value), repr(caught.value), caplog.text]
    assert len(shown) > 10 and not [text for text in shown if KEY in text]


def test_a_server_that_repeats_the_key_is_scrubbed() -> None:
    body = f'{{"error":"the key {KEY} and Bearer {KEY} and Bearer other-secret are bad"}}'.encode()
    server = Recording(constant(), None, (401, b"", body))
    with pytest.raises(ModelError) as caught:
        with_server(server, lambda client: client.complete(request()), api_key=Secret(KEY))
    assert "the key [key] and Bearer [key] and Bearer [key] are bad" in str(caught.value)


def test_a_key_is_not_carried_to_another_host() -> None:
    async def scenario() -> int:
        async with ScriptedServer(constant()) as thief:
            location = f"Location: {thief.base_url}/chat/completions\r\n".encode()
            async with Recording(constant(), None, (307, location, b"")) as server:
                async with HTTPClient(base_url=server.base_url, api_key=Secret(KEY)) as client:
                    with pytest.raises(ModelError, match="HTTP 307"):
                        await client.complete(request())
            return thief.counts.calls

    assert asyncio.run(scenario()) == 0


def test_a_secret_cannot_be_printed_or_stored() -> None:
    secret = Secret(KEY)
    assert KEY not in f"{secret} {secret!r} {vars(Provider(base_url='http://x', api_key=secret))}"
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    for wrong in ("", " x", "a\nb"):
        with pytest.raises(ValueError, match="key"):
            Secret(wrong)


def test_wrong_settings_name_the_field_and_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ValueError, match="NO_SUCH_KEY is not set.*api_key_env=None"):
        HTTPClient(base_url="http://localhost/v1", api_key_env="NO_SUCH_KEY")
    with pytest.raises(ValueError, match="base_url 'localhost:8000'"):
        HTTPClient(base_url="localhost:8000", api_key_env=None)
    with pytest.raises(ValueError, match="user or password"):
        HTTPClient(base_url="http://me:secret@localhost/v1", api_key_env=None)
    with pytest.raises(ValueError, match="one or the other"):
        HTTPClient()
    with pytest.raises(ValueError, match="attempts 0"):
        Limits(attempts=0)
    with pytest.raises(ValueError, match="idle_seconds -1"):
        Limits(idle_seconds=-1)
    with pytest.raises(ValueError, match="max_concurrent 0"):
        HTTPClient(base_url="http://x", api_key_env=None, providers=(), max_concurrent=0)


@pytest.mark.parametrize(
    "value, seconds",
    [
        (None, None),
        ("0", 0.0),
        ("12", 12.0),
        ("1.5", 1.5),
        ("-3", 0.0),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40.0),
        ("Thu, 01 Jan 1970 00:00:10 GMT", 0.0),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, seconds: float | None) -> None:
    assert retry_after(value, now=60.0) == seconds


def test_a_closed_client_says_so() -> None:
    async def scenario() -> None:
        client = HTTPClient(base_url="http://localhost/v1", api_key_env=None)
        await client.close()
        with pytest.raises(RuntimeError, match="closed"):
            await client.complete(request())

    asyncio.run(scenario())


def test_paces_are_set_per_model() -> None:
    async def scenario() -> int:
        async with ScriptedServer(constant(), Behaviour(latency=0.01)) as server:
            provider = Provider(base_url=server.base_url, model_paces={"m": Pace(max_concurrent=3)})
            async with HTTPClient(providers=[provider]) as client:
                await asyncio.gather(*(client.complete(request(agent=f"a{n}")) for n in range(12)))
            return server.counts.peak

    assert asyncio.run(scenario()) == 3
