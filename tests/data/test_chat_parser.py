"""Replies as streams: any split gives the same message, nothing raises, marks never become text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.chat_dialogues import TEXTS, TOKENIZER, Piece, pieces_of

from perilune.data.chat import ChatMessage, encode, parse_message, parse_messages, render, text_of
from perilune.data.chat_parser import (
    ChatParser,
    ContentDelta,
    Delta,
    Parsed,
    ReasoningDelta,
    ToolCallDelta,
    function_name,
    parse_reply,
)
from perilune.data.tokenizer import SPECIAL_TOKENS

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
MARKS = ["<think>", "</think>", SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END, "<|im_end|>", "[EOS]", "<|media_pad|>"]

PLAIN = st.sampled_from(["a", " b", "\n", "functions.f:0", "functions.f:", '{"x": 1', "}", "é", "|>", ":1"])
STREAMS = st.lists(
    st.one_of(PLAIN.map(lambda text: Piece(text=text)), st.sampled_from(MARKS).map(lambda name: Piece(special=name))),
    max_size=20,
)
GARBAGE = st.lists(
    st.one_of(st.text(max_size=5), st.sampled_from(SPECIAL_TOKENS), st.sampled_from(["<|", "<|im_", "<thi", "[EO"])),
    max_size=20,
).map("".join)


def call_text(id: str, arguments: str) -> str:
    return f"{CALL}{id}{ARGUMENTS}{arguments}{CALL_END}"


F_CALL = call_text("functions.f:0", "{}")


def replay(deltas: list[Delta]) -> ChatMessage:
    """The message that a client puts together from what it was sent."""
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            if delta.id is not None:
                assert delta.index == len(calls)
                calls.append({"id": delta.id, "function": {"name": delta.name, "arguments": ""}})
            calls[delta.index]["function"]["arguments"] += delta.arguments
    return parse_message({"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": calls})


def by_pieces(pieces: list[Piece], *, thinking: bool = True) -> tuple[Parsed, list[Delta]]:
    parser = ChatParser(thinking=thinking)
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.flush()
    return parser.finish(), deltas


def by_texts(texts: list[str], *, thinking: bool = True) -> tuple[Parsed, list[Delta]]:
    parser = ChatParser(thinking=thinking)
    deltas = [delta for text in texts for delta in parser.push_text(text)] + parser.flush()
    return parser.finish(), deltas


def parts(message: ChatMessage) -> tuple[str | None, str, list[tuple[str, str, str]]]:
    return message.reasoning, message.text, [(call.id, call.name, call.arguments) for call in message.tool_calls]


def test_a_reply_with_reasoning_content_and_calls() -> None:
    calls = call_text("functions.f:0", "{}") + call_text("functions.g:1", "[")
    parsed = parse_reply(f"Hm.</think>Look:{SECTION}{calls}{SECTION_END}<|im_end|>")
    assert parts(parsed.message) == ("Hm.", "Look:", [("functions.f:0", "f", "{}"), ("functions.g:1", "g", "[")])
    assert parsed.is_ended and parsed.closing == ()


@pytest.mark.parametrize(
    "text, expected",
    [
        ("just thought<|im_end|>", ("just thought", "", [])),
        ("<think>opened twice</think>a", ("opened twice", "a", [])),
        (f"no end{SECTION}{F_CALL}{SECTION_END}", ("no end", "", [("functions.f:0", "f", "{}")])),
        (f"no section{F_CALL}", ("no section", "", [("functions.f:0", "f", "{}")])),
        (f"r</think>{SECTION}functions.f:0{ARGUMENTS}{{}}{CALL_END}", ("r", "", [("functions.f:0", "f", "{}")])),
        (f"</think>{SECTION}{CALL}f{ARGUMENTS}1{CALL}g{ARGUMENTS}2", (None, "", [("f", "f", "1"), ("g", "g", "2")])),
        (f"</think>{SECTION}{CALL}f{ARGUMENTS}1{SECTION_END}after", (None, "after", [("f", "f", "1")])),
        (f"</think>{SECTION}{CALL}functions.now:0{CALL_END}", (None, "", [("functions.now:0", "now", "")])),
        (f"</think>{SECTION}{CALL}functions.no", (None, "", [])),
        (f"</think>{SECTION}{CALL}functions.f:0{ARGUMENTS}{{\"a\": ", (None, "", [("functions.f:0", "f", '{"a": ')])),
        (f"</think>{SECTION}\n{CALL} functions.f:0\n{ARGUMENTS}1", (None, "", [(" functions.f:0\n", "f", "1")])),
        (f"</think>{SECTION}{CALL}{ARGUMENTS}{{}}{CALL_END}", (None, "", [("", "", "{}")])),
        (f"</think>{SECTION}{CALL} {CALL_END}{SECTION_END}x", (None, "x", [])),
        ("a</think>b<|im_end|>c<|im_user|>d", ("a", "b", [])),
        ("a</think>b<|im_user|>user<|im_middle|>never said", ("a", "b", [])),
        ("a</think>b<think>c</think>d", ("ac", "bd", [])),
        ("a<|media_pad|>b</think>c[PAD]<|reserved_3|>d", ("ab", "cd", [])),
        (f"a</think>b{SECTION_END}{CALL_END}{ARGUMENTS}c", ("a", "bc", [])),
        ("a</think>b<|im_", ("a", "b<|im_", [])),
    ],
)  # fmt: skip
def test_marks_that_are_missing_or_misplaced_cost_nothing_but_themselves(text: str, expected: tuple) -> None:
    parsed = parse_reply(text)
    assert parts(parsed.message) == expected


@pytest.mark.parametrize(
    "text, closing",
    [
        ("thin", ("</think>", "<|im_end|>")),
        ("a</think>b", ("<|im_end|>",)),
        (f"a</think>{SECTION}", (SECTION_END, "<|im_end|>")),
        (f"a{SECTION}{CALL}functions.", (CALL_END, SECTION_END, "<|im_end|>")),
        (f"a{SECTION}{CALL}f{ARGUMENTS}{{", (CALL_END, SECTION_END, "<|im_end|>")),
        ("a</think>b[EOS]", ("<|im_end|>",)),
        ("a</think>b<|im_end|>", ()),
    ],
)
def test_what_closes_a_cut_reply_is_told(text: str, closing: tuple[str, ...]) -> None:
    parsed = parse_reply(text)
    assert parsed.closing == closing
    whole = parse_reply(text + "".join(closing))
    assert whole.closing == () and whole.is_ended


def test_instant_mode_begins_with_content() -> None:
    assert parts(parse_reply("a<|im_end|>", thinking=False).message) == (None, "a", [])
    assert parts(parse_reply("<think>b</think>a", thinking=False).message) == ("b", "a", [])


@pytest.mark.parametrize(
    "id, name",
    [
        ("functions.search:0", "search"),
        ("functions.a.b-c:12", "a.b-c"),
        ("functions.a:b:3", "a:b"),
        ("search:1", "search"),
        ("functions.search", "search"),
        ("functions.search:", "search"),
        ("functions.search:x", "search:x"),
        ("functions.search:²", "search:²"),
        (" functions.search:0\n", "search"),
        ("call_3f2a", "call_3f2a"),
        ("functions.:0", ""),
        ("", ""),
    ],
)
def test_the_name_is_read_from_the_id(id: str, name: str) -> None:
    assert function_name(id) == name


def test_a_call_is_told_once_its_id_is_complete_and_its_arguments_as_they_come() -> None:
    parser = ChatParser(thinking=False)
    seen = [
        parser.push_text(text) for text in (SECTION, CALL, "functions.", "f:0", ARGUMENTS, '{"a', '": 1}', CALL_END)
    ]
    assert seen == [
        *([[]] * 4),
        [ToolCallDelta(index=0, id="functions.f:0", name="f")],
        [ToolCallDelta(index=0, arguments='{"a')],
        [ToolCallDelta(index=0, arguments='": 1}')],
        [],
    ]


def test_text_comes_out_at_once_and_only_a_possible_mark_waits() -> None:
    parser = ChatParser(thinking=False)
    assert parser.push_text("hello <") == [ContentDelta(text="hello ")]
    assert parser.push_text("b>") == [ContentDelta(text="<b>")]
    assert parser.push_text("<|im_e") == []
    assert parser.flush() == [ContentDelta(text="<|im_e")]


def test_text_that_waited_comes_before_the_next_piece() -> None:
    parser = ChatParser(thinking=False)
    assert parser.push_text("a<|im_") == [ContentDelta(text="a")]
    assert parser.push(Piece(text="end|>")) == [ContentDelta(text="<|im_"), ContentDelta(text="end|>")]


def test_spelling_a_special_token_is_text_when_tokens_are_known() -> None:
    ids = TOKENIZER.encode("a<|im_end|>b</think>")
    parsed, _ = by_pieces(pieces_of([*ids, TOKENIZER.special_ids["</think>"], *ids]))
    assert (parsed.message.reasoning, parsed.message.text) == ("a<|im_end|>b</think>", "a<|im_end|>b</think>")


@given(STREAMS, st.booleans(), st.data())
@settings(max_examples=300)
def test_any_split_of_pieces_gives_the_same_message(pieces: list[Piece], thinking: bool, data: st.DataObject) -> None:
    whole, deltas = by_pieces(pieces, thinking=thinking)
    split: list[Piece] = []
    for piece in pieces:
        cut = data.draw(st.integers(0, len(piece.text)))
        split += [piece] if piece.special else [Piece(text=piece.text[:cut]), Piece(text=piece.text[cut:])]
    parsed, split_deltas = by_pieces(split, thinking=thinking)
    assert parsed == whole
    assert parts(replay(deltas)) == parts(replay(split_deltas)) == parts(whole.message)
    # The texts hold neither "<" nor "[", so no mark can come from them: one in the message would be a leak.
    assert not set("<[") & set(f"{whole.message.reasoning}{whole.message.text}")
    assert not any(set("<[") & set(call.id + call.arguments) for call in whole.message.tool_calls)
    # With these texts, spelling the marks says the same as knowing them.
    assert by_texts(["".join(piece.special or piece.text for piece in pieces)], thinking=thinking)[0] == whole


@given(GARBAGE, st.booleans(), st.data())
@settings(max_examples=300)
def test_any_split_of_text_gives_the_same_message_and_garbage_never_raises(
    text: str, thinking: bool, data: st.DataObject
) -> None:
    whole, deltas = by_texts([text], thinking=thinking)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    split = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)])]
    parsed, split_deltas = by_texts(split, thinking=thinking)
    letters, letter_deltas = by_texts(list(text), thinking=thinking)
    assert parsed == letters == whole
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert (
            parts(replay(deltas)) == parts(replay(split_deltas)) == parts(replay(letter_deltas)) == parts(whole.message)
        )


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=40), st.booleans())
def test_any_row_of_token_ids_is_a_message(ids: list[int], thinking: bool) -> None:
    parsed, deltas = by_pieces(pieces_of(ids), thinking=thinking)
    assert parts(replay(deltas)) == parts(parsed.message)
    assert json.dumps(parsed.message.plain())


@given(TEXTS, TEXTS, st.lists(st.tuples(TEXTS, TEXTS), max_size=3), st.booleans())
@settings(max_examples=200)
def test_parsing_what_the_template_wrote_gives_the_message_back(
    reasoning: str, content: str, calls: list[tuple[str, str]], thinking: bool
) -> None:
    plain = [{"id": id, "function": {"name": function_name(id), "arguments": arguments}} for id, arguments in calls]
    before = parse_messages([{"role": "user", "content": "q"}])
    message = parse_message({"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": plain})
    prompt = encode(TOKENIZER, render(before, thinking=thinking)).tokens
    whole = encode(TOKENIZER, render([*before, message], thinking=thinking, add_generation_prompt=False)).tokens
    parsed, _ = by_pieces(pieces_of(whole[len(prompt) :]), thinking=thinking)
    assert parsed.is_ended
    kept, text, found = parts(parsed.message)
    assert kept == (message.reasoning if thinking else None)
    assert (text, found) == (message.text, parts(message)[2])
    again = render([*before, parsed.message], thinking=thinking, add_generation_prompt=False)
    assert encode(TOKENIZER, again).tokens == whole


@given(STREAMS)
@settings(max_examples=200)
def test_rendering_what_was_parsed_keeps_every_id(pieces: list[Piece]) -> None:
    message = by_pieces(pieces)[0].message
    text = text_of(render([message], add_generation_prompt=False))
    again = parse_reply(text.removeprefix("<|im_assistant|>assistant<|im_middle|>"), thinking=False).message
    assert [call.id for call in again.tool_calls] == [call.id for call in message.tool_calls]
    assert [call.arguments for call in again.tool_calls] == [call.arguments for call in message.tool_calls]
