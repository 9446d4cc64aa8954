"""Turns of the chat format: markers, names, calls, reasoning, pictures, and who wrote which token."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_dialogues import DIALOGUES, TEXTS, TOKENIZER, TOOLS, picture, pictures_of

from perilune.data.chat import (
    ChatError,
    KimiTemplate,
    Segment,
    encode,
    parse_messages,
    parse_tools,
    render,
    text_of,
)
from perilune.data.tokenizer import SPECIAL_TOKENS


def shown(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: bool) -> str:
    return text_of(render(parse_messages(messages), parse_tools(tools), **options))


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def asked(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(id: str = "functions.search:0", arguments: str = '{"q": "x"}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "search", "arguments": arguments}}


def test_turns_follow_one_another_without_a_character_between() -> None:
    messages = [{"role": "system", "content": "Be brief."}, asked("Hi"), said("Hello"), asked("Bye")]
    assert shown(messages) == (
        "<|im_system|>system<|im_middle|>Be brief.<|im_end|>"
        "<|im_user|>user<|im_middle|>Hi<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>Hello<|im_end|>"
        "<|im_user|>user<|im_middle|>Bye<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think>"
    )


def test_a_name_stands_in_the_place_of_the_role_and_developer_is_system() -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "name": "bob", "content": "b"}]
    assert shown(messages, add_generation_prompt=False) == (
        "<|im_system|>system<|im_middle|>a<|im_end|><|im_user|>bob<|im_middle|>b<|im_end|>"
    )


def test_tools_are_declared_first_and_results_name_their_call() -> None:
    messages = [
        asked("?"),
        said("Let me see.", reasoning_content="I search.", tool_calls=[call(), call("functions.search:1", "{}")]),
        {"role": "tool", "tool_call_id": "functions.search:0", "content": "found"},
    ]
    text = shown(messages, TOOLS)
    assert text.startswith("<|im_system|>tool_declare<|im_middle|># Tools\n\n## functions\nnamespace functions {\n")
    assert (
        "<think>I search.</think>Let me see.<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{"q": "x"}<|tool_call_end|>'
        "<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|><|im_end|>"
        "<|im_system|>tool<|im_middle|>## Return of functions.search:0\nfound<|im_end|>"
    ) in text


def test_instant_mode_writes_an_empty_thought() -> None:
    assert shown([asked("a")], thinking=False).endswith("<|im_assistant|>assistant<|im_middle|><think></think>")
    text = shown([asked("a"), said("b", reasoning_content="why", tool_calls=[call()])], thinking=False)
    assert "why" not in text and "<think></think>b<|tool_calls" in text


def test_reasoning_is_dropped_up_to_the_last_answer_without_calls_and_kept_after_it() -> None:
    messages = [
        asked("1"),
        said("", reasoning_content="first", tool_calls=[call()]),
        {"role": "tool", "tool_call_id": "functions.search:0", "content": "r"},
        said("answer", reasoning_content="second"),
        asked("2"),
        said("", reasoning_content="third", tool_calls=[call()]),
        {"role": "tool", "tool_call_id": "functions.search:0", "content": "r"},
    ]
    text = shown(messages)
    assert "first" not in text and "second" not in text and "<think>third</think>" in text
    everything = shown(messages, preserve_thinking=True)
    assert all(f"<think>{word}</think>" in everything for word in ("first", "second", "third"))


def test_the_turn_being_written_keeps_its_reasoning() -> None:
    messages = [asked("1"), said("a", reasoning_content="old"), asked("2"), said("b", reasoning_content="new")]
    text = shown(messages, add_generation_prompt=False)
    assert "old" not in text and text.endswith("<think>new</think>b<|im_end|>")
    assert "new" not in shown(messages, add_generation_prompt=True)


def test_pictures_stand_where_the_message_has_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    content = [{"type": "text", "text": "A"}, image, {"type": "text", "text": "B"}, image, image]
    segments = render(parse_messages([{"role": "user", "content": content}]), add_generation_prompt=False)
    place = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    assert text_of(segments) == f"<|im_user|>user<|im_middle|>A{place}B{place}{place}<|im_end|>"
    chat = encode(TOKENIZER, segments, [picture(1), picture(2, height=4, width=6), picture(3)])
    pad = TOKENIZER.special_ids["<|media_pad|>"]
    assert [chat.tokens[start] for start in chat.starts] == [pad] * 3
    assert [chat.tokens[start - 1] for start in chat.starts] == [TOKENIZER.special_ids["<|media_content|>"]] * 3
    assert [chat.tokens.count(pad), *(item.num_tokens for item in chat.media)] == [8, 1, 6, 1]


def test_a_video_is_a_row_of_chunks_after_their_times() -> None:
    content = [{"type": "video_url", "video_url": {"url": "data:,"}}]
    segments = render(parse_messages([{"role": "user", "content": content}]), add_generation_prompt=False)
    chat = encode(TOKENIZER, segments, [[("00:00:00.000", picture(1)), ("00:00:02.000", picture(2))]])
    place = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    body = f"00:00:00.000{place}00:00:02.000{place}"
    assert TOKENIZER.decode(chat.tokens) == f"<|im_user|>user<|im_middle|>{body}<|im_end|>"
    assert len(chat.media) == len(chat.starts) == 2


@pytest.mark.parametrize("attachments", [[], [picture(), picture()], [[("0", picture())]]])
def test_pictures_that_do_not_fit_the_messages_are_an_error(attachments: list[Any]) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(ChatError, match="picture"):
        encode(TOKENIZER, render(parse_messages([{"role": "user", "content": content}])), attachments)


@given(DIALOGUES, st.booleans(), st.booleans())
@settings(max_examples=200)
def test_no_message_can_make_a_special_token(dialogue: list[dict[str, Any]], thinking: bool, tools: bool) -> None:
    messages = parse_messages(dialogue)
    segments = render(messages, parse_tools(TOOLS if tools else None), thinking=thinking)
    chat = encode(TOKENIZER, segments, pictures_of(messages))
    # Counted from the format alone: whatever the texts spell adds none.
    num_calls = sum(len(message.tool_calls) for message in messages)
    num_sections = sum(bool(message.tool_calls) for message in messages)
    num_replies = sum(message.role == "assistant" for message in messages)
    num_pictures = sum(len(message.media) for message in messages)
    expected = (len(messages) + tools) * 3 + num_replies * 2 + num_calls * 3 + num_sections * 2 + num_pictures * 4
    first_special = TOKENIZER.vocab_size - len(SPECIAL_TOKENS)
    assert sum(token >= first_special for token in chat.tokens) == expected + (3 if thinking else 4)
    assert TOKENIZER.decode(chat.tokens) == text_of(segments)


@given(TEXTS, TEXTS, TEXTS, st.booleans())
def test_produced_tokens_are_what_a_reply_adds_to_its_prompt(
    reasoning: str, content: str, arguments: str, thinking: bool
) -> None:
    before = [asked("a"), said("b"), asked("c")]
    reply = said(content, reasoning_content=reasoning, tool_calls=[call(arguments=arguments)])
    prompt = encode(TOKENIZER, render(parse_messages(before), thinking=thinking))
    whole = encode(TOKENIZER, render(parse_messages([*before, reply]), thinking=thinking, add_generation_prompt=False))
    assert whole.tokens[: len(prompt.tokens)] == prompt.tokens
    assert whole.produced[len(prompt.tokens) :] == [True] * (len(whole.tokens) - len(prompt.tokens))
    assert TOKENIZER.special_name(whole.tokens[-1]) == "<|im_end|>"


def test_only_replies_are_produced_and_none_that_has_lost_its_thought() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = parse_messages(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [image]},
            said("lost", reasoning_content="thought"),
            asked("q"),
            said("plain"),
            asked("q"),
            said("", reasoning_content="kept", tool_calls=[call()]),
            {"role": "tool", "tool_call_id": "functions.search:0", "content": "result"},
            said("end", reasoning_content="last"),
        ]
    )

    def produced(**options: bool) -> str:
        segments = render(messages, parse_tools(TOOLS), add_generation_prompt=False, **options)
        chat = encode(TOKENIZER, segments, [picture()])
        assert len(chat.tokens) == len(chat.produced)
        return TOKENIZER.decode([token for token, own in zip(chat.tokens, chat.produced) if own])

    calls = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>"
        '{"q": "x"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )
    assert produced() == f"plain<|im_end|>kept</think>{calls}last</think>end<|im_end|>"
    assert produced(thinking=False) == f"lost<|im_end|>plain<|im_end|>{calls}end<|im_end|>"
    everything = produced(preserve_thinking=True)
    assert everything == (
        f"thought</think>lost<|im_end|></think>plain<|im_end|>kept</think>{calls}last</think>end<|im_end|>"
    )


def test_a_continuation_is_the_new_turns_alone() -> None:
    messages = parse_messages([asked("a"), said("b", reasoning_content="r"), asked("c")])
    added = KimiTemplate().continuation(messages, 2, parse_tools(TOOLS), thinking=False)
    assert added is not None
    assert text_of(added) == (
        "<|im_user|>user<|im_middle|>c<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"
    )
    assert Segment(text="<|im_user|>", kind="special") == added[0]
