"""What a Kimi model writes, token by token, into reasoning, content and tool calls.

    parser = ChatParser(thinking=True)            # the prompt ended with <think>
    for piece in pieces:
        for delta in parser.push(piece): ...      # ReasoningDelta, ContentDelta, ToolCallDelta
    parsed = parser.finish()

The states, and the special tokens that lead from one to the next:

    reasoning  -- </think> -->  content  -- <think> -->  reasoning
    either     -- <|tool_calls_section_begin|> -->  section  -- <|tool_calls_section_end|> -->  content
    any        -- <|tool_call_begin|> -->  id  -- <|tool_call_argument_begin|> -->  arguments  -- <|tool_call_end|> -->
               section
    any        -- <|im_end|>, [EOS] or the marker of a next turn -->  ended; what follows is not read

A section that begins inside the reasoning ends it: models leave out </think> there (vllm-project/vllm#53246). Each mark
is taken wherever it makes sense, so a missing begin or end costs nothing but itself; all other special tokens are
dropped. Text between the calls of a section belongs to nothing and is dropped.

What this module promises:
  * no input raises, and any split of the same stream gives the same message, for pieces and for plain text;
  * no special token appears in reasoning, content or arguments. `push` knows special tokens by their id, so text that
    only spells one stays text; `push_text` reads streams where the spelling is all there is;
  * ids are verbatim, and nothing is invented: a call without an id has the id "". The function's name is what stands
    between "functions." and ":INDEX" (an id of another form is the name itself); arguments are the characters as
    written, valid or not;
  * a call is told only when its id is complete: half an id could name another tool.
"""

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from perilune.data.chat_messages import ChatMessage, TextPart, ToolCall
from perilune.data.tokenizer import SPECIAL_TOKENS

_MARKS = re.compile("|".join(map(re.escape, SPECIAL_TOKENS)))
_LONGEST_MARK = max(map(len, SPECIAL_TOKENS))
_BEGINNINGS = frozenset(name[:length] for name in SPECIAL_TOKENS for length in range(1, len(name)))
_ENDS = frozenset(("<|im_end|>", "[EOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>"))


