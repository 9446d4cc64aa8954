"""Token in, token out across turns: a session remembers the ids it served, and the next turn only adds to them.

    prompt = sessions.prompt(owner=key, session_id="run-7", messages=messages, attachments=pictures)
    ... the engine completes prompt.tokens ...
    sessions.record(prompt, token_ids, parser.finish())

A turn's prompt is

    previous prompt ids + previous completion ids + what closes a reply that was cut + the new messages, rendered

so the model reads exactly what it wrote: no re-tokenised text, no dropped reasoning, and every prefix is one the engine
has computed before. A trajectory of such turns is one row of tokens, as reinforcement learning needs it.

The client goes on sending its whole history. It continues the session when the messages before the reply are those of
the previous turn, the reply is one that was given (its reasoning may be left out, its arguments written with other
spaces), and tools are the same. Sending the previous turn's messages again asks for another reply to the same ids. What
does not continue is rendered in full, `continued` is False and `reason` says why.

What this module promises: sessions of one owner (an API key) are never seen by another; the store is bounded in number,
per owner, in bytes and in age; the oldest goes first; a lost session costs a full render and nothing else. It keeps ids
and digests, no text and no pixels. Safe to use from several threads.
"""

import hashlib
import json
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from perilune.data.chat import (
    Attachment,
    ChatMessage,
    ChatTemplate,
    KimiTemplate,
    Segment,
    TextPart,
    Tool,
    ToolCall,
    encode,
)
from perilune.data.chat_parser import ChatParser, Parsed
from perilune.data.media import Media
from perilune.data.tokenizer import Tokenizer

MAX_REPLIES = 128
"""Replies to one prompt that can be continued; more are forgotten, the oldest first."""


@dataclass(frozen=True, kw_only=True)
class SessionLimits:
    max_sessions: int = 4096
    max_sessions_per_owner: int = 1024
    max_bytes: int = 512 * 2**20
    max_idle_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_sessions_per_owner", "max_bytes", "max_idle_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected more than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Mark:
    """What a message is recognised by."""

    said: bytes
    """Digest of everything but the reasoning."""
    reasoning: bytes | None

    def fits(self, other: "_Mark") -> bool:
        """Whether `other`, which a client sent, is this message. Clients may leave reasoning out."""
        return self.said == other.said and other.reasoning in (None, self.reasoning)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reply:
    mark: _Mark
    tokens: array
    closing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class SessionPrompt:
    """The prompt of one turn. media and starts: all its pictures and the index of each one's first pad."""

    tokens: list[int]
    media: tuple[Media, ...]
    starts: tuple[int, ...]
    continued: bool
    """Whether the tokens begin with those of the session's previous turn."""
    reason: str | None
    """Why not."""
    num_kept: int = 0
    """How many tokens are the previous turn's prompt and completion."""
    owner: str = ""
    session_id: str | None = None
    marks: tuple[_Mark, ...] = ()
    tools: bytes = b""
    thinking: bool = True


class _Session:
    """The last turn of a session."""

    def __init__(self, prompt: SessionPrompt) -> None:
        self.tokens = array("i", prompt.tokens)
        self.starts = prompt.starts
        self.marks = prompt.marks
        self.tools = prompt.tools
        self.thinking = prompt.thinking
        self.replies: list[_Reply] = []
        self.used = 0.0

    def is_of(self, prompt: SessionPrompt) -> bool:
        return self.marks == prompt.marks and self.tokens == array("i", prompt.tokens)

    @property
    def num_bytes(self) -> int:
        replies = sum(len(reply.tokens) * reply.tokens.itemsize + 300 for reply in self.replies)
        return len(self.tokens) * self.tokens.itemsize + 200 * len(self.marks) + 40 * len(self.starts) + replies + 500


