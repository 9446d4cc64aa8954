"""Keys, rates, caps and the endpoints of an admin: who is let in, who is refused, and what a refusal says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from perilune.serve import keys as keys_module
from perilune.serve.keys import Caller, Keys, check_address, is_loopback
from perilune.serve.limits import Admission, Bucket, Limits
from perilune.serve.refusals import Refusal
from tests.serve.api_engine import MODEL, ScriptedEngine, app_of, ask, call, chat, endless

KEY, OTHER, ADMIN = "key-of-a-caller-1", "key-of-a-caller-2", "key-of-the-admin-1"
KEYS = Keys(api=(KEY, OTHER), admin=ADMIN)
CHAT = "/v1/chat/completions"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# Keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path, body", [(CHAT, chat()), ("/v1/completions", {"prompt": "x"}), ("/v1/models", None)])
def test_v1_needs_a_key_where_one_is_set(path, body):
    app = app_of(keys=KEYS)
    for headers in ({}, bearer("wrong-key-of-someone"), {"authorization": f"Basic {KEY}"}, bearer("")):
        answer = ask(app, path, body, headers=headers)
        assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    for key in (KEY, OTHER, ADMIN):
        assert ask(app, path, body, headers=bearer(key)).status == 200


def test_admin_endpoints_need_the_admin_key_and_exist_only_with_one():
    for path, body in (("/metrics", None), ("/admin/weights", {"path": "x"})):
        assert ask(app_of(keys=KEYS), path, body).status == 401
        assert ask(app_of(keys=KEYS), path, body, headers=bearer(KEY)).status == 403
        assert ask(app_of(), path, body, headers=bearer(ADMIN)).status == 403
    assert ask(app_of(keys=KEYS), "/metrics", headers=bearer(ADMIN)).status == 200


def test_health_is_open_and_says_when_the_engine_is_dead():
    engine = ScriptedEngine()
    app = app_of(engine, keys=KEYS)
    assert ask(app, "/health").json == {"status": "ok"}
    engine.is_dead = True
    assert ask(app, "/health").status == 503


def test_every_key_is_compared_whichever_matches(monkeypatch):
    compared: list[bytes] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return left == right

    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    for key in (KEY, OTHER, ADMIN):
        compared.clear()
        KEYS.caller([f"Bearer {key}"])
        assert len(compared) == 3 and len({len(each) for each in compared}) == 1


def test_a_key_is_never_shown():
    assert KEY not in repr(KEYS) and ADMIN not in repr(KEYS)
    name = KEYS.caller([f"Bearer {KEY}"]).name
    assert name not in KEY and KEY not in name
    with pytest.raises(ValueError) as raised:
        Keys(api=("short",))
    assert "'short'" not in str(raised.value) and "16" in str(raised.value)
    with pytest.raises(ValueError, match="admin"):
        Keys(api=(KEY,), admin=KEY)


def test_two_authorization_headers_are_none():
    with pytest.raises(Refusal):
        KEYS.caller([f"Bearer {KEY}", f"Bearer {KEY}"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_another_address_without_a_key_is_refused(host):
    with pytest.raises(ValueError, match="API key"):
        check_address(host, Keys())
    with pytest.raises(ValueError, match="API key"):
        check_address(host, Keys(admin=ADMIN))
    check_address(host, KEYS)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]", "localhost", "127.8.9.1"])
def test_this_machine_needs_no_key(host):
    check_address(host, Keys())
    assert is_loopback(host)


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"host": "evil.example:80"}, 421),
        ({"host": "127.0.0.1.evil.example"}, 421),
        ({"host": ""}, 421),
        ({"host": "[::1]:80"}, 200),
        ({"host": "localhost"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 200),
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/x-www-form-urlencoded"}, 415),
        ({"content-type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_pages_of_other_sites_cannot_use_an_open_server(headers, status):
    engine = ScriptedEngine()
    answer = ask(app_of(engine), CHAT, chat(), headers=headers)
    assert answer.status == status and bool(engine.seen) == (status == 200)


def test_a_server_with_a_key_answers_to_any_name():
    answer = ask(
        app_of(keys=KEYS), CHAT, chat(), headers=bearer(KEY) | {"host": "models.example", "origin": "https://a"}
    )
    assert answer.status == 200


def test_callers_share_no_cached_prefix_and_no_session():
    engine = ScriptedEngine()
    app = app_of(engine, keys=KEYS)
    for key in (KEY, OTHER):
        ask(app, CHAT, chat(session_id="s"), headers=bearer(key))
    assert engine.seen[0].salt != engine.seen[1].salt and "" not in (engine.seen[0].salt, engine.seen[1].salt)
    said = [*chat()["messages"], {"role": "assistant", "content": "Hello, world!"}, {"role": "user", "content": "more"}]
    for key, expected in ((KEY, "continued"), ("", 401)):
        answer = ask(app, CHAT, {"messages": said, "session_id": "s"}, headers=bearer(key) if key else {})
        assert answer.headers.get("x-perilune-session", answer.status) == expected
    other = app_of(ScriptedEngine(), keys=KEYS)
    ask(other, CHAT, chat(session_id="s"), headers=bearer(KEY))
    answer = ask(other, CHAT, {"messages": said, "session_id": "s"}, headers=bearer(OTHER))
    assert answer.headers["x-perilune-session"].startswith("begun")
    shared = ScriptedEngine()
    ask(app_of(shared, keys=KEYS, share_prefixes=True), CHAT, chat(), headers=bearer(KEY))
    assert shared.seen[0].salt == ""


# Rates and queues -----------------------------------------------------------------------------------------------------


def test_a_bucket_refills_at_its_rate():
    now = [0.0]
    bucket = Bucket(rate=2.0, burst=10.0, clock=lambda: now[0])
    bucket.take(10)
    assert bucket.wait(1) == pytest.approx(0.5)
    now[0] = 0.5
    assert bucket.wait(1) == 0
    now[0] = 100.0
    assert bucket.wait(10) == 0 and bucket.level == 10
    assert bucket.wait(50) == 0, "more than the burst passes when the bucket is full"


def test_a_key_that_asks_too_often_is_told_when_to_come_back_and_others_are_served():
    app = app_of(keys=KEYS, limits=Limits(requests_per_minute=2))
    for _ in range(2):
        assert ask(app, CHAT, chat(), headers=bearer(KEY)).status == 200
    answer = ask(app, CHAT, chat(), headers=bearer(KEY))
    assert answer.status == 429 and answer.error["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert ask(app, CHAT, chat(), headers=bearer(OTHER)).status == 200


def test_tokens_are_charged_after_the_answer():
    app = app_of(limits=Limits(tokens_per_minute=10))
    assert ask(app, CHAT, chat()).status == 200
    answer = ask(app, CHAT, chat())
    assert answer.status == 429 and "10 tokens per minute" in answer.error["message"]


def test_a_full_queue_is_429_with_retry_after_and_room_comes_back():
    engine = ScriptedEngine(endless, pace=0.001)
    app = app_of(engine, limits=Limits(concurrent=3))

    async def play() -> None:
        running = [asyncio.create_task(call(app, CHAT, chat(max_tokens=300))) for _ in range(3)]
        while len(engine.running) < 3:
            await asyncio.sleep(0.001)
        refused = await call(app, CHAT, chat())
        assert refused.status == 429 and refused.error["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        assert [answer.status for answer in await asyncio.gather(*running)] == [200] * 3
        assert (await call(app, CHAT, chat(max_tokens=3))).status == 200

    asyncio.run(play())


def test_the_choices_of_one_request_each_take_a_place():
    app = app_of(limits=Limits(concurrent=3))
    assert ask(app, CHAT, chat(n=4)).status == 429
    assert ask(app, CHAT, chat(n=3)).status == 200


def test_a_draining_server_refuses_and_says_so():
    app = app_of()
    app.state.parts.begin_drain()
    assert ask(app, CHAT, chat()).status == 503 and ask(app, "/health").status == 503
    assert ask(app, CHAT, chat()).error["code"] == "draining"


def test_bytes_of_bodies_are_given_back_whatever_happens():
    app = app_of(limits=Limits(body_bytes=1000, bodies_bytes=1500))
    admission: Admission = app.state.parts.admission
    for body in (chat(), b"{", b"x" * 1001, chat("x" * 800)):
        ask(app, CHAT, body)
        assert admission.body_bytes == 0
    assert ask(app, CHAT, b"x" * 1001).status == 413
    admission.take_bytes(1400)
    assert ask(app, CHAT, chat("x" * 500)).status == 429


def test_a_limit_that_is_none_is_refused():
    for fields in ({"n": 0}, {"body_seconds": -1.0}, {"max_tokens": 1.5}, {"requests_per_minute": 0}, {"n": True}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            Limits(**fields)


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"n": 3}, "n"),
        ({"n": True}, "n"),
        ({"n": 1.0}, "n"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 101}, "max_tokens"),
        ({"max_completion_tokens": 101}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True, "top_logprobs": 4}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stop": ["a", "b", "c"]}, "stop"),
        ({"stop": ["a" * 11]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"messages": [{"role": "user", "content": "x"}] * 4}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(3)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}}, "thinking"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"session_id": "x" * 300}, "session_id"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"seed": 2**64}, "seed"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"x": 1}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_caps_and_types_are_refused_by_their_path(fields, param):
    engine = ScriptedEngine()
    limits = Limits(n=2, max_tokens=100, top_logprobs=3, stop=2, stop_characters=10, logit_bias=2, messages=3, tools=2)
    answer = ask(app_of(engine, limits=limits), CHAT, chat() | fields)
    assert answer.status == 400 and answer.error["param"] == param and not engine.seen
    assert answer.error["message"] and answer.error["type"] == "invalid_request_error"


# The admin ------------------------------------------------------------------------------------------------------------


def test_metrics_count_requests_tokens_and_the_engine():
    app = app_of(keys=Keys(admin=ADMIN))
    written = ask(app, CHAT, chat()).json["usage"]["completion_tokens"]
    ask(app, CHAT, chat(n=0))
    text = ask(app, "/metrics", headers=bearer(ADMIN)).body.decode()
    for line in (
        f'perilune_requests_total{{endpoint="{CHAT}",status="200"}} 1.0',
        f'perilune_requests_total{{endpoint="{CHAT}",status="400"}} 1.0',
        f"perilune_completion_tokens_total {float(written)}",
        "perilune_time_to_first_token_seconds_count 1.0",
        "perilune_engine_running 0.0",
        "perilune_sequences 0.0",
    ):
        assert line in text.splitlines()
    assert MODEL not in text


def test_weights_are_loaded_by_the_admin_one_at_a_time():
    loaded: list[tuple[str, int | None]] = []
    gate = asyncio.Event()

    async def load(path: str, version: int | None) -> int:
        await gate.wait()
        if path == "missing":
            raise ValueError("there is no 'missing'")
        loaded.append((path, version))
        return version or 1

    app = app_of(keys=Keys(admin=ADMIN), load_weights=load)

    async def post(body: Any) -> Any:
        return await call(app, "/admin/weights", body, headers=bearer(ADMIN))

    async def play() -> None:
        first = asyncio.create_task(post({"path": "run", "version": 3}))
        await asyncio.sleep(0.01)
        assert (await post({"path": "run"})).status == 409
        gate.set()
        assert (await first).json == {"weight_version": 3}
        refused = await post({"path": "missing"})
        assert refused.status == 400 and "missing" in refused.error["message"]
        for body in ({}, {"path": 3}, {"path": "x", "version": -1}):
            assert (await post(body)).status == 400

    asyncio.run(play())
    assert loaded == [("run", 3)]
    assert ask(app_of(keys=Keys(admin=ADMIN)), "/admin/weights", {"path": "x"}, headers=bearer(ADMIN)).status == 403


def test_the_version_of_the_weights_in_use_is_refused_before_anything_is_read():
    async def load(path: str, version: int | None) -> int:
        engine.weight_version = version or engine.weight_version + 1
        return engine.weight_version

    engine = ScriptedEngine()
    app = app_of(engine, keys=Keys(admin=ADMIN), load_weights=load)

    def post(**body: Any) -> Any:
        return ask(app, "/admin/weights", {"path": "run", **body}, headers=bearer(ADMIN))

    refused = post(version=0)
    assert refused.status == 409 and refused.error["code"] == "version_in_use" and refused.error["param"] == "version"
    assert "version is 0, and the weights in use have it" in refused.error["message"]
    assert post(version=4).json == {"weight_version": 4}
    assert post(version=4).status == 409
    assert post().json == {"weight_version": 5}  # no version: the next one
    assert post(version=4).status == 200  # back to an older one is for the admin to decide


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_only_the_admin_is_served_before_others(path: str):
    engine = ScriptedEngine()
    app = app_of(engine, keys=Keys(api=(KEY,), admin=ADMIN))
    asked = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}

    def post(priority: int, key: str) -> Any:
        return ask(app, path, {**asked, "priority": priority}, headers=bearer(key))

    refused = post(-1, KEY)
    assert refused.status == 403 and refused.error["param"] == "priority" and not engine.seen
    assert "only the admin key" in refused.error["message"]
    for priority, key in ((0, KEY), (7, KEY), (-1, ADMIN)):
        assert post(priority, key).status == 200
        assert engine.seen[-1].priority == priority
    assert ask(app_of(engine), path, {**asked, "priority": -1}).status == 403  # nobody is known: nobody is the admin


def test_rates_are_of_the_caller():
    admission = Admission(Limits(requests_per_minute=1), clock=lambda: 0.0)
    admission.check_rate(Caller(name="a"))
    admission.check_rate(Caller(name="b"))
    with pytest.raises(Refusal):
        admission.check_rate(Caller(name="a"))
