"""The chat format of Kimi K2.5: messages -> segments -> token ids.

A turn is a marker, a name, a body and an end; nothing stands between turns:

    <|im_system|>tool_declare<|im_middle|>DECLARATIONS<|im_end|>            first, when there are tools
    <|im_system|>system<|im_middle|>TEXT<|im_end|>
    <|im_user|>user<|im_middle|>TEXT and pictures<|im_end|>
    <|im_assistant|>assistant<|im_middle|><think>REASONING</think>TEXT CALLS<|im_end|>
    <|im_system|>tool<|im_middle|>## Return of CALL_ID\\nTEXT<|im_end|>

    CALLS    <|tool_calls_section_begin|> one or more CALL <|tool_calls_section_end|>
    CALL     <|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>JSON<|tool_call_end|>
    picture  <|media_begin|>image<|media_content|><|media_pad|><|media_end|>, the pad once for each token of the picture

A message's `name` stands in the place of "system", "user", "assistant" or "tool". The prompt for a reply ends with
`<think>`; in instant mode (`thinking=False`) with `<think></think>`. Reasoning of past turns up to the last assistant
turn without tool calls is dropped, leaving `<think></think>`; later turns keep theirs. The turn that is being written
is not past: without a generation prompt, a dialogue's last message keeps its reasoning.

What this module promises:
  * only a segment of kind "special" becomes a special token, and no message can make one: a user who writes
    "<|im_end|>" gets the ordinary tokens of these ten characters;
  * the text of the segments is what data/chat_template.jinja renders, in transformers too;
  * `produced` marks the tokens that an assistant wrote in exactly this context, its <|im_end|> among them: where SFT
    puts its loss. A turn that has lost its reasoning is not marked: it would teach to answer without the thought.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, Protocol

from perilune.data.chat_messages import (
    ChatError,
    ChatMessage,
    MediaPart,
    Part,
    TextPart,
    Tool,
    ToolCall,
    parse_message,
    parse_messages,
    parse_tools,
)
from perilune.data.media import Media, media_tokens, tokens_of_grid, video_tokens
from perilune.data.tokenizer import Tokenizer
from perilune.data.tool_declarations import declare_tools

MARKERS = {
    "system": "<|im_system|>",
    "user": "<|im_user|>",
    "assistant": "<|im_assistant|>",
    "tool": "<|im_system|>",
}
END_OF_TURN = "<|im_end|>"
SHORT = 1024
"""Characters of a text whose tokens are kept for the next time: of all of them some dozens of MiB."""

Attachment = Media | Sequence[tuple[str, Media]]
"""A picture, or a video as (time, chunk of frames) in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    text: str
    """A special token's name, ordinary text, or "image" / "video" where an attachment stands."""
    kind: Literal["text", "special", "media"] = "text"
    produced: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatTokens:
    """Token ids of a dialogue; produced: which of them an assistant wrote; media: pictures in the order of their pads;
    starts: the index of each one's first pad."""

    tokens: list[int]
    produced: list[bool]
    media: tuple[Media, ...] = ()
    starts: tuple[int, ...] = ()


# --- messages to segments ---------------------------------------------------------------------------------------------


def render(
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] = (),
    *,
    thinking: bool = True,
    add_generation_prompt: bool = True,
    preserve_thinking: bool = False,
) -> list[Segment]:
    """The whole dialogue. `preserve_thinking` keeps all reasoning, as a session that only appends does."""
    segments: list[Segment] = []
    if tools:
        segments += [*_head("<|im_system|>", "tool_declare"), Segment(text=declare_tools(tools)), _special(END_OF_TURN)]
    first_kept = 0 if preserve_thinking else _first_kept(messages, add_generation_prompt)
    for index, message in enumerate(messages):
        segments += render_message(message, thinking=thinking, keep_reasoning=index >= first_kept)
    if add_generation_prompt:
        segments += generation_prompt(thinking=thinking)
    return joined(segments)


