"""The scheduler: which jobs compute which tokens in the next step. Pure Python.

Every step has one budget of tokens. First each running job that has all but its newest token computed decodes one; what
is left goes to prompts in chunks, first those begun, then waiting ones in order of rank. All that is known of a
sequence (its prompt, and what was sampled before a pre-emption) is prefilled the same way.

    rank = arrival + priority * patience          smaller goes first

so a request is overtaken by at most `patience` later ones per level of priority, and nobody starves. A waiting job is
admitted when there is a slot, and pages for all that is known of it; the first that does not fit holds back those
behind it. Out of pages, the running job of the largest rank is pre-empted: it gives up pages and slot, keeps its tokens
and waits again at its old rank. The running job of the smallest rank therefore always advances.

Where everybody who runs lets it (`Job.bursts`), a step of decodes has several rounds: the host has its work once for
all of them. What is sampled after a stop id is dropped. Few who could begin meanwhile wait for it, where nobody looks
at their tokens either, and begin in the next step: bursts and beginnings take turns.

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
from perilune.serve.prefix import Hit, PrefixCache, Snapshot
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
    burst: int = 1
    """Rounds of a step of decodes, at most; no more than a page has tokens."""
    border: int = 1
    """Deterministic mode: shares begin at multiples of it, and decodes replay from the last one."""


@dataclass(slots=True, eq=False)
class Landed:
    """What a step gave one job. `row` is its place among those sampled, in every round; None: nothing was sampled."""

    job: Job
    share: Share
    tokens: list[int | None]
    """Of the rounds up to the first stop id, or to the first that failed (None)."""
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
        self._was_burst = False
        """The step planned last had several rounds."""
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
        draft, budget, rounds = _Draft(), self.config.token_budget, self._rounds()
        self._was_burst = rounds > 1
        for job in sorted(self.running, key=_rank):
            # An earlier one may have taken its pages.
            if job.slot is not None and job.decodes and budget > 0 and self._grow(job, rounds):
                budget -= self._compute(draft, job, 1, rounds)
        begun = sorted((job for job in self.running if job.prefills), key=_rank)
        for index, job in enumerate(begun):
            crowded = bool(self.waiting) or index + 1 < len(begun)
            budget -= self._compute(draft, job, self._chunk(job, budget, crowded))
        # One that was pre-empted while its step is under way begins again only when that has landed: what lands would
        # otherwise be taken for what its new pages hold.
        under_way = {flight.job for flights in self._flights for flight in flights} if self.waiting else set()
        for job in list(self.waiting) if rounds == 1 else ():
            if budget < self.config.border or not self.states.num_free:
                break
            if job in under_way or self.prefixes.is_promised(job):
                continue
            if not self._admit(draft, job):
                break
            budget -= self._compute(draft, job, self._chunk(job, budget, bool(self.waiting)))
        return self._launched(draft) if draft.flights else None

    def land(self, sampled: Sequence[Sequence[int | None]]) -> list[Landed]:
        """The oldest planned step is over; `sampled` holds, for each round, a token (None: it failed) for each share
        that samples in it."""
        num_rows = 0
        landed = []
        for flight in self._flights.popleft():
            job, share, row, tokens = flight.job, flight.share, None, []
            if share.samples:
                row, num_rows = num_rows, num_rows + 1
            if not job.removed and row is not None:
                tokens = _until_the_end([ids[row] for ids in sampled[: share.rounds]], job.stop_ids)
                job.pending -= share.rounds
                job.tokens += [token for token in tokens if token is not None]  # the last one alone may be
            if job.slot is not None:
                # What was computed after the end is nobody's.
                self._remember(job, share, min(share.last_end, len(job.tokens)), flight.snapshot)
            else:
                self.prefixes.drop(flight.snapshot)
            if not job.removed:
                landed.append(Landed(job, share, tokens, row))
        return landed

    def _remember(self, job: Job, share: Share, end: int, snapshot: Snapshot | None) -> None:
        """A snapshot is one of the last border of pages that all rounds reach; where the end came before it, it is not
        worth keeping."""
        size = self.pages.page_size
        if snapshot is not None and end // size < share.last_end // size:
            self.prefixes.drop(snapshot)
            snapshot = None
        self.prefixes.remember(job, end, snapshot)

    def _rounds(self) -> int:
        """Of the next step, if it is one of decodes."""
        most, rounds, pages = self.config.burst, 1, 0
        if most == 1 or (self._may_begin() and not self._may_wait()):
            return 1
        for job in self.running:
            # The last token of a prompt is a decode too, but one with its pictures, and with scores to be given.
            if not job.bursts or job.prefills or job.computed < job.num_prompt:
                return 1
            own = min(most, job.goal - job.computed)
            rounds = max(rounds, own)
            pages += max(0, self.pages.pages_for(job.computed + own) - len(job.pages))
        return rounds if pages <= self.pages.num_free else 1  # nobody is pre-empted for the sake of a burst

    def _may_begin(self) -> bool:
        """Whether one that waits could be admitted, now or when the step under way is over."""
        if not self.waiting or not self.states.num_free:
            return False
        first = self.waiting[0]  # one that does not fit holds back those behind it
        if self.prefixes.is_promised(first) or any(
            flight.job is first for flights in self._flights for flight in flights
        ):
            return True
        return self._fits(first, self.prefixes.lookup(first))

    def _may_wait(self) -> bool:
        """Whether those that wait may do so for a burst, which takes them as many rounds as it saves the others work of
        the host: they are few, and nobody looks at their tokens either."""
        is_few = not self._was_burst and len(self.waiting) * self.config.burst <= len(self.running)
        return is_few and all(job.bursts for job in self.waiting)

    def _chunk(self, job: Job, budget: int, crowded: bool) -> int:
        """How many tokens of its prefill: all, unless the budget, a snapshot or those behind it want it shorter."""
        if crowded:
            budget = min(budget, max(budget // 2, self.pages.page_size))
        end = min([job.length, *(place for place in job.borders if place > job.computed)])
        if end - job.computed > budget:
            end = max(job.computed, (job.computed + budget) // self.config.border * self.config.border)
        return end - job.computed

    def _compute(self, draft: _Draft, job: Job, count: int, rounds: int = 1) -> int:
        """Put the next `count` tokens of a job into the step; of one that decodes, those of so many rounds."""
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
        if rounds > 1:
            rounds = min(rounds, job.goal - job.computed)
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
            rounds=rounds,
        )
        end += rounds - 1
        border = end - end % self.pages.page_size if rounds > 1 else end
        snapshot = self.prefixes.reserve_snapshot(job, border) if border > job.computed else None
        draft.flights.append(_Flight(job, share, snapshot))
        job.computed = end
        job.pending += rounds if samples else 0
        return count

    def _launched(self, draft: _Draft) -> StepPlan:
        flights = sorted(draft.flights, key=lambda flight: (len(flight.share.tokens) > 1, -flight.share.rounds))
        for row, flight in enumerate(flight for flight in flights if flight.share.samples):
            flight.job.sample_row = row
        self._flights.append(flights)
        return StepPlan(
            shares=tuple(flight.share for flight in flights),
            clear=tuple(draft.clear),
            load=tuple(draft.load),
            save=tuple(
                (flight.share.slot, flight.snapshot.slot, self._round_of_border(flight.share))
                for flight in flights
                if flight.snapshot is not None
            ),
        )

    def _round_of_border(self, share: Share) -> int:
        """The round after which the state is that at the last border of pages."""
        return share.rounds - 1 - share.last_end % self.pages.page_size

    # --- pages and slots --------------------------------------------------------------------------------------------

    def _grow(self, job: Job, rounds: int) -> bool:
        """A page for its next token, taken from the largest rank if need be; False if that was the job itself. For
        several rounds, where there are enough, all that it needs."""
        end = job.computed + (min(rounds, job.goal - job.computed) if rounds > 1 else 1)
        missing = -(-end // self.pages.page_size) - len(job.pages)
        if missing <= 0:
            return True
        while self.pages.num_free < missing:
            last = max(self.running, key=_rank)
            self._preempt(last)
            if last is job:
                return False
        job.pages += tuple(self.pages.take(missing))
        return True

    def _admit(self, draft: _Draft, job: Job) -> bool:
        hit = self.prefixes.lookup(job)
        if not self._fits(job, hit):
            return False
        shared = hit.matched[: hit.depth]
        self.pages.share(shared)
        job.pages = (*shared, *self.pages.take(self.pages.pages_for(len(job.tokens)) - hit.depth))
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

    def _fits(self, job: Job, hit: Hit) -> bool:
        """There are pages for it, and one for each running job to grow into: else it would be pre-empted right away."""
        missing = self.pages.pages_for(len(job.tokens)) - hit.depth
        needed = missing + self.pages.num_unused(hit.matched[: hit.depth]) + len(self.running)
        return not self.running or needed <= self.pages.num_free

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


def _until_the_end(tokens: list[int | None], stop_ids: frozenset[int]) -> list[int | None]:
    """Up to and with the first that ends a sequence."""
    for number, token in enumerate(tokens[:-1], start=1):
        if token is None or token in stop_ids:
            return tokens[:number]
    return tokens
