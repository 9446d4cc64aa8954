"""Plain dicts into messages and tools: what is accepted, and errors that name the place."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.chat_dialogues import DIALOGUES, TOOLS

from perilune.data.chat_messages import ChatError, MediaPart, TextPart, parse_message, parse_messages, parse_tools

USER = {"role": "user", "content": "hi"}
CALL = {"id": "functions.a:0", "type": "function", "function": {"name": "a", "arguments": "{}"}}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


@pytest.mark.parametrize(
    "messages, path",
    [
        (None, "messages"),
        ("hi", "messages"),
        ({"role": "user"}, "messages"),
        ([], "messages"),
        ([USER, 1], "messages[1]"),
        ([{}], "messages[0].role"),
        ([{"role": "robot", "content": ""}], "messages[0].role"),
        ([{"role": ["user"], "content": ""}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([USER, USER, {"role": "user", "content": [{"type": "sound"}]}], "messages[2].content[0].type"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].image_url.url",
        ),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}], "messages[0].content[0].image_url"),
        ([{"role": "system", "content": [{"type": "image_url", "image_url": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": [{"type": "image", "image": "x"}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "reasoning_content": 1}], "messages[0].reasoning_content"),
        ([{"role": "assistant", "function_call": {"name": "a"}}], "messages[0].function_call"),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [CALL | {"id": None}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "assistant", "tool_calls": [CALL | {"type": "code"}]}], "messages[0].tool_calls[0].type"),
        ([{"role": "assistant", "tool_calls": [CALL | {"function": None}]}], "messages[0].tool_calls[0].function"),
        (
            [{"role": "assistant", "tool_calls": [CALL, CALL | {"function": {"name": "a", "arguments": [1]}}]}],
            "messages[0].tool_calls[1].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "a", "arguments": nested(200)}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([USER | {"tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x", "tool_call_id": 3}], "messages[0].tool_call_id"),
        ([USER | {"name": 1}], "messages[0].name"),
        ([USER | {"name": "x" * 300}], "messages[0].name"),
    ],
)
def test_an_error_names_the_place_of_a_message(messages: object, path: str) -> None:
    with pytest.raises(ChatError) as caught:
        parse_messages(messages)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{path} ") and (
        "expected" in str(caught.value) or "supported" in str(caught.value)
    )


@pytest.mark.parametrize(
    "tools, path",
    [
        ({}, "tools"),
        ([1], "tools[0]"),
        ([{"function": {"name": "a"}}], "tools[0].type"),
        ([{"type": "code", "function": {"name": "a"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a\n"}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": "a", "description": 1}}], "tools[0].function.description"),
        ([{"type": "function", "function": {"name": "a", "parameters": []}}], "tools[0].function.parameters"),
        ([{"type": "function", "function": {"name": "a", "parameters": nested(200)}}], "tools[0].function.parameters"),
        (
            [{"type": "function", "function": {"name": "a", "parameters": {"x": "\ud800"}}}],
            "tools[0].function.parameters",
        ),
        ([{"type": "function", "function": {"name": "a", "parameters": {"x": {1}}}}], "tools[0].function.parameters"),
        ([*TOOLS, TOOLS[0]], "tools[2].function.name"),
    ],
)
def test_an_error_names_the_place_of_a_tool(tools: object, path: str) -> None:
    with pytest.raises(ChatError) as caught:
        parse_tools(tools)
    assert caught.value.path == path


@pytest.mark.parametrize("value", ["x" * 10_000, ["y" * 10_000], {"z": 1}, None, 1.5, "\x1b[31m"])
def test_an_error_is_short_and_printable_whatever_the_value(value: object) -> None:
    with pytest.raises(ChatError) as caught:
        parse_messages([{"role": value, "content": ""}])
    assert len(str(caught.value)) < 250 and str(caught.value).isprintable()


def test_an_error_shows_an_integer_that_python_does_not_print() -> None:
    with pytest.raises(ChatError, match="an integer of 16610 bits"):
        parse_messages([{"role": 10**5000, "content": ""}])


@given(DIALOGUES)
def test_a_message_is_read_back_from_its_plain_form(dialogue: list[dict[str, Any]]) -> None:
    messages = parse_messages(dialogue)
    again = parse_messages(json.loads(json.dumps([message.plain() for message in messages])))
    assert [message.plain() for message in again] == [message.plain() for message in messages]
    assert [(message.text, message.tool_calls, message.reasoning) for message in again] == [
        (message.text, message.tool_calls, message.reasoning) for message in messages
    ]


def test_what_clients_add_to_messages_is_left_aside() -> None:
    echoed = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    assert parse_message(echoed).text == "a"
    assert parse_message({"role": "assistant", "content": "a", "reasoning": "r"}).reasoning == "r"


def test_ids_and_arguments_stay_as_they_came() -> None:
    odd = {"id": " call\n", "type": "function", "function": {"name": "a", "arguments": '{"x" :1,}'}}
    call = parse_message({"role": "assistant", "tool_calls": [odd]}).tool_calls[0]
    assert (call.id, call.arguments) == (" call\n", '{"x" :1,}')
    parsed = CALL | {"function": {"name": "a", "arguments": {"x": "é"}}}
    assert parse_message({"role": "assistant", "tool_calls": [parsed]}).tool_calls[0].arguments == '{"x": "é"}'


def test_parts_keep_their_order() -> None:
    content = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "and"},
        {"type": "video_url", "video_url": {"url": "b.mp4"}},
    ]
    assert parse_message({"role": "user", "content": content}).parts == (
        MediaPart(kind="image", source="a.png"),
        TextPart(text="and"),
        MediaPart(kind="video", source="b.mp4"),
    )


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "id", "name"])
                | st.text(),
                inner,
            )
        ),
    )
)
def test_any_json_is_messages_or_a_chat_error(value: object) -> None:
    for read in (parse_messages, parse_tools):
        for candidate in (value, [value], [{"role": "assistant", "tool_calls": value, "content": value}]):
            with contextlib.suppress(ChatError):
                read(candidate)
