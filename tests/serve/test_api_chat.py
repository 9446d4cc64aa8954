"""/v1/chat/completions against a scripted engine: what goes into the engine, and what comes out of the server."""

from __future__ import annotations

import base64
import io
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

from perilune.data.chat import KimiTemplate
from perilune.data.chat_parser import ChatParser
from perilune.data.images import image_media
from perilune.serve import prompts
from perilune.serve.limits import Limits
from perilune.serve.request import QueueFull, RequestError
from perilune.serve.text_stream import Piece
from tests.serve.api_engine import MODEL, ScriptedEngine, app_of, ask, chat, ids, says, tokenizer

PATH = "/v1/chat/completions"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TWO_CALLS = says(
    "I search.", "</think>", "One moment.",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "functions.search:0", "<|tool_call_argument_begin|>", '{"query": "moon"}',
    "<|tool_call_end|>",
    "<|tool_call_begin|>", "functions.look:1", "<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", "<|im_end|>",
)  # fmt: skip


NAMELESS = says(
    "Hm.", "</think>", "Here: ",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>", "functions.", "<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>",
    "<|tool_call_begin|>", "functions.look:1", "<|tool_call_argument_begin|>", "{}", "<|tool_call_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", '{"a": 1}', "<|tool_call_end|>",
    "<|tool_calls_section_end|>", " done", "<|im_end|>",
)  # fmt: skip


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that the chunks of one choice add up to."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            for name in ("content", "reasoning_content"):
                if choice["delta"].get(name):
                    message[name] = message.get(name, "") + choice["delta"][name]
            for part in choice["delta"].get("tool_calls", ()):
                call = calls.setdefault(part["index"], {"function": {"name": None, "arguments": ""}})
                call |= {name: part[name] for name in ("id", "type") if name in part}
                call["function"]["name"] = part["function"].get("name") or call["function"]["name"]
                call["function"]["arguments"] += part["function"]["arguments"]
    if calls:
        message["tool_calls"] = [calls[number] for number in sorted(calls)]
    return message


def whole(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "role" and value}


def test_a_reply_has_content_reasoning_usage_and_a_reason():
    engine = ScriptedEngine(version_of=lambda number: 7)
    reply = ask(app_of(engine), PATH, chat()).json
    assert reply["object"] == "chat.completion" and reply["model"] == MODEL and reply["weight_version"] == 7
    choice = reply["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!", "reasoning_content": "The moon."}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    prompt = engine.seen[0].prompt
    written = len(ids("The moon.", "</think>", "Hello, world!", "<|im_end|>"))
    assert reply["usage"]["prompt_tokens"] == len(prompt) and reply["usage"]["completion_tokens"] == written
    assert reply["usage"]["total_tokens"] == len(prompt) + written
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 1


