"""In float64 an engine gives the tokens of `generate`, whatever it is given to do at the same time.

Requests come, share beginnings, are cancelled, pre-empted, cut into chunks and found in the cache, in any order; steps
run module by module or padded, as CUDA graphs do; answers that are wanted whole are sampled in bursts.
"""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from perilune.serve.engine import Engine
from perilune.serve.request import Output, Request, SamplingParams
from tests.serve import tiny
from tests.serve.engines import SMALL, check_nothing_is_held, finish, generated, make_engine

TRUNK = tuple((7 * n * n + 3 * n) % 250 for n in range(1, 33))
GREEDY = {"temperature": 0.0}
SEEDED = ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 20, "min_p": 0.05})


@cache
def expected(variant: str, prompt: tuple[int, ...], pictures: tuple[int, ...], settings: tuple) -> tuple[int, ...]:
    """By what a request is made of, so that one asked twice is generated once."""
    return tuple(generated(tiny.model(variant), build(prompt, pictures, settings)))


def build(prompt: tuple[int, ...], pictures: tuple[int, ...], settings: tuple, name: str = "reference") -> Request:
    tokens, media = tiny.prompt_with_pictures(prompt, pictures)
    return Request(request_id=name, prompt=tokens, media=media, params=SamplingParams(**dict(settings)))


class EngineMachine(RuleBasedStateMachine):
    variants = tuple(tiny.VARIANTS)

    @initialize(data=st.data(), asynchronous=st.booleans(), padded=st.booleans())
    def start(self, data: st.DataObject, asynchronous: bool, padded: bool) -> None:
        self.variant = data.draw(st.sampled_from(self.variants))
        config = replace(
            SMALL,
            asynchronous=asynchronous,
            num_pages=data.draw(st.integers(15, 24)),
            max_sequences=data.draw(st.integers(1, 4)),
            token_budget=data.draw(st.integers(5, 24)),
            num_snapshots=data.draw(st.integers(0, 5)),
            prefix_caching=data.draw(st.sampled_from((True, True, False))),
            burst=data.draw(st.sampled_from((1, 3, 4))),
        )
        self.engine: Engine = make_engine(tiny.model(self.variant), config, padded=padded)
        self.asked: dict[str, tuple] = {}
        self.got: dict[str, list[Output]] = {}
        self.cancelled: set[str] = set()

    @rule(
        cut=st.integers(0, len(TRUNK)),
        rest=st.lists(st.integers(0, 250), min_size=1, max_size=6),
        pictures=st.lists(st.integers(0, 2), max_size=1),
        max_tokens=st.integers(1, 14),
        how=st.sampled_from((GREEDY, *SEEDED)),
        seed=st.integers(0, 3),
        priority=st.integers(-1, 1),
        copies=st.sampled_from((1, 1, 3)),
        whole=st.sampled_from((True, True, False)),
    )
    def ask(
        self,
        cut: int,
        rest: list[int],
        pictures: list[int],
        max_tokens: int,
        how: dict[str, float],
        seed: int,
        priority: int,
        copies: int,
        whole: bool,
    ) -> None:
        shown = tuple(pictures) if self.variant == "pictures" else ()
        for copy in range(copies):
            made_of = (
                (*TRUNK[:cut], *rest),
                shown,
                tuple({"max_tokens": max_tokens, "seed": seed + copy, **how}.items()),
            )
            name = str(len(self.asked))
            self.asked[name] = made_of
            self.engine.add(replace(build(*made_of, name), priority=priority, whole=whole))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.asked:
            name = data.draw(st.sampled_from(sorted(self.asked)))
            if not (self.got.get(name) and self.got[name][-1].finished):
                self.cancelled.add(name)
            self.engine.cancel(name)

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.got.setdefault(output.request_id, []).append(output)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for outputs in finish(self.engine).values():
            self.take(outputs)
        check_nothing_is_held(self.engine)
        for name, made_of in self.asked.items():
            outputs = self.got[name]
            tokens = tuple(token for output in outputs for token in output.token_ids)
            wanted = expected(self.variant, *made_of)
            reason = outputs[-1].finish_reason
            assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
            if name in self.cancelled:
                assert reason == "cancelled" and tokens == wanted[: len(tokens)]
            else:
                assert reason in ("stop", "length") and tokens == wanted


@pytest.mark.parametrize("variant", tuple(tiny.VARIANTS))
def test_tokens_equal_generate_under_everything_at_once(variant: str) -> None:
    machine = type("Machine", (EngineMachine,), {"variants": (variant,)})
    case = machine.TestCase
    case.settings = settings(max_examples=8, stateful_step_count=14, phases=[Phase.generate])
    case("runTest").runTest()