class PieceLike(Protocol):
    """A piece of the stream: some text, or one special token by name."""

    @property
    def text(self) -> str: ...

    @property
    def special(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasoningDelta:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ContentDelta:
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallDelta:
    """The first delta of a call has its id and name, the following ones have None there."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


Delta = ReasoningDelta | ContentDelta | ToolCallDelta


@dataclass(frozen=True, kw_only=True, slots=True)
class Parsed:
    message: ChatMessage
    is_ended: bool
    """Whether the turn was ended by the model itself."""
    closing: tuple[str, ...]
    """The special tokens that are missing for a complete turn, such as </think> and <|im_end|> after a cut."""


class _State(Enum):
    REASONING = auto()
    CONTENT = auto()
    SECTION = auto()
    ID = auto()
    ARGUMENTS = auto()
    ENDED = auto()


_CLOSING: dict[_State, tuple[str, ...]] = {
    _State.REASONING: ("</think>", "<|im_end|>"),
    _State.CONTENT: ("<|im_end|>",),
    _State.SECTION: ("<|tool_calls_section_end|>", "<|im_end|>"),
    _State.ID: ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>"),
    _State.ARGUMENTS: ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|im_end|>"),
}


class ChatParser:
    """Parses one reply. `thinking` says whether the prompt has opened the reasoning."""

    def __init__(self, *, thinking: bool = True) -> None:
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._id: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []
        self._held = ""
        self._is_closed = False

    # --- input --------------------------------------------------------------------------------------------------------

    def push(self, piece: PieceLike) -> list[Delta]:
        """What is new with a piece whose special tokens are known as such."""
        deltas = self._release()
        if piece.text:
            deltas += self._text(piece.text)
        if piece.special is not None:
            deltas += self._mark(piece.special)
        return deltas

    def push_text(self, text: str) -> list[Delta]:
        """What is new with text that spells its special tokens, perhaps split anywhere."""
        text, self._held = self._held + text, ""
        deltas: list[Delta] = []
        position = 0
        for found in _MARKS.finditer(text):
            deltas += self._text(text[position : found.start()])
            deltas += self._mark(found.group())
            position = found.end()
        rest = text[position:]
        length = next((n for n in range(min(len(rest), _LONGEST_MARK), 0, -1) if rest[-n:] in _BEGINNINGS), 0)
        cut = len(rest) - length
        self._held = rest[cut:]
        return deltas + self._text(rest[:cut])

    def flush(self) -> list[Delta]:
        """What was held back as a possible beginning of a special token. Call it before `finish` when streaming."""
        return self._release()

    def finish(self) -> Parsed:
        """The message so far."""
        self._release()
        return Parsed(message=self._message(), is_ended=self._state is _State.ENDED, closing=self._closing())

    # --- states -------------------------------------------------------------------------------------------------------

    def _release(self) -> list[Delta]:
        text, self._held = self._held, ""
        return self._text(text)

    def _text(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._is_closed = False
        if self._state is _State.REASONING:
            self._reasoning.append(text)
            return [ReasoningDelta(text=text)]
        if self._state is _State.CONTENT:
            self._content.append(text)
            return [ContentDelta(text=text)]
        if self._state is _State.ARGUMENTS:
            self._calls[-1][1].append(text)
            return [ToolCallDelta(index=len(self._calls) - 1, arguments=text)]
        if self._state in (_State.SECTION, _State.ID):
            self._id.append(text)
        return []

    def _mark(self, name: str) -> list[Delta]:
        state = self._state
        self._is_closed = name == "<|im_end|>"
        if state is _State.ENDED:
            return []
        if name in _ENDS:
            return self._enter(_State.ENDED)
        if name == "<think>":
            if state is _State.CONTENT:
                self._state = _State.REASONING
        elif name == "</think>":
            if state is _State.REASONING:
                self._state = _State.CONTENT
        elif name == "<|tool_calls_section_begin|>":
            return self._enter(_State.SECTION)
        elif name == "<|tool_calls_section_end|>":
            if state not in (_State.REASONING, _State.CONTENT):
                return self._enter(_State.CONTENT)
        elif name == "<|tool_call_begin|>":
            return self._enter(_State.ID)
        elif name == "<|tool_call_argument_begin|>":
            if state in (_State.SECTION, _State.ID):
                return self._begin_call()
        elif name == "<|tool_call_end|>" and state in (_State.ID, _State.ARGUMENTS):
            return self._enter(_State.SECTION)
        return []

    def _enter(self, state: _State) -> list[Delta]:
        """Go to a state; a call whose id ends here has no arguments."""
        deltas = self._begin_call() if self._state is _State.ID and "".join(self._id).strip() else []
        self._id.clear()
        self._state = state
        return deltas

    def _begin_call(self) -> list[Delta]:
        call_id = "".join(self._id)
        self._id.clear()
        self._calls.append((call_id, []))
        self._state = _State.ARGUMENTS
        return [ToolCallDelta(index=len(self._calls) - 1, id=call_id, name=function_name(call_id))]

    def _message(self) -> ChatMessage:
        content = "".join(self._content)
        return ChatMessage(
            role="assistant",
            parts=(TextPart(text=content),) if content else (),
            reasoning="".join(self._reasoning) or None,
            tool_calls=tuple(
                ToolCall(id=call_id, name=function_name(call_id), arguments="".join(arguments))
                for call_id, arguments in self._calls
            ),
        )

    def _closing(self) -> tuple[str, ...]:
        if self._state is _State.ENDED:  # by [EOS], perhaps, or with more behind its end
            return () if self._is_closed else ("<|im_end|>",)
        return _CLOSING[self._state]


def function_name(call_id: str) -> str:
    """The function that an id `functions.NAME:INDEX` names; of another form, as much of it as is there."""
    name = call_id.strip().removeprefix("functions.")
    head, colon, index = name.rpartition(":")
    return head if colon and (not index or (index.isascii() and index.isdigit())) else name


def parse_reply(text: str, *, thinking: bool = True) -> Parsed:
    """A whole reply whose special tokens are spelled out."""
    parser = ChatParser(thinking=thinking)
    parser.push_text(text)
    return parser.finish()