class Sessions:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        limits: SessionLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template or KimiTemplate()
        self._limits = limits or SessionLimits()
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()  # least recently used first
        self._num_bytes = 0
        self._digested: tuple[Sequence[Tool], bytes] = (), _digest([])
        """The last tools, and their digest."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    # --- a turn -------------------------------------------------------------------------------------------------------

    def prompt(
        self,
        *,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool] = (),
        attachments: Sequence[Attachment] = (),
        thinking: bool = True,
        owner: str = "",
        session_id: str | None = None,
        after: SessionPrompt | None = None,
    ) -> SessionPrompt:
        """The prompt for the next reply. `attachments` are the pictures and videos of all messages, in order. Without
        `session_id` it is rendered in full, and nothing will be remembered. `after` is an earlier prompt whose messages
        are known to be the first of these: they are not looked at again."""
        if session_id is None:
            return self._whole(messages, tools, attachments, thinking, "no session was asked for")
        known = () if after is None else after.marks
        shown = sum(len(message.media) for message in messages[: len(known)]) if attachments else 0
        marks = [*known, *_marks(messages[len(known) :], attachments[shown:])]
        tools_digest = self._digest_of(tools)
        with self._lock:
            self._drop_idle()
            session = self._sessions.get((owner, session_id))
            replies = () if session is None else tuple(session.replies)
            if session is not None:
                self._sessions.move_to_end((owner, session_id))
                session.used = self._clock()
        if session is None:
            found = self._whole(messages, tools, attachments, thinking, "the session is new, or was dropped since")
        elif session.tools != tools_digest:
            found = self._whole(messages, tools, attachments, thinking, "tools differ from the previous turn's")
        else:
            found = self._next(session, replies, marks, messages, tools, attachments, thinking)
        # A message that was served keeps its mark: a client that leaves its reasoning out does not erase it.
        return replace(
            found,
            owner=owner,
            session_id=session_id,
            marks=(*found.marks, *marks[len(found.marks) :]),
            tools=tools_digest,
            thinking=thinking,
        )

    def record(self, prompt: SessionPrompt, completion: Sequence[int], parsed: Parsed) -> bool:
        """Remember a reply to `prompt`: the ids as sampled, the message as the client got it. Several replies may
        follow one prompt; whichever the client sends back is continued. False where nothing is kept."""
        if prompt.session_id is None:
            return False
        place = (prompt.owner, prompt.session_id)
        closing = _closing(self._tokenizer, prompt.tokens, completion)
        reply = _Reply(mark=_mark(parsed.message, ()), tokens=array("i", completion), closing=closing)
        with self._lock:
            session = self._sessions.pop(place, None)
            if session is not None:
                self._num_bytes -= session.num_bytes
            if session is None or not session.is_of(prompt):
                session = _Session(prompt)
            session.replies = [*session.replies, reply][-MAX_REPLIES:]
            session.used = self._clock()
            self._sessions[place] = session
            self._num_bytes += session.num_bytes
            self._drop_idle()
            self._drop_excess(prompt.owner)
            return place in self._sessions

    def forget(self, *, owner: str, session_id: str) -> bool:
        """Drop a session; False if there was none."""
        with self._lock:
            return self._drop((owner, session_id))

    # --- prompts ------------------------------------------------------------------------------------------------------

    def _whole(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        attachments: Sequence[Attachment],
        thinking: bool,
        reason: str,
    ) -> SessionPrompt:
        chat = encode(self._tokenizer, self._template.render(messages, tools, thinking=thinking), attachments)
        return SessionPrompt(tokens=chat.tokens, media=chat.media, starts=chat.starts, continued=False, reason=reason)

    def _next(
        self,
        session: _Session,
        replies: Sequence[_Reply],
        marks: Sequence[_Mark],
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        attachments: Sequence[Attachment],
        thinking: bool,
    ) -> SessionPrompt:
        """The prompt after a known previous turn: its ids and what is new, or all of it and the reason."""
        count = len(session.marks)
        reply: _Reply | None = None
        added: list[Segment] | None = []
        different = next((n for n, (old, new) in enumerate(zip(session.marks, marks)) if not old.fits(new)), None)
        reason = None
        if different is not None:
            reason = f"messages[{different}] differs from the previous turn's"
        elif len(marks) < count:
            reason = "messages are fewer than the previous turn's"
        elif len(marks) == count:
            if thinking != session.thinking:
                reason = "the same messages are sent with another value of thinking"
        else:
            reply = next((reply for reply in reversed(replies) if reply.mark.fits(marks[count])), None)
            if reply is None:
                reason = f"messages[{count}] is not a reply that this session gave"
            else:
                added = self._template.continuation(messages, count + 1, tools, thinking=thinking)
                if added is None:
                    reason = "the chat template changes earlier turns"
        if reason is not None or added is None:
            return self._whole(messages, tools, attachments, thinking, reason or "")
        kept, closing, served = session.tokens, array("i"), session.marks
        if reply is not None:
            kept, served = kept + reply.tokens, (*served, reply.mark)
            closing = array("i", [self._tokenizer.special_ids[name] for name in reply.closing])
        num_shown = sum(len(message.media) for message in messages[: len(served)])
        chat = encode(self._tokenizer, added, attachments[num_shown:])
        offset = len(kept) + len(closing)
        return SessionPrompt(
            tokens=[*kept, *closing, *chat.tokens],
            media=tuple(chunk for attachment in attachments for chunk in _chunks(attachment)),
            starts=(*session.starts, *(offset + start for start in chat.starts)),
            continued=True,
            reason=None,
            num_kept=len(kept),
            marks=served,
        )

    def _digest_of(self, tools: Sequence[Tool]) -> bytes:
        last, digest = self._digested
        if tools is not last:
            digest = _digest([tool.plain() for tool in tools])
            if isinstance(tools, tuple):  # parsed once by who gives it, and left as it is
                self._digested = tools, digest
        return digest

    # --- bounds -------------------------------------------------------------------------------------------------------

    def _drop(self, place: tuple[str, str]) -> bool:
        session = self._sessions.pop(place, None)
        if session is not None:
            self._num_bytes -= session.num_bytes
        return session is not None

    def _drop_idle(self) -> None:
        oldest_allowed = self._clock() - self._limits.max_idle_seconds
        while self._sessions:
            place, session = next(iter(self._sessions.items()))
            if session.used >= oldest_allowed:
                return
            self._drop(place)

    def _drop_excess(self, owner: str) -> None:
        """Too many of one owner cost that owner's oldest; too many or too much in all, the oldest of anyone."""
        own = [place for place in self._sessions if place[0] == owner]
        for place in own[: max(0, len(own) - self._limits.max_sessions_per_owner)]:
            self._drop(place)
        while len(self._sessions) > self._limits.max_sessions or self._num_bytes > self._limits.max_bytes:
            self._drop(next(iter(self._sessions)))


