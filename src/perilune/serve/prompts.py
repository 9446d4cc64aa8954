"""From a checked body to what the engine runs: prompt ids, pictures, sampling, and the reply that is to come.

Texts of callers are always ordinary text: no prompt and no message can spell a special token. Whoever needs special
tokens in /v1/completions sends token ids. With a `session_id` the prompt of a turn begins with the exact ids of the
turn before (see `sessions`).

The methods of `Prompts` hold no lock and may run in several threads at once.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from perilune.data.chat import ChatTemplate
from perilune.data.chat_messages import ChatError, Tool
from perilune.data.chat_parser import ChatParser
from perilune.data.images import ProcessorConfig
from perilune.data.tokenizer import Tokenizer
from perilune.serve.attachments import Fetch, attachments, fetched, places
from perilune.serve.bodies import ChatBody, Common, CompletionBody, read_chat, read_completion
from perilune.serve.chat_grammar import chat_grammar
from perilune.serve.grammar import Grammar
from perilune.serve.keys import ANYBODY, Caller
from perilune.serve.limits import Limits
from perilune.serve.refusals import Refusal
from perilune.serve.replies import Asked, ChatReply, CompletionReply, Reply
from perilune.serve.request import MAX_SEED, Picture, Request, RequestError, SamplingParams
from perilune.serve.sessions import SessionLimits, Sessions

DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions, as at OpenAI. A chat goes on until it ends or the context is full."""
NEVER = -100.0
"""The bias that keeps a token from being sampled."""
_NOT_IN_A_HEADER = re.compile(r"[^\w.\[\]' -]", re.ASCII)


class PromptConfig(Protocol):
    """What is needed of the server's config."""

    @property
    def limits(self) -> Limits: ...
    @property
    def max_length(self) -> int | None: ...
    @property
    def thinking(self) -> bool: ...
    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def takes_pictures(self) -> bool: ...
    @property
    def share_prefixes(self) -> bool: ...
    @property
    def fetch(self) -> Fetch | None: ...
    @property
    def template(self) -> ChatTemplate | None: ...
    @property
    def session_limits(self) -> SessionLimits: ...
    @property
    def processor(self) -> ProcessorConfig: ...


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """`finish` is called once, when every sequence has ended well and before the last byte of the answer."""

    requests: Sequence[Request]
    reply: Reply
    headers: Mapping[str, str] = field(default_factory=dict)
    finish: Callable[[], None] = lambda: None
    picture_bytes: int = 0
    format_path: str = ""
    """The field that asked for a grammar."""