@pytest.mark.parametrize("script", [says("Thought.", "</think>", "Text. 🌒", "<|im_end|>"), TWO_CALLS, NAMELESS])
def test_a_stream_adds_up_to_the_whole_reply(script):
    app = app_of(ScriptedEngine(script))
    reply = ask(app, PATH, chat(tools=[SEARCH, LOOK], n=2)).json
    answer = ask(app, PATH, chat(tools=[SEARCH, LOOK], n=2, stream=True, stream_options={"include_usage": True}))
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    for index in range(2):
        assert joined(events, index) == whole(reply["choices"][index]["message"])
        reasons = [c["finish_reason"] for e in events for c in e["choices"] if c["index"] == index]
        assert reasons[-1] == reply["choices"][index]["finish_reason"] and set(reasons[:-1]) == {None}
    assert events[-1]["choices"] == [] and events[-1]["usage"] == reply["usage"]
    assert all("usage" not in event for event in events[:-1])
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_parallel_tool_calls_keep_their_ids_and_end_with_tool_calls():
    choice = ask(app_of(ScriptedEngine(TWO_CALLS)), PATH, chat(tools=[SEARCH, LOOK])).json["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "One moment."
    assert choice["message"]["tool_calls"] == [
        {
            "id": "functions.search:0",
            "type": "function",
            "function": {"name": "search", "arguments": '{"query": "moon"}'},
        },
        {"id": "functions.look:1", "type": "function", "function": {"name": "look", "arguments": "{}"}},
    ]


def test_a_call_without_a_name_is_content_and_no_call():
    message = ask(app_of(ScriptedEngine(NAMELESS)), PATH, chat(tools=[LOOK])).json["choices"][0]
    assert message["finish_reason"] == "tool_calls"
    (call,) = message["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": "{}"} and call["id"] == "functions.look:1"
    assert message["message"]["content"] == 'Here: functions.{}{"a": 1} done'
    alone = says("</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.",
                 "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|im_end|>")  # fmt: skip
    (choice,) = ask(app_of(ScriptedEngine(alone)), PATH, chat()).json["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"] == {"role": "assistant", "content": "functions."}


def test_the_mark_that_ends_a_turn_is_parsed_though_it_is_no_text():
    """A call whose id is complete only because the turn ended."""
    written = ids("</think>", "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.look:0", "<|im_end|>")
    parser = ChatParser(thinking=True)
    for token_id in written:
        text = tokenizer().token_bytes(token_id).decode()
        parser.push(Piece(text, tokenizer().special_name(token_id)))
    expected = [call.plain() for call in parser.finish().message.tool_calls]
    choice = ask(app_of(ScriptedEngine(lambda request: written)), PATH, chat(tools=[LOOK])).json["choices"][0]
    assert expected and choice["message"].get("tool_calls") == expected and choice["finish_reason"] == "tool_calls"


def test_without_parallel_calls_the_first_one_ends_the_turn():
    engine = ScriptedEngine(TWO_CALLS)
    choice = ask(app_of(engine), PATH, chat(tools=[SEARCH, LOOK], parallel_tool_calls=False)).json["choices"][0]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ["functions.search:0"]
    assert choice["finish_reason"] == "tool_calls"


def test_tool_choice_none_keeps_the_declaration_and_bans_the_marks():
    engine = ScriptedEngine()
    app = app_of(engine)
    for choice in ("auto", "none"):
        assert ask(app, PATH, chat(tools=[SEARCH], tool_choice=choice, logit_bias={"5": 1})).status == 200
    auto, none = engine.seen
    assert auto.prompt == none.prompt
    special = tokenizer().special_ids
    marks = {special["<|tool_calls_section_begin|>"]: -100.0, special["<|tool_call_begin|>"]: -100.0}
    assert dict(auto.params.logit_bias) == {5: 1.0} and dict(none.params.logit_bias) == {5: 1.0} | marks


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_required_call_is_a_grammar(choice):
    engine = ScriptedEngine()
    assert ask(app_of(engine), PATH, chat(tools=[SEARCH, LOOK], tool_choice=choice)).status == 200
    assert engine.seen[0].params.grammar is not None


@pytest.mark.parametrize(
    "format",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {}}}},
    ],
)
def test_a_response_format_is_a_grammar_and_text_is_none(format):
    engine = ScriptedEngine()
    app = app_of(engine)
    assert ask(app, PATH, chat(response_format=format)).status == 200
    assert ask(app, PATH, chat(response_format={"type": "text"})).status == 200
    assert engine.seen[0].params.grammar is not None and engine.seen[1].params.grammar is None


@pytest.mark.parametrize(
    "switch, opened",
    [
        ({}, True),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"chat_template_kwargs": {"thinking": False}}, False),
        ({"chat_template_kwargs": {"thinking": True, "other": 1}}, True),
    ],
)
def test_the_thinking_switch_opens_or_closes_the_reasoning(switch, opened):
    engine = ScriptedEngine(says("Words.", "<|im_end|>"))
    message = ask(app_of(engine), PATH, chat(**switch)).json["choices"][0]["message"]
    special = tokenizer().special_ids
    assert engine.seen[0].prompt[-1] == special["<think>" if opened else "</think>"]
    assert message.get("reasoning_content" if opened else "content") == "Words."


def test_sampling_fields_reach_the_engine():
    engine = ScriptedEngine()
    fields: dict[str, Any] = {
        "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -1,
        "presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.2, "stop": ["x", "yy"],
        "logit_bias": {"3": -2}, "min_tokens": 2, "stop_token_ids": [9], "priority": 3,
    }  # fmt: skip
    answer = ask(app_of(engine), PATH, chat(**fields, n=2))
    assert answer.status == 200 and "x-perilune-ignored" not in answer.headers
    first, second = engine.seen
    params = first.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (9, 0.5, 0.9, 7, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1.0, -1.0, 1.2)
    assert params.stop == ("x", "yy") and dict(params.logit_bias) == {3: -2.0} and params.min_tokens == 2
    assert 9 in params.stop_ids and tokenizer().special_ids["<|im_end|>"] in params.stop_ids
    assert params.seed == 2**63 - 1 and second.params.seed == 0, "seeds of further samples count up"
    assert first.priority == 3 and first.request_id != second.request_id


def test_stop_strings_cut_the_text():
    engine = ScriptedEngine(says("</think>", "one two three", "<|im_end|>"))
    choice = ask(app_of(engine), PATH, chat(stop="two")).json["choices"][0]
    assert choice["message"]["content"] == "one " and choice["finish_reason"] == "stop"


