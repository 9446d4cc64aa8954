"""What the engine is asked and what it answers: plain data, no torch.

A `Request` is a prompt of token ids (with pictures at their <|media_pad|> places) and how to sample after it. The
engine answers with `Output` events, each holding what is new since the last one; the last has a `finish_reason`.

Log-probs are those of softmax(logits) as the model gives them: before temperature, penalties, bias, masks and cuts.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from perilune.data.media import Grid, Media, MediaError, tokens_of_grid

if TYPE_CHECKING:
    from perilune.serve.grammar import Grammar
    from perilune.serve.text_stream import Piece

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_SEED = 2**63


class RequestError(ValueError):
    """A request that can never run; `field` names the part of it that is at fault."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class QueueFull(RuntimeError):
    """As many requests wait as the engine allows: try again later."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. The default samples from the model's own distribution."""

    max_tokens: int = 128
    """0 computes the prompt only, for its log-probs."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: no cut."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None: the engine draws one and reports it."""
    stop_ids: frozenset[int] = frozenset()
    """Each ends the sequence. The id itself is part of the answer's token ids, never of its text."""
    stop: tuple[str, ...] = ()
    """Each ends the sequence; the text is cut before it."""
    include_stop: bool = False
    """Keep the stop string in the text."""
    min_tokens: int = 0
    """No stop id or end of text is sampled before so many tokens."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: none. 0: of the chosen token. n: also of the n most likely."""
    prompt_logprobs: int | None = None
    routes: int | None = None
    """None: none. n: the last event tells which experts every computed token from position n on met. Needs an engine
    that records them (EngineConfig.record_routes)."""
    grammar: "Grammar | None" = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 0)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, above=True)
        _whole("top_k", self.top_k, 0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above=True)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED - 1)
        for token in self.stop_ids:
            _whole("stop_ids", token, 0)
        if isinstance(self.stop, str) or not all(isinstance(text, str) and text for text in self.stop):
            raise RequestError("stop", f"stop is {self.stop!r}, expected a tuple of strings that are not empty")
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "min_tokens", f"min_tokens is {self.min_tokens!r}, expected at most max_tokens={self.max_tokens!r}"
            )
        for name in ("logprobs", "prompt_logprobs", "routes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """One picture, or one chunk of video frames, of a prompt."""

    pixels: np.ndarray = field(repr=False)
    """uint8 [t * h * w, 3, 14, 14], as in data/media.py"""
    grid: Grid
    start: int
    """Index of its first <|media_pad|> in the prompt."""
    key: bytes
    """sha256 of grid and pixels: equal pictures have equal features."""

    def __post_init__(self) -> None:
        _whole("media", self.start, 0)
        try:
            Media(pixels=self.pixels, grid=self.grid)
        except MediaError as error:
            raise RequestError("media", str(error)) from None

    @staticmethod
    def of(media: Media, start: int) -> "Picture":
        digest = hashlib.sha256(repr(media.grid).encode())
        digest.update(np.ascontiguousarray(media.pixels).data)
        return Picture(pixels=media.pixels, grid=media.grid, start=start, key=digest.digest())

    @property
    def end(self) -> int:
        return self.start + tokens_of_grid(self.grid)


@dataclass(frozen=True, kw_only=True)
class Request:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    media: tuple[Picture, ...] = ()
    """In the order of their pads."""
    priority: int = 0
    """Smaller is served earlier. Nobody starves: the scheduler bounds how many later requests may overtake."""
    salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    whole: bool = False
    """Its events come as one when it is over (one for each version of the weights): a token costs less then."""

    @property
    def is_held(self) -> bool:
        """It is whole, and nobody has to look at its tokens one by one before."""
        return self.whole and not self.params.stop and self.params.grammar is None

    def __post_init__(self) -> None:
        if not self.request_id:
            raise RequestError("request_id", f"request_id is {self.request_id!r}, expected a name of its own")
        if not self.prompt:
            raise RequestError("prompt", "prompt is empty, expected at least one token: the document-start token")
        _whole("priority", self.priority, -1_000_000, 1_000_000)
        end = 0
        for index, picture in enumerate(self.media):
            if not end <= picture.start < picture.end <= len(self.prompt):
                raise RequestError(
                    "media",
                    f"media[{index}] takes tokens {picture.start} to {picture.end}, expected a place after {end} "
                    f"inside the {len(self.prompt)} tokens of the prompt",
                )
            end = picture.end


class TokenLogprob(NamedTuple):
    """A tuple: there is one for every token that is sampled."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-prob) of the most likely, best first."""


@dataclass(kw_only=True, slots=True)
class Output:
    """One event of one request: what is new since the last one. Nothing changes it; a frozen class would take several
    times as long to make, and there is one for every token."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    pieces: "tuple[Piece, ...]" = ()
    """The text of these tokens as far as it is certain; a possible beginning of a stop string is held back."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One per token id when asked for."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Once, on the first event, one per prompt token; nothing predicts the first."""
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    """The stop string or token id that ended the sequence."""
    error: str | None = None
    weight_version: int = 0
    num_cached: int = 0
    """Prompt tokens whose computation was taken from the prefix cache."""
    seed: int = 0
    routes: np.ndarray | None = field(default=None, compare=False, repr=False)
    """Once, on the last event, when asked for: uint8 or uint16 [tokens, layers of experts, experts per token], best
    expert first, of all tokens from `params.routes` on but the last one sampled, which is never computed."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def text(self) -> str:
        return "".join(self._texts())

    def _texts(self) -> Iterator[str]:
        return (piece.text for piece in self.pieces)


def _whole(name: str, value: object, low: int, high: int | None = None) -> None:
    limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise RequestError(name.partition("[")[0], f"{name} is {value!r}, expected an integer {limit}")


def _number(name: str, value: object, low: float, high: float, *, above: bool = False) -> None:
    """`above` leaves out the lower limit itself. Never NaN, never infinite."""
    limit = f"{'above' if above else 'at least'} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or value < low or value > high or (above and value == low):  # pyrefly: ignore[unsupported-operation]
        raise RequestError(name.partition("[")[0], f"{name} is {value!r}, expected a number {limit}")