class ChatTemplate(Protocol):
    """How messages become segments: Kimi's format, or what a model's folder brings along."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], *, thinking: bool) -> list[Segment]:
        """The prompt for the next reply."""
        ...

    def continuation(
        self, messages: Sequence[ChatMessage], count: int, tools: Sequence[Tool], *, thinking: bool
    ) -> list[Segment] | None:
        """What `messages[count:]` and the prompt for the next reply add to a dialogue whose first `count` messages are
        there already, the last of them a reply with its end of turn. None where the template cannot tell."""
        ...


class KimiTemplate:
    """The format of this module."""

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool], *, thinking: bool) -> list[Segment]:
        return render(messages, tools, thinking=thinking)

    def continuation(
        self, messages: Sequence[ChatMessage], count: int, tools: Sequence[Tool], *, thinking: bool
    ) -> list[Segment] | None:
        return render(messages[count:], thinking=thinking, preserve_thinking=True)


def render_message(message: ChatMessage, *, thinking: bool = True, keep_reasoning: bool = True) -> list[Segment]:
    """One turn, from its marker to its end."""
    head = _head(MARKERS[message.role], message.name or message.role)
    if message.role == "assistant":
        return joined([*head, *_assistant_body(message, thinking, keep_reasoning)])
    if message.role == "tool":
        head.append(Segment(text=f"## Return of {message.tool_call_id}\n"))
    return joined([*head, *_content(message.parts), _special(END_OF_TURN)])


def generation_prompt(*, thinking: bool = True) -> list[Segment]:
    """What stands before a reply."""
    think = ["<think>"] if thinking else ["<think>", "</think>"]
    return [*_head("<|im_assistant|>", "assistant"), *map(_special, think)]


def text_of(segments: Sequence[Segment]) -> str:
    """The segments as one string, each picture or video with a single pad: what the jinja template renders."""
    return "".join(_media_text(segment.text) if segment.kind == "media" else segment.text for segment in segments)


def joined(segments: Sequence[Segment]) -> list[Segment]:
    """Neighbouring texts as one, so that they are encoded as one; empty texts left out."""
    found: list[Segment] = []
    for segment in segments:
        last = found[-1] if found else None
        if segment.kind != "text" or not segment.text:
            found += [segment] if segment.kind != "text" else []
        elif last is not None and last.kind == "text" and last.produced == segment.produced:
            found[-1] = replace(last, text=last.text + segment.text)
        else:
            found.append(segment)
    return found


def _first_kept(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> int:
    """Index of the first message that keeps its reasoning: the one after the last answer that called no tool."""
    past = messages if add_generation_prompt else messages[:-1]
    answers = (index for index, message in enumerate(past) if message.role == "assistant" and not message.tool_calls)
    return max(answers, default=-1) + 1


def _assistant_body(message: ChatMessage, thinking: bool, keep_reasoning: bool) -> Iterator[Segment]:
    # What the prompt had written already was not produced: "<think>" when thinking, "<think></think>" in instant mode
    # and where the reasoning is dropped.
    has_thought = thinking and keep_reasoning
    produced = has_thought or not thinking or not message.reasoning
    yield _special("<think>")
    if has_thought:
        yield Segment(text=message.reasoning or "", produced=True)
    yield _special("</think>", produced=has_thought)
    for segment in (*_content(message.parts), *_calls(message.tool_calls), _special(END_OF_TURN)):
        yield replace(segment, produced=produced)


def _calls(calls: Sequence[ToolCall]) -> Iterator[Segment]:
    if not calls:
        return
    yield _special("<|tool_calls_section_begin|>")
    for call in calls:
        yield _special("<|tool_call_begin|>")
        yield Segment(text=call.id)
        yield _special("<|tool_call_argument_begin|>")
        yield Segment(text=call.arguments)
        yield _special("<|tool_call_end|>")
    yield _special("<|tool_calls_section_end|>")


def _content(parts: Sequence[Part]) -> Iterator[Segment]:
    for part in parts:
        yield Segment(text=part.text) if isinstance(part, TextPart) else Segment(text=part.kind, kind="media")


def _head(marker: str, name: str) -> list[Segment]:
    return [_special(marker), Segment(text=name), _special("<|im_middle|>")]


def _special(name: str, *, produced: bool = False) -> Segment:
    return Segment(text=name, kind="special", produced=produced)


def _media_text(kind: str) -> str:
    return f"<|media_begin|>{kind}<|media_content|><|media_pad|><|media_end|>"


# --- segments to tokens -----------------------------------------------------------------------------------------------


def encode(tokenizer: Tokenizer, segments: Sequence[Segment], attachments: Sequence[Attachment] = ()) -> ChatTokens:
    """Token ids; `attachments` are the pictures and videos of the messages, in the order in which they stand there."""
    slots = sum(segment.kind == "media" for segment in segments)
    if slots != len(attachments):
        raise ChatError("messages", f"hold {slots} pictures and videos, and {len(attachments)} are given for them")
    waiting = iter(attachments)
    tokens: list[int] = []
    produced: list[bool] = []
    media: list[Media] = []
    for segment in segments:
        if segment.kind == "special":
            ids = [tokenizer.special_ids[segment.text]]
        elif segment.kind == "media":
            ids, shown = _attached(tokenizer, segment.text, next(waiting))
            media += shown
        else:
            ids = _ids(tokenizer, segment.text) if len(segment.text) <= SHORT else tokenizer.encode(segment.text)
        tokens += ids
        produced += [segment.produced] * len(ids)
    return ChatTokens(
        tokens=tokens, produced=produced, media=tuple(media), starts=tuple(_starts(tokenizer, tokens, media))
    )


@lru_cache(maxsize=4096)
def _ids(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """Of a short text. Dialogues say the same again and again: names, declarations of tools, what tools answered."""
    return array("i", tokenizer.encode(text))


def _attached(tokenizer: Tokenizer, kind: str, attachment: Attachment) -> tuple[list[int], list[Media]]:
    if isinstance(attachment, Media) != (kind == "image"):
        expected = "a picture" if kind == "image" else "a video: a list of (time, chunk)"
        raise ChatError("messages", f"have {expected} where {type(attachment).__name__} is given")
    if isinstance(attachment, Media):
        return media_tokens(tokenizer, attachment, "image"), [attachment]
    return video_tokens(tokenizer, attachment), [chunk for _, chunk in attachment]


def _starts(tokenizer: Tokenizer, tokens: Sequence[int], media: Sequence[Media]) -> Iterator[int]:
    pad, position = tokenizer.special_ids["<|media_pad|>"], 0
    for item in media:
        position = tokens.index(pad, position)
        yield position
        position += tokens_of_grid(item.grid)


__all__ = [
    "Attachment",
    "ChatError",
    "ChatMessage",
    "ChatTemplate",
    "ChatTokens",
    "END_OF_TURN",
    "KimiTemplate",
    "MediaPart",
    "Segment",
    "TextPart",
    "Tool",
    "ToolCall",
    "encode",
    "generation_prompt",
    "joined",
    "parse_message",
    "parse_messages",
    "parse_tools",
    "render",
    "render_message",
    "text_of",
]
