"""From the engine's outputs to what OpenAI's clients read: whole answers, and chunks of a stream.

A reply is fed with `add(number of the sequence, output)`. It returns the chunks that this output is worth and keeps
what a whole answer needs; `whole()` is that answer. Both come from the same state, so a stream joined together is the
whole answer.

Log-probs in a chat cover every sampled token, reasoning and marks of tool calls included, so that they line up with
`token_ids`. A token that is not UTF-8 by itself is written "bytes:\\xe2\\x80", as OpenAI does; `bytes` has it exactly.
Where the weights changed while a sequence was written, `weight_version` is that of its last token and `weight_versions`
has one for each.

A call without a name cannot be answered, and clients refuse the reply that holds one; small models write some. What was
written of it is content.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from perilune.data.chat_messages import ChatMessage, TextPart
from perilune.data.chat_parser import ChatParser, ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from perilune.data.tokenizer import StreamDecoder, Tokenizer
from perilune.serve.request import Output, TokenLogprob
from perilune.serve.text_stream import Piece

Chunk = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the caller wants to see."""

    id: str
    model: str
    stream: bool
    include_usage: bool = False
    token_ids: bool = False
    logprobs: int | None = None
    echo: bool = False
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(kw_only=True)
class Choice:
    """One sequence so far."""

    prompt: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    versions: list[int] = field(default_factory=list)
    version: int = 0
    num_cached: int = 0
    finish_reason: str | None = None

    def add(self, output: Output) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.versions += [output.weight_version] * len(output.token_ids)
        self.version = output.weight_version
        self.num_cached = max(self.num_cached, output.num_cached)
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.finish_reason = output.finish_reason or self.finish_reason


@dataclass(frozen=True, kw_only=True)
class Usage:
    prompt: int
    cached: int
    completion: int

    def plain(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Reply(Protocol):
    asked: Asked
    choices: list[Choice]

    def usage(self) -> Usage: ...

    def begin(self) -> list[Chunk]:
        """Chunks before the first token."""
        ...

    def add(self, index: int, output: Output) -> list[Chunk]: ...

    def end(self) -> list[Chunk]:
        """Chunks after the last token."""
        ...

    def whole(self) -> dict[str, Any]: ...


# Chat -----------------------------------------------------------------------------------------------------------------


class ChatReply:
    """`prompt` is the same for all choices; `parsers` has one for each."""

    def __init__(
        self, asked: Asked, tokenizer: Tokenizer, prompt: tuple[int, ...], parsers: Sequence[ChatParser]
    ) -> None:
        self.asked = asked
        self.choices = [Choice(prompt=prompt) for _ in parsers]
        self.parsers = parsers
        self._tokenizer = tokenizer
        self._named = [_NamedCalls() for _ in parsers]

    def usage(self) -> Usage:
        return _usage(self.choices, len(self.choices))

    def begin(self) -> list[Chunk]:
        chunks = [self._chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self.choices))]
        if self.asked.token_ids:
            chunks[0]["prompt_token_ids"] = list(self.choices[0].prompt)
        return chunks

    def add(self, index: int, output: Output) -> list[Chunk]:
        choice, parser = self.choices[index], self.parsers[index]
        choice.add(output)
        deltas = [delta for piece in output.pieces for delta in parser.push(piece)]
        if output.finished:
            if isinstance(output.stop_match, int):  # a mark that ended the turn is no text, but the parser must see it
                deltas += parser.push(Piece("", self._tokenizer.special_name(output.stop_match)))
            deltas += parser.flush()
            if choice.finish_reason == "stop" and any(call.name for call in parser.finish().message.tool_calls):
                choice.finish_reason = "tool_calls"
        deltas = self._named[index].of(deltas)
        if not self.asked.stream:
            return []
        chunks = [self._chunk(index, _plain(delta)) for delta in _joined(deltas)]
        extra = self._extra(output)
        if not chunks and (extra or output.finished):
            chunks = [self._chunk(index, {})]
        if chunks:
            chunks[0]["choices"][0].update(extra)
            if output.finished:
                chunks[-1]["choices"][0].update({"finish_reason": choice.finish_reason} | _versions(choice))
                chunks[-1]["weight_version"] = choice.version
        return chunks

    def end(self) -> list[Chunk]:
        return _last(self.asked, self.usage(), "chat.completion.chunk")

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, (choice, parser) in enumerate(zip(self.choices, self.parsers, strict=True)):
            plain: dict[str, Any] = {
                "index": index,
                "message": {"role": "assistant", "content": None}
                | self._named[index].message(parser.finish().message).plain(),
                "finish_reason": choice.finish_reason,
                "logprobs": None,
            }
            if self.asked.logprobs is not None:
                plain["logprobs"] = _chat_logprobs(self._tokenizer, choice.logprobs)
            if self.asked.token_ids:
                plain["token_ids"] = choice.token_ids
            choices.append(plain | _versions(choice))
        body = _head(self.asked, "chat.completion") | {"choices": choices, "usage": self.usage().plain()}
        body["weight_version"] = self.choices[0].version
        if self.asked.token_ids:
            body["prompt_token_ids"] = list(self.choices[0].prompt)
        return body

    def _extra(self, output: Output) -> dict[str, Any]:
        extra: dict[str, Any] = {}
        if output.token_ids and self.asked.token_ids:
            extra["token_ids"] = list(output.token_ids)
        if output.logprobs and self.asked.logprobs is not None:
            extra["logprobs"] = _chat_logprobs(self._tokenizer, output.logprobs)
        return extra

    def _chunk(self, index: int, delta: dict[str, Any]) -> Chunk:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return _head(self.asked, "chat.completion.chunk") | {"choices": [choice]}