# --- closing a reply --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    special: str | None


def _closing(tokenizer: Tokenizer, prompt: Sequence[int], completion: Sequence[int]) -> tuple[str, ...]:
    """The marks that are missing for a whole turn. Read from the ids, because a stop string may have cut the text."""
    if len(completion) and completion[-1] == tokenizer.special_ids["<|im_end|>"]:
        return ()  # mostly: the turn is whole, whatever stands before its end
    near_the_end = [tokenizer.special_name(token_id) for token_id in prompt[-8:]]
    thinks = [name for name in near_the_end if name in ("<think>", "</think>")]
    parser = ChatParser(thinking=thinks[-1:] == ["<think>"])
    is_text = False
    for token_id in completion:
        name = tokenizer.special_name(token_id)
        if name is not None or not is_text:  # text after text leads to no other state
            parser.push(_Token("." if name is None else "", name))
        is_text = name is None
    return parser.finish().closing


# --- recognising messages ---------------------------------------------------------------------------------------------


def _marks(messages: Sequence[ChatMessage], attachments: Sequence[Attachment]) -> list[_Mark]:
    marks, waiting = [], list(attachments)
    for message in messages:
        shown = len(message.media)
        marks.append(_mark(message, waiting[:shown]))
        waiting = waiting[shown:]
    return marks


def _mark(message: ChatMessage, attachments: Sequence[Attachment]) -> _Mark:
    """Pictures are known by their pixels, not by the address they came from: what stands there may change."""
    waiting = iter(attachments)
    content: list[str | list[str]] = [""]
    for part in message.parts:
        if isinstance(part, TextPart):
            content[-1] += part.text  # pyrefly: ignore
        else:
            content += [[part.kind, _seen(next(waiting, None))], ""]
    calls = [[call.id, call.name, _spaceless(call)] for call in message.tool_calls]
    said = [message.role, message.name, content, calls, message.tool_call_id]
    return _Mark(said=_digest(said), reasoning=_digest(message.reasoning) if message.reasoning else None)


def _spaceless(call: ToolCall) -> str:
    """Arguments in one way of writing, where they are JSON: some clients parse them and write them anew."""
    try:
        return json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return call.arguments


def _seen(attachment: Attachment | None) -> str:
    times = [] if attachment is None or isinstance(attachment, Media) else [time for time, _ in attachment]
    digest = hashlib.sha256(repr(times).encode())
    for chunk in () if attachment is None else _chunks(attachment):
        digest.update(repr(chunk.grid).encode())
        digest.update(np.ascontiguousarray(chunk.pixels).data)
    return digest.hexdigest()


def _chunks(attachment: Attachment) -> Sequence[Media]:
    return (attachment,) if isinstance(attachment, Media) else [chunk for _, chunk in attachment]


def _digest(value: object) -> bytes:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
