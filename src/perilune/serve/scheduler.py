"""The scheduler: which jobs compute which tokens in the next step. Pure Python.

Every step has one budget of tokens. First each running job that has all but its newest token computed decodes one; what
is left goes to prompts in chunks, first those begun, then waiting ones in order of rank. All that is known of a
sequence (its prompt, and what was sampled before a pre-emption) is prefilled the same way.

    rank = arrival + priority * patience          smaller goes first

so a request is overtaken by at most `patience` later ones per level of priority, and nobody starves. A waiting job is
admitted when there is a slot, and pages for all that is known of it; the first that does not fit holds back those
behind it. Out of pages, the running job of the largest rank is pre-empted: it gives up pages and slot, keeps its tokens
and waits again at its old rank. The running job of the smallest rank therefore always advances.

With asynchronous scheduling a step is planned (`plan`) before the one before it is over (`land`); never more than that
one. A job may be removed or pre-empted in between: removed, its token is dropped; pre-empted, its token counts, and it
is not admitted again before it has landed.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from perilune.serve.job import Job
from perilune.serve.pages import Pages
from perilune.serve.plan import Share, StepPlan, Want
from perilune.serve.prefix import PrefixCache, Snapshot
from perilune.serve.states import States


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    token_budget: int = 2048
    """Tokens that one step computes, at most."""
    patience: int = 64
    """Later requests that may overtake an earlier one per level of priority."""
    snapshot_interval: int = 4096
    """Tokens between two snapshots of a long prompt; a multiple of the page size."""
    prefix_caching: bool = True
    border: int = 1
    """Deterministic mode: shares begin at multiples of it, and decodes replay from the last one."""


@dataclass(slots=True, eq=False)
class Landed:
    """What a step gave one job. `token` is None where none was sampled; `row` is its place among those sampled."""

    job: Job
    share: Share
    token: int | None
    row: int | None


@dataclass(slots=True, eq=False)
class _Flight:
    """A share of a planned step that is not over."""

    job: Job
    share: Share
    snapshot: Snapshot | None


@dataclass
class _Draft:
    """A step in the making."""

    flights: list[_Flight] = field(default_factory=list)
    clear: list[int] = field(default_factory=list)
    load: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    def __init__(self, config: SchedulerConfig, *, num_pages: int, page_size: int, states: States) -> None:
        self.config = config
        self.states = states
        self.pages = Pages(num_pages, page_size, on_evict=states.forget)
        self.prefixes = PrefixCache(
            self.pages, states, interval=config.snapshot_interval, enabled=config.prefix_caching
        )
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.on_preempt: Callable[[Job], None] | None = None
        """Hears of a job that is about to give up its pages, while it has them."""
        self.num_preemptions = 0
        self.num_admitted_tokens = 0
        self.num_reused_tokens = 0
        self._arrivals = 0
        self._jobs: dict[str, Job] = {}
        self._flights: deque[list[_Flight]] = deque()

    # --- jobs -------------------------------------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def add(self, job: Job) -> None:
        assert job.request_id not in self._jobs
        self._arrivals += 1
        job.rank = (self._arrivals + job.priority * self.config.patience, self._arrivals)
        self._jobs[job.request_id] = job
        insort(self.waiting, job, key=_rank)

    def remove(self, request_id: str) -> None:
        """Finished, cancelled or failed, at any moment: pages and slot are free at once."""
        job = self._jobs.pop(request_id)
        job.removed = True
        if job.slot is None:
            self.waiting.remove(job)
        else:
            self._withdraw(job)

    def new_weights(self, *, recompute: bool) -> None:
        """Nothing cached is used again; with `recompute` running jobs compute all their tokens anew."""
        assert not self._flights, "steps must land before the weights change"
        self.prefixes.forget_all()
        for job in list(self.running) if recompute else ():
            self._preempt(job)

    # --- one step ---------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute before another step lands."""
        assert len(self._flights) <= 1, "two steps were planned and have not landed"
        draft, budget = _Draft(), self.config.token_budget
        for job in sorted(self.running, key=_rank):
            # An earlier one may have taken its pages.
            if job.slot is not None and job.decodes and budget > 0 and self._grow(job):
                budget -= self._compute(draft, job, 1)
        begun = sorted((job for job in self.running if job.prefills), key=_rank)
        for index, job in enumerate(begun):
            crowded = bool(self.waiting) or index + 1 < len(begun)
            budget -= self._compute(draft, job, self._chunk(job, budget, crowded))
        # One that was pre-empted while its step is under way begins again only when that has landed: what lands would
        # otherwise be taken for what its new pages hold.
        under_way = {flight.job for flights in self._flights for flight in flights} if self.waiting else set()
        for job in list(self.waiting):
            if budget < self.config.border or not self.states.num_free:
                break
            if job in under_way or self.prefixes.is_promised(job):
                continue
            if not self._admit(draft, job):
                break
            budget -= self._compute(draft, job, self._chunk(job, budget, bool(self.waiting)))
        return self._launched(draft) if draft.flights else None

    def land(self, sampled: Sequence[int | None]) -> list[Landed]:
        """The oldest planned step is over; `sampled` holds a token (None: it failed) for each share that samples."""
        num_rows = 0
        landed = []
        for flight in self._flights.popleft():
            job, share, row = flight.job, flight.share, None
            if share.samples:
                row, num_rows = num_rows, num_rows + 1
            if job.slot is not None:
                self.prefixes.remember(job, share.start + len(share.tokens), flight.snapshot)
            else:
                self.prefixes.drop(flight.snapshot)
            if job.removed:
                continue
            token = None if row is None else sampled[row]
            job.pending -= share.samples
            if token is not None:
                job.tokens.append(token)
            landed.append(Landed(job, share, token, row))
        return landed

    def _chunk(self, job: Job, budget: int, crowded: bool) -> int:
        """How many tokens of its prefill: all, unless the budget, a snapshot or those behind it want it shorter."""
        if crowded:
            budget = min(budget, max(budget // 2, self.pages.page_size))
        end = min([job.length, *(place for place in job.borders if place > job.computed)])
        if end - job.computed > budget:
            end = max(job.computed, (job.computed + budget) // self.config.border * self.config.border)
        return end - job.computed

    def _compute(self, draft: _Draft, job: Job, count: int) -> int:
        """Put the next `count` tokens of a job into the step."""
        if count == 0:
            return 0
        assert job.slot is not None
        start, end, length = job.computed - job.computed % self.config.border, job.computed + count, job.length
        samples = end == length and length < job.num_prompt + job.max_tokens
        is_late = end > len(job.tokens)
        want: Want = "last" if samples else "none"
        if job.scores_prompt and start < job.num_prompt:
            want = "all"
        pictures = ()
        if job.pictures:
            pictures = tuple(picture for picture in job.pictures if picture.start < end and picture.end > start)
        share = Share(
            request_id=job.request_id,
            start=start,
            tokens=(*job.tokens[start:end], -1) if is_late else tuple(job.tokens[start:end]),
            pages=job.pages,
            slot=job.slot,
            want=want,
            samples=samples,
            pictures=pictures,
            late_row=job.sample_row if is_late else None,
        )
        draft.flights.append(_Flight(job, share, self.prefixes.reserve_snapshot(job, end)))
        job.computed = end
        job.pending += samples
        return count

    def _launched(self, draft: _Draft) -> StepPlan:
        flights = sorted(draft.flights, key=lambda flight: len(flight.share.tokens) > 1)
        for row, flight in enumerate(flight for flight in flights if flight.share.samples):
            flight.job.sample_row = row
        self._flights.append(flights)
        return StepPlan(
            shares=tuple(flight.share for flight in flights),
            clear=tuple(draft.clear),
            load=tuple(draft.load),
            save=tuple((flight.share.slot, flight.snapshot.slot) for flight in flights if flight.snapshot is not None),
        )

    # --- pages and slots --------------------------------------------------------------------------------------------

    def _grow(self, job: Job) -> bool:
        """A page for its next token, taken from the largest rank if need be; False if that was the job itself."""
        if job.computed < len(job.pages) * self.pages.page_size:
            return True
        while not self.pages.num_free:
            last = max(self.running, key=_rank)
            self._preempt(last)
            if last is job:
                return False
        job.pages += tuple(self.pages.take(1))
        return True

    def _admit(self, draft: _Draft, job: Job) -> bool:
        hit = self.prefixes.lookup(job)
        shared = hit.matched[: hit.depth]
        missing = self.pages.pages_for(len(job.tokens)) - hit.depth
        # A page for each running job to grow into: else the newcomer would be pre-empted right away.
        if self.running and missing + self.pages.num_unused(shared) + len(self.running) > self.pages.num_free:
            return False
        self.pages.share(shared)
        job.pages = (*shared, *self.pages.take(missing))
        job.slot = self.states.take()
        job.computed = job.landed = hit.depth * self.pages.page_size
        if job.num_cached is None:
            job.num_cached = job.computed
        self.num_admitted_tokens += len(job.tokens)
        self.num_reused_tokens += job.computed
        if self.states.needed and hit.depth:
            draft.load.append((self.states.find(job.hashes[hit.depth - 1]), job.slot))
        elif self.states.needed:
            draft.clear.append(job.slot)
        self.prefixes.promise(job, hit)
        self.waiting.remove(job)
        self.running.append(job)
        return True

    def _preempt(self, job: Job) -> None:
        self.num_preemptions += 1
        if self.on_preempt is not None:
            self.on_preempt(job)
        self._withdraw(job)
        insort(self.waiting, job, key=_rank)

    def _withdraw(self, job: Job) -> None:
        """Take pages and slot from a running job."""
        assert job.slot is not None
        self.running.remove(job)
        self.pages.release(job.pages)
        self.states.release(job.slot)
        self.prefixes.withdraw(job)
        job.pages, job.slot = (), None
        job.computed = job.landed = 0


def _rank(job: Job) -> tuple[int, int]:
    return job.rank