class _NamedCalls:
    """Of one choice, what is told of calls without a name: their text."""

    def __init__(self) -> None:
        self._places: dict[int, int | None] = {}
        """Index of a call -> among those with a name; None: it has none."""
        self._content: list[str] = []

    def of(self, deltas: Iterable[Delta]) -> list[Delta]:
        told = list[Delta]()
        for delta in deltas:
            if isinstance(delta, ToolCallDelta):
                delta = self._call(delta)
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            if not isinstance(delta, ContentDelta) or delta.text:
                told.append(delta)
        return told

    def _call(self, delta: ToolCallDelta) -> Delta:
        if delta.id is not None:
            before = sum(place is not None for place in self._places.values())
            self._places[delta.index] = before if delta.name else None
        place = self._places[delta.index]
        if place is None:
            return ContentDelta(text=(delta.id or "") + delta.arguments)
        return replace(delta, index=place)

    def message(self, message: ChatMessage) -> ChatMessage:
        """The same of a whole message."""
        if all(call.name for call in message.tool_calls):
            return message
        content = "".join(self._content)
        calls = tuple(call for call in message.tool_calls if call.name)
        return replace(message, parts=(TextPart(text=content),) if content else (), tool_calls=calls)


def _joined(deltas: Iterable[Delta]) -> Iterator[Delta]:
    """Neighbours of one kind as one, so that one output makes few chunks."""
    last: Delta | None = None
    for delta in deltas:
        if isinstance(last, ReasoningDelta) and isinstance(delta, ReasoningDelta):
            last = ReasoningDelta(text=last.text + delta.text)
        elif isinstance(last, ContentDelta) and isinstance(delta, ContentDelta):
            last = ContentDelta(text=last.text + delta.text)
        else:
            if last is not None:
                yield last
            last = delta
    if last is not None:
        yield last


def _plain(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, ReasoningDelta):
        return {"reasoning_content": delta.text}
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    call: dict[str, Any] = {"index": delta.index}
    function: dict[str, Any] = {"arguments": delta.arguments}
    if delta.id is not None:
        call |= {"id": delta.id, "type": "function"}
        function["name"] = delta.name
    return {"tool_calls": [call | {"function": function}]}


def _chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        label, content = label_of(tokenizer, token_id)
        return {"token": label, "logprob": _finite(logprob), "bytes": list(content)}

    return {
        "content": [
            entry(each.token_id, each.logprob) | {"top_logprobs": [entry(*top) for top in each.top]}
            for each in logprobs
        ],
        "refusal": None,
    }


# Completions ----------------------------------------------------------------------------------------------------------


