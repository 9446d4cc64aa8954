"""Streams and bodies become one message, faithfully or not at all."""

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perilune.swarm.client import Usage
from perilune.swarm.messages import Message
from perilune.swarm.scripted.chaos import ODD_IDS
from perilune.swarm.scripted.script import Call, Reply, Turn
from perilune.swarm.scripted.wire import body, events, make_answer
from perilune.swarm.stream import (
    ErrorInReply,
    EventLines,
    MalformedReply,
    Parsed,
    StreamedReply,
    parse_body,
    parse_events,
)

TURN = Turn([{"role": "user", "content": "hello"}])


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **rest: Any) -> bytes:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return b"data: " + orjson.dumps({"choices": [choice], **rest}) + b"\n\n"


def call_part(index: int | None = 0, **function: Any) -> dict[str, Any]:
    part: dict[str, Any] = {} if index is None else {"index": index}
    if "id" in function:
        part["id"] = function.pop("id")
    return {"tool_calls": [part | {"function": function}]}


def parse(*chunks: bytes, position: int = 1) -> Parsed:
    return parse_events(b"".join(chunks) + b"data: [DONE]\n\n", position)


def in_pieces(data: bytes, cuts: Sequence[int]) -> Parsed:
    lines, reply = EventLines(), StreamedReply()
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in zip(borders, borders[1:]):
        for event in lines.feed(data[start:end]):
            reply.add(event)
    for event in lines.end():
        reply.add(event)
    return reply.finish(1)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
calls = st.builds(
    Call,
    st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=10),
    st.dictionaries(texts, texts, max_size=3),
    st.sampled_from([None, *ODD_IDS, "call_1"]),
)


@given(
    st.builds(
        Reply,
        st.none() | texts.filter(lambda text: not text.startswith("<")),
        st.lists(calls, max_size=3).map(tuple),
        st.none() | texts,
    ).filter(lambda reply: reply.content or reply.calls),
    st.lists(st.integers(0, 10_000), max_size=12),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
)
def test_a_stream_in_any_pieces_is_the_message_of_the_body(reply: Reply, cuts: list[int], line_end: bytes) -> None:
    answer = make_answer(TURN, reply, id="x", request_bytes=100, max_tokens=None)
    streamed = in_pieces(b"".join(events(answer, include_usage=True)).replace(b"\n", line_end), cuts)
    whole = parse_body(body(answer), 1)
    assert streamed == whole
    assert [call.name for call in whole.message.tool_calls] == [call.name for call in reply.calls]
    assert [orjson.loads(call.arguments) for call in whole.message.tool_calls] == [c.arguments for c in reply.calls]
    assert [call.id for call in whole.message.tool_calls if "functions." not in call.id] == [
        call.id for call in reply.calls if call.id is not None and "functions." not in call.id
    ]
    assert (whole.message.content or "", whole.message.reasoning or "") == (reply.content or "", reply.reasoning or "")
    assert whole.usage is not None and whole.usage.prompt_tokens == 25


@pytest.mark.parametrize("id", [*ODD_IDS, "call_7"])
def test_ids_stay_as_they_came(id: str) -> None:
    part = call_part(id=id, name="look", arguments="{}")
    assert parse(chunk(part), chunk(finish="tool_calls")).message.tool_calls[0].id == id
    message = {"role": "assistant", "tool_calls": [{"id": id, "function": {"name": "look", "arguments": "{}"}}] * 2}
    twice = parse_body(orjson.dumps({"choices": [{"message": message}]}), 1).message.tool_calls
    assert [call.id for call in twice] == [id, id]


def test_an_absent_id_is_named_after_its_place() -> None:
    parts = [chunk(call_part(index, name="look", arguments="{}")) for index in range(2)]
    streamed = parse(*parts, chunk(finish="tool_calls"), position=7)
    assert [call.id for call in streamed.message.tool_calls] == ["call_7_0", "call_7_1"]
    message = {"tool_calls": [{"function": {"name": "look", "arguments": "{}"}}] * 2}
    whole = parse_body(orjson.dumps({"choices": [{"message": message}]}), 7)
    assert whole.message.tool_calls == streamed.message.tool_calls


