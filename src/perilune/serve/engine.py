"""The engine: requests in, events out, one step after another. Not thread-safe: one thread owns it (async_engine.py).

    engine = Engine(model, tokenizer, EngineConfig(max_sequences=16))
    engine.add(Request(request_id="a", prompt=(...), params=SamplingParams(max_tokens=64)))
    while engine.has_work:
        for output in engine.step(): ...

A step: the scheduler plans, the runner computes logits, the sampler draws tokens, and what they mean (text, log-probs,
an end) goes out. Asynchronous: the next step is planned and launched before the tokens of this one are read, which stay
on the device; events come one step later, and a token computed for a sequence that had ended is dropped. Answers that
are wanted whole are sampled in bursts, several tokens to a step (`EngineConfig.burst`).

What is promised: the tokens of a request depend on its own prompt, parameters and seed, not on what else runs, how its
prompt was cut, whether it was pre-empted or found in the cache. What can never run is refused by `add`. A request whose
sampling fails ends alone, with finish_reason "error".
"""

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from perilune.data.tokenizer import Tokenizer
from perilune.model import Decoder
from perilune.model.sampling import to_device
from perilune.serve.answer import Answer
from perilune.serve.grammar import GrammarCompiler
from perilune.serve.job import Job
from perilune.serve.plan import StepPlan
from perilune.serve.request import MAX_SEED, Output, QueueFull, Request, RequestError, SamplingParams, TokenLogprob
from perilune.serve.runner import Runner
from perilune.serve.sampler import HostSampled, Sampled, Sampler, SamplerRow, score_prompt
from perilune.serve.scheduler import Landed, Scheduler, SchedulerConfig
from perilune.serve.sizing import EngineConfig, fitted
from perilune.serve.states import States

logger = logging.getLogger("perilune.serve")
__all__ = ["Engine", "EngineConfig", "EngineStats"]


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    waiting: int
    running: int
    pages: int
    pages_free: int
    """Used by nobody; some of them remember prefixes."""
    pages_remembered: int
    snapshots_remembered: int
    steps: int
    preemptions: int
    prompt_tokens: int
    """Of admitted sequences, also when admitted again after a pre-emption."""
    cached_tokens: int
    """Of these, taken from the prefix cache."""
    sampled_tokens: int
    weight_version: int


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """A launched step whose tokens are on their way to the host."""

    sampled: list[Callable[[], HostSampled]]
    """Of every round."""
    prompt_scores: Mapping[str, Callable[[], list[TokenLogprob]]]
    weight_version: int