class Prompts:
    def __init__(self, tokenizer: Tokenizer, config: PromptConfig, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._model_name = model_name
        self._sessions = Sessions(tokenizer, template=config.template, limits=config.session_limits)
        self._longest_token = max(1, int(tokenizer.bytes_per_token.max()))
        special = tokenizer.special_ids
        self._ends = frozenset({tokenizer.eos_id, special["<|im_end|>"]})
        self._calls = {special["<|tool_calls_section_begin|>"]: NEVER, special["<|tool_call_begin|>"]: NEVER}
        self._pad = special["<|media_pad|>"]
        self.max_length = min(config.limits.length, config.max_length or config.limits.length)

    # --- reading ------------------------------------------------------------------------------------------------------

    def read_chat(self, value: dict[str, Any]) -> ChatBody:
        return read_chat(value, self._config.limits)

    def read_completion(self, value: dict[str, Any]) -> CompletionBody:
        return read_completion(value, self._config.limits)

    async def fetched(self, body: ChatBody | CompletionBody) -> dict[str, bytes]:
        """Pictures that stand elsewhere, by their path in the body."""
        if isinstance(body, CompletionBody):
            return {}
        path = next((path for path, _ in places(body.messages)), None)
        if path is not None and not self._config.takes_pictures:
            raise Refusal(f"{path} is a picture, and this model reads text only", param=path, code="no_vision")
        return await fetched(body.messages, self._config.limits, self._config.fetch)

    def takes_long(self, body: ChatBody | CompletionBody) -> bool:
        """Whether `prepare` may take long however short the body is: a picture of few bytes may have millions of
        pixels, and a model's own template is rendered by another process."""
        if isinstance(body, CompletionBody):
            return False
        return self._config.template is not None or any(message.media for message in body.messages)

    def prepare(self, body: ChatBody | CompletionBody, contents: dict[str, bytes], caller: Caller) -> Prepared:
        if body.common.priority < 0 and not caller.is_admin:
            raise Refusal(
                f"priority is {body.common.priority}, and only the admin key may be served before others: expected 0, "
                "or more to be served after them",
                status=403,
                param="priority",
                code="insufficient_permissions",
            )
        try:
            if isinstance(body, ChatBody):
                return self._chat(body, contents, caller)
            return self._completion(body, caller)
        except ChatError as error:
            raise Refusal(str(error), param=error.path, code="invalid_value") from None
        except RequestError as error:
            raise Refusal(str(error), param=error.field, code="invalid_value") from None

    # --- chat ---------------------------------------------------------------------------------------------------------

    def _chat(self, body: ChatBody, contents: dict[str, bytes], caller: Caller) -> Prepared:
        config, common = self._config, body.common
        for number, message in enumerate(body.messages):
            self._check_length(message.text + (message.reasoning or ""), f"messages[{number}]")
        thinking = config.thinking if body.thinking is None else body.thinking
        prompt = self._sessions.prompt(
            messages=body.messages,
            tools=body.tools,
            attachments=attachments(body.messages, contents, config.limits, config.processor, self.max_length),
            thinking=thinking,
            owner=caller.name,
            session_id=body.session_id,
        )
        ids = tuple(prompt.tokens)
        is_open = self._is_thinking(ids)
        logprobs = 0 if body.logprobs is None and common.return_token_ids else body.logprobs
        bias, stop_ids = dict(common.sampling.logit_bias), set(self._ends)
        if body.tools and body.tool_choice.mode == "none":
            bias |= self._calls
        if not body.parallel_tool_calls:
            stop_ids.add(self._tokenizer.special_ids["<|tool_call_end|>"])
        params = self._params(
            common, len(ids), "messages", None, logprobs=logprobs, bias=bias, stop_ids=stop_ids,
            grammar=self._chat_grammar(body, is_open),
        )  # fmt: skip
        asked = self._asked(common, "chatcmpl", logprobs)
        media = tuple(Picture.of(media, start) for media, start in zip(prompt.media, prompt.starts, strict=True))
        requests = self._requests(asked.id, ids, params, common, caller, media)
        parsers = [ChatParser(thinking=is_open) for _ in requests]
        reply = ChatReply(asked, self._tokenizer, ids, parsers)

        def finish() -> None:
            for choice, parser in zip(reply.choices, parsers, strict=True):
                self._sessions.record(prompt, choice.token_ids, parser.finish())

        headers = _headers(asked, common)
        if body.session_id is not None:
            headers["X-Perilune-Session"] = "continued" if prompt.continued else _header(f"begun {prompt.reason or ''}")
        path = "tool_choice" if common.constraint is None else common.constraint.path
        size = sum(picture.pixels.nbytes for picture in media)
        return Prepared(
            requests=requests, reply=reply, headers=headers, finish=finish, picture_bytes=size, format_path=path
        )

    def _is_thinking(self, ids: Sequence[int]) -> bool:
        """Whether the prompt has opened the reasoning, whatever template wrote it."""
        special = self._tokenizer.special_ids
        for token_id in reversed(ids[-8:]):
            if token_id in (special["<think>"], special["</think>"]):
                return token_id == special["<think>"]
        return False

    def _chat_grammar(self, body: ChatBody, is_thinking: bool) -> Grammar | None:
        choice, constraint = body.tool_choice, body.common.constraint
        if choice.mode != "required" and constraint is None:
            return None
        tools: tuple[Tool, ...] = ()
        if choice.mode != "none":
            tools = tuple(tool for tool in body.tools if choice.name in (None, tool.name))
        return chat_grammar(
            self._tokenizer,
            constraint=constraint,
            tools=tools,
            is_required=choice.mode == "required",
            is_parallel=body.parallel_tool_calls and choice.name is None,
            is_thinking=is_thinking,
        )

    # --- completions --------------------------------------------------------------------------------------------------

    def _completion(self, body: CompletionBody, caller: Caller) -> Prepared:
        common = body.common
        prompts = [self._prompt(body, index, prompt) for index, prompt in enumerate(body.prompts)]
        logprobs = 0 if body.logprobs is None and common.return_token_ids else body.logprobs
        constraint = common.constraint
        grammar = None
        if constraint is not None:
            make = Grammar.regex if constraint.kind == "regex" else Grammar.json_schema
            grammar = make(constraint.value)
        asked = self._asked(common, "cmpl", logprobs, echo=body.echo)
        requests: list[Request] = []
        for index, (ids, _) in enumerate(prompts):
            path = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            params = self._params(
                common, len(ids), path, DEFAULT_COMPLETION_TOKENS, logprobs=logprobs,
                bias=dict(common.sampling.logit_bias), stop_ids=set(self._ends), grammar=grammar,
                prompt_logprobs=logprobs if body.echo else None,
            )  # fmt: skip
            requests += self._requests(f"{asked.id}-{index}", ids, params, common, caller)
        reply = CompletionReply(asked, self._tokenizer, prompts, common.n)
        path = "" if constraint is None else constraint.path
        return Prepared(requests=requests, reply=reply, headers=_headers(asked, common), format_path=path)

    def _prompt(self, body: CompletionBody, index: int, prompt: str | tuple[int, ...]) -> tuple[tuple[int, ...], str]:
        """Ids of a prompt, and what an echo shows of it."""
        path = "prompt" if len(body.prompts) == 1 else f"prompt[{index}]"
        tokenizer = self._tokenizer
        if isinstance(prompt, str):
            self._check_length(prompt, path)
            ids = tokenizer.encode(prompt)
            if body.add_special_tokens:
                ids = [tokenizer.bos_id, *ids]
            if not ids:
                raise Refusal(f"{path} is empty", param=path, code="invalid_value")
            return tuple(ids), prompt
        if max(prompt) >= tokenizer.vocab_size:
            bad = next(token_id for token_id in prompt if token_id >= tokenizer.vocab_size)
            raise Refusal(f"{path} holds the token id {bad}, expected ids below {tokenizer.vocab_size}", param=path)
        if self._pad in prompt:
            raise Refusal(f"{path} holds <|media_pad|>, which only a picture may put there", param=path)
        return prompt, tokenizer.decode(prompt, skip_special=True) if body.echo else ""

    # --- both ---------------------------------------------------------------------------------------------------------

    def _check_length(self, text: str, path: str) -> None:
        """Refuse what cannot fit, before any time is spent on it."""
        if len(text) > self.max_length * self._longest_token:
            raise Refusal(
                f"{path} has {len(text):,} characters, more than {self.max_length:,} tokens can hold",
                param=path,
                code="context_length_exceeded",
            )

    def _params(
        self,
        common: Common,
        length: int,
        path: str,
        default: int | None,
        *,
        logprobs: int | None,
        bias: dict[int, float],
        stop_ids: set[int],
        grammar: Grammar | None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        sampling, config = common.sampling, self._config
        room = self.max_length - length
        wanted = sampling.max_tokens
        if room < (1 if wanted is None else wanted):
            asked = "" if wanted is None else f" and max_tokens asks for {wanted:,}"
            raise Refusal(
                f"{path} has {length:,} tokens{asked}, and the context is {self.max_length:,} tokens",
                param=path if room < 1 else "max_tokens",
                code="context_length_exceeded",
            )
        most = min(config.limits.max_tokens, room, default or room) if wanted is None else wanted
        for token_id in (*bias, *sampling.stop_ids):
            if token_id >= self._tokenizer.vocab_size:
                name = "logit_bias" if token_id in bias else "stop_token_ids"
                expected = f"ids below {self._tokenizer.vocab_size}"
                raise Refusal(f"{name} holds the token id {token_id}, expected {expected}", param=name)
        return SamplingParams(
            max_tokens=most,
            temperature=config.temperature if sampling.temperature is None else sampling.temperature,
            top_p=config.top_p if sampling.top_p is None else sampling.top_p,
            top_k=max(0, sampling.top_k or 0),
            min_p=sampling.min_p or 0.0,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            logit_bias=bias,
            seed=sampling.seed,
            stop_ids=frozenset(sampling.stop_ids if sampling.ignore_eos else sampling.stop_ids | stop_ids),
            stop=sampling.stop,
            include_stop=sampling.include_stop,
            min_tokens=min(sampling.min_tokens, most),
            ignore_eos=sampling.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
        )

    def _requests(
        self,
        name: str,
        ids: tuple[int, ...],
        params: SamplingParams,
        common: Common,
        caller: Caller,
        media: tuple[Picture, ...] = (),
    ) -> list[Request]:
        """One for each sample. A seed is the first sample's; the others count up from it."""
        salt = "" if self._config.share_prefixes or caller.name == ANYBODY else caller.name
        found = []
        for index in range(common.n):
            seeded = params
            if index and params.seed is not None:
                seeded = replace(params, seed=(params.seed + index) % MAX_SEED)
            found.append(
                Request(
                    request_id=f"{name}-{index}",
                    prompt=ids,
                    params=seeded,
                    media=media,
                    priority=common.priority,
                    salt=salt,
                )
            )
        return found

    def _asked(self, common: Common, prefix: str, logprobs: int | None, *, echo: bool = False) -> Asked:
        return Asked(
            id=f"{prefix}-{secrets.token_hex(12)}",
            model=common.model or self._model_name,
            stream=common.stream,
            include_usage=common.include_usage,
            token_ids=common.return_token_ids,
            logprobs=logprobs,
            echo=echo,
        )


def _headers(asked: Asked, common: Common) -> dict[str, str]:
    headers = {"X-Request-Id": asked.id}
    if common.ignored:
        headers["X-Perilune-Ignored"] = ", ".join(_header(name[:64]) for name in common.ignored[:20])
    return headers


def _header(text: str) -> str:
    """A text that a stranger wrote, made harmless for a header."""
    return _NOT_IN_A_HEADER.sub("?", text)[:200].strip()


__all__ = ["Prepared", "PromptConfig", "Prompts"]