@pytest.mark.parametrize("arguments", ["", "{", '{"a": 1}}', "[1]", "null", "{'a': 1}", "\x00"])
def test_bad_arguments_spoil_a_stream_and_stay_verbatim_in_a_body(arguments: str) -> None:
    with pytest.raises(MalformedReply, match="arguments"):
        parse(chunk(call_part(id="a", name="look", arguments=arguments)), chunk(finish="tool_calls"))
    message = {"tool_calls": [{"id": "a", "function": {"name": "look", "arguments": arguments}}]}
    whole = parse_body(orjson.dumps({"choices": [{"message": message}]}), 1)
    assert whole.message.tool_calls[0].arguments == arguments


def test_arguments_cut_by_the_length_limit_are_the_models_own() -> None:
    cut = parse(chunk(call_part(id="a", name="look", arguments='{"a')), chunk(finish="length"))
    assert cut.message.tool_calls[0].arguments == '{"a' and cut.finish_reason == "length"


@pytest.mark.parametrize(
    "chunks, why",
    [
        ((chunk({"content": "half a sen"}),), "before its finish reason"),
        ((chunk({"content": "x"}), b"data: {nonsense\n\n"), "not JSON"),
        ((chunk({"content": "x"}), b"data: [1]\n\n"), "not a JSON object"),
        ((b'data: {"choices": [3]}\n\n',), "not a chat chunk"),
        ((chunk(finish="tool_calls"),), "no call arrived"),
        ((chunk(finish="stop"),), "says nothing"),
        ((chunk(call_part(id="a", arguments="{}")), chunk(finish="tool_calls")), "no name"),
        (
            (
                chunk(call_part(id="a", name="x", arguments="{}")),
                chunk(call_part(id="b", name="y", arguments="{}")),
                chunk(finish="tool_calls"),
            ),
            "share the index",
        ),
        ((chunk({"content": "<|tool_call_begin|>look"}), chunk(finish="stop")), "marks"),
        ((chunk({"content": 5}), chunk(finish="stop")), "not a text"),
        ((chunk(call_part(name="x", arguments={"a": 1})), chunk(finish="tool_calls")), "not a text"),
    ],
)
def test_an_unfaithful_stream_is_refused_with_its_reason(chunks: tuple[bytes, ...], why: str) -> None:
    with pytest.raises(MalformedReply, match=why):
        parse(*chunks)


@pytest.mark.parametrize(
    "data", [b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": {"tool_calls": [{}]}}]}']
)
def test_a_body_that_is_no_completion_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedReply):
        parse_body(data, 1)


def test_empty_deltas_change_nothing() -> None:
    empty = [chunk({"tool_calls": part}) for part in ([], None, [{"index": 0}], [{"index": 0, "function": {}}])]
    full = [chunk(call_part(id="a", name="look", arguments='{"a":')), chunk(call_part(arguments="1}"))]
    parsed = parse(*empty, full[0], *empty, full[1], *empty, chunk({}), chunk(finish="tool_calls"))
    assert parsed == parse(*full, chunk(finish="tool_calls"))


def test_names_repeated_in_every_piece_and_absent_indexes_are_understood() -> None:
    parsed = parse(
        chunk(call_part(None, id="a", name="look", arguments='{"a":')),
        chunk(call_part(None, arguments="1}")),
        chunk(call_part(None, id="b", name="see", arguments="{}")),
        chunk(finish="tool_calls"),
    )
    assert [(call.id, call.name, call.arguments) for call in parsed.message.tool_calls] == [
        ("a", "look", '{"a":1}'),
        ("b", "see", "{}"),
    ]
    repeated = parse(
        chunk(call_part(id="a", name="look", arguments='{"a":')),
        chunk(call_part(id="a", name="look", arguments="1}")),
        chunk(finish="tool_calls"),
    )
    assert repeated.message.tool_calls == parsed.message.tool_calls[:1]


def test_interleaved_calls_are_joined_by_index() -> None:
    parsed = parse(
        chunk(call_part(1, id="b", name="see", arguments='{"n"')),
        chunk(call_part(0, id="a", name="look", arguments="{")),
        chunk(call_part(1, arguments=":2}")),
        chunk(call_part(0, arguments="}")),
        chunk(finish="tool_calls"),
    )
    assert [(call.name, call.arguments) for call in parsed.message.tool_calls] == [("look", "{}"), ("see", '{"n":2}')]