def test_log_probs_cover_every_token_and_line_up_with_token_ids():
    engine = ScriptedEngine(says("Hm", "</think>", "é🌒", "<|im_end|>"))
    app = app_of(engine)
    reply = ask(app, PATH, chat(logprobs=True, top_logprobs=2, return_token_ids=True)).json
    choice = reply["choices"][0]
    written = ids("Hm", "</think>", "é🌒", "<|im_end|>")
    assert choice["token_ids"] == written and reply["prompt_token_ids"] == list(engine.seen[0].prompt)
    rows = choice["logprobs"]["content"]
    assert [row["logprob"] for row in rows] == [-token_id / 1000 for token_id in written]
    assert all(len(row["top_logprobs"]) == 2 for row in rows)
    for row, token_id in zip(rows, written, strict=True):
        expected = tokenizer().token_bytes(token_id) or tokenizer().special_name(token_id).encode()
        assert bytes(row["bytes"]) == expected
    assert any(row["token"].startswith("bytes:\\x") for row in rows), "half a character is written as bytes"
    events = ask(app, PATH, chat(logprobs=True, top_logprobs=2, return_token_ids=True, stream=True)).events
    assert events[0]["prompt_token_ids"] == reply["prompt_token_ids"]
    choices = [c for e in events for c in e["choices"]]
    assert [t for c in choices for t in c.get("token_ids", ())] == written
    assert [row for c in choices if c["logprobs"] for row in c["logprobs"]["content"]] == rows


def test_return_token_ids_alone_brings_log_probs_of_the_chosen_tokens():
    choice = ask(app_of(), PATH, chat(return_token_ids=True)).json["choices"][0]
    rows = choice["logprobs"]["content"]
    assert len(rows) == len(choice["token_ids"]) and all(row["top_logprobs"] == [] for row in rows)


