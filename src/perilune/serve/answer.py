"""An answer: what the tokens of one request mean. Text as far as it is certain, log-probs, and whether this is the end.

A sequence ends with a stop id (part of the token ids, never of the text), with a stop string (the text is cut before
it), or when it is as long as was asked for.

A request that wants its answer whole has one event for each version of the weights: what was sampled is held until it
is over, or until they change (`so_far`), and its text is read then. With stop strings or a grammar every token has its
event all the same: they have to be looked at one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from perilune.data.tokenizer import Tokenizer
from perilune.serve.job import Job
from perilune.serve.request import FinishReason, Output, Request, TokenLogprob
from perilune.serve.routes import Kept
from perilune.serve.sampler import SamplerRow
from perilune.serve.text_stream import Piece, TextStream, whole_text


@dataclass
class _Held:
    """Of an answer that is given out whole: what was sampled since the last event."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Numbers alone: nothing for the garbage collector to go through."""
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    is_begun: bool = False
    """There was an event before."""


class Answer:
    def __init__(self, request: Request, job: Job, row: SamplerRow, tokenizer: Tokenizer) -> None:
        self.request, self.job, self.row = request, job, row
        self.kept = None if request.params.routes is None else Kept(request.params.routes)
        """Its routes that pages may not hold any more; None: nobody asked for routes."""
        self._stop_ids, self._tokenizer = job.stop_ids, tokenizer
        self._held = _Held() if request.is_held else None
        self._text = TextStream(tokenizer, request.params.stop, request.params.include_stop)
        # Nothing predicts the first token of a prompt.
        self._prompt_scores: list[TokenLogprob | None] = [None]

    def scored(self, start: int, scores: list[TokenLogprob]) -> None:
        """Log-probs of prompt tokens from position `start` on; those known from before a pre-emption stay."""
        self._prompt_scores += scores[len(self._prompt_scores) - start :]

    def forget_scores(self) -> None:
        """The prompt is computed anew, with other weights."""
        del self._prompt_scores[1:]

    def more(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], version: int) -> Output | None:
        """The event of more tokens, which the job already counts; None where there is none yet. Nothing follows a stop
        id. More than one at a time come to answers that are held alone."""
        if self._held is not None:
            return self._hold(self._held, tokens, logprobs, version)
        return self._one(tokens[0], logprobs[0], version)

    def _one(self, token: int, logprob: TokenLogprob | None, version: int) -> Output:
        grammar = self.row.grammar
        if grammar is not None and not grammar.accept(token):
            raise ValueError(grammar.error or f"the grammar does not allow token {token!r}")
        pieces: list[Piece] = []
        reason: FinishReason | None = None
        match: str | int | None = None
        if token in self._stop_ids:
            reason, match = "stop", token
        else:
            pieces = self._text.push(token)
            is_last = self.job.num_sampled >= self.request.params.max_tokens
            if self._text.matched is not None:
                reason, match = "stop", self._text.matched
            elif grammar is not None and grammar.is_finished and (is_last or not self._stop_ids):
                reason = "stop"  # complete, and no stop id can say so
            elif is_last:
                reason = "length"
        if reason is not None:
            pieces += self._text.finish()
        logprobs = () if logprob is None else (logprob,)
        return self._output(version, reason, token_ids=(token,), pieces=pieces, logprobs=logprobs, stop_match=match)

    def _hold(
        self, held: "_Held", tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], version: int
    ) -> Output | None:
        held.token_ids += tokens
        for logprob in logprobs:
            if logprob is not None:
                held.logprobs.append(logprob.logprob)
                held.tops.append(logprob.top)
        reason: FinishReason | None = None
        if tokens[-1] in self._stop_ids:
            reason = "stop"
        elif self.job.num_sampled >= self.request.params.max_tokens:
            reason = "length"
        return None if reason is None else self._given_out(held, version, reason)

    def so_far(self, version: int) -> Output | None:
        """What is held, if anything is: the weights, of this version until now, are about to change."""
        held = self._held
        return self._given_out(held, version, None) if held is not None and held.token_ids else None

    def _given_out(self, held: "_Held", version: int, reason: FinishReason | None) -> Output:
        token_ids = tuple(held.token_ids)
        logprobs = tuple(map(TokenLogprob, token_ids, held.logprobs, held.tops)) if held.logprobs else ()
        said = token_ids[:-1] if reason == "stop" else token_ids
        if reason is not None and not held.is_begun:
            pieces = whole_text(self._tokenizer, said)
        else:  # a character may begin in one event and end in the next
            pieces = [piece for token in said for piece in self._text.push(token)]
            pieces += [] if reason is None else self._text.finish()
        self._held = _Held(is_begun=True)
        match = token_ids[-1] if reason == "stop" else None
        return self._output(
            version, reason, token_ids=token_ids, pieces=pieces, logprobs=logprobs, stop_match=match
        )  # fmt: skip

    def prompt_alone(self, version: int) -> Output:
        """The only event of a request for no tokens."""
        return self._output(version, "length")

    def ended(self, reason: FinishReason, version: int, error: str | None = None) -> Output:
        """Cancelled or failed: what was held back is not said any more, nor what was sampled of a whole answer."""
        return self._output(version, reason, error=error)

    def _output(
        self,
        version: int,
        reason: FinishReason | None,
        *,
        token_ids: tuple[int, ...] = (),
        pieces: list[Piece] | None = None,
        logprobs: tuple[TokenLogprob, ...] = (),
        stop_match: str | int | None = None,
        error: str | None = None,
    ) -> Output:
        scores = None
        if self.job.scores_prompt and reason not in ("cancelled", "error"):
            scores, self.job.scores_prompt = tuple(self._prompt_scores), False
        return Output(
            request_id=self.request.request_id,
            token_ids=token_ids,
            pieces=tuple(pieces or ()),
            logprobs=logprobs,
            prompt_logprobs=scores,
            finish_reason=reason,
            stop_match=stop_match,
            error=error,
            weight_version=version,
            num_cached=min(self.job.num_cached or 0, self.job.num_prompt),
            seed=self.row.seed,
        )