def test_an_error_inside_a_response_is_an_error() -> None:
    with pytest.raises(ErrorInReply, match="engine died") as caught:
        parse(chunk({"content": "x"}), b'data: {"error": {"message": "engine died", "code": 500}}\n\n')
    assert caught.value.code == 500
    with pytest.raises(ErrorInReply, match="too old"):
        parse_body(b'{"error": "too old"}', 1)


def test_reasoning_is_kept_under_either_name() -> None:
    for name in ("reasoning_content", "reasoning"):
        parsed = parse(chunk({name: "hm "}), chunk({name: "yes"}), chunk({"content": "42"}), chunk(finish="stop"))
        assert parsed.message == Message("assistant", "42", reasoning="hm yes")
        whole = parse_body(orjson.dumps({"choices": [{"message": {"content": "42", name: "hm yes"}}]}), 1)
        assert whole.message == parsed.message


def test_token_ids_and_logprobs_are_read_when_given() -> None:
    answer = make_answer(TURN, Reply("hello you"), id="x", request_bytes=9, max_tokens=None, want_tokens=True)
    streamed = parse_events(b"".join(events(answer, include_usage=True)), 1)
    whole = parse_body(body(answer), 1)
    assert streamed == whole
    assert whole.token_ids == tuple(answer.completion_token_ids or ())
    assert whole.prompt_token_ids == tuple(answer.prompt_token_ids or ())
    assert whole.logprobs is not None and whole.token_ids is not None
    assert len(whole.logprobs) == len(whole.token_ids) and max(whole.logprobs) <= 0
    assert whole.weight_version == "scripted-1"
    pieces = parse(
        chunk({"content": "a"}, prompt_token_ids=[1, 2]),
        b'data: {"choices":[{"index":0,"delta":{"content":"b"},"token_ids":[3]}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"token_ids":[4],"finish_reason":"stop"}],'
        b'"metadata":{"weight_version":7}}\n\n',
    )
    assert (pieces.prompt_token_ids, pieces.token_ids, pieces.weight_version) == ((1, 2), (3, 4), "7")


@pytest.mark.parametrize(
    "usage, read",
    [
        ({"prompt_tokens": 3, "completion_tokens": 4}, Usage(prompt_tokens=3, completion_tokens=4)),
        ({"prompt_tokens": 3}, Usage(prompt_tokens=3)),
        ({"prompt_tokens": -3, "completion_tokens": 4}, None),
        ({"prompt_tokens": "many"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_usage_that_makes_no_sense_is_unknown(usage: Any, read: Usage | None) -> None:
    assert parse(chunk({"content": "x"}), chunk(finish="stop", usage=usage)).usage == read


def test_other_choices_and_other_fields_of_events_are_ignored() -> None:
    parsed = parse(
        b": keep-alive\n\nevent: message\nid: 3\nretry: 10\n",
        chunk({"content": "one"}),
        b'data: {"choices": [{"index": 1, "delta": {"content": "two"}, "finish_reason": "stop"}]}\n\n',
        chunk(finish="stop"),
    )
    assert parsed.message.content == "one"


@given(st.binary(max_size=200))
def test_any_bytes_are_a_reply_or_one_named_error(data: bytes) -> None:
    for read in (parse_body, parse_events):
        try:
            read(data, 1)
        except (MalformedReply, ErrorInReply):
            continue


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "message", "delta", "tool_calls", "function", "name", "arguments", "id", "index"]
                + ["content", "finish_reason", "usage", "prompt_tokens", "logprobs", "token_ids", "error", "metadata"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(json_values)
def test_any_json_is_a_reply_or_one_named_error(value: Any) -> None:
    data = orjson.dumps(value)
    for read, text in ((parse_body, data), (parse_events, b"data: " + data + b"\n\ndata: [DONE]\n\n")):
        try:
            parsed = read(text, 1)
        except (MalformedReply, ErrorInReply):
            continue
        assert orjson.loads(parsed.message.wire)["role"] == "assistant"
        assert isinstance(parsed.message.text, str) and isinstance(parsed.finish_reason + parsed.model, str)
        assert isinstance(parsed.message.reasoning, str | None)
        assert all(isinstance(call.id + call.name + call.arguments, str) for call in parsed.message.tool_calls)