def test_a_change_of_weights_in_a_sequence_is_stamped_per_token():
    engine = ScriptedEngine(says("ab", "<|im_end|>"), version_of=lambda number: 4 + number // 2)
    written = len(ids("ab", "<|im_end|>"))
    app = app_of(engine)
    expected = [4 + number // 2 for number in range(written)]
    choice = ask(app, PATH, chat()).json["choices"][0]
    assert choice["weight_versions"] == expected and choice["weight_version"] == expected[-1]
    last = ask(app, PATH, chat(stream=True)).events[-1]
    assert last["weight_version"] == expected[-1] and last["choices"][0]["weight_versions"] == expected


def picture_url(size: tuple[int, int] = (40, 30), kind: str = "PNG") -> tuple[str, np.ndarray]:
    pixels = np.random.default_rng(0).integers(256, size=(size[1], size[0], 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}", pixels


def with_picture(url: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}]}


def test_a_picture_becomes_patches_at_its_pads():
    engine = ScriptedEngine()
    url, pixels = picture_url()
    assert ask(app_of(engine, takes_pictures=True), PATH, with_picture(url)).status == 200
    request = engine.seen[0]
    expected = image_media(pixels)
    pad = tokenizer().special_ids["<|media_pad|>"]
    assert [n for n, token_id in enumerate(request.prompt) if token_id == pad] == list(
        range(request.media[0].start, request.media[0].end)
    )
    assert request.media[0].grid == expected.grid and np.array_equal(request.media[0].pixels, expected.pixels)


def test_pictures_of_a_short_body_are_decoded_in_a_thread(monkeypatch):
    threads = []
    decode = prompts.attachments

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return decode(*arguments)

    monkeypatch.setattr(prompts, "attachments", watched)
    app = app_of(takes_pictures=True)
    assert ask(app, PATH, with_picture(picture_url()[0])).status == 200
    assert ask(app, PATH, chat()).status == 200
    assert [each is threading.main_thread() for each in threads] == [False, True]


def test_a_template_of_the_model_is_rendered_in_a_thread():
    threads = []

    class Watched(KimiTemplate):
        def render(self, *arguments: Any, **options: Any) -> Any:
            threads.append(threading.current_thread())
            return super().render(*arguments, **options)

    assert ask(app_of(template=Watched()), PATH, chat()).status == 200
    assert threads and threading.main_thread() not in threads


@pytest.mark.parametrize(
    "url, code",
    [
        ("http://127.0.0.1/a.png", "invalid_image_url"),
        ("https://example.org/a.png", "invalid_image_url"),
        ("file:///etc/passwd", "invalid_image_url"),
        ("data:image/png,abc", "invalid_image_url"),
        ("data:image/png;base64,&&&&", "invalid_image_url"),
        ("data:image/png;base64,AAAA", "invalid_image"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "invalid_image"),
    ],
)
def test_a_picture_that_is_none_is_refused_by_its_path(url, code):
    engine = ScriptedEngine()
    answer = ask(app_of(engine, takes_pictures=True), PATH, with_picture(url))
    assert answer.status == 400 and answer.error["code"] == code and not engine.seen
    assert answer.error["param"] == "messages[0].content[1].image_url.url"


def test_pictures_are_counted_while_they_are_in_memory_and_before_they_fill_the_context():
    url = picture_url()[0]
    app = app_of(takes_pictures=True, limits=Limits(picture_bytes=9_000))
    answer = ask(app, PATH, with_picture(url))
    assert answer.status == 400 and answer.error["code"] == "image_too_large"
    app = app_of(takes_pictures=True, max_length=100)
    answer = ask(app, PATH, with_picture(picture_url((300, 300))[0]))
    assert answer.error["code"] == "context_length_exceeded" and answer.error["param"].endswith("image_url.url")
    app = app_of(takes_pictures=True, limits=Limits(picture_bytes=20_000))
    assert ask(app, PATH, with_picture(url)).status == 200 and app.state.parts.admission.picture_bytes == 0
    app.state.parts.admission.picture_bytes = 15_000
    assert ask(app, PATH, with_picture(url)).status == 429


def test_a_model_without_vision_refuses_pictures():
    answer = ask(app_of(), PATH, with_picture(picture_url()[0]))
    assert answer.status == 400 and answer.error["code"] == "no_vision"


def test_a_session_continues_with_the_exact_ids_of_the_turn_before():
    engine = ScriptedEngine(says("First thought.", "</think>", "First.", "<|im_end|>"))
    app = app_of(engine)
    first = ask(app, PATH, chat("one", session_id="s", return_token_ids=True))
    assert first.headers["x-perilune-session"].startswith("begun")
    reply = first.json["choices"][0]
    said = {"role": "assistant", "content": reply["message"]["content"]}
    messages = [{"role": "user", "content": "one"}, said, {"role": "user", "content": "two"}]
    second = ask(app, PATH, {"messages": messages, "session_id": "s", "stream": True})
    assert second.headers["x-perilune-session"] == "continued"
    before = engine.seen[0].prompt + tuple(reply["token_ids"])
    assert engine.seen[1].prompt[: len(before)] == before
    third = ask(app, PATH, {"messages": messages, "session_id": "other"})
    assert third.headers["x-perilune-session"].startswith("begun")


@pytest.mark.parametrize(
    "failure, status, param, code",
    [
        (QueueFull("full"), 429, None, "queue_full"),
        (RequestError("prompt", "prompt is too long"), 400, "messages", "invalid_value"),
        (RuntimeError("secret detail"), 500, None, "internal_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_refuses_is_refused_with_a_status_also_in_a_stream(failure, status, param, code, stream):
    answer = ask(app_of(ScriptedEngine(failure=failure)), PATH, chat(stream=stream))
    assert (answer.status, answer.error["param"], answer.error["code"]) == (status, param, code)
    assert "secret" not in answer.error["message"]
    assert ("retry-after" in answer.headers) == (status == 429)


@pytest.mark.parametrize("reason, status, code", [("error", 500, "engine_error"), ("cancelled", 503, "cancelled")])
@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_gives_up_is_an_error_and_never_a_short_answer(reason, status, code, stream):
    answer = ask(app_of(ScriptedEngine(gives_up=reason)), PATH, chat(stream=stream))
    error = answer.events[-1]["error"] if stream else answer.error
    assert error["code"] == code and "secret" not in error["message"]
    assert answer.status == (200 if stream else status) and b"[DONE]" not in answer.body


def test_unknown_fields_are_ignored_and_named_in_a_header():
    answer = ask(app_of(), PATH, chat(temprature=1, user="me", **{"x\r\ny: z": 1}))
    assert answer.status == 200
    assert answer.headers["x-perilune-ignored"] == "temprature, x??y? z"


def test_an_unknown_model_is_not_found():
    answer = ask(app_of(aliases=("other",)), PATH, chat() | {"model": "gpt"})
    assert answer.status == 404 and answer.error["param"] == "model" and answer.error["code"] == "model_not_found"
    assert ask(app_of(aliases=("other",)), PATH, chat() | {"model": "other"}).json["model"] == "other"


@pytest.mark.parametrize(
    "fields, param",
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no such type"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"regex": "(unclosed"}}, "structured_outputs.regex"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 3}}}],
                "tool_choice": "required",
            },
            "tool_choice",
        ),
    ],
)
def test_a_format_that_cannot_be_built_is_refused_by_the_field_that_asked_for_it(fields, param):
    answer = ask(app_of(), PATH, chat(**fields))
    assert answer.status == 400 and answer.error["param"] == param and answer.error["code"] == "invalid_schema"