class Engine:
    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        *,
        device: torch.device | str | None = None,
        weight_version: int = 0,
        forbidden: Iterable[int] = (),
    ) -> None:
        """The engine takes possession of the model. `forbidden` ids are never sampled, beside `forbidden_ids`."""
        place = torch.device(device) if device is not None else model.embed_tokens.weight.device
        model.to(place)  # before the memory that is left is counted
        vocab_size = model.config.vocab_size
        self.config = fitted(config or EngineConfig(), model.config, place)
        assert self.config.num_pages is not None and self.config.max_length is not None
        self.max_length = self.config.max_length
        self.tokenizer = tokenizer
        self.weight_version = weight_version
        self._model = model
        self._device = place
        self._scheduler = self._new_scheduler()
        self._runner = Runner(
            model,
            num_pages=self.config.num_pages,
            page_size=self.config.page_size,
            num_slots=self._scheduler.states.num_slots,
            max_sequences=self.config.max_sequences,
            token_budget=self.config.token_budget,
            deterministic=self.config.deterministic,
            device=place,
            record_routes=self.config.record_routes,
        )
        banned = {*forbidden_ids(tokenizer, vocab_size), *forbidden}
        self._sampler = Sampler(vocab_size, forbidden=banned, device=place)
        self._is_asynchronous = self.config.is_asynchronous(place)
        self._answers: dict[str, Answer] = {}
        self._flight: _Flight | None = None
        self._late_ids: Tensor | None = None
        self._outbox: list[Output] = []
        self._num_steps = self._num_sampled = 0
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = threading.Lock()

    # --- requests ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._answers or self._outbox or self._flight)

    @property
    def grammars(self) -> GrammarCompiler:
        """Made when the first request asks for it, by whichever thread."""
        with self._grammars_lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self.tokenizer)
            return self._grammars

    def prepare(self, request: Request) -> None:
        """What of `add` may take long: the compilation of a grammar. From any thread; what it finds out is kept."""
        if request.params.grammar is not None:
            self.grammars.compile(request.params.grammar)

    def add(self, request: Request) -> None:
        """RequestError for what can never run, with the field at fault; QueueFull when too many wait."""
        self._check(request)
        if len(self._scheduler.waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self._scheduler.waiting)} requests wait, as many as max_queue allows: try later")
        self.prepare(request)
        params = request.params
        stop_ids = params.stop_ids if params.ignore_eos else params.stop_ids | {self.tokenizer.eos_id}
        row = SamplerRow(
            params,
            seed=secrets.randbelow(MAX_SEED) if params.seed is None else params.seed,
            prompt=request.prompt,
            stop_ids=stop_ids,
            grammar=None if params.grammar is None else self.grammars.start(params.grammar, stop_ids),
        )
        job = Job(
            request_id=request.request_id,
            tokens=list(request.prompt),
            num_prompt=len(request.prompt),
            max_tokens=params.max_tokens,
            priority=request.priority,
            pictures=request.media,
            salt=request.salt,
            waits=row.grammar is not None,
            bursts=request.is_held,
            stop_ids=stop_ids,
            scores_prompt=params.prompt_logprobs is not None,
        )
        self._answers[request.request_id] = Answer(request, job, row, self.tokenizer)
        self._scheduler.add(job)

    def cancel(self, request_id: str) -> None:
        """At any moment, also when it is unknown or over. Its last event comes with the next step."""
        if request_id in self._answers:
            self._outbox.append(self._end(request_id).ended("cancelled", self.weight_version))

    def _check(self, request: Request) -> None:
        prompt, max_tokens = request.prompt, request.params.max_tokens
        if request.request_id in self._answers:
            raise RequestError("request_id", f"request_id is {request.request_id!r}, which is already under way")
        vocab_size = self._model.config.vocab_size
        for name, ids in (("prompt", prompt), ("logit_bias", request.params.logit_bias)):
            if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
                wrong = min(ids) if min(ids) < 0 else max(ids)
                raise RequestError(name, f"{name} holds {wrong!r}, expected ids in [0, {vocab_size})")
        if len(prompt) + max_tokens > self.max_length:
            raise RequestError(
                "prompt" if len(prompt) >= self.max_length else "max_tokens",
                f"the prompt has {len(prompt)} tokens and max_tokens is {max_tokens!r}, expected at most "
                f"{self.max_length} together: shorten the prompt or lower max_tokens",
            )
        self._check_routes(request)
        vision = self._model.config.vision
        for index, picture in enumerate(request.media):
            if vision is None:
                raise RequestError("media", f"media holds {len(request.media)} pictures, but the model sees none")
            if picture.grid[0] > vision.pos_emb_time:
                raise RequestError(
                    "media",
                    f"media[{index}] has {picture.grid[0]} frames, expected at most {vision.pos_emb_time} in a chunk",
                )
        pad = self.tokenizer.special_ids["<|media_pad|>"]
        places = [position for picture in request.media for position in range(picture.start, picture.end)]
        if len(places) != prompt.count(pad) or any(prompt[position] != pad for position in places):
            raise RequestError(
                "media",
                f"the prompt has {prompt.count(pad)} <|media_pad|> and its pictures take {len(places)} places, "
                "expected every pad to belong to a picture",
            )

    def _check_routes(self, request: Request) -> None:
        first = request.params.routes
        if first is not None and self._runner.routes is None:
            raise RequestError("routes", f"routes is {first!r}, but the engine records none: set record_routes=True")
        if first is not None and first >= len(request.prompt):
            raise RequestError(
                "routes", f"routes is {first!r}, expected a position inside the {len(request.prompt)} prompt tokens"
            )

    def _end(self, request_id: str) -> Answer:
        self._scheduler.remove(request_id)
        return self._answers.pop(request_id)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """What is new in all requests; nothing while prompts are being computed."""
        plan = self._scheduler.plan()
        landing = None if plan is None else self._launch(plan)
        if self._is_asynchronous:
            landing, self._flight = self._flight, landing
        if landing is not None:
            self._land(landing)
        outputs, self._outbox = self._outbox, []
        return outputs

    def _launch(self, plan: StepPlan) -> _Flight:
        self._num_steps += 1
        for slot in plan.clear:
            self._runner.clear_state(slot)
        for source, target in plan.load:
            self._runner.copy_state(source, target)
        is_late = any(share.late_row is not None for share in plan.shares)
        logits = self._runner.run(plan, self._late_ids if is_late else None)
        self._save(plan, 0)
        end, sampled_rows, rows, scores = 0, [], [], {}
        for share in plan.shares:
            answer, first, end = self._answers[share.request_id], end, end + share.num_rows
            if share.want == "all":
                targets = answer.request.prompt[share.start + 1 : share.end + 1]
                top = answer.request.params.prompt_logprobs or 0
                scores[share.request_id] = self._score(logits[first : first + len(targets)], targets, top)
            if share.samples:
                sampled_rows.append(end - 1)
                rows.append(answer.row)
        if len(rows) < end:
            logits = logits[to_device(np.array(sampled_rows, dtype=np.int64), logits.device)]
        ids, sampled = self._sample(logits, rows, often=plan.rounds > 1)
        rounds = [sampled]
        for number in range(1, plan.rounds):
            logits = self._runner.run(plan, ids, number=number)
            self._save(plan, number)
            ids, sampled = self._sample(logits, rows[: len(logits)], often=True)
            rounds.append(sampled)
        self._late_ids = ids
        return _Flight(sampled=rounds, prompt_scores=scores, weight_version=self.weight_version)

    def _save(self, plan: StepPlan, number: int) -> None:
        for source, target, after in plan.save:
            if after == number:
                self._runner.copy_state(source, target)

    def _score(self, logits: Tensor, targets: Sequence[int], top: int) -> Callable[[], list[TokenLogprob]]:
        if not self.config.deterministic:
            return score_prompt(logits, targets, top)
        rows = [score_prompt(row.clone(), [target], top) for row, target in zip(logits.split(1), targets)]
        return lambda: [score for row in rows for score in row()]

    def _sample(
        self, logits: Tensor, rows: Sequence[SamplerRow], *, often: bool = False
    ) -> tuple[Tensor, Callable[[], HostSampled]]:
        """Ids on the device, and what they are on the host.

        All at once, or one by one: where one fails, to know which; deterministic, because of the last bits.
        """
        before = [row.index for row in rows]
        try:
            if not self.config.deterministic or not rows:
                sampled = self._sampler.sample(logits, rows, often=often)
                return sampled.token_ids, sampled.host
        except Exception:
            if not rows or [row.index for row in rows] != before:  # no row's fault: it came too late for that
                raise
            logger.exception("a batch could not be sampled; its rows are sampled one by one")
        parts: list[Sampled | str] = []
        for number, row in enumerate(rows):
            try:
                parts.append(self._sampler.sample(logits[number : number + 1].clone(), [row]))
            except Exception as error:
                parts.append(f"sampling failed: {type(error).__name__}: {error}")
        nothing = torch.zeros(1, dtype=torch.long, device=logits.device)
        ids = torch.cat([nothing if isinstance(part, str) else part.token_ids for part in parts])
        return ids, lambda: _together(parts)

    def _land(self, flight: _Flight) -> None:
        """Put what a step gave into the outbox."""
        sampled = [each() for each in flight.sampled]
        for landed in self._scheduler.land([each.tokens() for each in sampled]):
            request_id = landed.job.request_id
            answer = self._answers[request_id]
            try:
                output = self._event(answer, landed, sampled, flight)
            except Exception as error:  # of its text or its grammar: nobody else's business
                logger.exception("request %s failed", request_id)
                output = answer.ended("error", flight.weight_version, f"{type(error).__name__}: {error}")
            if output is not None:
                self._outbox.append(self._with_routes(output, answer))
                if output.finished:
                    self._end(request_id)

    def _event(self, answer: Answer, landed: Landed, sampled: Sequence[HostSampled], flight: _Flight) -> Output | None:
        if landed.share.want == "all":
            answer.scored(landed.share.start + 1, flight.prompt_scores[landed.job.request_id]())
        row, tokens = landed.row, landed.tokens
        if row is not None:
            if tokens[-1] is None:
                return answer.ended("error", flight.weight_version, sampled[len(tokens) - 1].problems[row])
            self._num_sampled += len(tokens)
            logprobs = [each.logprobs[row] for each in sampled[: len(tokens)]]
            return answer.more(cast(list[int], tokens), logprobs, flight.weight_version)
        if answer.request.params.max_tokens == 0 and landed.share.end == landed.job.num_prompt:
            return answer.prompt_alone(flight.weight_version)
        return None

    def _with_routes(self, output: Output, answer: Answer) -> Output:
        if answer.kept is None or output.finish_reason not in ("stop", "length"):
            return output
        assert self._runner.routes is not None
        job = answer.job
        end = len(job.tokens) - (1 if job.num_sampled else 0)
        return replace(output, routes=self._runner.routes.read(answer.kept, job.pages, end))

    def _keep_routes(self, job: Job) -> None:
        """Of a job that gives up its pages. Before its first token nothing was sampled with them: they are not kept."""
        kept = self._answers[job.request_id].kept
        if kept is not None and job.length > job.num_prompt:
            assert self._runner.routes is not None
            kept.keep(self._runner.routes, job.pages, job.computed)

    # --- everything else --------------------------------------------------------------------------------------------

    def load_weights(self, weights: Mapping[str, Tensor] | nn.Module, version: int, *, recompute: bool = True) -> None:
        """Other weights of the same shapes, in place. Requests under way go on with them; outputs say which they had.

        What was computed with the old weights is not used again: the prefix cache is emptied, and running sequences are
        computed anew, so that each log-prob is that of the weights whose version is stamped on it. With
        `recompute=False` running sequences keep what they have; only new ones are all new.
        """
        if self._flight is not None:
            landing, self._flight = self._flight, None
            self._land(landing)
        so_far = [answer.so_far(self.weight_version) for answer in self._answers.values()]
        self._outbox += [output for output in so_far if output is not None]
        self._runner.load_weights(weights)
        self.weight_version = version
        self._scheduler.new_weights(recompute=recompute)
        for answer in self._answers.values() if recompute else ():
            answer.forget_scores()

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            pages=scheduler.pages.num_pages,
            pages_free=scheduler.pages.num_free,
            pages_remembered=scheduler.pages.num_remembered,
            snapshots_remembered=scheduler.states.num_remembered,
            steps=self._num_steps,
            preemptions=scheduler.num_preemptions,
            prompt_tokens=scheduler.num_admitted_tokens,
            cached_tokens=scheduler.num_reused_tokens,
            sampled_tokens=self._num_sampled,
            weight_version=self.weight_version,
        )

    def reset(self, error: str) -> list[Output]:
        """After a step that failed: every request ends with `error`, and the engine is as new."""
        outputs = [answer.ended("error", self.weight_version, error) for answer in self._answers.values()]
        outputs, self._outbox = self._outbox + outputs, []
        self._answers.clear()
        self._flight = self._late_ids = None
        self._scheduler = self._new_scheduler()
        return outputs

    def warm_up(self) -> int:
        """Compile kernels and record CUDA graphs before there are requests, so that nobody waits for that later: some
        seconds on a GPU. Returns how many graphs there are; elsewhere there is nothing to do."""
        if self._runner.device.type != "cuda":
            return 0
        return self._runner.record_usual_steps()

    def probe(self) -> None:
        """Compute one token, to see that it can; raises what is in the way. For an engine without requests."""
        assert not self.has_work
        params = SamplingParams(max_tokens=1, temperature=0.0)
        self.add(Request(request_id="probe", prompt=(self.tokenizer.bos_id,), params=params))
        while self.has_work:
            for output in self.step():
                if output.error is not None:
                    raise RuntimeError(output.error)

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        assert config.num_pages is not None
        has_states = "kda" in self._model.config.layer_pattern()
        scheduler = Scheduler(
            SchedulerConfig(
                token_budget=config.token_budget,
                patience=config.patience,
                snapshot_interval=config.snapshot_interval,
                prefix_caching=config.prefix_caching,
                burst=config.rounds(self._device),
                border=config.border,
            ),
            num_pages=config.num_pages,
            page_size=config.page_size,
            states=States(config.max_sequences, config.snapshots, needed=has_states),
        )
        scheduler.on_preempt = self._keep_routes if config.record_routes else None
        return scheduler


def forbidden_ids(tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """What no answer holds: ids without a meaning, reserved ones, places of pictures, beginnings and padding."""
    names = {"[BOS]", "[UNK]", "[PAD]"}
    meaningless = []
    for token in range(tokenizer.vocab_size):
        name = tokenizer.special_name(token)
        if name is None:
            is_forbidden = not tokenizer.token_bytes(token)
        else:
            is_forbidden = name in names or name.startswith(("<|media_", "<|reserved_"))
        if is_forbidden:
            meaningless.append(token)
    return [*meaningless, *range(tokenizer.vocab_size, vocab_size)]


def _together(parts: Sequence[Sampled | str]) -> HostSampled:
    """Rows that were sampled one by one, some of which failed."""
    token_ids: list[int] = []
    problems: list[str | None] = []
    logprobs: list[TokenLogprob | None] = []
    for part in parts:
        host = None if isinstance(part, str) else part.host()
        token_ids += [0] if host is None else host.token_ids
        problems += [str(part)] if host is None else host.problems
        logprobs += [None] if host is None else host.logprobs
    return HostSampled(token_ids=token_ids, problems=problems, logprobs=logprobs)
