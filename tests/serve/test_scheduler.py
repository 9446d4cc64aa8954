"""The scheduler, driven over a model on paper that refuses to run on a wrong page or state."""

import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from perilune.serve.job import Job
from perilune.serve.plan import StepPlan
from perilune.serve.scheduler import Scheduler, SchedulerConfig
from perilune.serve.states import States
from tests.serve.paper_model import VOCABULARY, PaperRunner, continuation

CONFIG = SchedulerConfig(token_budget=16, snapshot_interval=16)
STOP = 0


class Bench:
    """Scheduler and model on paper; `late` plans every step before the one before it has landed."""

    def __init__(
        self,
        config: SchedulerConfig = CONFIG,
        *,
        num_pages: int = 24,
        page_size: int = 4,
        max_sequences: int = 4,
        num_snapshots: int = 6,
        has_states: bool = True,
        late: bool = False,
    ) -> None:
        states = States(max_sequences, num_snapshots, needed=has_states)
        self.scheduler = Scheduler(config, num_pages=num_pages, page_size=page_size, states=states)
        self.runner = PaperRunner(page_size=page_size, has_states=has_states, border=config.border)
        self.late = late
        self.sampled: list[list[int]] = [[]]
        self.in_flight = False
        self.jobs: dict[str, Job] = {}
        self.answers: dict[str, list[int]] = {}
        self.plans: list[StepPlan] = []

    def add(self, name: str, prompt: list[int], max_tokens: int = 6, **fields: object) -> Job:
        job = Job(
            request_id=name, tokens=list(prompt), num_prompt=len(prompt), max_tokens=max_tokens,
            stop_ids=frozenset({STOP}), **fields,
        )  # fmt: skip
        self.scheduler.add(job)
        self.jobs[name] = job
        return job

    def cancel(self, name: str) -> None:
        if name in self.jobs:
            del self.jobs[name]
            self.scheduler.remove(name)

    def step(self) -> bool:
        plan = self.scheduler.plan()
        sampled, was_in_flight = self.sampled, self.in_flight
        if plan is not None:
            self.plans.append(plan)
            assert plan.num_tokens <= self.scheduler.config.token_budget or self.scheduler.config.border > 1
            self.sampled = self.runner.run(plan, sampled[-1])
        self.in_flight = plan is not None and self.late
        if not self.late and plan is not None:
            self.land(self.sampled)
        elif self.late and was_in_flight:
            self.land(sampled)
        return plan is not None or was_in_flight

    def land(self, sampled: list[list[int]]) -> None:
        for landed in self.scheduler.land(sampled):
            job = landed.job
            at_end = job.num_sampled == job.max_tokens and job.landed >= job.num_prompt
            if landed.tokens[-1:] == [STOP] or at_end:
                self.answers[job.request_id] = job.tokens[job.num_prompt :]
                self.cancel(job.request_id)

    def drain(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.step() and not self.jobs:
                return
        raise AssertionError(f"{len(self.jobs)} jobs are stuck: {sorted(self.jobs)}")

    def check_nothing_leaked(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.running and not scheduler.waiting
        assert scheduler.pages.num_free == scheduler.pages.num_pages
        assert scheduler.states.num_free == scheduler.states.max_sequences
        assert scheduler.states.num_reserved == 0


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = continuation(prompt, max_tokens)
    return tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens


def long_answer(rng: random.Random, prompt_length: int, max_tokens: int) -> list[int]:
    """A prompt whose answer does not end early."""
    while True:
        prompt = [rng.randrange(VOCABULARY) for _ in range(prompt_length)]
        if STOP not in continuation(prompt, max_tokens):
            return prompt


def test_prefill_chunks_and_decodes_share_a_step_and_its_budget() -> None:
    bench, rng = Bench(), random.Random(0)
    bench.add("a", long_answer(rng, 3, 8), 8)
    bench.step()
    bench.add("b", long_answer(rng, 40, 2), 2)
    bench.step()
    mixed = bench.plans[-1]
    assert [share.request_id for share in mixed.shares] == ["a", "b"]
    assert mixed.num_decodes == 1 and mixed.num_tokens == 16
    bench.drain()
    bench.check_nothing_leaked()


def test_a_long_prompt_leaves_room_for_those_behind_it() -> None:
    bench, rng = Bench(), random.Random(0)
    bench.add("long", long_answer(rng, 60, 1), 1)
    bench.add("short", long_answer(rng, 3, 2), 2)
    while "short" not in bench.answers:
        bench.step()
    assert "long" not in bench.answers


@pytest.mark.parametrize("has_states", (True, False))
def test_the_same_prompt_again_is_taken_from_the_cache(has_states: bool) -> None:
    bench, rng = Bench(has_states=has_states), random.Random(1)
    prompt = long_answer(rng, 21, 6)
    bench.add("first", prompt)
    bench.drain()
    job = bench.add("second", prompt)
    bench.drain()
    assert job.num_cached == 20
    assert bench.answers["first"] == bench.answers["second"] == continuation(prompt, 6)


def test_the_next_turn_goes_on_from_the_last_page_of_the_answer() -> None:
    bench, rng = Bench(), random.Random(2)
    prompt = long_answer(rng, 9, 12)
    bench.add("first", prompt, 12)
    bench.drain()
    job = bench.add("second", prompt + bench.answers["first"] + [1, 2, 3])
    bench.drain()
    assert job.num_cached == 20  # 9 + 12 tokens, the last of which was never computed


def test_prompts_that_share_a_beginning_share_it_from_the_third_on() -> None:
    """The second finds pages but no state there, and leaves one."""
    bench, rng = Bench(replace(CONFIG, snapshot_interval=1024), num_pages=60), random.Random(3)
    system = [rng.randrange(VOCABULARY) for _ in range(16)]
    jobs = []
    for index in range(4):
        jobs.append(bench.add(str(index), system + [(index + n) % VOCABULARY for n in range(8)]))
        bench.drain()
    assert [job.num_cached for job in jobs] == [0, 0, 16, 16]


def test_the_snapshot_of_an_answer_drives_out_none_of_a_prompt() -> None:
    bench, rng = Bench(replace(CONFIG, snapshot_interval=1024), num_snapshots=1), random.Random(2)
    prompt = long_answer(rng, 9, 12)
    bench.add("first", prompt, 12)
    bench.drain()
    job = bench.add("second", prompt)
    bench.drain()
    assert job.num_cached == 8


def test_chunks_of_a_prompt_leave_one_snapshot_at_its_end() -> None:
    bench = Bench(replace(CONFIG, snapshot_interval=1024))
    bench.add("a", long_answer(random.Random(2), 41, 1), 1)
    bench.drain()
    assert len(bench.plans) > 3 and sum(len(plan.save) for plan in bench.plans) == 1


def test_a_hit_needs_a_snapshot() -> None:
    bench, rng = Bench(num_snapshots=0), random.Random(1)
    prompt = long_answer(rng, 21, 6)
    bench.add("first", prompt)
    bench.drain()
    job = bench.add("second", prompt)
    bench.drain()
    assert job.num_cached == 0


@pytest.mark.parametrize("has_states", (True, False))
@pytest.mark.parametrize("late", (True, False))
def test_samples_of_one_prompt_compute_it_once(has_states: bool, late: bool) -> None:
    bench, rng = Bench(has_states=has_states, late=late, num_pages=80), random.Random(4)
    prompt = long_answer(rng, 41, 4)
    jobs = [bench.add(str(index), prompt, 4) for index in range(4)]
    bench.drain()
    assert [job.num_cached for job in jobs] == [0, 40, 40, 40]
    if not late:
        assert bench.runner.num_computed == 41 + 3 + 3 * (1 + 3)


def test_other_salts_and_scored_prompts_take_nothing_from_the_cache() -> None:
    bench, rng = Bench(), random.Random(1)
    prompt = long_answer(rng, 21, 6)
    bench.add("first", prompt)
    bench.drain()
    jobs = [bench.add("salted", prompt, salt="other"), bench.add("scored", prompt, scores_prompt=True)]
    bench.drain()
    assert [job.num_cached for job in jobs] == [0, 0]


@pytest.mark.parametrize("token_budget", (3, 16))
def test_new_weights_empty_the_cache_also_of_what_running_jobs_go_on_to_write(token_budget: int) -> None:
    """With a budget of 3 the change comes in the middle of the first page."""
    bench, rng = Bench(replace(CONFIG, token_budget=token_budget)), random.Random(5)
    prompt = long_answer(rng, 21, 12)
    bench.add("running", prompt, 12)
    bench.step()
    bench.scheduler.new_weights(recompute=False)
    bench.drain()
    job = bench.add("after", prompt, 12)
    bench.drain()
    assert job.num_cached == 0
    again = bench.add("again", prompt, 12)
    bench.drain()
    assert again.num_cached == 20


def test_a_request_that_waits_for_a_prefix_takes_none_of_the_weights_before() -> None:
    bench, rng = Bench(), random.Random(5)
    prompt = long_answer(rng, 37, 4)
    bench.add("first", prompt, 4)
    waiting = bench.add("second", prompt, 4)
    bench.step()
    assert waiting.slot is None
    bench.scheduler.new_weights(recompute=False)
    bench.drain()
    assert waiting.num_cached == 0


def test_nobody_waits_for_a_prefix_that_was_computed_and_lost() -> None:
    bench, rng = Bench(num_snapshots=1, num_pages=60), random.Random(11)
    prompt, other = long_answer(rng, 9, 30), long_answer(rng, 9, 1)
    bench.add("first", prompt, 30)
    bench.step()
    bench.step()
    bench.add("other", other, 1)  # its snapshot takes the place
    bench.step()
    bench.step()
    again = bench.add("again", prompt, 1)
    bench.step()
    assert "first" in bench.jobs and again.num_cached == 0


def test_the_snapshot_of_an_answer_moves_with_it() -> None:
    bench, rng = Bench(replace(CONFIG, snapshot_interval=1024)), random.Random(12)
    bench.add("a", long_answer(rng, 5, 40), 40)
    bench.drain()
    assert bench.scheduler.states.num_remembered == 2  # at the end of the prompt, and of the answer


def test_new_weights_recompute_running_jobs_and_keep_their_tokens() -> None:
    bench, rng = Bench(), random.Random(5)
    prompt = long_answer(rng, 5, 12)
    bench.add("running", prompt, 12)
    for _ in range(6):
        bench.step()
    bench.scheduler.new_weights(recompute=True)
    assert bench.jobs["running"].computed == 0 and bench.jobs["running"].num_sampled > 2
    bench.drain()
    assert bench.answers["running"] == continuation(prompt, 12)


def test_out_of_pages_the_newest_is_preempted_and_keeps_its_tokens() -> None:
    bench, rng = Bench(num_pages=8), random.Random(6)
    prompts = [long_answer(rng, 5, 20) for _ in range(2)]
    first, second = (bench.add(str(index), prompt, 20) for index, prompt in enumerate(prompts))
    while not bench.scheduler.num_preemptions:
        bench.step()
    assert first.slot is not None and second.slot is None and second.num_sampled > 0
    bench.drain()
    assert [bench.answers["0"], bench.answers["1"]] == [continuation(prompt, 20) for prompt in prompts]
    bench.check_nothing_leaked()


def test_a_smaller_priority_goes_first_and_nobody_is_overtaken_more_often_than_patience_allows() -> None:
    bench, rng = Bench(replace(CONFIG, patience=3), max_sequences=1), random.Random(7)
    order: list[str] = []
    bench.add("busy", [1, 2], 1)
    bench.add("late", [1, 2, 3], 1, priority=1)
    for index in range(8):
        bench.add(f"early{index}", [rng.randrange(1, VOCABULARY)], 1)
    while bench.jobs:
        bench.step()
        order += [name for name in bench.answers if name not in order]
    assert order[0] == "busy" and order[1] == "early0" and order.index("late") <= 1 + 3


def test_a_prompt_alone_is_computed_without_sampling() -> None:
    bench = Bench()
    bench.add("score", list(range(7)) * 3, 0, scores_prompt=True)
    bench.drain()
    assert bench.answers["score"] == []
    assert [share.want for plan in bench.plans for share in plan.shares] == ["all"] * len(bench.plans)
    assert bench.runner.num_computed == 21


def test_deterministic_shares_begin_at_borders_and_decodes_replay() -> None:
    bench, rng = Bench(replace(CONFIG, border=4), page_size=4), random.Random(8)
    prompts = [long_answer(rng, length, 9) for length in (3, 18, 33)]
    for index, prompt in enumerate(prompts):
        bench.add(str(index), prompt, 9)
    bench.drain()
    assert [bench.answers[str(index)] for index in range(3)] == [continuation(prompt, 9) for prompt in prompts]
    assert any(len(share.tokens) > 1 and share.samples for share in bench.plans[-1].shares)


def test_a_job_that_waits_for_its_token_is_never_planned_ahead() -> None:
    bench, rng = Bench(late=True), random.Random(9)
    free, strict = long_answer(rng, 5, 8), long_answer(rng, 6, 8)
    bench.add("free", free, 8)
    bench.add("strict", strict, 8, waits=True)
    bench.drain()
    late = {share.request_id for plan in bench.plans for share in plan.shares if share.late_row is not None}
    assert late == {"free"}
    assert bench.answers["strict"] == continuation(strict, 8)


def test_an_id_used_again_gets_no_token_of_its_predecessor() -> None:
    bench, rng = Bench(late=True), random.Random(10)
    old, new = long_answer(rng, 5, 8), long_answer(rng, 9, 8)
    bench.add("name", old, 8)
    for _ in range(3):
        bench.step()
    bench.cancel("name")
    bench.add("name", new, 8)
    bench.drain()
    assert bench.answers["name"] == continuation(new, 8)


PROMPTS = st.lists(st.integers(0, 6), min_size=1, max_size=40)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are cancelled and finish in any order; the model on paper checks every page and state."""

    @initialize(
        late=st.booleans(),
        has_states=st.booleans(),
        num_pages=st.integers(16, 30),
        num_snapshots=st.integers(0, 5),
        border=st.sampled_from([1, 1, 4]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        burst=st.integers(1, 4),
    )
    def start(
        self, late: bool, has_states: bool, num_pages: int, num_snapshots: int, border: int, prefix_caching: bool,
        burst: int,
    ) -> None:  # fmt: skip
        burst = burst if border == 1 else 1
        config = replace(CONFIG, border=border, prefix_caching=prefix_caching, patience=4, burst=burst)
        self.bench = Bench(
            config, num_pages=num_pages, num_snapshots=num_snapshots, has_states=has_states, late=late, max_sequences=3
        )
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.count = 0

    @rule(
        prompt=PROMPTS, max_tokens=st.integers(0, 24), priority=st.integers(-1, 1), waits=st.booleans(),
        bursts=st.sampled_from([True, True, True, False]),
    )  # fmt: skip
    def add(self, prompt: list[int], max_tokens: int, priority: int, waits: bool, bursts: bool = True) -> None:
        name = str(self.count)
        self.count += 1
        self.asked[name] = prompt, max_tokens
        self.bench.add(name, prompt, max_tokens, priority=priority, waits=waits, bursts=bursts and not waits)

    @rule(data=st.data(), max_tokens=st.integers(1, 20))
    def add_after_an_earlier_one(self, data: st.DataObject, max_tokens: int) -> None:
        if self.bench.answers:
            name = data.draw(st.sampled_from(sorted(self.bench.answers)))
            prompt = (self.asked[name][0] + self.bench.answers[name])[:40]
            cut = data.draw(st.integers(1, len(prompt)))
            self.add(prompt[:cut], max_tokens, 0, False)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.bench.jobs:
            self.bench.cancel(data.draw(st.sampled_from(sorted(self.bench.jobs))))

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.bench.step()

    @rule(recompute=st.booleans())
    def new_weights(self, recompute: bool) -> None:
        while self.bench.in_flight:
            self.bench.land(self.bench.sampled)
            self.bench.in_flight = False
        self.bench.scheduler.new_weights(recompute=recompute)

    @invariant()
    def answers_are_those_of_the_model(self) -> None:
        if hasattr(self, "bench"):
            for name, answer in self.bench.answers.items():
                assert answer == expected(*self.asked[name])

    @invariant()
    def pages_in_use_are_those_of_running_jobs(self) -> None:
        if hasattr(self, "bench"):
            scheduler = self.bench.scheduler
            used = {page for job in scheduler.running for page in job.pages}
            assert scheduler.pages.num_free == scheduler.pages.num_pages - len(used)
            assert scheduler.states.num_free == scheduler.states.max_sequences - len(scheduler.running)

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.bench.drain()
            self.answers_are_those_of_the_model()
            self.bench.check_nothing_leaked()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=30)


@pytest.mark.parametrize("burst", (1, 4))
@pytest.mark.parametrize("late", (False, True))
def test_nothing_leaks_in_ten_thousand_random_events(late: bool, burst: int) -> None:
    rng = random.Random(int(late))
    bench = Bench(replace(CONFIG, burst=burst), late=late, num_pages=16, num_snapshots=4, max_sequences=4)
    asked: dict[str, tuple[list[int], int]] = {}
    for event in range(10_000):
        kind = rng.random()
        if kind < 0.1:
            known = list(asked.values())
            start = rng.choice(known[-8:])[0][: rng.randrange(30)] if known and rng.random() < 0.6 else []
            prompt = start + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 12))]
            asked[str(event)] = prompt, rng.randrange(24)
            waits = rng.random() < (0.2 if burst == 1 else 0.02)
            bench.add(str(event), *asked[str(event)], priority=rng.randrange(3), waits=waits, bursts=not waits)
        elif kind < 0.12 and bench.jobs:
            bench.cancel(rng.choice(list(bench.jobs)))
        else:
            bench.step()
    bench.drain()
    bench.check_nothing_leaked()
    preempted = bench.scheduler.num_preemptions
    assert len(bench.answers) > 500 and preempted > (20 if burst == 1 else 10)
    assert bench.scheduler.num_reused_tokens > 500
    for name, answer in bench.answers.items():
        assert answer == expected(*asked[name])
    assert burst == 1 or sum(plan.rounds > 1 for plan in bench.plans) > 100


def test_a_job_that_is_pre_empted_in_flight_leaves_no_promise_about_pages_it_never_filled() -> None:
    """Its step lands after it lost its pages: they must not be remembered as what its new pages hold."""
    scheduler = Scheduler(
        SchedulerConfig(token_budget=100, snapshot_interval=4), num_pages=24, page_size=2,
        states=States(7, 3, needed=False),
    )  # fmt: skip

    def added(name: str, length: int) -> Job:
        tokens = [100 * ord(name[0]) + place for place in range(length)]
        job = Job(request_id=name, tokens=tokens, num_prompt=length, max_tokens=20)
        scheduler.add(job)
        return job

    for name, length in (*((name, 1) for name in "ABCDE"), ("J", 17)):
        added(name, length)
    scheduler.plan()
    scheduler.land([[7] * 6])
    scheduler.config = replace(scheduler.config, token_budget=8)
    added("K", 7)
    flights = []
    for _ in range(4):  # always one step under way, as with asynchronous scheduling
        plan = scheduler.plan()
        assert plan is not None
        flights.append(plan)
        if len(flights) == 2:
            scheduler.land([[7] * sum(share.samples for share in flights.pop(0).shares)])
    scheduler.remove("K")
    assert scheduler.prefixes.lookup(added("K", 7)).depth == 0


class Looked(dict):
    """Counts how often a promise is looked for."""

    count = 0

    def get(self, key, default=None):
        self.count += 1
        return super().get(key, default)


@pytest.mark.parametrize("has_states", [True, False])
def test_a_request_that_waits_for_a_prefix_looks_once_a_step_however_long_it_is(has_states: bool) -> None:
    bench = Bench(replace(CONFIG, token_budget=8), num_pages=400, has_states=has_states)
    prompt = [1 + n % 7 for n in range(400)]
    bench.add("first", [*prompt, 1])
    bench.step()
    for name in ("second", "third"):
        bench.add(name, [*prompt, 2])
    promised = bench.scheduler.prefixes._promised = Looked(bench.scheduler.prefixes._promised)
    looks = []
    while bench.jobs["second"].slot is None:
        promised.count = 0
        assert bench.step()
        looks.append(promised.count)
    assert len(looks) > 40 and bench.jobs["second"].num_cached == 400
    # Once through all blocks at the start and when the promise is kept, one look for each in between.
    blocks = 2 * len(prompt) // 4 + 4
    assert sorted(looks)[-3] <= 2 and max(looks) <= blocks


def test_a_request_that_nobody_works_for_is_not_gone_through_again_until_somebody_promises() -> None:
    bench = Bench(num_pages=40, max_sequences=2)
    bench.add("first", [3] * 9, max_tokens=30)
    bench.step()
    prefixes = bench.scheduler.prefixes
    waiting = Job(request_id="w", tokens=[5] * 40, num_prompt=40, max_tokens=1)
    promised = prefixes._promised = Looked(prefixes._promised)
    assert not prefixes.is_promised(waiting)
    seen = promised.count
    assert seen > 1 and not prefixes.is_promised(waiting) and promised.count == seen
    bench.add("second", [5] * 40)
    bench.step()
    assert prefixes.is_promised(waiting)