class CompletionReply:
    """`prompts` are ids and the text that an echo shows, `n` sequences each, in the order of the engine's requests."""

    def __init__(
        self, asked: Asked, tokenizer: Tokenizer, prompts: Sequence[tuple[tuple[int, ...], str]], n: int
    ) -> None:
        self.asked = asked
        self.choices = [Choice(prompt=ids) for ids, _ in prompts for _ in range(n)]
        self._echoes = [text if asked.echo else "" for _, text in prompts for _ in range(n)]
        self._texts: list[list[str]] = [[] for _ in self.choices]
        self._tables = [_Table(tokenizer) for _ in self.choices]
        self._n = n

    def usage(self) -> Usage:
        return _usage(self.choices, self._n)

    def begin(self) -> list[Chunk]:
        return []

    def add(self, index: int, output: Output) -> list[Chunk]:
        choice, table = self.choices[index], self._tables[index]
        is_first = not self._texts[index] and not choice.token_ids and choice.finish_reason is None
        choice.add(output)
        text = (self._echoes[index] if is_first else "") + output.text()
        self._texts[index].append(text)
        rows: dict[str, Any] | None = None
        if self.asked.logprobs is not None:
            prompt: Sequence[TokenLogprob | None] = ()
            if self.asked.echo and output.prompt_logprobs is not None:
                prompt = _with_ids(choice.prompt, output.prompt_logprobs)
                table.first_id = choice.prompt[0]
            rows = table.rows([*prompt, *output.logprobs], self.asked.logprobs)
        if not self.asked.stream or not (text or output.token_ids or output.finished):
            return []
        plain: dict[str, Any] = {"index": index, "text": text, "logprobs": rows, "finish_reason": choice.finish_reason}
        if self.asked.token_ids:
            plain["token_ids"] = list(output.token_ids)
            if is_first:
                plain["prompt_token_ids"] = list(choice.prompt)
        chunk = _head(self.asked, "text_completion") | {"choices": [plain]}
        if output.finished:
            plain |= _versions(choice)
            chunk["weight_version"] = choice.version
        return [chunk]

    def end(self) -> list[Chunk]:
        return _last(self.asked, self.usage(), "text_completion")

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            plain: dict[str, Any] = {
                "index": index,
                "text": "".join(self._texts[index]),
                "logprobs": self._tables[index].all if self.asked.logprobs is not None else None,
                "finish_reason": choice.finish_reason,
            }
            if self.asked.token_ids:
                plain |= {"prompt_token_ids": list(choice.prompt), "token_ids": choice.token_ids}
            choices.append(plain | _versions(choice))
        body = _head(self.asked, "text_completion") | {"choices": choices, "usage": self.usage().plain()}
        return body | {"weight_version": self.choices[0].version}


class _Table:
    """The four columns of log-probs of the completions endpoint, and where each token begins in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.first_id = 0
        self.all: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, skip_special=True)
        self._offset = 0

    def rows(self, logprobs: Sequence[TokenLogprob | None], top: int) -> dict[str, list[Any]]:
        new: dict[str, list[Any]] = {name: [] for name in self.all}
        for each in logprobs:
            token_id = self.first_id if each is None else each.token_id  # nothing predicts the first
            new["tokens"].append(label_of(self._tokenizer, token_id)[0])
            new["token_logprobs"].append(None if each is None else _finite(each.logprob))
            new["top_logprobs"].append(self._top(each) if each is not None and top else None)
            new["text_offset"].append(self._offset)
            self._offset += len(self._decoder.push(token_id))
        for name, column in new.items():
            self.all[name] += column
        return new

    def _top(self, each: TokenLogprob) -> dict[str, float]:
        """By text, as the format wants it. The chosen token is always there; of two with one text the better one is."""
        found: dict[str, float] = {}
        for token_id, logprob in (*each.top, (each.token_id, each.logprob)):
            label = label_of(self._tokenizer, token_id)[0]
            found[label] = max(found.get(label, -math.inf), _finite(logprob))
        return found


def _with_ids(prompt: tuple[int, ...], logprobs: tuple[TokenLogprob | None, ...]) -> tuple[TokenLogprob | None, ...]:
    if len(prompt) != len(logprobs):
        raise ValueError(f"the engine gave {len(logprobs)} log-probs for a prompt of {len(prompt)} tokens")
    return logprobs


# Both -----------------------------------------------------------------------------------------------------------------


def label_of(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    """How a token is written in log-probs, and its bytes."""
    name = tokenizer.special_name(token_id)
    if name is not None:
        return name, name.encode()
    if not 0 <= token_id < tokenizer.vocab_size:  # a model may have more rows than its tokenizer has tokens
        return f"<|{token_id}|>", b""
    content = tokenizer.token_bytes(token_id)
    try:
        return content.decode("utf-8"), content
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content), content


def _finite(logprob: float) -> float:
    """JSON has no infinity: what can never be is written -9999, as OpenAI does."""
    return max(-9999.0, logprob) if math.isfinite(logprob) else -9999.0


def _head(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": asked.id, "object": kind, "created": asked.created, "model": asked.model}


def _usage(choices: Sequence[Choice], n: int) -> Usage:
    """A prompt counts once, however many samples it was continued with."""
    return Usage(
        prompt=sum(len(choice.prompt) for choice in choices[::n]),
        cached=sum(choice.num_cached for choice in choices[::n]),
        completion=sum(len(choice.token_ids) for choice in choices),
    )


def _last(asked: Asked, usage: Usage, kind: str) -> list[Chunk]:
    return [_head(asked, kind) | {"choices": [], "usage": usage.plain()}] if asked.include_usage else []


def _versions(choice: Choice) -> dict[str, Any]:
    plain: dict[str, Any] = {"weight_version": choice.version}
    if len(set(choice.versions)) > 1:
        plain["weight_versions"] = choice.versions
    return plain


__all__ = ["Asked", "ChatReply", "Choice", "Chunk", "CompletionReply", "Reply", "Usage", "label_of"]
